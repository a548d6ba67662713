"""Every planner of the table against the suite that plug-ins use, too."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import pytest

from partita.core.columns import thawed
from partita.core.problem import Metric, Objective, Problem
from partita.core.solution import Proof, Solution
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.pipeline import allowed_boundaries, main_devices
from partita.planners.scattered import plan_random
from partita.planners.single import plan_single
from partita.planners.table import PLANNERS, solve
from partita.testing.builders import Figures, chain, flat_cluster
from partita.testing.planner_suite import (
    PROBLEMS,
    BoundPlanner,
    PlannerSuite,
    all_placements,
    posed,
    solve_or_skip,
)


def two_stages(problem: Problem) -> dict[str, Any]:
    """Return boundaries with one cut near the middle, where there is room for two stages."""
    allowed = allowed_boundaries(problem.graph).tolist()
    if len(allowed) > 2 and len(main_devices(problem)) > 1:
        allowed = [allowed[0], allowed[len(allowed) // 2], allowed[-1]]
    else:
        allowed = [allowed[0], allowed[-1]]
    return {"boundaries": allowed}


def scattered(problem: Problem) -> dict[str, Any]:
    """Return the map of a random placement, or all on one device where none fits."""
    names, ops = problem.cluster.device_names, problem.graph.ops.names
    try:
        plan = plan_random(problem, seed=5).plan
    except InfeasibleError:
        return {"assignment": dict.fromkeys(ops, names[0])}
    return {"assignment": dict(zip(ops, [names[d] for d in plan.device_of], strict=True))}


GENERAL = [
    name for name in PLANNERS if name not in ("expert", "uniform_transformer", "piper", "grid")
]
"""The planners for any graph; the others refuse graphs that lack what they go by (own tests)."""

DECLARED = {name: row.minimises for name, row in PLANNERS.items() if row.minimises is not None}

NEEDED: Mapping[str, Callable[[Problem], dict[str, Any]]] = {
    "auto": lambda problem: {"iterations": 5},
    "brute-force": lambda problem: {"iterations": 40, "time_limit": 600.0},
    "local-search": lambda problem: {"iterations": 5},
    "hierarchical": lambda problem: {"iterations": 5},
    "custom": two_stages,
    "manual": scattered,
}


def call(name: str, problem: Problem) -> Solution:
    options = NEEDED[name](problem) if name in NEEDED else {}
    return solve(problem, name, **options)


@cache
def bound(name: str) -> BoundPlanner:
    """Return a planner with its options, the same object each time: it solves a problem once."""
    planner = partial(call, name)
    planner.minimises = PLANNERS[name].minimises
    return planner


class TestPlanners(PlannerSuite):
    # Of the class, so that the tests of one planner follow each other and share a process.
    @pytest.fixture(scope="class", params=GENERAL)
    @classmethod
    def planner(cls, request: pytest.FixtureRequest) -> BoundPlanner:
        return bound(request.param)

    @pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS)
    def test_a_solution_names_its_planner_and_options_so_that_it_can_be_found_again(
        self, planner, make
    ):
        solution = solve_or_skip(planner, make)
        assert bound(solution.planner) is planner
        assert solve(solution.problem, solution.planner, **thawed(solution.options)) == solution


@pytest.mark.parametrize("metric", [Metric.THROUGHPUT, Metric.PIPEDREAM_REPAIRED, Metric.MAX_LOAD])
@pytest.mark.parametrize("name", [name for name in GENERAL if name not in ("random", "manual")])
def test_ops_that_take_no_time_are_planned(name, metric):
    figures = Figures(forward_s=0.0, backward_s=0.0, tensor_bytes=10.0)
    objective = Objective(metric=metric)
    problem = Problem(graph=chain(4, figures), cluster=flat_cluster(2), objective=objective)
    assert call(name, posed(bound(name), problem)).value >= 0


@pytest.mark.parametrize("metric", Metric)
@pytest.mark.parametrize("name", DECLARED)
def test_a_planner_refuses_what_it_does_not_minimise_and_names_who_does(name, metric):
    if metric in DECLARED[name]:
        return
    objective = Objective(metric=metric)
    with pytest.raises(InvalidInputError) as caught:
        call(name, Problem(graph=chain(4), cluster=flat_cluster(2), objective=objective))
    others = [other for other, metrics in DECLARED.items() if metric in metrics]
    names = ", ".join([*others, "auto"])
    own = ", ".join(DECLARED[name])
    does = "do" if others else "does"
    assert str(caught.value) == (f"planner {name!r} minimises {own}, not {metric}; {names} {does}")


def claims(problem: Problem) -> Solution:
    """A planner that puts all on one device and says that nothing is better."""
    solution = plan_single(problem)
    return Solution(
        problem=problem,
        plan=solution.plan,
        metric=solution.metric,
        value=solution.value,
        unit=solution.unit,
        lower_bound=solution.value,
        proof=Proof.OPTIMAL,
    )


def test_the_suite_finds_a_wrong_claim():
    with pytest.raises(AssertionError):
        PlannerSuite().test_a_plan_that_claims_to_be_the_best_is_not_beaten(claims, chain(4))


def test_the_suite_finds_a_planner_that_forgets_where_it_is():
    turns = iter(range(100))
    with pytest.raises(AssertionError):
        PlannerSuite().test_the_same_problem_has_the_same_solution(
            lambda problem: plan_random(problem, seed=next(turns)), PROBLEMS["long chain"]
        )


def test_all_placements_are_all():
    problem = Problem(graph=chain(3), cluster=flat_cluster(2))
    plans = all_placements(problem, plan_single(problem).plan)
    assert len({tuple(plan.device_of.tolist()) for plan in plans}) == 8
