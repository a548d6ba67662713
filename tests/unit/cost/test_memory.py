"""The memory model: what a device holds all the time, and what comes and goes."""

import random
from dataclasses import replace

import numpy as np
import pytest

from partita.core.graph import ParameterTable, VariantTable
from partita.core.placement import placement_plan
from partita.core.plan import Shard
from partita.core.precision import PRECISIONS
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.core.program import Kind
from partita.cost.memory import (
    GATHERED,
    memory_breakdown,
    memory_events,
    memory_terms,
    peak_memory,
    saved_by_stage,
    static_memory,
)
from partita.cost.predict import simulate
from partita.program.lower import lower
from partita.program.matching import match
from partita.testing.builders import (
    Figures,
    Traits,
    chain,
    flat_cluster,
    graph_of,
    pipeline,
    random_pipeline,
)


def peaks(groups, graph, *, recompute=(), objective=None, **options):
    """Return the peak of every device."""
    count = 1 + int(max(np.concatenate([np.ravel(group) for group in groups])))
    cluster = flat_cluster(count)
    plan = pipeline(graph, cluster, groups, **options)
    plan = replace(plan, recompute=np.isin(np.arange(len(graph)), recompute))
    infers = plan.schedule is Schedule.INFERENCE
    objective = objective or Objective(mode=Mode.INFERENCE if infers else Mode.TRAINING)
    problem = Problem(graph=graph, cluster=cluster, objective=objective)
    return peak_memory(problem, plan, lower(problem, plan)).tolist()


def held(groups, graph, *, objective=None, **options):
    """Return weights, gradients and optimizer state of every device."""
    count = 1 + int(max(np.concatenate([np.ravel(group) for group in groups])))
    cluster = flat_cluster(count)
    plan = pipeline(graph, cluster, groups, **options)
    problem = Problem(graph=graph, cluster=cluster, objective=objective or Objective())
    static = static_memory(problem, plan, lower(problem, plan))
    return [part.tolist() for part in (static.weights, static.gradients, static.optimizer)]


# Activations.


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (4, 2), (1, 3), (5, 5)])
def test_1f1b_keeps_as_many_activations_as_stages_follow(stages, microbatches):
    graph = chain(stages, Figures(saved_bytes=1.0))
    assert peaks(range(stages), graph, microbatches=microbatches) == [
        min(stages - stage, microbatches) for stage in range(stages)
    ]


def test_gpipe_keeps_all_microbatches():
    graph = chain(3, Figures(saved_bytes=1.0))
    assert peaks(range(3), graph, microbatches=5, schedule=Schedule.GPIPE) == [5, 5, 5]


def test_a_split_backward_keeps_what_1f1b_keeps():
    graph = chain(4, Figures(saved_bytes=1.0))
    plain, split = (
        peaks(range(4), graph, microbatches=8, schedule=schedule)
        for schedule in (Schedule.ONE_F_ONE_B, Schedule.SPLIT)
    )
    assert split == plain == [4, 3, 2, 1]


def test_zero_bubble_keeps_no_more_than_the_first_stage_of_1f1b():
    graph = chain(4, Figures(saved_bytes=1.0))
    assert peaks(range(4), graph, microbatches=8, schedule=Schedule.ZERO_BUBBLE) == [4] * 4


def test_inference_keeps_nothing():
    graph = chain(3, Figures(saved_bytes=1.0, parameter_bytes=4.0))
    assert peaks(range(3), graph, microbatches=5, schedule=Schedule.INFERENCE) == [4, 4, 4]


def test_saved_bytes_grow_with_samples_and_shrink_with_ranks():
    graph = chain(2, Figures(saved_bytes=6.0, batch_size=2))
    ops = replace(graph.ops, saved_fixed_bytes=np.array([2.0, 2.0]))
    graph = replace(graph, ops=ops)
    # 2 fixed bytes and 2 a sample for each of two ops.
    assert peaks([0], graph, microbatches=[1]) == [2 * (2 + 2)]
    assert peaks([0], graph, microbatches=[3]) == [2 * (2 + 6)]
    assert peaks([[(0, 1)]], graph, microbatches=[3]) == [8, 8]


def test_the_narrow_copy_of_weights_is_held_once_whatever_the_microbatches_in_flight():
    graph = chain(2, Figures(parameter_bytes=8.0))
    copies = replace(graph.parameters, copy_bytes=np.array([4.0, 4.0]))
    graph = replace(graph, parameters=copies)
    gpipe = {"schedule": Schedule.GPIPE}
    once = [8 + 4 + 8 + 16] * 2
    assert peaks(range(2), graph, microbatches=1, **gpipe) == once
    assert peaks(range(2), graph, microbatches=8, **gpipe) == once
    mixed = Objective().with_precision(PRECISIONS["bf16-mixed"])
    assert peaks(range(2), graph, microbatches=8, objective=mixed, **gpipe) == once
    # Where weights are divided, the copy is what a gather brings: 4 of 4 + (8 + 8 + 16) / 2.
    whole = peaks([(0, 1)], graph, microbatches=2, objective=mixed, shard=Shard.PARAMETERS)
    assert whole == [8 + 2 * (8 + 8 + 16) / 2] * 2


