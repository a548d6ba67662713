"""Planners on tiny random problems, against every plan there is.

Exact planners equal the best plan, no planner beats it, no bound exceeds it, and pins hold.
"""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partita.bounds import lower_bound
from partita.core.problem import Metric, Objective, Problem, Schedule
from partita.core.rules import parse_rule
from partita.core.solution import Proof
from partita.errors import InfeasibleError, InvalidInputError
from partita.objectives.placed import placement_errors
from partita.planners.table import solve
from partita.testing.brute_force import brute_force
from partita.testing.builders import flat_cluster, paired_cluster, random_dag

SLACK = 1 + 1e-9
PLACERS = ("single", "uniform", "m-topo", "autopipe", "brute-force")
FEW = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


def placed(seed: int, metric: Metric, ops: int) -> Problem:
    rng = random.Random(seed)
    graph = random_dag(ops, rng, tied=0)
    cluster = flat_cluster(
        2, speeds=(1.0, rng.choice((1.0, 2.0))), bandwidth_bytes_per_s=rng.choice((20.0, 1e3))
    )
    if metric is Metric.SHARDING_COST:
        cluster = paired_cluster(2, latency_s=rng.choice((0.2, 1.0)))
    return Problem(graph=graph, cluster=cluster, objective=Objective(metric=metric))


def piped(seed: int, ops: int) -> Problem:
    """Return a problem about a step with a given schedule, so that all plans can be listed."""
    objective = Objective(schedule=Schedule.ONE_F_ONE_B, microbatches=2, microbatch_size=1)
    return replace(placed(seed, Metric.THROUGHPUT, ops), objective=objective)


@pytest.mark.parametrize("metric", [Metric.MAX_LOAD, Metric.SHARDING_COST])
@FEW
@given(seed=st.integers(0, 10**6), ops=st.integers(3, 7))
def test_what_is_called_optimal_equals_the_best_of_all_placements(metric, seed, ops):
    problem = placed(seed, metric, ops)
    best = brute_force(problem).value
    assert lower_bound(problem) <= best * SLACK
    solution = solve(problem, "auto", iterations=5)
    assert best <= solution.value * SLACK
    if solution.proof is Proof.OPTIMAL:
        assert solution.value <= best * SLACK
    exact = solve(problem, "brute-force")
    assert exact.value == pytest.approx(best)


@FEW
@given(seed=st.integers(0, 10**6), ops=st.integers(3, 5))
def test_no_planner_is_above_its_proof_or_below_its_bound_for_a_step(seed, ops):
    problem = piped(seed, ops)
    best = brute_force(problem).value
    assert lower_bound(problem) <= best * SLACK
    for name in (*PLACERS, "auto"):
        options = {"iterations": 5} if name in ("auto", "brute-force") else {}
        solution = solve(problem, name, **options)
        assert solution.lower_bound <= min(best, solution.value) * SLACK
        if solution.proof is Proof.OPTIMAL:
            assert solution.value <= best * SLACK


@FEW
@given(seed=st.integers(0, 10**6), ops=st.integers(3, 5))
def test_auto_comes_near_the_best_pipeline(seed, ops):
    problem = piped(seed, ops)
    assert solve(problem, "auto", iterations=60).value <= brute_force(problem).value * 1.1


@FEW
@given(seed=st.integers(0, 10**6), ops=st.integers(4, 7), pinned=st.integers(0, 3))
def test_pins_hold_or_are_refused(seed, ops, pinned):
    rule = parse_rule(f"op{pinned}=d{seed % 2}", forbids=bool(seed % 3 == 0))
    problem = replace(piped(seed, ops), rules=(rule,))
    for name in (*PLACERS, "auto"):
        options = {"iterations": 5} if name in ("auto", "brute-force") else {}
        try:
            solution = solve(problem, name, **options)
        except (InfeasibleError, InvalidInputError):
            assert name != "auto"
            continue
        assert placement_errors(problem, solution.plan) == []
