"""What the interpreter refuses, and what it does besides gradients."""

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from partita.core.graph import OpTable
from partita.core.plan import Plan, Shard, Stage
from partita.core.problem import Schedule
from partita.core.program import Kind, Program
from partita.errors import InvalidInputError, UnsupportedError
from partita.program.lower import lower
from partita.runtime.task import Task
from partita.runtime.training.recipe import Recipe
from partita.testing.networks import gradient_error, residual_network

NETWORK = residual_network(tied=False)
NAMES = NETWORK.graph.tensors.names
COLUMNS = ("kind", "stage", "microbatch", "tensor", "gradient", "peer", "group", "bucket")
COLUMNS += ("bytes", "version")


def plan_of(
    groups: Sequence[Sequence[int | tuple[int, ...]]],
    *,
    microbatches: int = 2,
    shard: Shard = Shard.NONE,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
) -> Plan:
    stages = tuple(
        Stage(
            devices=tuple((d,) if isinstance(d, int) else d for d in group),
            shard=shard if len(group) > 1 else Shard.NONE,
        )
        for group in groups
    )
    devices = 1 + max(d for s in stages for team in s.devices for d in team)
    return Plan(
        fingerprint=NETWORK.graph.fingerprint,
        devices=tuple(f"d{d}" for d in range(devices)),
        stage_of=np.arange(11) * len(groups) // 11,
        stages=stages,
        schedule=schedule,
        microbatch_sizes=np.full(microbatches, 2),
    )


def parameters() -> dict[str, Tensor]:
    return {n: torch.from_numpy(v) for n, v in NETWORK.parameters(1).items()}


def inputs_for(plan: Plan, steps: int = 1) -> list[list[dict[str, Tensor]]]:
    return [
        [
            {name: torch.from_numpy(value) for name, value in inputs.items()}
            for inputs in NETWORK.microbatches(plan.microbatch_sizes.tolist(), 2 + step)
        ]
        for step in range(steps)
    ]


def pick(program: Program, rows: Iterable[int]) -> Program:
    """Return a Program of some rows, in the given order, which must be sorted by device."""
    rows = np.array(list(rows))
    sizes = np.bincount(program.device[rows], minlength=len(program.devices))
    return replace(
        program,
        ptr=np.concatenate([[0], np.cumsum(sizes)]),
        **{name: getattr(program, name)[rows] for name in COLUMNS},
    )


def without(program: Program, *, device: int | None = None, **wanted: object) -> Program:
    """Return a Program without the last row, on a device, that has the wanted values."""
    fits = np.ones(len(program), dtype=bool) if device is None else program.device == device
    for name, value in wanted.items():
        fits &= getattr(program, name) == value
    rows = np.flatnonzero(fits)
    assert len(rows)
    return pick(program, np.delete(np.arange(len(program)), rows[-1]))


@pytest.fixture
def refusal(run_network, make_problem) -> Callable[[Plan, Callable[[Program], Program]], str]:
    """Return what the interpreter says of a plan's Program after some change."""

    def say(plan: Plan, change: Callable[[Program], Program]) -> str:
        program = change(lower(make_problem(NETWORK, plan), plan))
        with pytest.raises(InvalidInputError) as caught:
            run_network(NETWORK, plan, parameters(), inputs_for(plan), program)
        return str(caught.value)

    return say


TWO = plan_of([[0], [1]], microbatches=1)


def test_a_missing_send_leaves_its_consumer_stuck(refusal) -> None:
    message = refusal(TWO, lambda program: without(program, kind=Kind.SEND, gradient=False))
    assert message == (
        "no device can go on: d0: BACKWARD(stage 0, microbatch 0) at position 8 waits for the "
        "gradient of tensor 'e' of microbatch 0; d1: FORWARD(stage 1, microbatch 0) at position 6 "
        "waits for tensor 'f' of microbatch 0"
    )


def test_a_missing_gradient_leaves_its_consumer_stuck(refusal) -> None:
    message = refusal(TWO, lambda program: without(program, kind=Kind.SEND, gradient=True))
    assert "no device can go on" in message
    assert "d0: BACKWARD(stage 0, microbatch 0)" in message
    assert "waits for the gradient of tensor" in message


