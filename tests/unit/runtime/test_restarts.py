"""Attempts of a run: their budget, what was lost, and one record of all steps."""

import math

import pytest

from partita.errors import InvalidInputError, WorkerError
from partita.runtime.rank import StepNews
from partita.runtime.restarts import Attempts, LossRecord, RestartLimit, Survival


class Run:
    """A run by a clock of its own, whose checkpoints are told."""

    def __init__(self, restarts: int, stop: str = "") -> None:
        self.now_s, self.saved = 0.0, 0
        self.said: list[str] = []
        self.pauses: list[float] = []
        survival = Survival(
            limit=RestartLimit(restarts=restarts, pause_s=2.0, longest_pause_s=5.0),
            stop=lambda: stop,
            say=self.said.append,
        )
        self.attempts = Attempts(
            survival, lambda: self.saved, clock=lambda: self.now_s, sleep=self.pauses.append
        )

    def fail(self) -> None:
        self.attempts.fail(WorkerError("rank 1 was killed\n  rank 0 waits"))


def test_only_restarts_without_a_new_checkpoint_count() -> None:
    run = Run(restarts=2)
    for saved in range(10, 100, 10):
        run.saved = saved
        run.fail()
    assert run.attempts.number == 9
    run.fail()
    with pytest.raises(WorkerError, match=r"2 restarts.*90"):
        run.fail()


def test_each_restart_in_vain_waits_twice_as_long_up_to_a_limit() -> None:
    run = Run(restarts=5)
    for _ in range(5):
        run.fail()
    assert run.pauses == [0.0, 2.0, 4.0, 5.0, 5.0]


def test_without_a_budget_the_error_is_as_it_was() -> None:
    with pytest.raises(WorkerError) as error:
        Run(restarts=0).fail()
    assert str(error.value) == "rank 1 was killed\n  rank 0 waits"


def test_a_run_that_was_to_stop_is_not_started_again() -> None:
    with pytest.raises(WorkerError, match="rank 1 was killed"):
        Run(restarts=5, stop="SIGTERM").fail()


def test_what_was_lost_is_told_and_measured_until_it_is_done_again() -> None:
    run = Run(restarts=1)
    for step in range(13):
        run.attempts.note(0, StepNews(step, 1.0))
    run.saved, run.now_s = 10, 100.0
    run.fail()
    assert run.said == ["rank 1 was killed; 3 steps done again from step 10 (restart 1)"]
    assert math.isnan(run.attempts.incidents[0].seconds)
    for step in (10, 11, 12):
        run.now_s += 2.0
        run.attempts.note(0, StepNews(step, 1.0))
    (incident,) = run.attempts.incidents
    assert incident.seconds == 6.0
    assert incident.to_json()["step"] == 13


def test_the_record_has_every_step_once_by_the_last_attempt() -> None:
    record = LossRecord()
    for rank in range(4):
        record.note(0, rank, StepNews(5, 1.0))
    for rank in range(3):  # of another plan
        record.note(1, rank, StepNews(5, 2.0))
    record.note(0, 3, StepNews(5, 1.0))  # heard late
    assert record.losses() == {5: 6.0}
    assert record.steps_done == 6


def test_a_budget_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"restarts.*-1"):
        RestartLimit(restarts=-1)
    with pytest.raises(InvalidInputError, match=r"restart.*90"):
        RestartLimit(pause_s=90.0)
