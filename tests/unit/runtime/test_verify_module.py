"""A run against the untouched module: what the comparison with the captured graph cannot see."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from partita.capture.captured import CaptureMode, Granularity
from partita.capture.origin import Captures, ModelOrigin
from partita.capture.setting import Example
from partita.capture.sources import ModelSource
from partita.catalogue.shorthand import local_cluster
from partita.core.precision import parse_precision
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.planners.table import solve
from partita.runtime.baselines.torch_ways import Subject, make_subject
from partita.runtime.interpreter import RunOptions, interpret
from partita.runtime.numerics import numerics_of
from partita.runtime.rank import RankOptions
from partita.runtime.results import RunResult
from partita.runtime.training.recipe import Recipe
from partita.runtime.verify import verify
from partita.runtime.verify_module import DrawsByOp, OtherDrawsError, verify_module
from partita.runtime.workload import model_workload

OPTIONS = RankOptions(steps=2, recipe=Recipe(optimizer="adam"), seed=5)


class Block(nn.Module):
    """Draws twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.first, self.second = nn.Dropout(0.3), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.down(self.first(self.up(x).relu())))


class Branching(nn.Module):
    """Goes another way for other data, which a captured graph does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out if x.sum() > 0 else 2 * out


class Wide(Block):
    """Takes its data in the type of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class WideBranching(Branching):
    """Likewise."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def example(size: int, turn: int = 0) -> Example:
    sign = -1 if turn % 2 else 1
    values = sign * torch.linspace(0.1, 1, size * 4, dtype=torch.float64).reshape(size, 4)
    return Example(args=(values,), labels=torch.arange(size) % 4, batch_size=size)


def run_of(
    make: type[nn.Module],
    mode: Mode = Mode.TRAINING,
    granularity: Granularity = Granularity.OP,
    precision: str = "fp32",
) -> tuple[Subject, RunResult]:
    """Return what is trained over two devices, and what two steps of it give."""
    torch.manual_seed(3)
    model = nn.Sequential(make(), make()).double()
    policy = parse_precision(precision)
    numerics = numerics_of(policy)
    if numerics.compute is not None:
        model = model.float()

    def captures() -> Captures:
        return Captures(source, origin, lambda: numerics.autocast("cpu"))

    source = ModelSource(name="net", model=model, example=example, loss=nn.functional.cross_entropy)
    origin = ModelOrigin(text="net", mode=CaptureMode(mode.value), granularity=granularity)
    graph = captures().at(2).graph
    ones = np.ones(len(graph))
    graph = replace(graph, costs=(replace(graph.costs[0], forward_s=ones, backward_s=ones),))
    objective = Objective(microbatch_size=2, microbatches=4, mode=mode)
    problem = Problem(graph=graph, cluster=local_cluster(2), objective=objective)
    plan = solve(problem, "uniform").plan
    workload = model_workload(captures(), problem, plan)
    subject = make_subject(problem, plan, captures(), workload)
    recipe = Recipe(optimizer="adam", precision=policy)
    options = RunOptions(steps=OPTIONS.steps, seed=OPTIONS.seed, recipe=recipe)
    code, state, load = subject.task.code, workload.state, workload.load
    return subject, interpret(problem, plan, code, state=state, load=load, options=options)


@pytest.mark.parametrize("granularity", Granularity)
def test_a_model_that_drops_equals_its_untouched_module(granularity: Granularity) -> None:
    subject, found = run_of(Block, granularity=granularity)
    before = {name: tensor.clone() for name, tensor in subject.source.model.state_dict().items()}
    verdict = verify_module(subject, found, OPTIONS)
    assert not isinstance(verdict, str), verdict
    assert verdict.is_equal, verdict.line()
    assert verdict.count("gradient") == 8
    assert "equal the untouched module" in verdict.line()
    assert verdict.to_json()["against"] == "the untouched module"
    after = subject.source.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16", "bf16-master", "fp16"])
def test_under_a_policy_the_untouched_module_runs_under_it_too(precision: str) -> None:
    subject, found = run_of(Wide, precision=precision)
    recipe = Recipe(optimizer="adam", precision=parse_precision(precision))
    verdict = verify_module(subject, found, replace(OPTIONS, recipe=recipe))
    assert not isinstance(verdict, str), verdict
    assert verdict.is_equal, verdict.line()
    subject, found = run_of(WideBranching, precision=precision)
    verdict = verify_module(subject, found, replace(OPTIONS, recipe=recipe))
    assert not isinstance(verdict, str)
    assert not verdict.is_equal


def test_a_graph_that_holds_for_its_example_alone_is_found_out() -> None:
    subject, found = run_of(Branching)
    assert verify(subject.task, subject.workload, found, OPTIONS).is_equal
    verdict = verify_module(subject, found, OPTIONS)
    assert not isinstance(verdict, str)
    assert not verdict.is_equal
    assert "DIFFER from the untouched module" in verdict.line()


def test_weight_stashing_is_not_compared_and_says_why() -> None:
    subject, found = run_of(Branching)
    plan = replace(subject.task.plan, schedule=Schedule.PIPEDREAM)
    task = type(subject.task)(subject.task.problem, plan, subject.task.program, subject.task.code)
    assert "weight stashing" in str(verify_module(replace(subject, task=task), found, OPTIONS))


def test_another_number_of_draws_is_said() -> None:
    x = torch.ones(8)
    words = "draws random numbers 1 times in a microbatch, its graph 2 times"
    with pytest.raises(OtherDrawsError, match=words), DrawsByOp((3, 4), lambda op: op):
        nn.functional.dropout(x)


def test_draws_are_seeded_by_the_op_that_each_belongs_to() -> None:
    def drawn(seed: int, times: int = 1) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.rand(3, generator=generator) for _ in range(times)]

    with torch.random.fork_rng(devices=[]), DrawsByOp((7, 7, 2), lambda op: 10 * op):
        found = [torch.rand(3) for _ in range(3)]
    assert torch.equal(torch.stack(found), torch.stack([*drawn(70, 2), *drawn(20)]))
