"""Frontiers of plans, clocks from elsewhere, and what is saved with and without stragglers."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from partita.core.energy import EnergyProfile, Frontier
from partita.core.problem import Schedule
from partita.core.program import Kind
from partita.energy.frontier.pipeline import Pipeline
from partita.energy.frontier.savings import (
    claimed_frontier,
    frontier_figures,
    frontier_of,
    model_of,
    pipeline_solution,
    planned_clocks,
    played,
    savings,
    sources_of,
    waiting_w,
    with_point_at,
)
from partita.errors import InvalidInputError
from partita.formats.perseus import read_clock_plan, read_energy_csv, write_clock_plan
from partita.testing.builders import small_frontier

CLOCKS = (1400.0, 1000.0, 700.0)
PLAIN = (Kind.FORWARD, Kind.BACKWARD)
FOUR = Pipeline(microbatches=4)


def profile(*, throttle: float) -> EnergyProfile:
    """Return stages that get slower; above a clock the time rises again, and power stays."""
    rows = [(s, k, c) for s in range(3) for k in PLAIN for c in CLOCKS]
    seconds, joules = [], []
    for stage, kind, clock in rows:
        kept = min(clock, throttle)
        slower = 1 + 0.02 * (clock > throttle)
        time_s = (1 + 0.1 * stage + 0.2 * int(kind)) * (0.3 + 0.7 * 1400 / kept) * slower
        seconds.append(time_s)
        joules.append(time_s * (80 + 200 * (kept / 1400) ** 2.5))
    return EnergyProfile(
        stage=np.array([s for s, _, _ in rows]),
        kind=np.array([int(k) for _, k, _ in rows]),
        clock_mhz=np.array([c for _, _, c in rows]),
        seconds=np.array(seconds),
        joules=np.array(joules),
        blocking_w={"": 80.0},
    )


@cache
def frontier(pipeline: Pipeline = FOUR, *, throttle: float = 1400.0) -> Frontier:
    made = profile(throttle=throttle)
    solution = pipeline_solution(made, pipeline)
    return frontier_of(solution, made, points=6)


@pytest.mark.parametrize(
    "pipeline",
    [
        FOUR,
        Pipeline(microbatches=6, schedule=Schedule.GPIPE, replicas=2),
        Pipeline(microbatches=4, tensor_parallel=2),
    ],
    ids=["1f1b", "gpipe x 2", "tensor-parallel"],
)
def test_every_point_played_again_is_what_it_claims(pipeline: Pipeline) -> None:
    found = frontier(pipeline)
    model = model_of(*sources_of(found))
    for point in range(len(found)):
        again = played(model, found.clocks(point))
        assert again.time_s == pytest.approx(float(found.time_s[point]), rel=1e-12)
        assert again.energy_j == pytest.approx(float(found.energy_j[point]), rel=1e-12)


def test_a_point_between_two_others_is_solved_for_and_played_again() -> None:
    found = frontier()
    between = float(found.time_s[1:3].mean())
    more = with_point_at(found, between)
    assert len(more) == len(found) + 1
    point = int(np.searchsorted(more.time_s, between * (1 + 1e-9))) - 1
    again = played(model_of(*sources_of(more)), more.clocks(point))
    assert again.time_s == pytest.approx(float(more.time_s[point]), rel=1e-12)
    assert again.energy_j == pytest.approx(float(more.energy_j[point]), rel=1e-12)
    assert bool((np.diff(more.energy_j) < 0).all())
    for time_s in (float(found.time_s[1]), 0.0, 1e9):
        assert with_point_at(found, time_s) is found
    assert with_point_at(small_frontier(), 4.0).time_s.tolist() == [3.0, 5.4]


def test_no_clock_at_all_is_all_max_and_a_zero_keeps_the_clock_before() -> None:
    found = frontier()
    model = model_of(*sources_of(found))
    clocks = np.zeros(len(model.program))
    top = played(model, clocks)
    assert (top.time_s, top.energy_j) == pytest.approx((found.all_max_s, found.all_max_j))
    first = int(np.flatnonzero(np.isin(model.program.kind, PLAIN))[0])
    clocks[first] = 700.0
    low = played(model, clocks)
    own = low.timeline.clock_mhz[model.program.device == model.program.device[first]]
    assert set(own[~np.isnan(own)]) == {700.0}
    assert 0 < low.waiting_j < low.energy_j


def test_a_clock_that_was_not_profiled_is_refused_with_the_nearest() -> None:
    model = model_of(*sources_of(frontier()))
    with pytest.raises(InvalidInputError, match=r"1234 MHz;.*1400 MHz"):
        played(model, np.full(len(model.program), 1234.0))


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])
@pytest.mark.parametrize("named", [True, False])
def test_a_written_clock_plan_is_played_as_the_point_it_came_from(
    named: bool, schedule: Schedule
) -> None:
    found = frontier(Pipeline(microbatches=4, schedule=schedule))
    model = model_of(*sources_of(found))
    text = write_clock_plan(model.program, found.clocks(2), named=named, comment="a\nb")
    clocks = planned_clocks(model.program, read_clock_plan(text))
    assert played(model, clocks).time_s == pytest.approx(float(found.time_s[2]), rel=1e-12)


def test_lists_by_stage_hold_for_all_devices_of_the_stage() -> None:
    gpipe = Pipeline(microbatches=4, replicas=2, tensor_parallel=2, schedule=Schedule.GPIPE)
    found = frontier(gpipe)
    model = model_of(*sources_of(found))
    per_stage = [[("forward", 1000)] * 2 + [("backward", 700)] * 2 for _ in range(3)]
    clocks = planned_clocks(model.program, per_stage)
    assert set(clocks[model.program.kind == Kind.FORWARD]) == {1000.0}
    assert set(clocks[model.program.kind == Kind.BACKWARD]) == {700.0}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ([[("forward", 700)]], "has 1 lists; expected one for each of 3 devices or 3 stages"),
        ([[("forward", 700)]] * 3, "has 1 entries for gpu0, which has 4 such instructions"),
        ([[("backward", 700), ("forward", 700)] * 4] * 3, "does 'forward' there"),
    ],
)
def test_a_clock_plan_for_another_step_says_where_it_differs(
    plan: list[list[tuple[str, int]]], words: str
) -> None:
    model = model_of(*sources_of(frontier()))
    with pytest.raises(InvalidInputError, match=words):
        planned_clocks(model.program, plan)


def test_savings_without_a_straggler_slow_nobody_down() -> None:
    found = frontier()
    gain = savings(found, pipelines=3)
    assert gain.time_s <= found.all_max_s * (1 + 1e-9)
    assert gain.saving == pytest.approx(1 - found.energy_j[gain.point] / found.all_max_j)
    assert gain.all_max_j == pytest.approx(3 * found.all_max_j)


def test_savings_with_a_straggler_by_hand() -> None:
    found = replace(small_frontier(), fastest_s=3.0)
    gain = savings(found, straggler=1.5, pipelines=4, waiting=80.0)
    # T' = 4.5 s: the slow point (5.4 s) is too slow; the others wait at the fast one.
    assert gain.point == 0
    assert gain.all_max_j == pytest.approx(900 * 1.5 + 3 * (900 + 80 * 1.5))
    assert gain.energy_j == pytest.approx(gain.all_max_j)
    late = savings(found, straggler=2.0, pipelines=4, waiting=80.0)
    assert late.point == 1
    assert late.energy_j == pytest.approx(900 * 2 + 3 * (810 + 80 * 0.6))
    assert late.to_json()["saving"] == pytest.approx(late.saving)


def test_stragglers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="expected 1 or more"):
        savings(small_frontier(), straggler=0.5)
    with pytest.raises(InvalidInputError, match="needs other pipelines"):
        savings(small_frontier(), straggler=1.5)
    with pytest.raises(InvalidInputError, match=r"does.*carry"):
        waiting_w(small_frontier())


def test_throttling_clocks_give_points_that_beat_all_max() -> None:
    assert frontier().better_than_all_max == ()
    found = frontier(throttle=1000.0)
    better = found.better_than_all_max
    assert better[0] == 0
    assert found.time_s[0] < found.all_max_s
    assert frontier_figures(found)["better_than_all_max"] == list(better)
    # One point uses the whole time of all-max.
    gain = savings(found)
    assert gain.time_s == pytest.approx(found.all_max_s, rel=1e-2)


def test_claimed_points_are_sorted_and_sifted() -> None:
    base = frontier()
    times, joules = np.array([3.0, 1.0, 2.0, 2.5]), np.array([5.0, 9.0, 7.0, 8.0])
    found = claimed_frontier(times, joules, base)
    assert found.time_s.tolist() == [1.0, 2.0, 3.0]
    assert found.energy_j.tolist() == [9.0, 7.0, 5.0]
    assert (found.best_s, found.all_max_j) == (3.0, base.all_max_j)


def test_the_published_straggler_saving_is_reached(shared_data: Path) -> None:
    # Perseus, figure 7: Bloom 176B on A100, 16 pipelines of 96 microbatches, straggler 1.2: 29.9 %.
    path = shared_data / "perseus" / "stage_profile" / "bloom+a100_sxm_bf16.csv"
    made = read_energy_csv(path.read_text(encoding="utf-8"), blocking_w={"": 83.64})
    solution = pipeline_solution(made, Pipeline(microbatches=96))
    found = frontier_of(solution, made, points=2, stragglers=(1.2,))
    assert savings(found, straggler=1.2, pipelines=16).saving > 0.299
