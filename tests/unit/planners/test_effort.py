"""Limits of a search, its record, and rounds of annealing."""

import math
from typing import NamedTuple

import pytest

from partita.errors import InvalidInputError
from partita.planners import effort as efforts
from partita.planners.annealing import anneal_rounds
from partita.planners.effort import Effort, SearchTrace


class State(NamedTuple):
    """A state that is its value."""

    value: float


def test_a_trace_keeps_new_bests_alone_and_tells_of_them():
    told = []
    trace = SearchTrace(on_record=lambda seconds, value: told.append((seconds, value)))
    for value in (5.0, 7.0, 5.0, 4.0):
        trace.record(value)
    assert [value for _, value in trace.points] == [5.0, 4.0]
    assert told == trace.points
    seconds = [time for time, _ in trace.points]
    assert seconds == sorted(seconds)


def test_steps_and_seconds_are_limits_and_either_ends_a_search():
    counted = Effort(iterations=3)
    assert (counted.is_counted, counted.text, counted.used()) == (True, "iterations 3", 0.0)
    assert [counted.spend(2), counted.is_over(), counted.spend(2), counted.is_over()] == [
        2,
        False,
        1,
        True,
    ]
    assert counted.left_s == math.inf
    timed = Effort(time_limit=0.0)
    assert timed.is_over()
    assert timed.timed_out
    assert (timed.left_s, timed.text) == (0.0, "time_limit 0 s")
    assert Effort().text == "no limit"
    assert not Effort().is_over()


def test_seconds_in_which_kernels_are_compiled_are_not_those_of_a_search(monkeypatch):
    compiling_s = 0.0
    monkeypatch.setattr(efforts, "compiling_s", lambda: compiling_s)
    timed = Effort(time_limit=50.0)
    assert not timed.is_over()
    compiling_s = -60.0  # as if 60 seconds of work had gone by
    assert timed.is_over()
    timed = Effort(time_limit=50.0)
    compiling_s = 1e6
    assert not timed.is_over()


def test_a_goal_ends_a_search_and_the_trace_is_told():
    trace = SearchTrace()
    effort = Effort(goal=2.0, trace=trace)
    assert [effort.is_enough(3.0), effort.is_enough(2.0)] == [False, True]
    assert [value for _, value in trace.points] == [3.0, 2.0]
    assert effort.within().goal == 0.0


def test_steps_to_plan_with():
    assert Effort(iterations=7).steps(5) == 7
    assert Effort().steps(5) == 5
    assert Effort(time_limit=1.0).steps(5) > 10**9


@pytest.mark.parametrize(
    "limits", [{"iterations": -1}, {"time_limit": -0.5}, {"time_limit": math.nan}]
)
def test_limits_below_nothing_are_refused(limits):
    with pytest.raises(InvalidInputError, match="expected 0 or more"):
        Effort(**limits)


def test_rounds_keep_the_best_and_stop_at_the_goal():
    values = {0: 5.0, 1: 3.0, 2: 4.0, 3: 1.0, 4: 0.5}
    seen = []

    def run(number: int, best: State) -> State:
        seen.append((number, best.value))
        return State(values[number])

    assert anneal_rounds(State(6.0), run, Effort(goal=1.0)).value == 1.0
    assert seen == [(0, 6.0), (1, 5.0), (2, 3.0), (3, 3.0)]
    assert anneal_rounds(State(6.0), run, Effort(), rounds=2).value == 3.0
    assert anneal_rounds(State(6.0), run, Effort(time_limit=0.0)).value == 6.0
    assert anneal_rounds(State(6.0), run, Effort(time_limit=0.0), sure=1).value == 5.0
