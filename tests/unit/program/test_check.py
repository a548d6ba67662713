"""The checker accepts what ``lower`` makes, and names what is wrong with anything else."""

import dataclasses
import random
import re
from dataclasses import replace

import numpy as np
import pytest

from partita import kernels
from partita.core.placement import placement_plan
from partita.core.plan import Shard, Stage
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.core.program import Kind, Program
from partita.cost.predict import simulate
from partita.cost.proof import check
from partita.errors import InfeasibleError, InvalidInputError
from partita.program.lower import lower
from partita.program.matching import match
from partita.testing.builders import (
    Figures,
    Traits,
    chain,
    diamond,
    flat_cluster,
    graph_of,
    lists_of,
    pipeline,
    random_dag,
    relisted,
)

FIGURES = Figures(tensor_bytes=3, parameter_bytes=6, saved_bytes=2, backward_input_s=1)
SKIPS = [(0, 5), (1, 7), (1, 3)]
TRAINING = [schedule for schedule in Schedule if schedule is not Schedule.INFERENCE]
FLUSHING = [schedule for schedule in TRAINING if schedule is not Schedule.PIPEDREAM]
SHAPES = {
    "one device": [0],
    "uneven stages": [0, 1, 2],
    "3-1": [(0, 1, 2), 3],
    "2-3-1": [(0, 1), (2, 3, 4), 5],
    "1-3-1": [0, (1, 2, 3), 4],
    "1-3-1 and back": [0, (1, 2, 3), 0],
    "interleaved": [0, 1, 0, 1],
    "interleaved, indivisible": [0, 1, 2, 3, 0, 1, 2, 3],
    "interleaved replicas": [(0, 1), (2, 3), (0, 1), (2, 3)],
    "tp 2-1": [[(0, 1)], 2],
    "tp 1-2": [0, [(1, 2)]],
    "tp 4-2": [[(0, 1, 2, 3)], [(4, 5)]],
    "tp 2, replicated, twice": [[(0, 1), (2, 3)], 4, [(0, 1), (2, 3)]],
}


def problem_for(graph, plan, cluster, **objective):
    infers = plan.schedule is Schedule.INFERENCE
    mode = Mode.INFERENCE if infers else Mode.TRAINING
    return Problem(graph=graph, cluster=cluster, objective=Objective(mode=mode, **objective))


def make(groups, graph=None, *, microbatches=6, recompute=(), **options):
    """Return a problem and plan on as many devices as the groups name."""
    graph = graph or chain(8, FIGURES, skips=SKIPS)
    count = 1 + max(np.ravel(np.concatenate([np.ravel(group) for group in groups])))
    cluster = flat_cluster(int(count), bandwidth_bytes_per_s=10)
    plan = pipeline(graph, cluster, groups, microbatches=microbatches, **options)
    flags = np.isin(np.arange(len(graph)), recompute)
    plan = replace(plan, recompute=flags)
    return problem_for(graph, plan, cluster), plan


# Programs that are right.


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_schedule_on_every_shape_is_proved(shape, schedule):
    problem, plan = make(SHAPES[shape], schedule=schedule, recompute=(0, 3, 6))
    report = check(problem, plan)
    assert report.num_instructions == len(lower(problem, plan))
    assert np.isinf(report.headroom_bytes).all()


@pytest.mark.parametrize("shard", [Shard.OPTIMIZER, Shard.GRADIENTS, Shard.PARAMETERS])
@pytest.mark.parametrize("schedule", FLUSHING)
@pytest.mark.parametrize(
    "shape", ["3-1", "2-3-1", "1-3-1", "1-3-1 and back", "tp 2, replicated, twice"]
)
def test_every_kind_of_sharding_is_proved(shape, schedule, shard):
    problem, plan = make(SHAPES[shape], schedule=schedule, shard=shard, recompute=(0, 3))
    assert check(problem, plan).num_collectives > 0


@pytest.mark.parametrize("schedule", Schedule)
def test_uneven_shares_and_sizes_are_proved(schedule):
    sizes = [2, 1, 3, 1, 1, 2, 1, 1] * 2
    groups, shares = [0, (1, 2), 3], {1: (5, 3)}
    check(*make(groups, schedule=schedule, shares=shares, microbatches=sizes))


@pytest.mark.parametrize("groups", [[0, 1, 0], [(0, 1), 2, (0, 1)], [[(0, 1)], 2, [(3, 4)]]])
@pytest.mark.parametrize("schedule", FLUSHING)
def test_tied_parameters_are_proved(schedule, groups):
    graph = chain(8, FIGURES, Traits(tied=[(0, 7), (1, 2)], bare=(0, 1)), skips=SKIPS)
    for shard in Shard:
        check(*make(groups, graph, schedule=schedule, shard=shard))


@pytest.mark.parametrize("schedule", [*FLUSHING, Schedule.INFERENCE])
@pytest.mark.parametrize("seed", range(6))
def test_placements_with_several_visits_to_a_device_are_proved(seed, schedule):
    rng = random.Random(seed)
    graph, cluster = random_dag(20, rng), flat_cluster(3)
    places = np.array([rng.randrange(3) for _ in range(20)])
    plan = placement_plan(
        graph, cluster.device_names, places, schedule=schedule, microbatch_sizes=np.array([1, 2, 1])
    )
    assert len(plan.stages) > 3
    check(problem_for(graph, plan, cluster), plan)


