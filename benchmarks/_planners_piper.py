"""Piper: every recorded row of the published program, by our exact search.

The rows of the full search count: the value (also by ``evaluate.py`` of the data folder) is at or
below the recorded one, what is recorded as infeasible is refused, and half of the calls take less
CPU than the recorded C++ program. Rows of searches without one kind of parallelism are shown.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from _planners_common import Group, timed

from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import InfeasibleError
from partita.formats.piper import read_piper, write_piper_plan
from partita.planners.piper.planner import plan_piper

GIB = 2**30
BANDWIDTH_GIB = 25
TOLERANCE = 1e-6
OPTIONS: dict[str, dict[str, bool]] = {
    "": {},
    "noDP": {"data_parallel": False},
    "noTP": {"tensor_parallel": False},
    "noAR": {"recompute": False},
}


def measure_group(data: Path, scale: float) -> Group:
    """Return the table of all recorded rows, with what is missed in the full search."""
    folder = data / "piper"
    texts = {path.name: path.read_text() for path in folder.glob("*.json")}
    rows = [row for row in json.loads(texts["answers.json"]) if row["mode"] in OPTIONS]
    _warm_up(_problem(texts, rows[0]))
    group = Group(
        title="Piper: time per microbatch of the slowest stage, bandwidth 25 GiB/s",
        headers=[
            "input",
            "k",
            "GiB",
            "mode",
            "recorded",
            "ours",
            "proof",
            "gap",
            "C++ s",
            "ours s",
        ],
    )
    ratios: list[float] = []
    improved = 0
    for row in sorted(rows, key=lambda row: row["mode"] != ""):
        problem = _problem(texts, row)
        solution, refusal, seconds = _solve(problem, OPTIONS[row["mode"]])
        _add(group, row, solution, seconds, scale)
        if row["mode"]:
            continue
        ratios.append(seconds / max(row["cpu"] * scale, 1e-9))
        improved += solution is not None and solution.value < row["tps"] * (1 - TOLERANCE)
        group.misses += _misses(data, row, solution, refusal)
    median = statistics.median(ratios)
    if median >= 1:
        group.misses.append(f"median CPU is {median:.2f} of the C++ program's")
    group.figures = {
        "rows": len(ratios),
        "improved": improved,
        "median_cpu_ratio": round(median, 4),
        "largest_cpu_ratio": round(max(ratios), 3),
    }
    return group


def _problem(texts: dict[str, str], row: dict[str, Any]) -> Problem:
    return read_piper(
        texts[row["input"]],
        devices=row["k"],
        memory_bytes=row["memGiB"] * GIB,
        microbatches=row["mbs"],
        bandwidth_bytes_per_s=BANDWIDTH_GIB * GIB,
    )


def _warm_up(problem: Problem) -> None:
    """Compile, by another problem than those that are measured."""
    objective = replace(problem.objective, microbatches=problem.microbatches // 2)
    plan_piper(replace(problem, objective=objective))


def _solve(problem: Problem, options: dict[str, bool]) -> tuple[Solution | None, str, float]:
    def call() -> tuple[Solution | None, str]:
        try:
            return plan_piper(problem, **options), ""
        except InfeasibleError as refusal:
            return None, str(refusal)

    (solution, refusal), seconds = timed(call)
    return solution, refusal, seconds


def _add(
    group: Group, row: dict[str, Any], solution: Solution | None, seconds: float, scale: float
) -> None:
    feasible = row["tps"] > 0
    group.rows.append(
        [
            row["input"].removesuffix(".json"),
            row["k"],
            row["memGiB"],
            row["mode"] or "full",
            row["tps"] if feasible else "infeasible",
            solution.value if solution else "infeasible",
            solution.proof.value if solution else "proven",
            f"{solution.gap:.1e}" if solution and not row["mode"] else "",
            f"{row['cpu'] * scale:.3f}",
            f"{seconds:.3f}",
        ]
    )


def _misses(data: Path, row: dict[str, Any], solution: Solution | None, refusal: str) -> list[str]:
    if (solution is None) != (row["tps"] < 0):
        return [f"{row['case']}: recorded {row['tps']}, ours {refusal or 'feasible'}"]
    if solution is None:
        return []
    found = []
    if solution.value > row["tps"] * (1 + TOLERANCE):
        found.append(f"{row['case']}: {solution.value} above {row['tps']}")
    scored = _scored(data, row, solution)
    if not abs(scored - solution.value) <= TOLERANCE * solution.value:
        found.append(f"{row['case']}: evaluate.py says {scored}, our cost model {solution.value}")
    return found


def _scored(data: Path, row: dict[str, Any], solution: Solution) -> float:
    """Return what the independent scorer says of a plan; inf = infeasible."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(write_piper_plan(solution.problem, solution.plan))
        file.flush()
        setting = f"k={row['k']} mem_gib={row['memGiB']} mbs={row['mbs']} bw_gib={BANDWIDTH_GIB}"
        done = subprocess.run(
            [
                sys.executable,
                str(data / "evaluate.py"),
                "piper",
                str(data / "piper" / row["input"]),
                file.name,
                "--set",
                *setting.split(),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    return (
        float(json.loads(done.stdout)["time_per_sample"]) if done.returncode == 0 else float("inf")
    )
