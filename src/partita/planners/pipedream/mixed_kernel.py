"""The test of a period for stages on any devices of one server with mixed classes."""

from partita.kernels import Column, kernel

PERIOD, RATE, FACTOR, WEIGHTED, STRAIGHT, FEWER = range(6)
"""Places of the options."""


@kernel
def choose_devices(  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917 (one pass, no calls)
    options: Column,
    ptr: Column,
    to: Column,
    seconds: Column,
    trained: Column,
    version: Column,
    fixed: Column,
    cut: Column,
    entering: Column,
    digits: Column,
    total: Column,
    limit: Column,
    allowed: Column,
    fits: Column,
    reached: Column,
    via: Column,
    taken: Column,
) -> None:
    """Fill in which choices of devices can run what lies above each ideal.

    A choice is a number of devices of each class, ``digits[c * kinds + k]`` of class k,
    ``total[c]`` in all; choices are numbered so that those of two disjoint sets of devices add up.
    ``limit`` is the least memory in a choice. ``reached[i * choices + c]`` becomes 1 where the
    devices of c run all above ideal i; ``via`` is the ideal after the next stage, ``taken`` its
    devices.

    Sums by ideal, so that a difference belongs to a stage: ``seconds[k * ideals + i]`` on class k,
    ``trained`` bytes, ``version`` bytes for each minibatch in flight, ``fixed`` bytes. ``cut`` and
    ``entering`` are bytes at an ideal. ``fits`` is scratch by choice: 0 = the stage does not keep
    the period there, 1 = it does, 2 = it does with a device less, too.
    """
    period, rate, factor = options[PERIOD], options[RATE], options[FACTOR]
    weighted, straight, fewer = options[WEIGHTED] > 0, options[STRAIGHT] > 0, options[FEWER] > 0
    ideals, choices = len(cut), len(total)
    kinds = len(digits) // choices
    last = ideals - 1
    reached[last * choices] = 1
    # From the top down: what runs above ``high`` is known when a stage below it is added.
    for low in range(last - 1, -1, -1):
        for pair in range(ptr[low], ptr[low + 1]):
            high = to[pair]
            # Share of the period that all bytes of the larger cut take on one link, both ways.
            load = 2 * max(cut[low], cut[high]) / (rate * period)
            extra = (trained[high] - trained[low]) * factor / rate
            each = version[high] - version[low] + entering[low]
            once = fixed[high] - fixed[low]
            # First, which choices keep the period with this stage; this does not depend on the
            # rest.
            for choice in range(1, choices):
                size = total[choice]
                fits[choice] = 0
                if (straight and size > 1) or allowed[size] != size:
                    continue
                speed, slowest, quickest = 0.0, 0.0, 1e300
                for kind in range(kinds):
                    number = digits[choice * kinds + kind]
                    if number > 0:
                        work = seconds[kind * ideals + high] - seconds[kind * ideals + low]
                        slowest = max(slowest, work)
                        quickest = min(quickest, work)
                        speed += number / work if work > 0 else 1e300
                # Equal shares wait for the slowest; weighted ones all take the same time, and the
                # quickest device has the largest share, and so the most traffic.
                share = 1 / size
                spent = slowest / size
                if weighted and quickest > 0:
                    spent = 1 / speed
                    share = spent / quickest
                if load * share > 1 or spent + extra * (size - 1) / size / size > period:
                    continue
                fits[choice] = 1
                if fewer:
                    # A choice with one device less of some class leaves more to the others.
                    # The numbers are in a mixed radix; ``step`` is that of one device of the class.
                    # Smaller choices have lower numbers and are known.
                    step = 1
                    for kind in range(kinds):
                        number = digits[choice * kinds + kind]
                        if number > 0 and choice - step > 0 and fits[choice - step] > 0:
                            fits[choice] = 2
                        step *= digits[(choices - 1) * kinds + kind] + 1
            # Then, which of them go together with the devices of the stages after. Sums beyond the
            # last choice would use more devices than there are.
            for after in range(choices):
                if reached[high * choices + after] == 0:
                    continue
                for choice in range(1, choices - after):
                    if fits[choice] != 1 or reached[low * choices + after + choice] == 1:
                        continue
                    # A digit over its class would carry into the next one.
                    free = True
                    for kind in range(kinds):
                        both = digits[after * kinds + kind] + digits[choice * kinds + kind]
                        if both > digits[(choices - 1) * kinds + kind]:
                            free = False
                            break
                    # 1F1B: minibatches in flight on a replica of a stage with so many devices after
                    # it.
                    flying = -(-total[after] // total[choice]) + 1
                    if free and each * flying + once <= limit[choice]:
                        state = low * choices + after + choice
                        reached[state] = 1
                        via[state] = high
                        taken[state] = choice
