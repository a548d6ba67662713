"""Jobs, a server and kills for the benchmark of the live scheduler, and its tests.

The jobs are ``examples/metered_job.py``: EMULATED, they sleep as long as loading would take with
the CPUs that they hold, read back from the lease. GPUs are declared.
"""

import contextlib
import json
import math
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from partita.core.fleet import FleetHistory, Job, Sensitivity, SensitivityOrigin, trace_of
from partita.fleet.engines.proc import processes_of
from partita.fleet.live.client import FleetClient
from partita.fleet.live.jobspec import GpuChoice, JobSpec, core_job
from partita.fleet.live.token import make_token
from partita.fleet.policies.resources import Servers
from partita.fleet.policies.table import policy_of
from partita.fleet.simulate.options import Rules
from partita.fleet.simulate.rounds import simulate_rounds

METERED = Path(__file__).resolve().parent.parent / "examples" / "metered_job.py"
CURVES = {
    "loader-bound": ((1.0, 0.35), (3.0, 1.0), (6.0, 1.9)),
    "mixed": ((1.0, 0.6), (3.0, 1.0), (4.0, 1.15)),
    "gpu-bound": ((1.0, 1.0), (3.0, 1.0)),
}
SERVERS, GPUS, CPUS, MEMORY_BYTES = 2, 4, 12, 200 * 10**9
ITERATION_S = 0.02
SMALL = 1000
AWAY_S = 180.0
"""Longest time for which a server may be away: it is killed while a fault of its engine lasts."""
OVER = ("finished", "failed", "cancelled")


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        jobs: Number of jobs.
        round_s: Length of a round.
        policy: The policy.
        restart_s: What a start or restart costs, from its round to the first step.
        seconds: Least and most seconds of a job at its fair share.
        span_s: Seconds in which the jobs arrive.
        seed: Of the jobs.
        servers: Names of the servers.
        gpus: Numbers of GPUs that jobs ask for, each as likely.
        sleeps_start: Whether a job sleeps until the cost of a start is over.
    """

    jobs: int = 20
    round_s: float = 1.0
    policy: str = "srtf:tune"
    restart_s: float = 0.3
    seconds: tuple[float, float] = (3.0, 8.0)
    span_s: float = 6.0
    seed: int = 1
    servers: tuple[str, ...] = tuple(f"host{row}" for row in range(SERVERS))
    gpus: tuple[int, ...] = (1, 1, 1, 2, 4)
    sleeps_start: bool = True


def declared(names: tuple[str, ...]) -> Servers:
    """Return the declared servers."""
    return Servers(
        names=names,
        gpu_types=("v100",),
        gpu_type=np.zeros(len(names), dtype=np.int32),
        gpus=np.full(len(names), GPUS, dtype=np.int32),
        cpus=np.full(len(names), float(CPUS)),
        memory_bytes=np.full(len(names), float(MEMORY_BYTES)),
        storage_bytes_per_s=np.zeros(len(names)),
    )


def curve_of(name: str, restart_s: float) -> Sensitivity:
    """Return one of the curves."""
    points = CURVES[name]
    return Sensitivity(
        name=name,
        origin=SensitivityOrigin.MODELLED,
        iteration_s=ITERATION_S,
        cpus=np.array([cpus for cpus, _ in points]),
        memory_bytes=np.full(len(points), 10e9),
        speed=np.array([speed for _, speed in points]),
        restart_s=restart_s,
    )


def metered_jobs(plan: Plan, folder: Path) -> list[tuple[float, JobSpec]]:
    """Return jobs and the seconds after which each is submitted."""
    rng = random.Random(plan.seed)
    curves = {name: curve_of(name, plan.restart_s) for name in CURVES}
    found = []
    for number in range(plan.jobs):
        name = rng.choice(list(CURVES))
        gpus = rng.choice(plan.gpus)
        text = ",".join(f"{cpus:g}:{speed:g}" for cpus, speed in CURVES[name])
        spec = JobSpec(
            name=f"{name}-{number}",
            command=(
                *(sys.executable, str(METERED), "--iteration", f"{ITERATION_S}"),
                *("--curve", text, "--grant", "lease", "--start"),
                f"{plan.restart_s if plan.sleeps_start else 0.0}",
            ),
            folder=folder,
            gpus=(GpuChoice(least=gpus, most=gpus),),
            steps=round(rng.uniform(*plan.seconds) / ITERATION_S),
            sensitivity=curves[name],
            checkpoint=folder / f"checkpoint-{number}",
            grace_s=10.0,
        )
        found.append((rng.uniform(0, plan.span_s), spec))
    return sorted(found, key=lambda pair: pair[0])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """``partita fleet serve`` in a process of its own, which may be killed and started again."""

    plan: Plan
    folder: Path
    more: tuple[str, ...] = ("--cluster", f"{SERVERS}x{GPUS}xv100", "--cpus", str(CPUS))
    port: int = field(default_factory=_free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def client(self) -> FleetClient:
        """Return the way to it."""
        return FleetClient(
            f"http://127.0.0.1:{self.port}",
            token=make_token(self.folder / "fleet.sqlite.d"),
            timeout_s=10.0,
            patience_s=AWAY_S,
        )

    def start(self) -> None:
        """Start it, and wait until it answers."""
        plan = self.plan
        words = (
            *("--policy", plan.policy, "--round", f"{plan.round_s}"),
            *("--restart", f"{plan.restart_s}", "--backoff", "0.1", "--hold", "60"),
            *("--state", str(self.folder / "fleet.sqlite"), "--port", str(self.port)),
        )
        with (self.folder / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "partita", "fleet", "serve", *self.more, *words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "XDG_STATE_HOME": str(self.folder / "state"),  # clients' notes stay here
                },
            )
        last_s = time.monotonic() + 60
        while True:
            try:
                self.client.info()
            except Exception as exc:
                if self.process.poll() is not None or time.monotonic() > last_s:
                    log_text = (self.folder / "serve.log").read_text()
                    raise RuntimeError(f"the server does not answer: {log_text[-2000:]}") from exc
                time.sleep(0.05)
            else:
                return

    def kill(self) -> None:
        """End it as a crash would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """End it, and whatever jobs are left."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=20)
        for process in left_over(self.folder):
            process.send(signal.SIGKILL)


def left_over(folder: Path) -> list[Any]:
    """Return the processes of jobs of the fleet in a folder."""
    return [process for _, process in processes_of(fleet_name(folder))]


def fleet_name(folder: Path) -> str:
    """Return what a fleet calls itself."""
    return _fact(folder, "fleet")


def epoch_of(folder: Path) -> float:
    """Return when the fleet's first round began."""
    return float(_fact(folder, "epoch_s"))


