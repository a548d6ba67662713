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
    """
    period, rate, factor = options[PERIOD], options[RATE], options[FACTOR]
    weighted, straight, fewer = options[WEIGHTED] > 0, options[STRAIGHT] > 0, options[FEWER] > 0
    ideals, choices = len(cut), len(total)
    kinds = len(digits) // choices
    last = ideals - 1
    reached[last * choices] = 1
    for low in range(last - 1, -1, -1):
        for pair in range(ptr[low], ptr[low + 1]):
            high = to[pair]
            load = 2 * max(cut[low], cut[high]) / (rate * period)
            extra = (trained[high] - trained[low]) * factor / rate
            each = version[high] - version[low] + entering[low]
            once = fixed[high] - fixed[low]
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
                    step = 1
                    for kind in range(kinds):
                        number = digits[choice * kinds + kind]
                        if number > 0 and choice - step > 0 and fits[choice - step] > 0:
                            fits[choice] = 2
                        step *= digits[(choices - 1) * kinds + kind] + 1
            for after in range(choices):
                if reached[high * choices + after] == 0:
                    continue
                for choice in range(1, choices - after):
                    if fits[choice] != 1 or reached[low * choices + after + choice] == 1:
                        continue
                    free = True
                    for kind in range(kinds):
                        both = digits[after * kinds + kind] + digits[choice * kinds + kind]
                        if both > digits[(choices - 1) * kinds + kind]:
                            free = False
                            break
                    flying = -(-total[after] // total[choice]) + 1
                    if free and each * flying + once <= limit[choice]:
                        state = low * choices + after + choice
                        reached[state] = 1
                        via[state] = high
                        taken[state] = choice
