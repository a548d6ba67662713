"""Small servers, jobs and an engine that only remembers, for the tests of the live scheduler."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from partita.core.fleet import Sensitivity
from partita.fleet.engines.protocol import Attempt, Handle, Look, Order, Place, Status, Traits
from partita.fleet.live.decision import Decider
from partita.fleet.live.files import LEASE, PROGRESS, read_json, write_json
from partita.fleet.live.jobspec import GpuChoice, JobSpec
from partita.fleet.live.scheduler import FleetSettings, Scheduler
from partita.fleet.live.store import FleetStore
from partita.fleet.policies.resources import Servers
from partita.fleet.policies.table import policy_of


def servers(
    count: int = 1, gpus: int = 4, cpus: float = 12.0, memory_bytes: float = 64e9
) -> Servers:
    return Servers(
        names=tuple(f"host{row}" for row in range(count)),
        gpu_types=("v100",),
        gpu_type=np.zeros(count, dtype=np.int32),
        gpus=np.full(count, gpus, dtype=np.int32),
        cpus=np.full(count, cpus),
        memory_bytes=np.full(count, memory_bytes),
        storage_bytes_per_s=np.zeros(count),
    )


def curve(*points: tuple[float, float], name: str = "curve", iteration_s: float = 1.0):
    return Sensitivity(
        name=name,
        iteration_s=iteration_s,
        cpus=np.array([cpus for cpus, _ in points]),
        memory_bytes=np.full(len(points), 1e9),
        speed=np.array([speed for _, speed in points]),
        restart_s=0.0,
    )


def spec(folder: Path, **rest: Any) -> JobSpec:
    values: dict[str, Any] = {
        "name": "job",
        "command": ("true",),
        "folder": folder,
        "steps": 10,
        "sensitivity": curve((1, 1.0)),
        "grace_s": 5.0,
        **rest,
    }
    if isinstance(values.get("gpus"), int):
        values["gpus"] = (GpuChoice(least=values["gpus"], most=values["gpus"]),)
    return JobSpec(**values)


@dataclass
class FakeEngine:
    """Remembers what runs; a job does a step whenever ``work`` is called, if its lease lets it."""

    name: str = "fake"
    traits: Traits = field(default_factory=Traits)
    away: dict[str, str] = field(default_factory=dict)
    alive: dict[Attempt, Order] = field(default_factory=dict)
    codes: dict[Attempt, int | None] = field(default_factory=dict)
    started: list[Attempt] = field(default_factory=list)
    stubborn: set[int] = field(default_factory=set)
    resized: list[tuple[Attempt, tuple[Place, ...]]] = field(default_factory=list)
    most_at_once: int = 0

    def start(self, order: Order) -> Handle:
        self.alive[order.attempt] = order
        self.started.append(order.attempt)
        same = [each for each in self.alive if each.job == order.attempt.job]
        self.most_at_once = max(self.most_at_once, len(same))
        return {"job": order.attempt.job, "number": order.attempt.number}

    def stop(self, handle: Handle, *, grace_s: float) -> None:
        attempt = Attempt(handle["job"], handle["number"])
        if attempt not in self.alive or (grace_s > 0 and attempt.job in self.stubborn):
            return
        self.end(attempt, -9 if grace_s == 0 else 0)

    def look(self, handles: Mapping[Attempt, Handle]) -> Look:
        statuses = {key: self.status(handle) for key, handle in handles.items()}
        return Look(statuses=statuses, away=self.away)

    def status(self, handle: Handle) -> Status:
        attempt = Attempt(handle["job"], handle["number"])
        if attempt in self.alive:
            return Status(running=True, grant="all of it")
        return Status(running=False, exit_code=self.codes.get(attempt))

    def resize(self, handle: Handle, places: tuple[Place, ...]) -> None:
        self.resized.append((Attempt(handle["job"], handle["number"]), places))

    def running(self, fleet: str) -> Mapping[Attempt, Handle]:
        del fleet
        return {each: {"job": each.job, "number": each.number} for each in self.alive}

    def end(self, attempt: Attempt, code: int | None) -> None:
        del self.alive[attempt]
        self.codes[attempt] = code

    def work(self, steps: int = 1) -> None:
        """Let every job that runs do some steps, checkpoint, and end when it is done."""
        for attempt, order in list(self.alive.items()):
            home = order.directory
            assert read_json(home / LEASE)["attempt"] == attempt.number
            total = int(order.environment["PARTITA_STEPS"])
            done = min(total, int(read_json(home / PROGRESS).get("saved_step", 0)) + steps)
            state = "done" if done == total else "running"
            self.say(order, state, done)
            if state == "done":
                self.end(attempt, 0)

    def say(self, order: Order, state: str, step: int) -> None:
        words = {"state": state, "step": step, "saved_step": step, "attempt": order.attempt.number}
        write_json(order.directory / PROGRESS, words)


@dataclass
class World:
    """A scheduler with a clock that is told, on an engine that survives it."""

    folder: Path
    policy: str = "fifo:tune"
    there: Servers = field(default_factory=servers)
    engine: FakeEngine = field(default_factory=FakeEngine)
    now_s: float = math.nan

    def __post_init__(self) -> None:
        self.settings = FleetSettings(
            state=self.folder / "fleet.sqlite", round_s=10.0, poll_s=1.0, backoff_s=2.0
        )
        self.open()

    def open(self) -> None:
        self.store = FleetStore(self.settings.state)
        decider = Decider(self.there, policy_of(self.policy), round_s=10.0, restart_s=0.0)
        self.scheduler = Scheduler(self.store, self.engine, decider, self.settings)
        if math.isnan(self.now_s):
            self.now_s = self.scheduler.epoch_s
        self.scheduler.recover(self.now_s)

    def submit(self, **rest: Any) -> int:
        said = spec(self.folder, **rest).to_json()
        return self.store.add_job(said, f"key {len(self.store.jobs())}", self.now_s)[0]

    def poll(self, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.scheduler.poll(self.now_s)

    def next_round(self) -> None:
        self.now_s = self.scheduler.epoch_s + 10.0 * (self.scheduler.rounds.number(self.now_s) + 1)
        self.poll()

    def state(self, job: int) -> str:
        row = self.store.job(job)
        assert row is not None
        return str(row.state)

    def note(self, job: int) -> str:
        row = self.store.job(job)
        assert row is not None
        return row.note
