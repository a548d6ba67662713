import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from partita.core.energy import EnergyOrigin
from partita.core.program import Kind
from partita.energy.policies.base import State
from partita.energy.policies.job import Job, Rank
from partita.energy.policies.sweep import Sweep, SweepOptions, kept
from partita.errors import InvalidInputError


def test_the_profile_is_what_the_devices_do(cluster: Any) -> None:
    from_ranks = cluster(Job(pp=2, dp=2, tp=2, microbatches=3), "instruction-profiler")
    profile = from_ranks.register().settle().session.scheduler.profile
    module = sys.modules[cluster.__module__]
    assert len(profile) == 2 * 2 * len(module.CLOCKS)
    names = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}
    for row in range(len(profile)):
        kind = names[Kind(int(profile.kind[row]))]
        clock = int(profile.clock_mhz[row])
        expected = module.figures(int(profile.stage[row]), kind, clock)
        assert (profile.seconds[row], profile.joules[row]) == pytest.approx(expected)
    assert profile.blocking_w == {"": module.BLOCKING_W}
    assert from_ranks.deployment.finished


def test_what_waiting_takes_is_measured_where_nobody_says(cluster: Any) -> None:
    job = Job(pp=2, microbatches=2)
    told = cluster(job, "instruction-profiler", rank={"blocking_w": None}).register().settle()
    assert told.session.scheduler.profile.blocking_w[""] == pytest.approx(80.0)


def test_modelled_devices_make_a_modelled_profile(cluster: Any) -> None:
    rank = {"origin": EnergyOrigin.MODELLED}
    told = cluster(Job(microbatches=1), "instruction-profiler", rank=rank).register().settle()
    assert told.session.scheduler.profile.origin is EnergyOrigin.MODELLED


def test_unknown_energy_leaves_the_clocks_at_their_highest(cluster: Any) -> None:
    for name in ("instruction-profiler", "perseus", "global-power-limit"):
        told = cluster(Job(pp=2, microbatches=2), name, energy=False).register().settle()
        assert "did not report the energy" in told.deployment.note
        assert {clock for entries in told.deployment.entries for _, clock in entries} == {1400}
        assert not told.deployment.finished


@pytest.mark.parametrize("name", ["instruction-profiler", "perseus", "global-power-limit"])
@pytest.mark.parametrize("seconds", [0.0, 1e-300, 1e-10, 2e6, 1e9])
def test_times_that_nothing_takes_leave_the_clocks_at_their_highest(
    cluster: Any, name: str, seconds: float
) -> None:
    told = cluster(Job(pp=2, microbatches=2), name).register()
    for result in [told.result(rank) for rank in told.ranks]:
        wrong = dict.fromkeys(result.seconds, ((seconds,) * 2,) * 2)
        told.session.add_result(replace(result, iteration_s=(seconds,) * 2, seconds=wrong))
    told.advance()
    assert told.session.settled
    assert f"took {seconds:g} s; expected 1e-09 to 1e+06" in told.deployment.note
    assert {clock for entries in told.deployment.entries for _, clock in entries} == {1400}
    assert not told.deployment.time_s


@pytest.mark.parametrize("name", ["instruction-profiler", "perseus"])
def test_energies_that_nothing_uses_leave_the_clocks_at_their_highest(
    cluster: Any, name: str
) -> None:
    told = cluster(Job(microbatches=2), name).register()
    result = told.result(told.ranks[0])
    wrong = dict.fromkeys(result.joules, ((1e14,) * 2,) * 2)
    told.session.add_result(replace(result, joules=wrong))
    told.advance()
    assert "'forward' used 1e+14 J; expected 1e+12 at most" in told.deployment.note
    assert {clock for entries in told.deployment.entries for _, clock in entries} == {1400}


