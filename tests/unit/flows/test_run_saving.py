"""Which checkpoints a run goes on from, as its options say."""

from pathlib import Path
from typing import Any

import pytest

from partita.capture.origin import ModelOrigin
from partita.core.graph import DeviceKind
from partita.errors import InvalidInputError
from partita.flows.runs.requests import TrainRequest, check_training
from partita.flows.runs.steps import job_of, with_checkpoints
from partita.requests import make
from partita.runtime.checkpoint.files import commit, make_manifest, temporary_path
from partita.runtime.job import Job


def checkpoint(folder: Path, step: int, model: str = "toy") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(folder, step)
    temporary.mkdir()
    return commit(temporary, make_manifest(folder, step, model, {}, {"step": step}))


def job(tmp_path: Path, **options: Any) -> Job:
    request = make(TrainRequest, model="toy", runs=str(tmp_path / "runs"), **options)
    check_training(request)
    plain = job_of(request, ModelOrigin(text="toy"), DeviceKind.CPU, request.steps or 10)
    return with_checkpoints(plain, request, tmp_path / "runs" / "new", "toy")


def test_a_run_saves_in_its_directory_where_it_is_asked_to(tmp_path: Path) -> None:
    assert job(tmp_path).saving() is None
    found = job(tmp_path, save_every=5, keep=3)
    assert (found.save_every, found.keep, found.resume) == (5, 3, None)
    assert found.checkpoints == str(tmp_path / "runs" / "new" / "checkpoints")
    assert job(tmp_path, checkpoints=str(tmp_path / "own")).checkpoints == str(tmp_path / "own")


def test_auto_finds_the_newest_checkpoint_of_the_models_runs(tmp_path: Path) -> None:
    assert job(tmp_path, resume="auto").resume is None
    checkpoint(tmp_path / "runs" / "one" / "checkpoints", 3)
    checkpoint(tmp_path / "runs" / "two" / "checkpoints", 2)
    checkpoint(tmp_path / "runs" / "other" / "checkpoints", 4, model="other")
    assert job(tmp_path, resume="auto").resume == str(tmp_path / "runs" / "two" / "checkpoints")


def test_auto_stays_in_a_folder_that_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path / "runs" / "one" / "checkpoints", 3)
    own = str(tmp_path / "own")
    assert job(tmp_path, resume="auto", checkpoints=own).resume == "auto"


def test_a_checkpoint_that_is_named_must_be_there_and_leave_something_to_do(
    tmp_path: Path,
) -> None:
    path = checkpoint(tmp_path / "own", 10)
    assert job(tmp_path, resume=str(path), steps=11).resume == str(path)
    with pytest.raises(InvalidInputError, match="leaves nothing"):
        job(tmp_path, resume=str(tmp_path / "own"))
    with pytest.raises(InvalidInputError, match=r"there.*checkpoint"):
        job(tmp_path, resume=str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"keep": 3}, "add --save-every"),
        ({"resume": "auto", "check": True}, "leave out --resume"),
        ({"save_every": 2, "emulate": True}, "computes nothing"),
        ({"save_every": 2, "baseline": "ddp"}, "torch's own ways"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        job(tmp_path, **options)
