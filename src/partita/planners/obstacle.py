"""Why nothing fits, in one line: the op, the cluster or the rules that stand in the way.

A planner says what its sets of ops need and what its devices have, by the memory rule that it
searches under (``Needs``). Which limit is missed, where and by how much is said here for all.
"""

import math
from dataclasses import dataclass

import numpy as np

from partita.core.columns import Array, Flags
from partita.core.problem import Problem
from partita.units import format_bytes

_ROUNDED = 1e-9
"""Share by which a sum of bytes may exceed a sum of limits through rounding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Needs:
    """What must be placed, and the room that there is, by one memory rule.

    A *unit* is a set of ops that stay together.

    Attributes:
        problem: The problem.
        unit_of: ``[op]``: its unit; -1 = it is not placed by itself.
        unit_bytes: ``[unit]``: bytes that a unit needs at the least, alone on a device.
        devices: Devices that may be used, as numbers of the cluster.
        limit_bytes: ``[device]``: bytes that each may use.
        may: ``[device, unit]``: whether a device may run a unit.
        total_bytes: Bytes that all units hold at the least, on all devices together.
        room_bytes: Bytes that all devices have for that together; ``None`` = their limits.
        counted: What ``unit_bytes`` counts, in words; empty = it goes without saying.
        held: What ``total_bytes`` counts, in words.
        remedy: What would do where it is too much.
    """

    problem: Problem
    unit_of: Array
    unit_bytes: Array
    devices: Array
    limit_bytes: Array
    may: Flags
    total_bytes: float
    room_bytes: float | None = None
    counted: str = ""
    held: str = "the ops"
    remedy: str = "use more memory or more devices"

    def name(self, device: int) -> str:
        """Return the name of one of the devices."""
        return self.problem.cluster.device_names[int(self.devices[device])]


def places(problem: Problem, unit_of: Array, num_units: int) -> Flags:
    """Return ``[unit, device of the cluster]``: whether the device may run all ops of the unit."""
    row_of, matrix = problem.allowed
    may = np.ones((num_units, len(problem.cluster)), dtype=bool)
    inside = np.flatnonzero(unit_of >= 0)
    np.logical_and.at(may, unit_of[inside], matrix[row_of[inside]])
    return may


def no_device(problem: Problem, ops: Array) -> str:
    """Return that no device may run some ops that must share one."""
    names = problem.graph.ops.names
    first, *others = (names[op] for op in ops.tolist())
    more = f" and {len(others)} that must share its device, such as {others[0]!r}" if others else ""
    return f"no device may run op {first!r}{more}"


def obstacle(needs: Needs) -> str:
    """Return which limit every plan misses, where and by how much; empty where that is not plain.

    It is a proof, as far as the needs are the least there can be.
    """
    barred = np.flatnonzero(~needs.may.any(axis=0))
    if len(barred):
        return no_device(needs.problem, np.flatnonzero(needs.unit_of == barred[0]))
    return _too_large(needs) or _too_much(needs)


def _too_large(needs: Needs) -> str:
    """Return which unit no device that may run it can hold; empty if there is none."""
    room = np.where(needs.may, needs.limit_bytes[:, None], -np.inf)
    over = needs.unit_bytes - room.max(axis=0)
    unit = int(np.argmax(over))
    if over[unit] <= 0:
        return ""
    graph, best = needs.problem.graph, int(np.argmax(room[:, unit]))
    ops = np.flatnonzero(needs.unit_of == unit)
    held = graph.size_bytes[ops]
    others = f" with the {len(ops) - 1} ops that must share its device" if len(ops) > 1 else ""
    counted = f" ({needs.counted})" if needs.counted else ""
    return (
        f"op {graph.ops.names[int(ops[np.argmax(held)])]!r}{others} needs "
        f"{format_bytes(float(needs.unit_bytes[unit]))}{counted}, "
        f"{format_bytes(float(over[unit]))} more than the limit of "
        f"{format_bytes(float(room[best, unit]))} of {needs.name(best)!r}, the largest device that "
        "may run it"
    )


def _too_much(needs: Needs) -> str:
    """Return by how much all units exceed all devices together; empty if they do not."""
    room = float(needs.limit_bytes.sum()) if needs.room_bytes is None else needs.room_bytes
    if needs.total_bytes <= room * (1 + _ROUNDED):
        return ""
    count = len(needs.devices)
    whole = f"device {needs.name(0)!r} may use"
    if count > 1:
        ends = f"{needs.name(0)!r} to {needs.name(count - 1)!r}"
        whole = f"all {count} devices ({ends}) may use together"
    return (
        f"{needs.held} need {format_bytes(needs.total_bytes)}, "
        f"{format_bytes(needs.total_bytes - room)} more than {whole}; {needs.remedy}"
    )


def unfound(needs: Needs, what: str, *, by_rules: bool | None = None) -> str:
    """Return what a search was up against that found nothing, though no single limit tells why.

    Args:
        needs: What was to be placed.
        what: What was looked for, such as ``"pipeline"``.
        by_rules: Whether it is where ops may run that leaves nothing; ``None`` = it is where the
            smallest device has room for everything.
    """
    smallest, count = int(np.argmin(needs.limit_bytes)), len(needs.devices)
    limit = float(needs.limit_bytes[smallest])
    if by_rules is None:
        by_rules = needs.total_bytes <= limit
    if by_rules or math.isinf(limit):
        free = needs.may.sum(axis=0)
        unit = int(np.argmin(free))
        op = needs.problem.graph.ops.names[int(np.argmax(needs.unit_of == unit))]
        device = needs.name(int(np.argmax(needs.may[:, unit])))
        return (
            f"op {op!r} may run on {int(free[unit])} of {count} devices, such as {device!r}, and "
            f"no {what} was found that does for all ops; relax the rules"
        )
    return (
        f"no {what} over {count} devices keeps {needs.name(smallest)!r} within "
        f"{format_bytes(limit)}, with {format_bytes(needs.total_bytes)} to hold in all; use more "
        "memory, more devices, smaller microbatches or recomputation"
    )
