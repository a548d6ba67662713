"""The messages of a Timeline: which RECV belongs to which SEND, and who reads what it brought."""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array, derived
from partita.core.program import Kind
from partita.core.timeline import Timeline

_READERS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)


class Transfers(NamedTuple):
    """Messages of a timeline, a row each.

    Attributes:
        send: Row of the SEND.
        recv: Row of its RECV; -1 = not in the timeline.
        consumer: Row of the compute that reads what it brought; -1 = not in the timeline.
    """

    send: Array
    recv: Array
    consumer: Array


def transfers(timeline: Timeline) -> Transfers:
    """Return the messages of a timeline, in the order of their SENDs.

    Both ends of a pair of devices list their messages in one order, so the k-th SEND of a
    microbatch belongs to its k-th RECV. A RECV is read by the next forward or backward of its
    stage and microbatch in the list of its device.
    """
    return derived(timeline, "transfers", lambda: _transfers(timeline))


def _transfers(timeline: Timeline) -> Transfers:
    send = np.flatnonzero(timeline.kind == Kind.SEND)
    recv = np.flatnonzero(timeline.kind == Kind.RECV)
    recv = recv[timeline.peer[recv] >= 0]
    ends = np.concatenate([send, recv])
    here, there = timeline.device[ends], timeline.peer[ends]
    out = np.arange(len(ends)) < len(send)
    source, target = np.where(out, here, there), np.where(out, there, here)
    channel = _numbered(source, target, timeline.microbatch[ends])
    of_send, of_recv = np.split(channel, [len(send)])
    span = len(ends) + 1
    at_send = of_send * span + _place(of_send, timeline.instruction[send])
    at_recv = of_recv * span + _place(of_recv, timeline.instruction[recv])
    partner = _looked_up(at_recv, recv, at_send)
    consumer = np.full(len(send), -1, dtype=np.int64)
    found = partner >= 0
    consumer[found] = _consumers(timeline, partner[found])
    return Transfers(send, partner, consumer)


def _numbered(*columns: Array) -> Array:
    """Return a small number for each distinct combination of values."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for values in columns:
        _, rank = np.unique(values, return_inverse=True)
        _, number = np.unique(number * (len(values) + 1) + rank, return_inverse=True)
    return number


def _place(group: Array, key: Array) -> Array:
    """Return the place of each row within its group, by key and then by row."""
    order = np.lexsort((key, group))
    begins = np.ones(len(group), dtype=bool)
    begins[1:] = np.diff(group[order]) != 0
    first = np.maximum.accumulate(np.where(begins, np.arange(len(group)), 0))
    place = np.empty(len(group), dtype=np.int64)
    place[order] = np.arange(len(group)) - first
    return place


def _looked_up(keys: Array, values: Array, wanted: Array) -> Array:
    """Return the value of each wanted key; -1 = there is none."""
    if not len(keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(keys)
    at = order[np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)]
    return np.where(keys[at] == wanted, values[at], -1)


def _consumers(timeline: Timeline, recv: Array) -> Array:
    """Return the compute row that reads what each RECV brought; -1 = none."""
    compute = np.flatnonzero(np.isin(timeline.kind, _READERS))
    if not len(compute):
        return np.full(len(recv), -1, dtype=np.int64)
    rows = np.concatenate([compute, recv])
    cell = _numbered(timeline.device[rows], timeline.stage[rows], timeline.microbatch[rows])
    position = cell * (int(timeline.instruction[rows].max()) + 1) + timeline.instruction[rows]
    mine, theirs = np.split(position, [len(compute)])
    order = np.argsort(mine, kind="stable")
    next_one = np.searchsorted(mine[order], theirs, side="right")
    reader = order[np.minimum(next_one, len(compute) - 1)]
    same = (next_one < len(compute)) & (cell[: len(compute)][reader] == cell[len(compute) :])
    return np.where(same, compute[reader], -1)
