"""The time-energy frontier of a Program.

Perseus (SOSP '24) slows down what is not on the critical path. Here the trade-off is solved
exactly: the relaxed problem, on the lower hulls of the measured points, by a parametric flow
(``parametric.py``), from the fastest step to the one of least energy or to the slowest, then a
real clock for every instruction (``rounding.py``, ``improve.py``). Every point that
is returned was simulated with the profile's own figures: the time and the energy that it claims are
those.

Between few clocks no plan may be near the relaxed problem's step of least energy, T*, and a slower
or faster one may be the cheapest of all. Where the cheapest point is far from its bound, the
relaxed problem says between which times a plan that needs less can lie, and some of these are
tried as well.

The bound of a point comes from the relaxed problem. Where the gap to it is large, options that no
plan of that time can use are left out and the relaxed problem is solved once more: near the fastest
step many slow clocks fit nowhere, though the hull counts on them.

Where the reference differs: it fits an exponential to each kind of instruction, counts time in
whole units rounded down, and walks through every unit of time. None of that is needed.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from partita.core.cluster import Cluster
from partita.core.columns import Array
from partita.core.energy import TIE, EnergyProfile, Frontier
from partita.core.program import Program
from partita.energy.frontier.improve import improve
from partita.energy.frontier.options import Options, options_of
from partita.energy.frontier.precedence import Precedence, precedence_of
from partita.energy.frontier.relaxed import Relaxed
from partita.energy.frontier.rounding import (
    TOLERANCE,
    Draft,
    Web,
    fastest_draft,
    longest_s,
    lower_hull,
    mixed,
    round_down,
    set_times,
    spend_slack,
    web_of,
)
from partita.errors import InvalidInputError
from partita.kernels import compiled
from partita.program.dependencies import Dependencies, dependencies
from partita.program.simulate import play, step_lengths

TRIES = 40_000
"""Groups of activities that the search for better clocks tries, over all points of a frontier."""
SMALL_GAP = 0.002
"""A point that is no further from its bound is good enough."""
WIDE_GAP = 0.006
"""Points that are still further from their bounds are searched once more."""
AROUND = 12
"""Times on each side of T* that are tried where the cheapest point is far from its bound."""
SEEN = 1 << 22
"""Most times of events that are kept at once to choose these times from."""
CROWDED = 0.01
"""Share of activities whose relaxed duration counts on options that cannot be used, from which the
relaxed problem is solved once more without them."""


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

    def simulated_s(self, seconds: Array, switching_s: Array | float = 0.0) -> Array:
        """Return the lengths of steps, a row each, for the seconds that each activity takes.

        Args:
            seconds: A row for each step.
            switching_s: Seconds that each row of the Program waits for its clock, likewise.
        """
        activity = self.found.activity
        rows = np.where(activity >= 0, seconds[:, activity], self.seconds)
        return step_lengths(self.program, self.cluster, rows + switching_s)

    def realised(self, choices: Array) -> tuple[Array, Array]:
        """Return simulated seconds and joules of steps, a row each, for options of activities."""
        switching_s: Array | float = 0.0
        if self.profile.switch_s:
            clocks = np.stack([self.clocks(choice) for choice in choices])
            switching_s = self.profile.switch_s * clock_changes(self.program, clocks)
        lengths = self.simulated_s(self.options.seconds[choices], switching_s)
        joules = self.options.joules[choices].sum(axis=1)
        return lengths, joules + self.options.blocking_w * lengths

    def clocks(self, choice: Array) -> Array:
        """Return the clock of every row of the Program; 0 = none is set."""
        activity = self.found.activity
        return np.where(activity >= 0, self.options.clock_mhz[choice[activity]], 0.0)

    def all_max(self) -> tuple[float, float]:
        """Return seconds and joules of a step with every clock at its highest."""
        top = options_of(
            self.program, self.found, self.profile, self.device_types, self.seconds, top_only=True
        )
        length = float(self.simulated_s(top.seconds[None])[0])
        return length, float(top.joules.sum()) + top.blocking_w * length


def clock_changes(program: Program, clocks: Array) -> Array:
    """Return which rows of a Program begin with another clock than their device had before.

    Steps follow one another: the first row of a device comes after its last one.

    Args:
        program: The Program.
        clocks: A row for each step, the clock of each row of the Program; 0 = the one before stays.
    """
    changes = np.zeros(clocks.shape)
    for first, last in itertools.pairwise(program.ptr.tolist()):
        for plan, row in enumerate(clocks[:, first:last]):
            places = np.flatnonzero(row > 0)
            changes[plan, first + places] = row[places] != np.roll(row[places], 1)
    return changes


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
    if not bool(profile.joules.any()):
        raise InvalidInputError(
            f"every energy of profile {profile.name!r} is 0; expected joules that were measured"
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


def solve_frontier(
    model: EnergyModel,
    *,
    points: int = 50,
    to_slowest: bool = False,
    at: Sequence[float] = (),
    tries: int = TRIES,
) -> Frontier:
    """Return the frontier of a Program.

    Args:
        model: The Program with its clocks.
        points: Number of points, at equal distances in time; fewer where they coincide, and one
            more where a step around T* is found that needs less than all of them.
        to_slowest: Whether to go beyond the step of least energy, to the slowest useful clocks.
        at: Further times, in seconds, at which a point is wanted; those outside are left out.
        tries: How long to search for better clocks where the gap to the bound is large: half of
            it at the fastest point, the rest at the others in proportion to their gaps; as many
            again go to points that are still far from their bounds. 0 = do not search.

    Raises:
        InvalidInputError: The number of points is not positive.
    """
    if points < 1:
        raise InvalidInputError(f"points is {points}; expected 1 or more")
    precedence = precedence_of(model.program, model.found, model.options)
    relaxed = Relaxed(precedence, model.options)
    if to_slowest:
        limits = _limits(relaxed.fastest_s, relaxed.length_s, points, at)
        found = relaxed.shorten(model.options.blocking_w, limits)
        best_s = relaxed.length_s
        found |= relaxed.shorten(np.inf, np.union1d(limits, [best_s]))
    else:
        relaxed.shorten(model.options.blocking_w)
        best_s = relaxed.length_s
        limits = _limits(relaxed.fastest_s, best_s, points, at)
        found = relaxed.shorten(np.inf, limits)
    rounding = _Rounding(model, precedence, relaxed)
    candidates = [rounding.rounded(limit_s, found[limit_s]) for limit_s in sorted(found)]
    rounding.improve(candidates, tries)
    cheaper = rounding.cheaper(candidates, best_s, tries)
    if cheaper is not None:
        candidates = sorted([*candidates, cheaper], key=lambda candidate: candidate.limit_s)
    return _frontier(model, rounding, candidates, best_s, to_slowest=to_slowest)


def _limits(fastest_s: float, slowest_s: float, points: int, at: Sequence[float]) -> Array:
    """Return the times at which points are wanted: at equal distances, and some that were asked."""
    asked = [time_s for time_s in at if fastest_s < time_s < slowest_s]
    return np.union1d(np.linspace(fastest_s, slowest_s, points), asked)


@dataclass(slots=True, kw_only=True)
class _Candidate:
    """A point that is being made; energies are effective ones.

    Attributes:
        limit_s: The step must end by then.
        wanted_s: Relaxed duration of each node.
        relaxed_j: Energy of the relaxed problem.
        bound_j: No plan within the limit needs less.
        draft: Options of the nodes.
        ever_j: Of a point that is slower than T*: no plan needs less with the time that it takes,
            however slow; NaN = the point is none of these.
    """

    limit_s: float
    wanted_s: Array
    relaxed_j: float
    bound_j: float
    draft: Draft
    ever_j: float = math.nan


class _Rounding:
    """Rounds points of the relaxed problem, and improves those that are far from their bounds."""

    def __init__(self, model: EnergyModel, precedence: Precedence, relaxed: Relaxed) -> None:
        self.model = model
        self.precedence = precedence
        self.relaxed = relaxed
        self.web: Web = web_of(model.program, model.found, precedence, model.options)
        self.fastest_s = max(longest_s(self.web, fastest_draft(self.web)), precedence.floor_s)
        others = np.ones(len(model.found), dtype=bool)
        others[precedence.activity] = False
        firsts = model.options.ptr[:-1][others]
        self.others_j = float(model.options.joules[firsts].sum())
        """Energy of the activities without a choice."""

    def rounded(self, limit_s: float, wanted_s: Array) -> _Candidate:
        """Return a point with real clocks."""
        joules = self.relaxed.joules(wanted_s)
        limit_s = max(limit_s, self.fastest_s)
        draft = round_down(self.web, wanted_s, limit_s)
        return _Candidate(
            limit_s=limit_s, wanted_s=wanted_s, relaxed_j=joules, bound_j=joules, draft=draft
        )

    def improve(self, candidates: list[_Candidate], tries: int) -> None:
        """Improve bounds and clocks of points; candidates go from fast to slow."""
        for candidate in candidates:
            if self._gap(candidate) > SMALL_GAP:
                self._tighten(candidate)
        self._mix(candidates)
        wide = self._excess(candidates, SMALL_GAP)
        wide[0] = sum(wide[1:]) or wide[0]
        self._search_all(candidates, tries, wide)
        self._search_all(candidates, tries, self._excess(candidates, WIDE_GAP))
        self._mix(candidates)

    def cheaper(self, candidates: list[_Candidate], best_s: float, tries: int) -> _Candidate | None:
        """Return a point that needs less than all others; None = none was found, or none at T*.

        No plan of any length needs less than the relaxed problem at T*, which is the bound of a
        point that is slower. Whoever asked for no point at T* wants no cheap one.
        """
        power = self.model.options.blocking_w
        at_best = min(candidates, key=lambda candidate: abs(candidate.limit_s - best_s))
        if abs(at_best.limit_s - best_s) > TOLERANCE * best_s:
            return None
        # What the relaxed problem needs with the time that it takes, the least of all at T*.
        bound_j = at_best.relaxed_j + power * at_best.limit_s
        least_j = min(map(self._spent, candidates))
        if power <= 0 or least_j - bound_j <= SMALL_GAP * (bound_j + self.others_j):
            return None
        relaxed = Relaxed(self.precedence, self.model.options)
        # A step cannot be so slow that waiting alone costs more than all that clocks can save.
        cheapest_j = float(self.web.joules[self._cheapest()].sum())
        last_s = min(relaxed.length_s, (least_j - cheapest_j) / power)
        seen = max(AROUND, min(SEEN // len(self.precedence), 16 * AROUND))
        slower = relaxed.shorten(power, np.linspace(best_s, last_s, seen + 1)[1:])
        faster = relaxed.shorten(np.inf, np.linspace(self.fastest_s, best_s, seen + 1)[:-1])
        best = None
        for side, is_slower in ((faster, False), (slower, True)):
            # Convex, as the relaxed problem is: one range of times on each side of T*.
            times = [t for t in sorted(side) if relaxed.joules(side[t]) + power * t < least_j]
            before = at_best if is_slower else candidates[0]
            for limit_s in times[:: max(1, -(-len(times) // AROUND))]:
                candidate = self.rounded(limit_s, side[limit_s])
                self._take_over(before.draft, candidate)
                self._tighten(candidate)
                self._search(candidate, tries // (2 * AROUND))
                candidate.ever_j = bound_j if is_slower else math.nan
                if self._spent(candidate) < least_j:
                    least_j, best = self._spent(candidate), candidate
                before = candidate
        return best

    def calmed(self, choice: Array) -> Iterator[Array]:
        """Yield the clocks of a point with fewer changes: as fast as its own, or faster.

        First one clock for all that a device does in a stage by kind, then one for each device.
        """
        program, options = self.model.program, self.model.options
        activity = self.model.found.activity
        rows = np.flatnonzero(activity >= 0)
        own = activity[rows]
        clock = options.clock_mhz[choice[own]]
        devices, kinds = program.device[rows], program.kind[rows]
        for keys in ((devices, program.stage[rows], kinds), (devices,)):
            _, group = np.unique(np.stack(keys), axis=1, return_inverse=True)
            highest = np.zeros(group.max() + 1)
            np.maximum.at(highest, group, clock)
            calm = choice.copy()
            for place, one in zip(group.tolist(), own.tolist(), strict=True):
                first, last = int(options.ptr[one]), int(options.ptr[one + 1])
                # Faster options come first, and the faster the higher is their clock.
                enough = np.flatnonzero(options.clock_mhz[first:last] >= highest[place])
                calm[one] = min(int(calm[one]), first + (int(enough[-1]) if len(enough) else 0))
            yield calm

    def _excess(self, candidates: list[_Candidate], gap: float) -> list[float]:
        """Return by how much the points are further from their bounds than a gap."""
        return [max(self._gap(candidate) - gap, 0.0) for candidate in candidates]

    def _search_all(self, candidates: list[_Candidate], tries: int, wide: list[float]) -> None:
        """Search at points in proportion to a weight; each starts from the faster one's clocks."""
        if not any(wide):
            return
        for i, (candidate, share) in enumerate(zip(candidates, wide, strict=True)):
            if i:
                self._take_over(candidates[i - 1].draft, candidate)
            self._search(candidate, int(tries * share / sum(wide)))

    def _mix(self, candidates: list[_Candidate]) -> None:
        """Replace points above the line between two others by a mix of these."""
        times = [candidate.limit_s for candidate in candidates]
        hull = lower_hull(times, [self._joules(candidate.draft) for candidate in candidates])
        for a, b in itertools.pairwise(hull):
            for candidate in candidates[a + 1 : b]:
                if self._gap(candidate) > SMALL_GAP:
                    ends = candidates[a].draft, candidates[b].draft
                    draft = mixed(self.web, *ends, candidate.limit_s)
                    if self._joules(draft) < self._joules(candidate.draft):
                        candidate.draft = draft

    def choice(self, candidate: _Candidate) -> Array:
        """Return the option of every activity at a point."""
        choice = self.model.options.ptr[:-1].copy()
        choice[self.precedence.activity] = candidate.draft.choice
        return choice

    def _cheapest(self) -> Array:
        """Return the cheapest option of each node."""
        web = self.web
        ends = zip(web.first.tolist(), (web.last + 1).tolist(), strict=True)
        return np.array([first + int(web.joules[first:last].argmin()) for first, last in ends])

    def _spent(self, candidate: _Candidate) -> float:
        """Return the energy of the nodes of a draft in the time that it takes."""
        took_s = max(longest_s(self.web, candidate.draft), self.precedence.floor_s)
        return self._joules(candidate.draft) + self.model.options.blocking_w * took_s

    def _joules(self, draft: Draft) -> float:
        return float(self.web.joules[draft.choice].sum())

    def _total(self, candidate: _Candidate, joules: float) -> float:
        """Return the energy of a step for the effective energy of its nodes."""
        return joules + self.others_j + self.model.options.blocking_w * candidate.limit_s

    def _gap(self, candidate: _Candidate) -> float:
        bound = self._total(candidate, candidate.bound_j)
        return self._total(candidate, self._joules(candidate.draft)) / max(bound, 1e-300) - 1

    def _tighten(self, candidate: _Candidate) -> None:
        """Solve the relaxed problem without options that fit nowhere, where that matters."""
        options, nodes = self.model.options, self.precedence.activity
        draft = fastest_draft(self.web)
        compiled(set_times)(self.web, draft, candidate.limit_s)
        room = (draft.latest - draft.start) + TOLERANCE * candidate.limit_s
        position = self.relaxed.positions(candidate.wanted_s)
        after = np.minimum(position + 1, options.hull_ptr[nodes + 1] - 1)
        between = candidate.wanted_s > options.seconds[options.hull[position]] * (1 + TOLERANCE)
        crowded = between & (options.seconds[options.hull[after]] > room)
        if crowded.mean() < CROWDED:
            return
        rooms = np.full(len(self.model.found), np.inf)
        rooms[nodes] = room
        tight = Relaxed(self.precedence, options.within(rooms))
        found = tight.shorten(np.inf, np.array([max(candidate.limit_s, tight.fastest_s)]))
        for wanted in found.values():
            candidate.bound_j = max(candidate.bound_j, tight.joules(wanted))
            draft = round_down(self.web, wanted, candidate.limit_s)
            if self._joules(draft) < self._joules(candidate.draft):
                candidate.draft = draft

    def _search(self, candidate: _Candidate, tries: int) -> None:
        """Search for better clocks until the gap is small."""
        gap_j = self._joules(candidate.draft) - candidate.bound_j
        enough_j = gap_j - SMALL_GAP * self._total(candidate, candidate.bound_j)
        if enough_j > 0:
            limit_s = candidate.limit_s
            improve(self.web, candidate.draft, limit_s, tries=tries, enough_j=enough_j)

    def _take_over(self, faster: Draft, slower: _Candidate) -> None:
        """Take the clocks of a faster point where they, slowed down further, are cheaper."""
        draft = fastest_draft(self.web)
        draft.choice[:] = faster.choice
        compiled(spend_slack)(self.web, draft, slower.limit_s * (1 + TOLERANCE), False)
        if self._joules(draft) < self._joules(slower.draft):
            slower.draft = draft


