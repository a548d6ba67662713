"""The time-energy frontier of a Program.

Perseus (SOSP '24) slows down what is not on the critical path. Here the trade-off is solved
exactly: the relaxed problem, on the lower hulls of the measured points, by a parametric flow
(``parametric.py``), from the fastest step to the one of least energy or to the slowest, then a
real clock for every instruction (``rounding.py``). Every point that is returned was simulated with
the profile's own figures: the time and the energy that it claims are those.

Where the reference differs: it fits an exponential to each kind of instruction, counts time in
whole units rounded down, and walks through every unit of time. None of that is needed.
"""

from dataclasses import dataclass

import numpy as np

from partita.core.cluster import Cluster
from partita.core.columns import Array
from partita.core.energy import EnergyProfile, Frontier
from partita.core.program import Program
from partita.cost.dependencies import Dependencies, dependencies
from partita.cost.simulate import play
from partita.energy.network import NANOWATTS, PICOSECONDS, Network, network_of
from partita.energy.options import Options, options_of
from partita.energy.parametric import NO_LIMIT, sweep
from partita.energy.rounding import round_clocks, rounder_of
from partita.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyModel:
    """A Program with the clocks that its instructions may run at.

    Attributes:
        program: The Program.
        cluster: The machines it runs on.
        profile: Seconds and joules by clock.
        device_types: Type of each device of the Program.
        seconds: Duration of each row where the profile says nothing.
        found: The activities and who waits for whom.
        options: The choices of every activity.
    """

    program: Program
    cluster: Cluster
    profile: EnergyProfile
    device_types: tuple[str, ...]
    seconds: Array
    found: Dependencies
    options: Options

    def simulated_s(self, seconds: Array) -> float:
        """Return the length of a step in which each activity takes the given seconds."""
        rows = np.where(self.found.activity >= 0, seconds[self.found.activity], self.seconds)
        return play(self.program, self.cluster, rows).makespan_s

    def realised(self, choice: Array) -> tuple[float, float]:
        """Return simulated seconds and joules of a step with an option for each activity."""
        length = self.simulated_s(self.options.seconds[choice])
        return length, float(self.options.joules[choice].sum()) + self.options.blocking_w * length

    def clocks(self, choice: Array) -> Array:
        """Return the clock of every row of the Program; 0 = none is set."""
        activity = self.found.activity
        return np.where(activity >= 0, self.options.clock_mhz[choice[activity]], 0.0)

    def all_max(self) -> tuple[float, float]:
        """Return seconds and joules of a step with every clock at its highest."""
        top = options_of(
            self.program, self.found, self.profile, self.device_types, self.seconds, top_only=True
        )
        length = self.simulated_s(top.seconds)
        return length, float(top.joules.sum()) + top.blocking_w * length


def energy_model(
    program: Program, cluster: Cluster, profile: EnergyProfile, seconds: Array
) -> EnergyModel:
    """Return the model of a Program.

    Args:
        program: The Program.
        cluster: The machines it runs on.
        profile: Seconds and joules by clock.
        seconds: Duration of each row, for those that the profile does not know.

    Raises:
        InvalidInputError: The profile knows no instruction of the Program, or not the power of a
            device that waits.
    """
    types = tuple(cluster.devices[cluster.index_of[name]].type for name in program.devices)
    found = dependencies(program, cluster, play(program, cluster, seconds))
    options = options_of(program, found, profile, types, seconds)
    if not bool((options.clock_mhz > 0).any()):
        raise InvalidInputError(
            f"energy profile {profile.name!r} knows no instruction of this program; it has stages "
            f"0 to {profile.num_stages - 1}, the program 0 to {program.num_stages - 1}"
        )
    return EnergyModel(
        program=program,
        cluster=cluster,
        profile=profile,
        device_types=types,
        seconds=seconds,
        found=found,
        options=options,
    )


def solve_frontier(model: EnergyModel, *, points: int = 50, to_slowest: bool = False) -> Frontier:
    """Return the frontier of a Program.

    Args:
        model: The Program with its clocks.
        points: Number of points, at equal distances in time; fewer where they coincide.
        to_slowest: Whether to go beyond the step of least energy, to the slowest useful clocks.

    Raises:
        InvalidInputError: The number of points is not positive.
    """
    if points < 1:
        raise InvalidInputError(f"points is {points}; expected 1 or more")
    relaxed = _Relaxed(model)
    if to_slowest:
        limits = np.linspace(relaxed.fastest_s, relaxed.length_s, points)
        found = relaxed.shorten(model.options.blocking_w, limits)
        best_s = relaxed.length_s
        found |= relaxed.shorten(np.inf, limits)
    else:
        relaxed.shorten(model.options.blocking_w)
        best_s = relaxed.length_s
        limits = np.linspace(relaxed.fastest_s, best_s, points)
        found = relaxed.shorten(np.inf, limits)
    return _realise(model, relaxed, found, best_s)


