"""Every model of the gallery, captured and run as stages, against the untouched model."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from gallery import GALLERY, build
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from partita.capture.capture import capture
from partita.capture.captured import CapturedModel, CaptureMode, Granularity
from partita.capture.setting import example_inputs
from partita.capture.tree import tensors_of
from partita.core.graph import Graph
from partita.core.plan import Plan, Stage
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.runtime.interpreter import RunOptions, interpret
from partita.runtime.results import RunResult
from partita.runtime.stage_code import Call
from partita.testing.builders import flat_cluster
from partita.testing.networks import gradient_error

SEED = 11
DATA = (0, 100)
"""Seeds of the examples of two microbatches."""


class Seeded(TorchFunctionMode):
    """Seeds what draws in an untouched model as a captured one would be seeded."""

    def __init__(self, captured: CapturedModel, call: Call) -> None:
        super().__init__()
        self.seeds: list[int | None] = []
        for index, op in enumerate(captured.ops):
            draws = sum(leaf.draws for leaf in op.leaves)
            self.seeds += [call.op_seed(index), *[None] * (draws - 1)] if draws else []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not self.seeds:
            return func(*args, **(kwargs or {}))
        if self.seeds[0] is not None:
            torch.default_generator.manual_seed(self.seeds[0])
        before = torch.default_generator.get_state()
        result = func(*args, **(kwargs or {}))
        if not torch.equal(before, torch.default_generator.get_state()):
            self.seeds.pop(0)
        return result


def random_stages(graph: Graph, num_stages: int, rng: random.Random) -> np.ndarray:
    """Cut a random topological order; colocation is ignored, which is harder."""
    waiting = {op: set() for op in range(len(graph))}
    for source, reader in zip(graph.edge_source.tolist(), graph.edges.reader.tolist(), strict=True):
        if source >= 0:
            waiting[reader].add(source)
    order: list[int] = []
    while waiting:
        ready = sorted(op for op, needs in waiting.items() if needs <= set(order))
        order.append(rng.choice(ready))
        del waiting[order[-1]]
    stages = min(num_stages, len(graph))
    cuts = sorted(rng.sample(range(1, len(graph)), stages - 1))
    stage_of = np.zeros(len(graph), dtype=np.int32)
    for place, op in enumerate(order):
        stage_of[op] = sum(place >= cut for cut in cuts)
    return stage_of


def make_plan(graph: Graph, stage_of: Sequence[int], schedule: Schedule) -> Plan:
    stages = int(max(stage_of)) + 1
    return Plan(
        fingerprint=graph.fingerprint,
        devices=tuple(f"d{d}" for d in range(stages)),
        stage_of=stage_of,
        stages=tuple(Stage(devices=((d,),)) for d in range(stages)),
        schedule=schedule,
        microbatch_sizes=np.full(len(DATA), graph.batch_size),
    )


def run(captured: CapturedModel, name: str, stage_of, *, training: bool = True) -> RunResult:
    graph = captured.graph
    schedule = Schedule.ONE_F_ONE_B if training else Schedule.INFERENCE
    plan = make_plan(graph, stage_of, schedule)
    problem = Problem(
        graph=graph,
        cluster=flat_cluster(len(plan.devices)),
        objective=Objective(mode=Mode.TRAINING if training else Mode.INFERENCE),
    )
    inputs = [example_inputs(captured.model, GALLERY[name].example(seed)) for seed in DATA]
    return interpret(
        problem,
        plan,
        captured.stages(plan),
        state=captured.state(),
        load=lambda _, microbatch, tensor: inputs[microbatch][tensor],
        options=RunOptions(seed=SEED),
    )


def untouched(
    captured: CapturedModel, name: str
) -> tuple[list[float], dict[str, Tensor], nn.Module]:
    """Return losses and gradients of the untouched model, and the model afterwards."""
    model, case = build(name).train(), GALLERY[name]
    if name == "layer drop":
        used = {n.split(".")[1] for n in captured.graph.parameters.names}
        model.rate, model.skipped = 0.0, frozenset(range(4)) - set(map(int, used))
    losses = []
    for microbatch, seed in enumerate(DATA):
        example = case.example(seed)
        with Seeded(captured, Call(seed=SEED, microbatch=microbatch)):
            output = model(*example.args, **example.kwargs)
            loss = output["loss"] if case.loss is None else case.loss(output, example.labels)
        losses.append(loss.item())
        (loss / len(DATA)).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return losses, gradients, model


def check_training(captured: CapturedModel, name: str, stage_of) -> None:
    result = run(captured, name, stage_of)
    losses, gradients, model = untouched(captured, name)
    np.testing.assert_allclose(result.steps[0].losses, losses, rtol=1e-10)
    found = result.steps[0].gradients
    assert gradient_error({n: found[n] for n in gradients}, gradients) < 1e-9
    assert all(not found[n].any() for n in set(found) - set(gradients))
    for key, buffer in model.named_buffers():
        if key in result.state:
            torch.testing.assert_close(result.state[key], buffer, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", GALLERY)
def test_three_random_stages_give_the_gradients_of_the_untouched_model(name, seed) -> None:
    captured = capture(build(name), GALLERY[name].example(0), loss=GALLERY[name].loss)
    assert not any(note.startswith("not captured") for note in captured.notes)
    check_training(captured, name, random_stages(captured.graph, 3, random.Random(seed)))


@pytest.mark.parametrize("name", GALLERY)
def test_every_op_alone_gives_the_gradients_of_the_untouched_model(name) -> None:
    captured = capture(build(name), GALLERY[name].example(0), loss=GALLERY[name].loss)
    check_training(captured, name, np.arange(len(captured.graph)))


def check_eval(captured: CapturedModel, name: str) -> None:
    result = run(captured, name, random_stages(captured.graph, 3, random.Random(3)), training=False)
    for microbatch, seed in enumerate(DATA):
        model, example = build(name).eval(), GALLERY[name].example(seed)
        with torch.no_grad():
            expected = model(*example.args, **example.kwargs)
        made = {n: values[microbatch] for n, values in result.steps[0].outputs.items()}
        pairs = zip(tensors_of(captured.rebuild_output(made)), tensors_of(expected), strict=True)
        for found, wanted in pairs:
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [n for n, case in GALLERY.items() if case.runs_eval])
def test_a_training_capture_evaluates_too(name) -> None:
    captured = capture(build(name), GALLERY[name].example(0), loss=GALLERY[name].loss)
    assert captured.runs_eval
    check_eval(captured, name)


@pytest.mark.parametrize("name", GALLERY)
def test_an_eval_capture_evaluates(name) -> None:
    case = GALLERY[name]
    captured = capture(build(name), case.example(0), loss=case.loss, mode=CaptureMode.EVAL)
    check_eval(captured, name)


@pytest.mark.parametrize("granularity", [Granularity.MODULE, Granularity.BLOCK])
@pytest.mark.parametrize("name", GALLERY)
def test_coarser_graphs_give_the_gradients_of_the_untouched_model(name, granularity) -> None:
    case = GALLERY[name]
    fine = capture(build(name), case.example(0), loss=case.loss)
    captured = capture(build(name), case.example(0), loss=case.loss, granularity=granularity)
    assert len(captured.graph) <= len(fine.graph)
    check_training(captured, name, random_stages(captured.graph, 3, random.Random(4)))


@pytest.mark.parametrize("name", GALLERY)
def test_capturing_again_gives_the_same_fingerprint_and_leaves_the_model_alone(name) -> None:
    model, case = build(name).eval(), GALLERY[name]
    before = {n: v.clone() for n, v in model.state_dict().items()}
    torch.manual_seed(3)
    first = capture(model, case.example(0), loss=case.loss)
    drawn = torch.rand(2)
    second = capture(build(name), case.example(0), loss=case.loss)
    assert first.graph.fingerprint == second.graph.fingerprint
    assert first.digest == second.digest
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))