def test_a_missing_receive_names_the_consumer_and_the_tensor(refusal) -> None:
    message = refusal(TWO, lambda program: without(program, kind=Kind.RECV, gradient=False))
    assert message.startswith("d1: FORWARD(stage 1, microbatch 0) at position")
    assert "was neither made here nor received" in message


def test_a_missing_receive_of_a_gradient_names_the_consumer_and_the_device(refusal) -> None:
    message = refusal(TWO, lambda program: without(program, kind=Kind.RECV, gradient=True))
    assert message.startswith("d0: BACKWARD(stage 0, microbatch 0)")
    assert message.endswith("was not received from d1")


def test_a_whole_message_missing_is_found(refusal) -> None:
    for gradient, consumer in ((False, "d1: FORWARD(stage 1"), (True, "d0: BACKWARD(stage 0")):

        def cut(program: Program, gradient: bool = gradient) -> Program:
            half = without(program, kind=Kind.SEND, gradient=gradient)
            return without(half, kind=Kind.RECV, gradient=gradient)

        assert refusal(TWO, cut).startswith(consumer)


def test_a_send_that_nobody_receives_is_waited_for_at_the_end(refusal) -> None:
    def repeat(program: Program) -> Program:
        rows = list(range(len(program)))
        last = int(np.flatnonzero((program.kind == Kind.SEND) & ~program.gradient)[-1])
        rows.insert(last, last)
        return pick(program, rows)

    message = refusal(TWO, repeat)
    assert message.startswith("no device can go on: d0: SEND(stage 0, microbatch 0, ")
    assert message.endswith("waits for its receiver")


def test_a_gradient_received_too_late_names_its_consumer(refusal) -> None:
    def delay(program: Program) -> Program:
        late = (program.kind == Kind.RECV) & program.gradient
        return pick(program, np.lexsort((late, program.device)))

    message = refusal(TWO, delay)
    assert message.startswith("d0: BACKWARD(stage 0, microbatch 0)")
    assert message.endswith("was not received from d1")


def test_a_gradient_sent_before_its_last_contributor_is_refused(refusal) -> None:
    plan = plan_of([[0], [1], [1]], microbatches=1)

    def hurry(program: Program) -> Program:
        rows = list(range(len(program)))
        backward = int(np.flatnonzero((program.kind == Kind.BACKWARD) & (program.stage == 1))[0])
        sends = np.flatnonzero((program.kind == Kind.SEND) & program.gradient).tolist()
        rows = [row for row in rows if row not in sends]
        place = rows.index(backward)
        return pick(program, [*rows[:place], *sends, *rows[place:]])

    assert "lacks stage 1's part" in refusal(plan, hurry)


def test_a_backward_without_forward_is_named(refusal) -> None:
    one = plan_of([[0]], microbatches=1)
    message = refusal(one, lambda program: without(program, kind=Kind.FORWARD))
    assert message.startswith("d0: BACKWARD(stage 0, microbatch 0)")
    assert message.endswith("there was no forward")


def test_a_message_missing_before_others_is_found_by_their_order(refusal) -> None:
    def cut(program: Program) -> Program:
        first = int(np.flatnonzero(program.kind == Kind.SEND)[0])
        return pick(program, np.delete(np.arange(len(program)), first))

    message = refusal(TWO, cut)
    assert message.startswith("d1: RECV(stage 1, microbatch 0, ")
    assert "both ends must list their messages in one order" in message


def test_a_message_out_of_order_is_found(refusal) -> None:
    def swap(program: Program) -> Program:
        rows = np.arange(len(program))
        a, b = np.flatnonzero((program.kind == Kind.RECV) & ~program.gradient)[:2]
        rows[[a, b]] = rows[[b, a]]
        return pick(program, rows)

    assert "both ends must list their messages in one order" in refusal(TWO, swap)


def test_a_missing_load_is_named(refusal) -> None:
    message = refusal(TWO, lambda program: without(program, kind=Kind.LOAD, stage=1))
    assert "FORWARD(stage 1, microbatch 0)" in message
    assert "was not loaded" in message


