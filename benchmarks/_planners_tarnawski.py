"""dnn-partitioning (Tarnawski et al. 2020): optimal splits against the recorded answers.

Contiguous max-load must equal the recorded optimum, in at most twice the time of the C++ program;
splits of any shape must come within 0.5 % of the best known in 60 CPU seconds, latency within 1 %.
Every plan is scored by our cost model and by ``evaluate.py`` of the data folder.
"""

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _planners_common import Group, timed

from partita.core.problem import Metric, Objective, Problem
from partita.core.solution import Solution
from partita.formats.dnn_partitioning import read_dnn_partitioning, write_split
from partita.planners.optimal_split import plan_optimal_split
from partita.testing.builders import flat_cluster, random_dag

TOLERANCE = 1e-5
LEAST_S, HARD_S = 0.5, 1.5
"""CPU seconds that a call may take at least, and where the reference cannot finish."""
REFINE_S, REFINE_GAP, LATENCY_GAP = 60.0, 0.005, 0.01
MILLI = 1e3


@dataclass(frozen=True, kw_only=True)
class Row:
    """One call: a recorded value in ms, ours, what ``evaluate.py`` says, and CPU seconds."""

    case: str
    recorded: float
    value: float
    scored: float
    cpu_s: float
    allowed_s: float

    @property
    def gap(self) -> float:
        """How far ours is above the recorded value, relative."""
        return self.value / self.recorded - 1.0


def measure_group(data: Path, scale: float) -> list[Group]:
    """Return the tables of contiguous splits, of all splits, and of latency."""
    folder = data / "dnn-partitioning"
    answers = json.loads((folder / "answers.json").read_text())
    loads = [row for row in answers if row["case"].startswith("throughput/")]
    latencies = [row for row in answers if row["case"].startswith("latency/")]
    _warm_up()
    return [
        _contiguous(folder, loads, scale),
        _refined(folder, loads),
        _latency(folder, latencies),
    ]


def _warm_up() -> None:
    """Compile or load all kernels on another input."""
    for metric in (Metric.MAX_LOAD, Metric.SINGLE_SAMPLE_LATENCY):
        problem = Problem(
            graph=random_dag(24, random.Random(11)),
            cluster=flat_cluster(3),
            objective=Objective(metric=metric),
        )
        plan_optimal_split(problem, contiguous=False, iterations=100_000)
        plan_optimal_split(problem, contiguous=False, ideals=40, iterations=100_000)


def _contiguous(folder: Path, answers: list[Mapping[str, Any]], scale: float) -> Group:
    group = _group("contiguous max-load, ms (recorded: proven optimum)")
    for answer in answers:
        known_s = answer["cpp_user_s"]
        allowed_s = HARD_S if known_s is None else max(2 * known_s * scale, LEAST_S)
        recorded = answer["ours_dp"]["max_load"]
        row, _ = _called(folder, answer["case"], recorded, allowed_s, Metric.MAX_LOAD)
        _note(group, row, answer["cpp_user_s"])
        if abs(row.gap) > TOLERANCE:
            group.misses.append(f"{row.case}: {row.value:.6f}, the optimum is {row.recorded:.6f}")
    return _with_figures(group, "contiguous")


def _refined(folder: Path, answers: list[Mapping[str, Any]]) -> Group:
    group = _group("max-load of any split, ms (recorded: best known)")
    for answer in answers:
        recorded = answer["best_known"]["max_load"]
        row, _ = _called(
            folder, answer["case"], recorded, REFINE_S, Metric.MAX_LOAD, contiguous=False
        )
        _note(group, row, None)
        if row.gap > REFINE_GAP:
            group.misses.append(f"{row.case}: {row.gap:+.2%} above the best known")
    return _with_figures(group, "any_split")


def _latency(folder: Path, answers: list[Mapping[str, Any]]) -> Group:
    group = _group("single-sample latency, ms (recorded: best known)")
    for answer in answers:
        recorded = answer["best_known"]["latency"]
        row, _ = _called(folder, answer["case"], recorded, REFINE_S, Metric.SINGLE_SAMPLE_LATENCY)
        _note(group, row, None)
        if row.gap > LATENCY_GAP:
            group.misses.append(f"{row.case}: {row.gap:+.2%} above the best known")
    return _with_figures(group, "latency")


def _group(what: str) -> Group:
    return Group(
        title=f"dnn-partitioning: {what}",
        headers=[
            "input",
            "recorded",
            "ours",
            "gap %",
            "evaluate.py",
            "C++ s",
            "allowed s",
            "our s",
        ],
    )


def _called(
    folder: Path, case: str, recorded: float, allowed_s: float, metric: Metric, **options: Any
) -> tuple[Row, Solution]:
    problem = read_dnn_partitioning((folder / f"{case}.json").read_text())
    problem = replace(problem, objective=replace(problem.objective, metric=metric))
    solution, cpu_s = timed(lambda: plan_optimal_split(problem, **options))
    row = Row(
        case=case,
        recorded=recorded,
        value=solution.value * MILLI,
        scored=_scored(folder, case, write_split(problem, solution.plan), metric),
        cpu_s=cpu_s,
        allowed_s=allowed_s,
    )
    return row, solution


def _scored(folder: Path, case: str, split: str, metric: Metric) -> float:
    """Return what ``evaluate.py`` says of a split, in ms; infinite where it finds an error."""
    kind, key = ("throughput", "max_load")
    if metric is Metric.SINGLE_SAMPLE_LATENCY:
        kind, key = ("latency", "latency")
    with tempfile.TemporaryDirectory() as place:
        plan = Path(place) / "plan.json"
        plan.write_text(split)
        command = [
            str(folder.parent / "evaluate.py"),
            kind,
            str(folder / f"{case}.json"),
            str(plan),
        ]
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False
        )
    return float(json.loads(done.stdout)[key]) if done.returncode == 0 else float("inf")


def _note(group: Group, row: Row, known_s: float | None) -> None:
    """Add a row, and what both kinds of values and times miss."""
    known = "-" if known_s is None else f"{known_s:.2f}"
    group.rows.append(
        [
            *(row.case.split("/", 1)[1], row.recorded, row.value, f"{100 * row.gap:+.3f}"),
            *(row.scored, known, f"{row.allowed_s:.2f}", f"{row.cpu_s:.3f}"),
        ]
    )
    if abs(row.scored / row.value - 1.0) > 1e-9:
        group.misses.append(f"{row.case}: evaluate.py says {row.scored}, we say {row.value}")
    if row.cpu_s > row.allowed_s:
        group.misses.append(f"{row.case}: {row.cpu_s:.2f} CPU s, allowed {row.allowed_s:.2f}")


def _with_figures(group: Group, prefix: str) -> Group:
    gaps = [float(row[3]) for row in group.rows]
    group.figures = {
        f"{prefix}_worst_gap_percent": max(gaps),
        f"{prefix}_cpu_s": round(sum(float(row[-1]) for row in group.rows), 2),
    }
    return group
