"""What every planner keeps, as tests that a plug-in can run on its own planner.

A test module of the plug-in needs no more than this:

    class TestMine(PlannerSuite):
        @pytest.fixture
        def planner(self):
            return plan_mine

A planner is called with a problem and nothing else: bind options before. It must solve every
problem of ``PROBLEMS``; those of ``PICKY_PROBLEMS`` it may refuse with an ``InfeasibleError`` that
names a device or an op. Each problem is solved once for all checks of its solution, as long as the
fixture returns the same object each time; one test solves every problem again. A planner that
declares what it minimises (its attribute ``minimises``) is asked for the first of these metrics
where a problem has another one, and may refuse a problem to which that metric does not apply.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from typing import TypeAlias

import numpy as np
import pytest

from partita.bounds import lower_bound
from partita.core.cluster import Cluster, Device, Level
from partita.core.codec import read_json, write_json
from partita.core.graph import DeviceKind, Graph, Phase
from partita.core.placement import placement_plan
from partita.core.plan import Plan
from partita.core.problem import Metric, Mode, Objective, Problem
from partita.core.solution import Proof, Solution
from partita.cost.judge import measure
from partita.cost.predict import simulate
from partita.cost.proof import check
from partita.errors import InfeasibleError, InvalidInputError
from partita.objectives.placed import placement_errors
from partita.testing.builders import (
    Figures,
    Traits,
    chain,
    diamond,
    flat_cluster,
    host_cluster,
    paired_cluster,
    random_dag,
)

BoundPlanner: TypeAlias = Callable[[Problem], Solution]
Make: TypeAlias = Callable[[], Problem]

_SIZES = Figures(parameter_bytes=8.0, tensor_bytes=50.0, saved_bytes=20.0, load_s=0.01)


def _long_chain() -> Problem:
    cluster = flat_cluster(3, bandwidth_bytes_per_s=1e3, latency_s=1e-3, memory_bytes=5000.0)
    return Problem(graph=chain(8, _SIZES, skips=[(0, 5), (2, 7)]), cluster=cluster)


def _one_op() -> Problem:
    return Problem(graph=chain(1), cluster=flat_cluster(4))


def _one_device() -> Problem:
    return Problem(graph=chain(5, _SIZES), cluster=flat_cluster(1))


def _wide() -> Problem:
    return Problem(graph=diamond(4, _SIZES), cluster=paired_cluster(3, bandwidth_bytes_per_s=500.0))


def _hosts() -> Problem:
    cluster = host_cluster(2, 2, inside_bytes_per_s=1e4, between_bytes_per_s=1e2)
    return Problem(graph=random_dag(24, random.Random(11)), cluster=cluster)


def _tied() -> Problem:
    traits = Traits(tied=[(0, 5), (1, 2, 3)], frozen=[4], bare=[1], labels=True)
    return Problem(graph=chain(6, _SIZES, traits), cluster=flat_cluster(2))


def _uneven_devices() -> Problem:
    cluster = flat_cluster(3, speeds=(0.5, 2.0, 1.0), bandwidth_bytes_per_s=1e4)
    objective = Objective(microbatches=6, microbatch_size=2)
    graph = chain(7, replace(_SIZES, batch_size=4))
    return Problem(graph=graph, cluster=cluster, objective=objective)


def _inference() -> Problem:
    objective = Objective(mode=Mode.INFERENCE, microbatches=4)
    return Problem(graph=diamond(3, _SIZES), cluster=flat_cluster(2), objective=objective)


def _latency() -> Problem:
    cluster = flat_cluster(2, bandwidth_bytes_per_s=1e3)
    objective = Objective(metric=Metric.LATENCY)
    return Problem(graph=diamond(3, _SIZES), cluster=cluster, objective=objective)


def _max_load() -> Problem:
    return replace(_long_chain(), objective=Objective(metric=Metric.MAX_LOAD))


def _with_ops(graph: Graph, **columns: object) -> Graph:
    return replace(graph, ops=replace(graph.ops, **columns))  # type: ignore[arg-type]  # any column


def _colocated() -> Problem:
    graph = _with_ops(chain(8, _SIZES), colocation=[0, -1, 0, 1, 1, -1, 2, 2])
    return Problem(graph=graph, cluster=flat_cluster(3))


def _explicit_backward() -> Problem:
    phase = [Phase.FORWARD] * 4 + [Phase.BACKWARD] * 4
    graph = _with_ops(chain(8, _SIZES), phase=phase, colocation=[0, 1, 2, 3, 3, 2, 1, 0])
    return Problem(graph=graph, cluster=flat_cluster(2))


def _mixed_cluster() -> Cluster:
    devices = (
        Device(name="gpu0"),
        Device(name="gpu1"),
        Device(name="cpu0", kind=DeviceKind.CPU, speed=0.1),
    )
    level = Level(
        name="host", group_of=np.zeros(3, np.int32), bandwidth_bytes_per_s=np.full(1, 1e3)
    )
    return Cluster(devices=devices, levels=(level,))


def _mixed_kinds() -> Problem:
    graph = _with_ops(chain(5, _SIZES), device_kinds=[2, 1, 3, 1, 2])
    return Problem(graph=graph, cluster=_mixed_cluster())


def _tight() -> Problem:
    figures = replace(_SIZES, parameter_bytes=[400.0, 10.0, 10.0, 10.0, 10.0, 400.0])
    return Problem(graph=chain(6, figures), cluster=flat_cluster(2, memory_bytes=3000.0))


PROBLEMS: Mapping[str, Make] = {
    "long chain": _long_chain,
    "one op": _one_op,
    "one device": _one_device,
    "wide": _wide,
    "hosts": _hosts,
    "tied parameters": _tied,
    "uneven devices": _uneven_devices,
    "inference": _inference,
    "latency": _latency,
    "max-load": _max_load,
    "colocated": _colocated,
    "explicit backward": _explicit_backward,
}
"""Problems with room for any plan."""

PICKY_PROBLEMS: Mapping[str, Make] = {"mixed kinds": _mixed_kinds, "tight": _tight}
"""Problems that a simple planner may refuse."""

HOLDS_MEMORY = frozenset(Metric) - {Metric.SHARDING_COST}
"""Metrics that limit memory."""

_EVERY = pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS)
_ALSO_PICKY = pytest.mark.parametrize(
    "make", [*PROBLEMS.values(), *PICKY_PROBLEMS.values()], ids=[*PROBLEMS, *PICKY_PROBLEMS]
)


def posed(planner: BoundPlanner, problem: Problem) -> Problem:
    """Return a problem by a metric that a planner minimises: its own, else the planner's first."""
    metrics = getattr(planner, "minimises", None)
    objective = problem.objective
    if not metrics or objective.metric in metrics:
        return problem
    return replace(problem, objective=replace(objective, metric=Metric(metrics[0])))


