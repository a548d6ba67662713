"""The longest path over the dependencies of a Program is the simulator's makespan."""

import random
from dataclasses import replace

import numpy as np
import pytest

from partita.core.plan import Plan, Stage, equal_microbatches
from partita.core.problem import Objective, Problem, Schedule
from partita.cost.durations import instruction_seconds
from partita.planners.table import solve
from partita.program.dependencies import Dependencies, dependencies
from partita.program.lower import lower
from partita.program.simulate import play
from partita.testing.builders import Figures, chain, flat_cluster, host_cluster, random_dag

_SIZES = Figures(parameter_bytes=8.0, tensor_bytes=50.0, saved_bytes=20.0, load_s=0.01)


def longest_path(found: Dependencies, seconds: np.ndarray) -> float:
    length = np.zeros(len(found))
    kept = found.activity >= 0
    np.maximum.at(length, found.activity[kept], seconds[kept])
    start = np.zeros(len(found))
    for edge in np.argsort(found.source, kind="stable"):
        source, target = found.source[edge], found.target[edge]
        start[target] = max(start[target], start[source] + length[source])
    return float((start + length).max())


def check(problem: Problem, plan: Plan) -> None:
    program = lower(problem, plan)
    seconds = instruction_seconds(problem, plan, program)
    timeline = play(program, problem.cluster, seconds)
    found = dependencies(program, problem.cluster, timeline)
    assert bool((found.source < found.target).all())
    assert longest_path(found, seconds) == pytest.approx(timeline.makespan_s, rel=1e-12)


@pytest.mark.parametrize("schedule", [s for s in Schedule if s is not Schedule.INFERENCE])
@pytest.mark.parametrize("microbatches", [1, 6])
def test_every_schedule(schedule: Schedule, microbatches: int) -> None:
    cluster = host_cluster(2, 2, inside_bytes_per_s=1e4, between_bytes_per_s=1e2)
    objective = Objective(schedule=schedule, microbatches=microbatches)
    problem = Problem(graph=chain(8, _SIZES), cluster=cluster, objective=objective)
    check(problem, solve(problem, "uniform").plan)


@pytest.mark.parametrize("seed", range(6))
def test_random_placements(seed: int) -> None:
    cluster = host_cluster(2, 2, inside_bytes_per_s=1e3, between_bytes_per_s=1e2)
    problem = Problem(graph=random_dag(20, random.Random(seed)), cluster=cluster)
    check(problem, solve(problem, "random", seed=seed).plan)


def test_replicas_with_uneven_shares_and_tensor_parallel_stages() -> None:
    graph, cluster = chain(6, _SIZES), flat_cluster(5, bandwidth_bytes_per_s=1e3)
    plan = Plan(
        fingerprint=graph.fingerprint,
        devices=cluster.device_names,
        stage_of=np.array([0, 0, 1, 1, 1, 1]),
        stages=(
            Stage(devices=((0,), (1,), (2,)), shares=(2, 1, 1)),
            Stage(devices=((3, 4),)),
        ),
        microbatch_sizes=equal_microbatches(8, 1),
    )
    check(Problem(graph=graph, cluster=cluster), plan)


def test_instructions_that_take_no_time() -> None:
    figures = replace(_SIZES, tensor_bytes=0.0, load_s=0.0)
    problem = Problem(graph=chain(6, figures), cluster=flat_cluster(3))
    check(problem, solve(problem, "uniform").plan)
