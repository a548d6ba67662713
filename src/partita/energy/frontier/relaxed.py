"""The relaxed problem: any duration on the lower hull of an activity's measured points.

Activities and lags are a project network in whole numbers, ready for the parametric flow.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.energy.frontier.options import Options
from partita.energy.frontier.parametric import NO_LIMIT, sweep
from partita.energy.frontier.precedence import Precedence
from partita.kernels import compiled, kernel

LONGEST = 1 << 50
"""Units of time in the longest step that can be asked for: fine enough for any profile."""
STEEPEST = 1 << 50
"""Most units of flow that stand for the steepest slope of a hull."""
FINEST = 1e9
"""Most units of flow for a watt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Events and arcs: an activity with a choice is an arc, everything else a delay between events.

    Event 0 is the start, the last one the end; arcs lead to higher events.

    Attributes:
        units_per_s: Units of time in a second.
        units_per_w: Units of flow in a watt.
        tail: Event that each arc leaves.
        head: Event that it enters.
        first: First breakpoint of each arc in ``duration`` and ``upto``.
        duration: Units of time, falling within an arc.
        upto: Flow up to which a duration holds, rising within an arc; the last without limit.
        adjacent_ptr: Arcs at event e are ``adjacent[adjacent_ptr[e]:adjacent_ptr[e + 1]]``.
        adjacent: See ``adjacent_ptr``.
        begin: Event at which each node of the precedence may begin.
        end: Event at which it has ended; the same as ``begin`` where its duration is fixed.
    """

    units_per_s: float
    units_per_w: float
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
        compiled(_earliest)(
            self.tail, self.head, duration, np.argsort(self.tail, kind="stable"), times
        )
        return times


@kernel
def _earliest(tail: Array, head: Array, duration: Array, order: Array, times: Array) -> None:
    # Arcs lead to higher events: by tail, an event's time is final before it is used.
    for arc in order:
        times[head[arc]] = max(times[head[arc]], times[tail[arc]] + duration[arc])


def network_of(precedence: Precedence, options: Options, no_limit: int) -> Network:
    """Return the network of activities; events are numbered along the arcs."""
    nodes = precedence.activity
    count = len(nodes)
    breakpoints = np.diff(options.hull_ptr)[nodes]
    variable = breakpoints > 1
    # Nodes are in topological order. A node with a choice takes two events, any other one only,
    # which keeps the network small; its duration goes into the delays of the arcs that leave it.
    begin = 1 + np.arange(count) + np.concatenate([[0], np.cumsum(variable)[:-1]])
    end = begin + variable
    last = int(end[-1]) + 1
    # As fine as it can be with room for sums of times in 64 bits.
    units_per_s = LONGEST / _slowest_s(precedence, options)
    fixed_s = np.where(variable, 0.0, options.seconds[options.hull[options.hull_ptr[:-1]]][nodes])
    # The start is tied to nodes that wait for nobody or not before a time, the end likewise.
    first_nodes = np.union1d(
        np.setdiff1d(np.arange(count), precedence.target), np.flatnonzero(precedence.release)
    )
    last_nodes = np.union1d(
        np.setdiff1d(np.arange(count), precedence.source), np.flatnonzero(precedence.tail)
    )
    # Arcs: activities with a choice, releases, lags, tails, and last one from start to end for the
    # time that no step goes below. ``plain`` has the seconds of all but the first.
    movable = np.flatnonzero(variable)
    tail = [begin[movable], np.zeros(len(first_nodes)), end[precedence.source], end[last_nodes]]
    head = [end[movable], begin[first_nodes], begin[precedence.target]]
    head.append(np.full(len(last_nodes), last))
    plain = [
        precedence.release[first_nodes],
        precedence.lag + fixed_s[precedence.source],
        precedence.tail[last_nodes] + fixed_s[last_nodes],
        np.array([precedence.floor_s]),
    ]
    tail.append(np.zeros(1))
    head.append(np.full(1, last))
    flat = np.rint(np.concatenate(plain) * units_per_s).astype(np.int64)
    hulls = _hulls(options, nodes[movable])
    steepest = max((float(hull.slopes.max()) for hull in hulls), default=0.0)
    # Slopes are in watts: joules saved for each second that an activity takes longer.
    units_per_w = min(FINEST, STEEPEST / max(steepest, 1e-9))
    # Microbatches share hulls; each is made whole once.
    parts = {id(hull): _whole(hull, units_per_s, units_per_w, no_limit) for hull in hulls}
    durations, limits = (
        zip(*(parts[id(hull)] for hull in hulls), strict=True) if hulls else ((), ())
    )
    sizes = np.concatenate([breakpoints[movable], np.ones(len(flat), dtype=np.int64)])
    tails = np.concatenate(tail).astype(np.int64)
    heads = np.concatenate(head).astype(np.int64)
    # Every arc is listed at both its events, since flow can also be taken back.
    both = np.concatenate([tails, heads])
    ptr = np.zeros(last + 2, dtype=np.int64)
    np.cumsum(np.bincount(both, minlength=last + 1), out=ptr[1:])
    return Network(
        units_per_s=units_per_s,
        units_per_w=units_per_w,
        tail=tails,
        head=heads,
        first=np.cumsum(sizes) - sizes,
        duration=np.concatenate([*durations, flat]),
        upto=np.concatenate([*limits, np.full(len(flat), no_limit)]),
        adjacent_ptr=ptr,
        adjacent=np.tile(np.arange(len(tails)), 2)[np.argsort(both, kind="stable")],
        begin=begin,
        end=end,
    )


def _slowest_s(precedence: Precedence, options: Options) -> float:
    """Return a time that no step exceeds."""
    # Everything one after the other, each at its slowest option.
    slowest = options.seconds[options.ptr[1:] - 1][precedence.activity]
    fixed = precedence.lag.sum() + precedence.release.sum() + precedence.tail.sum()
    fixed += precedence.floor_s
    return max(float(slowest.sum() + fixed), 1e-9)


class _Hull(NamedTuple):
    """Breakpoints of an activity, slowest first, and the slopes between them in watts, rising."""

    seconds: Array
    slopes: Array


def _hulls(options: Options, activities: Array) -> list[_Hull]:
    """Return the hulls of activities with a choice; those with the same are one object."""
    known: dict[tuple[int, int], _Hull] = {}
    hulls: list[_Hull] = []
    for activity in activities.tolist():
        first, last = options.hull_ptr[activity], options.hull_ptr[activity + 1]
        # Activities with the same table, whose hull also ends at the same option, have the same
        # one.
        key = (int(options.table[activity]), int(options.hull[last - 1] - options.ptr[activity]))
        if key not in known:
            rows = options.hull[first:last][::-1]
            seconds, joules = options.seconds[rows], options.joules[rows]
            known[key] = _Hull(seconds, np.diff(joules) / -np.diff(seconds))
        hulls.append(known[key])
    return hulls


def _whole(
    hull: _Hull, units_per_s: float, units_per_w: float, no_limit: int
) -> tuple[Array, Array]:
    """Return durations (falling) and flow limits (rising) of a hull in whole units."""
    limit = np.maximum.accumulate(np.rint(hull.slopes * units_per_w).astype(np.int64))
    # Rounding may make neighbours equal; limits must rise.
    limit += np.arange(len(limit))
    return np.rint(hull.seconds * units_per_s).astype(np.int64), np.append(limit, no_limit)


class Relaxed:
    """A step that is shortened from its slowest to its fastest, at least cost.

    Attributes:
        fastest_s: The shortest step.
    """

    def __init__(self, precedence: Precedence, options: Options) -> None:
        self._options = options
        self._nodes = precedence.activity
        self._network = network_of(precedence, options, NO_LIMIT)
        net = self._network
        shortest = np.append(net.first[1:], len(net.duration)) - 1
        fastest = net.longest_times(net.duration[shortest])
        self.fastest_s = float(fastest[-1]) / net.units_per_s
        self._times = net.longest_times(net.duration[net.first])
        self._flow = np.zeros(len(net.tail), dtype=np.int64)
        self._step = net.first.copy()
        self._sent = 0

    @property
    def length_s(self) -> float:
        """The length that has been reached."""
        return float(self._times[-1]) / self._network.units_per_s

    def shorten(self, until_w: float, limits: Array | None = None) -> dict[float, Array]:
        """Shorten until a second costs ``until_w`` joules.

        Args:
            until_w: The price of a second to stop at; infinite = go on to the fastest step.
            limits: Lengths, in seconds, at which durations are wanted.

        Returns:
            The duration of each node at each length that was passed, by length.
        """
        net: Network = self._network
        limits = np.zeros(0) if limits is None else np.sort(limits)[::-1]
        wanted = np.rint(limits * net.units_per_s).astype(np.int64)
        reached = np.full((len(wanted), net.num_events), -1, dtype=np.int64)
        until = NO_LIMIT if np.isinf(until_w) else int(until_w * net.units_per_w)
        if self._sent < until:
            arcs = (net.tail, net.head, net.adjacent_ptr, net.adjacent)
            costs = (net.first, net.upto, net.duration)
            state = (self._step, self._times, self._flow)
            self._sent = compiled(sweep)(*arcs, *costs, *state, wanted, reached, until, self._sent)
        known = np.flatnonzero(reached[:, 0] >= 0)
        return {float(limits[row]): self._durations(reached[row]) for row in known}

    def joules(self, seconds: Array) -> float:
        """Return the effective energy of all activities for durations of the nodes."""
        options = self._options
        position = self.positions(seconds)
        last = options.hull_ptr[self._nodes + 1] - 1
        low, high = options.hull[position], options.hull[np.minimum(position + 1, last)]
        width = options.seconds[high] - options.seconds[low]
        share = np.divide(
            seconds - options.seconds[low], width, out=np.zeros(len(seconds)), where=width > 0
        )
        energy = options.joules[low] + share * (options.joules[high] - options.joules[low])
        return float(energy.sum())

    def positions(self, seconds: Array) -> Array:
        """Return the place in ``hull`` of the slowest breakpoint within each duration."""
        options = self._options
        position: Array = options.hull_ptr[self._nodes].copy()
        last = options.hull_ptr[self._nodes + 1] - 1
        while True:
            after = np.minimum(position + 1, last)
            move = (after > position) & (options.seconds[options.hull[after]] <= seconds)
            if not bool(move.any()):
                return position
            position[move] += 1

    def _durations(self, times: Array) -> Array:
        net, options = self._network, self._options
        slowest = options.seconds[options.hull[options.hull_ptr[self._nodes + 1] - 1]]
        between = (times[net.end] - times[net.begin]) / net.units_per_s
        seconds: Array = np.where(net.begin == net.end, slowest, np.minimum(between, slowest))
        return seconds
