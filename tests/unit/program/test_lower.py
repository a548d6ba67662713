"""From plans to Programs: orders, messages, reductions, sharding, versions, refusals."""

from dataclasses import replace

import numpy as np
import pytest

from partita.core.graph import Phase
from partita.core.placement import placement_plan
from partita.core.plan import Shard
from partita.core.precision import PRECISIONS
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.core.program import FIRST_COLLECTIVE, LAST_COMPUTE, Kind
from partita.core.schedules import SCHEDULES, ScheduleRow
from partita.cost.memory import static_memory
from partita.cost.predict import simulate
from partita.cost.proof import check
from partita.errors import InvalidInputError
from partita.program.listing import Listing
from partita.program.lower import lower
from partita.testing.builders import (
    Figures,
    Traits,
    chain,
    diamond,
    flat_cluster,
    graph_of,
    pipeline,
)

SHORT = {
    Kind.FORWARD: "F",
    Kind.RECOMPUTE: "R",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
    Kind.UPDATE: "U",
    Kind.ALL_REDUCE: "reduce",
    Kind.ALL_GATHER: "gather",
    Kind.REDUCE_SCATTER: "scatter",
}
FIGURES = Figures(tensor_bytes=4, parameter_bytes=6)


def make(groups, graph=None, **options):
    """Return a problem and plan on as many devices as the groups name."""
    graph = graph or chain(4, FIGURES)
    count = 1 + int(max(np.concatenate([np.ravel(group) for group in groups])))
    cluster = flat_cluster(count)
    plan = pipeline(graph, cluster, groups, **options)
    infers = plan.schedule is Schedule.INFERENCE
    objective = Objective(mode=Mode.INFERENCE if infers else Mode.TRAINING)
    return Problem(graph=graph, cluster=cluster, objective=objective), plan


def lowered(groups, graph=None, *, recompute=(), **options):
    problem, plan = make(groups, graph, **options)
    plan = replace(plan, recompute=np.isin(np.arange(len(problem.graph)), recompute))
    return lower(problem, plan)


def words(program, device, *, stages=False, collectives=False):
    """Return a device's compute as words such as ``F0`` (microbatch) or ``1F0`` (stage)."""
    result = []
    for row in range(*program.ptr[device : device + 2]):
        kind = Kind(int(program.kind[row]))
        stage = str(program.stage[row]) if stages else ""
        turn = str(program.microbatch[row]) if program.microbatch[row] >= 0 else ""
        if kind in SHORT and (kind <= LAST_COMPUTE or collectives):
            result.append(f"{stage}{SHORT[kind]}{turn}")
    return " ".join(result)


def messages(program, *, gradient):
    """Return (tensor, microbatch, source, target) of every message."""
    rows = np.flatnonzero((program.kind == Kind.SEND) & (program.gradient == gradient))
    columns = (program.tensor, program.microbatch, program.device, program.peer)
    return sorted(tuple(int(column[row]) for column in columns) for row in rows)


# Orders.


def test_gpipe_does_all_forwards_first():
    program = lowered([0, 1], schedule=Schedule.GPIPE, microbatches=3)
    assert words(program, 0) == words(program, 1) == "F0 F1 F2 B0 B1 B2 U"


def test_1f1b_alternates_after_its_warm_up():
    program = lowered([0, 1, 2], chain(3), microbatches=5)
    assert words(program, 0) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4 U"
    assert words(program, 1) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4 U"
    assert words(program, 2) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 U"


def test_interleaving_follows_megatron():
    program = lowered([0, 1, 0, 1], schedule=Schedule.INTERLEAVED, microbatches=4)
    first = words(program, 0, stages=True)
    assert first.startswith("0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3")
    second = words(program, 1, stages=True)
    assert second.startswith("1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3")


@pytest.mark.parametrize(
    ("groups", "options"),
    [
        ([0, 1, 0, 1], {"microbatches": 3}),
        ([0, 1, 0], {"microbatches": 4}),
        ([0, 1, 1, 0], {"microbatches": 4}),
        ([(0, 1), (2, 3), (0, 1), (2, 3)], {"microbatches": 6, "shares": {0: (2, 1)}}),
    ],
)
def test_what_megatron_cannot_interleave_runs_like_1f1b(groups, options):
    if "shares" in options:
        options["shares"] = dict.fromkeys(range(4), (2, 1))
    program = lowered(groups, schedule=Schedule.INTERLEAVED, **options)
    assert program == lowered(groups, schedule=Schedule.ONE_F_ONE_B, **options)


