"""Runs on other hosts: an agent on each, started by a stand-in for ssh."""

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.integration.conftest import MODEL

from partita.catalogue.shorthand import cpu_hosts
from partita.core.graph import Graph
from partita.core.problem import Metric, Objective, Problem
from partita.core.solution import Solution
from partita.documents import save
from partita.testing.builders import pipeline
from partita.testing.ray import PrivateRay
from partita.testing.slurm import PrivateSlurm

pytestmark = pytest.mark.slow

STAND_IN = Path(__file__).with_name("stand_in_ssh.py")
LIMIT_S = 240.0
HOSTS = {"gpu2": 3, "gpu10": 1}
"""Hosts of the plan and their ranks: as texts the second name comes first."""
NODES = {"n3": 3, "n1": 1}
"""The same for nodes of Slurm."""
RAYLETS = {"r2": 3, "r1": 1}
"""The same for nodes of Ray."""
FEWER_NODES, FEWER_RAYLETS = {"n3": 1, "n1": 1}, {"r2": 2, "r1": 1}
"""For runs that only end: Slurm and Ray start every rank as a fresh process."""
SCRIPT = """
import os
import partita
from partita.capture.sources import SourceOptions, load_source

options = SourceOptions(batch_size=2, sequence_length=8, scale=0.05, dtype="float64")
source = load_source("gpt3-small", options)
trainer = partita.parallelize(source.model, source.loss, optimizer="sgd")
batch = source.example(8)
while True:
    loss = trainer.step((batch.kwargs or batch.args, batch.labels))
    print("on", os.environ["STAND_IN_HOST"], flush=True)
"""


class Place(NamedTuple):
    """Where the commands run."""

    commands: Any
    folder: Path

    @property
    def on(self) -> tuple[str, ...]:
        """Options by which a run is on the hosts of the file ``hosts``."""
        command = shlex.join([sys.executable, str(STAND_IN), str(self.folder)])
        return ("--on", "ssh:hosts", "--ssh-command", command)

    def partita(self, *arguments: str, code: int = 0, **environment: str) -> tuple[str, str]:
        """Run a command; returns what it printed."""
        done = self.commands.run(*arguments, folder=self.folder, timeout_s=LIMIT_S, **environment)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout, done.stderr


