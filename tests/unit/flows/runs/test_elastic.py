"""Devices that come and go, and what becomes of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from partita.core.problem import Metric, Objective, Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError, UnsupportedError, WorkerError
from partita.flows.runs.elastic import Available, DeviceRange, execute_surviving, run_elastic
from partita.flows.runs.execute import Execution, Outcome
from partita.flows.runs.requests import TrainRequest, check_training
from partita.hosts.driver import LostHostError
from partita.requests import make
from partita.runtime.checkpoint.files import MANIFEST, Manifest
from partita.runtime.executor import Run
from partita.runtime.job import Job
from partita.runtime.rank import StepNews
from partita.runtime.results import RunResult
from partita.testing.builders import chain, flat_cluster, pipeline

NAMES = ("d0", "d1", "d2")


def solution(count: int) -> Solution:
    graph, cluster = chain(6), flat_cluster(count)
    problem = Problem(graph=graph, cluster=cluster, objective=Objective())
    plan = pipeline(graph, cluster, list(range(count)), microbatches=2)
    return Solution(problem=problem, plan=plan, metric=Metric.THROUGHPUT, value=1.0, unit="s")


@pytest.mark.parametrize("text", ["2", "a:b", "0:2", "3:2", "2:"])
def test_a_range_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="--elastic"):
        DeviceRange.parse(text)


def test_a_file_says_which_devices_are_there(tmp_path: Path) -> None:
    file = tmp_path / "devices"
    available = Available(NAMES, DeviceRange.parse("2:3"), file)
    assert available.now() == NAMES
    file.write_text("d2\nd0\nother")
    assert available.now() == ("d0", "d2")
    assert available.change(NAMES) == "devices: d1 lost"
    file.write_text("d0")
    assert available.change(NAMES) == ""  # too few to change to
    with pytest.raises(InvalidInputError, match=r"1.*d0, d1, d2"):
        available.now()
    file.write_text("d0 d1 d2")
    assert available.change(("d0", "d2")) == "devices: d1 there"


def test_a_device_on_which_ranks_die_is_given_up_while_enough_are_left() -> None:
    used: list[tuple[str, ...]] = []

    def run_plan(found: Solution, stop: Callable[[], str], number: int) -> Any:
        used.append(found.problem.cluster.device_names)
        error = WorkerError("rank 1 was killed by SIGKILL")
        error.rank = 1
        raise error

    available = Available(NAMES, DeviceRange.parse("2:3"))
    said: list[str] = []
    with pytest.raises(WorkerError, match="rank 1 was killed"):
        run_elastic(
            solution(3),
            available,
            run_plan,
            solution_on,
            say=said.append,
        )
    assert used == [NAMES, ("d0", "d2")]
    assert said[0] == "d1 is given up: rank 1 was killed by SIGKILL"


def solution_on(problem: Problem) -> Solution:
    count = len(problem.cluster)
    plan = pipeline(problem.graph, problem.cluster, list(range(count)), microbatches=2)
    return Solution(problem=problem, plan=plan, metric=Metric.THROUGHPUT, value=1.0, unit="s")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"elastic": "1:2"}, "add --save-every"),
        ({"on_nan": "rollback"}, "add --save-every"),
        ({"available": "file"}, "add --elastic"),
        ({"max_restarts": 2, "emulate": True}, "nothing to go on from"),
        ({"max_restarts": 2, "baseline": "ddp"}, "torch's own way"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        check_training(make(TrainRequest, model="toy", **options))


class Hosts:
    """Runs that lose a host as often as is said, a step further each time."""

    def __init__(self, folder: Path, losses: int, *, saves: bool = True, error: Any = None) -> None:
        self.folder, self.left, self.saves = folder, losses, saves
        self.error = error or LostHostError("host gpu10 (rank 3) went away: exit code 255")
        self.started: list[tuple[str, str | None, bool]] = []

    def __call__(self, _: Solution, way: Execution) -> Any:
        self.started.append((way.directory.name, way.job.resume or None, way.check))
        way.on_step(0, StepNews(step=len(self.started) - 1, loss=float(len(self.started))))
        if self.left:
            self.left -= 1
            if self.saves:
                step = self.folder / "kept" / f"step-{len(self.started):06}"
                step.mkdir(parents=True)
                number = len(self.started)
                made = Manifest(step=number, number=number, saved_s=0.0, model="m", files={})
                (step / MANIFEST).write_text(made.to_text())
            raise self.error
        result = RunResult(steps=(), state={}, statistics={})
        run = Run(result=result, timelines=(), step_s=())
        return Outcome(solution=solution(2), run=run, predicted=None)

    def run(self, restarts: int) -> Any:
        """Carry out a plan on hosts."""
        kept = str(self.folder / "kept") if self.saves else ""
        job = Job(script=("own.py",), steps=9, checkpoints=kept)
        execution = Execution(job=job, directory=self.folder, check=True)
        request = make(TrainRequest, model="m", on="ssh:hosts", max_restarts=restarts)
        return execute_surviving(solution(2), execution, request, self, lambda _: solution(2))


def test_a_lost_host_costs_a_restart_that_goes_on_from_the_newest_checkpoint(
    tmp_path: Path,
) -> None:
    hosts = Hosts(tmp_path, losses=2)
    found = hosts.run(restarts=1)  # each saved something, so that the budget begins anew
    assert hosts.started == [
        (tmp_path.name, None, True),
        ("hosts1", "auto", False),
        ("hosts2", "auto", False),
    ]
    assert found.run.losses == {0: 1.0, 1: 2.0, 2: 3.0}
    assert [incident.resumed for incident in found.run.incidents] == [1, 2]


def test_a_host_that_does_not_come_back_ends_the_run_which_says_how_it_goes_on(
    tmp_path: Path,
) -> None:
    with pytest.raises(LostHostError) as caught:
        Hosts(tmp_path, losses=1).run(restarts=0)
    assert f"step 1 is saved: go on with --resume {tmp_path / 'kept'}" in str(caught.value)
    with pytest.raises(LostHostError) as caught:
        Hosts(tmp_path / "other", losses=1, saves=False).run(restarts=0)
    assert "--save-every saves, and --max-restarts goes on by itself" in str(caught.value)


def test_hosts_that_were_never_there_are_not_waited_for(tmp_path: Path) -> None:
    away = UnsupportedError("no agent can be started on host gpu2: no route")
    hosts = Hosts(tmp_path, losses=9, error=away)
    with pytest.raises(UnsupportedError, match="no route"):
        hosts.run(restarts=3)
    assert len(hosts.started) == 1