def test_stages_without_trained_parameters_are_proved():
    graph = chain(6, FIGURES, Traits(bare=(2, 3), frozen=(4, 5)))
    for shard in Shard:
        check(*make([0, (1, 2), (3, 4)], graph, shard=shard))
    check(*make([0, (1, 2), 3], graph, schedule=Schedule.PIPEDREAM))


def test_a_program_written_by_hand_is_proved():
    """Two stages, one microbatch, no parameters: what must be there can be counted on fingers."""
    graph = chain(2, FIGURES, Traits(bare=(0, 1)))
    problem, plan = make([0, 1], graph, microbatches=1)
    rows = [
        (Kind.LOAD, 0, 0, 0, False, -1, 0),
        (Kind.FORWARD, 0, 0, -1, False, -1, 0),
        (Kind.SEND, 0, 0, 1, False, 1, 3),
        (Kind.RECV, 0, 0, 1, True, 1, 3),
        (Kind.BACKWARD, 0, 0, -1, False, -1, 0),
        (Kind.RECV, 1, 0, 1, False, 0, 3),
        (Kind.FORWARD, 1, 0, -1, False, -1, 0),
        (Kind.BACKWARD, 1, 0, -1, False, -1, 0),
        (Kind.SEND, 1, 0, 1, True, 0, 3),
    ]
    names = ("kind", "stage", "microbatch", "tensor", "gradient", "peer", "bytes")
    columns = {name: np.array([row[at] for row in rows]) for at, name in enumerate(names)}
    version = np.array([-1 if row[0] in (Kind.LOAD, Kind.SEND, Kind.RECV) else 0 for row in rows])
    none = np.full(len(rows), -1)
    program = Program(
        devices=plan.devices,
        num_stages=2,
        microbatch_sizes=plan.microbatch_sizes,
        ptr=np.array([0, 5, 9]),
        group=none,
        bucket=none,
        version=version,
        **columns,
    )
    report = check(problem, plan, program)
    assert (report.num_messages, report.sent_bytes, report.num_collectives) == (2, 6, 0)


def test_a_report_counts_messages_collectives_and_memory():
    graph = chain(4, FIGURES)
    cluster = flat_cluster(3, memory_bytes=1000)
    plan = pipeline(graph, cluster, [(0, 1), 2], microbatches=4)
    report = check(Problem(graph=graph, cluster=cluster), plan)
    assert report.devices == ("d0", "d1", "d2")
    assert report.num_messages == 8
    assert report.sent_bytes == 24
    assert report.num_collectives == 1
    # Two parameters of 6 bytes with gradients, and 8 bytes of state for each of 3 elements. Then
    # two microbatches of 4 saved bytes and a received gradient, or one and three posted receives.
    assert report.peak_bytes.tolist() == [48 + 2 * 4 + 3, 48 + 2 * 4 + 3, 48 + 4 + 3 * 3]
    assert report.headroom_bytes.tolist() == (1000 - report.peak_bytes).tolist()


def test_compiled_and_uncompiled_walks_agree(monkeypatch):
    problem, plan = make(SHAPES["tp 2, replicated, twice"], shard=Shard.GRADIENTS)
    slow = check(problem, plan)
    late = with_late_receives(lower(*make(SHAPES["uneven stages"])))
    slow_message = refusal(*make(SHAPES["uneven stages"]), late)
    monkeypatch.setattr(kernels, "ROWS", kernels.Threshold(size=0))
    assert check(problem, plan) == slow
    late = with_late_receives(lower(*make(SHAPES["uneven stages"])))
    assert refusal(*make(SHAPES["uneven stages"]), late) == slow_message


# Programs that are wrong.


def refusal(problem, plan, program, error=InvalidInputError):
    with pytest.raises(error) as caught:
        check(problem, plan, program)
    text = str(caught.value)
    assert "\n" not in text
    return text


def find(program, kind, *, device=None, **fields):
    """Return the first row with the given fields."""
    mask = program.kind == kind
    for name, value in fields.items():
        mask &= getattr(program, name) == value
    if device is not None:
        mask &= program.device == device
    return int(np.flatnonzero(mask)[0])


def changed(program, row, **fields):
    columns = {}
    for name, value in fields.items():
        columns[name] = np.array(getattr(program, name))
        columns[name][row] = value
    return dataclasses.replace(program, **columns)


def moved(program, row, before):
    """Return the program with a row moved to just before another of its device."""
    lists = lists_of(program)
    mine = lists[int(program.device[row])]
    mine.remove(row)
    mine.insert(mine.index(before), row)
    return relisted(program, lists)


def moved_after(program, row, after):
    lists = lists_of(program)
    mine = lists[int(program.device[row])]
    mine.remove(row)
    mine.insert(mine.index(after) + 1, row)
    return relisted(program, lists)


