"""The least number of something that is enough, found with few tries."""

from collections.abc import Callable

ONE_BY_ONE = 12
"""Numbers that are tried one by one; more are halved first."""


def least_number(
    is_enough: Callable[[int], bool], exists: Callable[[int], bool], *, first: int = 1
) -> int | None:
    """Return the least number that is enough; None where none that exists is.

    The number doubles until it is enough; then those in between are tried, by halves while they
    are many, else one by one. More need not always be enough where less is: then the number that
    is returned is enough, but may not be the least.

    Args:
        is_enough: Whether a number is.
        exists: Whether there is such a number; not above one that does not exist.
        first: Where to begin, 1 or more.
    """
    low, high = first - 1, first
    while exists(high):
        if is_enough(high):
            break
        low, high = high, 2 * high
    else:
        return None
    while high - low > ONE_BY_ONE:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return next((number for number in range(low + 1, high) if is_enough(number)), high)
