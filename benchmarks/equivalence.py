"""What four processes compute by a plan equals what one process computes without one.

Fourteen models at small scale by eight kinds of plan, in float64: losses, outputs and gradients of
the executor against the interpreter of the same Program, and against the untouched model under
plain autograd on the same microbatches. float32 is printed, compared with plain autograd.

Then what has a rule of its own: dropout (against the interpreter, seeded op by op), tied weights on
two stages, uneven shares, microbatches of different sizes, weight stashing (against a plain replay
with delayed weights), state that replicas divide (weights after three steps against plain gradient
descent), and the six execution modes, which must agree to the bit.

Eight models are divided by tensor-parallel groups, alone and with pipelines, replicas,
recomputation, zero bubbles and sharding, in two steps of float64.

Two models are trained for 20 steps by a script's recipe (groups, clipping, schedule): in float64
against plain torch, under bf16-master and fp16 with a scaler against one process under that policy.

One pool of four processes serves all cells but those of groups, which have one of eight.
Differences of gradients are relative to the larger of the gradient's norm and 1e-6 of the largest
norm.
"""

import copy
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from _harness import run_benchmark
from _recipes import show_recipes
from capture import example_of, without_dropout
from torch import Tensor, nn

from partita.capture.capture import capture
from partita.capture.captured import CapturedModel, CaptureMode
from partita.capture.setting import Example, LossFunction, example_inputs
from partita.capture.tree import tensors_of
from partita.core.cluster import Cluster, Device, Level
from partita.core.graph import Graph
from partita.core.plan import Plan, Shard, Stage, pipeline_stages
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.cost.proof import check
from partita.models.huggingface import (
    TINY_CONFIGURATIONS,
    build_hugging_face,
    hugging_face_inputs,
    hugging_face_loss,
)
from partita.models.spec import Batch
from partita.models.zoo import MODELS, build_model, loss_of
from partita.models.zoo import example_inputs as zoo_inputs
from partita.planners.pipeline import cut_layers, legal_boundaries
from partita.planners.table import get_planner
from partita.program.lower import lower
from partita.program.order import ListOrder
from partita.ranks.member import Member
from partita.ranks.pool import RankPool
from partita.ranks.status import StatusBoard
from partita.runtime.executor import put_together
from partita.runtime.interpreter import RunOptions, interpret
from partita.runtime.process_transport import used_devices
from partita.runtime.rank import RankOptions, RankReport, run_rank
from partita.runtime.results import RunResult, StepResult
from partita.runtime.task import Task
from partita.runtime.training.recipe import Recipe
from partita.runtime.workload import SizedStages, Workload
from partita.testing.networks import gradient_error

RANKS, SAMPLES, SCALE, TOKENS = 4, 2, 0.02, 8
LIMIT = 1e-9
LEARNING_RATE = 0.01
STALL_S = 120.0
_ROUGH_NORMS = ("llama", "tiny-qwen2")
"""Models that normalise in float32 whatever their type: sums of four parts in another order than
one process has them differ by that type's rounding."""

ZOO = {
    "bert": "bert-base-uncased",
    "gpt": "gpt3-small",
    "t5": "t5-small",
    "bloom": "bloom-560m",
    "wide-resnet": "wide-resnet50_2",
    "inception_v3": "inception_v3",
    "gnmt": "gnmt",
    "transformer": "transformer",
    "vgg": "vgg16",
    "densenet": "densenet121",
    "minkvgg": "minkvgg",
    "graph-mlp": "graph-mlp",
}
TRANSFORMERS = {"llama": "tiny-llama", "mixtral": "tiny-mixtral"}
DIVIDED = {
    "gpt": 0.05,
    "bert": 0.05,
    "t5": 0.07,
    "bloom": 0.05,
    "llama": 1.0,
    "tiny-qwen2": 1.0,
    "tiny-gpt2": 1.0,
    "tiny-vit": 1.0,
}
"""Models that tensor-parallel groups divide, at scales with an even number of heads."""


@dataclass(frozen=True)
class Subject:
    """How a model is built in a type, what data it gets for a number of samples, and its loss."""

    build: Callable[[torch.dtype], nn.Module]
    batch: Callable[[nn.Module, int, int], Batch]
    loss: LossFunction


