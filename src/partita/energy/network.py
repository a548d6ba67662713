"""A Program as a project network in whole numbers, ready for the parametric flow."""

from dataclasses import dataclass

import numpy as np

from partita.core.columns import Array
from partita.cost.dependencies import Dependencies
from partita.energy.options import Options

PICOSECONDS = 1e12
NANOWATTS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Events and arcs: a variable activity is an arc, everything else a delay between events.

    Event 0 is the start, the last one the end.

    Attributes:
        tail: Event that each arc leaves.
        head: Event that it enters.
        first: First breakpoint of each arc in ``duration`` and ``upto``.
        duration: Picoseconds, falling within an arc.
        upto: Flow up to which a duration holds, rising within an arc; the last without limit.
        adjacent_ptr: Arcs at event e are ``adjacent[adjacent_ptr[e]:adjacent_ptr[e + 1]]``.
        adjacent: See ``adjacent_ptr``.
        begin: Event at which each activity may begin.
        end: Event at which it has ended; the same as ``begin`` where its duration is fixed.
    """

    tail: Array
    head: Array
    first: Array
    duration: Array
    upto: Array
    adjacent_ptr: Array
    adjacent: Array
    begin: Array
    end: Array

    @property
    def num_events(self) -> int:
        """Number of events."""
        return len(self.adjacent_ptr) - 1

    def longest_times(self, duration: Array) -> Array:
        """Return the earliest time of each event for a duration of each arc."""
        times = np.zeros(self.num_events, dtype=np.int64)
        order = np.argsort(self.tail, kind="stable")
        pairs = zip(
            self.tail[order].tolist(),
            self.head[order].tolist(),
            duration[order].tolist(),
            strict=True,
        )
        for tail, head, length in pairs:
            times[head] = max(times[head], times[tail] + length)
        return times


def network_of(found: Dependencies, options: Options, no_limit: int) -> Network:
    """Return the network of a Program's activities; events are numbered along the arcs."""
    count = len(found)
    breakpoints = np.diff(options.hull_ptr)
    variable = breakpoints > 1
    begin = 1 + np.arange(count) + np.concatenate([[0], np.cumsum(variable)[:-1]])
    end = begin + variable
    last = int(end[-1]) + 1
    fixed_s = options.seconds[options.hull[options.hull_ptr[:-1]]]
    delay = np.where(variable, 0, np.rint(fixed_s * PICOSECONDS)).astype(np.int64)
    no_source = np.setdiff1d(np.arange(count), found.target)
    no_target = np.setdiff1d(np.arange(count), found.source)
    movable = np.flatnonzero(variable)
    tail = [begin[movable], np.zeros(len(no_source)), end[found.source], end[no_target]]
    head = [end[movable], begin[no_source], begin[found.target], np.full(len(no_target), last)]
    plain = [np.zeros(len(no_source)), delay[found.source], delay[no_target]]
    durations, limits = _breakpoints(options, movable, no_limit)
    sizes = np.concatenate([breakpoints[movable], np.ones(sum(map(len, plain)), dtype=np.int64)])
    tails = np.concatenate(tail).astype(np.int64)
    heads = np.concatenate(head).astype(np.int64)
    both = np.concatenate([tails, heads])
    by_event = np.argsort(both, kind="stable")
    ptr = np.zeros(last + 2, dtype=np.int64)
    np.cumsum(np.bincount(both, minlength=last + 1), out=ptr[1:])
    flat = np.concatenate(plain).astype(np.int64)
    return Network(
        tail=tails,
        head=heads,
        first=np.cumsum(sizes) - sizes,
        duration=np.concatenate([durations, flat]),
        upto=np.concatenate([limits, np.full(len(flat), no_limit)]),
        adjacent_ptr=ptr,
        adjacent=np.tile(np.arange(len(tails)), 2)[by_event],
        begin=begin,
        end=end,
    )


def _breakpoints(options: Options, movable: Array, no_limit: int) -> tuple[Array, Array]:
    """Return durations (falling) and flow limits (rising) of the variable activities."""
    durations: list[Array] = []
    limits: list[Array] = []
    for activity in movable.tolist():
        rows = options.hull[options.hull_ptr[activity] : options.hull_ptr[activity + 1]][::-1]
        seconds, joules = options.seconds[rows], options.joules[rows]
        slopes = np.diff(joules) / -np.diff(seconds)
        limit = np.maximum.accumulate(np.rint(slopes * NANOWATTS).astype(np.int64))
        # Rounding may make neighbours equal; limits must rise.
        limit += np.arange(len(limit))
        durations.append(np.rint(seconds * PICOSECONDS).astype(np.int64))
        limits.append(np.append(limit, no_limit))
    empty = np.zeros(0, dtype=np.int64)
    return np.concatenate([empty, *durations]), np.concatenate([empty, *limits])
