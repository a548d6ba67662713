"""Loops over pairs of ideals, written to run on lists (small inputs) and compiled on arrays.

A kernel indexes its arguments and nothing else; results go to the arguments after the inputs.
Options come as a column of numbers. Ideals ascend by size, so that every pair leads upwards.
"""

from partita.kernels import Column, kernel


@kernel
def list_pairs(sets: Column, words: Column, ptr: Column, to: Column) -> None:
    """List for each ideal the larger ideals that contain it.

    ``sets`` has ``words[0]`` words of 64 bits for each ideal. The ideals that contain ideal i go to
    ``to[ptr[i]:ptr[i + 1]]``; such a pair is a stage, the ops between the two.
    """
    width = words[0]
    count = len(ptr) - 1
    found = 0
    for low in range(count):
        ptr[low] = found
        # Ideals ascend by size, so that only later ones can contain this one.
        for high in range(low + 1, count):
            inside = True
            for word in range(width):
                mine = sets[low * width + word]
                if mine & sets[high * width + word] != mine:
                    inside = False
                    break
            if inside:
                to[found] = high
                found += 1
    ptr[count] = found


@kernel
def live_cuts(  # noqa: PLR0913, PLR0917 (a kernel takes columns)
    sets: Column,
    words: Column,
    bit: Column,
    source: Column,
    ptr: Column,
    pins: Column,
    size: Column,
    cut: Column,
) -> None:
    """Sum the sizes of the nets whose source is inside an ideal and some pin is not.

    ``bit[b]`` is the word with bit b alone. Pins of net n are ``pins[ptr[n]:ptr[n + 1]]``; ``size``
    and ``cut`` are in bytes.
    """
    width = words[0]
    for ideal in range(len(cut)):
        base = ideal * width
        total = 0.0
        for net in range(len(source)):
            first = source[net]
            if sets[base + first // 64] & bit[first % 64] == 0:
                continue
            # A net is sent once, however many of its pins are outside.
            for place in range(ptr[net], ptr[net + 1]):
                pin = pins[place]
                if sets[base + pin // 64] & bit[pin % 64] == 0:
                    total += size[net]
                    break
        cut[ideal] = total


@kernel
def least_replicas(  # noqa: PLR0913, PLR0917 (a kernel takes columns)
    options: Column,
    ptr: Column,
    to: Column,
    work: Column,
    trained: Column,
    cut: Column,
    sync: Column,
    forced: Column,
    one: Column,
    more: Column,
) -> None:
    """Fill in with how many replicas each stage keeps within a period.

    A stage of r replicas takes ``(work + trained sync[r]) / r``, a cut of b bytes asks
    ``r >= (2 b / period - spare) / rate`` of both its stages. ``one`` says whether one replica
    does, ``more`` the least number from 2 on. ``options`` are the period, the rate, the spare rate,
    and how many copies share work, reductions and cuts.
    """
    period, rate, spare, copies = options[0], options[1], options[2], options[3]
    most = len(sync) - 1
    last = len(cut) - 1
    for ideal in range(len(cut)):
        exact = max(0.0, (2 * cut[ideal] / (copies * period) - spare) / rate)
        # Capped before it becomes a whole number: a cut may ask for any multiple of the devices.
        # The tolerance keeps a quotient that is whole but for rounding from asking for one more.
        least = int(min(exact, most + 1.0))
        forced[ideal] = least + 1 if least < exact * (1 - 1e-12) else least
    for low in range(last):
        for pair in range(ptr[low], ptr[low + 1]):
            high = to[pair]
            seconds = (work[high] - work[low]) / copies
            reduced = (trained[high] - trained[low]) / copies
            needed = max(forced[low], forced[high])
            one[pair] = 1 if needed <= 1 and seconds + reduced * sync[1] <= period else 0
            # Work alone needs this many; reductions do not fall evenly with the replicas, so go up
            # from there.
            count = max(2, needed, int(min(seconds / period, most + 1.0)))
            while count <= most and seconds + reduced * sync[count] > count * period:
                count += 1
            more[pair] = count


@kernel
def fewest_devices(  # noqa: PLR0913, PLR0917 (a kernel takes columns)
    options: Column,
    ptr: Column,
    to: Column,
    one: Column,
    more: Column,
    versions: Column,
    allowed: Column,
    need: Column,
    via: Column,
    replicas: Column,
) -> None:
    """Fill in the fewest devices for what lies above each ideal, and the first stage to take there.

    ``versions[pair]`` minibatches fit in memory at once; a stage with L devices after it keeps
    ceil(L / r) + 1. Fewer devices after a stage are never worse, so that one number an ideal does.
    ``allowed[r]`` is the least permitted number of replicas from r on. ``options`` are the most
    devices, and whether only one replica is permitted. Ties go to the larger stage.
    """
    most, straight = options[0], options[1]
    last = len(need) - 1
    # ``need`` is final above an ideal before it is used, as pairs lead upwards.
    need[last] = 0
    for low in range(last - 1, -1, -1):
        best = most + 1
        # From the largest stage down: only a smaller number replaces what was found.
        for pair in range(ptr[low + 1] - 1, ptr[low] - 1, -1):
            high = to[pair]
            after = need[high]
            # The stage itself takes one device at least.
            if after + 1 >= best or versions[pair] < 1:
                continue
            count = 1 if one[pair] else more[pair]
            # Memory: ceil(after / count) + 1 minibatches in flight must fit, which asks for after /
            # slots replicas. From two replicas on the period is kept by ``more`` only.
            slots = versions[pair] - 1
            if after > 0:
                if slots < 1:
                    continue
                if after > slots * count:
                    count = max(more[pair], -(-after // slots))
            if count > 1 and straight:
                continue
            count = allowed[min(count, most + 1)]
            if after + count < best:
                best = after + count
                via[low] = high
                replicas[low] = count
        need[low] = best