def swapped(program, row, other):
    lists = lists_of(program)
    mine = lists[int(program.device[row])]
    i, j = mine.index(row), mine.index(other)
    mine[i], mine[j] = mine[j], mine[i]
    return relisted(program, lists)


def with_late_receives(program):
    """Return the program with every RECV just before what waits for it."""
    lists = lists_of(program)
    for row in np.flatnonzero(program.kind == Kind.RECV).tolist():
        mine = lists[int(program.device[row])]
        mine.remove(row)
        mine.insert(mine.index(int(match(program).consumer[row])), row)
    return relisted(program, lists)


def words(program, row):
    """Return an instruction for people, without its position."""
    return program.describe(row).rsplit(" at position", 1)[0]


BROKEN = {
    "1f1b with replicas": lambda: make([0, (1, 2), 3], microbatches=4),
    "gpipe with groups": lambda: make(
        [[(0, 1)], [(2, 3), (4, 5)]], schedule=Schedule.GPIPE, microbatches=2
    ),
    "zero bubble, sharded": lambda: make(
        [(0, 1), 2], schedule=Schedule.ZERO_BUBBLE, shard=Shard.OPTIMIZER, microbatches=4
    ),
    "early recompute, gathered": lambda: make(
        [0, (1, 2)],
        schedule=Schedule.EARLY_RECOMPUTE,
        shard=Shard.PARAMETERS,
        microbatches=4,
        recompute=(0, 5),
    ),
    "stashing": lambda: make([(0, 1), 2, 0], schedule=Schedule.PIPEDREAM, microbatches=4),
    "inference": lambda: make([0, 1, 0], schedule=Schedule.INFERENCE, microbatches=2),
}


@pytest.mark.parametrize("case", BROKEN)
def test_no_instruction_can_be_left_out(case):
    problem, plan = BROKEN[case]()
    program = lower(problem, plan)
    partner = match(program).partner
    for row in range(len(program)):
        lists = lists_of(program)
        lists[int(program.device[row])].remove(row)
        text = refusal(problem, plan, relisted(program, lists))
        named = [words(program, row)]
        if partner[row] >= 0:
            named.append(words(program, int(partner[row])))
        if program.kind[row] == Kind.ALL_GATHER:
            consumer = int(match(program).consumer[row])
            named.append(f"{program.devices[program.device[row]]}: ")
            named.append(words(program, consumer) if consumer >= 0 else "ALL_GATHER")
        assert any(name in text for name in named), text


@pytest.mark.parametrize("case", BROKEN)
def test_no_instruction_can_stand_twice(case):
    problem, plan = BROKEN[case]()
    program = lower(problem, plan)
    for row in range(len(program)):
        lists = lists_of(program)
        mine = lists[int(program.device[row])]
        mine.insert(mine.index(row), row)
        text = refusal(problem, plan, relisted(program, lists))
        assert words(program, row) in text, text


@pytest.mark.parametrize("case", BROKEN)
def test_no_instruction_can_move_to_another_device(case):
    problem, plan = BROKEN[case]()
    program = lower(problem, plan)
    for row in range(0, len(program), 3):
        device = int(program.device[row])
        lists = lists_of(program)
        lists[device].remove(row)
        lists[(device + 1) % len(lists)].insert(0, row)
        refusal(problem, plan, relisted(program, lists))


@pytest.fixture
def simple():
    """Return a problem, a plan 1-2-1 of three stages and its program."""
    problem, plan = make([0, (1, 2), 3], microbatches=4)
    return problem, plan, lower(problem, plan)


def test_wrong_device_names_the_replica(simple):
    problem, plan, program = simple
    row = find(program, Kind.FORWARD, stage=1, microbatch=0)
    other = find(program, Kind.FORWARD, stage=1, microbatch=1)
    text = refusal(problem, plan, changed(changed(program, row, microbatch=1), other, microbatch=0))
    assert text.startswith("d1: FORWARD(stage 1, microbatch 1) at position ")
    assert "replica 1 of stage 1 takes microbatch 1, on d2" in text


def test_backward_before_forward(simple):
    problem, plan, program = simple
    row = find(program, Kind.BACKWARD, stage=2, microbatch=0)
    forward = find(program, Kind.FORWARD, stage=2, microbatch=0)
    text = refusal(problem, plan, swapped(program, row, forward))
    expected = r"d3: BACKWARD\(stage 2, microbatch 0\) at position \d+ comes before d3: FORWARD\("
    assert re.match(expected, text)


def test_load_after_forward(simple):
    problem, plan, program = simple
    load, forward = find(program, Kind.LOAD), find(program, Kind.FORWARD, device=0)
    text = refusal(problem, plan, swapped(program, load, forward))
    assert text.startswith(
        "d0: FORWARD(stage 0, microbatch 0) at position 0 comes before d0: LOAD("
    )


def test_load_of_what_is_no_input(simple):
    problem, plan, program = simple
    text = refusal(problem, plan, changed(program, find(program, Kind.LOAD), tensor=3))
    assert "loads what its stage does not read as an input" in text