def _fact(folder: Path, name: str) -> str:
    question = "SELECT value FROM fleet_facts WHERE name = ?"
    with contextlib.closing(sqlite3.connect(folder / "fleet.sqlite")) as connection:
        return str(connection.execute(question, (name,)).fetchone()[0])


@dataclass
class Submitting:
    """Submits jobs at their times, from a thread of its own."""

    client: FleetClient
    jobs: list[tuple[float, JobSpec]]
    submitted: int = 0
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._submit, daemon=True)
        self._thread.start()

    def _submit(self) -> None:
        begin_s = time.monotonic()
        try:
            for at_s, spec in self.jobs:
                time.sleep(max(0.0, begin_s + at_s - time.monotonic()))
                self.client.submit(spec)
                self.submitted += 1
        except Exception as exc:  # noqa: BLE001 (raised by whoever waits)
            self.failure = exc

    def is_over(self) -> bool:
        """Whether all jobs are submitted; names those that could not be."""
        if self.failure is not None:
            names = ", ".join(spec.name for _, spec in self.jobs[self.submitted :])
            raise RuntimeError(f"not submitted: {names}") from self.failure
        return not self._thread.is_alive()

    def wait(self, limit_s: float) -> None:
        """Wait until all jobs are submitted."""
        self._thread.join(limit_s)
        if not self.is_over():
            name = self.jobs[self.submitted][1].name
            raise RuntimeError(f"{name} is not submitted after {limit_s} s")


def _are_over(rows: list[dict[str, Any]], jobs: int) -> bool:
    """Return whether all jobs were submitted and have ended."""
    return len(rows) == jobs and all(row["state"] in OVER for row in rows)


def wait_for_all(client: FleetClient, jobs: int, limit_s: float) -> list[dict[str, Any]]:
    """Return all jobs once they have ended; names those that have not in time."""
    last_s = time.monotonic() + limit_s
    while True:
        rows = client.jobs(all_jobs=True)
        if _are_over(rows, jobs):
            return list(rows)
        if time.monotonic() > last_s:
            stuck = [row for row in rows if row["state"] not in OVER]
            words = [
                f"job {row['id']} {row['name']}: {row['state']}, step {row['step']} of "
                f"{row['steps']}, {row['attempts']} starts, {row['note'] or 'no note'}"
                for row in stuck
            ]
            words += [f"{jobs - len(rows)} were never submitted"] if len(rows) < jobs else []
            raise RuntimeError(f"after {limit_s} s: {'; '.join(words)}")
        time.sleep(0.2)


