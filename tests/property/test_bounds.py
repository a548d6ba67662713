"""No plan is below the bound: every schedule, with the schedule given and left open."""

import random
from dataclasses import replace

import pytest

from partita.core.problem import Metric, Mode, Objective, Problem, Schedule
from partita.cost.bounds import lower_bound
from partita.cost.evaluate import measure
from partita.errors import PartitaError
from partita.plan.table import solve
from partita.testing.builders import flat_cluster, host_cluster, random_dag


def problems(schedule: Schedule, seed: int):
    """Yield a random problem with its schedule given, and the same with everything left open."""
    rng = random.Random(seed)
    infers = schedule is Schedule.INFERENCE
    graph = random_dag(rng.randint(3, 12), rng)
    speeds = [rng.choice((0.5, 1.0, 2.0)) for _ in range(4)]
    mixed = flat_cluster(4, speeds=speeds)
    hosts = host_cluster(2, 2, inside_bytes_per_s=1e4, between_bytes_per_s=1e3)
    cluster = rng.choice((mixed, hosts))
    given = Objective(
        mode=Mode.INFERENCE if infers else Mode.TRAINING,
        schedule=schedule,
        microbatches=rng.choice((1, 2, 4)),
        microbatch_size=rng.choice((1, 2, 5)),
    )
    yield Problem(graph=graph, cluster=cluster, objective=given)
    open_ = replace(given, schedule=None, microbatches=None, microbatch_size=None)
    yield Problem(graph=graph, cluster=cluster, objective=open_)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("schedule", Schedule)
def test_no_plan_is_below_the_bound(schedule, seed):
    for problem in problems(schedule, seed):
        for planner in ("single", "uniform", "random"):
            try:
                plan = solve(problem, planner).plan
            except PartitaError:  # tied parameters cannot be stashed
                continue
            plan = replace(plan, schedule=schedule)
            try:
                value = measure(problem, plan).value
            except PartitaError:
                continue
            assert lower_bound(problem) <= value * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_no_latency_is_below_its_bound(seed):
    for problem in problems(Schedule.GPIPE, seed):
        objective = replace(problem.objective, metric=Metric.LATENCY)
        problem = replace(problem, objective=objective)  # noqa: PLW2901
        for planner in ("single", "uniform", "random"):
            plan = solve(problem, planner).plan
            assert lower_bound(problem) <= measure(problem, plan).value * (1 + 1e-9)


def test_the_bound_is_not_trivial():
    problem = next(problems(Schedule.ONE_F_ONE_B, 1))
    assert lower_bound(problem) > 0
