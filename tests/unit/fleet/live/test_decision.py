"""The live scheduler asks the simulator's policy, and hears the same answer."""

import math

import numpy as np
import pytest
from live_builders import curve, servers

from partita.core.fleet import Job, trace_of
from partita.errors import InfeasibleError
from partita.fleet.engines.devices import Piece
from partita.fleet.live.decision import Decider, LiveJob
from partita.fleet.policies.table import ALLOCATORS, ORDERINGS, policy_of
from partita.fleet.simulate.options import Rules
from partita.fleet.simulate.state import first_state

CURVES = (
    curve((1, 0.3), (3, 1.0), (6, 1.8), name="steep"),
    curve((1, 1.0), (3, 1.0), name="flat"),
)


def jobs(count: int = 12) -> list[Job]:
    rng = np.random.default_rng(3)
    return [
        Job(
            job_id=number + 1,
            sensitivity=CURVES[number % 2],
            arrival_s=float(number),
            iterations=int(rng.integers(10, 100)),
            gpus=int(rng.choice([1, 1, 2, 4])),
            tenant="ab"[number % 2],
            priority=float(number % 3),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("allocator", [name for name in ALLOCATORS if name != "opt"])
@pytest.mark.parametrize("ordering", ORDERINGS)
def test_grants_are_those_of_the_simulators_first_round(ordering: str, allocator: str) -> None:
    policy, there = policy_of(f"{ordering}:{allocator}"), servers(2)
    state = first_state(trace_of(jobs()), there, Rules(round_s=10.0, restart_s=1.0))
    state.active = np.arange(len(jobs()), dtype=np.int64)
    snapshot = state.snapshot(20.0)
    expected = policy.allocator.allocate(snapshot, policy.order(snapshot))
    decider = Decider(there, policy, round_s=10.0, restart_s=1.0)
    live = [LiveJob(job=job, remaining=job.iterations) for job in reversed(jobs())]
    granted = decider.grants(20.0, live)
    assert {job - 1 for job in granted} == set(np.flatnonzero(expected.running).tolist())
    for job, grant in granted.items():
        at = slice(int(expected.first[job - 1]), int(expected.first[job]))
        assert [piece.server for piece in grant.pieces] == expected.server[at].tolist()
        assert [piece.cpus for piece in grant.pieces] == expected.cpus[at].tolist()
        assert grant.speed == expected.speed[job - 1]


def test_who_runs_stays_where_it_is() -> None:
    decider = Decider(servers(2), policy_of("fifo:tune"), round_s=10.0, restart_s=1.0)
    held = (Piece(server=1, gpus=1, cpus=3.0, memory_gb=1.0),)
    first, second = jobs(2)
    live = [
        LiveJob(job=first, remaining=5, speed=1.0, attained_s=10.0, held=held),
        LiveJob(job=second, remaining=5),
    ]
    assert [piece.server for piece in decider.grants(20.0, live)[1].pieces] == [1]


def test_the_policy_is_told_for_how_long_each_has_run() -> None:
    decider = Decider(servers(2), policy_of("fifo:tune"), round_s=10.0, restart_s=1.0)
    first, second = jobs(2)
    live = [
        LiveJob(job=first, remaining=5, speed=1.0, lease_s=30.0),
        LiveJob(job=second, remaining=5),
    ]
    assert decider.snapshot(20.0, live).lease_s.tolist() == [30.0, 0.0]


def test_quotas_of_tenants_who_are_not_there_do_no_harm() -> None:
    decider = Decider(
        servers(), policy_of("fifo:tune"), round_s=10.0, restart_s=1.0, quotas={"z": 1, "a": 4}
    )
    live = [LiveJob(job=job, remaining=5) for job in jobs(6)]
    granted = decider.grants(20.0, live)
    gpus = {job.job_id: job.gpus for job in jobs(6) if job.tenant == "a"}
    assert sum(gpus[job] for job in granted if job in gpus) <= 4


def test_equal_names_of_different_curves_are_told_apart() -> None:
    slow, fast = curve((1, 0.5), (6, 1.0), name="same"), curve((1, 1.0), name="same")
    live = [
        LiveJob(job=Job(job_id=n, sensitivity=each, iterations=5), remaining=5)
        for n, each in enumerate((slow, fast), start=1)
    ]
    granted = Decider(servers(), policy_of("fifo:tune"), round_s=1.0, restart_s=0.0).grants(0, live)
    assert granted[1].pieces[0].cpus == pytest.approx(6.0)
    assert granted[2].pieces[0].cpus == pytest.approx(1.0)


def test_names_that_look_like_names_of_ours_do_no_harm() -> None:
    names = ("same", "same 3", "1 same", "same")
    live = [
        LiveJob(
            job=Job(job_id=n, sensitivity=curve((1, float(n)), name=name), iterations=5),
            remaining=5,
        )
        for n, name in enumerate(names, start=1)
    ]
    decider = Decider(servers(), policy_of("fifo:tune"), round_s=1.0, restart_s=0.0)
    assert set(decider.grants(0, live)) == {1, 2, 3, 4}


def test_what_can_never_run_is_refused() -> None:
    decider = Decider(servers(), policy_of("fifo:tune"), round_s=1.0, restart_s=0.0)
    with pytest.raises(InfeasibleError, match="the most there are is 4"):
        decider.check(Job(job_id=1, sensitivity=CURVES[0], iterations=5, gpus=5, min_gpus=5))
    wide = Job(job_id=1, sensitivity=CURVES[0], iterations=5, gpus=9, min_gpus=1, max_gpus=2**20)
    decider.check(wide)
    granted = decider.grants(0.0, [LiveJob(job=wide, remaining=5)])
    assert math.isfinite(granted[1].speed)


def test_a_job_that_its_tenant_may_never_run_is_refused() -> None:
    decider = Decider(
        servers(), policy_of("fifo:tune"), round_s=1.0, restart_s=0.0, quotas={"lab": 1}
    )
    job = Job(job_id=7, sensitivity=CURVES[0], iterations=5, gpus=2, tenant="lab")
    with pytest.raises(InfeasibleError, match="job 7 needs 2 GPUs and its tenant 'lab' may hold 1"):
        decider.check(job)