def subject_of(name: str, scale: float = SCALE) -> Subject:
    """Return one of the fourteen models, or a tiny transformer by its own name.

    In float64 experts are computed one by one: torch's grouped product does not know that type.
    """
    if name not in ZOO:
        configuration = TINY_CONFIGURATIONS[TRANSFORMERS.get(name, name)]
        experts = {"experts_implementation": "eager"} if name == "mixtral" else {}
        return Subject(
            build=lambda dtype: build_hugging_face({**configuration, **experts}, dtype=dtype),
            batch=lambda model, size, seed: hugging_face_inputs(
                model, size, sequence_length=TOKENS, seed=seed
            ),
            loss=hugging_face_loss,
        )
    zoo, spec = ZOO[name], MODELS[ZOO[name]]
    length = {"sequence_length": TOKENS} if spec.sequence_length else {}
    return Subject(
        build=lambda dtype: build_model(zoo, scale=scale, dtype=dtype),
        batch=lambda _, size, seed: zoo_inputs(zoo, size, scale=scale, seed=seed, **length),
        loss=loss_of(zoo),
    )


@dataclass(frozen=True)
class Setup:
    """A model with its data: captured, and as it is."""

    name: str
    dtype: torch.dtype
    dropout: bool = False
    scale: float = SCALE

    @cached_property
    def subject(self) -> Subject:
        """How it is built."""
        return subject_of(self.name, self.scale)

    @cached_property
    def model(self) -> nn.Module:
        """The untouched model."""
        built = self.subject.build(self.dtype)
        return built if self.dropout else without_dropout(built)

    def example(self, microbatch: int, size: int = SAMPLES) -> Example:
        """Return the data of a microbatch; every one has its own."""
        return example_of(self.subject.batch(self.model, size, 100 + microbatch), self.dtype)

    def captured(self, mode: CaptureMode, size: int = SAMPLES) -> CapturedModel:
        """Return it captured at a size of microbatch, once."""
        key = (mode, size)
        if key not in self._captures:
            self._captures[key] = capture(
                self.model,
                self.example(0, size),
                loss=self.subject.loss,
                mode=mode,
                name=self.name,
            )
        return self._captures[key]

    @cached_property
    def _captures(self) -> dict[tuple[CaptureMode, int], CapturedModel]:
        return {}

    @cached_property
    def state(self) -> Mapping[str, Tensor]:
        """The first weights and buffers."""
        held = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {name: tensor.detach().clone() for name, tensor in held.items()}


@dataclass(frozen=True)
class Cell:
    """A plan for a model, ready to be run."""

    name: str
    setup: Setup
    problem: Problem
    plan: Plan
    task: Task
    workload: Workload
    captured: CapturedModel
    blocking: bool = False
    steps: int = 1

    @property
    def trains(self) -> bool:
        """Whether it trains."""
        return self.task.is_training

    @property
    def examples(self) -> list[Example]:
        """The data of each microbatch."""
        sizes = self.plan.microbatch_sizes.tolist()
        return [self.setup.example(turn, size) for turn, size in enumerate(sizes)]


def make_cell(
    name: str,
    setup: Setup,
    make_plan: Callable[[Graph], Plan],
    *,
    order: ListOrder = ListOrder.DEVICE,
    blocking: bool = False,
    steps: int = 1,
) -> Cell:
    """Return a plan for a model with all that runs it; its Program is proved."""
    captured = setup.captured(CaptureMode.TRAINING)
    plan = make_plan(captured.graph)
    infers = plan.schedule is Schedule.INFERENCE
    if infers and not captured.runs_eval:
        captured = setup.captured(CaptureMode.EVAL)
        plan = make_plan(captured.graph)
    sizes = plan.microbatch_sizes.tolist()
    problem = Problem(
        graph=captured.graph,
        cluster=processes(max(RANKS, len(plan.devices))),
        objective=Objective(
            mode=Mode.INFERENCE if infers else Mode.TRAINING,
            microbatches=len(sizes),
            microbatch_size=sizes[0],
        ),
    )
    program = lower(problem, plan, order=order)
    check(problem, plan, program)
    by_size = {size: setup.captured(captured.mode, size) for size in dict.fromkeys(sizes)}
    inputs = [
        example_inputs(setup.model, setup.example(turn, size)) for turn, size in enumerate(sizes)
    ]
    workload = Workload(
        code=SizedStages({size: found.stages(plan) for size, found in by_size.items()}, sizes),
        state={name: setup.state[name] for name in captured.graph.parameters.names},
        load=lambda _, turn, key: inputs[turn][key],
        shape_of=lambda tensor, turn: _shape(by_size[sizes[turn]], tensor),
    )
    task = Task(problem, plan, program, workload.code)
    return Cell(name, setup, problem, plan, task, workload, captured, blocking, steps)