class _Relaxed:
    """The relaxed problem, shortened step by step; event times in picoseconds."""

    def __init__(self, model: EnergyModel) -> None:
        self.options = model.options
        self.network = network_of(model.found, model.options, NO_LIMIT)
        ends = np.append(self.network.first[1:], len(self.network.duration)) - 1
        shortest = self.network.longest_times(self.network.duration[ends])
        self.fastest_s = float(shortest[-1]) / PICOSECONDS
        self.times = self.network.longest_times(self.network.duration[self.network.first])
        self.flow = np.zeros(len(self.network.tail), dtype=np.int64)
        self.step = self.network.first.copy()
        self.sent = 0

    @property
    def length_s(self) -> float:
        """The length that has been reached."""
        return float(self.times[-1]) / PICOSECONDS

    def shorten(self, until_w: float, limits: Array | None = None) -> dict[float, Array]:
        """Shorten until a second costs ``until_w`` joules; return event times at the limits."""
        net: Network = self.network
        limits = np.zeros(0) if limits is None else limits
        wanted = np.rint(np.sort(limits)[::-1] * PICOSECONDS).astype(np.int64)
        reached = np.full((len(wanted), net.num_events), -1, dtype=np.int64)
        until = NO_LIMIT if np.isinf(until_w) else int(until_w * NANOWATTS)
        if self.sent < until:
            arcs = (net.tail, net.head, net.adjacent_ptr, net.adjacent)
            costs = (net.first, net.upto, net.duration)
            state = (self.step, self.times, self.flow)
            self.sent = sweep(*arcs, *costs, *state, wanted, reached, until, self.sent)
        known = reached[:, 0] >= 0
        return dict(zip((wanted[known] / PICOSECONDS).tolist(), reached[known], strict=True))

    def durations(self, times: Array) -> tuple[Array, Array]:
        """Return the relaxed duration and end of each activity for event times."""
        slowest = self.options.seconds[self.options.hull[self.options.hull_ptr[1:] - 1]]
        begin, end = times[self.network.begin], times[self.network.end]
        between = (end - begin) / PICOSECONDS
        fixed = self.network.begin == self.network.end
        seconds = np.where(fixed, slowest, np.minimum(between, slowest))
        return seconds, np.where(fixed, begin / PICOSECONDS + slowest, end / PICOSECONDS)

    def joules(self, seconds: Array) -> float:
        """Return the effective energy on the hulls for durations."""
        options = self.options
        position = _hull_position(options, seconds)
        low, high = options.hull[position], options.hull[np.minimum(position + 1, self._last)]
        width = options.seconds[high] - options.seconds[low]
        share = np.divide(
            seconds - options.seconds[low], width, out=np.zeros(len(seconds)), where=width > 0
        )
        energy = options.joules[low] + share * (options.joules[high] - options.joules[low])
        return float(energy.sum())

    @property
    def _last(self) -> Array:
        return self.options.hull_ptr[1:] - 1


def _hull_position(options: Options, seconds: Array) -> Array:
    """Return the place in ``hull`` of the slowest breakpoint within each duration."""
    position = options.hull_ptr[:-1].copy()
    last = options.hull_ptr[1:] - 1
    while True:
        after = np.minimum(position + 1, last)
        move = (after > position) & (options.seconds[options.hull[after]] <= seconds)
        if not bool(move.any()):
            return position
        position[move] += 1


def _realise(
    model: EnergyModel, relaxed: _Relaxed, found: dict[float, Array], best_s: float
) -> Frontier:
    """Return the frontier with real clocks; points that another one beats are left out."""
    program, rows = model.program, model.found.row
    rounder = rounder_of(model.found, model.options, program.device[rows], program.kind[rows])
    points: list[tuple[float, float, float, Array]] = []
    for limit_s, times in sorted(found.items()):
        seconds, end_s = relaxed.durations(times)
        choice = round_clocks(rounder, seconds, end_s, limit_s)
        length, energy = model.realised(choice)
        bound = relaxed.joules(seconds) + model.options.blocking_w * length
        points.append((length, energy, min(bound, energy), model.clocks(choice)))
    points.sort(key=lambda point: point[:2])
    kept = [point for i, point in enumerate(points) if not i or point[1] < _least(points[:i])]
    all_max_s, all_max_j = model.all_max()
    return Frontier(
        devices=program.devices,
        num_instructions=len(program),
        time_s=np.array([point[0] for point in kept]),
        energy_j=np.array([point[1] for point in kept]),
        bound_j=np.array([point[2] for point in kept]),
        clock_mhz=np.concatenate([point[3] for point in kept]),
        all_max_s=all_max_s,
        all_max_j=all_max_j,
        fastest_s=relaxed.fastest_s,
        best_s=best_s,
        origin=model.profile.origin,
    )


def _least(points: list[tuple[float, float, float, Array]]) -> float:
    return min(point[1] for point in points)