def _bound(
    candidate: _Candidate,
    slower: _Candidate | None,
    rounding: _Rounding,
    *,
    time_s: float,
    best_s: float,
) -> float:
    """Return an energy that no plan falls below in a point's time.

    A faster plan may need less only where its own relaxed energy allows: the relaxed frontier is
    convex, so it rises towards faster steps at least as steeply as it does to the next slower
    point, and up to T* at least by the blocking power. Beyond T* waiting counts: the bound is that
    of a step that takes the point's time, unless the point was looked for because it needs less
    than those up to T*.
    """
    if not math.isnan(candidate.ever_j):
        return candidate.ever_j + rounding.others_j
    power = rounding.model.options.blocking_w
    rise = 0.0
    if slower is not None and slower.limit_s > candidate.limit_s:
        rise = (candidate.relaxed_j - slower.relaxed_j) / (slower.limit_s - candidate.limit_s)
    when = time_s
    if candidate.limit_s <= best_s * (1 + TOLERANCE):
        rise = max(rise, power, np.finfo(float).tiny)
        more = (candidate.bound_j - candidate.relaxed_j) / rise
        when = min(max(candidate.limit_s - more, rounding.fastest_s), time_s)
    line = candidate.relaxed_j + rise * max(0.0, candidate.limit_s - when)
    return max(candidate.bound_j, line) + rounding.others_j + power * when