@cache
def solve_once(planner: BoundPlanner, make: Make) -> Solution | InfeasibleError | InvalidInputError:
    """Return the solution of a problem or the refusal; the same object for the same arguments."""
    problem = posed(planner, make())
    try:
        return planner(problem)
    except InfeasibleError as exc:
        return exc
    except InvalidInputError as exc:
        return exc


def solve_or_skip(planner: BoundPlanner, make: Make) -> Solution:
    """Return the solution of a problem; skip one that the planner may refuse and does."""
    found = solve_once(planner, make)
    if isinstance(found, Solution):
        return found
    made = make()
    problem = posed(planner, made)
    if problem is made and (make in PROBLEMS.values() or isinstance(found, InvalidInputError)):
        raise found
    if isinstance(found, InfeasibleError):
        check_names_a_part(problem, str(found))
    pytest.skip(f"refused: {found}")


def _skip_other_memory(solution: Solution, make: Make) -> None:
    if solution.problem.objective.metric is not make().objective.metric:
        pytest.skip("memory counts by the rule of the planner's own metric")


def check_names_a_part(problem: Problem, message: str) -> None:
    """Check that a refusal says which device or op is the obstacle."""
    known = [*problem.cluster.device_names, *problem.graph.ops.names]
    assert any(repr(name) in message for name in known), message


def all_placements(problem: Problem, like: Plan) -> list[Plan]:
    """Return a plan for every way to put each op on one device; exponential, for a few ops."""
    count = len(problem.cluster)
    return [
        placement_plan(
            problem.graph,
            problem.cluster.device_names,
            np.array(device_of),
            schedule=like.schedule,
            microbatch_sizes=like.microbatch_sizes,
        )
        for device_of in product(range(count), repeat=len(problem.graph))
    ]


