"""A stage as one function does what calling its ops one by one does."""

import weakref
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from gallery import GALLERY, build
from torch import Tensor

from partita.capture.capture import capture
from partita.capture.captured import CapturedModel
from partita.capture.compiled_stage import compile_stage, plain_span
from partita.capture.op import CapturedOp, Replay
from partita.capture.setting import Example, example_inputs
from partita.capture.tree import Param, Value
from partita.core.plan import Plan, Stage, equal_microbatches
from partita.core.problem import Problem
from partita.runtime.interpreter import interpret
from partita.runtime.stage_code import Call
from partita.testing.builders import flat_cluster

CALL = Call(seed=5, step=2, microbatch=1)


def captured_case(name: str) -> tuple[CapturedModel, dict[str, Tensor]]:
    case = GALLERY[name]
    example = case.example(0)
    found = capture(build(name), example, loss=case.loss, name=name)
    return found, example_inputs(found.model, example)


def one_stage(captured: CapturedModel) -> Plan:
    graph = captured.graph
    return Plan(
        fingerprint=graph.fingerprint,
        devices=("d0",),
        stage_of=[0] * len(graph),
        stages=(Stage(devices=((0,),)),),
        microbatch_sizes=equal_microbatches(1, graph.batch_size),
    )


def op_by_op(
    captured: CapturedModel, inputs: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> dict[int, Tensor]:
    names = captured.graph.tensors.names
    replay = Replay(
        values={row: inputs[name] for row, name in enumerate(names) if name in inputs},
        parameters=state,
        constants=captured.constants,
    )
    with torch.random.fork_rng(devices=[]):
        for index, op in enumerate(captured.ops):
            if op.draws:
                torch.default_generator.manual_seed(CALL.op_seed(index))
            replay.run(op)
    return replay.values


@pytest.mark.parametrize("name", GALLERY)
def test_a_stage_gives_the_bits_and_buffers_of_its_ops(name: str) -> None:
    captured, inputs = captured_case(name)
    names = captured.graph.tensors.names
    states = [captured.state(), captured.state()]
    made = captured.stages(one_stage(captured)).run(0, inputs, states[0], CALL)
    values = op_by_op(captured, inputs, states[1])
    assert made
    for row, tensor in enumerate(names):
        if tensor in made:
            assert torch.equal(made[tensor], values[row]), tensor
    for key, held in states[0].items():
        assert torch.equal(held, states[1][key]), key


def test_drawing_leaves_the_callers_random_numbers_alone() -> None:
    captured, inputs = captured_case("dropout")
    assert any(op.draws for op in captured.ops)
    stages = captured.stages(one_stage(captured))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    stages.run(0, inputs, captured.state(), CALL)
    assert torch.equal(torch.rand(2), expected)


def call_of(func, *args, makes: int, **kwargs) -> CapturedOp:
    return CapturedOp(kind="call", func=func, args=args, kwargs=kwargs, outputs=((0, makes),))


def test_a_value_is_let_go_of_after_its_last_reader() -> None:
    seen = []

    def make(x: Tensor) -> Tensor:
        made = x + 1
        seen.append(weakref.ref(made))
        return made

    def look(x: Tensor) -> Tensor:
        seen.append(seen[0]() is None)
        return x

    ops = [
        call_of(make, Value(0), makes=1),
        call_of(torch.neg, Value(1), makes=2),
        call_of(look, Value(2), makes=3),
    ]
    function = compile_stage(
        list(enumerate(ops)),
        in_place=frozenset(),
        inputs=(0,),
        leaving=(3,),
        branches={},
        drops=((0,), (1,), (2,)),
        constants=(),
    )
    (left,) = function([torch.ones(2)], {}, frozenset(), lambda _: None, plain_span)
    assert left.tolist() == [-2.0, -2.0]
    assert seen[1] is True


def test_arguments_of_any_shape_and_name_arrive() -> None:
    def gather(*args: object, **kwargs: object) -> Tensor:
        assert args[0] == "text"
        first, (second, third) = args[1]["pair"]
        assert kwargs["lambda"] is None
        assert kwargs["a-b"] == slice(1, 2)
        return first + second * third + kwargs["weight"][0]

    op = call_of(
        gather,
        "text",
        {"pair": [Value(0), (Value(0), 3)]},
        makes=1,
        **{"lambda": None, "a-b": slice(1, 2), "weight": [Param("w'eight")]},
    )
    function = compile_stage(
        [(0, op)],
        in_place=frozenset(),
        inputs=(0,),
        leaving=(1,),
        branches={},
        drops=((0,),),
        constants=(),
    )
    (made,) = function(
        [torch.tensor(2.0)], {"w'eight": torch.tensor(0.5)}, frozenset(), lambda _: None, plain_span
    )
    assert made.item() == 8.5


class ThreeReaders(torch.nn.Module):
    """One tensor, read by three ops; their gradients are added from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        return (made.exp() + made.tanh() + made.sigmoid() * 7.3).mean()


@pytest.mark.parametrize("elsewhere", ["exp", "tanh", "sigmoid"])
def test_a_gradient_from_outside_is_added_where_autograd_would(elsewhere: str) -> None:
    model, x = ThreeReaders(), torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    captured = capture(model, Example(args=(x,)), name="readers")
    graph = captured.graph
    inside = {"first/linear", *({"exp", "tanh", "sigmoid"} - {elsewhere})}
    stage_of = [0 if name in inside else 1 for name in graph.ops.names]
    plan = Plan(
        fingerprint=graph.fingerprint,
        devices=("d0", "d1"),
        stage_of=stage_of,
        stages=(Stage(devices=((0,),)), Stage(devices=((1,),))),
        microbatch_sizes=equal_microbatches(1, graph.batch_size),
    )
    found = interpret(
        Problem(graph=graph, cluster=flat_cluster(2)),
        replace(plan, devices=flat_cluster(2).device_names),
        captured.stages(plan),
        state=captured.state(),
        load=lambda *_: x,
    )
    model(x).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(found.steps[0].gradients[name], parameter.grad), name
