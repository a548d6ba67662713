"""The scheduler on an engine that only remembers, with a clock that is told."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live_builders import FakeEngine, World, curve, servers

from partita.errors import UnsupportedError
from partita.fleet.engines.protocol import (
    Attempt,
    Cause,
    EngineAwayError,
    Place,
    Status,
    Traits,
)
from partita.fleet.live.files import LEASE, read_json
from partita.fleet.live.jobspec import Progress
from partita.fleet.live.store import FleetStore


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def one(**rest) -> World:
        made.append(World(tmp_path, **rest))
        return made[-1]

    yield one
    for each in made:
        each.store.close()


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    return make()


def lease(world: World, job: int) -> dict:
    return read_json(world.settings.directory(job) / LEASE)


def test_a_job_runs_to_its_end_without_a_restart(world: World) -> None:
    job = world.submit(steps=3)
    for _ in range(3):
        world.next_round()
        world.engine.work()
    world.poll(1)
    assert world.state(job) == "finished"
    assert world.engine.started == [Attempt(job, 1)]
    assert [what for _, what in world.store.events(job)][-1] == "finished: 3 steps done"


def test_a_decision_that_fails_is_made_again_and_fails_until_it_succeeds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = world.submit(steps=100)
    with monkeypatch.context() as patch:
        patch.setattr(world.scheduler._decider, "grants", lambda *_: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                world.next_round()
            with pytest.raises(ZeroDivisionError):
                world.poll(0.1)
    world.poll(0.1)
    assert world.state(job) == "running"


def test_a_lease_is_renewed_while_the_gpus_stay(world: World) -> None:
    job = world.submit(steps=100)
    world.next_round()
    first = lease(world, job)
    world.next_round()
    assert lease(world, job)["end_s"] == first["end_s"] + 10
    assert not lease(world, job)["stop"]
    assert len(world.engine.started) == 1


def test_a_job_that_comes_between_rounds_waits_for_the_next(world: World) -> None:
    world.next_round()
    job = world.submit()
    world.poll(1)
    assert world.state(job) == "waiting"
    world.next_round()
    assert world.state(job) == "running"


def test_who_loses_its_gpus_stops_and_goes_on_later(make: Callable[..., World]) -> None:
    world = make(policy="srtf:tune")
    long = world.submit(gpus=4, steps=100)
    world.next_round()
    world.engine.work(5)
    short = world.submit(gpus=4, steps=2)
    world.next_round()
    assert lease(world, long)["stop"]
    world.poll(1)
    assert (world.state(long), world.state(short)) == ("waiting", "running")
    assert world.note(long) == "was stopped: its GPUs go to others"
    world.engine.work(2)
    world.next_round()
    assert (world.state(long), world.state(short)) == ("running", "finished")
    row = world.store.job(long)
    assert row is not None
    assert (row.preemptions, row.step, row.attempts) == (1, 5, 2)


def test_devices_are_never_given_before_they_are_free(make: Callable[..., World]) -> None:
    world = make(policy="srtf:tune")
    long = world.submit(gpus=4, steps=100)
    world.next_round()
    world.engine.stubborn.add(long)
    short = world.submit(gpus=4, steps=2)
    world.next_round()
    world.poll(4)
    assert world.state(short) == "waiting"
    world.poll(2)  # the grace of 5 s is over
    world.poll(1)
    assert world.state(short) == "running"
    why = "was stopped: its GPUs go to others"
    assert world.note(long) == f"{why}; ignored the end of its lease: SIGKILL 5 s after SIGTERM"


def test_cpus_change_while_a_job_runs(make: Callable[..., World]) -> None:
    world = make(there=servers(gpus=2, cpus=6.0))
    steep = curve((1, 0.3), (3, 1.0), (5, 1.6))
    first, second = world.submit(sensitivity=steep, steps=2), world.submit(sensitivity=steep)
    world.next_round()
    before = {row.id.job: row.places[0].cpus for row in world.store.attempts()}
    assert sum(before.values()) == pytest.approx(6.0)
    world.engine.work(2)
    world.next_round()
    assert world.state(first) == "finished"
    (row,) = world.store.attempts(second)
    assert row.places[0].cpus == pytest.approx(5.0)
    assert before[second] < 5
    assert world.engine.resized[-1] == (row.id, row.places)
    assert lease(world, second)["grant"]["cpus"] == pytest.approx(5.0)


def test_an_engine_that_cannot_resize_restarts(make: Callable[..., World]) -> None:
    engine = FakeEngine(traits=Traits(can_resize=False))
    world = make(there=servers(gpus=2, cpus=6.0), engine=engine)
    steep = curve((1, 0.3), (3, 1.0), (5, 1.6))
    world.submit(sensitivity=steep, steps=2)
    second = world.submit(sensitivity=steep)
    world.next_round()
    engine.work(2)
    world.next_round()
    world.poll(1)
    assert Attempt(second, 2) in engine.started
    assert not engine.resized


def test_exit_0_before_the_steps_are_done_is_a_fault(world: World) -> None:
    job = world.submit(steps=5)
    world.next_round()
    world.engine.work(2)
    world.engine.end(Attempt(job, 1), 0)
    world.poll(1)
    assert world.note(job) == (
        "ended with exit code 0 after 2 of 5 steps; fault 1 of at most 3, tried again in 2 s"
    )
    world.poll(3)
    assert world.engine.started[-1] == Attempt(job, 2)


def test_a_crash_loop_ends_after_its_retries(world: World) -> None:
    job = world.submit(retries=2)
    world.next_round()
    for _ in range(3):
        world.engine.end(world.engine.started[-1], 1)
        world.poll(1)
        world.poll(20)
    assert world.state(job) == "failed"
    assert len(world.engine.started) == 3
    assert world.note(job) == ("ended with exit code 1; given up after 3 faults in a row at step 0")


def test_faults_with_progress_between_them_are_no_crash_loop(world: World) -> None:
    job = world.submit(retries=1, steps=10)
    world.next_round()
    for _ in range(5):
        world.engine.work(1)
        world.engine.end(world.engine.started[-1], -9)
        world.poll(1)
        world.poll(20)
    assert world.state(job) == "running"
    assert world.store.job(job).faults == 1


def test_an_unusable_checkpoint_directory_is_said(world: World) -> None:
    (world.folder / "file").write_text("")
    job = world.submit(checkpoint=world.folder / "file" / "below", retries=0)
    world.next_round()
    assert world.state(job) == "failed"
    assert "checkpoint directory" in world.note(job)
    assert "not a directory" in world.note(job)
    assert not world.engine.started


def test_a_program_that_tells_nothing_is_done_when_it_ends_by_itself(
    make: Callable[..., World],
) -> None:
    world = make(policy="srtf:tune")
    job = world.submit(progress=Progress.NONE, gpus=4, steps=100)
    world.next_round()
    short = world.submit(gpus=4, steps=1)
    world.next_round()  # asked to stop, it ends with 0: not done
    world.poll(1)
    assert world.state(job) == "waiting"
    world.engine.work()
    world.next_round()
    assert world.state(short) == "finished"
    world.engine.end(Attempt(job, 2), 0)
    world.poll(1)
    assert world.state(job) == "finished"


def test_cancelled_jobs_end_whether_they_run_or_wait(world: World) -> None:
    running, waiting = world.submit(gpus=4), world.submit(gpus=4)
    world.next_round()
    for job in (running, waiting):
        world.store.update_job(job, cancelled=1)
    world.poll(1)
    world.poll(1)
    assert world.state(running) == world.state(waiting) == "cancelled"
    assert not world.engine.alive


def test_draining_stops_all_and_keeps_the_queue(world: World) -> None:
    job = world.submit(steps=10)
    world.next_round()
    world.engine.work(4)
    world.store.set_fact("draining", "1")
    world.poll(1)
    world.poll(1)
    world.next_round()
    assert (world.state(job), len(world.engine.alive)) == ("waiting", 0)
    world.store.set_fact("draining", "")
    world.next_round()
    assert world.state(job) == "running"
    assert world.store.job(job).step == 4


def test_a_second_scheduler_on_a_state_is_refused(world: World) -> None:
    with pytest.raises(UnsupportedError, match="another scheduler"):
        FleetStore(world.settings.state)


def test_a_submission_that_comes_twice_is_one_job(world: World) -> None:
    first = world.store.add_job({}, "the key", 0.0)
    assert world.store.add_job({}, "the key", 1.0) == (first[0], False)


class CrashError(BaseException):
    """Stands for a SIGKILL."""


def crash_at(world: World, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the scheduler die at the n-th thing that it does: a commit, a start, a stop, a lease."""
    left = [count]

    def dying(name: str, function):
        def call(*args, **rest):
            left[0] -= 1
            if left[0] == 0:
                raise CrashError(f"before {name}")
            result = function(*args, **rest)
            left[0] -= 1
            if left[0] == 0:
                raise CrashError(f"after {name}")
            return result

        return call

    for part, names in (
        (world.store, ("update_job", "update_attempt", "add_attempt", "add_event")),
        (world.engine, ("start", "stop")),
        (world.scheduler, ("_write_lease",)),
    ):
        for name in names:
            monkeypatch.setattr(part, name, dying(name, getattr(part, name)))