def test_weight_part_needs_an_input_part():
    problem, plan = make([0, 1], schedule=Schedule.ZERO_BUBBLE, microbatches=2)
    program = lower(problem, plan)
    row = find(program, Kind.BACKWARD_INPUT, stage=0, microbatch=0)
    text = refusal(problem, plan, changed(program, row, kind=Kind.BACKWARD))
    assert text.startswith("d0: BACKWARD_WEIGHT(stage 0, microbatch 0) at position ")
    assert "is one too many" in text
    weight = find(program, Kind.BACKWARD_WEIGHT, stage=0, microbatch=0)
    text = refusal(problem, plan, moved(program, weight, before=row))
    assert text.startswith("d0: BACKWARD_WEIGHT(stage 0, microbatch 0)")


def test_recompute_stands_between_forward_and_backward():
    problem, plan = make([0, 1], schedule=Schedule.EARLY_RECOMPUTE, recompute=(0,), microbatches=2)
    program = lower(problem, plan)
    row = find(program, Kind.RECOMPUTE, microbatch=1)
    early = moved(program, row, before=find(program, Kind.FORWARD, device=0, microbatch=1))
    assert refusal(problem, plan, early).startswith("d0: RECOMPUTE(stage 0, microbatch 1)")
    late = moved_after(program, row, find(program, Kind.BACKWARD, device=0, microbatch=1))
    assert refusal(problem, plan, late).startswith("d0: BACKWARD(stage 0, microbatch 1)")
    elsewhere = changed(program, row, kind=Kind.RECOMPUTE)
    plan = replace(plan, schedule=Schedule.ONE_F_ONE_B)
    assert "RECOMPUTE(stage 0, microbatch 0)" in refusal(problem, plan, elsewhere)


def test_both_ends_have_the_same_bytes(simple):
    problem, plan, program = simple
    row = find(program, Kind.SEND, device=0)
    text = refusal(problem, plan, changed(program, row, bytes=7))
    assert text.startswith("d0: SEND(stage 0, microbatch 0, tensor ")
    assert "sends 7 bytes, d" in text
    assert text.endswith("expects 3")


def test_bytes_are_those_of_the_tensor(simple):
    problem, plan, program = simple
    row = find(program, Kind.SEND, device=0)
    both = changed(program, [row, int(match(program).partner[row])], bytes=7)
    text = refusal(problem, plan, both)
    assert "sends 7 bytes; the tensor has 3 for 1 samples" in text


def test_retargeted_messages_are_named(simple):
    problem, plan, program = simple
    send = find(program, Kind.SEND, device=0, peer=1)
    text = refusal(problem, plan, changed(program, send, peer=2))
    assert text.startswith(words(changed(program, send, peer=2), send))
    assert "is not needed" in text
    recv = int(match(program).partner[send])
    assert refusal(problem, plan, changed(program, recv, peer=3)).startswith("d1: RECV(")


def test_a_message_that_nobody_sends(simple):
    problem, plan, program = simple
    send = find(program, Kind.SEND, device=0, peer=1)
    lists = lists_of(program)
    lists[0].remove(send)
    lists[1].remove(int(match(program).partner[send]))
    text = refusal(problem, plan, relisted(program, lists))
    assert re.match(r"d1: FORWARD\(stage 1, microbatch 0\) at position \d+ needs tensor 1 ", text)
    assert text.endswith("from d0, which is never sent")
    back = find(program, Kind.SEND, device=3, peer=1, gradient=True)
    lists = lists_of(program)
    lists[3].remove(back)
    lists[1].remove(int(match(program).partner[back]))
    text = refusal(problem, plan, relisted(program, lists))
    assert re.match(r"d1: BACKWARD\(stage 1, microbatch 0\) at position \d+ needs the grad", text)


def test_messages_that_have_no_business():
    graph = chain(8, FIGURES, Traits(detached=(5,)), skips=SKIPS)
    problem, plan = make([0, 1, 2], graph, microbatches=1)
    program = lower(problem, plan)
    row = find(program, Kind.SEND, device=0, gradient=False)
    both = [row, int(match(program).partner[row])]
    assert "no other stage reads" in refusal(problem, plan, changed(program, both, tensor=4))
    row = find(program, Kind.SEND, device=1, gradient=True)
    both = [row, int(match(program).partner[row])]
    text = refusal(problem, plan, changed(program, both, tensor=6))
    assert "the tensor is not differentiable" in text


def test_send_before_its_forward(simple):
    problem, plan, program = simple
    row = find(program, Kind.SEND, device=0)
    text = refusal(problem, plan, moved(program, row, before=find(program, Kind.FORWARD)))
    assert text.startswith("d0: SEND(stage 0, microbatch 0")
    assert "comes before d0: FORWARD(stage 0, microbatch 0)" in text


def test_receive_after_its_reader(simple):
    problem, plan, program = simple
    row = find(program, Kind.RECV, device=3, gradient=False)
    text = refusal(problem, plan, moved_after(program, row, find(program, Kind.FORWARD, device=3)))
    assert text.startswith("d3: FORWARD(stage 2, microbatch 0)")
    assert "comes before d3: RECV(stage 2, microbatch 0" in text