def start_costs(plan: Plan, specs: list[JobSpec], epoch_s: float) -> list[float]:
    """Return the seconds from the round in which an attempt was granted to its running."""
    begins = [segment[2] for spec in specs for segment in checkpoint_of(spec)["segments"]]
    return [math.fmod(begin - epoch_s, plan.round_s) for begin in begins]


def simulated(
    plan: Plan, specs: list[JobSpec], rows: list[dict[str, Any]], epoch_s: float
) -> FleetHistory:
    """Return what the simulator makes of the same jobs with the same arrivals.

    The simulator takes first starts to cost nothing. Here they cost as much as restarts: the work
    that a job would do in that time is added to it, at the speed at which it first runs. That
    speed is the outcome of a simulation, so they are repeated until it stays.
    """
    speeds = dict.fromkeys((row["id"] for row in rows), 1.0)
    for _ in range(10):
        history = _simulated_once(plan, specs, rows, epoch_s, speeds)
        leases, before = history.leases, dict(speeds)
        for at in reversed(range(len(leases))):  # the first lease of a job is the last one seen
            speeds[int(history.job_id[leases.job[at]])] = float(leases.speed[at])
        if speeds == before:
            break
    return history


def _simulated_once(
    plan: Plan,
    specs: list[JobSpec],
    rows: list[dict[str, Any]],
    epoch_s: float,
    speeds: dict[int, float],
) -> FleetHistory:
    by_name = {spec.name: spec for spec in specs}
    # Iterations are whole numbers; small ones hold the added work exactly enough.
    small_s = ITERATION_S / SMALL
    jobs = []
    for row in rows:
        spec = by_name[row["name"]]
        added = round(plan.restart_s * speeds[row["id"]] / small_s)
        curve = replace(spec.sensitivity, iteration_s=small_s)
        spec = replace(spec, sensitivity=curve, steps=spec.steps * SMALL + added)
        jobs.append(
            core_job(
                spec, row["id"], row["submitted_s"] - epoch_s, {"v100": len(plan.servers) * GPUS}
            )
        )
    trace = replace(trace_of(_sharing(jobs)), start_s=0.0)
    rules = Rules(round_s=plan.round_s, restart_s=plan.restart_s, record=True)
    return simulate_rounds(trace, declared(plan.servers), policy_of(plan.policy), rules=rules)


def _sharing(jobs: list[Job]) -> list[Job]:
    """Return the jobs with one sensitivity a name."""
    first: dict[str, Sensitivity] = {}
    return [
        replace(job, sensitivity=first.setdefault(job.sensitivity.name, job.sensitivity))
        for job in jobs
    ]


def compared(
    plan: Plan, specs: list[JobSpec], rows: list[dict[str, Any]], epoch_s: float
) -> dict[str, Any]:
    """Return completion times, live against simulated."""
    history = simulated(plan, specs, rows, epoch_s)
    starts = start_costs(plan, specs, epoch_s)
    expected = dict(zip(history.job_id.tolist(), history.completion_s.tolist(), strict=True))
    live = {row["id"]: row["finished_s"] - row["submitted_s"] for row in rows}
    ratios = [live[job] / expected[job] for job in live]
    mean_live = sum(live.values()) / len(live)
    mean_simulated = sum(expected.values()) / len(expected)
    return {
        "jobs": len(live),
        "declared_start_s": plan.restart_s,
        "slowest_start_s": max(starts),
        "late_starts": sum(start > plan.restart_s for start in starts),
        "mean_live_s": mean_live,
        "mean_simulated_s": mean_simulated,
        "mean_error": mean_live / mean_simulated - 1,
        "worst_error": max((ratio - 1 for ratio in ratios), key=abs),
        "within_15_percent": sum(abs(ratio - 1) <= 0.15 for ratio in ratios),
        "makespan_error": _makespan(live, rows) / _makespan(expected, rows) - 1,
        "preemptions_live": sum(row["preemptions"] + row["migrations"] for row in rows),
        "preemptions_simulated": int(history.preemptions.sum() + history.migrations.sum()),
    }


def _makespan(completion: dict[int, float], rows: list[dict[str, Any]]) -> float:
    first = min(row["submitted_s"] for row in rows)
    return max(row["submitted_s"] - first + completion[row["id"]] for row in rows)