@pytest.mark.parametrize("count", range(1, 90, 3))
def test_a_crash_at_any_instant_loses_and_doubles_nothing(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    world = make(policy="srtf:tune")
    jobs = [world.submit(gpus=4, steps=4), world.submit(gpus=4, steps=3)]
    with monkeypatch.context() as patch:
        crash_at(world, patch, count)
        try:
            for turn in range(4):
                world.next_round()
                world.poll(1)
                world.engine.work()
                if turn == 1:
                    jobs.append(world.submit(gpus=4, steps=1))
        except CrashError:
            pass
    world.store.close()
    world.open()
    for _ in range(12):
        world.next_round()
        world.poll(1)
        world.engine.work()
    world.poll(1)
    assert [world.state(job) for job in jobs] == ["finished"] * len(jobs)
    assert world.engine.most_at_once == 1
    assert not world.engine.alive
    assert len(set(world.engine.started)) == len(world.engine.started)
    for job in jobs:
        ends = [what for _, what in world.store.events(job) if what.startswith("finished")]
        assert len(ends) == 1


def test_a_start_that_was_not_recorded_is_adopted(world: World) -> None:
    job = world.submit(steps=2)
    world.next_round()
    world.store.update_attempt(Attempt(job, 1), handle=None)
    world.store.close()
    world.open()
    world.engine.work(2)
    world.poll(1)
    assert world.state(job) == "finished"
    assert len(world.engine.started) == 1


def test_what_nobody_knows_of_is_ended(world: World) -> None:
    job = world.submit()
    world.next_round()
    order = world.engine.alive[Attempt(job, 1)]
    world.engine.alive[Attempt(77, 1)] = order
    world.store.close()
    world.open()
    assert list(world.engine.alive) == [Attempt(job, 1)]


def test_a_job_that_no_longer_fits_does_not_hold_up_others(make: Callable[..., World]) -> None:
    world = make(there=servers(gpus=4))
    wide, narrow = world.submit(gpus=4), world.submit(gpus=1)
    world.store.close()
    world.there = servers(gpus=2)
    world.open()
    world.next_round()
    assert (world.state(wide), world.state(narrow)) == ("waiting", "running")
    assert world.note(wide).startswith("cannot run on these servers")


def test_a_clock_that_is_set_back_does_not_stop_the_rounds(world: World) -> None:
    for _ in range(5):
        world.next_round()
    world.now_s -= 35
    job = world.submit()
    world.next_round()
    assert world.state(job) == "running"


def test_nothing_is_placed_on_servers_that_are_away_and_who_is_there_moves(
    make: Callable[..., World],
) -> None:
    world = make(there=servers(2, gpus=2))
    first = world.submit(gpus=2)
    second = world.submit(gpus=2)
    world.next_round()
    at = {row.id.job: row.places[0].server for row in world.store.attempts()}
    assert set(at.values()) == {"host0", "host1"}
    world.engine.away[at[first]] = "DRAIN bad fan"
    world.next_round()
    assert any(
        f"{at[first]} cannot be used: DRAIN bad fan" in what for what in events(world, first)
    )
    world.engine.away["host0"] = world.engine.away["host1"] = "DOWN"
    world.next_round()
    world.poll(1)
    assert not world.engine.alive
    world.engine.away.clear()
    world.next_round()
    world.poll(1)
    assert {row.places[0].server for row in world.store.attempts(open_only=True)} == {
        "host0",
        "host1",
    }
    assert second in {row.id.job for row in world.store.attempts(open_only=True)}


def events(world: World, job: int) -> list[str]:
    return [what for _, what in world.store.events(job)]


def test_an_engine_that_is_away_costs_a_job_nothing(world: World) -> None:
    job = world.submit()

    def refuse(order: object) -> None:
        raise EngineAwayError("Slurm is away: refused", 3.0)

    start, world.engine.start = world.engine.start, refuse
    world.next_round()
    assert world.state(job) == "waiting"
    assert world.note(job) == "Slurm is away: refused"
    assert world.store.job(job).faults == 0
    world.engine.start = start
    world.poll(1)
    assert not world.engine.started
    world.poll(3)
    assert world.engine.started == [Attempt(job, 2)]


def test_grants_are_what_the_engine_gave(world: World) -> None:
    job = world.submit(gpus=2)
    world.next_round()
    given = (Place(server="host0", gpus=(2, 3), cpu_ids=(), cpus=1.0, memory_bytes=1e9),)
    world.engine.status = lambda handle: Status(running=True, given=given)
    world.poll(1)
    (row,) = world.store.attempts(job)
    assert row.places == given
    assert any("fake gave host0: GPUs 2,3, 1 CPUs" in what for what in events(world, job))


def test_what_others_cancel_in_the_engine_stays_cancelled(world: World) -> None:
    job = world.submit()
    world.next_round()
    why = "cancelled in Slurm, outside of the fleet (scancel)"
    world.engine.status = lambda handle: Status(running=False, cause=Cause.OTHERS, why=why)
    world.poll(1)
    assert world.state(job) == "cancelled"
    assert world.note(job) == why


def test_what_the_engine_ends_is_no_fault_and_goes_on(world: World) -> None:
    job = world.submit()
    world.next_round()
    world.engine.alive.clear()
    status = world.engine.status
    world.engine.status = lambda handle: Status(running=False, cause=Cause.ENGINE, why="preempted")
    world.poll(1)
    world.engine.status = status
    assert (world.state(job), world.store.job(job).faults) == ("running", 0)
    assert "preempted" in events(world, job)
    assert world.engine.started[-1] == Attempt(job, 2)
