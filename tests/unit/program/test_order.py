"""The orders in which devices can list their compute."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core.placement import placement_plan
from partita.core.plan import Shard
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.core.program import Kind, TransferMode
from partita.cost.predict import simulate
from partita.cost.proof import check
from partita.errors import InvalidInputError
from partita.program.lower import lower
from partita.program.order import ListOrder
from partita.testing.builders import (
    Figures,
    chain,
    flat_cluster,
    graph_of,
    pipeline,
    random_dag,
    random_pipeline,
)

SEEDS = st.integers(min_value=0, max_value=10**9)


def two_stages(schedule=Schedule.GPIPE, microbatches=2, groups=(0, 1)):
    graph = chain(len(groups), Figures(forward_s=1.0, backward_s=2.0))
    cluster = flat_cluster(2)
    plan = pipeline(graph, cluster, list(groups), schedule=schedule, microbatches=microbatches)
    return Problem(graph=graph, cluster=cluster), plan


def listed(program, device):
    """Return the forwards and backwards of a device: kind, stage, microbatch."""
    rows = range(int(program.ptr[device]), int(program.ptr[device + 1]))
    return [
        f"{Kind(int(program.kind[row])).name[0]}{program.stage[row]}.{program.microbatch[row]}"
        for row in rows
        if program.kind[row] in (Kind.FORWARD, Kind.BACKWARD)
    ]


def test_device_order_is_the_schedules():
    problem, plan = two_stages()
    assert listed(lower(problem, plan), 0) == ["F0.0", "F0.1", "B0.0", "B0.1"]
    assert listed(lower(problem, plan, order=ListOrder.DEVICE), 0) == listed(
        lower(problem, plan), 0
    )


def test_program_order_ends_a_microbatch_before_the_next():
    problem, plan = two_stages()
    program = lower(problem, plan, order=ListOrder.PROGRAM)
    assert listed(program, 0) == ["F0.0", "B0.0", "F0.1", "B0.1"]
    assert listed(program, 1) == ["F1.0", "B1.0", "F1.1", "B1.1"]
    timeline = simulate(problem, plan, program=program, period=True)
    assert timeline.makespan_s == timeline.period_s == 2 * 2 * 3.0
    assert simulate(problem, plan, period=True).period_s < timeline.period_s


def test_global_order_is_one_order_for_all_devices():
    problem, plan = two_stages(groups=(0, 1, 0, 1), microbatches=3)
    program = lower(problem, plan, order=ListOrder.GLOBAL)
    forwards = [(stage, turn) for stage in range(4) for turn in range(3)]
    phi = {f"F{s}.{m}": 2 * m - (4 - s) + 1 for s, m in forwards}
    phi |= {f"B{s}.{m}": 2 * m + 4 - s for s, m in forwards}
    for device in (0, 1):
        keys = [phi[name] for name in listed(program, device)]
        assert keys == sorted(keys)
    assert listed(program, 0) != listed(lower(problem, plan), 0)


def test_1f1b_is_in_global_order_already():
    problem, plan = two_stages(Schedule.ONE_F_ONE_B, microbatches=4)
    for device in (0, 1):
        assert listed(lower(problem, plan, order=ListOrder.GLOBAL), device) == listed(
            lower(problem, plan), device
        )


def test_program_order_follows_the_code_where_stages_are_numbered_otherwise():
    """Two branches of one device: the plan runs the second first, the code the first."""
    graph = graph_of(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    cluster = flat_cluster(2)
    plan = placement_plan(graph, cluster.device_names, np.array([0, 1, 1, 0]), order=[0, 2, 1, 3])
    problem = Problem(graph=graph, cluster=cluster)
    second, first = (int(plan.stage_of[op]) for op in (2, 1))
    assert listed(lower(problem, plan), 1)[:2] == [f"F{second}.0", f"F{first}.0"]
    program = lower(problem, plan, order=ListOrder.PROGRAM)
    assert listed(program, 1)[:2] == [f"F{first}.0", f"F{second}.0"]


def test_weight_stashing_has_no_program_order():
    problem, plan = two_stages(Schedule.PIPEDREAM)
    with pytest.raises(InvalidInputError, match="newer weights"):
        lower(problem, plan, order=ListOrder.PROGRAM)


@settings(max_examples=150)
@given(SEEDS, st.sampled_from(Schedule), st.sampled_from(Shard), st.sampled_from(ListOrder))
def test_every_pipeline_in_every_order_is_proved_and_ends(seed, schedule, shard, order):
    problem, plan = random_pipeline(
        random.Random(seed),
        schedule=schedule,
        shard=shard,
        make_cluster=lambda count: flat_cluster(count, bandwidth_bytes_per_s=20.0),
    )
    if plan.stashes_weights and order is ListOrder.PROGRAM:
        return
    is_proved_and_ends(problem, plan, order)


@settings(max_examples=100)
@given(SEEDS, st.integers(2, 20), st.integers(1, 4), st.sampled_from(ListOrder))
def test_every_placement_in_every_order_is_proved_and_ends(seed, num_ops, devices, order):
    rng = random.Random(seed)
    schedule = rng.choice([s for s in Schedule if s is not Schedule.PIPEDREAM])
    graph, cluster = random_dag(num_ops, rng), flat_cluster(devices, bandwidth_bytes_per_s=20.0)
    plan = placement_plan(
        graph,
        cluster.device_names,
        np.array([rng.randrange(devices) for _ in range(num_ops)]),
        schedule=schedule,
        microbatch_sizes=np.array([rng.randint(1, 3) for _ in range(rng.randint(1, 4))]),
    )
    mode = Mode.INFERENCE if schedule is Schedule.INFERENCE else Mode.TRAINING
    problem = Problem(graph=graph, cluster=cluster, objective=Objective(mode=mode))
    is_proved_and_ends(problem, plan, order)


def is_proved_and_ends(problem, plan, order):
    program = lower(problem, plan, order=order)
    check(problem, plan, program)
    for transfers in TransferMode:
        timeline = simulate(problem, plan, program=program, transfers=transfers)
        assert timeline.makespan_s >= timeline.busy_s.max() * (1 - 1e-12)
