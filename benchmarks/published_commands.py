"""The ten published training commands, rehearsed: predicted against emulated steps.

Every command of ``docs/published-commands.md`` is planned as the page says, at its whole size, with
estimated costs for the cluster of its runs (4 A100, or 8 A40 in two nodes). The plan is carried out
by a process for each device: real messages (the sizes of the plan, cut to 256 KiB), compute slept
through, faster or slower by one factor, so that a step takes some seconds here. Links are those
that calibration measures between these processes. Each predicted step is within 5 % of the median
of those rehearsed.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _emulated import WARM_UP, calibrated, undisturbed, widened
from _harness import ROOT, run_benchmark

from partita.core.cluster import Cluster
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.cost.predict import simulate
from partita.documents import load
from partita.runtime.emulation.rehearsal import (
    Emulation,
    emulate_forked,
    emulated_workload,
    predicted,
)

PAGE = ROOT / "docs" / "published-commands.md"
STEPS, STEP_S, CAP_BYTES = 3, 3.0, 2**18
LIMIT = 0.05


def commands(kind: str) -> list[list[str]]:
    """Return the arguments of the page's commands of a kind, in order."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [shlex.split(line)[2:] for block in blocks for line in block.splitlines()]
    return [line for line in lines if line[:1] == [kind]]


def run(arguments: list[str], folder: Path) -> None:
    """Run a command whose files are in a folder."""
    command = [sys.executable, "-m", "partita", *arguments, "-q"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"partita {' '.join(arguments)}: {done.stderr}")


def plans(folder: Path) -> Iterator[tuple[str, Problem, Plan]]:
    """Yield each planned command: its plan, and the problem that it solves."""
    for arguments in commands("profile"):
        run(arguments, folder)
    for arguments in commands("plan"):
        run(arguments, folder)
        name = arguments[arguments.index("-o") + 1]
        solution = load(folder / name)
        assert isinstance(solution, Solution)
        yield name.removesuffix(".plan.json"), solution.problem, solution.plan


def rehearsed(problem: Problem, plan: Plan, links: Cluster) -> tuple[float, float, float]:
    """Return the factor on compute, and the step as predicted and as rehearsed."""
    scale = STEP_S / simulate(problem, plan).makespan_s
    emulation = Emulation(steps=STEPS + WARM_UP, scale=scale, cap_bytes=CAP_BYTES)
    workload = emulated_workload(problem, plan, emulation)
    foretold = predicted(workload, widened(links, len(plan.devices))).makespan_s
    found = emulate_forked(workload, limit_s=120.0)
    return scale, foretold, median(found.step_s[WARM_UP:])


def measure() -> tuple[dict[str, Any], list[str]]:
    """Rehearse all ten."""
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    missed: list[str] = []
    links = calibrated(2, None, budget_s=2.0)
    print(f"{'command':30} ranks  microbatches    scale  predicted  rehearsed   error")
    with tempfile.TemporaryDirectory() as folder, undisturbed():
        for name, problem, plan in plans(Path(folder)):
            scale, foretold, found = rehearsed(problem, plan, links)
            error = foretold / found - 1
            figures[name] = error
            print(
                f"{name:30} {len(plan.devices):5d} {plan.num_microbatches:13d} {scale:8.3f} "
                f"{foretold:8.3f} s {found:8.3f} s {100 * error:+6.1f} %",
                flush=True,
            )
            if abs(error) > LIMIT:
                missed.append(f"{name}: {100 * error:+.1f} %, wanted within {100 * LIMIT:g} %")
    wanted = len(commands("train"))
    if len(figures) != wanted:
        missed.append(f"{len(figures)} plans of {wanted} commands")
    figures["worst"] = max(map(abs, figures.values()))
    return figures, missed


if __name__ == "__main__":
    run_benchmark(__doc__ or "", measure)
