"""Loops of the released optimizer: bytes of its cuts, and its recurrence; see ``pipedream``."""

from partita.kernels import Column, kernel

START, UNITS, RATE, AMORTISED, COMPRESSION, FEWER, STRAIGHT, LIMIT = range(8)
"""Places of the options; a compression of 0 stands for free transfers."""


@kernel
def released_cuts(  # noqa: PLR0913, PLR0917 (a kernel takes columns)
    succ_ptr: Column,
    succ: Column,
    size: Column,
    sets: Column,
    bit: Column,
    words: Column,
    above: Column,
    out: Column,
) -> None:
    """Sum the outputs of the augmented antichain of each ideal.

    It holds the maximal nodes, and every node two of whose successors do not lie below the same
    maximal nodes (a successor outside the ideal lies below none). ``above`` holds these sets.
    """
    width = words[0]
    for ideal in range(len(out)):
        maximal = 0
        total = 0.0
        for node in range(len(size) - 1, -1, -1):
            base = node * width
            for word in range(width):
                above[base + word] = 0
            if sets[ideal * width + node // 64] & bit[node % 64] == 0:
                continue
            covered, same = False, True
            for edge in range(succ_ptr[node], succ_ptr[node + 1]):
                other, first = succ[edge] * width, succ[succ_ptr[node]] * width
                for word in range(width):
                    if above[other + word] != above[first + word]:
                        same = False
                    if above[other + word] != 0:
                        covered = True
                    above[base + word] |= above[other + word]
            if not covered:
                above[base + maximal // 64] |= bit[maximal % 64]
                maximal += 1
            if not covered or not same:
                total += size[node]
        out[ideal] = total


@kernel
def released_level(  # noqa: C901, PLR0912, PLR0913, PLR0917 (one pass, no calls)
    options: Column,
    within: Column,
    seconds: Column,
    parameter: Column,
    kept: Column,
    out: Column,
    stage: Column,
    value: Column,
    via: Column,
    taken: Column,
) -> None:
    """Fill in the best period from one state to every other, by units used.

    ``within[i * states + j]`` says whether j follows i, ``seconds`` is the time of that stage on
    one unit. ``value[j * (units + 1) + m]`` is the period of m units, ``via`` the state before the
    last stage, ``taken`` its units.
    """
    start, units = int(options[START]), int(options[UNITS])
    rate, compression, limit = options[RATE], options[COMPRESSION], options[LIMIT]
    fewer, straight = options[FEWER] > 0, options[STRAIGHT] > 0
    states = len(out)
    row = units + 1
    # States ascend along the model, so that value[middle] is final when a higher state reads it.
    for high in range(start + 1, states):
        if within[start * states + high] == 0:
            continue
        # One stage from start to high: bytes of its parameters, and of what a unit keeps for each
        # microbatch in flight. 1e300 = it does not fit.
        own = parameter[high] - parameter[start]
        load = kept[high] - kept[start]
        for used in range(1, row):
            best = 1e300
            if used == 1 or not straight:
                # As released: four passes over the parameters, amortised in the first stage alone,
                # and ceil(units after / units of the stage) microbatches in flight.
                sync = 4 * (used - 1) * own / (rate * used) / options[AMORTISED]
                if -(-(units - used) // used) * load <= limit:
                    best = (seconds[start * states + high] + sync) / used
            value[high * row + used] = best
            via[high * row + used] = start
            taken[high * row + used] = used
        for middle in range(start + 1, high):
            if within[start * states + middle] == 0 or within[middle * states + high] == 0:
                continue
            own = parameter[high] - parameter[middle]
            load = kept[high] - kept[middle]
            # stage[more]: seconds of the last stage, middle to high, on that many units, with the
            # transfers at both of its ends; the model's own end sends nothing.
            width = 1 if straight else units - 1
            for more in range(1, width + 1):
                sync = 4 * (more - 1) * own / (rate * more)
                worst = (seconds[middle * states + high] + sync) / more
                if compression > 0:
                    worst = max(worst, 2 * out[middle] / (rate * more * compression))
                    if high < states - 1:
                        worst = max(worst, 2 * out[high] / (rate * more * compression))
                stage[more] = worst
            # The period is that of the slowest stage; a tie keeps what was found first.
            for used in range(2, row):
                best = value[high * row + used]
                for more in range(1, min(width, used - 1) + 1):
                    worst = max(value[middle * row + used - more], stage[more])
                    if worst < best and -(-(units - used) // more) * load <= limit:
                        best = worst
                        value[high * row + used] = best
                        via[high * row + used] = middle
                        taken[high * row + used] = more
        # With ``fewer``, units may stay unused: a period is never worse than that of one unit less.
        if fewer:
            for used in range(2, row):
                if value[high * row + used - 1] < value[high * row + used]:
                    value[high * row + used] = value[high * row + used - 1]
                    via[high * row + used] = via[high * row + used - 1]
                    taken[high * row + used] = taken[high * row + used - 1]