def test_a_policy_of_dtypes_divides_master_copy_and_state_among_replicas():
    graph = chain(1, Figures(parameter_bytes=8.0))  # two elements
    objective = Objective().with_precision(PRECISIONS["bf16-fp32-grads"])
    options = {"objective": objective, "microbatches": 2}
    assert held([(0, 1)], graph, **options) == [[4, 4], [8, 8], [24, 24]]
    options["shard"] = Shard.OPTIMIZER
    assert held([(0, 1)], graph, **options) == [[4, 4], [8, 8], [12, 12]]


def test_the_breakdown_adds_up_to_the_peak_and_to_the_memory_of_the_device():
    graph = chain(2, Figures(saved_bytes=5.0, parameter_bytes=8.0, tensor_bytes=3.0))
    cluster = flat_cluster(2, memory_bytes=1000.0)
    plan = pipeline(graph, cluster, range(2), microbatches=3)
    objective = Objective(memory_factor=0.9).with_precision(PRECISIONS["bf16"])
    problem = Problem(graph=graph, cluster=cluster, objective=objective)
    program = lower(problem, plan)
    memory = memory_breakdown(problem, plan, program)
    assert memory.peak.tolist() == peak_memory(problem, plan, program).tolist()
    assert sum(memory[:8]).tolist() == memory.peak.tolist()
    assert memory.fixed.tolist() == [100, 100]
    assert (memory.peak + memory.fixed + memory.free).tolist() == [1000, 1000]
    # Two elements each; the first stage has two microbatches in flight, and gets a gradient back.
    assert [part[0] for part in memory[:7]] == [4, 4, 8, 16, 10, 0, 3]
    assert memory.to_json(0)["activations_bytes"] == 10
    free = replace(problem, cluster=flat_cluster(2))
    assert memory_breakdown(free, plan, program).to_json(0)["free_bytes"] is None


def test_the_curve_rises_with_forward_and_falls_with_backward():
    graph, cluster = chain(1, Figures(saved_bytes=5.0, parameter_bytes=4.0)), flat_cluster(1)
    plan = pipeline(graph, cluster, [0], microbatches=2, schedule=Schedule.GPIPE)
    timeline = simulate(Problem(graph=graph, cluster=cluster), plan)
    base = 4 + 4 + 8
    changes = np.r_[True, np.diff(timeline.memory_bytes) != 0]
    times, used = timeline.memory_s[changes].tolist(), timeline.memory_bytes[changes].tolist()
    points = list(zip(times, used, strict=True))
    assert points == [(0, base), (0, base + 5), (1, base + 10), (4, base + 5), (6, base)]
    assert timeline.peak_bytes.tolist() == [base + 10]


# Recomputation.


def test_recomputing_keeps_the_inputs_and_brings_the_rest_back_in_backward():
    graph = chain(2, Figures(saved_bytes=10.0, tensor_bytes=1.0))
    # Besides a posted receive; of four microbatches the second stage keeps the inputs only.
    plain = peaks([0, 1], graph, microbatches=4, schedule=Schedule.GPIPE)
    assert plain == [40 + 1, 40 + 1]
    both = peaks([0, 1], graph, microbatches=4, schedule=Schedule.GPIPE, recompute=(0, 1))
    assert both == [10 + 1, 4 + 10]


def test_early_recomputation_holds_from_recompute_to_backward():
    graph = chain(2, Figures(saved_bytes=10.0))
    options = {"microbatches": 4, "recompute": (0, 1)}
    early = peaks([0, 1], graph, schedule=Schedule.EARLY_RECOMPUTE, **options)
    assert early == peaks([0, 1], graph, **options) == [10, 10]


def test_only_the_ops_that_recompute_do():
    graph = chain(3, Figures(saved_bytes=(1.0, 10.0, 100.0)))
    problem = Problem(graph=graph, cluster=flat_cluster(1))
    plan = pipeline(graph, problem.cluster, [0], microbatches=2)
    plan = replace(plan, recompute=np.array([False, True, False]))
    kept, brought = saved_by_stage(problem, plan, np.array([1.0, 1.0]))
    assert kept.tolist() == [[101, 101]]
    assert brought.tolist() == [[10, 10]]


# Weights.


