"""Planning with energy: the plan, and its clocks, of least joules per sample at a bounded slowdown.

Energy sits above the cost model: clocks belong to a plan's stages, so that a planner cannot choose
them op by op. Here the planners make candidates by time, on all devices and on parts of them (the
fewer devices wait, the less they burn; a slow type may cost more joules than seconds), and each
candidate gets its own frontier with modelled devices. The cheapest point within the limit wins;
what is said of it was simulated again with its clocks. Devices that a plan does not use are not
charged: others can have them, or they sleep.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from partita.bounds import lower_bound
from partita.catalogue.what_if import part_of
from partita.core.cluster import Cluster
from partita.core.energy import TIE, EnergyProfile, Frontier
from partita.core.plan import Plan
from partita.core.problem import Metric, Problem
from partita.core.solution import Solution
from partita.cost.durations import instruction_seconds
from partita.cost.judge import judge
from partita.energy.frontier.choose import PointLimits, choose_point
from partita.energy.frontier.modelled import modelled_profile
from partita.energy.frontier.savings import frontier_of, model_of, played
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.answer import ENERGY, distinct_words
from partita.flows.summary import describe_plan
from partita.planners.pipeline import solution_of
from partita.program.lower import lower

Planner: TypeAlias = Callable[[Problem], Solution]

MAX_PARTS = 8
"""Parts of the devices that are planned for."""
MAX_FRONTIERS = 12
"""Plans whose frontier is solved, the fastest first."""
POINTS = 40


def modelled(solution: Solution) -> EnergyProfile:
    """Return the energy profile of a plan's stages by the DVFS model of the catalogue's devices.

    Raises:
        InvalidInputError: A device has no clocks or powers; names it.
    """
    problem, plan = solution.problem, solution.plan
    program = lower(problem, plan)
    seconds = instruction_seconds(problem, plan, program)
    name = f"{problem.graph.name}, modelled"
    return modelled_profile(program, problem.cluster, seconds, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyColumns:
    """What a comparison says of a plan's energy, by the model of its devices.

    Attributes:
        fastest_s: T_min, the shortest step that any clocks reach.
        best_s: T*, the step of least energy.
        all_max_j: Joules a sample with the highest clocks.
        fastest_j: Joules a sample in T_min.
        best_j: Joules a sample in T*.
        gap: How far a point may be above the least energy in its time, the largest.
        origin: Where the joules come from.
    """

    fastest_s: float
    best_s: float
    all_max_j: float
    fastest_j: float
    best_j: float
    gap: float
    origin: str

    def to_json(self) -> dict[str, Any]:
        """Return the columns as JSON values."""
        return {
            "origin": self.origin,
            "fastest_s": self.fastest_s,
            "best_s": self.best_s,
            "all_max_j_per_sample": self.all_max_j,
            "fastest_j_per_sample": self.fastest_j,
            "best_j_per_sample": self.best_j,
            "gap": self.gap,
        }


def energy_columns(solution: Solution, *, points: int = 20) -> EnergyColumns:
    """Return the energy of a plan at all-max, in T_min and in T*.

    Raises:
        InvalidInputError: A device has no clocks or powers; names it.
    """
    frontier = frontier_of(solution, modelled(solution), points=points)
    samples = solution.plan.samples
    return EnergyColumns(
        fastest_s=frontier.fastest_s,
        best_s=frontier.best_s,
        all_max_j=frontier.all_max_j / samples,
        fastest_j=float(frontier.energy_j[0]) / samples,
        best_j=float(frontier.energy_j.min()) / samples,
        gap=float(frontier.gap.max()),
        origin=frontier.origin.value,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class EnergyCandidate:
    """A plan with the clocks of least energy within a limit.

    Attributes:
        solution: The plan, with its step at the highest clocks as its value.
        words: The plan in a few words.
        frontier: Its frontier.
        point: The point that was chosen; None where none is within the limit.
    """

    solution: Solution
    words: str
    frontier: Frontier
    point: int | None

    @property
    def step_s(self) -> float:
        """Seconds of a step with the highest clocks."""
        return self.solution.value

    @property
    def time_s(self) -> float:
        """Seconds of a step with the chosen clocks; NaN where there are none."""
        return float("nan") if self.point is None else float(self.frontier.time_s[self.point])

    @property
    def joules_per_sample(self) -> float:
        """Joules a sample with the chosen clocks; NaN where there are none."""
        if self.point is None:
            return float("nan")
        return float(self.frontier.energy_j[self.point]) / self.solution.plan.samples

    def to_json(self) -> dict[str, Any]:
        """Return the candidate as JSON values; what it does not have is null."""
        samples = self.solution.plan.samples
        chosen = self.point is not None
        return {
            "plan": self.words,
            "devices": list(self.solution.plan.devices),
            "step_s": self.step_s,
            "all_max_s": self.frontier.all_max_s,
            "all_max_j_per_sample": self.frontier.all_max_j / samples,
            "fastest_s": self.frontier.fastest_s,
            "best_s": self.frontier.best_s,
            "point": self.point,
            "time_s": self.time_s if chosen else None,
            "j_per_sample": self.joules_per_sample if chosen else None,
            "gap": float(self.frontier.gap[self.point]) if self.point is not None else None,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class EnergyAnswer:
    """What planning with energy came to.

    Attributes:
        solution: The plan of least energy as a solution by the metric energy: its value is that
            of the cost model, joules per sample with the highest clocks.
        best: That plan with its clocks.
        fastest: The plan of the shortest step, with its own clocks within the limit.
        candidates: All that were looked at, the cheapest first; those beyond the limit last.
        slowdown: How much slower than the fastest plan a step may be.
        limit_s: Seconds that a step may take.
        simulated_s: Seconds of the step of the best plan, simulated again with its clocks.
        simulated_j: Joules of it.
    """

    solution: Solution
    best: EnergyCandidate
    fastest: EnergyCandidate
    candidates: tuple[EnergyCandidate, ...]
    slowdown: float
    limit_s: float
    simulated_s: float
    simulated_j: float

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "origin": self.best.frontier.origin.value,
            "slowdown": self.slowdown,
            "limit_s": self.limit_s,
            "best": self.best.to_json(),
            "fastest": self.fastest.to_json(),
            "candidates": [each.to_json() for each in self.candidates],
            "simulated_s": self.simulated_s,
            "simulated_j_per_sample": self.simulated_j / self.solution.plan.samples,
        }


def plan_for_energy(
    problem: Problem,
    planner: Planner,
    *,
    quick: Planner | None = None,
    slowdown: float = 0.02,
    points: int = POINTS,
    progress: Callable[[str], None] = lambda _: None,
) -> EnergyAnswer:
    """Return the plan and clocks of least joules per sample within a slowdown.

    Args:
        problem: The problem; its metric is energy.
        planner: Plans the whole by time.
        quick: Plans parts of the devices, many of them; None = the same.
        slowdown: How much slower than the fastest plan a step may be, 0.02 = 2 %.
        points: Points of each frontier.
        progress: Called with what is going on.

    Raises:
        InfeasibleError: Nothing fits.
        InvalidInputError: A device has no clocks or powers, or the slowdown is negative.
    """
    if not slowdown >= 0:
        raise InvalidInputError(f"slowdown is {slowdown}; expected 0 or more")
    timed = replace(problem, objective=replace(problem.objective, metric=Metric.THROUGHPUT))
    progress("by time, on all devices")
    first = planner(timed)
    plans = [first.plan, *first.alternatives]
    fastest_s = min(_seconds(timed, plan) for plan in plans)
    plans += _partial_plans(timed, quick or planner, fastest_s * (1 + slowdown), progress)
    measured = sorted(
        ((_seconds(timed, plan), number) for number, plan in enumerate(plans)),
    )
    limit_s = measured[0][0] * (1 + slowdown)
    ranked = [(plans[number], step_s) for step_s, number in measured if step_s < np.inf]
    progress(f"frontiers of plans within {limit_s:.4g} s per step")
    candidates = _candidates(timed, first, _distinct(ranked), (limit_s, points))
    best = candidates[0]
    assert best.frontier.profile is not None
    model = model_of(best.solution, best.frontier.profile)
    again = played(model, best.frontier.clocks(int(best.point or 0)))
    found = EnergyAnswer(
        solution=_solution(problem, first, candidates),
        best=best,
        fastest=min(candidates, key=lambda each: each.step_s),
        candidates=tuple(candidates),
        slowdown=slowdown,
        limit_s=limit_s,
        simulated_s=again.time_s,
        simulated_j=again.energy_j,
    )
    return replace(found, solution=replace(found.solution, stats={ENERGY: found.best.to_json()}))


def _seconds(problem: Problem, plan: Plan) -> float:
    """Return the step of a plan; ``inf`` where it breaks a limit, or its steps overlap."""
    if plan.stashes_weights:
        return float("inf")
    try:
        found = judge(problem, plan)
    except (InfeasibleError, InvalidInputError):
        return float("inf")
    return found.value.value if found.feasible else float("inf")


def _distinct(ranked: Sequence[tuple[Plan, float]]) -> list[tuple[Plan, float]]:
    """Return the fastest plan of each step time and set of devices."""
    seen: dict[tuple[str, tuple[str, ...]], tuple[Plan, float]] = {}
    for plan, step_s in ranked:
        key = (f"{step_s:.9g}", tuple(sorted(plan.devices)))
        seen.setdefault(key, (plan, step_s))
    return list(seen.values())[:MAX_FRONTIERS]


def _candidates(
    problem: Problem,
    first: Solution,
    ranked: Sequence[tuple[Plan, float]],
    limits: tuple[float, int],
) -> list[EnergyCandidate]:
    """Return plans with their frontiers, the cheapest within the limit first."""
    if not ranked:
        raise InfeasibleError(
            "no plan whose steps do not overlap fits; the energy of weight stashing is not modelled"
        )
    limit_s, points = limits
    found = []
    for number, (plan, step_s) in enumerate(ranked):
        if number and step_s > limit_s * (1 + TIE):
            break
        solution = Solution(
            problem=problem,
            plan=plan,
            metric=Metric.THROUGHPUT,
            value=step_s,
            unit="s",
            lower_bound=min(first.lower_bound, step_s),
            planner=first.planner,
        )
        frontier = frontier_of(solution, modelled(solution), points=points, at=(limit_s,))
        within = float(frontier.time_s[0]) <= limit_s * (1 + TIE)
        point = choose_point(frontier, PointLimits(deadline_s=limit_s)) if within else None
        words = distinct_words(problem, plan, ranked[0][0]) if number else describe_plan(plan)
        found.append(
            EnergyCandidate(solution=solution, words=words, frontier=frontier, point=point)
        )
    return sorted(found, key=lambda each: (each.point is None, each.joules_per_sample))


def _solution(problem: Problem, first: Solution, candidates: Sequence[EnergyCandidate]) -> Solution:
    plans = [each.solution.plan for each in candidates]
    return solution_of(
        problem, plans[0], first.planner, dict(first.options), alternatives=plans[1:]
    )


def _partial_plans(
    problem: Problem, planner: Planner, limit_s: float, progress: Callable[[str], None]
) -> list[Plan]:
    """Return plans for parts of the devices that may be within the limit."""
    plans: list[Plan] = []
    for keep in _parts(problem.cluster):
        try:
            part = replace(problem, cluster=part_of(problem.cluster, keep))
            if lower_bound(part) > limit_s:
                continue
            progress(f"by time, on {len(keep)} of {len(problem.cluster)} devices")
            found = planner(part)
        except (InfeasibleError, InvalidInputError):
            continue
        plans += [found.plan, *found.alternatives]
    return plans


def _parts(cluster: Cluster) -> list[list[int]]:
    """Return parts of the devices: without a type, without a host, without the slowest few."""
    parts: dict[tuple[int, ...], None] = {}
    for part in _all_parts(cluster):  # of thousands of hosts only the first few are made
        if part:
            parts[part] = None
        if len(parts) == MAX_PARTS:
            break
    return [list(part) for part in parts]


def _all_parts(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    everything = range(len(cluster))
    for of in ([device.type for device in cluster.devices], [d.host for d in cluster.devices]):
        for value in dict.fromkeys(of):
            yield tuple(i for i in everything if of[i] != value)
    by_speed = sorted(everything, key=lambda i: (_rate(cluster, i), -i))
    for count in _counts(len(cluster)):
        yield tuple(sorted(by_speed[count:]))


def _counts(devices: int) -> Iterator[int]:
    """Yield how many devices to leave out: 1, 2, 4, ..., below all."""
    count = 1
    while count < devices:
        yield count
        count *= 2


def _rate(cluster: Cluster, index: int) -> float:
    """Return how fast a device is among others, by its peak rate and its speed."""
    device = cluster.devices[index]
    return device.speed * max(device.peak_flop_per_s.values(), default=1.0)