def test_interleaved_replicas_deal_microbatches_in_turn():
    groups = [(0, 1), (2, 3), (0, 1), (2, 3)]
    program = lowered(groups, schedule=Schedule.INTERLEAVED, microbatches=8)
    assert words(program, 0, stages=True).startswith("0F0 0F2 2F0 2F2 0F4 2B0 0F6 2B2")
    assert words(program, 1, stages=True).startswith("0F1 0F3 2F1 2F3 0F5 2B1 0F7 2B3")


def test_on_one_device_a_microbatch_goes_through_all_stages_and_back():
    program = lowered([0, 0, 0], chain(3), schedule=Schedule.INTERLEAVED, microbatches=2)
    assert words(program, 0, stages=True).startswith("0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1")


def test_zero_bubble_delays_the_weight_part():
    program = lowered([0, 1, 2], chain(3), schedule=Schedule.ZERO_BUBBLE, microbatches=4)
    assert words(program, 0) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 U"
    assert words(program, 2) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 U"


def test_early_recomputation_stands_before_backward_where_ops_recompute():
    options = {"schedule": Schedule.EARLY_RECOMPUTE, "microbatches": 3}
    program = lowered([0, 1], chain(2), recompute=(0,), **options)
    assert words(program, 0) == "F0 F1 R0 B0 F2 R1 B1 R2 B2 U"
    assert words(program, 1) == "F0 B0 F1 B1 F2 B2 U"


def test_inference_has_forwards_only():
    program = lowered([0, 1], schedule=Schedule.INFERENCE, microbatches=3)
    assert words(program, 0) == words(program, 1) == "F0 F1 F2"
    assert set(program.kind.tolist()) == {Kind.LOAD, Kind.FORWARD, Kind.SEND, Kind.RECV}
    assert not program.gradient.any()


def test_uneven_shares_are_spread_over_a_round():
    program = lowered([(0, 1)], schedule=Schedule.GPIPE, microbatches=8, shares={0: (5, 3)})
    assert words(program, 0) == "F0 F2 F3 F5 F7 B0 B2 B3 B5 B7 U"
    assert words(program, 1) == "F1 F4 F6 B1 B4 B6 U"


def test_inputs_are_loaded_right_before_their_forward_and_never_sent():
    graph = chain(4, FIGURES, Traits(labels=True))
    program = lowered([0, [(1, 2)]], graph, microbatches=2)
    loads = np.flatnonzero(program.kind == Kind.LOAD)
    assert [(int(program.device[r]), int(program.tensor[r])) for r in loads] == [
        *[(0, 0)] * 2,
        *[(1, 1)] * 2,
        *[(2, 1)] * 2,
    ]
    assert (program.kind[loads + 1] == Kind.FORWARD).all()
    assert {tensor for tensor, *_ in messages(program, gradient=False)} == {3}


# Messages.


def test_a_tensor_goes_once_to_a_device_and_its_gradient_comes_back_once():
    graph = diamond(3, FIGURES)
    cluster = flat_cluster(2)
    plan = placement_plan(graph, cluster.device_names, np.array([0, 1, 1, 1, 0]))
    program = lower(Problem(graph=graph, cluster=cluster), plan)
    assert messages(program, gradient=False) == [(1, 0, 0, 1), *((t, 0, 1, 0) for t in (2, 3, 4))]
    assert messages(program, gradient=True) == [(1, 0, 1, 0), *((t, 0, 0, 1) for t in (2, 3, 4))]
    assert program.bytes[program.kind == Kind.SEND].tolist() == [4] * 8


def test_tensors_without_gradient_have_none():
    graph = chain(4, FIGURES, Traits(detached=(1,)))
    program = lowered([0, 1], graph)
    assert len(messages(program, gradient=False)) == 1
    assert messages(program, gradient=True) == []


def test_bytes_follow_the_samples_but_for_the_fixed_part():
    graph = chain(2, Figures(tensor_bytes=10.0, batch_size=4))
    tensors = replace(graph.tensors, fixed_bytes=np.array([0.0, 2.0, 0.0]))
    program = lowered([0, 1], replace(graph, tensors=tensors), microbatches=[4, 2, 1])
    sends = (program.kind == Kind.SEND) & ~program.gradient
    assert program.bytes[sends].tolist() == [10, 6, 4]


