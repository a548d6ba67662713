"""The live scheduler asks the simulator's policy, and hears the same answer."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_builders import World, curve, servers

from partita.core.fleet import Job, trace_of
from partita.errors import InfeasibleError
from partita.fleet.engines.devices import Piece
from partita.fleet.engines.protocol import Attempt
from partita.fleet.live.decision import MOST_S, Decider, LiveJob, Rounds, has_ended, is_about_to_end
from partita.fleet.live.files import LEASE, PROGRESS, read_json, write_json
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
    held = (Piece(server=1, gpus=1, cpus=3.0, memory_bytes=1e9),)
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
    with pytest.raises(InfeasibleError, match=r"most.*4"):
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
    with pytest.raises(InfeasibleError, match=r"7 needs 2 GPUs.*'lab'.*1"):
        decider.check(job)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.poll()
    yield made
    made.store.close()


def say(world: World, job: int, **rest: Any) -> None:
    """Let a job of ten steps say how far it is."""
    words = {"state": "running", "step": 9, "saved_step": 9, "attempt": 1, "pid": 0, **rest}
    write_json(world.settings.directory(job) / PROGRESS, words)


def filled(world: World) -> tuple[int, int]:
    """Return a job that has all GPUs and one that waits for them, at the start of a round."""
    first, second = world.submit(gpus=4), world.submit(gpus=4)
    world.next_round()
    assert (world.state(first), world.state(second)) == ("running", "waiting")
    return first, second


def test_rounds_are_counted_from_the_first() -> None:
    rounds = Rounds(epoch_s=100.0, round_s=0.1)
    assert [rounds.number(rounds.start_s(number)) for number in range(50)] == list(range(50))
    assert rounds.start_before_s(100.25) == rounds.start_s(2)
    assert rounds.settling_s == pytest.approx(0.01)
    assert Rounds(epoch_s=0.0, round_s=300.0).settling_s == MOST_S


def test_the_last_step_counts_when_it_was_done_not_when_it_was_said() -> None:
    assert has_ended({"done_s": 10.0}, 10.0)
    assert not has_ended({"done_s": 10.1}, 10.0)
    assert not has_ended({"done_s": None, "ends_s": 9.0}, 10.0)
    assert is_about_to_end({"ends_s": 10.5}, 11.0)
    assert not is_about_to_end({"ends_s": 11.5}, 11.0)
    assert not is_about_to_end({"ends_s": 10.0, "done_s": 10.0}, 11.0)
    assert not is_about_to_end({}, 11.0)


def test_who_has_done_its_steps_has_ended_although_it_still_saves(world: World) -> None:
    first, second = filled(world)
    say(world, first, step=10, done_s=world.now_s + 9.9)
    world.next_round()
    assert not read_json(world.settings.directory(first) / LEASE)["stop"]
    assert world.state(second) == "waiting"  # the GPUs are its, and not free yet
    say(world, first, state="done", step=10, saved_step=10, done_s=world.now_s - 0.1)
    world.engine.end(Attempt(first, 1), 0)
    world.poll(0.5)
    assert (world.state(first), world.state(second)) == ("finished", "running")
    row = world.store.job(first)
    assert row is not None
    assert row.preemptions == 0


def test_the_decision_waits_a_little_for_who_is_about_to_end(world: World) -> None:
    first, second = filled(world)
    say(world, first, ends_s=world.now_s + 10.02)
    world.next_round()
    say(world, first, state="done", step=10, saved_step=10, done_s=world.now_s - 0.01)
    world.engine.end(Attempt(first, 1), 0)
    world.poll(0.1)
    assert (world.state(first), world.state(second)) == ("finished", "running")


def test_the_wait_for_words_has_an_end(world: World) -> None:
    first, second = filled(world)
    say(world, first, ends_s=world.now_s + 10.02)
    end_s = read_json(world.settings.directory(first) / LEASE)["end_s"]
    world.next_round()
    assert read_json(world.settings.directory(first) / LEASE)["end_s"] == end_s
    world.poll(world.scheduler.rounds.settling_s)
    assert read_json(world.settings.directory(first) / LEASE)["end_s"] == end_s + 10
    assert (world.state(first), world.state(second)) == ("running", "waiting")


def test_who_comes_after_the_boundary_waits_however_late_the_scheduler_looks(world: World) -> None:
    world.now_s = world.scheduler.rounds.start_s(1) + 0.3
    job = world.submit()
    world.poll(0.1)
    assert world.state(job) == "waiting"
    world.next_round()
    assert world.state(job) == "running"


def test_who_has_done_its_steps_and_does_not_end_is_stopped_after_its_grace(world: World) -> None:
    first, second = filled(world)
    world.engine.stubborn.add(first)
    say(world, first, state="done", step=10, saved_step=10, done_s=world.now_s + 1)
    world.next_round()  # nine seconds later; its grace is five
    assert world.state(first) == "stopping"
    assert "it has not ended" in world.store.events(first)[-1][1]
    world.poll(6)
    world.poll(1)
    assert (world.state(first), world.state(second)) == ("finished", "running")


@pytest.mark.parametrize("word", ["soon", None, [], True, float("nan")])
def test_a_job_that_says_nonsense_harms_nobody(world: World, word: object) -> None:
    first, _ = filled(world)
    names = ("step", "saved_step", "pid", "done_s", "ends_s")
    say(world, first, **dict.fromkeys(names, word))
    world.next_round()
    assert world.state(first) == "running"
    world.engine.end(Attempt(first, 1), 0)
    world.poll(1)
    assert "after 0 of 10 steps" in world.note(first)


def test_leases_are_counted_from_the_start_of_a_round(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    grants = world.scheduler._decider.grants

    def noted(now_s: float, jobs: Any, away: Any) -> Any:
        seen.append([(job.lease_s, job.attained_s) for job in jobs])
        return grants(now_s, jobs, away)

    monkeypatch.setattr(world.scheduler._decider, "grants", noted)
    world.submit()
    for _ in range(3):
        world.next_round()
        world.poll(0.7)
    assert seen == [[(pytest.approx(held_s), pytest.approx(held_s))] for held_s in (0, 10, 20)]