def _shape(captured: CapturedModel, tensor: int) -> tuple[tuple[int, ...], torch.dtype]:
    info = captured.values[tensor]
    return tuple(info.shape), info.dtype


# Plans.


def processes(count: int) -> Cluster:
    """Return a cluster of some devices on one host."""
    level = Level(name="host", group_of=np.zeros(count), bandwidth_bytes_per_s=1e9)
    devices = [Device(name=f"d{number}", memory_bytes=1e11) for number in range(count)]
    return Cluster(devices=devices, levels=(level,))


def staged(
    graph: Graph,
    parts: Sequence[float],
    groups: Sequence[Sequence[int]],
    microbatches: int | Sequence[int],
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    **others: object,
) -> Plan:
    """Return a pipeline whose stages end at these parts of the ops, near places that allow it."""
    wanted = [0, *(max(1, round(part * len(graph))) for part in parts), len(graph)]
    boundaries = legal_boundaries(graph, wanted)
    if len(boundaries) != len(groups) + 1:
        raise ValueError(f"{graph.name} has no {len(groups)} stages at {list(parts)}")
    sizes = [SAMPLES] * microbatches if isinstance(microbatches, int) else list(microbatches)
    return Plan(
        fingerprint=graph.fingerprint,
        devices=processes(RANKS).device_names,
        stage_of=cut_layers(graph, boundaries),
        stages=pipeline_stages(groups),
        schedule=schedule,
        microbatch_sizes=np.array(sizes),
        **others,
    )


def placed(graph: Graph) -> Plan:
    """Return a random placement over three devices."""
    ones = dataclasses.replace(
        graph.costs[0], forward_s=np.ones(len(graph)), backward_s=np.ones(len(graph))
    )
    problem = Problem(
        graph=dataclasses.replace(graph, costs=(ones,)),
        cluster=processes(3),
        objective=Objective(microbatches=2, microbatch_size=SAMPLES),
    )
    plan = get_planner("random", seed=3)(problem).plan
    return dataclasses.replace(plan, fingerprint=graph.fingerprint)


def recomputing(graph: Graph) -> Plan:
    """Return a pipeline that recomputes early."""
    plan = staged(graph, (0.3, 0.7), [[0], [1], [2]], 4, Schedule.EARLY_RECOMPUTE)
    return dataclasses.replace(plan, recompute=np.ones(len(graph), dtype=bool))


def recomputing_in_part(graph: Graph) -> Plan:
    """Return an uneven pipeline of which every other op, about, runs again in backward."""
    plan = staged(graph, (0.1, 0.4, 0.6), [[0], [1], [2], [3]], 4)
    again = np.random.default_rng(7).random(len(graph)) < 0.5
    return dataclasses.replace(plan, recompute=again)


QUARTERS = (0.25, 0.5, 0.75)
PLANS: Mapping[str, Callable[[Graph], Plan]] = {
    "DAG over 3": placed,
    "uneven over 4": lambda g: staged(g, (0.1, 0.4, 0.6), [[0], [1], [2], [3]], 4),
    "replicated 3-1": lambda g: staged(g, (0.7,), [[0, 1, 2], [3]], 3),
    "interleaved": lambda g: staged(g, QUARTERS, [[0], [1], [0], [1]], 4, Schedule.INTERLEAVED),
    "zero-bubble": lambda g: staged(g, QUARTERS, [[0], [1], [2], [3]], 4, Schedule.ZERO_BUBBLE),
    "recompute": recomputing,
    "some again": recomputing_in_part,
    "inference": lambda g: staged(g, (0.2, 0.6), [[0], [1], [2]], 3, Schedule.INFERENCE),
}


