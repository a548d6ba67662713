"""What each activity of a Program may choose: its clocks, and the lower hull of their costs.

The energy of a step is ``sum e + sum over devices P (T - busy)``, P the power of a device that
waits. So an instruction is charged ``e - P t``, its *effective* energy, and the step ``sum P T``.
A clock counts if no other is both faster and cheaper in effective energy.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.energy import EnergyProfile
from partita.core.program import LAST_COMPUTE, Program
from partita.cost.dependencies import Dependencies


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The choices of all activities, columns of options; those of activity i together.

    Activities with one option have no clock to set.

    Attributes:
        ptr: Options of activity i are rows ``ptr[i]`` to ``ptr[i + 1]``, faster first.
        seconds: Duration.
        joules: Effective energy, of all devices that take part.
        clock_mhz: The clock; 0 = none is set.
        hull_ptr: Breakpoints of activity i are ``hull[hull_ptr[i]:hull_ptr[i + 1]]``.
        hull: Options on the lower hull of (seconds, joules), faster first.
        blocking_w: Power of all devices together while they wait.
    """

    ptr: Array
    seconds: Array
    joules: Array
    clock_mhz: Array
    hull_ptr: Array
    hull: Array
    blocking_w: float


def options_of(
    program: Program,
    found: Dependencies,
    profile: EnergyProfile,
    device_types: tuple[str, ...],
    seconds: Array,
    *,
    top_only: bool = False,
) -> Options:
    """Return the choices of every activity.

    Args:
        program: The Program.
        found: Its activities.
        profile: Seconds and joules by clock.
        device_types: Type of each device of the Program.
        seconds: Duration of each row where the profile says nothing.
        top_only: Whether only the highest clock of each counts.
    """
    powers = np.array([profile.blocking_power_w(name) for name in device_types])
    kept = np.flatnonzero(found.activity >= 0)
    members = np.bincount(found.activity[kept], minlength=len(found)).tolist()
    longest = np.zeros(len(found))
    np.maximum.at(longest, found.activity[kept], seconds[kept])
    tables: dict[tuple[int, int, int, int], _Table] = {}
    parts: list[_Table] = []
    for activity, row in enumerate(found.row.tolist()):
        device, kind = int(program.device[row]), int(program.kind[row])
        key = (int(program.stage[row]), kind, device, members[activity])
        if key not in tables:
            rows = profile.rows_of(key[0], kind, device_types[device])
            if kind > LAST_COMPUTE:
                rows = rows[:0]
            elif top_only and len(rows):
                rows = rows[[np.argmax(profile.clock_mhz[rows])]]
            tables[key] = _choices(profile, rows, members[activity], powers[device])
        table = tables[key]
        parts.append(table if len(table.rows) else _only(longest[activity]))
    ptr = np.concatenate([[0], np.cumsum([len(part.rows) for part in parts])])
    columns = np.concatenate([part.rows for part in parts])
    return Options(
        ptr=ptr,
        seconds=columns[:, 0].copy(),
        joules=columns[:, 1].copy(),
        clock_mhz=columns[:, 2].copy(),
        hull_ptr=np.concatenate([[0], np.cumsum([len(part.hull) for part in parts])]),
        hull=np.concatenate(
            [part.hull + first for part, first in zip(parts, ptr[:-1].tolist(), strict=True)]
        ),
        blocking_w=float(powers.sum()),
    )


class _Table(NamedTuple):
    """Options of one kind of activity, ``(seconds, joules, clock)`` a row, and their hull."""

    rows: Array
    hull: Array


def _only(seconds: float) -> _Table:
    """Return the single option of an activity without a clock; its devices draw blocking power."""
    return _Table(np.array([[seconds, 0.0, 0.0]]), np.zeros(1, np.int64))


def _choices(profile: EnergyProfile, rows: Array, members: int, blocking_w: float) -> _Table:
    """Return the clocks that count, faster first, and which of them lie on the lower hull."""
    seconds = profile.seconds[rows]
    joules = (profile.joules[rows] - blocking_w * seconds) * members
    table = np.stack([seconds, joules, profile.clock_mhz[rows]], axis=1)
    table = table[np.lexsort((-table[:, 2], table[:, 1], table[:, 0]))]
    if len(table):
        cheaper = np.minimum.accumulate(table[:, 1])
        table = table[np.concatenate([[True], table[1:, 1] < cheaper[:-1]])]
    return _Table(table, _lower_hull(table[:, 0], table[:, 1]))


def _lower_hull(x: Array, y: Array) -> Array:
    """Return the points of a falling curve on its lower convex hull."""
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(i)
    return np.array(hull, dtype=np.int64)
