"""Points between two good ones: the first microbatches run as in one, the others as in the other.

Between two clocks that are far apart the relaxed problem counts on something in between that no
clock gives, and rounding each activity down wastes it. Over many microbatches the same mean is
reached in time: some run as in a faster point, the rest as in a slower one, all stages alike, so
that no stage waits for another but where the two meet. That reaches about the straight line between
the two points, which is cheaper where the point that rounding found lies above it.
"""

from collections.abc import Sequence

import numpy as np

from partita.core.columns import Array
from partita.energy.frontier.rounding import (
    TOLERANCE,
    Draft,
    Web,
    fastest_draft,
    longest_s,
    spend_slack,
)


def lower_hull(time_s: Sequence[float], energy_j: Sequence[float]) -> list[int]:
    """Return the points that lie on no line above two others; times ascend."""
    hull: list[int] = []
    for i, (time, energy) in enumerate(zip(time_s, energy_j, strict=True)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            rise = (energy_j[b] - energy_j[a]) * (time - time_s[a])
            if rise < (energy - energy_j[a]) * (time_s[b] - time_s[a]):
                break
            hull.pop()
        hull.append(i)
    return hull


def mixed(web: Web, fast: Draft, slow: Draft, limit_s: float) -> Draft:
    """Return the cheaper of two mixes: as many microbatches as the limit allows run slowly.

    Args:
        web: The columns.
        fast: A draft that is in time.
        slow: One that is cheaper.
        limit_s: The step must end by then.
    """
    limit_s *= 1 + TOLERANCE
    drafts = []
    for place in (web.place, web.place.max() - web.place):
        draft = fastest_draft(web)
        _take_slow(web, draft, (fast.choice, slow.choice), place, limit_s)
        spend_slack(web, draft, limit_s, False)
        drafts.append(draft)
    return min(drafts, key=lambda draft: float(web.joules[draft.choice].sum()))


def _take_slow(
    web: Web, draft: Draft, choices: tuple[Array, Array], place: Array, limit_s: float
) -> None:
    """Give the activities of the lowest places the slow choice: as many places as fit."""
    fast, slow = choices
    fits, too_many = 0, int(place.max()) + 2
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        draft.choice[:] = np.where(place < middle, slow, fast)
        if longest_s(web, draft) <= limit_s:
            fits = middle
        else:
            too_many = middle
    draft.choice[:] = np.where(place < fits, slow, fast)
