"""Plans with tensor-parallel stages over forked processes equal one process."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn

from partita.capture.capture import capture
from partita.capture.captured import CapturedModel
from partita.capture.setting import Example, example_inputs
from partita.capture.splits import Split
from partita.core.cluster import Cluster, Device, Level
from partita.core.graph import Graph
from partita.core.plan import Plan, Stage
from partita.core.problem import Objective, Problem
from partita.errors import UnsupportedError
from partita.runtime.dry_run import dry_run
from partita.runtime.executor import check_runnable, make_task, run_forked
from partita.runtime.parts import Slice
from partita.runtime.process_transport import shapes_for
from partita.runtime.rank import RankOptions
from partita.runtime.tensor_parallel import slices_of, tensor_parallel_remarks
from partita.runtime.training.recipe import Recipe
from partita.runtime.verify import verify
from partita.runtime.workload import SizedStages, Workload

HIDDEN, HEADS, WORDS, LENGTH, MICROBATCHES = 16, 4, 40, 4, 4


class Block(nn.Module):
    """A block with dropout where tensors are split and where they are not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.output = nn.Linear(HIDDEN, HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).view(x.shape[0], LENGTH, 3, HEADS, HIDDEN // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        x = x + F.dropout(self.output(mixed.transpose(1, 2).reshape(x.shape)), 0.1)
        result: Tensor = x + self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.3))
        return result


