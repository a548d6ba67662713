"""Condensed plans: value and memory equal those of the Program of all ops, on any plan."""

import random
from dataclasses import replace

import numpy as np
import pytest

from partita.core.plan import Shard, Stage, equal_microbatches
from partita.core.problem import Schedule
from partita.cost.condensed import Candidate, CondensedModel
from partita.cost.judge import judge
from partita.cost.memory import memory_limits, peak_memory
from partita.kernels import Threshold
from partita.program.lower import lower
from partita.testing.builders import flat_cluster, host_cluster, paired_cluster, random_pipeline

SCHEDULES = [schedule for schedule in Schedule if schedule.row.flushes]
COMPILED = Threshold(size=0)


def candidate_of(problem, plan):
    """Return a plan by ops, with the devices by their number in the cluster."""
    place = [problem.cluster.index_of[name] for name in plan.devices]
    stages = tuple(
        replace(stage, devices=tuple(tuple(place[d] for d in group) for group in stage.devices))
        for stage in plan.stages
    )
    return Candidate(
        stage_of=plan.stage_of,
        stages=stages,
        recompute=plan.recompute,
        schedule=plan.schedule,
        microbatches=plan.num_microbatches,
        size=int(plan.microbatch_sizes[0]),
    )


def kept(rng, graph):
    """Return edges some of whose readers keep what they read, counted by its maker or a reader."""
    keeper = np.full(len(graph.edges), -1)
    for tensor in range(len(graph.tensors)):
        rows = np.flatnonzero(graph.edges.tensor == tensor)
        keeps = [row for row in rows.tolist() if rng.random() < 0.6]
        maker = int(graph.tensors.producer[tensor])
        first = maker if maker >= 0 and rng.random() < 0.5 else graph.edges.reader[keeps[:1]]
        keeper[keeps] = first if keeps else -1
    return replace(graph.edges, keeper=keeper)


def drawn(rng, schedule, shard, make_cluster):
    """Return a random plan of those that are covered, its devices shuffled, memory drawn."""
    problem, plan = random_pipeline(rng, schedule=schedule, shard=shard, make_cluster=make_cluster)
    order = list(problem.cluster.device_names)
    rng.shuffle(order)
    used = list(dict.fromkeys(d for s in plan.stages for group in s.devices for d in group))
    number = {device: index for index, device in enumerate(used)}
    stages = tuple(
        Stage(
            devices=tuple(tuple(number[d] for d in group) for group in stage.devices),
            shares=stage.shares,
            shard=stage.shard,
        )
        for stage in plan.stages
    )
    ops = replace(
        problem.graph.ops,
        workspace_bytes=np.array([rng.uniform(0, 200) for _ in range(len(problem.graph))]),
        fixed_share=np.array([rng.uniform(0, 0.5) for _ in range(len(problem.graph))]),
    )
    parameters = replace(problem.graph.parameters, expert=False)
    graph = replace(problem.graph, ops=ops, parameters=parameters, edges=kept(rng, problem.graph))
    plan = replace(
        plan,
        fingerprint=graph.fingerprint,
        devices=tuple(order[: len(used)]),
        stages=stages,
        microbatch_sizes=equal_microbatches(plan.num_microbatches, rng.randint(1, 3)),
    )
    memory = rng.choice([1e9, rng.uniform(200, 4000)])
    devices = tuple(replace(d, memory_bytes=memory) for d in problem.cluster.devices)
    cluster = replace(problem.cluster, devices=devices)
    return replace(problem, graph=graph, cluster=cluster), plan


def paired(count):
    return paired_cluster(count) if count % 2 == 0 else flat_cluster(count)


def hosts(count):
    return host_cluster(-(-count // 2), 2, inside_bytes_per_s=40.0, between_bytes_per_s=15.0)


@pytest.mark.parametrize("shard", list(Shard))
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make_cluster", [flat_cluster, paired, hosts])
def test_a_condensed_plan_has_the_value_of_its_program(schedule, shard, make_cluster, monkeypatch):
    monkeypatch.setattr("partita.cost.condensed.EFFORT", COMPILED)
    rng = random.Random(f"{schedule.value} {shard.value} {make_cluster.__name__}")
    for _ in range(6):
        problem, plan = drawn(rng, schedule, shard, make_cluster)
        assert CondensedModel.covers(problem)
        assert CondensedModel.covers_plan(plan.stages, schedule)
        model = CondensedModel(problem, np.arange(len(problem.graph)), len(problem.graph))
        found = model.measure(candidate_of(problem, plan))
        wanted = judge(problem, plan, bottleneck=False)
        excess = peak_memory(problem, plan, lower(problem, plan)) - memory_limits(problem, plan)
        place = [problem.cluster.index_of[name] for name in plan.devices]
        assert model.excess == pytest.approx(dict(zip(place, excess, strict=True)), rel=1e-9)
        assert found.over_bytes == pytest.approx(wanted.over_bytes, rel=1e-9, abs=1e-6)
        if wanted.feasible:
            assert found.value == pytest.approx(wanted.value.value, rel=1e-9)
