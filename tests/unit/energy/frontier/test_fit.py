"""Profiles on schedules with other kinds of instructions."""

import pytest

from partita.core.problem import Schedule
from partita.core.program import Kind
from partita.energy.frontier.fit import split_backward, without_energy
from partita.energy.frontier.pipeline import Pipeline
from partita.energy.frontier.savings import frontier_of, pipeline_solution
from partita.testing.builders import small_energy_profile


def test_backward_is_split_in_halves_for_zero_bubble_only() -> None:
    whole = small_energy_profile()
    assert split_backward(whole, Schedule.ONE_F_ONE_B) == (whole, ())
    split, assumed = split_backward(whole, Schedule.ZERO_BUBBLE)
    assert "half of backward each" in assumed[0]
    assert set(split.kind.tolist()) == {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
    assert split.joules.sum() == pytest.approx(whole.joules.sum())
    assert split.seconds.sum() == pytest.approx(whole.seconds.sum())
    assert split_backward(split, Schedule.ZERO_BUBBLE) == (split, ())


def test_the_energy_of_all_max_is_that_of_the_same_work() -> None:
    whole = small_energy_profile()
    split, _ = split_backward(whole, Schedule.ZERO_BUBBLE)
    ways = ((whole, Schedule.ONE_F_ONE_B), (split, Schedule.ZERO_BUBBLE))
    plain, zero = (
        frontier_of(pipeline_solution(made, Pipeline(microbatches=4, schedule=how)), made, points=2)
        for made, how in ways
    )
    assert zero.all_max_j == pytest.approx(plain.all_max_j)


def test_instructions_without_energy_are_named() -> None:
    whole = small_energy_profile()
    zero_bubble = Pipeline(microbatches=4, schedule=Schedule.ZERO_BUBBLE)
    said = without_energy(pipeline_solution(whole, zero_bubble), whole)
    assert said == (
        "backward_input of stage 0 is not in the profile, and counts as waiting",
        "backward_weight of stage 0 is not in the profile, and counts as waiting",
    )
    assert without_energy(pipeline_solution(whole, Pipeline()), whole) == ()
