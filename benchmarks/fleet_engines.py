"""A fleet on real engines with fake GPUs: Slurm (slurmctld, four slurmd) and Ray (two raylets).

* 12 jobs whose loading work is metered to their CPU grant (EMULATED) under ``fifo:tune``: every one
  finishes once, grants are what the engine says it gave, and completion times, each job's and their
  mean, are held against the simulator's for the same arrivals, with the cost of a start that was
  measured on the engine.
* The same jobs while the scheduler is killed five times, a node is killed and comes back, and the
  controller is restarted: nothing is lost, doubled or left behind. One more job is cancelled in the
  engine by hand, and told as such.
* 200 jobs in the queue of a fleet on Slurm, which holds 200 jobs of others besides: CPU time and
  calls of Slurm's commands per look.

Engines that are not here are named and left out; each is missed, which ``--check`` does not let
pass.
"""

import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from _fleet_engines import Cluster, ray_cluster, slurm_cluster
from _fleet_live import (
    AWAY_S,
    Plan,
    Server,
    Submitting,
    check_segments,
    checkpoint_of,
    compared,
    declared,
    epoch_of,
    fleet_name,
    left_over,
    metered_jobs,
    wait_for_all,
)
from _harness import run_groups

from partita.core.fleet import Sensitivity
from partita.fleet.engines.slurm import SlurmEngine, SlurmOptions
from partita.fleet.live.fleet import Fleet
from partita.fleet.live.jobspec import GpuChoice, JobSpec, Progress
from partita.fleet.live.scheduler import FleetSettings
from partita.slurm.commands import SlurmCommands
from partita.testing.ray import why_no_ray
from partita.testing.slurm import why_no_slurm

LIMIT = 0.20
KILLS = 5
QUEUED = 200
MOST_CALLS = 3
JOBS = Plan(
    jobs=12,
    policy="fifo:tune",
    round_s=4.0,
    restart_s=1.0,
    seconds=(10.0, 24.0),
    span_s=12.0,
    gpus=(1, 1, 2, 4),
    sleeps_start=False,
)

# A start on Ray takes some seconds: a driver and a worker come up, each of which imports Ray.
PLANS = {
    "slurm": JOBS,
    "ray": replace(JOBS, round_s=12.0, restart_s=5.0, seconds=(20.0, 40.0), gpus=(1, 1, 2)),
}


def serve(cluster: Cluster, plan: Plan, folder: Path) -> Server:
    """Return a server of a fleet on a cluster."""
    os.environ.update(cluster.environment)
    server = Server(plan, folder, more=cluster.more)
    server.start()
    return server


def watch_grants(cluster: Cluster, server: Server, fleet: str) -> tuple[int, list[str]]:
    """Return how many running jobs were compared, and where fleet and engine differ."""
    before = cluster.held()
    time.sleep(0.7)
    rows = server.client.jobs()
    after = cluster.held()
    checked, wrong = 0, []
    for row in rows:
        name = f"partita-{fleet}-{row['id']}-{row['attempts']}"
        if row["state"] != "running" or name not in before or before[name] != after.get(name):
            continue  # it has just started or ended
        ours = [(p["server"], len(p["gpus"]), p["cpus"]) for p in row["places"]]
        checked += 1
        if sorted(ours) != sorted(before[name]):
            wrong.append(f"{name}: fleet {ours}, engine {before[name]}")
    return checked, wrong


def against_simulator(cluster: Cluster, plan: Plan, folder: Path) -> dict[str, Any]:
    """Return completion times, live against simulated, and whether grants were real."""
    jobs = metered_jobs(plan, folder)
    server = serve(cluster, plan, folder)
    checked, wrong = 0, []
    try:
        submitting = Submitting(server.client, jobs)
        last_s = time.monotonic() + 400
        while time.monotonic() < last_s:
            found, differ = watch_grants(cluster, server, fleet_name(folder))
            checked, wrong = checked + found, [*wrong, *differ]
            if submitting.is_over() and not server.client.jobs():
                break
        rows = wait_for_all(server.client, len(jobs), 10)
        specs = [spec for _, spec in jobs]
        start_s, end_s = start_and_end_s(server, specs, rows)
        measured = replace(plan, restart_s=start_s + end_s)
        # On a machine so busy that a start takes a round there is nothing to compare with.
        too_slow = {"mean_error": math.inf, "worst_error": math.inf}
        is_slow = measured.restart_s >= plan.round_s
        return {
            **(too_slow if is_slow else compared(measured, specs, rows, epoch_of(folder))),
            "measured_start_s": start_s,
            "measured_end_s": end_s,
            "finished": sum(row["state"] == "finished" for row in rows),
            "grants_compared": checked,
            "grants_wrong": wrong,
            "left": cluster.left(),
        }
    finally:
        server.end()


