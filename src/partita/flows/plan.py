"""A model and a cluster in, a plan out: what ``partita.plan`` and the command ``plan`` do."""

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.core.codec import encode
from partita.core.columns import thawed
from partita.core.plan import Plan
from partita.core.problem import Metric, Problem
from partita.core.solution import Solution
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.answer import Answer, answer_of
from partita.flows.fields import (
    DegreeFields,
    Model,
    MoveFields,
    PlannerFields,
)
from partita.flows.planner_choice import PlannerChoice, chosen_planner
from partita.flows.problem import (
    PosedProblem,
    ProblemRequest,
    catalogue_of,
    large_shape,
    pose,
)
from partita.flows.results import Result
from partita.planners.effort import SearchTrace
from partita.planners.table import PLANNERS, STARTS, takes
from partita.requests import OnProgress, declare, make, part, silent

if TYPE_CHECKING:
    from partita.flows.energy_plan import EnergyAnswer
    from partita.flows.large import LargePlanResult
    from partita.flows.least_change import Relaxation
    from partita.flows.moves import Replacement

DEFAULT_SLOWDOWN = 0.02
MOST_CHANGES = 3
"""Changes that are searched where nothing fits."""
PRICE = "slower_than_free"
"""Statistic of a plan for a trainer: how much slower it is than the best without its rules."""
CHANGES_LIMIT_S = 10.0
"""Seconds after which no further change is tried."""
SEARCHED_PRECISION = 1e-2
"""How exactly the least memory is found for such a planner, whose plans depend on its time."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest(ProblemRequest, PlannerFields, DegreeFields, MoveFields):
    """A problem, and how to plan it."""

    trace_search: str | None = declare(
        None,
        help="File for the best value over time, as CSV and as .svg, .png or .pdf.",
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PlanResult(Result):
    """A plan with all that is known of it.

    Attributes:
        posed: The problem as it was asked.
        planner: The planner.
        answer: The plan, its figures and its alternatives.
        energy: The clocks and their figures, where energy was the objective.
        replacement: State that moves, where the plan takes the place of another.
        trace: What the search found over time; None where the planner does not search.
    """

    posed: PosedProblem
    planner: PlannerChoice
    answer: Answer
    energy: "EnergyAnswer | None" = None
    replacement: "Replacement | None" = None
    trace: SearchTrace | None = None

    @property
    def problem(self) -> Problem:
        """The problem that was planned."""
        return self.posed.problem

    @property
    def solution(self) -> Solution:
        """The plan with its value and bound: what is saved to a file."""
        return self.answer.summary.solution

    @property
    def plan(self) -> Plan:
        """The plan alone."""
        return self.solution.plan

    @property
    def searched(self) -> Solution:
        """The solution that the search ended with, before clocks were chosen."""
        return self.solution if self.energy is None else self.energy.best.solution

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values, the solution as its document."""
        parts = {"energy": self.energy, "moves": self.replacement}
        known = {name: part.to_json() for name, part in parts.items() if part is not None}
        return {**self.answer.to_json(), **known, "solution": encode(self.solution)}

    def document(self) -> object:
        """Return the step, which a notebook draws."""
        return self.answer.summary.evaluation.timeline

    def lines(self) -> list[str]:
        """Return the plan in a few lines."""
        summary, problem = self.answer.summary, self.problem
        return [
            f"{problem.graph.name} on {problem.cluster.name}: {summary.title}",
            summary.value_line,
            f"bound by {summary.evaluation.bottleneck}",
            *([] if self.replacement is None else [self.replacement.line]),
        ]


class NothingFitsError(InfeasibleError):
    """No plan fits, and what would make one fit.

    Attributes:
        planner: The planner that found none.
        reason: Its own words.
        changes: Changes with which it finds a plan.
    """

    def __init__(self, planner: str, reason: str, changes: "Sequence[Relaxation]") -> None:
        self.planner, self.reason, self.changes = planner, reason, tuple(changes)
        super().__init__(f"{reason}; {_advice(changes)}")

    def to_json(self) -> dict[str, Any]:
        """Return the refusal as JSON values."""
        return {
            "planner": self.planner,
            "refusal": self.reason,
            "changes": [change.to_json() for change in self.changes],
        }