def checkpoint_of(spec: JobSpec) -> dict[str, Any]:
    """Return a job's checkpoint file; empty before the first."""
    assert spec.checkpoint is not None
    path = spec.checkpoint / "checkpoint.json"
    return dict(json.loads(path.read_text())) if path.exists() else {"steps": 0, "segments": []}


def check_segments(spec: JobSpec) -> list[str]:
    """Return what is wrong with a finished job's checkpoint: steps lost, or counted twice."""
    said = checkpoint_of(spec)
    wrong = [] if said["steps"] == spec.steps else [f"{spec.name}: {said['steps']} steps"]
    at = 0
    for begin, end, *_ in said["segments"]:
        if begin != at or end < begin:
            wrong.append(f"{spec.name}: an attempt from {begin} to {end} after step {at}")
        at = end
    return wrong if at == spec.steps else [*wrong, f"{spec.name}: attempts end at {at}"]


def commands_of(folder: Path) -> dict[int, list[tuple[Any, bool]]]:
    """Return the processes of each job that runs, and whether each is the one above the command."""
    found: dict[int, list[tuple[Any, bool]]] = {}
    for attempt, process in processes_of(fleet_name(folder)):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            found.setdefault(attempt.job, []).append((process, b"engines.shim" in line))
    return found


@dataclass
class Witness:
    """Reads checkpoints after each kill, and keeps what is wrong."""

    folder: Path
    specs: list[JobSpec]
    steps: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    readings: int = 0

    def look(self, after: str) -> None:
        """Read all checkpoints: none may have gone back, no job may run twice."""
        for spec in self.specs:
            step = int(checkpoint_of(spec)["steps"])
            if not self.steps.get(spec.name, 0) <= step <= spec.steps:
                self.wrong.append(f"{spec.name} after {after}: step {step} of {spec.steps}")
            self.steps[spec.name] = step
            self.readings += 1
        for job, processes in commands_of(self.folder).items():
            commands = [process for process, above in processes if not above]
            if len(commands) > 1:
                self.wrong.append(f"job {job} after {after}: {len(commands)} processes at once")


def kill_a_worker(folder: Path, rng: random.Random, *, above: bool) -> bool:
    """Kill the command of some job, or the process above it; returns whether one ran."""
    running = [
        process
        for processes in commands_of(folder).values()
        for process, is_above in processes
        if is_above == above
    ]
    if not running:
        return False
    victim = rng.choice(running)
    victim.send(signal.SIGKILL)
    return True


def run_with_kills(
    plan: Plan, folder: Path, *, kills: int, limit_s: float = 120.0
) -> dict[str, Any]:
    """Run jobs while the scheduler and workers are killed, and return what became of them."""
    rng = random.Random(plan.seed)
    jobs = metered_jobs(plan, folder)
    witness = Witness(folder, [spec for _, spec in jobs])
    server, workers, schedulers = Server(plan, folder), 0, 0
    server.start()
    try:
        submitting = Submitting(server.client, jobs)
        last_s = time.monotonic() + limit_s
        time.sleep(1.5 * plan.round_s)
        while min(workers, schedulers) < kills and time.monotonic() < last_s:
            if _are_over(server.client.jobs(all_jobs=True), len(jobs)):
                break
            if workers < kills and kill_a_worker(folder, rng, above=workers % 2 == 1):
                workers += 1
                witness.look(f"worker kill {workers}")
            time.sleep(rng.uniform(0, plan.round_s))
            if schedulers < kills:
                server.kill()
                schedulers += 1
                witness.look(f"scheduler kill {schedulers}")
                server.start()
        submitting.wait(limit_s)
        rows = wait_for_all(server.client, len(jobs), limit_s)
        finishes = Counter(
            row["id"]
            for row in rows
            for event in server.client.status(row["id"])["events"]
            if event["what"].startswith("finished")
        )
        wrong = [text for _, spec in jobs for text in check_segments(spec)]
        return {
            "jobs": len(rows),
            "finished": sum(row["state"] == "finished" for row in rows),
            "finished_once": sum(count == 1 for count in finishes.values()),
            "scheduler_kills": schedulers,
            "worker_kills": workers,
            "starts": sum(row["attempts"] for row in rows),
            "checkpoints_read": witness.readings,
            "wrong": [*witness.wrong, *wrong],
            "processes_left": len(left_over(folder)),
        }
    finally:
        server.end()
