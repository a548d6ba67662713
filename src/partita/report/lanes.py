"""What the pictures share: sorts of cells, which devices are shown, and shares of a time grid."""

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.program import FIRST_COLLECTIVE, LAST_COMPUTE, Kind
from partita.core.timeline import Timeline


class Cell(IntEnum):
    """What a device does at a place of the picture."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2
    RECOMPUTE = 3
    LOAD = 4
    UPDATE = 5
    MIXED = 6
    COLLECTIVE = 7
    TRANSFER = 8
    IDLE = 9


CELL_OF: Mapping[Kind, Cell] = {
    Kind.LOAD: Cell.LOAD,
    Kind.FORWARD: Cell.FORWARD,
    Kind.RECOMPUTE: Cell.RECOMPUTE,
    Kind.BACKWARD: Cell.BACKWARD,
    Kind.BACKWARD_INPUT: Cell.BACKWARD,
    Kind.BACKWARD_WEIGHT: Cell.WEIGHT,
    Kind.UPDATE: Cell.UPDATE,
}
MEANING: Mapping[Cell, str] = {
    Cell.FORWARD: "forward",
    Cell.BACKWARD: "backward",
    Cell.WEIGHT: "weight gradient",
    Cell.RECOMPUTE: "recompute",
    Cell.LOAD: "load",
    Cell.UPDATE: "update",
    Cell.MIXED: "forward and backward",
    Cell.COLLECTIVE: "collective",
    Cell.TRANSFER: "idle, receiving",
    Cell.IDLE: "idle",
}
_SORTS = Cell.MIXED
_CELLS = np.array([CELL_OF.get(kind, Cell.COLLECTIVE) for kind in Kind])


def cell_of(timeline: Timeline, rows: Array) -> Array:
    """Return the sort of cell that each compute row is."""
    result: Array = _CELLS[timeline.kind[rows]]
    return result


def cell_numbers(timeline: Timeline) -> tuple[str, Array]:
    """Return what the numbers on cells count, and the number of each row.

    Microbatches, but stages where there is at most one microbatch.
    """
    several = len(np.unique(timeline.microbatch[timeline.microbatch >= 0])) > 1
    return ("microbatch", timeline.microbatch) if several else ("stage", timeline.stage)


class Shown(NamedTuple):
    """The devices that a picture has room for.

    Attributes:
        head: The first ones.
        hidden: Those left out, between the others.
        tail: The last ones.
    """

    head: range
    hidden: range
    tail: range


def shown_devices(num_devices: int, max_rows: int) -> Shown:
    """Return which devices are shown in at most so many rows, one of them for those left out."""
    if num_devices <= max_rows:
        return Shown(range(num_devices), range(0), range(0))
    tail = max(0, max_rows - 1) // 2
    head = max(1, max_rows - 1 - tail)
    return Shown(
        range(head), range(head, num_devices - tail), range(num_devices - tail, num_devices)
    )


def compute_rows(timeline: Timeline, device: int) -> Array:
    """Return the compute rows of a device that take time, by start."""
    rows = np.flatnonzero((timeline.device == device) & (timeline.kind <= LAST_COMPUTE))
    rows = rows[timeline.end_s[rows] > timeline.start_s[rows]]
    return rows[np.lexsort((timeline.end_s[rows], timeline.start_s[rows]))]


def column_shares(timeline: Timeline, device: int, edges: Array) -> Array:
    """Return the share of each column of time that a device spends on each sort of cell.

    Args:
        timeline: What is shown.
        device: The device.
        edges: Times between the columns, one more than there are columns.

    Returns:
        An array of (sorts of cells, columns). COLLECTIVE and TRANSFER (something on its way to the
        device) count only beside compute; MIXED is 0; IDLE is what compute leaves.
    """
    shares = np.zeros((len(Cell), len(edges) - 1))
    rows = compute_rows(timeline, device)
    start, end = _apart(timeline.start_s[rows], timeline.end_s[rows])
    cell = cell_of(timeline, rows)
    for sort in np.unique(cell).tolist():
        shares[sort] = _covered(start[cell == sort], end[cell == sort], edges)
    joint = np.flatnonzero((timeline.device == device) & (timeline.kind >= FIRST_COLLECTIVE))
    shares[Cell.COLLECTIVE] = _union(timeline.start_s[joint], timeline.end_s[joint], edges)
    coming = np.flatnonzero((timeline.peer == device) & (timeline.kind == Kind.SEND))
    shares[Cell.TRANSFER] = _union(timeline.start_s[coming], timeline.end_s[coming], edges)
    shares[Cell.IDLE] = np.maximum(0.0, 1.0 - shares[:_SORTS].sum(axis=0))
    return shares


def dominant_cells(timeline: Timeline, device: int, edges: Array) -> Array:
    """Return the sort of cell that fills each column of time best.

    Forward and backward are MIXED where at least three rows share a column. An idle column says
    what is under way; a column between two rows is idle if a fifth of it is.
    """
    shares = column_shares(timeline, device, edges)
    chosen: Array = np.argmax(shares[:_SORTS], axis=0)
    busy = shares[:_SORTS].sum(axis=0)
    rows = compute_rows(timeline, device)
    start, end = _apart(timeline.start_s[rows], timeline.end_s[rows])
    begun = np.diff(np.searchsorted(start, edges))
    crossed = np.searchsorted(start, edges) > np.searchsorted(end, edges, side="right")
    forward = shares[Cell.FORWARD] + shares[Cell.RECOMPUTE]
    backward = shares[Cell.BACKWARD] + shares[Cell.WEIGHT]
    chosen[(begun >= 2) & (np.minimum(forward, backward) > 0.2 * busy)] = Cell.MIXED
    idle = shares[Cell.IDLE] >= np.where((begun == 1) & crossed[1:] & crossed[:-1], 0.2, 0.5)
    chosen[idle] = Cell.IDLE
    chosen[idle & (shares[Cell.TRANSFER] >= 0.5)] = Cell.TRANSFER
    chosen[idle & (shares[Cell.COLLECTIVE] >= 0.5)] = Cell.COLLECTIVE
    return chosen


def _apart(start: Array, end: Array) -> tuple[Array, Array]:
    """Return intervals, sorted by start, cut so that none begins before those before it end."""
    before = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]]) if len(end) else end
    begin = np.maximum(start, before)
    return begin, np.maximum(end, begin)


def _union(start: Array, end: Array, edges: Array) -> Array:
    order = np.argsort(start, kind="stable")
    return _covered(*_apart(start[order], end[order]), edges)


def _covered(start: Array, end: Array, edges: Array) -> Array:
    """Return the share of each column that intervals, sorted and apart, cover."""
    if not len(start):
        return np.zeros(len(edges) - 1)
    times = np.stack([start, end], axis=1).ravel()
    total = np.cumsum(end - start)
    filled = np.stack([total - (end - start), total], axis=1).ravel()
    shares: Array = np.diff(np.interp(edges, times, filled)) / np.diff(edges)
    return shares


def axis_ticks(makespan_s: float, max_ticks: int) -> tuple[list[float], float, str]:
    """Return round times for an axis, how many seconds its unit has, and the unit.

    >>> axis_ticks(0.033, 5)
    ([0.0, 0.01, 0.02, 0.03], 0.001, 'ms')
    """
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    scale, unit = next(
        ((factor, name) for factor, name in units if makespan_s >= factor), (1e-9, "ns")
    )
    span = max(makespan_s / scale, 1e-12)
    raw = span / max(1, max_ticks)
    power = 10.0 ** np.floor(np.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    count = int(np.floor(span / step + 1e-9))
    return [float(f"{k * step * scale:.12g}") for k in range(count + 1)], scale, unit