def test_local_stages_run_along_the_data():
    problem, plan = make([0, 1, 0, 1], microbatches=1)
    program = lower(problem, plan)
    first, later = (find(program, Kind.FORWARD, stage=stage) for stage in (0, 2))
    assert "d0: FORWARD(stage 2, microbatch 0) at position" in refusal(
        problem, plan, swapped(program, first, later)
    )
    first, later = (find(program, Kind.BACKWARD, stage=stage) for stage in (2, 0))
    assert "d0: BACKWARD(stage 0, microbatch 0) at position" in refusal(
        problem, plan, swapped(program, first, later)
    )


def test_gradients_are_sent_after_the_last_reader():
    # Tensor 2 of stage 0 is read by stages 1 and 3 on d1; its gradient leaves after both.
    problem, plan = make([0, 1, 2, 1], microbatches=1)
    program = lower(problem, plan)
    both = [r for r in np.flatnonzero(program.kind == Kind.SEND) if program.gradient[r]]
    row = next(int(r) for r in both if program.tensor[r] == 2 and program.device[r] == 1)
    assert program.stage[row] == 1
    early = moved(program, row, before=find(program, Kind.BACKWARD, stage=1))
    text = refusal(problem, plan, early)
    assert text.startswith("d1: SEND(stage 1, microbatch 0, gradient of tensor 2, to d0)")
    text = refusal(problem, plan, changed(program, row, stage=3))
    assert "names the wrong stage; 1 is the last that makes or adds to it" in text


def test_a_receive_names_its_first_reader():
    problem, plan = make([0, 1, 2, 1], microbatches=1)
    program = lower(problem, plan)
    row = find(program, Kind.RECV, device=1, tensor=2, gradient=False)
    text = refusal(problem, plan, changed(program, row, stage=3))
    assert text.startswith("d1: RECV(stage 3, microbatch 0, tensor 2, from d0)")
    assert "names the wrong stage; 1 is the first that waits for it" in text


def test_both_ends_list_messages_in_one_order(simple):
    problem, plan, program = simple
    rows = np.flatnonzero((program.kind == Kind.RECV) & (program.device == 3) & (program.peer == 0))
    text = refusal(problem, plan, swapped(program, int(rows[0]), int(rows[1])))
    assert re.match(
        r"d0: SEND\(stage 0, microbatch 0.* goes before d0: SEND\(.*, but d3: RECV", text
    )
    assert "in one order" in text


def test_late_receives_are_right_when_buffered_but_not_with_rendezvous():
    problem, plan = make([0, 1, 2], chain(6, FIGURES), microbatches=6)
    late = with_late_receives(lower(problem, plan))
    assert simulate(problem, plan, program=late).makespan_s > 0
    text = refusal(problem, plan, late)
    assert text.startswith("deadlock with rendezvous sends: d1: SEND(stage 1, microbatch 1, ")
    assert ", which waits for d2: SEND(stage 2, microbatch 0, gradient of tensor 4, " in text
    assert text.endswith(", which waits for the first")


def test_orders_that_wait_for_each_other_even_when_buffered():
    problem, plan = make([0, 1], chain(4, FIGURES), microbatches=2)
    program = lower(problem, plan)
    # d0 does B0 before F1, d1 does F1 before B0.
    assert find(program, Kind.FORWARD, device=1, microbatch=1) > find(program, Kind.BACKWARD)
    lists = lists_of(program)
    second = [row for row in lists[0] if program.microbatch[row] == 1]
    first = [row for row in lists[0] if program.microbatch[row] == 0]
    updates = [row for row in lists[0] if program.microbatch[row] < 0]
    lists[0] = first + second + updates
    kinds = {"F": Kind.FORWARD, "B": Kind.BACKWARD}
    receives = [row for row in lists[1] if program.kind[row] == Kind.RECV]
    compute = [
        find(program, kinds[name[0]], device=1, microbatch=int(name[1]))
        for name in ("F0", "F1", "B0", "B1")
    ]
    sends = [row for row in lists[1] if program.kind[row] == Kind.SEND]
    lists[1] = [receives[0], compute[0], receives[1], compute[1]]
    lists[1] += [compute[2], sends[0], compute[3], sends[1]]
    lists[1] += [row for row in range(*program.ptr[1:3]) if program.kind[row] == Kind.UPDATE]
    text = refusal(problem, plan, relisted(program, lists))
    assert text.startswith("deadlock even with buffered sends: ")
    assert "d0: RECV(stage 0, microbatch 0, gradient of tensor 2, from d1)" in text
    assert "d1: RECV(stage 1, microbatch 1, tensor 2, from d0)" in text


def test_a_collective_that_waits_for_a_message_behind_it():
    problem, plan = make([0, (0, 1)], chain(4, FIGURES), microbatches=2)
    program = lower(problem, plan)
    send = find(program, Kind.SEND, device=1, gradient=True)
    late = moved_after(program, send, find(program, Kind.ALL_REDUCE, device=1))
    text = refusal(problem, plan, late)
    assert text.startswith("deadlock even with buffered sends: d0: RECV(stage 0, microbatch 1, ")
    assert "d1: ALL_REDUCE(stage 1, bucket 1)" in text