def start_and_end_s(
    server: Server, specs: list[JobSpec], rows: list[dict[str, Any]]
) -> tuple[float, float]:
    """Return what a start costs, from the fleet's order to the loop, and an end, back again."""
    by_name = {spec.name: spec for spec in specs}
    starts, ends = [], []
    for row in rows:
        segments = checkpoint_of(by_name[row["name"]])["segments"]
        attempts = server.client.status(row["id"])["attempt_list"]
        if len(segments) != len(attempts):
            continue  # one of them never got as far as a checkpoint
        for segment, attempt in zip(segments, attempts, strict=True):
            starts.append(segment[2] - attempt["started_s"])
            ends.append(attempt["ended_s"] - segment[3])
    return sum(starts) / len(starts), max(0.0, sum(ends) / len(ends))


def under_faults(cluster: Cluster, plan: Plan, folder: Path) -> dict[str, Any]:
    """Return what became of jobs while scheduler, nodes and controller failed."""
    rng = random.Random(plan.seed)
    jobs = metered_jobs(plan, folder)
    victim = replace(jobs[0][1], name="victim", steps=10**6, checkpoint=folder / "victim")
    server, kills, done = serve(cluster, plan, folder), 0, []
    try:
        number = server.client.submit(victim)
        submitting = Submitting(server.client, jobs)
        faults = list(cluster.faults)
        time.sleep(1.5 * plan.round_s)
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.3, 1.0) * plan.round_s)
            server.kill()
            kills += 1
            if faults:
                words, happens = faults.pop(0)
                done += [words] if happens() else []
            server.start()
        attempts = _until_running(server, number)
        cluster.cancel(f"partita-{fleet_name(folder)}-{number}-{attempts}")
        submitting.wait(AWAY_S)
        rows = wait_for_all(server.client, len(jobs) + 1, 300)
        told = next(row for row in rows if row["id"] == number)
        others = [row for row in rows if row["id"] != number]
        finishes = Counter(
            row["id"]
            for row in others
            for event in server.client.status(row["id"])["events"]
            if event["what"].startswith("finished")
        )
        return {
            "jobs": len(others),
            "finished": sum(row["state"] == "finished" for row in others),
            "finished_once": sum(count == 1 for count in finishes.values()),
            "scheduler_kills": kills,
            "faults": done,
            "faults_missing": [words for words, _ in cluster.faults if words not in done],
            "starts": sum(row["attempts"] for row in others),
            "wrong": [text for _, spec in jobs for text in check_segments(spec)],
            "cancelled_by_hand": f"{told['state']}: {told['note']}",
            "left": cluster.left(),
            "processes_left": _processes_left(folder),
        }
    finally:
        server.end()


def _processes_left(folder: Path) -> int:
    """Return how many processes of jobs do not end within the time in which ended ones go."""
    last_s = time.monotonic() + 20
    while left_over(folder) and time.monotonic() < last_s:
        time.sleep(0.3)
    return len(left_over(folder))


def _until_running(server: Server, number: int) -> int:
    last_s = time.monotonic() + 120
    while time.monotonic() < last_s:
        found = server.client.status(number)
        if found["state"] == "running" and found["read_back"]:
            return int(found["attempts"])
        time.sleep(0.3)
    raise RuntimeError(f"job {number} does not run: {found['state']} {found['note']}")