@pytest.fixture(scope="module")
def place(commands: Any, small_graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("hosts")
    graph = MODEL.recorded_in(small_graph)
    plans = {"plan": HOSTS, "slurm": NODES, "ray": RAYLETS}
    plans |= {"fewer-slurm": FEWER_NODES, "fewer-ray": FEWER_RAYLETS}
    for name, hosts in plans.items():
        cluster = cpu_hosts(hosts)
        problem = Problem(graph=graph, cluster=cluster, objective=Objective())
        plan = pipeline(graph, cluster, list(range(sum(hosts.values()))), microbatches=4)
        solution = Solution(
            problem=problem, plan=plan, metric=Metric.THROUGHPUT, value=1.0, unit="s"
        )
        save(solution, folder / f"{name}.json")
    (folder / "hosts").write_text("gpu10 slots=1\ngpu2:3  # the first host of the plan\n")
    return Place(commands, folder)


def agents(place: Place) -> list[int]:
    return [int((place.folder / name).read_text()) for name in HOSTS]


def below(pid: int) -> list[int]:
    """Return the processes that one has started, and those that these have, forked or fresh."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = list(children.get(pid, ()))
    for child in found:  # grows while it is walked
        found += children.get(child, ())
    return found


def of_run(runs: str) -> list[int]:
    """Return the processes of a run: variables of that kind go to all its fresh ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"PARTITA_TEST_RUN={runs}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def await_that(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_detached_run_on_uneven_hosts_equals_one_process_and_is_followed(place: Place) -> None:
    found, _ = place.partita(
        *("run", "plan.json", *place.on, "--steps", "3", "--check", "--detach", "--json"), FRESH="1"
    )
    directory = Path(json.loads(found)["directory"])
    shown, told = place.partita("results", "--follow", str(directory))
    assert "equal" in shown
    assert "gpu2 (ranks 0, 1, 2) runs" in told
    assert "gpu10 (rank 3) runs" in told
    assert "run: step 3  loss" in told
    results = json.loads((directory / "results.json").read_text())
    assert results["check"]["equal"]
    assert results["check"]["module"]["equal"]
    assert (directory / "timeline.json").exists()
    assert (directory / "trace.json").exists()
    assert sorted(path.name for path in (directory / "logs").glob("*")) == [
        f"rank{rank}.log" for rank in range(4)
    ]
    hosts = json.loads((directory / "hosts.json").read_text())
    assert [(row["name"], row["ranks"], row["outcome"]) for row in hosts] == [
        ("gpu2", [0, 1, 2], "ended"),
        ("gpu10", [3], "ended"),
    ]
    await_that(lambda: not any(map(is_running, agents(place))))
    assert "has ended already: ended" in place.partita("results", "--cancel", code=2)[1]


def start(place: Place, runs: str, *arguments: str, **environment: str) -> Any:
    """Start a run, and wait until all ranks have done a step."""
    driver = place.commands.start(
        *("run", "--runs", runs, *arguments),
        folder=place.folder,
        environment={"PARTITA_TEST_RUN": runs, **environment},
    )

    def has_begun() -> bool:
        assert driver.poll() is None, driver.communicate(0)[1]
        return any(path.stat().st_size for path in place.folder.glob(f"{runs}/*/metrics.jsonl"))

    await_that(has_begun)
    return driver


def test_a_host_that_is_killed_is_named_with_its_rank_and_leaves_no_process(place: Place) -> None:
    driver = start(place, "killed", "plan.json", *place.on, "--steps", "100000")
    started = below(driver.pid)
    assert len(started) == 2 + 2 + 4  # what stands for ssh, agents and ranks
    os.kill(agents(place)[1], signal.SIGKILL)
    _, told = driver.communicate(LIMIT_S)
    assert driver.returncode == 5, told
    assert "host gpu10 (rank 3) went away: " in told
    assert "nothing was saved: --save-every saves" in told
    assert not any(map(is_running, started))
    (directory,) = (place.folder / "killed").iterdir()
    state = json.loads((directory / "state.json").read_text())
    assert state["progress"] == "failed"
    assert "gpu10 (rank 3)" in state["error"]


def test_a_script_runs_where_the_plan_says_and_ctrl_c_ends_all_of_it(place: Place) -> None:
    (place.folder / "own.py").write_text(SCRIPT)
    driver = start(place, "stopped", "plan.json", *place.on, "--", "own.py")
    started = below(driver.pid)
    assert len(started) == 2 + 2 + 4
    driver.send_signal(signal.SIGINT)
    _, told = driver.communicate(LIMIT_S)
    assert driver.returncode == 130, told
    assert not any(map(is_running, started))
    (directory,) = (place.folder / "stopped").iterdir()
    assert json.loads((directory / "state.json").read_text())["progress"] == "cancelled"
    for rank, host in enumerate(("gpu2", "gpu2", "gpu2", "gpu10")):
        log = (directory / "logs" / f"rank{rank}.log").read_text()
        assert set(log.splitlines()) == {f"on {host}"}
        assert f"rank {rank}: on {host}" in told


def test_a_host_that_cannot_be_reached_is_named(place: Place) -> None:
    (place.folder / "none").write_text("node10 slots=3\nnowhere\n")
    options = ("--on", "ssh:none", *place.on[2:])
    _, told = place.partita("run", "plan.json", *options, code=4)
    assert "no agent can be started on host no" in told
    assert "Connection refused" in told


def check_uneven(place: Place, plan: str, on: str, nodes: dict[str, int], **settings: str) -> None:
    """Run a plan on uneven hosts, and check that it equals one process and ran where it says."""
    found, _ = place.partita(
        *("run", plan, "--on", on, "--steps", "2", "--check", "--json"), **settings
    )
    results = json.loads(found)
    assert results["check"]["equal"]
    assert results["check"]["module"]["equal"]
    hosts = json.loads((place.folder / results["directory"] / "hosts.json").read_text())
    first, second = nodes
    assert [(row["name"], row["ranks"]) for row in hosts] == [(first, [0, 1, 2]), (second, [3])]


@pytest.mark.root
def test_a_plan_on_uneven_nodes_of_slurm_equals_one_process(
    place: Place, slurm: PrivateSlurm
) -> None:
    check_uneven(place, "slurm.json", "slurm", NODES, **slurm.environment)
    assert "partita" not in slurm.call("squeue", "-h", "-o", "%j")


def test_a_plan_on_uneven_nodes_of_ray_equals_one_process(place: Place, ray: PrivateRay) -> None:
    check_uneven(place, "ray.json", f"ray:{ray.address}", RAYLETS)


def test_a_node_of_ray_that_is_killed_is_named_and_leaves_no_process(
    place: Place, ray: PrivateRay
) -> None:
    on = ("--on", f"ray:{ray.address}", "--steps", "100000")
    driver = start(place, "raylet", "fewer-ray.json", *on)
    assert len(of_run("raylet")) == 3
    ray.kill_node("r2")
    try:
        _, told = driver.communicate(LIMIT_S)
        assert driver.returncode == 5, told
        assert "host r2 (ranks 0, 1) went away: " in told
        await_that(lambda: not of_run("raylet"))
    finally:
        ray.start_node("r2")
        ray.wait_for_nodes()


@pytest.mark.root
def test_a_node_of_slurm_that_is_killed_is_named_and_leaves_no_process(
    place: Place, slurm: PrivateSlurm
) -> None:
    driver = start(
        *(place, "node", "fewer-slurm.json", "--on", "slurm", "--steps", "100000"),
        **slurm.environment,
    )
    assert len(of_run("node")) > 2
    slurm.kill_node("n1")
    try:
        _, told = driver.communicate(LIMIT_S)
        assert driver.returncode == 5, told
        assert "host n1 (rank 1) went away: " in told
        await_that(lambda: not of_run("node"))
    finally:
        slurm.start_node("n1")
        slurm.wait_for_nodes()
    assert "partita" not in slurm.call("squeue", "-h", "-o", "%j")


def test_simulations_on_a_ray_are_those_of_this_process(place: Place, ray: PrivateRay) -> None:
    study = ("fleet", "simulate", "generated:jobs=20", "-c", "2x8xv100", "--loads", "4,8", "--json")
    here, _ = place.partita(*study)
    there, _ = place.partita(*study, "--workers", f"ray:{ray.address}")
    assert json.loads(there) == json.loads(here)
