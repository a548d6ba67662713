"""A plan is judged once: value, the first limit that it breaks, and why."""

import math
from dataclasses import replace

import pytest

from partita.core.problem import Metric, Objective, Problem
from partita.core.rules import Rule
from partita.cost.judge import Limit, check_memory, judge, measure, peaks
from partita.cost.memory import peak_memory
from partita.errors import InfeasibleError, InvalidInputError, UnsupportedError
from partita.program.lower import lower
from partita.testing.builders import Figures, chain, flat_cluster, pipeline

GRAPH = chain(4, Figures(parameter_bytes=100.0, saved_bytes=10.0))


def case(memory_bytes=math.inf, metric=Metric.THROUGHPUT, rules=()):
    cluster = flat_cluster(2, memory_bytes=memory_bytes)
    objective = Objective(metric=metric, microbatches=2)
    problem = Problem(graph=GRAPH, cluster=cluster, objective=objective, rules=rules)
    return problem, pipeline(GRAPH, cluster, [0, 1], microbatches=2)


@pytest.mark.parametrize("metric", [Metric.THROUGHPUT, Metric.LATENCY, Metric.PIPEDREAM])
def test_a_plan_that_keeps_all_limits_has_its_value_and_no_reason(metric):
    problem, plan = case(metric=metric)
    found = judge(problem, plan)
    assert found.feasible
    assert found.value.value == measure(problem, plan).value
    assert (found.limit, found.reason, found.over_bytes) == (None, "", 0.0)


@pytest.mark.parametrize("metric", [Metric.THROUGHPUT, Metric.LATENCY])
def test_memory_over_its_limit_is_said_in_bytes(metric):
    problem, plan = case(metric=metric)
    peak = peak_memory(problem, plan, lower(problem, plan))
    small, plan = case(memory_bytes=float(peak.max()) - 5, metric=metric)
    found = judge(small, plan)
    assert (found.limit, found.over_bytes) == (Limit.MEMORY, 5)
    assert found.reason.endswith("needs 5 B more than its limit")
    assert found.headroom_bytes.tolist() == (float(peak.max()) - 5 - peak).tolist()
    with pytest.raises(InfeasibleError, match=r"largest.*, 5 B"):
        check_memory(small, plan)


def test_a_broken_rule_comes_before_memory():
    problem, plan = case(memory_bytes=1, rules=(Rule(ops="op0", devices="d1"),))
    found = judge(problem, plan)
    assert (found.limit, found.over_bytes) == (Limit.RULE, math.inf)
    assert "where a rule forbids it" in found.reason


def test_a_metric_with_its_own_rule_of_memory_is_believed():
    problem, plan = case(memory_bytes=1, metric=Metric.MAX_LOAD)
    found = judge(problem, plan)
    assert found.limit is Limit.METRIC
    assert found.reason == found.value.errors[0]
    assert found.headroom_bytes is None


def test_a_metric_that_does_not_apply_is_refused():
    problem, plan = case(metric=Metric.PIPER)
    with pytest.raises(InvalidInputError, match="'piper' does not apply"):
        judge(problem, plan)


def test_energy_keeps_within_memory_too():
    problem, plan = case(memory_bytes=1, metric=Metric.ENERGY)
    devices = tuple(replace(d, max_w=300.0, idle_w=50.0) for d in problem.cluster.devices)
    problem = replace(problem, cluster=replace(problem.cluster, devices=devices))
    assert judge(problem, plan).limit is Limit.MEMORY


def test_money_is_the_price_of_the_devices_in_use():
    problem, plan = case(metric=Metric.COST)
    with pytest.raises(UnsupportedError, match="price of device 'd0'"):
        judge(problem, plan)
    devices = tuple(replace(d, price_per_hour=3.0) for d in problem.cluster.devices)
    problem = replace(problem, cluster=replace(problem.cluster, devices=devices))
    seconds = judge(
        replace(problem, objective=replace(problem.objective, metric=Metric.THROUGHPUT)), plan
    ).value.value
    found = judge(problem, plan).value
    assert (found.value, found.unit) == (pytest.approx(2 * 3.0 * seconds / 3600), "$")


def test_the_fullest_device_is_the_one_that_needs_the_largest_share():
    problem, plan = case(memory_bytes=1000.0)
    small = replace(problem, objective=replace(problem.objective, memory_factor=0.5))
    roomy, tight = peaks(problem, plan), peaks(small, plan)
    assert small.limit_bytes.tolist() == tight.limit_bytes.tolist() == [500.0, 500.0]
    assert tight.worst == (float(roomy.peak_bytes.max()), 500.0)
    assert tight.fullness == 2 * roomy.fullness
    assert (roomy.fit, tight.fit) == (True, bool((tight.over_bytes <= 0).all()))
