"""What counts at the boundary of two rounds, on an engine that only remembers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_builders import World

from partita.fleet.engines.protocol import Attempt
from partita.fleet.live.boundary import MOST_S, Rounds, has_ended, is_about_to_end
from partita.fleet.live.files import LEASE, PROGRESS, read_json, write_json


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

    def noted(now_s: float, jobs: Any) -> Any:
        seen.append([(job.lease_s, job.attained_s) for job in jobs])
        return grants(now_s, jobs)

    monkeypatch.setattr(world.scheduler._decider, "grants", noted)
    world.submit()
    for _ in range(3):
        world.next_round()
        world.poll(0.7)
    assert seen == [[(pytest.approx(held_s), pytest.approx(held_s))] for held_s in (0, 10, 20)]