def sharded(
    graph: Graph,
    shard: Shard,
    groups: Sequence[Sequence[int]] = ((0, 1), (2, 3)),
    *,
    shard_group: int = 0,
    parts: Sequence[float] = (0.5,),
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    recompute: bool = False,
) -> Plan:
    """Return a pipeline whose replicas divide their state; two pipelines of two stages if not said.

    Args:
        graph: The model.
        shard: What is divided.
        groups: The devices of each stage; those of several replicas divide.
        shard_group: How many replicas hold a whole together; 0 = all.
        parts: Where stages end, in parts of the ops.
        schedule: Order of the microbatches.
        recompute: Whether stages recompute.
    """
    plan = staged(graph, parts, groups, 4, schedule)
    stages = tuple(
        dataclasses.replace(stage, shard=shard, shard_group=shard_group)
        if stage.num_replicas > 1
        else stage
        for stage in plan.stages
    )
    again = np.full(len(graph), recompute)
    return dataclasses.replace(plan, stages=stages, recompute=again)


FOUR = ((0, 1, 2, 3),)
SHARDED: Mapping[str, Callable[[Graph], Plan]] = {
    **{
        f"shard-{shard.value} dp2 x pp2": partial(sharded, shard=shard)
        for shard in (Shard.OPTIMIZER, Shard.GRADIENTS, Shard.PARAMETERS)
    },
    "shard-gradients 2-1-1 uneven, recomputed": lambda g: sharded(
        g, Shard.GRADIENTS, ((0, 1), (2,), (3,)), parts=(0.2, 0.7), recompute=True
    ),
    "shard-parameters 2-1-1 recomputed early": lambda g: sharded(
        g,
        Shard.PARAMETERS,
        ((0, 1), (2,), (3,)),
        parts=(0.2, 0.7),
        schedule=Schedule.EARLY_RECOMPUTE,
        recompute=True,
    ),
    "shard-parameters interleaved": lambda g: sharded(
        g,
        Shard.PARAMETERS,
        ((0, 1), (2, 3), (0, 1), (2, 3)),
        parts=QUARTERS,
        schedule=Schedule.INTERLEAVED,
    ),
    "shard-parameters zero-bubble": lambda g: sharded(
        g, Shard.PARAMETERS, schedule=Schedule.ZERO_BUBBLE
    ),
    "shard-gradients dp4 by 2": lambda g: sharded(
        g, Shard.GRADIENTS, FOUR, parts=(), shard_group=2
    ),
    "shard-parameters dp4 by 2": lambda g: sharded(
        g, Shard.PARAMETERS, FOUR, parts=(), shard_group=2
    ),
    "shard-parameters layers dp4": lambda g: sharded(g, Shard.PARAMETERS, FOUR * 4, parts=QUARTERS),
}
"""Plans whose replicas divide their state, over four devices."""
SHARDED_MODELS = ("gpt", "bert", "t5", "bloom", "llama")


def uneven_shares(graph: Graph) -> Plan:
    """Return a pipeline whose first stage deals two of three microbatches to one replica."""
    plan = staged(graph, (0.6,), [[0, 1], [2]], 6)
    first = dataclasses.replace(plan.stages[0], shares=(2, 1))
    return dataclasses.replace(plan, stages=(first, *plan.stages[1:]))


def divided(
    graph: Graph,
    parts: Sequence[float],
    groups: Sequence[Sequence[Sequence[int]]],
    shard: Shard = Shard.NONE,
    *,
    sequence: bool = False,
    **others: object,
) -> Plan:
    """Return a pipeline whose stages are divided by tensor-parallel groups, a replica each."""
    plan = staged(graph, parts, [[0]] * len(groups), 4)
    devices = 1 + max(device for stage in groups for group in stage for device in group)
    return dataclasses.replace(
        plan,
        devices=processes(devices).device_names,
        stages=tuple(
            Stage(devices=tuple(map(tuple, stage)), shard=shard, sequence_parallel=sequence)
            for stage in groups
        ),
        **others,
    )


