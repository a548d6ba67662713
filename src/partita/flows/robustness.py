"""How much worse a plan gets when costs are not what they were thought to be.

Baechi's perturbation: every cost is multiplied by a draw of its own from uniform(1 - f, 1 + f),
seconds of an op on each type of device, and transfers: the latency and the seconds per byte of a
link (of a group of a level, or of an ordered pair of devices), and the seconds of a tensor where a
file gives them. Memory is not perturbed. Draws hold for a whole step, unlike the noise of
``Disturbance``, which differs from instruction to instruction.

All plans are measured on the same draws. For some of the draws the problem is planned again, as if
the true costs had been known: the regret of a plan is how much worse it is than the best that is
known for the draw. Everything follows from the seed, if the planner does not look at the clock.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from partita.core.cluster import Cluster, Level, LinkMatrix
from partita.core.columns import Array, thawed
from partita.core.graph import Graph, OpCosts
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.cost.judge import measure
from partita.documents import OpenedFile, open_file
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.answer import alternatives_of
from partita.flows.explain import FIXED
from partita.flows.fields import (
    ChangeFields,
    ChoiceFields,
    ClusterFields,
    Model,
    ObjectiveFields,
    PlanSource,
    RuleFields,
    SourceFields,
    WorkerFields,
)
from partita.flows.planner_choice import (
    PlannerChoice,
    chosen_planner,
    effort_of,
    planner_choice,
)
from partita.flows.problem import ProblemRequest, is_path, pose, refuse_source_options
from partita.flows.results import Result
from partita.flows.solutions import changed_solution, is_large
from partita.flows.summary import describe_plan
from partita.requests import OnProgress, declare, make, part, silent
from partita.workers import Workers

_Links = TypeVar("_Links", Level, LinkMatrix)

QUANTILES: Mapping[str, float] = {
    "min": 0.0,
    "p05": 0.05,
    "median": 0.5,
    "p95": 0.95,
    "max": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class RobustnessRequest(
    ClusterFields,
    ChangeFields,
    ChoiceFields,
    ObjectiveFields,
    RuleFields,
    SourceFields,
    WorkerFields,
):
    """A plan, or a model to plan, and how its costs are drawn."""

    plan: Model | PlanSource = declare("", is_argument=True, help="Plan, or a model.")
    others: tuple[PlanSource | Plan, ...] = declare(
        (), is_argument=True, help="More plans for the same model and cluster."
    )
    perturb: float = declare(0.2, help="Draw each cost within 1 - P and 1 + P times its own.")
    samples: int = declare(50, minimum=1, help="Number of draws.")
    replans: int = declare(5, minimum=0, help="Number of draws for which it is planned again.")
    seed: int = declare(1, minimum=0, help="Seed of the draws.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """How costs are drawn.

    Attributes:
        perturb: Costs lie within 1 - perturb and 1 + perturb times what is thought.
        samples: Number of draws.
        replans: Number of draws for which the problem is planned again.
        seed: Of the draws.
    """

    perturb: float = 0.2
    samples: int = 50
    replans: int = 5
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.perturb < 1:
            raise InvalidInputError(f"perturb is {self.perturb}; expected 0 or more, below 1")
        if self.samples < 1:
            raise InvalidInputError(f"samples is {self.samples}; expected 1 or more")
        if self.replans < 0 or self.seed < 0:
            raise InvalidInputError("replans and seed must be 0 or more")


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """One plan under all draws.

    Attributes:
        name: What it is called.
        words: The plan in a few words.
        nominal: Its value with the costs as they are thought to be.
        values: Its value for each draw.
        wins: Share of the draws for which it is the best of the contenders; ties count for the
            first.
    """

    name: str
    words: str
    nominal: float
    values: Array
    wins: float

    @property
    def ratios(self) -> Array:
        """Its values relative to the nominal one."""
        nominal = self.nominal if self.nominal > 0 else 1.0
        return self.values / nominal

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {
            "name": self.name,
            "plan": self.words,
            "nominal": self.nominal,
            "relative": quantiles(self.ratios),
            "wins": self.wins,
        }


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Robustness(Result):
    """A plan and its rivals when costs are not what they were thought to be.

    Attributes:
        solution: The plan in question.
        doubt: How costs were drawn.
        contenders: The plan in question first, then the others.
        regret: For each draw that was planned again: how much worse the plan is than the best
            that is known, relative.
        rivals_regret: For every draw: how much worse the plan is than the best contender.
    """

    solution: Solution
    doubt: Doubt
    contenders: tuple[Contender, ...]
    regret: Array
    rivals_regret: Array

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values under stable keys."""
        return {
            "model": self.solution.problem.graph.name,
            "cluster": self.solution.problem.cluster.name,
            "planner": self.solution.planner,
            "metric": self.solution.metric.value,
            "unit": self.solution.unit,
            "perturb": self.doubt.perturb,
            "samples": self.doubt.samples,
            "seed": self.doubt.seed,
            "plans": [contender.to_json() for contender in self.contenders],
            "beaten_by_others": quantiles(self.rivals_regret),
            "replanned": len(self.regret),
            "regret": quantiles(self.regret) if len(self.regret) else None,
        }

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each plan: its value, and what the draws make of it."""
        return [
            {"name": each.name, "plan": each.words, "nominal": each.nominal}
            | quantiles(each.ratios)
            | {"wins": each.wins}
            for each in self.contenders
        ]

    def lines(self) -> list[str]:
        """Return how much worse the plan gets, in two lines."""
        doubt, figures = self.doubt, quantiles(self.contenders[0].ratios)
        return [
            f"{self.solution.problem.graph.name}: {doubt.samples} draws of all costs within "
            f"{100 * doubt.perturb:g} %",
            f"{self.solution.metric.words} relative to the nominal one: median "
            f"{figures['median']:.3f}, 95 % below {figures['p95']:.3f}, worst {figures['max']:.3f}",
        ]


def robustness(
    plan: Model | PlanSource,
    /,
    *others: PlanSource | Plan,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of RobustnessRequest)
) -> Robustness:
    """Draw other costs around those of a plan, and see how much worse it gets.

    Args:
        plan: What :func:`partita.plan` returned, a solution, the path of a file, or a model that is
            planned first.
        *others: More plans for the same model and cluster.
        on_progress: Called with each step.
        **options: The fields of :class:`RobustnessRequest`: the options of ``partita robustness``.

    Raises:
        InvalidInputError: There is no such plan, model or option.
    """
    request = make(RobustnessRequest, plan=plan, others=others, **options)
    return robustness_request(request, on_progress)


def robustness_request(request: RobustnessRequest, on_progress: OnProgress = silent) -> Robustness:
    """Find what a request asks for; see :func:`robustness`."""
    doubt = Doubt(
        perturb=request.perturb,
        samples=request.samples,
        replans=request.replans,
        seed=request.seed,
    )
    solution = _read(request)
    rivals = [_rival(rank, other, solution) for rank, other in enumerate(request.others, 1)]
    with request.working() as workers:
        return under_doubt(
            solution,
            doubt,
            rivals=rivals,
            planner=_again(solution, request),
            workers=workers,
            on_progress=on_progress,
        )


def _read(request: RobustnessRequest) -> Solution:
    """Return the plan that was given, or that of a model."""
    source = request.plan
    is_file = isinstance(source, str) and (
        source == "-" or (is_path(source) and Path(source).is_file())
    )
    name = source if isinstance(source, str) else "this"
    found = open_file(source).load() if is_file and isinstance(source, str) else source
    if isinstance(found, Plan):
        raise InvalidInputError(f"{name} is a bare plan; 'partita plan' writes one with its model")
    if not isinstance(found, str | OpenedFile | Graph | Problem | Solution):
        found = getattr(found, "solution", found)
    if isinstance(found, Solution):
        refuse_source_options(name, request)
        if request.planner or request.partition or request.option:
            raise InvalidInputError(f"{name} is a plan already: name its model to plan it anew")
        return changed_solution(found, request)
    if not isinstance(found, str | Graph | Problem):
        kind = type(found).__name__.lower()
        raise InvalidInputError(f"{name!r} holds a {kind}, not a plan or a model")
    asked = replace(part(ProblemRequest, request), model=found)
    return chosen_planner(request).function()(pose(asked).problem)


def _again(solution: Solution, request: RobustnessRequest) -> PlannerChoice | None:
    """Return what plans again as a plan was planned, with other limits where they are given."""
    # A transformer that is planned by its shape has a search of its own, over other figures than
    # those that are in doubt here.
    if solution.planner in FIXED or is_large(solution):
        return None
    options = thawed(solution.options)
    return planner_choice(solution.planner, options, effort_of(request))


def _rival(rank: int, other: PlanSource | Plan, solution: Solution) -> tuple[str, Plan]:
    """Return another plan for the same problem, with its name.

    Raises:
        InvalidInputError: It is none for this problem.
    """
    name, found = f"other {rank}", other
    if isinstance(other, str | OpenedFile):
        file = open_file(other) if isinstance(other, str) else other
        name, found = Path(file.name).name, file.load(problem=solution.problem)
    plan = found if isinstance(found, Plan) else getattr(found, "solution", found)
    plan = plan.plan if isinstance(plan, Solution) else plan
    if not isinstance(plan, Plan):
        raise InvalidInputError(f"{name!r} holds a {type(found).__name__.lower()}, not a plan")
    try:
        plan.check_fits(solution.problem)
    except InvalidInputError as exc:
        raise InvalidInputError(f"{name}: {exc}") from exc
    return name, plan


def under_doubt(
    solution: Solution,
    doubt: Doubt,
    *,
    rivals: Sequence[tuple[str, Plan]] = (),
    planner: PlannerChoice | Callable[[Problem], Solution] | None = None,
    workers: Workers | None = None,
    on_progress: OnProgress = silent,
) -> Robustness:
    """Return how a plan fares when costs are drawn around what they are thought to be.

    Args:
        solution: The plan; its alternatives are rivals.
        doubt: How costs are drawn.
        rivals: Names of other plans for the same problem, and these.
        planner: Plans again for some draws; None = nothing is planned again.
        workers: What measures and plans; None = this process. The figures are the same.
        on_progress: Called with each step.
    """
    others = [
        (f"alternative {rank}", each.plan, each.words)
        for rank, each in enumerate(alternatives_of(solution), 1)
    ]
    others += [(name, plan, describe_plan(plan)) for name, plan in rivals]
    plans = [("plan", solution.plan, describe_plan(solution.plan)), *others]
    values = np.empty((len(plans), doubt.samples))
    regret: list[float] = []
    rng = np.random.default_rng(doubt.seed)
    draws = (
        _Draw(
            problem=perturbed(solution.problem, doubt.perturb, rng),
            plans=tuple(plan for _, plan, _ in plans),
            planner=planner if draw < doubt.replans else None,
        )
        for draw in range(doubt.samples)
    )
    seen = map(_measure, draws) if workers is None else workers.map(_measure, draws)
    for draw, (measured, worse) in enumerate(seen):
        values[:, draw] = measured
        if worse is not None:
            on_progress(f"planned draw {draw + 1} of {min(doubt.replans, doubt.samples)} again")
            regret.append(worse)
    best = values.argmin(axis=0)
    contenders = [
        Contender(
            name=name,
            words=words,
            nominal=measure(solution.problem, plan).value,
            values=values[row],
            wins=float((best == row).mean()),
        )
        for row, (name, plan, words) in enumerate(plans)
    ]
    return Robustness(
        solution=solution,
        doubt=doubt,
        contenders=tuple(contenders),
        regret=np.array(regret),
        rivals_regret=_relative(values[0], values.min(axis=0)),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Draw:
    """A problem whose costs were drawn, and what is asked of it.

    Attributes:
        problem: The problem.
        plans: Plans to measure.
        planner: Plans it again; None = it is not.
    """

    problem: Problem
    plans: tuple[Plan, ...]
    planner: PlannerChoice | Callable[[Problem], Solution] | None = None


def _measure(draw: _Draw) -> tuple[Array, float | None]:
    """Return the values of the plans, and the regret of the first; None = it was not asked for."""
    values = np.array([measure(draw.problem, plan).value for plan in draw.plans])
    if draw.planner is None:
        return values, None
    chosen = draw.planner
    planner = chosen.function() if isinstance(chosen, PlannerChoice) else chosen
    return values, _regret(draw.problem, planner, values)


def _regret(problem: Problem, planner: Callable[[Problem], Solution], known: Array) -> float:
    """Return how much worse the first of some plans is than the best of them and a new one."""
    best = float(known.min())
    with suppress(InfeasibleError):
        best = min(best, planner(problem).value)
    return float(_relative(known[:1], np.array([best]))[0])


def _relative(value: Array, best: Array) -> Array:
    """Return how much larger values are than the best ones; 0 where these are 0."""
    return np.divide(value, best, out=np.ones_like(value), where=best > 0) - 1.0


def perturbed(problem: Problem, perturb: float, rng: np.random.Generator) -> Problem:
    """Return a problem whose costs are drawn around those of another.

    The plans of the one are plans of the other.
    """

    def draws(count: int) -> Array:
        return rng.uniform(1 - perturb, 1 + perturb, count)

    return replace(
        problem,
        graph=_perturbed_graph(problem.graph, draws),
        cluster=_perturbed_links(problem.cluster, draws),
    )


def _perturbed_graph(graph: Graph, draws: Callable[[int], Array]) -> Graph:
    costs = [_perturbed_costs(costs, draws(len(graph))) for costs in graph.costs]
    factor = draws(len(graph.variants))
    variants = replace(
        graph.variants,
        forward_s=graph.variants.forward_s * factor,
        backward_s=graph.variants.backward_s * factor,
    )
    given_s = graph.tensors.transfer_s * draws(len(graph.tensors))
    tensors = replace(graph.tensors, transfer_s=given_s)
    return replace(graph, costs=tuple(costs), variants=variants, tensors=tensors)


def _perturbed_costs(costs: OpCosts, factor: Array) -> OpCosts:
    return replace(
        costs,
        forward_s=costs.forward_s * factor,
        backward_s=costs.backward_s * factor,
        backward_input_s=costs.backward_input_s * factor,
    )


def _perturbed_links(cluster: Cluster, draws: Callable[[int], Array]) -> Cluster:
    matrix = cluster.matrix
    if matrix is not None:
        return replace(cluster, matrix=_perturbed_link(matrix, draws))
    return replace(cluster, levels=tuple(_perturbed_link(each, draws) for each in cluster.levels))


def _perturbed_link(links: _Links, draws: Callable[[int], Array]) -> _Links:
    factor = draws(len(links.latency_s))
    return replace(
        links,
        bandwidth_bytes_per_s=links.bandwidth_bytes_per_s / factor,
        latency_s=links.latency_s * factor,
    )


def quantiles(values: Array) -> dict[str, float]:
    """Return the mean and some quantiles of values."""
    found = np.quantile(values, list(QUANTILES.values()))
    return {"mean": float(values.mean()), **dict(zip(QUANTILES, found.tolist(), strict=True))}