class PlannerSuite:
    """The tests; a subclass gives the fixture ``planner``."""

    @pytest.fixture
    def planner(self) -> BoundPlanner:
        """Return the planner under test."""
        raise NotImplementedError("give the fixture 'planner' in a subclass")

    @_ALSO_PICKY
    def test_every_op_is_placed_once(self, planner: BoundPlanner, make: Make) -> None:
        """Check that the plan is one for the problem."""
        solution = solve_or_skip(planner, make)
        plan = solution.plan
        assert len(plan.stage_of) == len(solution.problem.graph)
        assert sorted(set(plan.stage_of.tolist())) == list(range(len(plan.stages)))
        plan.check_fits(solution.problem)
        assert solution.problem == posed(planner, make())

    @_ALSO_PICKY
    def test_ops_run_where_they_may(self, planner: BoundPlanner, make: Make) -> None:
        """Check device kinds and colocation classes."""
        solution = solve_or_skip(planner, make)
        assert placement_errors(solution.problem, solution.plan) == []

    @_ALSO_PICKY
    def test_memory_is_respected(self, planner: BoundPlanner, make: Make) -> None:
        """Check the simulated peak of every device."""
        solution = solve_or_skip(planner, make)
        _skip_other_memory(solution, make)
        timeline = simulate(solution.problem, solution.plan)
        assert bool((timeline.peak_bytes <= timeline.limit_bytes).all())

    @_ALSO_PICKY
    def test_the_value_is_what_the_cost_model_says(self, planner: BoundPlanner, make: Make) -> None:
        """Check metric, value and unit."""
        solution = solve_or_skip(planner, make)
        value = measure(solution.problem, solution.plan)
        assert solution.metric is solution.problem.objective.metric
        assert solution.value == pytest.approx(value.value, rel=1e-9)
        assert solution.unit == value.unit
        assert value.errors == ()

    @_ALSO_PICKY
    def test_no_value_is_below_the_bound(self, planner: BoundPlanner, make: Make) -> None:
        """Check the value against the solution's bound and the cost model's."""
        solution = solve_or_skip(planner, make)
        slack = 1 + 1e-9
        assert solution.lower_bound <= solution.value * slack
        assert lower_bound(solution.problem) <= solution.value * slack

    @_ALSO_PICKY
    def test_the_plan_lowers_checks_and_plays(self, planner: BoundPlanner, make: Make) -> None:
        """Check that the plan can be carried out."""
        solution = solve_or_skip(planner, make)
        _skip_other_memory(solution, make)
        report = check(solution.problem, solution.plan)
        assert report.num_instructions > 0
        assert simulate(solution.problem, solution.plan).makespan_s > 0

    @_ALSO_PICKY
    def test_the_solution_survives_its_document(self, planner: BoundPlanner, make: Make) -> None:
        """Check the round trip through JSON."""
        solution = solve_or_skip(planner, make)
        assert read_json(write_json(solution)) == solution

    @_EVERY
    def test_the_same_problem_has_the_same_solution(
        self, planner: BoundPlanner, make: Make
    ) -> None:
        """Check a second solution, of the problem made anew and read from its document."""
        first = solve_or_skip(planner, make)
        assert planner(read_json(write_json(posed(planner, make())))) == first

    @pytest.mark.parametrize("metric", [Metric.THROUGHPUT, Metric.LATENCY, Metric.MAX_LOAD])
    def test_an_op_that_no_device_can_hold_is_infeasible(
        self, planner: BoundPlanner, metric: Metric
    ) -> None:
        """Check the refusal, and that it names a device or an op."""
        figures = replace(_SIZES, parameter_bytes=[8.0, 8.0, 1e9, 8.0])
        cluster = flat_cluster(2, memory_bytes=1e6)
        objective = Objective(metric=metric)
        problem = Problem(graph=chain(4, figures), cluster=cluster, objective=objective)
        problem = posed(planner, problem)
        if problem.objective.metric not in (metric, *HOLDS_MEMORY):
            pytest.skip(f"{problem.objective.metric.value} has no limit of memory")
        with pytest.raises(InfeasibleError) as caught:
            planner(problem)
        check_names_a_part(problem, str(caught.value))

    def test_the_memory_factor_counts(self, planner: BoundPlanner) -> None:
        """Check that a share of the memory is a limit, too."""
        problem = posed(planner, replace(_long_chain(), objective=Objective(memory_factor=1e-6)))
        if problem.objective.metric not in (Metric.THROUGHPUT, *HOLDS_MEMORY):
            pytest.skip(f"{problem.objective.metric.value} has no limit of memory")
        with pytest.raises(InfeasibleError) as caught:
            planner(problem)
        check_names_a_part(problem, str(caught.value))

    @pytest.mark.parametrize("graph", [chain(4, _SIZES), diamond(2, _SIZES)], ids=["chain", "wide"])
    def test_a_plan_that_claims_to_be_the_best_is_not_beaten(
        self, planner: BoundPlanner, graph: Graph
    ) -> None:
        """Check a proof against all placements of a small graph."""
        cluster = flat_cluster(2, bandwidth_bytes_per_s=100.0)
        problem = Problem(graph=graph, cluster=cluster, objective=Objective(microbatches=2))
        problem = posed(planner, problem)
        solution = planner(problem)
        if solution.proof is not Proof.OPTIMAL:
            return
        found = [measure(problem, plan).value for plan in all_placements(problem, solution.plan)]
        assert solution.value <= min(found) * (1 + 1e-9)
