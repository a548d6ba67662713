"""Every plan is there, once, and the best one is found."""

import random

import pytest

from partita.core.plan import Shard
from partita.core.problem import Metric, Objective, Problem, Schedule
from partita.core.solution import Proof
from partita.errors import InfeasibleError
from partita.testing.brute_force import all_plans, brute_force, some_plans
from partita.testing.builders import Figures, chain, diamond, flat_cluster, paired_cluster
from partita.testing.tiny_problems import tiny_problem


def problem_of(graph, cluster, **objective):
    return Problem(graph=graph, cluster=cluster, objective=Objective(**objective))


def test_like_devices_are_used_in_their_order():
    two = problem_of(chain(3), flat_cluster(2), metric=Metric.MAX_LOAD)
    assert len(list(all_plans(two))) == 4
    mixed = problem_of(chain(3), flat_cluster(2, speeds=(1.0, 2.0)), metric=Metric.MAX_LOAD)
    assert len(list(all_plans(mixed))) == 8
    matrix = problem_of(chain(3), paired_cluster(2), metric=Metric.MAX_LOAD)
    assert len(list(all_plans(matrix))) == 4


def test_pipelines_have_replicas_with_even_and_uneven_shares():
    problem = problem_of(
        chain(2), flat_cluster(3), metric=Metric.PIPEDREAM_REPAIRED, microbatches=6
    )
    plans = list(all_plans(problem))
    shares = {stage.shares for plan in plans for stage in plan.stages}
    assert {(1,), (1, 1), (1, 2), (2, 1), (1, 1, 1)} <= shares
    assert {len(plan.stages) for plan in plans} == {1, 2}
    assert all(plan.num_microbatches == 6 for plan in plans)


def test_what_is_left_open_takes_every_value():
    problem = problem_of(chain(1), flat_cluster(1))
    plans = list(all_plans(problem))
    assert {plan.schedule for plan in plans} == set(Schedule) - {Schedule.INFERENCE}
    assert {plan.num_microbatches for plan in plans} == set(range(1, 9))
    assert all(plan.samples == 8 for plan in plans)
    assert {bool(plan.recompute[0]) for plan in plans} == {False, True}


def test_the_order_of_a_makespan_matters():
    figures = Figures(forward_s=[1.0, 1.0, 5.0, 1.0])
    problem = problem_of(diamond(2, figures), flat_cluster(1), metric=Metric.MAKESPAN_PARALLEL)
    assert len(list(all_plans(problem))) == 1
    two = problem_of(diamond(2, figures), flat_cluster(2), metric=Metric.MAKESPAN_PARALLEL)
    assert brute_force(two).value == pytest.approx(7.0)


def test_the_best_plan_is_optimal_among_all():
    problem = problem_of(chain(3), flat_cluster(2), metric=Metric.MAX_LOAD)
    best = brute_force(problem)
    assert best.proof is Proof.OPTIMAL
    assert best.value == pytest.approx(6.0)
    drawn = brute_force(problem, some_plans(problem, random.Random(1), 5))
    assert drawn.proof is Proof.FEASIBLE
    assert drawn.value >= best.value


def test_where_nothing_fits_there_is_no_best_plan():
    graph = chain(2, Figures(parameter_bytes=1e6))
    problem = problem_of(
        graph, flat_cluster(2, memory_bytes=10.0), metric=Metric.PIPEDREAM_REPAIRED
    )
    with pytest.raises(InfeasibleError, match="'d0'"):
        brute_force(problem)


def test_drawn_plans_may_divide_their_state():
    problem = problem_of(chain(2), flat_cluster(2), microbatches=2, schedule=Schedule.GPIPE)
    plans = some_plans(problem, random.Random(3), 60, shards=(Shard.PARAMETERS,))
    assert Shard.PARAMETERS in {stage.shard for plan in plans for stage in plan.stages}


@pytest.mark.parametrize("metric", [Metric.THROUGHPUT, Metric.PIPER, Metric.SHARDING_COST])
def test_one_seed_is_one_problem(metric):
    first = tiny_problem(random.Random(5), metric)
    assert tiny_problem(random.Random(5), metric) == first
    assert len(first.graph) <= 6
