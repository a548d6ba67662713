"""Where each row of a Timeline is drawn in a trace: its process, its thread, its lane.

A host is a process; compute, messages out, messages in and collectives of a device are threads.
"""

from dataclasses import dataclass

import numpy as np

from partita.core.columns import Array
from partita.core.program import LAST_COMPUTE, Kind
from partita.core.timeline import Timeline
from partita.report.transfers import transfers

_COMPUTE, _OUT, _IN, _COLLECTIVE = range(4)
_TRACK_NAMES = ("{}", "{} out", "{} in", "{} collectives")


@dataclass(frozen=True, slots=True)
class Tracks:
    """Where everything is drawn.

    Attributes:
        hosts: Names of the processes; process p has the number p + 1.
        host_of: The process of each device.
        leaf: The name of each device within its host.
        names: Name and device of each thread, in order; numbers follow those of the processes.
        rows: Rows that are slices, by thread and time.
        thread: The thread of each of them.
    """

    hosts: tuple[str, ...]
    host_of: tuple[int, ...]
    leaf: tuple[str, ...]
    names: tuple[tuple[str, int], ...]
    rows: Array
    thread: Array


def tracks(timeline: Timeline) -> Tracks:
    """Return where the rows of a timeline are drawn, in which slices of a thread never overlap."""
    parts = [name.rpartition("/") for name in timeline.devices]
    hosts = tuple(dict.fromkeys(host for host, _, _ in parts))
    number_of = {host: number for number, host in enumerate(hosts)}
    host_of = tuple(number_of[host] for host, _, _ in parts)
    leaf = tuple(name for _, _, name in parts)
    paired = np.zeros(len(timeline), dtype=bool)
    partner = transfers(timeline).recv
    paired[partner[partner >= 0]] = True
    rows = np.flatnonzero(~paired)
    kind = timeline.kind[rows]
    group = np.full(len(rows), _COLLECTIVE)
    group[kind <= LAST_COMPUTE] = _COMPUTE
    group[kind == Kind.SEND] = _OUT
    group[kind == Kind.RECV] = _IN
    place = timeline.device[rows].astype(np.int64) * 4 + group
    start_ns, end_ns = nanoseconds(timeline.start_s[rows]), nanoseconds(timeline.end_s[rows])
    order = np.lexsort((timeline.instruction[rows], end_ns, start_ns, place))
    lane = _lanes(place[order], start_ns[order], end_ns[order])
    span = int(lane.max()) + 1 if len(lane) else 1
    idle = np.setdiff1d(np.arange(len(parts)) * 4, place) * span
    tracks = np.concatenate([place[order] * span + lane, idle])
    used, thread = np.unique(tracks, return_inverse=True)
    names = []
    for code, number in (divmod(track, span) for track in used.tolist()):
        name = _TRACK_NAMES[code % 4].format(leaf[code // 4])
        names.append((f"{name} {number + 1}" if number else name, code // 4))
    thread = thread[: len(rows)]
    by_thread = np.argsort(thread, kind="stable")
    return Tracks(hosts, host_of, leaf, tuple(names), rows[order][by_thread], thread[by_thread])


def _lanes(place: Array, start: Array, end: Array) -> Array:
    """Return the first lane of its place that is free at each row's start; rows by place, start."""
    lane = np.zeros(len(place), dtype=np.int64)
    clash = np.flatnonzero((place[1:] == place[:-1]) & (start[1:] < end[:-1]))
    for crowded in np.unique(place[clash]).tolist():
        first, last = np.searchsorted(place, [crowded, crowded + 1])
        free: list[int] = []
        times = zip(start[first:last].tolist(), end[first:last].tolist(), strict=True)
        for row, (begin, finish) in enumerate(times, first):
            number = next((k for k, until in enumerate(free) if until <= begin), len(free))
            free[number : number + 1] = [finish]
            lane[row] = number
    return lane


def nanoseconds(seconds: Array) -> Array:
    """Return seconds as whole nanoseconds, the grid of the viewers."""
    return np.rint(seconds * 1e9).astype(np.int64)
