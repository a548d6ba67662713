"""Devices that come and go, and what becomes of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from partita.core.problem import Metric, Objective, Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError, WorkerError
from partita.flows.elastic import Available, DeviceRange, run_elastic
from partita.flows.run_requests import TrainRequest, check_training
from partita.requests import make
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
    with pytest.raises(InvalidInputError, match="1 of the devices d0, d1, d2 can be used"):
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
