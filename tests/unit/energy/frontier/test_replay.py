"""Recorded logs against the simulator."""

import math

import numpy as np
import pytest

from partita.core.program import Kind
from partita.energy.frontier.frontier import EnergyModel
from partita.energy.frontier.pipeline import Pipeline, pipeline_model
from partita.energy.frontier.replay import RankLog, replay_log
from partita.errors import InvalidInputError
from partita.formats.perseus import Logged
from partita.testing.builders import small_energy_profile

READINGS = (np.array([0.0, 100.0]), np.array([0.0, 3000.0]))


def model() -> EnergyModel:
    return pipeline_model(small_energy_profile(), Pipeline(microbatches=2))


def log(steps: int, clock: float = 1400.0) -> list[Logged]:
    """Return steps of F B F B, each instruction as long as the profile says."""
    slow = 1.0 if clock == 1400 else 1.8
    found, now = [], 10.0
    for _ in range(2 * steps):
        for kind, took in ((Kind.FORWARD, 1.0), (Kind.BACKWARD, 2.0)):
            found.append(Logged(kind, now, now + took * slow, clock))
            now += took * slow
    return found


def test_a_log_of_what_the_profile_says_is_what_is_simulated() -> None:
    for clock in (1400.0, 700.0):
        steps = replay_log(model(), [RankLog(log(2, clock), READINGS)])
        assert len(steps) == 2
        for step in steps:
            assert step.time_s == pytest.approx(step.measured_s)
            assert step.measured_j == pytest.approx(30.0 * step.measured_s)
            assert step.to_json()["measured_j"] == step.measured_j


def test_energy_without_a_counter_for_the_whole_step_is_unknown() -> None:
    short = (np.array([0.0, 12.0]), np.array([0.0, 1.0]))
    for readings in (None, short):
        (step,) = replay_log(model(), [RankLog(log(1), readings)])
        assert math.isnan(step.measured_j)
        assert step.to_json()["measured_j"] is None


def test_logs_that_are_not_of_the_plan_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"2 ranks,.*1 devices"):
        replay_log(model(), [RankLog(log(1), None)] * 2)
    with pytest.raises(InvalidInputError, match="logged 3 instructions; gpu0 has 4"):
        replay_log(model(), [RankLog(log(1)[:3], None)])
    with pytest.raises(InvalidInputError, match=r"where.*another"):
        replay_log(model(), [RankLog(log(1)[::-1], None)])
    unknown = [one._replace(clock_mhz=math.nan) for one in log(1)]
    with pytest.raises(InvalidInputError, match="'clock'"):
        replay_log(model(), [RankLog(unknown, None)])
