"""Runs that save and go on: by other plans, other numbers of ranks, and from where they stopped."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from partita.capture.origin import Captures, ModelOrigin
from partita.capture.setting import Example
from partita.capture.sources import ModelSource
from partita.core.problem import Objective, Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError
from partita.planners.table import get_planner
from partita.runtime.checkpoint.files import list_checkpoints, newest_step, read_manifest
from partita.runtime.executor import make_task, run_forked
from partita.runtime.job import Job, read_job, write_job
from partita.runtime.rank import RankOptions
from partita.runtime.task import Task
from partita.runtime.training.recipe import Recipe, Schedule
from partita.runtime.training.saving import Saving
from partita.runtime.workload import Workload, model_workload
from partita.testing.builders import flat_cluster

OPTIONS = RankOptions(
    steps=4,
    recipe=Recipe(optimizer="adam", schedule=Schedule(name="cosine", warmup=1, steps=8)),
    keep_results=False,
    stall_limit_s=60,
)


@cache
def prepared(stages: int, replicas: int, tp: int = 1) -> tuple[Task, Workload]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 4)).double()

    def example(size: int, turn: int = 0) -> Example:
        generator = torch.Generator().manual_seed(turn)
        inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        labels = torch.randint(4, (size,), generator=generator)
        return Example(args=(inputs,), labels=labels, batch_size=size)

    source = ModelSource(name="toy", model=model, example=example, loss=nn.functional.cross_entropy)
    captures = Captures(source, ModelOrigin(text="toy"))
    problem = Problem(
        graph=captures.at(2).graph,
        cluster=flat_cluster(stages * replicas * tp),
        objective=Objective(microbatches=4, microbatch_size=2),
    )
    found: Solution = get_planner("uniform", stages=stages, replicas=replicas, tp=tp)(problem)
    workload = model_workload(captures, problem, found.plan)
    return make_task(problem, found.plan, workload), workload


def losses(
    stages: int, replicas: int, saving: Saving | None, *, tp: int = 1, steps: int = 4
) -> list[float | None]:
    task, workload = prepared(stages, replicas, tp)
    run = run_forked(task, workload, options=replace(OPTIONS, steps=steps, saving=saving))
    return [step.loss for step in run.result.steps]


@pytest.fixture(scope="module")
def reference() -> list[float | None]:
    return losses(1, 1, None)


@pytest.mark.parametrize(
    ("before", "after"), [((2, 1), (1, 2)), ((1, 1), (2, 1)), ((1, 2), (1, 1))]
)
def test_a_run_goes_on_under_another_plan(
    tmp_path: Path,
    reference: list[float | None],
    before: tuple[int, int],
    after: tuple[int, int],
) -> None:
    first = losses(*before, Saving(folder=str(tmp_path), every=2), steps=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000002"]
    second = losses(*after, Saving(folder=str(tmp_path), resume="auto"))
    assert [*first, *second] == pytest.approx(reference, rel=1e-9)


@pytest.mark.parametrize(
    ("before", "after"), [((1, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 2), (1, 3))]
)
def test_slices_of_tensor_parallel_ranks_are_saved_and_read(
    tmp_path: Path,
    reference: list[float | None],
    before: tuple[int, int],
    after: tuple[int, int],
) -> None:
    saving = Saving(folder=str(tmp_path), every=2)
    first = losses(before[0], 1, saving, tp=before[1], steps=2)
    second = losses(after[0], 1, replace(saving, resume="auto"), tp=after[1])
    assert [*first, *second] == pytest.approx(reference, rel=1e-9)


def test_a_run_that_ended_goes_on_and_saves_its_end(
    tmp_path: Path, reference: list[float | None]
) -> None:
    saving = Saving(folder=str(tmp_path), every=3, resume="auto")
    first = losses(2, 1, saving, steps=2)
    assert newest_step(tmp_path) == 2  # its end, though not a third step
    assert [*first, *losses(2, 1, saving)] == reference
    extra = read_manifest(tmp_path / "step-000003").extra
    assert extra["schedule"] == {"step": 3}
    assert extra["data"]["step"] == 3
    assert losses(2, 1, saving) == []  # nothing is left to do


def test_the_folder_of_another_run_is_gone_on_from(
    tmp_path: Path, reference: list[float | None]
) -> None:
    losses(1, 1, Saving(folder=str(tmp_path / "one"), every=1), steps=1)
    named = Saving(folder=str(tmp_path / "two"), every=1, resume=str(tmp_path / "one"))
    found = losses(1, 1, named, steps=3)
    assert found == reference[1:3]
    assert named.again() == replace(named, resume="auto", otherwise=str(tmp_path / "one"))
    assert losses(1, 1, named.again()) == reference[3:]


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    saving = Saving(folder=str(tmp_path), resume=str(tmp_path / "none"))
    with pytest.raises(InvalidInputError, match="is no checkpoint"):
        losses(1, 1, saving)


def test_a_job_says_when_it_saves(tmp_path: Path) -> None:
    model = ModelOrigin(text="toy")
    job = Job(model=model, checkpoints=str(tmp_path), save_every=5, keep=3, resume="auto")
    assert read_job(write_job(job)) == job
    assert job.rank_options().saving == Saving(folder=str(tmp_path), every=5, keep=3, resume="auto")
    assert Job(model=model).rank_options().saving is None
    with pytest.raises(InvalidInputError, match="needs a folder"):
        Job(model=model, save_every=5)
    with pytest.raises(InvalidInputError, match="keep is 0"):
        Job(model=model, checkpoints=str(tmp_path), keep=0)