def test_weights_gradients_and_optimizer_state():
    graph = chain(2, Figures(parameter_bytes=40.0), Traits(frozen=(1,)))
    assert held([0], graph) == [[80], [40], [80]]
    momentum = Objective(optimizer_bytes_per_element=4)
    assert held([0], graph, objective=momentum) == [[80], [40], [40]]
    inference = Objective(mode=Mode.INFERENCE)
    options = {"objective": inference, "schedule": Schedule.INFERENCE}
    assert held([0], graph, **options) == [[80], [0], [0]]


@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        (Shard.NONE, (40, 40, 80)),
        (Shard.OPTIMIZER, (40, 40, 40)),
        (Shard.GRADIENTS, (40, 20, 40)),
        (Shard.PARAMETERS, (20, 20, 40)),
    ],
)
def test_replicas_divide_what_is_sharded(shard, expected):
    graph = chain(1, Figures(parameter_bytes=40.0))
    found = held([(0, 1)], graph, shard=shard, microbatches=2)
    assert found == [[value] * 2 for value in expected]


def test_frozen_parameters_are_not_divided():
    # Only what is reduced and gathered is divided.
    graph = chain(2, Figures(parameter_bytes=40.0), Traits(frozen=(1,)))
    found = held([(0, 1)], graph, shard=Shard.PARAMETERS, microbatches=2)
    assert found[0] == [20 + 40] * 2


def test_tensor_parallel_ranks_divide_weights():
    graph = chain(1, Figures(parameter_bytes=40.0))
    assert held([[(0, 1)]], graph) == [[20, 20], [20, 20], [40, 40]]


def test_tied_parameters_are_held_once_by_a_device_and_never_divided():
    graph = chain(3, Figures(parameter_bytes=40.0), Traits(tied=[(0, 2)], bare=(0, 1, 2)))
    assert held([0, 1, 0], graph)[0] == [40, 0]
    shared = held([(0, 1), 2, (0, 1)], graph, shard=Shard.PARAMETERS, microbatches=2)
    assert shared[0] == [40, 40, 0]


def test_stashing_keeps_as_many_versions_as_microbatches_in_flight():
    graph = chain(4, Figures(parameter_bytes=40.0))
    found = held(range(4), graph, schedule=Schedule.PIPEDREAM, microbatches=8)
    assert found[0] == [160, 120, 80, 40]
    assert found[1] == [40] * 4
    assert held(range(4), graph, schedule=Schedule.PIPEDREAM)[0] == [40] * 4


def test_workspace_is_that_of_the_hungriest_op():
    graph = chain(3)
    ops = replace(graph.ops, workspace_bytes=np.array([5.0, 9.0, 7.0]))
    graph = replace(graph, ops=ops)
    assert peaks([0, 1], graph, microbatches=[1, 2]) == [18, 14]
    assert peaks([[(0, 1)], 2], graph, microbatches=[1, 2]) == [9, 9, 14]


def test_a_workspace_takes_what_the_ops_after_it_have_not_saved():
    graph = chain(3, Figures(saved_bytes=10.0))
    ops = replace(graph.ops, workspace_bytes=np.array([25.0, 12.0, 1.0]))
    graph = replace(graph, ops=ops)
    # While the ops of one stage run: 10 + 25, 20 + 12, 30 + 1.
    assert peaks([0], graph) == [35]
    assert peaks([0, 1], graph) == [35, 11]
    # A split backward frees all of it at its end.
    assert peaks([0], graph, schedule=Schedule.ZERO_BUBBLE) == [30 + 25]


def test_a_part_of_a_tied_gradient_waits_between_ops_of_one_stage_alone():
    graph = chain(4)
    tied = ParameterTable(names=("w",), bytes=[100.0], use_op=[0, 3], use_parameter=[0, 0])
    graph = replace(
        graph, parameters=tied, ops=replace(graph.ops, workspace_bytes=np.array([2.0, 7, 5, 1]))
    )
    once = replace(graph, parameters=replace(tied, use_op=[3], use_parameter=[0]))
    # At its first user the part that waits and the sum stand beside what the op needs.
    assert peaks([0], once) == [400 + 7]
    assert peaks([0], graph) == [400 + 2 + 200]
    assert peaks([0, 1], graph) == [400 + 7, 400 + 5]


def test_variants_bring_their_own_figures():
    graph = chain(2, Figures(saved_bytes=10.0))
    variants = VariantTable(
        op=np.array([0, 0, 1]),
        tp=np.array([1, 2, 2]),
        recompute=np.array([True, False, False]),
        saved_bytes=np.array([3.0, 4.0, 5.0]),
        parameter_bytes=np.array([1.0, 2.0, 2.0]),
        fixed_memory_bytes=np.array([2.0, 7.0, 2.0]),
    )
    graph = replace(graph, variants=variants)
    assert peaks([0], graph) == [20]
    assert peaks([0], graph, recompute=(0,)) == [3 + 10 + 1]
    assert peaks([[(0, 1)]], graph) == [4 + 5 + 5] * 2