def long_queue(cluster: Cluster, folder: Path) -> dict[str, Any]:
    """Return CPU time and calls of one look at a long queue of a fleet on Slurm."""
    known = cluster.hold(QUEUED)
    servers = declared(cluster.names)
    commands = SlurmCommands(cluster.environment)
    engine = SlurmEngine(servers, SlurmOptions(every=0.0), commands=commands)
    settings = FleetSettings(state=folder / "queue.sqlite", round_s=5.0)
    fleet = Fleet(settings, servers, "fifo:tune", engine)
    curve = Sensitivity(name="flat", iteration_s=1.0, cpus=[1.0], memory_bytes=[1e9], speed=[1.0])
    spec = JobSpec(
        name="sleeper",
        command=("sleep", "600"),
        folder=folder,
        gpus=(GpuChoice(least=1, most=1),),
        steps=600,
        progress=Progress.NONE,
        sensitivity=curve,
        grace_s=1.0,
    )
    try:
        for _ in range(QUEUED):
            fleet.submit(spec)
        fleet.scheduler.poll(time.time())
        running = sum(row["state"] == "running" for row in fleet.jobs())
        looks, rounds = [], []
        begin_s = time.time()
        for number in range(12):
            # Every second look begins a round.
            now_s = begin_s + (number // 2) * settings.round_s + 0.1
            calls, cpu_s = commands.calls, time.process_time()
            fleet.scheduler.poll(now_s)
            kept = rounds if number % 2 == 0 else looks
            kept.append((commands.calls - calls, time.process_time() - cpu_s))
        return {
            "queued": len(fleet.jobs()),
            "known_to_slurm": known,
            "running": running,
            "calls_per_round": max(calls for calls, _ in [*rounds, *looks]),
            "cpu_s_per_round": sorted(cpu for _, cpu in rounds)[len(rounds) // 2],
            "cpu_s_per_look": sorted(cpu for _, cpu in looks)[len(looks) // 2],
        }
    finally:
        for row in fleet.store.attempts(open_only=True):
            engine.stop(row.handle, grace_s=0)
        fleet.close()


PARTS: dict[str, Callable[[Cluster, Path], dict[str, Any]]] = {
    "simulator": lambda cluster, folder: against_simulator(cluster, _plan(cluster), folder),
    "faults": lambda cluster, folder: under_faults(cluster, _plan(cluster), folder),
    "queue": long_queue,
}
ENGINES = {"slurm": (why_no_slurm, slurm_cluster), "ray": (why_no_ray, ray_cluster)}
GROUPS = ("slurm_simulator", "slurm_faults", "slurm_queue", "ray_simulator", "ray_faults")


def _plan(cluster: Cluster) -> Plan:
    return replace(PLANS[cluster.engine], servers=cluster.names)


def measure(groups: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the figures and what is missed."""
    figures: dict[str, Any] = {}
    missed: list[str] = []
    for engine, (why_not, make) in ENGINES.items():
        parts = [name.partition("_")[2] for name in groups if name.startswith(engine)]
        why = why_not() if parts else ""
        if why:
            print(f"{engine} is left out: {why}", file=sys.stderr)
            missed.append(f"{engine}: it is not here: {why}")
        if why or not parts:
            continue
        with ExitStack() as stack:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="engines")))
            (home / "engine").mkdir()
            cluster = stack.enter_context(make(home / "engine"))
            for part in parts:
                (home / part).mkdir()
                figures[f"{engine}_{part}"] = found = PARTS[part](cluster, home / part)
                print(f"{engine} {part}: {found}", flush=True)
                missed += [
                    f"{engine}: {what}" for what, holds in CHECKS[part](found).items() if not holds
                ]
    return figures, missed


def _check_simulator(found: Mapping[str, Any]) -> dict[str, bool]:
    return {
        "all jobs finish": found["finished"] == JOBS.jobs,
        f"mean completion within {LIMIT:.0%} of the simulator's": abs(found["mean_error"]) <= LIMIT,
        f"each completion within {LIMIT:.0%} of the simulator's": abs(found["worst_error"])
        <= LIMIT,
        "grants are what the engine gave": found["grants_compared"] > 0
        and not found["grants_wrong"],
        "nothing is left": not found["left"],
    }


def _check_faults(found: Mapping[str, Any]) -> dict[str, bool]:
    return {
        "nothing is left after faults": not found["left"],
        "no process is left": found["processes_left"] == 0,
        "under faults every job finishes once": found["finished_once"] == JOBS.jobs,
        "under faults no step is lost or doubled": not found["wrong"],
        "a cancellation by hand is told": "outside of the fleet" in found["cancelled_by_hand"],
        "all faults happened": found["scheduler_kills"] == KILLS and not found["faults_missing"],
    }


def _check_queue(found: Mapping[str, Any]) -> dict[str, bool]:
    return {
        f"at most {MOST_CALLS} calls of Slurm per round": found["calls_per_round"] <= MOST_CALLS,
        f"{QUEUED} jobs in the queue": found["queued"] == QUEUED,
        f"{QUEUED} more in Slurm's": found["known_to_slurm"] >= QUEUED,
    }


CHECKS: dict[str, Callable[[Mapping[str, Any]], dict[str, bool]]] = {
    "simulator": _check_simulator,
    "faults": _check_faults,
    "queue": _check_queue,
}


if __name__ == "__main__":
    run_groups(__doc__, GROUPS, measure)
