"""All placements under the other metrics: measured, with a proof where there can be one."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core.problem import Metric, Objective, Problem
from partita.core.rules import Rule
from partita.core.solution import Proof
from partita.cost.judge import measure
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.assignment.exhaustive import plan_of
from partita.planners.brute_force import plan_brute_force
from partita.planners.effort import SearchTrace
from partita.testing.builders import Figures, chain, flat_cluster, graph_of, host_cluster
from partita.testing.planner_suite import PICKY_PROBLEMS, PROBLEMS

FIGURES = Figures(tensor_bytes=50.0, parameter_bytes=8.0)


def every_value(problem):
    """Return the value of every placement that keeps its limits."""
    values = []
    for place in product(range(len(problem.cluster)), repeat=len(problem.graph)):
        value = measure(problem, plan_of(problem, np.array(place)))
        if not value.errors:
            values.append(value.value)
    return values


@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    st.sampled_from([Metric.MAX_LOAD, Metric.LATENCY, Metric.THROUGHPUT]),
    st.sampled_from([10.0, 1e3]),
)
@settings(max_examples=12)
def test_it_finds_the_best_placement(forward_s, metric, bandwidth):
    graph = chain(len(forward_s), replace(FIGURES, forward_s=forward_s))
    cluster = flat_cluster(2, bandwidth_bytes_per_s=bandwidth)
    problem = Problem(graph=graph, cluster=cluster, objective=Objective(metric=metric))
    solution = plan_brute_force(problem, time_limit=60)
    assert solution.value == pytest.approx(min(every_value(problem)))
    assert solution.lower_bound <= solution.value
    if metric is Metric.MAX_LOAD:
        assert solution.proof is Proof.OPTIMAL


def test_other_plans_than_placements_are_not_ruled_out():
    """Replicas are no placement: for throughput nothing is proven but by the bound."""
    problem = Problem(graph=chain(3, FIGURES), cluster=flat_cluster(2, bandwidth_bytes_per_s=100.0))
    solution = plan_brute_force(problem, time_limit=60)
    assert solution.stats["complete"] is True
    assert solution.proof is Proof.FEASIBLE


def test_equal_devices_are_not_told_apart():
    cluster = flat_cluster(3, bandwidth_bytes_per_s=100.0)
    problem = Problem(graph=chain(4, FIGURES), cluster=cluster, objective=Objective(microbatches=2))
    found = plan_brute_force(problem, time_limit=60)
    assert found.stats["complete"] is True
    # 14 set partitions of four ops into one to three parts, and pipelines that start it.
    assert 14 <= found.stats["plans"] <= 14 + 9


def test_hosts_are_told_apart():
    cluster = host_cluster(2, 2, inside_bytes_per_s=1e6, between_bytes_per_s=1.0)
    problem = Problem(
        graph=chain(3, FIGURES), cluster=cluster, objective=Objective(metric=Metric.LATENCY)
    )
    solution = plan_brute_force(problem, time_limit=60)
    assert solution.value == pytest.approx(min(every_value(problem)))


def test_pins_hold():
    rules = (Rule(ops="op1", devices="d1"), Rule(ops="op0", devices="d1", forbids=True))
    problem = Problem(graph=chain(3, FIGURES), cluster=flat_cluster(2), rules=rules)
    names = plan_brute_force(problem, time_limit=60).plan
    assert [names.devices[d] for d in names.device_of.tolist()][:2] == ["d0", "d1"]


def test_a_placement_is_found_where_memory_is_tight_and_kinds_are_mixed():
    for make in PICKY_PROBLEMS.values():
        assert plan_brute_force(make(), iterations=2000).value > 0


def test_a_number_of_plans_is_a_limit_and_the_result_is_the_same_every_time():
    problem = PROBLEMS["hosts"]()
    one, other = (plan_brute_force(problem, iterations=12, time_limit=600.0) for _ in range(2))
    assert one == other
    assert one.stats["complete"] is False
    assert one.stats["plans"] == 12


def test_time_is_a_limit():
    solution = plan_brute_force(PROBLEMS["hosts"](), time_limit=1e-9)
    assert solution.proof is Proof.TIME_LIMIT
    assert solution.stats["plans"] == 1


def test_the_trace_begins_with_the_first_and_ends_with_the_value():
    trace = SearchTrace()
    solution = plan_brute_force(PROBLEMS["wide"](), iterations=40, trace=trace)
    values = [value for _, value in trace.points]
    assert values == sorted(set(values), reverse=True)
    assert values[-1] == pytest.approx(solution.value)
    assert "trace" not in solution.options


def test_backward_ops_alone_on_a_device_are_a_stage_of_their_own():
    problem = PROBLEMS["explicit backward"]()
    graph = replace(problem.graph, ops=replace(problem.graph.ops, colocation=np.full(8, -1)))
    plan = plan_of(replace(problem, graph=graph), np.array([0, 0, 0, 0, 1, 1, 1, 1]))
    plan.check_fits(replace(problem, graph=graph))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 0}, "iterations is 0; expected a whole number of 1 or more"),
        ({"iterations": 1.5}, "iterations is 1.5; expected a whole number"),
        ({"time_limit": 0.0}, "time_limit is 0.0; expected more than 0 seconds"),
        ({"time_limit": "soon"}, "time_limit is 'soon'; expected more than 0 seconds"),
    ],
)
def test_limits_that_are_none_are_refused(options, message):
    with pytest.raises(InvalidInputError, match=message):
        plan_brute_force(PROBLEMS["wide"](), **options)


def test_a_cluster_with_levels_costs_its_latencies():
    problem = Problem(
        graph=graph_of(3, [(0, 1), (1, 2)]),
        cluster=flat_cluster(2, latency_s=0.25),
        objective=Objective(metric=Metric.SHARDING_COST),
    )
    found = plan_brute_force(problem)
    details = measure(problem, found.plan).details
    assert details["cross_edge"] == 0.25 * details["cut_edges"]
    assert found.proof is Proof.OPTIMAL


def test_what_cannot_fit_is_infeasible_and_named():
    figures = replace(FIGURES, parameter_bytes=1e9)
    problem = Problem(graph=chain(2, figures), cluster=flat_cluster(2, memory_bytes=1e6))
    with pytest.raises(InfeasibleError, match="'d0'"):
        plan_brute_force(problem)
