"""The Ray engine on two raylets of fake GPUs."""

import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from partita.fleet.engines.protocol import Cause, Place
from partita.fleet.engines.ray import RayEngine, RayOptions, ray_servers
from partita.testing.engine_jobs import MINE, Start, ended, runs, started_jobs, until
from partita.testing.ray import PrivateRay

pytestmark = pytest.mark.slow


@pytest.fixture
def engine(ray: PrivateRay) -> RayEngine:
    options = RayOptions(address=ray.dashboard, python=sys.executable, every=0.2)
    return RayEngine(ray_servers({"address": ray.dashboard}), options)


def place(server: str, gpus: int = 1) -> Place:
    return Place(server=server, gpus=tuple(range(gpus)), cpu_ids=(), cpus=1.5, memory_bytes=1e9)


@pytest.fixture
def start(engine: RayEngine, tmp_path: Path) -> Iterator[Start]:
    """Start shell commands as jobs of one fleet; all are stopped in the end."""
    with started_jobs(engine, tmp_path, partial(engine.stop, grace_s=0)) as begin:
        yield begin


def test_servers_are_the_nodes_of_the_cluster(engine: RayEngine) -> None:
    assert engine.servers.names == ("r1", "r2")
    assert engine.servers.gpus.tolist() == [4, 4]


def test_jobs_from_start_to_end_are_placed_stopped_and_told(
    ray: PrivateRay, engine: RayEngine, start: Start, tmp_path: Path
) -> None:
    failing = start(
        'echo "$CUDA_VISIBLE_DEVICES $MINE $PARTITA_GPUS"; sleep 5; exit 3', [place("r2", 2)]
    )
    command = (
        "trap 'echo asked $NODE_RANK; exit 0' TERM; "
        'echo "rank $NODE_RANK of $NNODES at $MASTER_ADDR"; while :; do sleep 0.1; done'
    )
    wide = start(command, [place("r2"), place("r1", 3)])
    status = until(engine, failing, runs)
    (given,) = status.given or ()
    assert (given.server, len(given.gpus), given.cpus) == ("r2", 2, 1.5)
    status = until(engine, wide, runs)
    assert [(one.server, len(one.gpus)) for one in status.given or ()] == [("r2", 1), ("r1", 3)]
    assert not set((status.given or ())[0].gpus) & set(given.gpus)
    status = until(engine, failing, ended)
    assert (status.exit_code, status.cause) == (3, Cause.ITSELF)
    shown = ",".join(map(str, given.gpus))
    assert (tmp_path / "job-1/log.txt").read_text() == f"{shown} {MINE} 2\n"
    other = RayEngine(engine.servers, engine.options)
    assert list(other.running(wide.handle["fleet"])) == [wide.attempt]
    engine.stop(wide.handle, grace_s=math.inf)
    assert until(engine, wide, ended).why == "stopped in Ray, outside of the fleet"
    lines = (tmp_path / "job-2/log.txt").read_text().splitlines()
    assert sorted(line for line in lines if line.startswith("asked")) == ["asked 0", "asked 1"]
    assert sum(line.startswith(("rank 0 of 2", "rank 1 of 2")) for line in lines) == 2


def test_the_death_of_a_worker_is_told_from_that_of_its_node(
    ray: PrivateRay, engine: RayEngine, start: Start
) -> None:
    on_first = start("kill -9 $PPID; sleep 600", [place("r1")])
    on_second = start("sleep 600", [place("r2")])
    until(engine, on_second, runs)
    until(engine, on_first, ended)  # its driver may be tied to the other raylet
    ray.kill_node("r2")
    try:
        status = until(engine, on_second, ended)
        assert (status.cause, status.why) == (Cause.ENGINE, "node r2 died")
        assert engine.look(dict([on_first, on_second])).away == {"r2": "Ray lost it"}
        status = until(engine, on_first, ended)
        assert status.cause is Cause.ITSELF
        assert status.why.startswith("the worker on r1 died")
    finally:
        ray.start_node("r2")
        ray.wait_for_nodes()