# Gathered copies and receive buffers.


def test_a_gathered_copy_lives_while_its_stage_computes():
    graph = chain(1, Figures(parameter_bytes=40.0))
    base = 20 + 20 + 40
    options = {"shard": Shard.PARAMETERS, "microbatches": 4}
    assert peaks([(0, 1)], graph, **options) == [base + 40] * 2
    for schedule in (Schedule.GPIPE, Schedule.ZERO_BUBBLE):
        assert peaks([(0, 1)], graph, schedule=schedule, **options) == [base + 40] * 2


def test_early_recomputation_and_backward_share_one_copy():
    graph = chain(2, Figures(parameter_bytes=40.0))
    options = {"shard": Shard.PARAMETERS, "microbatches": 4, "schedule": Schedule.EARLY_RECOMPUTE}
    base = 20 + 20 + 40
    for recompute in ((), (0,)):
        found = peaks([(0, 1), (2, 3)], graph, recompute=recompute, **options)
        assert found == [base + 40] * 4


def test_a_received_tensor_lives_until_its_last_reader_on_the_device():
    # op0 on d0 feeds op1 and op3 on d1, with op2 on d0 in between.
    figures = Figures(tensor_bytes=(8.0, 0.0, 0.0, 0.0))
    graph = graph_of(4, [(0, 1), (1, 2), (2, 3), (0, 3)], figures)
    cluster = flat_cluster(2)
    plan = placement_plan(graph, cluster.device_names, np.array([0, 1, 0, 1]))
    problem = Problem(graph=graph, cluster=cluster)
    program = lower(problem, plan)
    events = memory_events(problem, plan, program)
    received = program.device[events.row] == 1
    rows = {
        delta: int(row) for row, _, delta, _ in zip(*(c[received] for c in events), strict=True)
    }
    assert program.describe(rows[8.0]).startswith("d1: RECV(stage 1, ")
    assert program.describe(rows[-8.0]).startswith("d1: FORWARD(stage 3, ")


@pytest.mark.parametrize("schedule", Schedule)
def test_all_that_comes_goes_again(schedule):
    for seed in range(12):
        rng = random.Random(f"{schedule}{seed}")
        problem, plan = random_pipeline(rng, schedule=schedule, shard=list(Shard)[seed % 4])
        program = lower(problem, plan)
        events = memory_events(problem, plan, program)
        sums = np.zeros(len(plan.devices))
        np.add.at(sums, program.device[events.row], events.delta)
        assert np.abs(sums).max() < 1e-6
        timeline = simulate(problem, plan, program=program)
        assert timeline.peak_bytes == pytest.approx(peak_memory(problem, plan, program))
        base = static_memory(problem, plan, program).total
        assert (timeline.memory_bytes >= base[timeline.memory_device] - 1e-6).all()
        order = np.lexsort((timeline.memory_s, timeline.memory_device))
        assert np.array_equal(order, np.arange(len(order)))


def test_copies_of_stages_that_take_turns_live_until_the_next_gather_of_their_own():
    problem, plan = random_pipeline(
        random.Random(4), schedule=Schedule.ONE_F_ONE_B, shard=Shard.PARAMETERS
    )
    program = lower(problem, plan)
    gathers = (program.kind == Kind.ALL_GATHER) & (program.stage >= 0)
    rows = np.flatnonzero(gathers)
    consumer = match(program).consumer[rows]
    rows, consumer = rows[consumer >= 0], consumer[consumer >= 0]
    assert len(rows) > 2
    wanted = []
    for row, last in zip(rows.tolist(), consumer.tolist(), strict=True):
        alike = (program.device == program.device[row]) & (program.stage == program.stage[row])
        own = np.flatnonzero(alike & (np.arange(len(program)) > last))
        until = own[np.isin(own, rows)].min(initial=len(program))
        runs = program.is_compute[own] & (program.kind[own] != Kind.UPDATE) & (own < until)
        wanted.append(own[runs].max(initial=last))
    terms = memory_terms(problem, plan, program)
    ends = (terms.part == GATHERED) & terms.at_end
    assert dict(zip(terms.cell[ends], terms.row[ends], strict=True)) == dict(
        zip(rows, wanted, strict=True)
    )


def test_an_all_gather_after_the_step_needs_no_copy():
    graph = chain(1, Figures(parameter_bytes=40.0))
    cluster = flat_cluster(2)
    plan = pipeline(graph, cluster, [(0, 1)], shard=Shard.OPTIMIZER, microbatches=2)
    problem = Problem(graph=graph, cluster=cluster)
    program = lower(problem, plan)
    assert (program.kind == Kind.ALL_GATHER).sum() == 2
    assert peak_memory(problem, plan, program).tolist() == [40 + 40 + 40] * 2
