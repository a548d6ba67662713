"""Baselines over forked processes, each against one process on the same microbatches."""

import os
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from partita.capture.captured import CaptureMode
from partita.capture.origin import Captures, ModelOrigin
from partita.capture.setting import Example
from partita.capture.sources import ModelSource, SourceOptions, load_source
from partita.catalogue.shorthand import local_cluster
from partita.core.plan import Stage
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.errors import InvalidInputError, UnsupportedError, WorkerError
from partita.flows.runs.baselines import baseline_plan
from partita.planners.table import solve
from partita.runtime.baselines.names import BASELINES
from partita.runtime.baselines.torch_ways import (
    TORCH_BASELINES,
    Subject,
    baseline_of,
    make_subject,
    run_baseline,
    verify_baseline,
)
from partita.runtime.executor import make_task, run_forked
from partita.runtime.interpreter import RunOptions, interpret
from partita.runtime.rank import RankOptions, StepNews
from partita.runtime.training.recipe import Recipe
from partita.runtime.verify import verify
from partita.runtime.workload import model_workload

pytestmark = pytest.mark.slow

WORDS, WIDTH, LENGTH = 11, 8, 6


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dropout(self.out(attended))


class Gpt(nn.Module):
    """Two blocks; the head is tied to the embedding, so that two stages own one weight."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Cnn(nn.Module):
    """Batch norms, and a tensor that skips the middle of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.Sequential(
            nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        first = self.stem(image)
        both = torch.cat([self.body(first), first], 1)
        return self.head(both.mean((2, 3)))


class Forgetful(nn.Module):
    """Has a trainable parameter that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def words(size: int, turn: int = 0) -> Example:
    tokens = (torch.arange(size * LENGTH) * (turn + 1)).reshape(size, LENGTH) % WORDS
    return Example(args=(tokens,), labels=tokens.roll(-1, 1), batch_size=size)


def images(size: int, turn: int = 0) -> Example:
    values = torch.linspace(-1, 1, size * 48, dtype=torch.float64).mul(turn + 1).sin()
    return Example(
        args=(values.reshape(size, 3, 4, 4),), labels=torch.arange(size) % 5, batch_size=size
    )


def rows(size: int, turn: int = 0) -> Example:
    values = torch.linspace(-1, 1, size * 4, dtype=torch.float64).mul(turn + 1).sin()
    return Example(args=(values.reshape(size, 4),), labels=torch.arange(size) % 4, batch_size=size)


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), labels.flatten())


MODELS = {
    "gpt": (Gpt, words),
    "gpt with dropout": (lambda: Gpt(0.3), words),
    "cnn": (Cnn, images),
    "forgetful": (Forgetful, rows),
}


def source_of(name: str) -> ModelSource:
    make, example = MODELS[name]
    torch.manual_seed(3)
    return ModelSource(name=name, model=make().double(), example=example, loss=loss_of)


def problem_of(
    source: ModelSource, origin: ModelOrigin, *, devices: int = 2, **objective: object
) -> Problem:
    graph = Captures(source, origin).at(2).graph
    costs = replace(
        graph.costs[0],
        forward_s=np.full(len(graph), 1e-3),
        backward_s=np.full(len(graph), 2e-3),
    )
    return Problem(
        graph=replace(graph, costs=(costs,)),
        cluster=local_cluster(devices),
        objective=Objective(microbatch_size=2, **{"microbatches": 4, **objective}),
    )


def subject_of(
    baseline: str, name: str, *, mode: Mode = Mode.TRAINING, **objective: object
) -> Subject:
    source = source_of(name)
    trains = mode is Mode.TRAINING
    origin = ModelOrigin(text=name, mode=CaptureMode.TRAINING if trains else CaptureMode.EVAL)
    problem = problem_of(source, origin, mode=mode, **objective)
    plan = baseline_plan(baseline, problem).plan
    workload = model_workload(Captures(source, origin), problem, plan)
    return make_subject(problem, plan, Captures(source, origin), workload)


OPTIONS = RankOptions(steps=2, recipe=Recipe(optimizer="adam"), seed=5, stall_limit_s=60)


def interpreted(subject: Subject, steps: int):
    task = subject.task
    return interpret(
        task.problem,
        task.plan,
        task.code,
        state=subject.workload.state,
        load=subject.workload.load,
        options=RunOptions(steps=steps, seed=OPTIONS.seed, recipe=Recipe(optimizer="adam")),
    )


@pytest.mark.parametrize("model", ["gpt", "cnn"])
@pytest.mark.parametrize("name", TORCH_BASELINES)
def test_torch_gives_what_the_same_plan_gives_in_one_process(name, model):
    subject = subject_of(name, model)
    news: list[tuple[int, StepNews]] = []
    run = run_baseline(name, subject, options=OPTIONS, on_step=lambda *one: news.append(one))
    verdict = verify(subject.task, subject.workload, run.result, OPTIONS)
    assert verdict.is_equal, verdict.differences[:3]
    assert verdict.count("gradient") == int(subject.task.graph.parameters.trainable.sum())
    assert verdict.count("loss") == 4
    assert verdict.count("output") == 1
    assert verify_baseline(name, subject, run.result, OPTIONS).is_equal
    assert len(run.step_s) == len(run.result.steps) == 2
    assert min(run.step_s) > 0
    assert run.timelines == ()
    for step in range(2):
        told = sum(one.loss for _, one in news if one.step == step)
        assert told == pytest.approx(run.result.steps[step].loss, rel=1e-12)


@pytest.mark.parametrize("model", ["gpt", "cnn"])
@pytest.mark.parametrize("name", TORCH_BASELINES)
def test_weights_and_buffers_at_the_end_are_those_of_one_process(name, model):
    subject = subject_of(name, model)
    found = run_baseline(name, subject, options=OPTIONS).result.state
    wanted = interpreted(subject, OPTIONS.steps).state
    assert set(found) == set(wanted)
    for key, value in wanted.items():
        assert torch.allclose(found[key], value, rtol=1e-9, atol=1e-9), key


@pytest.mark.parametrize("name", TORCH_BASELINES)
def test_random_numbers_do_not_depend_on_the_rank(name):
    subject = subject_of(name, "gpt with dropout")
    run = run_baseline(name, subject, options=OPTIONS)
    assert verify_baseline(name, subject, run.result, OPTIONS).is_equal
    other = replace(OPTIONS, seed=6)
    assert not verify_baseline(name, subject, run.result, other).is_equal


def test_ddp_takes_microbatches_that_do_not_divide():
    subject = subject_of("ddp", "cnn", microbatches=3)
    assert subject.task.plan.stages[0].shares == (2, 1)
    run = run_baseline("ddp", subject, options=OPTIONS)
    assert verify(subject.task, subject.workload, run.result, OPTIONS).is_equal


def test_ddp_takes_a_model_with_an_unused_parameter():
    subject = subject_of("ddp", "forgetful")
    run = run_baseline("ddp", subject, options=OPTIONS)
    assert verify(subject.task, subject.workload, run.result, OPTIONS).is_equal
    assert set(run.result.state) == {"used.weight", "used.bias"}


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_inference_of_the_untouched_model(name):
    subject = subject_of(name, "cnn", mode=Mode.INFERENCE)
    run = run_baseline(name, subject, options=OPTIONS)
    verdict = verify(subject.task, subject.workload, run.result, OPTIONS)
    assert verdict.is_equal, verdict.differences[:3]
    assert run.result.steps[0].gradients == {}


def test_results_are_left_out_if_nobody_wants_them():
    subject = subject_of("torch-1f1b", "cnn")
    run = run_baseline("torch-1f1b", subject, options=replace(OPTIONS, keep_results=False))
    assert run.result.state == {}
    assert run.result.steps[1].gradients == {}
    assert run.result.steps[1].outputs == {}
    assert len(run.result.steps[1].losses) == 4
    assert len(run.step_s) == 2


@pytest.mark.parametrize("name", ["single", "random"])
def test_planned_baselines_run_in_our_executor(name):
    source, origin = source_of("gpt"), ModelOrigin(text="gpt")
    problem = problem_of(source, origin)
    plan = baseline_plan(name, problem, seed=1).plan
    workload = model_workload(Captures(source, origin), problem, plan)
    task = make_task(problem, plan, workload)
    run = run_forked(task, workload, options=OPTIONS)
    assert verify(task, workload, run.result, OPTIONS).is_equal
    assert len(run.timelines) == 2


@pytest.mark.parametrize(("model", "layers"), [("transformer", []), ("gnmt", [0, 1, 0, 1] * 2)])
def test_expert_places_a_model_of_the_zoo_that_runs(model, layers):
    options = SourceOptions(scale=0.02, dtype="float64", batch_size=2, sequence_length=8)
    origin = ModelOrigin(text=model, options=options)
    source = load_source(model, options)
    problem = problem_of(source, origin)
    plan = baseline_plan("expert", problem).plan
    types = problem.graph.ops.types
    recurrent = (
        np.flatnonzero(types.of == types.names.index("lstm")) if layers else np.array([], int)
    )
    assert plan.device_of[recurrent].tolist() == layers
    assert set(plan.device_of.tolist()) == {0, 1}
    workload = model_workload(Captures(source, origin), problem, plan)
    task = make_task(problem, plan, workload)
    run = run_forked(task, workload, options=OPTIONS)
    assert verify(task, workload, run.result, OPTIONS).is_equal


def test_single_takes_a_device():
    problem = problem_of(source_of("gpt"), ModelOrigin(text="gpt"))
    device = problem.cluster.device_names[1]
    assert baseline_plan("single", problem, device=device).plan.devices == (device,)
    with pytest.raises(InvalidInputError, match="only single takes"):
        baseline_plan("ddp", problem, device=device)


def test_the_plan_of_fsdp_divides_the_weights():
    problem = problem_of(source_of("gpt"), ModelOrigin(text="gpt"))
    whole, divided = (baseline_plan(name, problem).plan for name in ("ddp", "fsdp"))
    assert whole.stages[0].shard.value == "none"
    assert divided.stages[0].shard.value == "parameters"


@pytest.mark.parametrize(
    ("name", "objective", "message"),
    [
        ("ddp", {"microbatches": 1}, "ddp gives every device a microbatch; 1 are too few for 2"),
        ("fsdp", {"microbatches": 3}, "3 microbatches do not divide by 2"),
        ("expert", {}, "expert places models with an encoder and a decoder"),
        ("gpipe", {}, "no baseline 'gpipe'; there are single"),
    ],
)
def test_what_a_baseline_cannot_plan_is_refused(name, objective, message):
    problem = problem_of(source_of("gpt"), ModelOrigin(text="gpt"), **objective)
    with pytest.raises(InvalidInputError, match=message):
        baseline_plan(name, problem)


def refused(name: str, subject: Subject, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        run_baseline(name, subject, options=OPTIONS)


def replanned(subject: Subject, plan) -> Subject:
    workload = model_workload(subject.captures, subject.task.problem, plan)
    return make_subject(subject.task.problem, plan, subject.captures, workload)


def test_torch_1f1b_refuses_what_its_schedule_cannot_do():
    subject = subject_of("torch-1f1b", "cnn")
    problem, plan = subject.task.problem, subject.task.plan
    few = replace(problem, objective=replace(problem.objective, microbatches=1))
    one = solve(few, "uniform").plan
    workload = model_workload(subject.captures, few, one)
    short = make_subject(few, one, subject.captures, workload)
    refused("torch-1f1b", short, "there are 1 for 2 stages")
    replicas = replanned(subject, solve(problem, "uniform", stages=1, replicas=2).plan)
    refused("torch-1f1b", replicas, "runs each stage on one rank")
    scattered = replanned(subject, solve(problem, "random", seed=1).plan)
    refused("torch-1f1b", scattered, "stages on 2 devices")
    uneven = replanned(subject, replace(plan, microbatch_sizes=np.array([3, 2, 2, 1])))
    refused("torch-1f1b", uneven, "they have 1 to 3 samples")
    again = replanned(subject, replace(plan, recompute=np.ones(len(plan.recompute), dtype=bool)))
    refused("torch-1f1b", again, "no recomputation")
    stashed = replanned(subject, replace(plan, schedule=Schedule.PIPEDREAM))
    refused("torch-1f1b", stashed, "no weight stashing")


def test_torch_1f1b_refuses_inference():
    subject = subject_of("torch-1f1b", "cnn", mode=Mode.INFERENCE)
    refused("torch-1f1b", subject, "torch-1f1b trains")


def test_ddp_and_fsdp_refuse_stages():
    subject = subject_of("torch-1f1b", "cnn")
    refused("ddp", subject, "ddp runs the whole model on every rank; this plan has 2 stages")
    shares = (Stage(devices=((0,), (1,)), shares=(3, 1)),)
    plan = replace(subject_of("ddp", "cnn").task.plan, stages=shares)
    refused("fsdp", replanned(subject, plan), "they have 3, 1")


def test_a_baseline_that_torch_does_not_have_is_refused():
    with pytest.raises(InvalidInputError, match=r"'expert'.*ddp"):
        baseline_of("expert")
    assert set(TORCH_BASELINES) < set(BASELINES)


@pytest.mark.parametrize("name", TORCH_BASELINES)
def test_a_rank_that_dies_is_named_with_the_step(name):
    subject = subject_of(name, "gpt")

    def load(step: int, microbatch: int, tensor: str) -> Tensor:
        if step == 1 and microbatch == 2:
            os._exit(3)
        return subject.workload.load(step, microbatch, tensor)

    broken = replace(subject, workload=replace(subject.workload, load=load))
    with pytest.raises(
        WorkerError, match=r"exit code 3 in step 1\n(.|\n)*rank 0 has been in step 1 for"
    ):
        run_baseline(name, broken, options=OPTIONS)


def test_a_rank_that_stands_still_in_a_step_is_ended_by_the_stall_limit():
    subject = subject_of("ddp", "gpt")

    def load(step: int, microbatch: int, tensor: str) -> Tensor:
        if step == 1 and microbatch == 2:
            time.sleep(600)
        return subject.workload.load(step, microbatch, tensor)

    broken = replace(subject, workload=replace(subject.workload, load=load))
    with pytest.raises(
        WorkerError, match=r"exit code 5 in step 1\n(.|\n)*rank 0 has been in step 1"
    ):
        run_baseline("ddp", broken, options=replace(OPTIONS, stall_limit_s=2.0))


@pytest.mark.parametrize("name", TORCH_BASELINES)
def test_an_error_of_ours_inside_of_torch_stays_ours(name):
    subject = subject_of(name, "gpt")

    def load(step: int, microbatch: int, tensor: str) -> Tensor:
        if step == 1:
            raise InvalidInputError("the data ended")
        return subject.workload.load(step, microbatch, tensor)

    broken = replace(subject, workload=replace(subject.workload, load=load))
    with pytest.raises(InvalidInputError, match=r"the data ended$"):
        run_baseline(name, broken, options=OPTIONS)