# Parameters.


def test_reduction_before_a_backward(simple):
    problem, plan, program = simple
    row = find(program, Kind.ALL_REDUCE, device=1)
    last = find(program, Kind.BACKWARD, device=1, microbatch=2)
    text = refusal(problem, plan, moved(program, row, before=last))
    assert re.match(r"d1: ALL_REDUCE\(stage 1, bucket 1\) at position \d+ comes before", text)
    assert "d1: BACKWARD(stage 1, microbatch 2)" in text


def test_update_before_its_reduction_or_its_backward(simple):
    problem, plan, program = simple
    reduction = find(program, Kind.ALL_REDUCE, device=1)
    update = find(program, Kind.UPDATE, device=1)
    text = refusal(problem, plan, moved(program, update, before=reduction))
    assert text.startswith("d1: UPDATE(stage 1)")
    assert "comes before d1: ALL_REDUCE" in text
    update = find(program, Kind.UPDATE, device=3)
    last = find(program, Kind.BACKWARD, device=3, microbatch=3)
    text = refusal(problem, plan, moved(program, update, before=last))
    assert "comes before d3: BACKWARD(stage 2, microbatch 3)" in text


def test_tied_parameters_wait_for_all_owners():
    graph = chain(6, FIGURES, Traits(tied=[(0, 5)]))
    problem, plan = make([0, 1, 0], graph, microbatches=2)
    program = lower(problem, plan)
    update = find(program, Kind.UPDATE, stage=0)
    early = moved(program, update, before=find(program, Kind.BACKWARD, stage=0, microbatch=1))
    assert refusal(problem, plan, early).startswith("d0: UPDATE(stage 0)")
    graph = chain(6, FIGURES, Traits(tied=[(0, 5)], bare=range(6)))
    problem, plan = make([0, 1, 0], graph, microbatches=2)
    program = lower(problem, plan)
    text = refusal(problem, plan, changed(program, find(program, Kind.UPDATE), stage=2))
    assert text.startswith("d0: UPDATE(stage 2)")
    assert "has nothing to step" in text


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kind": Kind.REDUCE_SCATTER}, "is not how its stage is sharded"),
        ({"kind": Kind.ALL_GATHER}, "gathers parameters that are not sharded"),
        ({"bytes": 7}, "has the wrong number of bytes"),
        ({"stage": 0}, "names the wrong stage"),
        ({"bucket": 0}, "works on parameters that its device does not hold"),
    ],
)
def test_wrong_collectives_say_what_was_expected(simple, fields, why):
    problem, plan, program = simple
    row = find(program, Kind.ALL_REDUCE, device=1)
    broken = changed(program, row, **fields)
    text = refusal(problem, plan, broken)
    assert text.startswith(broken.describe(row))
    assert why in text
    if "bucket" not in fields:
        assert text.endswith(
            "expected ALL_REDUCE of 18 bytes of bucket 1 over d1 (stage 1) + d2 (stage 1)"
        )


def test_a_collective_over_the_wrong_devices(simple):
    problem, plan, program = simple
    broken = replace(program, group_devices=np.array([1, 3]))
    assert "is not over all devices that hold its bucket" in refusal(problem, plan, broken)


def test_a_collective_on_parameters_of_one_device_alone(simple):
    problem, plan, program = simple
    row = find(program, Kind.UPDATE, device=3)
    fields = {"kind": Kind.ALL_REDUCE, "group": 0, "bucket": 2, "version": -1}
    text = refusal(problem, plan, changed(program, row, **fields))
    assert text.endswith("no other device holds; expected no collective, bucket 2 is on d3 alone")


def test_every_trained_parameter_is_in_one_bucket(simple):
    problem, plan, program = simple
    parameters = np.array(program.bucket_parameters)
    for at, value, why in (
        (0, parameters[1], "'w0' is in 0 buckets; expected 1"),
        (0, 99, "a bucket holds parameter 99; there are 8"),
    ):
        other = parameters.copy()
        other[at] = value
        assert why in refusal(problem, plan, replace(program, bucket_parameters=other))
    first, last = program.bucket_ptr[:2]
    other = parameters.copy()
    other[[first, last]] = other[[last, first]]
    text = refusal(problem, plan, replace(program, bucket_parameters=other))
    assert "together with parameters of other stages" in text


def test_ties_that_no_program_can_keep():
    graph = chain(6, FIGURES, Traits(tied=[(0, 5)]))
    problem, plan = make([0, 1], graph, microbatches=2)
    program = lower(problem, plan)
    stashing = replace(plan, schedule=Schedule.PIPEDREAM)
    assert "keeps versions of each stage alone" in refusal(problem, stashing, program)
    problem, plan = make([0, [(1, 2)]], chain(6, FIGURES), microbatches=2)
    tied = chain(6, FIGURES, Traits(tied=[(0, 5)]))
    program = lower(problem, plan)
    buckets = {"bucket_ptr": np.array([0, 3, 6, 7]), "bucket_parameters": np.arange(7)}
    text = refusal(
        Problem(graph=tied, cluster=problem.cluster),
        replace(plan, fingerprint=tied.fingerprint),
        replace(program, **buckets),
    )
    assert "bucket 2 is tied over stages of different tensor-parallel degree" in text


