"""Saved plans: read with their problem, changed as a request says, and evaluated anew."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.bounds import lower_bound
from partita.core.columns import thawed
from partita.core.plan import Plan, equal_microbatches
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.cost.judge import measure
from partita.documents import OpenedFile, open_file
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.fields import (
    ChangeFields,
    ClusterFields,
    EstimateFields,
    Model,
    ObjectiveFields,
    PlanSource,
    RuleFields,
    StepFields,
)
from partita.flows.problem import (
    ProblemRequest,
    changed_cluster,
    objective_of,
    pose,
    read_cluster,
    read_graph,
    rules_of,
)
from partita.objectives.placed import placement_errors
from partita.requests import Request, declare, fields_of

TASK = "task"
"""Key of stats: what a plan of a large transformer trains, which holds however it is evaluated."""


@dataclass(frozen=True, kw_only=True)
class SolutionRequest(ClusterFields, ObjectiveFields):
    """A saved plan, and what is to be changed of its problem."""

    plan: PlanSource = declare("", is_argument=True, help="A plan with its problem, or a bare one.")
    graph: str | None = declare(None, help="The graph, where PLAN is a bare plan.")


def read_solution(request: SolutionRequest) -> Solution:
    """Return the solution in a file, with a request applied to its problem and its plan.

    A bare plan, ours or a foreign one, needs ``graph`` and ``cluster``. The value is computed
    again: a file may say anything.

    Raises:
        InvalidInputError: The file holds no plan, or a bare one without its graph.
    """
    problem = None if request.graph is None else bare_problem(request.graph, request)
    if not isinstance(request.plan, str | OpenedFile):
        own = request.plan if isinstance(request.plan, Solution) else request.plan.solution
        return changed_solution(own, request, problem)
    file = open_file(request.plan) if isinstance(request.plan, str) else request.plan
    found = file.load(problem=problem, wanted=("a plan",))
    if isinstance(found, Solution):
        return changed_solution(found, request, problem)
    if not isinstance(found, Plan):
        kind = type(found).__name__.lower()
        raise InvalidInputError(
            f"{file.name!r} holds a {kind}, not a plan; make one with 'partita plan'"
        )
    if problem is None:
        raise InvalidInputError(f"{file.name} is a bare plan: name its --graph and --cluster")
    return evaluated(problem, _adapted(found, problem, request), None)


def run_files(source: PlanSource) -> tuple[str, str | None] | None:
    """Return the plan and the timeline in a run directory; None where the source names no run.

    A run is named by its directory, or by the ``timeline.json`` in it; one that has not come to its
    first step has none.
    """
    if not isinstance(source, str):
        return None
    folder = Path(source).parent if Path(source).name == "timeline.json" else Path(source)
    if not (folder / "plan.json").is_file():
        return None
    timeline = folder / "timeline.json"
    return str(folder / "plan.json"), str(timeline) if timeline.is_file() else None


def bare_problem(graph: Model, request: Request) -> Problem:
    """Return the problem of a graph that is in a file or built in.

    Only the groups of fields that describe a problem count: ``what_if`` of an explanation is a
    question and no change.
    """
    values = {
        field.name: getattr(request, field.name)
        for group in (ClusterFields, ChangeFields, StepFields, ObjectiveFields, RuleFields)
        if isinstance(request, group)
        for field in fields_of(group)
    }
    read = read_graph(graph)
    assert read is not None
    return pose(ProblemRequest(**{**values, "model": read}), reserves=False).problem


def changed_solution(
    found: Solution, request: StepFields, problem: Problem | None = None
) -> Solution:
    """Return a solution with a request applied to its problem, its plan and its alternatives.

    Alternatives that are none for the changed problem are left out.

    Raises:
        InfeasibleError: The plan breaks a rule of the request.
    """
    problem = problem or _changed(found.problem, request)
    plan, *others = (_adapted(plan, problem, request) for plan in (found.plan, *found.alternatives))
    has_rules = isinstance(request, RuleFields) and bool(rules_of(request))
    broken = placement_errors(problem, plan) if has_rules else []
    if broken:
        raise InfeasibleError(f"the plan breaks a rule: {broken[0]}; plan again with the rule")
    solution = evaluated(problem, plan, found)
    kept = tuple(other for other in others if _is_for(problem, other))
    return dataclasses.replace(solution, alternatives=kept)


def _changed(base: Problem, request: StepFields) -> Problem:
    cluster = base.cluster
    if isinstance(request, ClusterFields):
        cluster = changed_cluster(base, read_cluster(request)[0], request)
    if isinstance(request, EstimateFields) and request.recompute is not None:
        raise InvalidInputError(
            "--recompute shapes an estimate; a saved plan says what it recomputes"
        )
    added = rules_of(request) if isinstance(request, RuleFields) else ()
    return dataclasses.replace(
        base,
        cluster=cluster,
        objective=objective_of(base.graph, base.objective, request),
        rules=(*base.rules, *added),
    )


def _adapted(plan: Plan, problem: Problem, request: StepFields) -> Plan:
    """Return a plan with the schedule and the microbatches that were asked for."""
    changes: dict[str, Any] = {}
    if problem.objective.schedule is not None and request.schedule is not None:
        changes["schedule"] = problem.objective.schedule
    if (request.microbatches, request.microbatch_size, request.batch_size) != (None, None, None):
        sizes = equal_microbatches(problem.microbatches, problem.microbatch_size)
        changes["microbatch_sizes"] = sizes
    return dataclasses.replace(plan, **changes) if changes else plan


def _is_for(problem: Problem, plan: Plan) -> bool:
    """Return whether a plan is one for a problem, which may have other devices by now."""
    try:
        plan.check_fits(problem)
    except InvalidInputError:
        return False
    return True


def evaluated(problem: Problem, plan: Plan, found: Solution | None) -> Solution:
    """Return a plan as a solution of a problem, with its value there."""
    plan.check_fits(problem)
    value = measure(problem, plan)
    return Solution(
        problem=problem,
        plan=plan,
        metric=problem.objective.metric,
        value=value.value,
        unit=value.unit,
        lower_bound=min(lower_bound(problem), value.value),
        planner=found.planner if found else "",
        options=thawed(found.options) if found else {},
        stats={TASK: thawed(found.stats[TASK])} if found and TASK in found.stats else {},
    )


def is_large(solution: Solution) -> bool:
    """Return whether a plan is of a transformer that was planned by its shape."""
    return TASK in solution.stats