def test_a_missing_forward_is_named(refusal) -> None:
    message = refusal(TWO, lambda program: without(program, kind=Kind.FORWARD, stage=0))
    assert "is not there to be sent" in message


def test_a_missing_backward_is_found_at_the_end(refusal) -> None:
    one = plan_of([[0]], microbatches=1)
    message = refusal(one, lambda program: without(program, kind=Kind.BACKWARD))
    assert message == "d0: stage 0 has no whole backward for microbatch 0"


def test_a_backward_without_its_first_half_is_named(refusal) -> None:
    plan = plan_of([[0]], microbatches=1, schedule=Schedule.ZERO_BUBBLE)
    message = refusal(plan, lambda program: without(program, kind=Kind.BACKWARD_INPUT))
    assert message.endswith("there was no BACKWARD_INPUT")


def test_a_member_that_misses_a_reduction_leaves_the_others_stuck(refusal) -> None:
    plan = plan_of([[0, 1]])
    message = refusal(plan, lambda program: without(program, device=1, kind=Kind.ALL_REDUCE))
    assert "no device can go on: d0: ALL_REDUCE(stage 0, bucket 0)" in message
    assert "waits for the other members of its group" in message


def test_a_missing_reduction_makes_replicas_differ(refusal) -> None:
    message = refusal(
        plan_of([[0, 1]]),
        lambda program: pick(program, np.flatnonzero(program.kind != Kind.ALL_REDUCE)),
    )
    assert "on d1 differs from that of another replica; the program misses a reduction" in message


def test_a_missing_update_leaves_gradients_unused(refusal) -> None:
    message = refusal(TWO, lambda program: without(program, kind=Kind.UPDATE, stage=0))
    assert message.startswith("d0: the gradient of parameter ")


def test_a_missing_gather_of_sharded_parameters_names_the_compute(refusal) -> None:
    plan = plan_of([[0, 1]], shard=Shard.PARAMETERS)

    def cut(program: Program) -> Program:
        half = without(program, device=0, kind=Kind.ALL_GATHER)
        return without(half, device=1, kind=Kind.ALL_GATHER)

    message = refusal(plan, cut)
    assert "BACKWARD(stage 0, microbatch " in message
    assert message.endswith("is divided and was not gathered")


def test_an_update_before_its_reduction_is_refused(refusal) -> None:
    message = refusal(
        plan_of([[0, 1]], shard=Shard.OPTIMIZER),
        lambda program: pick(program, np.flatnonzero(program.kind != Kind.REDUCE_SCATTER)),
    )
    assert message.startswith("d0: UPDATE(stage 0)")
    assert message.endswith("is not reduced")


def test_a_reduction_before_the_last_backward_is_refused(refusal) -> None:
    def hurry(program: Program) -> Program:
        rows = list(range(len(program)))
        for device in (0, 1):
            here = program.device == device
            reduction = int(np.flatnonzero(here & (program.kind == Kind.ALL_REDUCE))[0])
            last = int(np.flatnonzero(here & (program.kind == Kind.BACKWARD))[-1])
            rows.remove(reduction)
            rows.insert(rows.index(last), reduction)
        return pick(program, rows)

    assert "grew after its reduction" in refusal(plan_of([[0, 1]], microbatches=4), hurry)


def test_a_tensor_parallel_member_that_does_not_come_is_waited_for(refusal) -> None:
    plan = plan_of([[(0, 1)]], microbatches=1)
    message = refusal(plan, lambda program: pick(program, np.flatnonzero(program.device == 0)))
    assert "no device can go on: d0: FORWARD(stage 0, microbatch 0)" in message
    assert "waits for the other members of its group" in message


def test_a_forward_on_the_wrong_replica_is_refused(refusal) -> None:
    def move(program: Program) -> Program:
        swapped = np.where(program.microbatch >= 0, 1 - program.microbatch, -1)
        return replace(program, microbatch=swapped)

    assert "another replica runs this microbatch" in refusal(plan_of([[0, 1]]), move)