def test_updates_are_not_repeated_or_left_out_when_stashing():
    problem, plan = make([(0, 1), 2], schedule=Schedule.PIPEDREAM, microbatches=4)
    program = lower(problem, plan)
    first = find(program, Kind.UPDATE, device=0)
    text = refusal(problem, plan, changed(program, first, version=2))
    assert text.endswith("names version 2; it makes 1")
    late = moved_after(program, first, find(program, Kind.BACKWARD, device=0, microbatch=2))
    text = refusal(problem, plan, late)
    assert text.startswith("d0: BACKWARD(stage 0, microbatch 2)")
    assert "comes before d0: UPDATE(stage 0)" in text


def test_versions_are_the_updates_so_far():
    problem, plan = make([0, 1], schedule=Schedule.PIPEDREAM, microbatches=4)
    program = lower(problem, plan)
    row = find(program, Kind.FORWARD, device=1, microbatch=2)
    assert program.version[row] == 2
    text = refusal(problem, plan, changed(program, row, version=1))
    assert text.startswith("d1: FORWARD(stage 1, microbatch 2)")
    assert text.endswith("uses version 1 of its weights; 2 updates of its stage come before it")
    back = find(program, Kind.BACKWARD, device=0, microbatch=2)
    text = refusal(problem, plan, changed(program, back, version=2))
    assert text.endswith("uses version 2 of its weights; its FORWARD used 1")


def test_gathers_after_the_step():
    problem, plan = make([(0, 1), 2], shard=Shard.OPTIMIZER, microbatches=2)
    program = lower(problem, plan)
    gather, update = (find(program, kind, device=0) for kind in (Kind.ALL_GATHER, Kind.UPDATE))
    text = refusal(problem, plan, swapped(program, gather, update))
    assert text.startswith("d0: ALL_GATHER(stage 0, bucket 0)")
    assert "comes before d0: UPDATE(stage 0)" in text


def test_a_gathered_copy_is_used_once():
    problem, plan = make([(0, 1), 2], shard=Shard.PARAMETERS, microbatches=4)
    program = lower(problem, plan)
    lists = lists_of(program)
    for device in (0, 1):
        rows = [row for row in lists[device] if program.kind[row] == Kind.ALL_GATHER]
        lists[device].remove(rows[1])
    text = refusal(problem, plan, relisted(program, lists))
    assert "needs its sharded parameters; no ALL_GATHER of bucket 0 brings a copy" in text


# Groups, fields, plans.


def test_members_list_joint_instructions_in_one_order():
    problem, plan = make([[(0, 1)], 2], microbatches=4, schedule=Schedule.GPIPE)
    program = lower(problem, plan)
    first, second = (find(program, Kind.FORWARD, device=1, microbatch=m) for m in (0, 1))
    loads = [find(program, Kind.LOAD, device=1, microbatch=m) for m in (0, 1)]
    lists = lists_of(program)
    lists[1] = [*loads, second, first, *(r for r in lists[1] if r not in (*loads, first, second))]
    text = refusal(problem, plan, relisted(program, lists))
    assert re.match(r"d1: FORWARD\(stage 0, microbatch 1\) at position 2 meets d0: FORWARD", text)
    assert "in one order" in text


def test_a_gather_that_a_member_lacks():
    problem, plan = make([(0, 1), 2], shard=Shard.PARAMETERS, microbatches=2)
    program = lower(problem, plan)
    row = find(program, Kind.ALL_GATHER, device=0)
    lists = lists_of(program)
    lists[0].append(row)
    text = refusal(problem, plan, relisted(program, lists))
    assert text.startswith("d0: ALL_GATHER(stage 0, bucket 0)")
    assert text.endswith("waits for ever: d1 of its group does not list it")


def test_tensor_parallel_compute_names_its_group():
    problem, plan = make([[(0, 1)], 2], microbatches=1)
    program = lower(problem, plan)
    row = find(program, Kind.FORWARD, device=0)
    text = refusal(problem, plan, changed(program, row, group=-1))
    assert "does not name the tensor-parallel group of its device" in text
    row = find(program, Kind.FORWARD, device=2)
    text = refusal(problem, plan, changed(program, row, group=0))
    assert "names a group; its stage is not tensor-parallel" in text


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        (Kind.FORWARD, {"stage": -1}, "has no stage; its kind needs one"),
        (Kind.FORWARD, {"peer": 1}, "has a peer, which its kind does not use"),
        (Kind.SEND, {"tensor": 99}, "names a tensor beyond the 9 of the graph"),
        (Kind.SEND, {"peer": 0}, "goes to its own device"),
        (Kind.SEND, {"group": 0}, "has a group, which its kind does not use"),
        (Kind.FORWARD, {"gradient": True}, "is marked as a gradient"),
        (Kind.UPDATE, {"kind": Kind.BROADCAST}, "has no meaning in a step"),
    ],
)
def test_fields_that_do_not_fit_their_kind(simple, kind, fields, why):
    problem, plan, program = simple
    row = find(program, kind, device=0)
    assert why in refusal(problem, plan, changed(program, row, **fields))


