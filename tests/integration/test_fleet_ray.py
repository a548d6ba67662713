"""The Ray engine on two raylets of fake GPUs."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from partita.fleet.engines.protocol import Attempt, Cause, Handle, Order, Place, Status
from partita.fleet.engines.ray import RayEngine, RayOptions, ray_servers
from partita.testing.ray import PrivateRay

pytestmark = pytest.mark.slow

Start = Callable[..., tuple[Attempt, Handle]]


@pytest.fixture
def engine(ray: PrivateRay) -> RayEngine:
    options = RayOptions(address=ray.dashboard, python=sys.executable, every=0.2)
    return RayEngine(ray_servers({"address": ray.dashboard}), options)


def place(server: str, gpus: int = 1) -> Place:
    return Place(server=server, gpus=tuple(range(gpus)), cpu_ids=(), cpus=1.5, memory_bytes=1e9)


@pytest.fixture
def start(engine: RayEngine, tmp_path: Path) -> Iterator[Start]:
    """Start shell commands as jobs of one fleet; all are stopped in the end."""
    fleet = f"test{os.getpid()}{time.monotonic_ns()}"
    handles: list[Handle] = []

    def begin(command: str, places: Sequence[Place]) -> tuple[Attempt, Handle]:
        attempt = Attempt(len(handles) + 1, 1)
        home = tmp_path / f"job-{attempt.job}"
        home.mkdir()
        order = Order(
            fleet=fleet,
            attempt=attempt,
            command=("sh", "-c", command),
            folder=tmp_path,
            directory=home,
            environment={"MINE": "yes"},
            places=tuple(places),
            grace_s=20.0,
        )
        handles.append(engine.start(order))
        return attempt, handles[-1]

    yield begin
    for handle in handles:
        engine.stop(handle, grace_s=0)


def until(
    engine: RayEngine, handles: dict[Attempt, Handle], attempt: Attempt, done: Callable
) -> Status:
    last_s = time.monotonic() + 120
    while True:
        look = engine.look(handles)
        status = look.statuses.get(attempt)
        if status is not None and done(status):
            return status
        assert time.monotonic() < last_s, (look, status)
        time.sleep(0.2)


def runs(status: Status) -> bool:
    return status.running and status.given is not None


def ended(status: Status) -> bool:
    return not status.running


def test_servers_are_the_nodes_of_the_cluster(engine: RayEngine) -> None:
    assert engine.servers.names == ("r1", "r2")
    assert engine.servers.gpus.tolist() == [4, 4]


def test_jobs_from_start_to_end_are_placed_stopped_and_told(
    ray: PrivateRay, engine: RayEngine, start: Start, tmp_path: Path
) -> None:
    failing, failed = start(
        'echo "$CUDA_VISIBLE_DEVICES $MINE $PARTITA_GPUS"; sleep 5; exit 3', [place("r2", 2)]
    )
    command = (
        "trap 'echo asked $NODE_RANK; exit 0' TERM; "
        'echo "rank $NODE_RANK of $NNODES at $MASTER_ADDR"; while :; do sleep 0.1; done'
    )
    wide, wider = start(command, [place("r2"), place("r1", 3)])
    handles = {failing: failed, wide: wider}
    status = until(engine, handles, failing, runs)
    (given,) = status.given or ()
    assert (given.server, len(given.gpus), given.cpus) == ("r2", 2, 1.5)
    status = until(engine, handles, wide, runs)
    assert [(one.server, len(one.gpus)) for one in status.given or ()] == [("r2", 1), ("r1", 3)]
    assert not set((status.given or ())[0].gpus) & set(given.gpus)
    status = until(engine, handles, failing, ended)
    assert (status.exit_code, status.cause) == (3, Cause.ITSELF)
    shown = ",".join(map(str, given.gpus))
    assert (tmp_path / "job-1/log.txt").read_text() == f"{shown} yes 2\n"
    other = RayEngine(engine.servers, engine.options)
    assert list(other.running(wider["fleet"])) == [wide]
    engine.stop(wider, grace_s=math.inf)
    assert until(engine, handles, wide, ended).why == "stopped in Ray, outside of the fleet"
    lines = (tmp_path / "job-2/log.txt").read_text().splitlines()
    assert sorted(line for line in lines if line.startswith("asked")) == ["asked 0", "asked 1"]
    assert sum(line.startswith(("rank 0 of 2", "rank 1 of 2")) for line in lines) == 2


def test_the_death_of_a_worker_is_told_from_that_of_its_node(
    ray: PrivateRay, engine: RayEngine, start: Start
) -> None:
    on_first, first = start("kill -9 $PPID; sleep 600", [place("r1")])
    on_second, second = start("sleep 600", [place("r2")])
    handles = {on_first: first, on_second: second}
    until(engine, handles, on_second, runs)
    until(engine, handles, on_first, ended)  # its driver may be tied to the other raylet
    ray.kill_node("r2")
    try:
        status = until(engine, handles, on_second, ended)
        assert (status.cause, status.why) == (Cause.ENGINE, "node r2 died")
        assert engine.look(handles).away == {"r2": "Ray lost it"}
        status = until(engine, handles, on_first, ended)
        assert status.cause is Cause.ITSELF
        assert status.why.startswith("the worker on r1 died")
    finally:
        ray.start_node("r2")
        ray.wait_for_nodes()
