"""What each activity of a Program may choose: its clocks, and the lower hull of their costs.

The energy of a step is ``sum e + sum over devices P (T - busy)``, P the power of a device that
waits. So an instruction is charged ``e - P t``, its *effective* energy, and the step ``sum P T``.
A clock counts if no other is both faster and cheaper in effective energy.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.energy import EnergyProfile
from partita.core.program import LAST_COMPUTE, Program
from partita.program.dependencies import Dependencies

SAME_TIME = 1e-9
"""Options whose times differ by less, relatively, are equally fast: measured, they are not told
apart, and the slope between them would drown all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The choices of all activities, columns of options; those of activity i together.

    Activities with one option have no clock to set.

    Attributes:
        ptr: Options of activity i are rows ``ptr[i]`` to ``ptr[i + 1]``, faster first.
        seconds: Duration.
        joules: Effective energy, of all devices that take part.
        clock_mhz: The clock; 0 = none is set.
        table: Activities with the same options have one number.
        hull_ptr: Breakpoints of activity i are ``hull[hull_ptr[i]:hull_ptr[i + 1]]``.
        hull: Options on the lower hull of (seconds, joules), faster first.
        blocking_w: Power of all devices together while they wait.
    """

    ptr: Array
    seconds: Array
    joules: Array
    clock_mhz: Array
    table: Array
    hull_ptr: Array
    hull: Array
    blocking_w: float

    def within(self, room_s: Array) -> "Options":
        """Return the same options with the hulls of those that fit into a room.

        A plan in which an activity never has more than its room cannot use slower options; without
        them hulls are higher, and what is relaxed comes closer to what is real. The fastest option
        always counts.

        Args:
            room_s: The longest duration that each activity can have.
        """
        known: dict[tuple[int, int], Array] = {}
        hulls: list[Array] = []
        firsts = self.ptr[:-1].tolist()
        counts = _fitting(self, room_s).tolist()
        for first, count, table in zip(firsts, counts, self.table.tolist(), strict=True):
            key = (table, count)
            if key not in known:
                rows = slice(first, first + count)
                known[key] = _lower_hull(self.seconds[rows], self.joules[rows])
            hulls.append(known[key] + first)
        return replace(
            self,
            hull_ptr=np.concatenate([[0], np.cumsum([len(hull) for hull in hulls])]),
            hull=np.concatenate(hulls),
        )


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
    kept = np.flatnonzero(found.activity >= 0)
    teams = _teams(program, found, device_types, kept)
    longest = np.zeros(len(found))
    np.maximum.at(longest, found.activity[kept], seconds[kept])
    tables: dict[tuple[int, int, _Team], _Table] = {}
    parts: list[_Table] = []
    numbers: dict[bytes, int] = {}
    for activity, row in enumerate(found.row.tolist()):
        key = (int(program.stage[row]), int(program.kind[row]), teams[activity])
        if key not in tables:
            tables[key] = _choices(profile, *key, top_only=top_only)
        table = tables[key]
        parts.append(table if len(table.rows) else _only(longest[activity]))
    ptr = np.concatenate([[0], np.cumsum([len(part.rows) for part in parts])])
    columns = np.concatenate([part.rows for part in parts])
    return Options(
        ptr=ptr,
        seconds=columns[:, 0].copy(),
        joules=columns[:, 1].copy(),
        clock_mhz=columns[:, 2].copy(),
        table=np.array([numbers.setdefault(part.rows.tobytes(), len(numbers)) for part in parts]),
        hull_ptr=np.concatenate([[0], np.cumsum([len(part.hull) for part in parts])]),
        hull=np.concatenate(
            [part.hull + first for part, first in zip(parts, ptr[:-1].tolist(), strict=True)]
        ),
        blocking_w=sum(profile.blocking_power_w(name) for name in device_types),
    )


def _fitting(options: Options, room_s: Array) -> Array:
    """Return how many options of each activity fit into its room, at least one."""
    owner = np.repeat(np.arange(len(room_s)), np.diff(options.ptr))
    fits = options.seconds <= room_s[owner]
    fits[options.ptr[:-1]] = True
    return np.bincount(owner[fits], minlength=len(room_s))


class _Table(NamedTuple):
    """Options of one kind of activity, ``(seconds, joules, clock)`` a row, and their hull."""

    rows: Array
    hull: Array


def _only(seconds: float) -> _Table:
    """Return the single option of an activity without a clock; its devices draw blocking power."""
    return _Table(np.array([[seconds, 0.0, 0.0]]), np.zeros(1, np.int64))


_Team = tuple[tuple[str, int], ...]
"""The devices of an activity: each type with how many there are of it."""


def _teams(
    program: Program, found: Dependencies, device_types: tuple[str, ...], kept: Array
) -> list[_Team]:
    """Return the devices that take part in each activity; ``kept`` = rows of activities."""
    types = sorted(set(device_types))
    type_of = np.array([types.index(name) for name in device_types])
    cells = found.activity[kept] * len(types) + type_of[program.device[kept]]
    counts = np.bincount(cells, minlength=len(found) * len(types)).reshape(-1, len(types))
    return [
        tuple((name, count) for name, count in zip(types, row, strict=True) if count)
        for row in counts.tolist()
    ]


def _choices(
    profile: EnergyProfile, stage: int, kind: int, team: _Team, *, top_only: bool
) -> _Table:
    """Return the clocks that count, faster first, and which of them lie on the lower hull.

    All devices of a team run at one clock, so it has those that all its types have; the slowest
    member says how long it takes, and the others wait for it.
    """
    found = [_by_clock(profile, stage, kind, name) for name, _ in team]
    clocks = sorted(set.intersection(*(set(each) for each in found)))
    if top_only:
        clocks = clocks[-1:]
    table = np.zeros((len(clocks), 3))
    for row, clock in enumerate(clocks):
        figures = [each[clock] for each in found]
        table[row] = (
            max(seconds for seconds, _ in figures),
            sum(
                count * (joules - profile.blocking_power_w(name) * seconds)
                for (name, count), (seconds, joules) in zip(team, figures, strict=True)
            ),
            clock,
        )
    table = _worthwhile(table[np.lexsort((-table[:, 2], table[:, 1], table[:, 0]))])
    return _Table(table, _lower_hull(table[:, 0], table[:, 1]))


def _by_clock(
    profile: EnergyProfile, stage: int, kind: int, device_type: str
) -> dict[float, tuple[float, float]]:
    """Return seconds and joules by clock of an instruction on a type of device."""
    if kind > LAST_COMPUTE:
        return {}
    return {
        float(profile.clock_mhz[row]): (float(profile.seconds[row]), float(profile.joules[row]))
        for row in profile.rows_of(stage, kind, device_type)
    }


def _worthwhile(table: Array) -> Array:
    """Return the options, faster first, that no other beats; of equally fast ones the cheapest."""
    kept: list[int] = []
    for row, (seconds, joules, _) in enumerate(table.tolist()):
        if kept and joules >= table[kept[-1], 1]:
            continue
        if kept and seconds <= table[kept[-1], 0] * (1 + SAME_TIME):
            kept.pop()
        kept.append(row)
    return table[kept]


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