def test_the_first_reader_in_the_devices_order_waits_for_a_tensor():
    """1F1B runs the longer branch first, whatever the number of its stage."""
    figures = Figures(tensor_bytes=10.0, forward_s=1.0, backward_s=1.0)
    # op1 and op2 both read op0 and lead to op5, op2 by a longer way.
    graph = graph_of(6, [(0, 1), (0, 2), (2, 3), (3, 4), (4, 5), (1, 5)], figures)
    cluster = flat_cluster(2, bandwidth_bytes_per_s=1.0)
    plan = placement_plan(
        graph,
        cluster.device_names,
        np.array([0, 1, 1, 0, 1, 0]),
        schedule=Schedule.ONE_F_ONE_B,
    )
    problem = Problem(graph=graph, cluster=cluster)
    program = lower(problem, plan)
    assert plan.stage_of[1] < plan.stage_of[2]
    assert words(program, 1, stages=True).startswith(f"{plan.stage_of[2]}F0")
    row = np.flatnonzero((program.kind == Kind.RECV) & (program.tensor == 1) & ~program.gradient)
    assert program.stage[row].tolist() == [plan.stage_of[2]]
    timeline = simulate(problem, plan, program=program)
    first = np.flatnonzero((program.kind == Kind.FORWARD) & (program.stage == plan.stage_of[2]))
    assert timeline.start_s[first].tolist() == [11.0]
    check(problem, plan, program)


@pytest.mark.parametrize(
    ("groups", "forward", "backward"),
    [
        ([[(0, 1)], 2], [(0, 2)], [(2, 0), (2, 1)]),
        ([0, [(1, 2)]], [(0, 1), (0, 2)], [(1, 0)]),
        (
            [[(0, 1, 2, 3)], [(4, 5)]],
            [(0, 4), (1, 5)],
            [(4, 0), (4, 2), (5, 1), (5, 3)],
        ),
    ],
)
def test_ranks_of_tensor_parallel_stages_pair_up(groups, forward, backward):
    program = lowered(groups)
    assert [(a, b) for _, _, a, b in messages(program, gradient=False)] == sorted(forward)
    assert [(a, b) for _, _, a, b in messages(program, gradient=True)] == sorted(backward)
    joint = program.group >= 0
    assert set(program.kind[joint].tolist()) == {Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE}


def test_explicit_backward_ops_run_in_backward():
    graph = graph_of(4, [(0, 1), (1, 2), (2, 3)], FIGURES)
    phase = np.array([Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD])
    graph = replace(graph, ops=replace(graph.ops, phase=phase))
    cluster = flat_cluster(2)
    plan = placement_plan(graph, cluster.device_names, np.array([0, 1, 1, 0]))
    problem = Problem(graph=graph, cluster=cluster)
    program = lower(problem, plan)
    assert messages(program, gradient=False) == [(1, 0, 0, 1)]
    assert messages(program, gradient=True) == [(1, 0, 1, 0)]
    check(problem, plan, program)


# Parameters.


def collectives(program, device):
    """Return (kind, bucket, bytes, members) of a device's collectives."""
    rows = np.arange(*program.ptr[device : device + 2])
    return [
        (
            SHORT[Kind(int(program.kind[row]))],
            int(program.bucket[row]),
            int(program.bytes[row]),
            program.group_of(row).tolist(),
        )
        for row in rows[program.kind[rows] >= FIRST_COLLECTIVE]
    ]


def test_replicas_reduce_before_they_update():
    program = lowered([0, (1, 2)], microbatches=2)
    assert collectives(program, 0) == []
    assert collectives(program, 1) == [("reduce", 1, 12, [1, 2])]
    assert words(program, 1, collectives=True) == "F0 B0 reduce U"


def test_ranks_reduce_their_part():
    program = lowered([[(0, 1), (2, 3)]], microbatches=2)
    assert collectives(program, 0) == [("reduce", 0, 12, [0, 2])]
    assert collectives(program, 3) == [("reduce", 0, 12, [1, 3])]