def test_unknown_power_of_waiting_is_said(cluster: Any) -> None:
    told = cluster(Job(microbatches=2), rank={"blocking_w": None}).register()
    for rank in told.ranks:
        told.result(rank)
    while not told.session.settled:
        for rank in told.ranks:
            result = told.result(rank)
            busy = sum(sum(each[-1]) for each in result.seconds.values())
            short = type(result)(
                rank=0,
                version=result.version,
                iteration_s=(busy, busy),
                iteration_j=(1.0, 1.0),
                seconds=result.seconds,
                joules=result.joules,
            )
            told.session.add_result(short)
        told.advance()
    assert "blocking_w" in told.deployment.note


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_one_limit_is_chosen_by_eta(cluster: Any, eta: float) -> None:
    module = sys.modules[cluster.__module__]

    def step(clock: int) -> tuple[float, float]:
        """Return the longest step of a rank, which waits as long as it works, and all joules."""
        busy = [
            [module.figures(stage, name, clock) for name in ("forward", "backward") * 2]
            for stage in range(2)
        ]
        seconds = [sum(one[0] for one in rank) for rank in busy]
        joules = sum(one[1] for rank in busy for one in rank) + module.BLOCKING_W * sum(seconds)
        return 2 * max(seconds), joules

    top_s, top_j = step(module.CLOCKS[0])
    costs = {}
    for clock in module.CLOCKS:
        seconds, joules = step(clock)
        costs[clock] = eta * joules + (1 - eta) * top_j / top_s * seconds
    options = {"eta_knob": eta}
    told = cluster(Job(pp=2, microbatches=2), "global-power-limit", options).register().settle()
    chosen = {mhz for entries in told.deployment.entries for _, mhz in entries}
    assert chosen == {min(costs, key=lambda clock: costs[clock])}
    assert told.deployment.time_s[0] == pytest.approx(step(*chosen)[0])
    assert told.deployment.energy_j[0] == pytest.approx(step(*chosen)[1])


def test_eta_is_a_share(cluster: Any) -> None:
    told = cluster(Job(microbatches=1), "global-power-limit", {"eta_knob": 2.0}).register()
    assert "eta_knob is 2.0" in told.session.failure


def ranks(*lists: tuple[int, ...]) -> list[Rank]:
    return [Rank(rank=i, clocks_mhz=clocks) for i, clocks in enumerate(lists)]


def test_a_sweep_ends_when_everybody_rises() -> None:
    sweep = Sweep(ranks(tuple(range(100, 0, -1))), SweepOptions(patience=2))
    seen = []
    for a, b in [(5, 5), (4, 6), (3, 4), (4, 5), (2, 6), (3, 6), (4, 7), (1, 1)]:
        seen.append(sweep.clocks[0])
        sweep.advance({"a": float(a), "b": float(b)})
        if sweep.done:
            break
    assert seen == [100, 99, 98, 97, 96, 95, 94]


def test_a_sweep_goes_to_the_end_of_the_longest_list() -> None:
    sweep = Sweep(ranks((3, 2, 1), (9,), ()), SweepOptions())
    seen = []
    while not sweep.done:
        seen.append(sweep.clocks)
        sweep.advance({})
    assert seen == [[3, 9, 0], [2, 9, 0], [1, 9, 0]]


@pytest.mark.parametrize(
    ("options", "clocks"),
    [
        (SweepOptions(clocks=3), [100, 50, 1]),
        (SweepOptions(clocks=1), [100]),
        (SweepOptions(minimum_clock=99), [100, 99]),
        (SweepOptions(minimum_clock=1000), [100]),
    ],
)
def test_clocks_can_be_left_out(options: SweepOptions, clocks: list[int]) -> None:
    sweep = Sweep(ranks(tuple(range(100, 0, -1))), options)
    seen = []
    while not sweep.done:
        seen.extend(sweep.clocks)
        sweep.advance({})
    assert np.abs(np.array(seen) - clocks).max() <= 1


@pytest.mark.parametrize(
    "wrong", [{"warmup_step_ratio": 1.0}, {"patience": 0}, {"clocks": -1}, {"minimum_clock": -1}]
)
def test_options_of_a_sweep_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        SweepOptions(**wrong)


@pytest.mark.parametrize(("count", "first"), [(1, 0), (2, 1), (5, 1), (30, 3)])
def test_warm_up_is_dropped(count: int, first: int) -> None:
    assert list(range(count))[kept(range(count), 0.1)][0] == first


def test_the_state_of_a_profiling_job_is_profiling(cluster: Any) -> None:
    assert cluster(Job(microbatches=1)).register().deployment.state is State.PROFILING
