"""``partita train`` as a job of a fleet: planned for each grant, and gone on with from its save."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.fleet.engines.local import LocalEngine, machine_for
from partita.fleet.engines.proc import processes_of
from partita.fleet.engines.protocol import Attempt, Order, Place
from partita.fleet.live.files import PROGRESS, read_json, write_json
from partita.fleet.policies.resources import Servers

pytestmark = pytest.mark.slow
STEPS = 200
MODEL = ("train", "own:build", "--planner", "uniform", "--microbatches", "2")
OWN = """
import torch
from torch import nn

from partita.capture.setting import Example


def build(batch_size=4):
    torch.manual_seed(0)
    layers = (nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    example = Example(
        args=(torch.ones(batch_size, 8),), labels=torch.zeros(batch_size, dtype=torch.int64)
    )
    return nn.Sequential(*layers), example, nn.functional.cross_entropy
"""


@pytest.fixture
def engine() -> LocalEngine:
    servers = Servers(
        names=("local",),
        gpu_type=np.zeros(1, dtype=np.int32),
        gpus=np.array([2], dtype=np.int32),
        cpus=np.array([64.0]),
        memory_bytes=np.array([999e9]),
        storage_bytes_per_s=np.zeros(1),
    )
    return LocalEngine(machine_for(servers))


class Job:
    """A job in a folder, started with one grant after another."""

    def __init__(self, engine: LocalEngine, folder: Path) -> None:
        self.engine, self.folder, self.home = engine, folder, folder / "job-1"
        self.fleet = f"test{os.getpid()}"

    def start(self, number: int, gpus: int, *words: str) -> dict[str, Any]:
        """Start it with so many GPUs."""
        self.home.mkdir(exist_ok=True)
        self.lease(number)
        place = Place(
            server="local", gpus=tuple(range(gpus)), cpu_ids=(0,), cpus=1.0, memory_bytes=9e9
        )
        environment = {"PARTITA_STEPS": str(STEPS), "PARTITA_CHECKPOINT": str(self.folder / "kept")}
        order = Order(
            fleet=self.fleet,
            attempt=Attempt(1, number),
            command=(sys.executable, "-m", "partita", *words),
            folder=self.folder,
            directory=self.home,
            environment=environment,
            places=(place,),
        )
        return dict(self.engine.start(order))

    def lease(self, number: int, *, stop: bool = False) -> None:
        """Write its lease."""
        write_json(self.home / "lease.json", {"attempt": number, "stop": stop})

    def word(self) -> dict[str, Any]:
        """Return its last word."""
        return read_json(self.home / PROGRESS)

    def ended(self, handle: dict[str, Any]) -> bool:
        """Return whether a start has ended."""
        return not self.engine.status(handle).running

    def exit_code(self, handle: dict[str, Any]) -> int | None:
        """Wait for the end of a start."""
        until(lambda: self.ended(handle), "the end of the job")
        return self.engine.status(handle).exit_code

    def log(self) -> str:
        """Return what it printed."""
        return (self.home / "log.txt").read_text()


def until(done: Callable[[], object], what: str, limit_s: float = 90.0) -> None:
    last_s = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < last_s, f"{what} did not happen in {limit_s} s"
        time.sleep(0.05)


@pytest.fixture
def job(engine: LocalEngine, tmp_path: Path) -> Iterator[Job]:
    made = Job(engine, tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    yield made
    for _, process in processes_of(made.fleet):
        process.send(signal.SIGKILL)


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in folder.glob("runs/*/results.json")]


def test_a_job_is_planned_for_each_grant_and_goes_on_from_its_checkpoint(job: Job) -> None:
    first = job.start(1, 2, *MODEL)
    until(lambda: job.word() or job.ended(first), "a word of the job")
    assert job.word()["state"] == "running", job.log()
    job.lease(1, stop=True)  # ranks that have not begun are let make a step
    assert job.exit_code(first) == 0, job.log()
    stopped = job.word()
    assert (stopped["state"], stopped["attempt"]) == ("stopped", 1)
    assert 1 <= stopped["saved_step"] == stopped["step"] < STEPS
    assert "the end of its lease" in job.log()

    second = job.start(2, 1, *MODEL)
    assert job.exit_code(second) == 0, job.log()
    assert {key: job.word()[key] for key in ("state", "step", "saved_step", "attempt")} == {
        "state": "done",
        "step": STEPS,
        "saved_step": STEPS,
        "attempt": 2,
    }
    narrow, wide = sorted(results(job.folder), key=lambda found: len(found["devices"]))
    assert (len(narrow["devices"]), len(wide["devices"])) == (1, 2)
    assert len(wide["losses"]) == stopped["step"]
    assert len(wide["losses"]) + len(narrow["losses"]) == STEPS
    assert narrow["losses"][-1] < wide["losses"][0]

    # Whoever is killed between its last checkpoint and its last word has nothing left to do.
    third = job.start(3, 2, *MODEL)
    assert job.exit_code(third) == 0, job.log()
    assert (job.word()["state"], job.word()["attempt"]) == ("done", 3)
    assert len(results(job.folder)) == 2


def test_a_grant_of_two_hosts_is_planned_by_the_first_and_goes_on_with_the_next_grant(
    tmp_path: Path, commands: Any
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    home = tmp_path / "job-1"
    home.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    job = {
        "PARTITA_LEASE": str(home),
        "PARTITA_STEPS": "4",
        "PARTITA_CHECKPOINT": str(tmp_path / "kept"),
    }

    def start(number: int, *gpus: int) -> list[str]:
        """Start it on hosts with so many GPUs each; returns what each printed."""
        grant = {
            "PARTITA_ATTEMPT": str(number),
            "PARTITA_GPUS": str(sum(gpus)),
            "PARTITA_SERVERS": ",".join(f"n{k}" for k in range(len(gpus))),
            "PARTITA_SERVER_GPUS": ",".join(map(str, gpus)),
        }
        meeting = {"NNODES": str(len(gpus)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        hosts = [
            commands.start(
                *MODEL,
                folder=tmp_path,
                environment={**job, **grant, **meeting, "NODE_RANK": str(host)},
            )
            for host in range(len(gpus))
        ]
        said = ["".join(host.communicate(timeout=90)) for host in hosts]
        assert [host.returncode for host in hosts] == [0] * len(hosts), said
        return said

    write_json(home / "lease.json", {"attempt": 1, "stop": True})  # a step is made all the same
    first, second = start(1, 1, 1)
    word = read_json(home / PROGRESS)
    assert (word["state"], word["attempt"]) == ("stopped", 1)
    assert 1 <= word["saved_step"] == word["step"] < 4
    assert "profiling" in first
    assert "waiting for the plan of host 0 (n0)" in second
    assert "profiling" not in second
    write_json(home / "lease.json", {"attempt": 2})
    start(2, 1)
    last = read_json(home / PROGRESS)
    assert (last["state"], last["step"], last["attempt"]) == ("done", 4, 2)
    narrow, wide = sorted(results(tmp_path), key=lambda found: len(found["devices"]))
    assert wide["devices"] == ["host0/cpu0", "host1/cpu0"]
    assert len(narrow["devices"]) == 1
    assert (len(wide["losses"]), len(narrow["losses"])) == (word["step"], 4 - word["step"])