def test_tied_parameters_are_reduced_over_all_owners_and_stepped_by_the_lowest():
    graph = chain(4, FIGURES, Traits(tied=[(0, 3)], bare=range(4)))
    program = lowered([0, 1, 2, 0], graph)
    assert [collectives(program, device) for device in range(3)] == [[], [], []]
    assert words(program, 0, stages=True).endswith("3B0 0B0 0U")
    program = lowered([(0, 1), 2, 3, 0], graph, microbatches=2)
    assert collectives(program, 0) == [("reduce", 0, 6, [0, 1])]
    program = lowered([0, 1, 2, 3], graph)
    assert collectives(program, 3) == [("reduce", 0, 6, [0, 3])]
    assert words(program, 3, stages=True).endswith("3U")


def test_a_sharded_optimizer_scatters_updates_and_gathers():
    program = lowered([(0, 1)], shard=Shard.OPTIMIZER, microbatches=4)
    assert words(program, 0, collectives=True) == "F0 B0 F2 B2 scatter U gather"


@pytest.mark.parametrize(
    ("name", "reduced", "gathered"),
    [
        ("fp32", 8, 8),
        ("bf16", 4, 4),
        ("bf16-fp32-grads", 8, 4),
        ("bf16-mixed", 8, 4),
        ("fp8", 4, 2),
    ],
)
@pytest.mark.parametrize("shard", [Shard.NONE, Shard.OPTIMIZER, Shard.PARAMETERS])
def test_reductions_and_gathers_move_the_bytes_of_the_policy(name, reduced, gathered, shard):
    graph, cluster = chain(1, Figures(parameter_bytes=8.0)), flat_cluster(2)
    plan = pipeline(graph, cluster, [(0, 1)], shard=shard, microbatches=2)
    objective = Objective().with_precision(PRECISIONS[name])
    problem = Problem(graph=graph, cluster=cluster, objective=objective)
    program = lower(problem, plan)
    check(problem, plan, program)
    gathers = program.kind == Kind.ALL_GATHER
    reduces = np.isin(program.kind, (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER))
    assert set(program.bytes[reduces].tolist()) == {reduced}
    assert set(program.bytes[gathers].tolist()) == (set() if shard is Shard.NONE else {gathered})
    wrong = replace(program, bytes=np.where(gathers | reduces, program.bytes + 3, program.bytes))
    with pytest.raises(InvalidInputError, match="wrong number"):
        check(problem, plan, wrong)


def test_sharded_gradients_are_reduced_every_round():
    program = lowered([(0, 1)], shard=Shard.GRADIENTS, microbatches=4)
    assert words(program, 0, collectives=True) == "F0 B0 scatter F2 B2 scatter U gather"


def test_sharded_parameters_are_gathered_for_every_pass():
    program = lowered([(0, 1)], shard=Shard.PARAMETERS, microbatches=4)
    expected = "gather F0 gather B0 scatter gather F2 gather B2 scatter U"
    assert words(program, 0, collectives=True) == expected
    split = lowered([(0, 1)], shard=Shard.PARAMETERS, microbatches=2, schedule=Schedule.ZERO_BUBBLE)
    assert words(split, 0, collectives=True) == "gather F0 gather I0 W0 scatter U"


def test_early_recomputation_gathers_once_for_recompute_and_backward():
    options = {"microbatches": 2, "shard": Shard.PARAMETERS, "schedule": Schedule.EARLY_RECOMPUTE}
    again = lowered([(0, 1)], recompute=(0,), **options)
    assert words(again, 0, collectives=True) == "gather F0 gather R0 B0 scatter U"
    program = lowered([(0, 1)], **options)
    assert words(program, 0, collectives=True) == "gather F0 gather B0 scatter U"


def test_sharded_stages_without_trained_parameters_gather_nothing():
    for traits in (Traits(bare=range(4)), Traits(frozen=range(4))):
        program = lowered(
            [(0, 1)], chain(4, FIGURES, traits), shard=Shard.PARAMETERS, microbatches=2
        )
        assert words(program, 0, collectives=True) == "F0 B0"
    tied = chain(4, FIGURES, Traits(bare=range(4), tied=[(0, 3)]))
    program = lowered([(0, 1), (2, 3)], tied, shard=Shard.PARAMETERS, microbatches=2)
    assert words(program, 0, collectives=True) == "F0 B0 reduce U"


# Degrees.


