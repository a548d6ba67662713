"""The relaxed problem: any duration on the lower hull of an activity's measured points."""

import numpy as np

from partita.core.columns import Array
from partita.energy.frontier.network import Network, network_of
from partita.energy.frontier.options import Options
from partita.energy.frontier.parametric import NO_LIMIT, sweep
from partita.energy.frontier.precedence import Precedence
from partita.kernels import compiled


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
