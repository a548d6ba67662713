"""One function over many inputs: the same results in their order, and errors where they belong."""

import os
from functools import partial
from operator import mul
from typing import Any

import pytest

import partita
from partita.core.codec import write_json
from partita.errors import InvalidInputError, WorkerError
from partita.units import parse_tokens
from partita.workers import check_workers, open_workers


def test_results_come_in_the_order_of_the_inputs_from_several_processes() -> None:
    with open_workers("2") as workers:
        assert list(workers.map(partial(mul, 3), iter(range(20)))) == [3 * n for n in range(20)]
        assert next(iter(workers.map(_pid, [0]))) != os.getpid()


def _pid(_: int) -> int:
    return os.getpid()


def test_an_error_is_raised_where_the_result_would_be_and_workers_go_on() -> None:
    read = partial(parse_tokens, what="--tokens")
    with open_workers("1") as workers:
        found = workers.map(read, ["1k", "wrong", "2k"])
        assert next(found) == 1000
        with pytest.raises(InvalidInputError, match="wrong"):
            next(found)
        assert list(workers.map(read, ["3k"])) == [3000]


def test_a_worker_that_dies_is_told() -> None:
    with (
        open_workers("1") as workers,
        pytest.raises(WorkerError, match=r"worker.*7"),
    ):
        list(workers.map(os._exit, [7]))


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "", "ray2", "2000"])
def test_what_names_no_workers_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"expected 1.*1024"):
        check_workers(text)


def test_a_study_of_a_fleet_is_the_same_bit_for_bit_on_workers() -> None:
    def play(workers: int) -> Any:
        return partita.simulate_fleet(
            *("generated:jobs=25",),
            cluster="2x8xv100",
            policy="fifo:fair,srtf:tune",
            loads=4,
            seeds="0,1",
            power_model="v100",
            power_cap=3.0,
            record=True,
            workers=workers,
        )

    here, there = play(1), play(2)
    assert len(here.runs) == 4
    assert there.to_json() == here.to_json()
    assert [write_json(run.history) for run in there.runs] == [
        write_json(run.history) for run in here.runs
    ]


def test_doubts_about_a_plan_are_the_same_on_workers() -> None:
    def doubt(workers: int) -> Any:
        return partita.robustness(
            *("gpt-small",), cluster="2xa100", planner="uniform", samples=6, replans=2,
            workers=workers,
        )  # fmt: skip

    assert doubt(2).to_json() == doubt(1).to_json()


def test_a_recommendation_is_the_same_on_workers() -> None:
    def recommend(workers: int) -> Any:
        return partita.recommend(
            "llama3-8b", target="20k", most_devices=32, machines="dgx-a100,dgx-h100",
            workers=workers,
        )  # fmt: skip

    assert recommend(2).to_json() == recommend(1).to_json()