def divided(groups, graph=None, *, microbatches=2, **degrees):
    """Return the Program of a pipeline whose stages have degrees."""
    shard = degrees.pop("shard", Shard.NONE)
    problem, plan = make(groups, graph, microbatches=microbatches, shard=shard)
    return lower(problem, replace(plan, stages=tuple(replace(s, **degrees) for s in plan.stages)))


def experts(graph, names):
    of = np.isin(graph.parameters.names, names)
    assert of.sum() == len(names)
    return replace(graph, parameters=replace(graph.parameters, expert=of))


def test_context_parallel_ranks_reduce_whole_parameters_together():
    program = divided([[(0, 1, 2, 3), (4, 5, 6, 7)]], cp=2)
    assert collectives(program, 0) == [("reduce", 0, 12, [0, 2, 4, 6])]
    assert collectives(program, 5) == [("reduce", 0, 12, [1, 3, 5, 7])]
    assert collectives(divided([[(0, 1)]], cp=2), 1) == [("reduce", 0, 24, [0, 1])]


def test_ranks_receive_the_part_of_a_tensor_that_they_hold():
    whole = divided([[(0, 1)], [(2, 3)]])
    assert set(whole.bytes[whole.kind == Kind.SEND].tolist()) == {4}
    for degrees in ({"cp": 2}, {"sequence_parallel": True}):
        parts = divided([[(0, 1)], [(2, 3)]], **degrees)
        assert set(parts.bytes[parts.kind == Kind.SEND].tolist()) == {2}


def test_experts_are_divided_and_reduced_apart():
    graph = chain(4, FIGURES)
    graph = experts(graph, graph.parameters.names[:2])
    program = divided([[(0, 1), (2, 3)]], graph, ep=2)
    assert collectives(program, 0) == [("reduce", 0, 6, [0, 2]), ("reduce", 1, 6, [0, 2])]
    wide = divided([[(0,), (1,), (2,), (3,)]], graph, ep=2, microbatches=4)
    assert collectives(wide, 1) == [("reduce", 0, 12, [0, 1, 2, 3]), ("reduce", 1, 6, [1, 3])]


def test_groups_of_replicas_gather_among_themselves_and_reduce_together():
    program = divided([(0, 1, 2, 3)], shard=Shard.PARAMETERS, shard_group=2, microbatches=4)
    assert collectives(program, 2)[0] == ("gather", 0, 24, [2, 3])
    assert collectives(program, 2)[-1] == ("scatter", 0, 24, [0, 1, 2, 3])


def test_gathers_are_issued_one_compute_ahead():
    program = divided([(0, 1), (0, 1)], shard=Shard.PARAMETERS)
    expected = "0gather 1gather 0F0 1F0 1gather 0gather 1B0 1scatter 0B0 0scatter 0U 1U"
    assert words(program, 0, stages=True, collectives=True) == expected


# Weight stashing.


def versions(program, device, kind):
    rows = np.arange(*program.ptr[device : device + 2])
    return program.version[rows[program.kind[rows] == kind]].tolist()


def test_stashing_updates_every_round_and_uses_the_version_of_forward():
    program = lowered([0, 1], schedule=Schedule.PIPEDREAM, microbatches=4)
    assert words(program, 0) == "F0 F1 B0 U F2 B1 U F3 B2 U B3 U"
    assert words(program, 1) == "F0 B0 U F1 B1 U F2 B2 U F3 B3 U"
    assert versions(program, 0, Kind.FORWARD) == versions(program, 0, Kind.BACKWARD) == [0, 0, 1, 2]
    assert versions(program, 1, Kind.FORWARD) == versions(program, 1, Kind.BACKWARD) == [0, 1, 2, 3]
    assert versions(program, 0, Kind.UPDATE) == [1, 2, 3, 4]


def test_stashing_replicas_update_together():
    program = lowered([(0, 1), 2], schedule=Schedule.PIPEDREAM, microbatches=6)
    assert words(program, 0, collectives=True) == "F0 F2 B0 reduce U F4 B2 reduce U B4 reduce U"
    assert words(program, 1, collectives=True) == "F1 F3 B1 reduce U F5 B3 reduce U B5 reduce U"
    assert versions(program, 0, Kind.FORWARD) == [0, 0, 1]


def test_stages_that_train_nothing_have_one_version():
    graph = chain(4, FIGURES, Traits(bare=(2, 3)))
    program = lowered([0, 1], graph, schedule=Schedule.PIPEDREAM, microbatches=4)
    assert words(program, 1) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert versions(program, 1, Kind.FORWARD) == [0, 0, 0, 0]


