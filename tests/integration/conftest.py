"""The command line called in this process, and job directories of a small model."""

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from _browser import browser_or_skip

from partita.capture.origin import Captures, ModelOrigin
from partita.capture.sources import SourceOptions, load_source
from partita.cli.main import main
from partita.core.graph import Graph
from partita.core.problem import Metric, Objective, Problem
from partita.core.solution import Solution
from partita.errors import UnsupportedError
from partita.runtime.job import Job, JobDirectory
from partita.testing.builders import host_cluster, pipeline
from partita.testing.ray import PrivateRay, private_ray, why_no_ray
from partita.testing.slurm import PrivateSlurm, private_slurm, why_no_slurm

MODEL = ModelOrigin(
    text="gpt3-small",
    options=SourceOptions(batch_size=2, sequence_length=8, scale=0.05, dtype="float64"),
)

MakeJob = Callable[..., JobDirectory]


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Call the command line in an empty folder; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def give_stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | Path], None]:
    """Return what lets standard input be the bytes of a file, which can be read once."""

    def give(path: str | Path) -> None:
        stdin = io.TextIOWrapper(io.BytesIO(Path(path).read_bytes()), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stdin)

    return give


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateSlurm]:
    """A private Slurm with nodes n1 to n4 in two racks, for all tests of this process."""
    if reason := why_no_slurm():
        pytest.skip(reason)
    racks = {"rack0": ("n1", "n2"), "rack1": ("n3", "n4")}
    with private_slurm(tmp_path_factory.mktemp("slurm"), racks=racks) as running:
        yield running


@pytest.fixture(scope="session")
def ray() -> Iterator[PrivateRay]:
    """A private Ray with nodes r1, which has the head, and r2, for all tests of this process."""
    if reason := why_no_ray():
        pytest.skip(reason)
    with ExitStack() as stack:
        try:
            running = stack.enter_context(private_ray())
        except UnsupportedError as exc:  # a machine that is too busy for Ray's own time limits
            pytest.skip(f"ray did not start here: {exc}")
        yield running


@pytest.fixture(scope="session")
def small_graph() -> Graph:
    return Captures(load_source(MODEL.text, MODEL.options), MODEL).at(2).graph


@pytest.fixture(scope="session")
def make_job(small_graph: Graph) -> MakeJob:
    """Return what writes a job: a pipeline of a small GPT over two hosts of two devices."""

    def make(path: Path, groups: Sequence[int | Sequence[int]], **settings: object) -> JobDirectory:
        cluster = host_cluster(2, 2, inside_bytes_per_s=1e9, between_bytes_per_s=1e8)
        problem = Problem(graph=small_graph, cluster=cluster, objective=Objective())
        plan = pipeline(small_graph, cluster, groups, microbatches=4)
        solution = Solution(
            problem=problem, plan=plan, metric=Metric.THROUGHPUT, value=1.0, unit="s"
        )
        files = JobDirectory(path)
        files.create(solution, Job(**{"model": MODEL, "start_limit_s": 60.0, **settings}))
        return files

    return make


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a browser for the tests of a module.

    What drives it runs an event loop: other tests of the process could not run theirs.
    """
    with browser_or_skip() as found:
        yield found
