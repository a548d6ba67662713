"""No plan is below a bound: whatever the metric, the cluster, the graph, and what is left open."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.bounds import Effort, bounds, lower_bound
from partita.core.metrics import METRICS as ROWS
from partita.core.plan import Shard
from partita.core.problem import Metric, Mode, Objective, Problem, Schedule
from partita.cost.judge import measure
from partita.cost.predict import simulate
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.pipeline import solution_of
from partita.planners.table import solve
from partita.testing.brute_force import brute_force, some_plans
from partita.testing.builders import flat_cluster, host_cluster, random_dag
from partita.testing.tiny_problems import tiny_problem

SEEDS = st.integers(min_value=0, max_value=10**9)
SHARDS = (Shard.NONE, Shard.OPTIMIZER, Shard.PARAMETERS)
SLACK = 1 + 1e-9
BOUNDED = [metric for metric, row in ROWS.items() if row.bound]
METRICS = pytest.mark.parametrize("metric", BOUNDED, ids=lambda metric: metric.value)


def accepted_value(problem, plan):
    """Return the value of a plan that the problem accepts, else ``None``.

    A period is what more steps add to a few; it is not yet steady where it is below what a device
    computes in a step.
    """
    try:
        value = solution_of(problem, plan, "drawn", {}).value
    except (InfeasibleError, InvalidInputError):
        return None
    if plan.stashes_weights and problem.objective.metric is Metric.THROUGHPUT:
        busy_s = float(simulate(problem, plan).busy_s.max())
        return value if value >= busy_s * (1 - 1e-9) else None
    return value


@METRICS
@settings(max_examples=25)
@given(seed=SEEDS)
def test_no_drawn_plan_is_below_a_bound(metric, seed):
    rng = random.Random(seed)
    problem = tiny_problem(rng, metric, max_ops=7)
    found = [*bounds(problem), *bounds(problem, effort=Effort.FULL)]
    for plan in some_plans(problem, rng, 8, shards=SHARDS):
        value = accepted_value(problem, plan)
        if value is not None:
            wrong = [one for one in found if one.value > value * SLACK]
            assert not wrong, f"{wrong} above {value} of {plan}"


@METRICS
@settings(max_examples=4)
@given(seed=SEEDS)
def test_no_optimum_is_below_a_bound(metric, seed):
    """Every plan of very small problems, with what the problem leaves open."""
    rng = random.Random(seed)
    problem = tiny_problem(rng, metric, max_ops=4, max_devices=2)
    objective = problem.objective
    if metric in (Metric.THROUGHPUT, Metric.PIPER):
        objective = replace(objective, microbatches=2, microbatch_size=1)
        if objective.mode is Mode.TRAINING:
            objective = replace(objective, schedule=Schedule.ONE_F_ONE_B)
    problem = replace(problem, objective=objective)
    try:
        best = brute_force(problem)
    except InfeasibleError:
        return
    assert all(one.value <= best.value * SLACK for one in bounds(problem))


def problems(schedule: Schedule, seed: int):
    """Yield a random problem with its schedule given, and the same with everything left open."""
    rng = random.Random(seed)
    infers = schedule is Schedule.INFERENCE
    graph = random_dag(rng.randint(3, 12), rng)
    speeds = [rng.choice((0.5, 1.0, 2.0)) for _ in range(4)]
    mixed = flat_cluster(4, speeds=speeds)
    hosts = host_cluster(2, 2, inside_bytes_per_s=1e4, between_bytes_per_s=1e3)
    cluster = rng.choice((mixed, hosts))
    given_ = Objective(
        mode=Mode.INFERENCE if infers else Mode.TRAINING,
        schedule=schedule,
        microbatches=rng.choice((1, 2, 4)),
        microbatch_size=rng.choice((1, 2, 5)),
    )
    yield Problem(graph=graph, cluster=cluster, objective=given_)
    open_ = replace(given_, schedule=None, microbatches=None, microbatch_size=None)
    yield Problem(graph=graph, cluster=cluster, objective=open_)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("schedule", Schedule)
def test_no_plan_of_a_planner_is_below_the_bound(schedule, seed):
    for problem in problems(schedule, seed):
        for planner in ("single", "uniform", "random"):
            try:
                plan = solve(problem, planner).plan
                value = accepted_value(problem, replace(plan, schedule=schedule))
            except InvalidInputError:  # tied parameters cannot be stashed
                continue
            assert value is None or lower_bound(problem) <= value * SLACK


@pytest.mark.parametrize("seed", range(12))
def test_no_latency_is_below_its_bound(seed):
    for problem in problems(Schedule.GPIPE, seed):
        objective = replace(problem.objective, metric=Metric.LATENCY)
        problem = replace(problem, objective=objective)  # noqa: PLW2901
        for planner in ("single", "uniform", "random"):
            plan = solve(problem, planner).plan
            assert lower_bound(problem) <= measure(problem, plan).value * SLACK


def test_the_bound_is_not_trivial():
    problem = next(problems(Schedule.ONE_F_ONE_B, 1))
    assert lower_bound(problem) > 0