class Model(nn.Module):
    """Two blocks with tied weights at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, words: Tensor) -> Tensor:
        return F.linear(self.blocks(self.words(words)), self.words.weight)


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def example(seed: int) -> Example:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (2, LENGTH + 1), generator=generator)
    return Example(args=(words[:, :-1],), labels=words[:, 1:])


@pytest.fixture(scope="module")
def model() -> CapturedModel:
    torch.manual_seed(0)
    return capture(Model().double(), example(0), loss=loss_of, name="tiny")


def cluster(count: int) -> Cluster:
    level = Level(name="host", group_of=np.zeros(count), bandwidth_bytes_per_s=1e9)
    return Cluster(
        devices=[Device(name=f"d{n}", memory_bytes=1e11) for n in range(count)], levels=(level,)
    )


def plan_of(graph: Graph, groups: Sequence[Sequence[Sequence[int]]], **others: object) -> Plan:
    devices = 1 + max(device for stage in groups for group in stage for device in group)
    return Plan(
        fingerprint=graph.fingerprint,
        devices=cluster(devices).device_names,
        stage_of=np.arange(len(graph)) * len(groups) // len(graph),
        stages=tuple(Stage(devices=tuple(map(tuple, stage)), **others) for stage in groups),
        microbatch_sizes=np.full(MICROBATCHES, 2),
    )


def work(model: CapturedModel, plan: Plan) -> tuple[Problem, Workload]:
    inputs: list[Mapping[str, Tensor]] = [
        example_inputs(model.model, example(turn)) for turn in range(MICROBATCHES)
    ]
    problem = Problem(
        graph=model.graph,
        cluster=cluster(len(plan.devices)),
        objective=Objective(microbatches=MICROBATCHES, microbatch_size=2),
    )
    workload = Workload(
        code=SizedStages({2: model.stages(plan)}, [2] * MICROBATCHES),
        state=model.state(),
        load=lambda _, turn, name: inputs[turn][name],
        shape_of=lambda tensor, _: (tuple(model.values[tensor].shape), model.values[tensor].dtype),
    )
    return problem, workload


PLANS = {
    "tp2 x pp2": [[[0, 1]], [[2, 3]]],
    "dp2 x tp2": [[[0, 1], [2, 3]]],
    "tp2 then 1": [[[1, 0]], [[2]]],
}


@pytest.mark.parametrize("kind", ["tp2 x pp2", "dp2 x tp2"])
@pytest.mark.parametrize("sequence", [False, True])
def test_groups_equal_one_process(model: CapturedModel, kind: str, sequence: bool) -> None:
    plan = plan_of(model.graph, PLANS[kind], sequence_parallel=sequence)
    if sequence:  # and some ops recompute
        plan = replace(plan, recompute=np.arange(len(model.graph)) % 3 > 0)
    problem, workload = work(model, plan)
    task = make_task(problem, plan, workload)
    options = RankOptions(steps=2, seed=5, recipe=Recipe(clip_norm=0.05, learning_rate=0.5))
    run = run_forked(task, workload, options=options)
    verdict = verify(task, workload, run.result, options)
    assert verdict.worst < 1e-9
    assert verdict.count("gradient") == len(model.graph.parameters)


def test_tied_weights_need_one_degree(model: CapturedModel) -> None:
    plan = plan_of(model.graph, PLANS["tp2 then 1"])
    problem, workload = work(model, plan)
    with pytest.raises(ValueError, match="tied over stages"):
        make_task(problem, plan, workload)


def test_a_rank_holds_its_slices(model: CapturedModel) -> None:
    plan = plan_of(model.graph, [[[1, 0]]])
    problem, workload = work(model, plan)
    task = make_task(problem, plan, workload)
    held = slices_of(task, 0)
    assert held["words.weight"] == Slice(0, 1, 2, (WORDS,))
    assert held["blocks.0.qkv.weight"] == Slice(0, 1, 2, (HIDDEN,) * 3)
    assert held["blocks.0.down.weight"] == Slice(1, 1, 2, (2 * HIDDEN,))
    assert "blocks.0.norm.weight" not in held
    (said,) = tensor_parallel_remarks(task)
    assert "5 products split by columns, 4 by rows, 1 tables" in said


def test_between_sequence_parallel_stages_parts_travel(model: CapturedModel) -> None:
    plan = plan_of(model.graph, PLANS["tp2 x pp2"], sequence_parallel=True)
    problem, workload = work(model, plan)
    task = make_task(problem, plan, workload)
    splits = {tensor: workload.code.crossing_split(tensor, 0) for tensor in task.readers}
    crossing = next(tensor for tensor, split in splits.items() if split is not None)
    assert splits[crossing] == Split(1, (LENGTH,))
    assert shapes_for(task, 3, workload.shape_of)(crossing, 0)[0] == (2, LENGTH // 2, HIDDEN)
    assert len(dry_run(task, workload)) == 4
    # Stages that do not divide, or by others, get it whole.
    first = replace(plan.stages[1], sequence_parallel=False)
    mixed = replace(plan, stages=(plan.stages[0], first))
    assert model.stages(mixed).crossing_split(crossing) is None


def test_every_rank_of_many_groups_is_walked(model: CapturedModel) -> None:
    groups = [[[4 * r + t for t in range(4)] for r in range(4)]]
    plan = plan_of(model.graph, groups)
    problem, workload = work(model, plan)
    task = make_task(problem, plan, workload)
    assert len(dry_run(task, workload, ranks=[0, 7])) == 2


def test_context_and_expert_parallel_stages_are_refused(model: CapturedModel) -> None:
    graph = model.graph
    with pytest.raises(UnsupportedError, match="context-parallel degree 2"):
        check_runnable(plan_of(graph, [[[0, 1]]], cp=2))
    with pytest.raises(UnsupportedError, match="expert-parallel degree 2"):
        check_runnable(plan_of(graph, [[[0], [1]]], ep=2))


def test_a_group_that_cannot_divide_the_sequence_is_refused(model: CapturedModel) -> None:
    plan = plan_of(model.graph, [[[0, 1]]], sequence_parallel=True)
    problem, workload = work(model, plan)
    remarks = tensor_parallel_remarks(make_task(problem, plan, workload))
    assert "divided along the sequence" in remarks[-1]
    three = plan_of(model.graph, [[[0, 1, 2]]], sequence_parallel=True)
    with pytest.raises(UnsupportedError, match=r"stage 0 .* 3 ranks"):
        model.stages(three)
