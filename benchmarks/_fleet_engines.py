"""Clusters of fake GPUs on this machine, and what to do to them, for the benchmark of engines."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from _fleet_live import CPUS, GPUS, MEMORY_BYTES

from partita.http import ServerLink
from partita.slurm.jobs import Phase, read_jobs
from partita.testing.ray import FakeRayNode, PrivateRay, private_ray
from partita.testing.slurm import FakeNode, PrivateSlurm, private_slurm

Held = Mapping[str, list[tuple[str, int, int]]]
"""By name of a job: node, GPUs and CPUs."""


@dataclass(frozen=True)
class Cluster:
    """A cluster on which an engine runs jobs.

    Attributes:
        engine: Name of the engine.
        names: Names of its nodes.
        more: Options of ``partita fleet serve``.
        environment: Variables that its commands need.
        held: What it has given to the jobs that run now, by its own word.
        left: Names of jobs that it still runs or queues.
        faults: What happens to it meanwhile, in turn, with the words for it; each returns whether
            the cluster felt it.
        cancel: Ends a job as somebody outside of the fleet does.
        hold: Puts so many jobs of others into its queue, held, and returns how many it knows.
    """

    engine: str
    names: tuple[str, ...]
    more: tuple[str, ...]
    environment: Mapping[str, str]
    held: Callable[[], Held]
    left: Callable[[], list[str]]
    faults: tuple[tuple[str, Callable[[], bool]], ...]
    cancel: Callable[[str], None]
    hold: Callable[[int], int] = lambda count: 0 * count


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Yield a real slurmctld with four slurmd."""
    memory = MEMORY_BYTES // 2**20 + 1
    nodes = [FakeNode(name=f"n{n}", gpus=GPUS, cpus=CPUS, memory_mb=memory) for n in range(1, 5)]
    with private_slurm(folder, nodes) as slurm:
        yield Cluster(
            engine="slurm",
            names=tuple(node.name for node in nodes),
            more=("--engine", "slurm", "--cluster", "slurm", "--engine-option", "every=0.3"),
            environment=slurm.environment,
            held=lambda: _slurm_held(slurm),
            left=lambda: [name for name in _slurm_names(slurm) if name.startswith("partita-")],
            faults=(
                ("slurmd of n2 killed and started again", lambda: _lose_node(slurm, "n2")),
                ("slurmctld restarted", lambda: _restart(slurm)),
            ),
            cancel=lambda name: _cancel(slurm, name),
            hold=lambda count: _hold(slurm, count),
        )


def _jobs(slurm: PrivateSlurm):
    return read_jobs(slurm.call("scontrol", "show", "job", "--details", "--oneliner", check=False))


def _slurm_held(slurm: PrivateSlurm) -> Held:
    return {
        job.name: [(held.node, len(held.gpus), held.cpus) for held in job.held]
        for job in _jobs(slurm)
        if job.phase is Phase.RUNNING and job.held and "COMPLETING" not in job.states
    }


def _slurm_names(slurm: PrivateSlurm) -> list[str]:
    return [job.name for job in _jobs(slurm) if job.phase is not Phase.ENDED]


def _lose_node(slurm: PrivateSlurm, name: str) -> bool:
    slurm.kill_node(name)
    is_lost = _becomes(lambda: slurm.node_states()[name] in ("down", "down*"))
    slurm.start_node(name)
    return is_lost


def _restart(slurm: PrivateSlurm) -> bool:
    slurm.stop_controller()
    time.sleep(1)
    slurm.start_controller()
    return True  # it waits until the controller answers


def _becomes(happens: Callable[[], bool]) -> bool:
    """Return whether something is seen within a minute."""
    last_s = time.monotonic() + 60
    while time.monotonic() < last_s:
        if happens():
            return True
        time.sleep(0.2)
    return False


def _hold(slurm: PrivateSlurm, count: int) -> int:
    for number in range(count):
        slurm.call(
            "sbatch", "--hold", f"--job-name=other-{number}", "--wrap=true", "--output=/dev/null"
        )
    return len(_slurm_names(slurm))


def _cancel(slurm: PrivateSlurm, name: str) -> None:
    slurm.call("scancel", f"--name={name}")


@contextmanager
def ray_cluster(folder: Path) -> Iterator[Cluster]:
    """Yield a real Ray with two raylets."""
    del folder  # Ray wants a short path of its own
    memory = MEMORY_BYTES
    nodes = [
        FakeRayNode(name=f"r{n}", gpus=GPUS, cpus=CPUS, memory_bytes=memory, resources={"v100": 4})
        for n in (1, 2)
    ]
    with private_ray(nodes) as ray:
        link = ServerLink(ray.dashboard, noun="ray", token="", timeout_s=60, keeps_open=False)
        options = (f"address={ray.dashboard}", f"python={sys.executable}", "every=0.5")
        yield Cluster(
            engine="ray",
            names=tuple(node.name for node in nodes),
            more=(
                *("--engine", "ray", "--cluster", "ray"),
                *(word for option in options for word in ("--engine-option", option)),
            ),
            environment={},
            held=lambda: _ray_held(link),
            left=lambda: _ray_names(link),
            faults=(("raylet of r2 killed and started again", lambda: _lose_raylet(ray, "r2")),),
            cancel=lambda name: link.post(f"/api/jobs/{name}/stop", {}),
        )
        link.close()


def _ray_held(link: ServerLink) -> Held:
    """Return the bundles of placement groups, by the name of their job."""
    nodes = link.get("/api/v0/nodes", {"limit": 1000})["data"]["result"]["result"]
    names = {node["node_id"]: node["node_name"] for node in nodes}
    query = {"limit": 10000, "detail": "true"}
    groups = link.get("/api/v0/placement_groups", query)["data"]["result"]["result"]
    return {
        group["name"]: [
            (
                names.get(bundle["node_id"], ""),
                int(bundle["unit_resources"].get("GPU", 0)),
                bundle["unit_resources"].get("CPU", 0),
            )
            for bundle in group["bundles"]
        ]
        for group in groups
        if group["state"] == "CREATED"
    }


def _ray_names(link: ServerLink) -> list[str]:
    jobs = link.get("/api/jobs/")
    names = [str(job["submission_id"]) for job in jobs if job["status"] in ("PENDING", "RUNNING")]
    return [name for name in names if name.startswith("partita-")]


def _lose_raylet(ray: PrivateRay, name: str) -> bool:
    ray.kill_node(name)
    is_lost = _becomes(lambda: ray.living_nodes() < len(ray.nodes))
    ray.start_node(name)
    ray.wait_for_nodes()
    return is_lost