def _frontier(
    model: EnergyModel,
    rounding: _Rounding,
    candidates: list[_Candidate],
    best_s: float,
    *,
    to_slowest: bool,
) -> Frontier:
    """Return the frontier of simulated points.

    Those that another one beats are left out, except that slower ones than the point of least
    energy stay where they are asked for. Of several that take as long, the cheapest stays.
    """
    chosen = [(i, rounding.choice(candidate)) for i, candidate in enumerate(candidates)]
    if model.profile.switch_s:  # every change costs: calmer clocks may be quicker, and cheaper
        chosen += [(i, calm) for i, choice in tuple(chosen) for calm in rounding.calmed(choice)]
    choices = np.stack([choice for _, choice in chosen])
    lengths, energies = (column.tolist() for column in model.realised(choices))
    points: list[tuple[float, float, float, Array]] = []
    for place, (length, energy) in enumerate(zip(lengths, energies, strict=True)):
        i = chosen[place][0]
        slower = candidates[i + 1] if i + 1 < len(candidates) else None
        bound = _bound(candidates[i], slower, rounding, time_s=length, best_s=best_s)
        # Times are equal within a tolerance, which a steep hull makes joules of.
        assert bound <= energy * (1 + 1e-6), f"a bound of {bound} J for a plan of {energy} J"
        points.append((length, energy, min(bound, energy), model.clocks(choices[place])))
    points.sort(key=lambda point: point[:2])
    least = min(range(len(points)), key=lambda i: points[i][1])
    kept = points[:1]
    for i, point in enumerate(points[1:], 1):
        is_slower = point[0] > kept[-1][0] * (1 + TIE)
        if point[1] < min(other[1] for other in points[:i]):
            kept = kept if is_slower else kept[:-1]
            kept.append(point)
        elif to_slowest and i > least and is_slower:
            kept.append(point)
    all_max_s, all_max_j = model.all_max()
    return Frontier(
        devices=model.program.devices,
        num_instructions=len(model.program),
        time_s=np.array([point[0] for point in kept]),
        energy_j=np.array([point[1] for point in kept]),
        bound_j=np.array([point[2] for point in kept]),
        clock_mhz=np.concatenate([point[3] for point in kept]),
        all_max_s=all_max_s,
        all_max_j=all_max_j,
        fastest_s=rounding.fastest_s,
        best_s=best_s,
        origin=model.profile.origin,
    )
