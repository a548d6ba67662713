"""Job files: what they mean, and errors with their lines."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_builders import curve

from partita.core.codec import encode, write_json
from partita.core.fleet import SensitivityOrigin
from partita.errors import FormatError, InvalidInputError
from partita.fleet.live.jobfile import JobFile, read_gpus, read_job
from partita.fleet.live.jobspec import GpuChoice, Progress, core_job, read_spec
from partita.yaml_nodes import Scalar

WHOLE = """\
name: resnet50
command: python train.py --lr 0.1 --name "two words"
folder: work
gpus: 4 to 8 a100 or 8 v100
steps: 20000
sensitivity:
  iteration: 250ms
  restart: 20s
  points:
    - {cpus: 1, memory: 20GB, speed: 0.4}
    - {cpus: 3, memory: 20GB, speed: 1}
checkpoint: checkpoints/resnet50
environment: {NCCL_DEBUG: INFO}
priority: 2
tenant: vision
deadline: 480min
retries: 5
grace: 1min
"""


def read(text: str, folder: Path = Path("/jobs"), **rest):
    return read_job(text, folder / "job.yaml", **rest)


def test_a_whole_file() -> None:
    spec = read(WHOLE)
    assert spec.command == ("python", "train.py", "--lr", "0.1", "--name", "two words")
    assert spec.folder == Path("/jobs/work")
    assert spec.checkpoint == Path("/jobs/checkpoints/resnet50")
    assert [str(choice) for choice in spec.gpus] == ["4 to 8 a100", "8 v100"]
    assert (spec.steps, spec.priority, spec.tenant) == (20000, 2.0, "vision")
    assert (spec.deadline_s, spec.retries, spec.grace_s) == (28800.0, 5, 60.0)
    assert spec.environment == {"NCCL_DEBUG": "INFO"}
    assert spec.sensitivity.iteration_s == 0.25
    assert spec.sensitivity.speed.tolist() == [0.4, 1.0]
    assert spec.sensitivity.restart_s == 20.0


def test_a_job_survives_being_written_as_json() -> None:
    spec = read(WHOLE)
    again = read_spec(json.loads(json.dumps(spec.to_json())))
    assert again.to_json() == spec.to_json()


def test_the_least_that_a_file_must_say() -> None:
    spec = read("command: [./train, --fast]\nsteps: 5\n")
    assert (spec.name, spec.command) == ("job", ("./train", "--fast"))
    assert spec.gpus == (GpuChoice(least=1, most=1),)
    assert spec.progress is Progress.LEASE
    assert spec.checkpoint is None
    assert spec.sensitivity.origin is SensitivityOrigin.MODELLED


def test_wanted_cpus_and_memory_are_shared_by_the_gpus() -> None:
    spec = read("command: x\nsteps: 5\ngpus: 4\ncpus: 24\nmemory: 64GB\niteration: 0.5\n")
    assert spec.sensitivity.cpus.tolist() == [6.0]
    assert spec.sensitivity.memory_bytes.tolist() == [16e9]
    assert spec.sensitivity.iteration_s == 0.5


def test_a_sensitivity_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(write_json(curve((1, 0.5), (2, 1.0))))
    spec = read("command: x\nsteps: 5\nsensitivity: s.json\n", tmp_path)
    assert np.array_equal(spec.sensitivity.speed, [0.5, 1.0])


def test_auto_asks_for_a_profile() -> None:
    asked: list[JobFile] = []

    def profile(job: JobFile):
        asked.append(job)
        return curve((1, 1.0))

    read("command: python t.py -x\nsteps: 5\ngpus: 2\nsensitivity: auto\n", profile=profile)
    assert (asked[0].command, asked[0].gpus) == (("python", "t.py", "-x"), 2)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("steps: 5\n", 1, "the key command is missing"),
        ("command: x\n", 1, "the key steps is missing"),
        ("command: x\nsteps: 5\ngpsu: 4\n", 3, "did you mean 'gpus'"),
        ("command: x\nsteps: 0\n", 2, "whole number from 1"),
        ("command: x\nsteps: 5\ngpus: many\n", 3, "such as '4 to 8 a100 or 8 v100'"),
        ("command: x\nsteps: 5\ngpus: 8 to 4\n", 3, "the fewest first"),
        ("command: x\nsteps: 5\ngpus: 0\n", 3, "expected 1 or more"),
        ("command: 'x\"'\nsteps: 5\n", 1, "cannot be split"),
        ("command: ''\nsteps: 5\n", 1, "a program and its arguments"),
        ("command: x\nsteps: 5\nprogress: maybe\n", 3, "lease or none"),
        ("command: x\nsteps: 5\ndeadline: soon\n", 3, "deadline"),
        ("command: x\nsteps: 5\nsensitivity: gone.json\n", 3, "cannot be read"),
        ("command: x\nsteps: 5\nsensitivity: auto\n", 3, "nobody profiles"),
        ("command: x\nsteps: 5\ncpus: 4\nsensitivity: a.json\n", 3, "part of the sensitivity"),
        ("command: x\nsteps: 5\nsensitivity:\n  points: []\n", 4, "iteration is missing"),
        (
            "command: x\nsteps: 5\nsensitivity:\n  iteration: 1\n  points:\n    - {cpus: 1}\n",
            6,
            "cpus and speed",
        ),
        ("command: x\nsteps: 5\nsensitivity:\n  iteration: 1\n  points: []\n", 4, "one point"),
        ("command: x\nsteps: 5\nenvironment: {A=B: c}\n", 3, "no name of a variable"),
        ("command: x\nsteps: 5\nretries: -1\n", 3, "whole number"),
    ],
)
def test_errors_know_their_line(text: str, line: int, words: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(text)
    assert str(caught.value).startswith(f"/jobs/job.yaml:{line}: ")
    assert words in str(caught.value)


def test_a_document_of_another_kind_is_no_sensitivity(tmp_path: Path) -> None:
    document = {**encode(curve((1, 1.0))), "format": "partita.trace"}
    (tmp_path / "s.json").write_text(json.dumps(document))
    with pytest.raises(FormatError, match=r"job.yaml:3: sensitivity .*s.json"):
        read("command: x\nsteps: 5\nsensitivity: s.json\n", tmp_path)


choices = st.builds(
    lambda least, more, kind: GpuChoice(least=least, most=least + more, type=kind),
    st.integers(1, 64),
    st.integers(0, 64),
    st.sampled_from(["", "a100", "v100", "rtx-3090"]),
)


@given(st.lists(choices, min_size=1, max_size=4))
def test_gpus_are_read_as_they_are_written(wanted: list[GpuChoice]) -> None:
    text = " or ".join(str(choice) for choice in wanted)
    assert read_gpus(Scalar(1, text, plain=True)) == tuple(wanted)


@pytest.mark.parametrize(
    ("gpus", "there", "expected"),
    [
        ("4 to 8 a100 or 8 v100", {"a100": 8}, (8, 4, 8, ("a100",))),
        ("4 to 8 a100 or 8 v100", {"a100": 8, "v100": 8}, (8, 8, 8, ("a100", "v100"))),
        ("4 to 8 a100 or 8 v100", {"a100": 4, "v100": 4}, (8, 4, 8, ("a100",))),
        ("9 a100 or 8 v100", {"a100": 4, "v100": 4}, (9, 9, 9, ("a100",))),
        ("2 a100 or 8 v100", {"a100": 8, "v100": 8}, (2, 2, 2, ("a100",))),
        ("2 to 6", {"a100": 8}, (6, 2, 6, ())),
        ("4 a100", {"": 8}, (4, 4, 4, ())),
    ],
)
def test_choices_as_policies_see_them(gpus: str, there: dict[str, int], expected: tuple) -> None:
    spec = read(f"command: x\nsteps: 5\ngpus: {gpus}\n")
    job = core_job(spec, 1, 0.0, there)
    assert (job.gpus, job.min_gpus, job.max_gpus, job.gpu_types) == expected


def test_a_type_that_is_not_there_is_refused() -> None:
    spec = read("command: x\nsteps: 5\ngpus: 2 h100\n")
    with pytest.raises(InvalidInputError, match=r"2 h100 GPUs;.*a100"):
        core_job(spec, 1, 0.0, {"a100": 8})
