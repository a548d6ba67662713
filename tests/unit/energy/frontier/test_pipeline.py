"""Profiles without a model: every schedule, replicas, shared clocks, fixed loading times."""

import dataclasses

import numpy as np
import pytest

from partita.core.energy import EnergyProfile
from partita.core.problem import Schedule
from partita.core.program import Kind
from partita.energy.frontier.clock_plan import ClockPlan, clock_plan
from partita.energy.frontier.frontier import solve_frontier
from partita.energy.frontier.pipeline import Pipeline, pipeline_model
from partita.errors import InvalidInputError

CLOCKS = (1400.0, 1000.0, 700.0)


def profile(stages: int, kinds: tuple[Kind, ...]) -> EnergyProfile:
    rows = [(s, k, c) for s in range(stages) for k in kinds for c in CLOCKS]
    seconds = [(1 + 0.1 * s + 0.2 * int(k)) * (0.3 + 0.7 * 1400 / c) for s, k, c in rows]
    joules = [
        t * (80 + 200 * (c / 1400) ** 2.5) for t, (_, _, c) in zip(seconds, rows, strict=True)
    ]
    return EnergyProfile(
        stage=np.array([s for s, _, _ in rows]),
        kind=np.array([int(k) for _, k, _ in rows]),
        clock_mhz=np.array([c for _, _, c in rows]),
        seconds=np.array(seconds),
        joules=np.array(joules),
        blocking_w={"": 80.0},
    )


PLAIN = (Kind.FORWARD, Kind.BACKWARD)
KINDS = {
    Schedule.ZERO_BUBBLE: (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT),
    Schedule.SPLIT: (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT),
    Schedule.EARLY_RECOMPUTE: (Kind.FORWARD, Kind.BACKWARD, Kind.RECOMPUTE),
    Schedule.INFERENCE: (Kind.FORWARD,),
}


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_schedule_has_a_frontier(schedule: Schedule, replicas: int) -> None:
    chunks = 2 if schedule is Schedule.INTERLEAVED else 1
    how = Pipeline(schedule=schedule, microbatches=8, replicas=replicas, chunks=chunks)
    model = pipeline_model(profile(4, KINDS.get(schedule, PLAIN)), how)
    frontier = solve_frontier(model, points=4)
    assert len(frontier.devices) == 4 * replicas // chunks
    assert frontier.time_s[0] == pytest.approx(frontier.fastest_s, rel=1e-9)
    assert frontier.energy_j[0] < frontier.all_max_j
    assert bool((frontier.gap < 0.2).all())


def test_tensor_parallel_members_share_a_clock_and_all_draw_power() -> None:
    alone = solve_frontier(pipeline_model(profile(3, PLAIN), Pipeline(microbatches=4)), points=3)
    how = Pipeline(microbatches=4, tensor_parallel=2)
    model = pipeline_model(profile(3, PLAIN), how)
    pair = solve_frontier(model, points=3)
    assert pair.time_s == pytest.approx(alone.time_s, rel=1e-9)
    assert pair.energy_j == pytest.approx(2 * alone.energy_j, rel=1e-9)
    clocks = clock_plan(model.program, pair.clocks(0))
    for first, second in zip(clocks.entries[::2], clocks.entries[1::2], strict=True):
        assert first == second


def test_loading_is_a_fixed_time() -> None:
    known = profile(2, PLAIN)
    loading = EnergyProfile(
        stage=np.append(known.stage, 0),
        kind=np.append(known.kind, int(Kind.LOAD)),
        clock_mhz=np.append(known.clock_mhz, 1400.0),
        seconds=np.append(known.seconds, 0.5),
        joules=np.append(known.joules, 60.0),
        blocking_w=known.blocking_w,
    )
    plain = solve_frontier(pipeline_model(known, Pipeline(microbatches=2)), points=1)
    slower = solve_frontier(pipeline_model(loading, Pipeline(microbatches=2)), points=1)
    assert slower.fastest_s > plain.fastest_s + 0.4


def test_a_clock_plan_lists_the_instructions_of_each_device_in_order() -> None:
    model = pipeline_model(profile(2, PLAIN), Pipeline(microbatches=3))
    plan = clock_plan(model.program, solve_frontier(model, points=1).clocks(0), PLAIN)
    names = [name for name, _ in plan.of("gpu1")]
    assert names == ["forward", "backward"] * 3
    assert all(clock in CLOCKS for _, clock in plan.of("gpu0"))
    with pytest.raises(InvalidInputError, match="'gpu9'"):
        plan.of("gpu9")
    with pytest.raises(InvalidInputError, match="1 lists for 2 devices"):
        ClockPlan(devices=("a", "b"), entries=((),))


def test_stages_that_cannot_be_dealt_out_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"3 stages cannot.*2"):
        pipeline_model(profile(3, PLAIN), Pipeline(chunks=2))


def test_a_stage_without_a_row_is_refused() -> None:
    known = profile(2, PLAIN)
    jumped = dataclasses.replace(known, stage=np.where(known.stage == 1, 10**9, 0))
    with pytest.raises(InvalidInputError, match=r"1, but.*10"):
        pipeline_model(jumped, Pipeline())


def test_a_profile_without_energy_is_refused() -> None:
    known = profile(2, PLAIN)
    with pytest.raises(InvalidInputError, match=r"every.*'profile'.*0"):
        pipeline_model(dataclasses.replace(known, joules=known.joules * 0), Pipeline())