def test_a_version_that_is_not_there_is_named(refusal) -> None:
    plan = plan_of([[0], [1]], microbatches=3, schedule=Schedule.PIPEDREAM)

    def ahead(program: Program) -> Program:
        forward = (program.kind == Kind.FORWARD) & (program.stage == 0)
        return replace(program, version=np.where(forward, 5, program.version))

    message = refusal(plan, ahead)
    assert message.endswith("version 5 is not there; versions [0] are")


def test_an_unknown_kind_is_refused(refusal) -> None:
    def broadcast(program: Program) -> Program:
        kind = program.kind.copy()
        kind[np.flatnonzero(kind == Kind.UPDATE)[0]] = Kind.BROADCAST
        return replace(program, kind=kind)

    assert refusal(TWO, broadcast).endswith("this kind has no meaning yet")


def test_a_program_of_another_plan_is_refused(refusal, run_network, make_problem) -> None:
    other = plan_of([[0], [1], [0]])
    program = lower(make_problem(NETWORK, other), other)
    with pytest.raises(InvalidInputError, match=r"lower.*again"):
        run_network(NETWORK, TWO, parameters(), inputs_for(TWO), program)


def test_training_needs_a_loss(make_problem) -> None:
    problem = make_problem(NETWORK, TWO)
    graph = replace(NETWORK.graph, loss=-1)
    plan = replace(TWO, fingerprint=graph.fingerprint)
    problem = replace(problem, graph=graph)
    with pytest.raises(InvalidInputError, match=r"names.*makes"):
        Task(problem, plan, lower(problem, plan), code=None)


def test_a_loss_that_is_not_one_number_is_refused(run_network) -> None:
    graph = replace(NETWORK.graph, loss=NAMES.index("logits"))
    plan = replace(TWO, fingerprint=graph.fingerprint)
    with pytest.raises(InvalidInputError, match=r"'logits'.*\(2, 3\)"):
        run_network(replace(NETWORK, graph=graph), plan, parameters(), inputs_for(plan))


def test_explicit_backward_ops_are_not_supported(make_problem) -> None:
    phase = np.zeros(11, dtype=np.int8)
    phase[-1] = 1
    graph = replace(NETWORK.graph, ops=OpTable(names=NETWORK.graph.ops.names, phase=phase))
    plan = replace(TWO, fingerprint=graph.fingerprint)
    problem = replace(make_problem(NETWORK, TWO), graph=graph)
    with pytest.raises(UnsupportedError, match="explicit backward ops"):
        Task(problem, plan, lower(problem, plan), code=None)


def test_a_parameter_without_initial_value_is_named(run_network) -> None:
    state = parameters()
    del state["split"]
    with pytest.raises(InvalidInputError, match="'split'"):
        run_network(NETWORK, TWO, state, inputs_for(TWO))


@pytest.mark.parametrize("shard", list(Shard))
def test_an_optimizer_with_state_steps_parts_as_it_steps_wholes(run_network, shard) -> None:
    """Three replicas: no size of a parameter here is a multiple of 3, so every part is padded."""
    plan = plan_of([[0, 1, 2], [3]], microbatches=6, shard=shard)
    one = plan_of([[0]], microbatches=6)
    data = inputs_for(plan, steps=3)
    whole = run_network(NETWORK, one, parameters(), data, recipe=Recipe(optimizer="momentum"))
    result = run_network(NETWORK, plan, parameters(), data, recipe=Recipe(optimizer="momentum"))
    assert gradient_error(result.state, whole.state) < 1e-10
    assert gradient_error(result.steps[2].gradients, whole.steps[2].gradients) < 1e-10


def test_the_initial_state_is_not_changed(run_network) -> None:
    state = parameters()
    run_network(NETWORK, TWO, state, inputs_for(TWO))
    assert all(torch.equal(value, parameters()[name]) for name, value in state.items())


def test_the_same_run_gives_the_same_bits(run_network) -> None:
    plan = plan_of([[0, 1], [2], [1]], microbatches=4)
    first, second = (
        run_network(NETWORK, plan, parameters(), inputs_for(plan, 2)) for _ in range(2)
    )
    assert all(torch.equal(value, second.state[name]) for name, value in first.state.items())


def test_planning_and_lowering_never_import_torch() -> None:
    modules = "partita, partita.core.plan, partita.program.lower, partita.testing.networks"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