def test_flushing_uses_one_version():
    program = lowered([0, 1], microbatches=4)
    assert versions(program, 0, Kind.FORWARD) == versions(program, 0, Kind.BACKWARD) == [0] * 4


def test_inference_gathers_divided_parameters_before_every_forward_and_updates_nothing():
    options = {"schedule": Schedule.INFERENCE, "shard": Shard.PARAMETERS, "microbatches": 4}
    problem, plan = make([(0, 1), (2, 3), (0, 1)], **options)
    program = lower(problem, plan)
    for device in range(4):
        listed = words(program, device, stages=True, collectives=True).split()
        copies = set()
        for word in listed:
            if word.endswith("gather"):
                copies.add(word[0])
            else:
                copies.remove(word[0])  # every forward has its own copy
        assert not copies
        assert sum("F" in word for word in listed) == (4 if device < 2 else 2)
    assert check(problem, plan, program).num_collectives == 6
    # Two of a stage's four ops each hold 6 bytes; half stays, and a whole copy comes for a forward.
    whole = Problem(graph=problem.graph, cluster=problem.cluster, objective=problem.objective)
    kept = replace(plan, stages=tuple(replace(s, shard=Shard.NONE) for s in plan.stages))
    assert lower(whole, kept).bucket_parameters.size == 0
    divided = static_memory(problem, plan, program).weights
    assert (2 * divided == static_memory(whole, kept, lower(whole, kept)).weights).all()


# Refusals.


@pytest.mark.parametrize(
    ("groups", "options", "traits", "why"),
    [
        ([0, 1], {"schedule": Schedule.PIPEDREAM}, Traits(tied=[(0, 3)]), "'tied0' is tied over"),
        ([0, [(1, 2)]], {}, Traits(tied=[(0, 3)]), "tensor-parallel degrees [1, 2]; they must"),
        (
            [(0, 1)],
            {"schedule": Schedule.PIPEDREAM, "shard": Shard.OPTIMIZER, "microbatches": 2},
            Traits(),
            "shard 'none' only",
        ),
    ],
)
def test_plans_that_cannot_be_kept_are_refused(groups, options, traits, why):
    with pytest.raises(InvalidInputError) as caught:
        lowered(groups, chain(4, FIGURES, traits), **options)
    assert why in str(caught.value)


def test_the_schedule_must_suit_the_mode():
    problem, plan = make([0, 1])
    with pytest.raises(InvalidInputError, match="'inference'"):
        lower(problem, replace(plan, schedule=Schedule.INFERENCE))
    with pytest.raises(InvalidInputError, match="fingerprint"):
        lower(Problem(graph=chain(4, skips=[(0, 2)]), cluster=problem.cluster), plan)


def test_a_schedule_that_waits_in_a_circle_is_refused(monkeypatch):
    def order_wrong(pipe):
        """Let the first stage do B0 before F1, the second F1 before B0."""
        turn = np.arange(pipe.layout.num_microbatches)[None, :]
        first = np.array([[0], [1]]) == 0
        forward = np.where(first, 4 * turn, turn)
        backward = np.where(first, 4 * turn + 2, 10 + turn)
        return {Kind.FORWARD: 4 * forward, Kind.BACKWARD: 4 * backward}

    rows = {**SCHEDULES, Schedule.GPIPE: ScheduleRow(order=order_wrong)}
    monkeypatch.setattr("partita.core.schedules.SCHEDULES", rows)
    with pytest.raises(InvalidInputError, match=r"other.*circle"):
        lowered([0, 1], schedule=Schedule.GPIPE, microbatches=2)


def test_listing_sorts_places_too_large_for_one_number():
    _, plan = make([0], chain(1, FIGURES, Traits(bare=(0,))))
    places = np.array([2**40, 5, 2**40])
    numbers = np.array([2**60, 7, 3])
    listing = Listing(1)
    listing.compute(
        Kind.FORWARD,
        device=np.zeros(3, dtype=np.int32),
        level=places,
        number=numbers,
        stage=np.zeros(3),
        microbatch=np.zeros(3),
        version=np.array([0, 1, 2]),
    )
    assert listing.program(plan, ()).version.tolist() == [1, 2, 0]