def plan(
    model: Model | None = None,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of PlanRequest)
) -> "PlanResult | LargePlanResult":
    """Plan a model over a cluster; a large transformer that is named by its shape in all degrees.

    Args:
        model: A built-in name, a model to be estimated, a file, or the graph itself.
        on_progress: Called with each step.
        **options: The fields of :class:`PlanRequest`: the options of ``partita plan``.

    >>> result = plan("gpt-small", cluster="4xa100", planner="uniform")
    >>> len(result.plan.stages)
    4

    Raises:
        InvalidInputError: There is no such model, cluster, planner or option.
        NothingFitsError: Nothing that the planner finds fits; says what would make it fit.
    """
    return plan_request(make(PlanRequest, model=model, **options), on_progress)


def plan_request(
    request: PlanRequest, on_progress: OnProgress = silent, watch: "SearchWatch | None" = None
) -> "PlanResult | LargePlanResult":
    """Plan what a request asks for; see :func:`plan`.

    Args:
        request: The request.
        on_progress: Called with each step.
        watch: Who follows the search, and may end it; plans by shape are found without one.
    """
    if request.minimise_moves and request.from_plan is None:
        raise InvalidInputError("--minimise-moves needs --from PLAN, the plan that ran before")
    if (large := large_shape(request, request.model)) is not None:
        from partita.flows.large import LargeFields, plan_large  # noqa: PLC0415 (where it is named)

        return plan_large(part(LargeFields, request), large, on_progress)
    return plan_graph(request, on_progress, watch)


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchWatch:
    """Who follows a search.

    Attributes:
        trace: Records each better value; says when to stop.
        on_problem: Called with the problem before it is planned.
    """

    trace: SearchTrace
    on_problem: Callable[[Problem], None] = lambda _: None


def plan_graph(
    request: PlanRequest, on_progress: OnProgress = silent, watch: SearchWatch | None = None
) -> PlanResult:
    """Plan a graph of ops; see :func:`plan_request`."""
    choice = chosen_planner(request)
    planner = choice.function()
    _check_trace_file(request)
    trace = _search_trace(request, choice)
    if trace is not None and watch is not None:
        trace = watch.trace
    posed = pose(request)
    if watch is not None:
        watch.on_problem(posed.problem)
    slowdown = _slowdown(posed.problem, request)
    search = planner if trace is None else partial(planner, trace=trace)
    if request.framework not in (None, "partita"):
        search = partial(_plan_for, request, search)
    replacement = None
    if request.from_plan is not None:
        from partita.flows.moves import kept_cuts, read_old_plan, replaced  # noqa: PLC0415 (rare)

        old = read_old_plan(request.from_plan, posed.problem)
        if takes(choice.name, STARTS):
            search = partial(search, starts=kept_cuts(old.plan, posed.problem))
    on_progress(f"{posed.problem.graph.name} with {choice.name}")
    try:
        if slowdown is None:
            solution, energy = search(posed.problem), None
            if request.from_plan is not None:
                on_progress("counting the state that moves")
                solution, replacement = replaced(
                    old, solution, minimise=request.minimise_moves, slowdown=request.slowdown
                )
            answer = answer_of(solution)
        else:
            from partita.flows.energy_plan import plan_for_energy  # noqa: PLC0415 (numba)

            energy = plan_for_energy(
                posed.problem,
                search,
                quick=choice.quick(),
                slowdown=slowdown,
                progress=on_progress,
            )
            answer = answer_of(energy.solution)
            if request.from_plan is not None:
                _, replacement = replaced(old, energy.solution)
    except InfeasibleError as exc:
        on_progress("nothing fits; looking for the least change with which it would")
        raise NothingFitsError(choice.name, str(exc), _changes(posed, choice, request)) from exc
    if request.framework not in (None, "partita"):
        paid = answer.summary.solution.stats.get(PRICE, 0.0)
        line = f"a plan that {request.framework} can run: {paid:.1%} slower than Partita's own"
        posed = replace(posed, remarks=(*posed.remarks, line))
    return PlanResult(
        posed=posed,
        planner=choice,
        answer=answer,
        energy=energy,
        replacement=replacement,
        trace=trace,
    )


