"""From the durations of the relaxed problem to a real clock for every activity.

The relaxed durations lie between two measured clocks. Three ways to round, each followed by a pass
that hands the slack that is left to whoever can use it:

* *down*: the slowest clock within the relaxed duration; always in time.
* *carried*: in topological order, the slowest clock that ends by the relaxed end; what one
  activity leaves over helps the next.
* *dithered*: activities of one kind take the slower neighbour as often as the relaxed duration
  says, spread evenly along a device and shifted from device to device (error diffusion); then
  activities on the critical path are sped up, the cheapest second first, until the step is in time.

The cheapest result is kept. A pass is O(activities + edges); dithering is repeated over a few
shifts and densities.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from partita.core.columns import Array
from partita.cost.dependencies import Dependencies
from partita.cost.kernels import csr
from partita.energy.options import Options

SHIFTS = (0.0, 1 / 8, 1 / 3, 0.382, 0.618)
DENSITIES = (1.0, 0.9, 0.75, 0.5)
SLACK_S = 1e-11
"""Times that differ by less are equal: relaxed times are whole picoseconds."""


class Rounder(NamedTuple):
    """What rounding needs of a Program, as plain columns.

    Attributes:
        succ_ptr: Successors of activity i are ``succ[succ_ptr[i]:succ_ptr[i + 1]]``.
        succ: See ``succ_ptr``.
        team: Activities of one kind on one device, a number each.
        shift: Place of the team's device, 0 on.
        options: The choices.
    """

    succ_ptr: Array
    succ: Array
    team: Array
    shift: Array
    options: Options


def rounder_of(found: Dependencies, options: Options, device: Array, kind: Array) -> Rounder:
    """Return the columns for rounding; device and kind are those of each activity."""
    ptr, targets = csr(found.source, found.target, len(found))
    pairs = np.stack([device.astype(np.int64), kind.astype(np.int64)])
    teams, team = np.unique(pairs, axis=1, return_inverse=True)
    return Rounder(ptr, targets, team.ravel().astype(np.int64), teams[0], options)


def round_clocks(rounder: Rounder, seconds: Array, end_s: Array, limit_s: float) -> Array:
    """Return the option of each activity: cheap, and in time.

    Args:
        rounder: The Program's columns.
        seconds: Relaxed duration of each activity.
        end_s: Relaxed end of each activity.
        limit_s: The step must end by then.
    """
    options = rounder.options
    count = len(seconds)
    scratch = (np.zeros(count), np.zeros(count))
    best = _down(rounder, seconds)
    _spend_slack(rounder, best, limit_s, scratch)
    tries = [_carried(rounder, end_s)]
    for shift in SHIFTS:
        for density in DENSITIES:
            choice = _dithered(rounder, seconds, shift, density)
            if _in_time(rounder, choice, limit_s, scratch):
                tries.append(choice)
    least = float(options.joules[best].sum())
    for choice in tries:
        _spend_slack(rounder, choice, limit_s, scratch)
        joules = float(options.joules[choice].sum())
        if joules < least:
            best, least = choice, joules
    return best


def _down(rounder: Rounder, seconds: Array) -> Array:
    options = rounder.options
    choice = options.ptr[:-1].copy()
    _slowest_within(options.ptr, options.seconds, seconds + SLACK_S, choice)
    return choice


def _carried(rounder: Rounder, end_s: Array) -> Array:
    options = rounder.options
    choice = options.ptr[:-1].copy()
    start = np.zeros(len(choice))
    _fill(
        *(rounder.succ_ptr, rounder.succ, options.ptr, options.seconds),
        *(end_s + SLACK_S, choice, start),
    )
    return choice


def _dithered(rounder: Rounder, seconds: Array, shift: float, density: float) -> Array:
    options = rounder.options
    choice = options.ptr[:-1].copy()
    debt = (rounder.shift * shift) % 1.0
    _dither(
        *(options.hull_ptr, options.hull, options.seconds, rounder.team),
        *(seconds, density, debt, choice),
    )
    return choice


def _in_time(rounder: Rounder, choice: Array, limit_s: float, scratch: tuple[Array, Array]) -> bool:
    options = rounder.options
    return bool(
        _speed_up(
            *(rounder.succ_ptr, rounder.succ, options.ptr, options.seconds, options.joules),
            *(choice, limit_s + SLACK_S, *scratch),
        )
    )


def _spend_slack(
    rounder: Rounder, choice: Array, limit_s: float, scratch: tuple[Array, Array]
) -> None:
    options = rounder.options
    start, latest = scratch
    for _ in range(2):
        _latest_ends(
            rounder.succ_ptr, rounder.succ, options.seconds, choice, limit_s + SLACK_S, latest
        )
        _fill(
            *(rounder.succ_ptr, rounder.succ, options.ptr, options.seconds),
            *(latest, choice, start),
        )


@njit(cache=True)
def _slowest_within(ptr: Array, seconds: Array, room: Array, choice: Array) -> None:
    """Move every choice to the slowest option within its room."""
    for i in range(len(choice)):
        while choice[i] + 1 < ptr[i + 1] and seconds[choice[i] + 1] <= room[i]:
            choice[i] += 1


@njit(cache=True)
def _fill(
    succ_ptr: Array,
    succ: Array,
    ptr: Array,
    seconds: Array,
    deadline: Array,
    choice: Array,
    start: Array,
) -> None:
    """Run the activities as early as they can, each as slow as its deadline allows."""
    start[:] = 0.0
    for i in range(len(choice)):
        while choice[i] + 1 < ptr[i + 1] and start[i] + seconds[choice[i] + 1] <= deadline[i]:
            choice[i] += 1
        end = start[i] + seconds[choice[i]]
        for k in range(succ_ptr[i], succ_ptr[i + 1]):
            start[succ[k]] = max(start[succ[k]], end)


@njit(cache=True)
def _latest_ends(
    succ_ptr: Array, succ: Array, seconds: Array, choice: Array, limit: float, latest: Array
) -> None:
    """Fill ``latest`` with when each activity must end for the step to end by the limit."""
    for i in range(len(choice) - 1, -1, -1):
        latest[i] = limit
        for k in range(succ_ptr[i], succ_ptr[i + 1]):
            latest[i] = min(latest[i], latest[succ[k]] - seconds[choice[succ[k]]])


@njit(cache=True)
def _dither(  # noqa: PLR0913, PLR0917 (columns of a kernel)
    hull_ptr: Array,
    hull: Array,
    seconds: Array,
    team: Array,
    wanted: Array,
    density: float,
    debt: Array,
    choice: Array,
) -> None:
    """Choose one of the two hull options around each wanted duration, the error carried along."""
    for i in range(len(choice)):
        a = hull_ptr[i]
        while a + 1 < hull_ptr[i + 1] and seconds[hull[a + 1]] <= wanted[i] + SLACK_S:
            a += 1
        if a + 1 < hull_ptr[i + 1]:
            below, above = seconds[hull[a]], seconds[hull[a + 1]]
            debt[team[i]] += density * max(0.0, (wanted[i] - below) / (above - below))
            if debt[team[i]] >= 1.0:
                debt[team[i]] -= 1.0
                a += 1
        choice[i] = hull[a]


@njit(cache=True)
def _speed_up(  # noqa: PLR0913, PLR0917 (columns of a kernel)
    succ_ptr: Array,
    succ: Array,
    ptr: Array,
    seconds: Array,
    joules: Array,
    choice: Array,
    limit: float,
    start: Array,
    latest: Array,
) -> bool:
    """Speed up critical activities, the cheapest second first, until the step is in time."""
    count = len(choice)
    for _ in range(4 * count):
        start[:] = 0.0
        length = 0.0
        for i in range(count):
            end = start[i] + seconds[choice[i]]
            length = max(length, end)
            for k in range(succ_ptr[i], succ_ptr[i + 1]):
                start[succ[k]] = max(start[succ[k]], end)
        if length <= limit:
            return True
        _latest_ends(succ_ptr, succ, seconds, choice, length, latest)
        best, option, least = -1, -1, np.inf
        for i in range(count):
            now = choice[i]
            if latest[i] - start[i] - seconds[now] > SLACK_S:
                continue
            for faster in range(ptr[i], now):
                saved = min(seconds[now] - seconds[faster], length - limit)
                price = (joules[faster] - joules[now]) / max(saved, 1e-15)
                if price < least:
                    best, option, least = i, faster, price
        if best < 0:
            return False
        choice[best] = option
    return False
