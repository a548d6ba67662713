"""Milliseconds of foreign files to our seconds, and back to the number that a person wrote.

``ms / 1000`` rounds, so the way back is not a multiplication: of the doubles that give the same
seconds the shortest decimal is taken, ``0.679`` and not ``0.6790000000000001``. Two doubles in a
hundred are the seconds of no double of milliseconds (an estimate, say, that never was a file);
they are written as the nearest that is.
"""

import math

MS_PER_S = 1000.0


def seconds(ms: float) -> float:
    """Return seconds for milliseconds."""
    return ms / MS_PER_S


def milliseconds(value_s: float) -> float:
    """Return the shortest number of milliseconds that reads back as these seconds.

    ``milliseconds(seconds(milliseconds(x))) == milliseconds(x)`` for every ``x``.

    >>> milliseconds(seconds(0.679))
    0.679
    """
    found = _shortest(value_s)
    if found is None:
        found = _shortest(seconds(value_s * MS_PER_S))
    return value_s * MS_PER_S if found is None else found


def _shortest(value_s: float) -> float | None:
    """Return the shortest decimal among the doubles that give these seconds, if there is one."""
    middle = value_s * MS_PER_S
    for digits in (12, 15):
        short = float(f"{middle:.{digits}g}")
        if seconds(short) == value_s:
            return short
    below, above = math.nextafter(middle, 0.0), math.nextafter(middle, math.inf)
    near = [ms for ms in (below, middle, above) if seconds(ms) == value_s]
    return min(near, key=lambda ms: len(repr(ms)), default=None)