def _check_trace_file(request: PlanRequest) -> None:
    if request.trace_search is None:
        return
    path = Path(request.trace_search)
    if not path.name or path.is_dir():
        raise InvalidInputError(
            f"--trace-search is {request.trace_search!r}; expected the name of a file"
        )


def _plan_for(
    request: PlanRequest, search: Callable[[Problem], Solution], problem: Problem
) -> Solution:
    """Return the best plan that a trainer can run, with what the restriction costs."""
    from partita.planners.regular import holds, plan_regular  # noqa: PLC0415 (where one is named)

    trainer = str(request.framework)
    if problem.objective.metric is not Metric.THROUGHPUT or request.planner or request.partition:
        raise InvalidInputError(
            f"--for {trainer} searches itself, for the least step; leave out --planner and "
            "--objective"
        )
    regular = plan_regular(problem, trainer=trainer)
    free = search(problem)
    if free.value < regular.value and holds(problem, free, trainer):
        regular = free
    paid = max(0.0, regular.value / free.value - 1)
    return replace(regular, stats={**thawed(regular.stats), PRICE: paid})


def _search_trace(request: PlanRequest, choice: PlannerChoice) -> SearchTrace | None:
    """Return what a search is recorded in; None where the planner does not search."""
    if takes(choice.name, "trace"):
        return SearchTrace()
    if request.trace_search is None:
        return None
    searching = ", ".join(name for name in PLANNERS if takes(name, "trace"))
    raise InvalidInputError(
        f"planner {choice.name!r} does not search, so there is nothing to trace; "
        f"these do: {searching}"
    )


def _slowdown(problem: Problem, request: PlanRequest) -> float | None:
    """Return how much slower than the fastest plan a step may be; None where energy is no aim."""
    given, is_energy = request.slowdown, problem.objective.metric is Metric.ENERGY
    if request.minimise_moves and is_energy:
        raise InvalidInputError(
            "--minimise-moves and --objective energy both choose among plans; give one of them"
        )
    if is_energy:
        return DEFAULT_SLOWDOWN if given is None else given
    if given is not None and not request.minimise_moves:
        raise InvalidInputError("--slowdown needs --objective energy or --minimise-moves")
    return None


def _changes(
    posed: PosedProblem, choice: PlannerChoice, request: ProblemRequest
) -> "list[Relaxation]":
    """Return a few changes with which the planner finds a plan, the first of their kinds."""
    from partita.flows.least_change import (  # noqa: PLC0415 (only where nothing fits)
        PRECISION,
        Ways,
        relaxations,
    )

    deadline_s = time.monotonic() + CHANGES_LIMIT_S
    ways = Ways(
        graph_at=posed.graph_at,
        catalogue=catalogue_of(request),
        precision=SEARCHED_PRECISION if takes(choice.name, "time_limit") else PRECISION,
        stop=lambda: time.monotonic() > deadline_s,
    )
    return list(islice(relaxations(posed.problem, choice.quick(), ways), MOST_CHANGES))


def _advice(changes: "Sequence[Relaxation]") -> str:
    """Return what makes it fit, in one line."""
    if not changes:
        return "nothing that was tried makes it fit"
    return f"enough is {', or '.join(map(_words, changes))}"


def _words(change: "Relaxation") -> str:
    """Return a change as it is typed, and what it means."""
    left_out = " and ".join(
        f"--{'forbid' if rule.forbids else 'pin'} {shlex.quote(f'{rule.ops}={rule.devices}')}"
        for rule in change.without
    )
    parts = [f"to leave out {left_out}"] if left_out else []
    if change.arguments:
        parts.insert(0, f"{shlex.join(change.arguments)} ({change.words})")
    return " and ".join(parts)
