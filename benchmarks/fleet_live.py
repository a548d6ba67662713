"""The live scheduler on the local engine: against the simulator, under kills, with real grants.

* 20 jobs whose loading work is metered to their CPU grant (EMULATED) on declared GPUs, with the
  arrivals of a busy minute: completion times against the simulator's. The cost of a start is part
  of the emulation, and the same in both; a process that needs longer than that is late, and said.
* The same jobs while the scheduler is killed ten times and workers ten times, in turn the command
  and the process above it: every job finishes once with the right number of steps.
* Two real loader-bound jobs on one of this machine's own CPUs, kept by affinity and quota: the
  second has what the first leaves, and gets faster when that one is done. Parts of a CPU are
  granted, so that it shows on a busy machine as well; they need control groups.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _fleet_live import (
    AWAY_S,
    Plan,
    Server,
    Submitting,
    checkpoint_of,
    compared,
    epoch_of,
    left_over,
    metered_jobs,
    run_with_kills,
    wait_for_all,
)
from _harness import run_benchmark

from partita.core.fleet import Sensitivity, SensitivityOrigin
from partita.fleet.live.jobspec import GpuChoice, JobSpec

LIMIT = 0.15
KILLS = 10
COMPARED = Plan(policy="fifo:tune", round_s=1.5, restart_s=0.75, seconds=(4.0, 12.0), span_s=9.0)
LOADER = Path(__file__).resolve().parent.parent / "examples" / "loader_job.py"


def against_simulator(plan: Plan, folder: Path) -> dict[str, Any]:
    """Return completion times, live against simulated."""
    jobs, server = metered_jobs(plan, folder), Server(plan, folder)
    server.start()
    try:
        Submitting(server.client, jobs).wait(AWAY_S)
        rows = wait_for_all(server.client, len(jobs), 300)
        specs = [spec for _, spec in jobs]
        return {
            **compared(plan, specs, rows, epoch_of(folder)),
            "finished": sum(row["state"] == "finished" for row in rows),
            "processes_left": len(left_over(folder)),
        }
    finally:
        server.end()


def loader_jobs(folder: Path, steps: tuple[int, int]) -> list[JobSpec]:
    """Return two jobs whose speed is in proportion to their CPUs, up to most of one."""
    curve = Sensitivity(
        name="loader",
        origin=SensitivityOrigin.MODELLED,
        iteration_s=0.1,
        cpus=np.array([0.2, 0.4, 0.6, 0.8]),
        memory_bytes=np.full(4, 0.5e9),
        speed=np.array([1.0, 2.0, 3.0, 4.0]),
    )
    return [
        JobSpec(
            name=f"loader-{number}",
            command=(sys.executable, str(LOADER)),
            folder=folder,
            gpus=(GpuChoice(least=1, most=1),),
            steps=count,
            sensitivity=curve,
            checkpoint=folder / f"loader-{number}",
        )
        for number, count in enumerate(steps)
    ]


def real_loaders(folder: Path, steps: tuple[int, int] = (80, 100)) -> dict[str, Any]:
    """Return the speed of two real jobs by the CPUs that their processes may use."""
    plan = Plan(policy="fifo:tune", round_s=1.0)
    server = Server(plan, folder, more=("--gpus", "5", "--cpus", "1", "--memory", "4GB"))
    jobs = loader_jobs(folder, steps)
    server.start()
    read_back: dict[str, set[str]] = {spec.name: set() for spec in jobs}
    try:
        numbers = {server.client.submit(spec): spec for spec in jobs}
        last_s = time.monotonic() + 120
        while time.monotonic() < last_s:
            said = {number: server.client.status(number) for number in numbers}
            for number, row in said.items():
                if row["read_back"]:
                    read_back[numbers[number].name].add(row["read_back"])
            if all(row["state"] == "finished" for row in said.values()):
                break
            time.sleep(0.2)
        rows = wait_for_all(server.client, len(jobs), 60)
    finally:
        server.end()
    rates = {
        spec.name: {
            cpus: count / seconds
            for cpus, (count, seconds) in checkpoint_of(spec)["by_cpus"].items()
            if seconds
        }
        for spec in jobs
    }
    return {
        "states": [row["state"] for row in rows],
        "starts": [row["attempts"] for row in rows],
        "steps_per_s_by_cpus": rates,
        "read_back": {name: sorted(words) for name, words in read_back.items()},
    }


def measure() -> tuple[dict[str, Any], list[str]]:
    """Return the figures and what is missed."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="partita-fleet-") as name:
        home = Path(name)
        folders = {part: home / part for part in ("simulator", "kills", "loaders")}
        for folder in folders.values():
            folder.mkdir()
        figures["against_simulator"] = against_simulator(COMPARED, folders["simulator"])
        figures["kills"] = run_with_kills(Plan(policy="fifo:tune"), folders["kills"], kills=KILLS)
        figures["loaders"] = real_loaders(folders["loaders"])
    return figures, missed(figures)


def missed(figures: dict[str, Any]) -> list[str]:
    """Return what is missed, in words."""
    live, kills, loaders = (figures[name] for name in ("against_simulator", "kills", "loaders"))
    found = []
    if live["finished"] < live["jobs"] or live["processes_left"]:
        found.append(f"{live['finished']} of {live['jobs']} metered jobs finished")
    if abs(live["mean_error"]) > LIMIT or live["within_15_percent"] < live["jobs"]:
        found.append(
            f"completion times: mean {live['mean_error']:+.1%}, {live['within_15_percent']} of "
            f"{live['jobs']} within 15 %, worst {live['worst_error']:+.1%}"
        )
    if (
        kills["wrong"]
        or kills["finished_once"] < kills["jobs"]
        or kills["processes_left"]
        or min(kills["scheduler_kills"], kills["worker_kills"]) < KILLS
    ):
        found.append(f"under kills: {kills}")
    rates = loaders["steps_per_s_by_cpus"]["loader-1"]
    few, most = min(rates, key=float), max(rates, key=float)
    if not (float(most) > 2 * float(few) and rates[most] > 1.5 * rates[few]):
        found.append(f"the second loader's steps/s by CPUs are {rates}")
    return found


if __name__ == "__main__":
    run_benchmark(__doc__.splitlines()[0], measure)