def test_training_instructions_in_inference():
    problem, plan = make([0, 1], schedule=Schedule.INFERENCE, microbatches=1)
    program = lower(problem, plan)
    row = find(program, Kind.FORWARD, device=1)
    text = refusal(problem, plan, changed(program, row, kind=Kind.BACKWARD))
    assert text.endswith("belongs to training; this is inference")


def test_inference_without_its_gathers_is_refused(simple):
    problem, plan, _ = simple
    stages = (plan.stages[0], Stage(devices=((1,), (2,)), shard=Shard.PARAMETERS), plan.stages[2])
    inference = replace(plan, stages=stages, schedule=Schedule.INFERENCE)
    infers = Problem(
        graph=problem.graph, cluster=problem.cluster, objective=Objective(mode=Mode.INFERENCE)
    )
    program = lower(infers, inference)
    assert check(infers, inference, program).num_collectives == 2
    reduced = np.where(program.kind == Kind.ALL_GATHER, Kind.ALL_REDUCE, program.kind)
    text = refusal(infers, inference, replace(program, kind=reduced))
    assert "belongs to training; this is inference" in text
    whole = replace(inference, stages=tuple(replace(s, shard=Shard.NONE) for s in stages))
    assert "expected 0: one if it is trained, or gathered" in refusal(infers, whole, program)
    assert "expected 1: one if it is trained, or gathered" in refusal(
        infers, inference, lower(infers, whole)
    )


def test_programs_for_other_plans(simple):
    problem, plan, program = simple
    for other, what in (
        (replace(plan, microbatch_sizes=np.array([1, 1, 1, 2])), "microbatches"),
        (replace(plan, devices=("d0", "d2", "d1", "d3")), "devices"),
        (
            replace(plan, stage_of=np.arange(8) // 2, stages=(*plan.stages, plan.stages[0])),
            "stages",
        ),
    ):
        assert f"for other {what} than the plan" in refusal(problem, other, program)


def test_plans_that_no_program_can_keep(simple):
    problem, plan, program = simple
    wrong = replace(plan, schedule=Schedule.INFERENCE)
    assert "does not do training" in refusal(problem, wrong, program)
    sharded = Stage(devices=((1,), (2,)), shard=Shard.PARAMETERS)
    stages = (plan.stages[0], sharded, plan.stages[2])
    stashing = replace(plan, stages=stages, schedule=Schedule.PIPEDREAM)
    assert "shard 'none' only" in refusal(problem, stashing, program)
    assert "is for a graph with fingerprint" in refusal(
        Problem(graph=diamond(6), cluster=problem.cluster), plan, program
    )


# Memory.


def test_too_little_memory_says_where_how_much_and_what_would_do():
    graph = chain(4, Figures(saved_bytes=50e6, parameter_bytes=1e6))
    cluster = flat_cluster(2, memory_bytes=500e6)
    plan = pipeline(graph, cluster, [0, 1], microbatches=8, schedule=Schedule.GPIPE)
    assert check(
        Problem(graph=graph, cluster=cluster), replace(plan, schedule=Schedule.ONE_F_ONE_B)
    )
    text = refusal(Problem(graph=graph, cluster=cluster), plan, None, InfeasibleError)
    assert text.startswith("device 'd0' needs 808 MB for stage 0 (largest op ")
    assert "at d0: FORWARD(stage 0, microbatch 7)" in text
    assert "308 MB more than its limit of 500 MB; use more devices, smaller microbatches" in text


def test_weights_that_do_not_fit_are_named_as_such():
    graph = chain(2, Figures(parameter_bytes=100e6))
    cluster = flat_cluster(2, memory_bytes=300e6)
    plan = pipeline(graph, cluster, [0, 1])
    text = refusal(Problem(graph=graph, cluster=cluster), plan, None, InfeasibleError)
    assert text.startswith("device 'd0' needs 400 MB for stage 0 ")
    assert " at rest (weights, gradients, " in text


def test_the_memory_factor_lowers_the_limit():
    graph, cluster = chain(2, Figures(parameter_bytes=100.0)), flat_cluster(1, memory_bytes=1000)
    plan = pipeline(graph, cluster, [0])
    assert check(Problem(graph=graph, cluster=cluster), plan).limit_bytes.tolist() == [1000]
    half = Problem(graph=graph, cluster=cluster, objective=Objective(memory_factor=0.5))
    assert "more than its limit of 500 B" in refusal(half, plan, None, InfeasibleError)


def test_a_posted_receive_counts_from_its_post():
    # op0 on d0 sends 100 bytes to op2 on d1, which first computes op1 with 50 saved bytes.
    figures = Figures(tensor_bytes=(100, 0, 0), saved_bytes=(0, 50, 0))
    graph = graph_of(3, [(0, 2), (1, 2)], figures)
    cluster = flat_cluster(2)
    plan = placement_plan(graph, cluster.device_names, np.array([0, 1, 1]))
    problem = Problem(graph=graph, cluster=cluster)
    assert check(problem, plan).peak_bytes.tolist() == [100, 150]