PAIRS = ([[0, 1]], [[2, 3]])
TENSOR_PLANS: Mapping[str, Callable[[Graph], Plan]] = {
    "tp2": lambda g: divided(g, (), PAIRS[:1]),
    "tp2 x pp2": lambda g: divided(g, (0.45,), PAIRS),
    "dp2 x tp2": lambda g: divided(g, (), [[[0, 1], [2, 3]]]),
    "dp2 x pp2 x tp2": lambda g: divided(g, (0.55,), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
    "tp4": lambda g: divided(g, (), [[[0, 1, 2, 3]]]),
    "recompute": lambda g: divided(g, (0.5,), PAIRS, recompute=np.ones(len(g), dtype=bool)),
    "some again": lambda g: divided(
        g, (0.5,), PAIRS, recompute=np.random.default_rng(7).random(len(g)) < 0.5
    ),
    "sequence tp2 x pp2": lambda g: divided(g, (0.45,), PAIRS, sequence=True),
    "sequence dp2 x tp2, some again": lambda g: divided(
        g,
        (),
        [[[0, 1], [2, 3]]],
        Shard.OPTIMIZER,
        sequence=True,
        recompute=np.random.default_rng(7).random(len(g)) < 0.5,
    ),
    "zero-bubble": lambda g: divided(g, (0.5,), PAIRS, schedule=Schedule.ZERO_BUBBLE),
    "shard optimizer": lambda g: divided(g, (), [[[0, 1], [2, 3]]], Shard.OPTIMIZER),
    "shard parameters": lambda g: divided(g, (), [[[0, 1], [2, 3]]], Shard.PARAMETERS),
}


RECIPE_MODELS = ("gpt", "bert")
_STATE = ("optimizer", "gradients", "parameters")
RECIPE_PLANS: Mapping[str, Callable[[Graph], Plan]] = {
    "uneven over 4": PLANS["uneven over 4"],
    "uneven, some again": recomputing_in_part,
    "dp2 x pp2": lambda g: staged(g, (0.5,), [[0, 1], [2, 3]], 4),
    **{f"shard-{kind} dp2 x pp2": SHARDED[f"shard-{kind} dp2 x pp2"] for kind in _STATE},
}
RECIPE_TENSOR_PLANS = {
    kind: TENSOR_PLANS[kind]
    for kind in ("tp2 x pp2", "dp2 x tp2", "dp2 x pp2 x tp2", "sequence tp2 x pp2")
}


# References.


def _weights(cell: Cell) -> list[float]:
    return [size / cell.plan.samples for size in cell.plan.microbatch_sizes.tolist()]


def plain_step(cell: Cell) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and gradients of the untouched model, by plain autograd."""
    model, loss = copy.deepcopy(cell.setup.model), cell.setup.subject.loss
    model.load_state_dict(cell.setup.state, strict=False)
    losses = []
    for example, weight in zip(cell.examples, _weights(cell), strict=True):
        value = loss(model(*example.args, **example.kwargs), example.labels)
        (value * weight).backward()
        losses.append(float(value.detach()))
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def plain_weights(cell: Cell) -> dict[str, Tensor]:
    """Return the weights of the untouched model after the steps, by plain gradient descent."""
    model, loss = copy.deepcopy(cell.setup.model), cell.setup.subject.loss
    model.load_state_dict(cell.setup.state, strict=False)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for _ in range(cell.steps):
        optimizer.zero_grad()
        for example, weight in zip(cell.examples, _weights(cell), strict=True):
            value = loss(model(*example.args, **example.kwargs), example.labels)
            (value * weight).backward()
        optimizer.step()
    held = set(cell.captured.graph.parameters.names)
    return {n: p.detach() for n, p in model.named_parameters() if n in held}


def plain_outputs(cell: Cell) -> tuple[list[float], list[list[Tensor]]]:
    """Return losses and outputs of the untouched model in eval mode."""
    model, loss = copy.deepcopy(cell.setup.model).eval(), cell.setup.subject.loss
    losses, outputs = [], []
    with torch.no_grad():
        for example in cell.examples:
            made = model(*example.args, **example.kwargs)
            losses.append(float(loss(made, example.labels)))
            outputs.append(tensors_of(made))
    return losses, outputs


def stashed_weights(cell: Cell) -> dict[str, Tensor]:
    """Return the weights after one step of a pipeline that stashes, by a plain replay.

    In a chain of S stages microbatch m sees weights of stage s that are S - s - 1 updates behind.
    """
    model, loss, plan = cell.setup.model, cell.setup.subject.loss, cell.plan
    stages, table = len(plan.stages), cell.captured.graph.parameters
    stage_of = {
        table.names[row]: int(plan.stage_of[op])
        for op, row in zip(table.use_op.tolist(), table.use_parameter.tolist(), strict=True)
    }
    trained = {n: p for n, p in model.named_parameters() if n in stage_of}
    versions = [{n: cell.setup.state[n].clone() for n in trained}]
    for turn, example in enumerate(cell.examples):
        seen = {
            n: versions[max(0, turn - (stages - stage_of[n] - 1))][n].clone().requires_grad_()
            for n in trained
        }
        value = torch.func.functional_call(model, seen, example.args, dict(example.kwargs))
        made = torch.autograd.grad(loss(value, example.labels), list(seen.values()))
        newest = versions[-1]
        versions.append(
            {n: newest[n] - LEARNING_RATE * g for (n, _), g in zip(seen.items(), made, strict=True)}
        )
    return versions[-1]


# Comparison.


def largest_gap(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(found, expected, strict=True))


def tensor_gap(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of tensors, relative to the norm of each."""
    return max(
        float((a - b).double().norm()) / max(float(b.double().norm()), 1e-30)
        for a, b in zip(found, expected, strict=True)
        if b.is_floating_point()
    )


def state_gap(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference of weights, with the floor of gradients.

    A bias that has no gradient is 0 but for rounding, in which replicas differ.
    """
    names = [n for n, value in expected.items() if value.is_floating_point()]
    return gradient_error({n: found[n] for n in names}, {n: expected[n] for n in names})


def against_plain(cell: Cell, step: StepResult) -> float:
    """Return the largest difference to the untouched model."""
    if not cell.trains:
        losses, outputs = plain_outputs(cell)
        made = [
            tensors_of(cell.captured.rebuild_output({n: v[turn] for n, v in step.outputs.items()}))
            for turn in range(cell.plan.num_microbatches)
        ]
        gaps = [tensor_gap(a, b) for a, b in zip(made, outputs, strict=True)]
        return max(largest_gap(step.losses, losses), *gaps)
    losses, gradients = plain_step(cell)
    found = {name: step.gradients[name] for name in gradients}
    return max(largest_gap(step.losses, losses), gradient_error(found, gradients))


def against_interpreter(cell: Cell, result: RunResult) -> float:
    """Return the largest difference to the interpreter: losses, outputs, gradients, weights."""
    expected = interpret(
        cell.problem,
        cell.plan,
        cell.workload.code,
        state=cell.workload.state,
        load=cell.workload.load,
        program=cell.task.program,
        options=RunOptions(
            steps=cell.steps, recipe=Recipe(learning_rate=LEARNING_RATE), blocking=cell.blocking
        ),
    )
    gaps = [0.0]
    for one, other in zip(result.steps, expected.steps, strict=True):
        gaps.append(largest_gap(one.losses, other.losses))
        gaps += [tensor_gap(one.outputs[n], other.outputs[n]) for n in other.outputs]
        if other.gradients:
            gaps.append(gradient_error(one.gradients, other.gradients))
    gaps.append(state_gap(result.state, expected.state))
    return max(gaps)


# Running.


class Pool:
    """Processes, forked once, that can run every cell."""

    def __init__(self, cells: Sequence[Cell], ranks: int = RANKS) -> None:
        self._cells, board = cells, StatusBoard(ranks)

        def main(member: Member, number: int) -> RankReport | None:
            cell = cells[number]
            if member.rank >= len(used_devices(cell.task.program)):
                return None
            options = RankOptions(
                steps=cell.steps,
                recipe=Recipe(learning_rate=LEARNING_RATE),
                blocking=cell.blocking,
                stall_limit_s=STALL_S,
            )
            job = f"cell {number}"
            return run_rank(cell.task, member, cell.workload, options=options, board=board, job=job)

        self._pool = RankPool(ranks, main, limit_s=STALL_S, board=board)

    def run(self, cell: Cell) -> RunResult:
        """Run a cell."""
        answers = self._pool.call(self._cells.index(cell))
        return put_together(cell.task, [a for a in answers if a is not None]).result

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def special_cells() -> Iterator[Cell]:
    """Yield the cells of what has a rule of its own; the six modes last."""
    gpt, bert = Setup("gpt", torch.float64), Setup("bert", torch.float64)
    for name in ("gpt", "bert", "transformer"):
        dropped = Setup(name, torch.float64, dropout=True)
        yield make_cell("dropout", dropped, PLANS["uneven over 4"], steps=2)
    yield make_cell("dropout, recomputed", Setup("gpt", torch.float64, dropout=True), recomputing)
    yield make_cell("tied weights", gpt, PLANS["uneven over 4"], steps=2)
    yield make_cell("tied weights, replicated", gpt, PLANS["replicated 3-1"], steps=2)
    yield make_cell("uneven shares", bert, uneven_shares, steps=2)
    yield make_cell(
        "sizes 2 2 2 1", gpt, lambda g: staged(g, (0.3, 0.6), [[0], [1], [2]], (2, 2, 2, 1))
    )
    yield make_cell(
        "weight stashing",
        Setup("vgg", torch.float64),
        lambda g: staged(g, (0.3, 0.6), [[0], [1], [2]], 6, Schedule.PIPEDREAM),
    )
    for name in SHARDED_MODELS:
        setup = Setup(name, torch.float64)
        for kind, make_plan in SHARDED.items():
            yield make_cell(kind, setup, make_plan, steps=3)
    for model, kind in (("gpt", "interleaved"), ("inception_v3", "DAG over 3")):
        setup = Setup(model, torch.float64)
        for order in ListOrder:
            for blocking in (False, True):
                transfers = "blocking" if blocking else "overlapped"
                yield make_cell(
                    f"{order.value} {transfers}",
                    setup,
                    PLANS[kind],
                    order=order,
                    blocking=blocking,
                )


def show_special(cells: Sequence[Cell], pool: Pool, missed: list[str]) -> float:
    """Run what has a rule of its own; return the largest difference."""
    worst, bits = 0.0, dict[str, StepResult]()
    print(f"\n{'':34} {'model':14} {'interpreter':>11} {'plain':>8}")
    for cell in cells:
        result = pool.run(cell)
        gaps = {"interpreter": against_interpreter(cell, result)}
        if cell.plan.stashes_weights:
            expected = stashed_weights(cell)
            gaps["plain"] = tensor_gap([result.state[n] for n in expected], [*expected.values()])
        elif not cell.setup.dropout:
            gaps["plain"] = against_plain(cell, result.steps[0])
        if cell.name in SHARDED:
            gaps["plain"] = max(gaps["plain"], state_gap(result.state, plain_weights(cell)))
        first = bits.setdefault(cell.setup.name, result.steps[0]) if _is_mode(cell) else None
        if first is not None and not same_bits(first, result.steps[0]):
            missed.append(f"{cell.name} of {cell.setup.name} differs from the first mode's bits")
        shown = f"{gaps['plain']:8.1e}" if "plain" in gaps else f"{'-':>8}"
        print(
            f"{cell.name:34} {cell.setup.name:14} {gaps['interpreter']:11.1e} {shown}", flush=True
        )
        worst = max(worst, *gaps.values())
        missed += [
            f"{cell.name} of {cell.setup.name} differs from {what} by {gap:.1e}"
            for what, gap in gaps.items()
            if not gap <= LIMIT
        ]
    return worst


def _is_mode(cell: Cell) -> bool:
    return cell.name.endswith((" blocking", " overlapped"))


def same_bits(one: StepResult, other: StepResult) -> bool:
    """Return whether two steps gave the same losses and gradients, bit by bit."""
    return one.losses == other.losses and all(
        torch.equal(one.gradients[n], g) for n, g in other.gradients.items()
    )


def show_table(
    cells: Mapping[tuple[str, str], Cell],
    pool: Pool,
    *,
    exact: bool,
    missed: list[str],
    kinds: Iterable[str] = PLANS,
) -> float:
    """Run the models by the plans; return the largest difference."""
    models, worst = dict.fromkeys(name for name, _ in cells), 0.0
    print(f"\n{'float64' if exact else 'float32':14}" + "".join(f"{kind:>17}" for kind in kinds))
    for model in models:
        print(f"{model:14}", end="", flush=True)
        for kind in kinds:
            cell = cells.get((model, kind))
            if cell is None:
                print(f"{'missing':>17}", end="", flush=True)
                continue
            result = pool.run(cell)
            gaps = [against_plain(cell, result.steps[0])]
            if exact:
                gaps.append(against_interpreter(cell, result))
            worst = max(worst, *gaps)
            print(f"{max(gaps):17.1e}", end="", flush=True)
            if exact and not max(gaps) <= LIMIT:
                missed.append(f"{model}, {kind}: differs by {max(gaps):.1e}")
        print(flush=True)
    return worst


def make_cells(dtype: torch.dtype, missed: list[str]) -> dict[tuple[str, str], Cell]:
    """Return the cells of the table; what cannot be made is missed."""
    cells = {}
    for name in sorted({**ZOO, **TRANSFORMERS}):
        setup = Setup(name, dtype)
        for kind, make_plan in PLANS.items():
            try:
                cells[name, kind] = make_cell(kind, setup, make_plan)
            except Exception as exc:  # noqa: BLE001 (what cannot be planned is what is looked for)
                missed.append(f"{name}, {kind}: {type(exc).__name__}: {str(exc)[:160]}")
    return cells


def tensor_cells(missed: list[str]) -> dict[tuple[str, str], Cell]:
    """Return the cells of tensor-parallel groups; what cannot be made is missed."""
    cells = {}
    for name, scale in DIVIDED.items():
        setup = Setup(name, torch.float64, scale=scale)
        for kind, make_plan in TENSOR_PLANS.items():
            if kind == "tp4" and name in _ROUGH_NORMS:
                continue
            try:
                cells[name, kind] = make_cell(kind, setup, make_plan, steps=2)
            except Exception as exc:  # noqa: BLE001 (what cannot be planned is what is looked for)
                missed.append(f"{name}, {kind}: {type(exc).__name__}: {str(exc)[:160]}")
    return cells


def measure() -> tuple[dict, list[str]]:
    """Run every cell."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    missed: list[str] = []
    exact = make_cells(torch.float64, missed)
    rough = make_cells(torch.float32, missed)
    special = list(special_cells())
    print(f"prepared {len(exact) + len(rough) + len(special)} cells", flush=True)
    pool = Pool([*exact.values(), *rough.values(), *special])
    try:
        figures = {
            "models": len({name for name, _ in exact}),
            "cells": len(exact) + len(special),
            "worst_float64": show_table(exact, pool, exact=True, missed=missed),
            "worst_special": show_special(special, pool, missed),
            "worst_float32": show_table(rough, pool, exact=False, missed=missed),
            "seconds": time.perf_counter() - begin,
        }
    finally:
        pool.close()
    divided_cells = tensor_cells(missed)
    pool = Pool([*divided_cells.values()], 2 * RANKS)
    try:
        figures["tensor_cells"] = len(divided_cells)
        figures["worst_tensor"] = show_table(
            divided_cells, pool, exact=True, missed=missed, kinds=tuple(TENSOR_PLANS)
        )
    finally:
        pool.close()
    print("\nrecipes, 20 steps")
    figures["worst_recipe"], narrow = show_recipes(
        {name: partial(_setup, name) for name in RECIPE_MODELS}, RECIPE_PLANS, missed
    )
    worst, more = show_recipes({"gpt": _divided_setup}, RECIPE_TENSOR_PLANS, missed)
    figures["worst_recipe"] = max(worst, figures["worst_recipe"])
    figures |= {f"worst_{policy}": max(gap, more[policy]) for policy, gap in narrow.items()}
    figures["seconds"] = time.perf_counter() - begin
    return figures, missed


def _setup(name: str, dtype: torch.dtype) -> Setup:
    return Setup(name, dtype)


def _divided_setup(dtype: torch.dtype) -> Setup:
    return Setup("gpt", dtype, scale=DIVIDED["gpt"])


if __name__ == "__main__":
    run_benchmark(__doc__ or "", measure)
