"""PipeDream's and SparsePipedream's planners against the recorded runs of the released tools.

PipeDream: the search as released must print the recorded period on flat clusters; the plan of our
own search must not be above the recorded plan, nor above the recorded optima, by the repaired
objective. SparsePipedream: like against like, by the repaired objective with the tool's factor of
the all-reduce.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from _planners_common import Group, timed
from objectives import (
    COMPRESSED,
    PipeDreamRun,
    exact_optima,
    pipedream_case,
    pipedream_cluster,
    pipedream_run,
    read_json,
)

from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.problem import Metric, Objective, Problem
from partita.core.solution import Solution
from partita.errors import InfeasibleError
from partita.formats.pipedream import read_pipedream
from partita.formats.server_file import open_beside, read_server_file
from partita.objectives.repaired import pipedream_repaired_time
from partita.planners.pipedream.planner import plan_pipedream
from partita.planners.sparse_pipedream import ALLREDUCE_FACTOR, FREE, plan_sparse_pipedream
from partita.released.pipedream import plan_pipedream_released

SIX_DIGITS = 5e-6
RELEASED_TOLERANCE = 1e-6
WANTED_GAP = 0.015
REPAIRED = Objective(metric=Metric.PIPEDREAM_REPAIRED)
RELEASED = Objective(metric=Metric.PIPEDREAM)

BEYOND = ("inception_v3", "nasnetalarge")
"""Models that the released optimizer cannot finish."""
MINK = {"mink_2srv": 0.1204695712, "mink_3srv": 0.120909}
"""Best recorded values of the server files with several servers, at 1e10 and 1e9 bytes/s."""


class Record(NamedTuple):
    """A recorded run: its problem and plan, its period and CPU seconds."""

    tag: str
    run: PipeDreamRun
    problem: Problem
    plan: Plan
    period_s: float
    cpu_s: float
    tolerance: float


def wanted_ratio(recorded_s: float) -> int:
    """Return how many times less CPU is asked for."""
    return 100 if recorded_s > 5 else 30 if recorded_s > 1 else 0


def recorded(data: Path) -> Iterator[Record]:
    """Yield the finished runs of the released optimizer."""
    graphs: dict[str, Graph] = {}
    for row in read_json(data / "pipedream/answers.json"):
        if "T" not in row:
            continue
        model, tag = row["model"], row["tag"]
        if model not in graphs:
            graphs[model] = read_graph(data, model)
        problem, plan = pipedream_case(data, tag, graphs[model], row["plan"])
        run = pipedream_run(row["cfg"])
        yield Record(tag, run, problem, plan, row["T"], row["user"], RELEASED_TOLERANCE)
    for tag, (period_s, plan_text) in COMPRESSED.items():
        problem, plan = pipedream_case(data, tag, None, plan_text)
        run = pipedream_run(tag.split("__")[1])
        yield Record(tag, run, problem, plan, period_s, math.nan, SIX_DIGITS)


def read_graph(data: Path, model: str) -> Graph:
    """Return a profile."""
    return read_pipedream((data / "pipedream/profiles" / model / "graph.txt").read_text())


def recorded_optima(data: Path) -> dict[str, float]:
    """Return the recorded best values of the repaired objective, by tag, proven or not."""
    found = dict(exact_optima(data))
    text = (data / "pipedream/exact_E.txt").read_text()
    for model, cfg, value in re.findall(r"^(\w+) (n\S+) T_E=(\S+)", text, flags=re.MULTILINE):
        found[f"{model}__{cfg}"] = float(value)
    return found


def warm_up(data: Path) -> None:
    """Compile what the timed calls use, on an input of another shape."""
    graph = read_graph(data, "resnext50")
    for cfg in ("n5_b3", "n3x3_b20_2"):
        cluster = pipedream_cluster(pipedream_run(cfg))
        problem = Problem(graph=graph, cluster=cluster, objective=REPAIRED)
        plan_pipedream(problem)
        plan_pipedream_released(replace(problem, objective=RELEASED), compression=1.0)
        plan_pipedream(problem, straight=True)


def as_released(record: Record) -> Solution:
    """Return what the search as released finds for a run."""
    options = record.run.options
    return plan_pipedream_released(
        replace(record.problem, objective=RELEASED),
        straight="straight" in options,
        memory="mem16" in options,
        fewer="fewer" in options,
        compression=record.run.compression,
    )


def ours(record: Record) -> Solution | None:
    """Return what our search finds for a run; ``None`` where nothing keeps the repaired limits."""
    problem = replace(record.problem, objective=REPAIRED)
    try:
        return plan_pipedream(problem, straight="straight" in record.run.options)
    except InfeasibleError:
        return None


def measure_group(data: Path, scale: float) -> Group:
    """Return PipeDream's table."""
    group = Group(
        title="PipeDream: released period and repaired period (s), CPU seconds",
        headers=[
            *("run", "T", "as released", "T_E of its plan", "exact_E", "ours", "gap %", "proof"),
            *("its CPU", "CPU as released", "CPU ours", "times less"),
        ],
    )
    warm_up(data)
    optima = recorded_optima(data)
    least = math.inf
    for record in recorded(data):
        row, ratio = _compare(record, optima.get(record.tag, math.nan), scale, group.misses)
        group.rows.append(row)
        if wanted_ratio(record.cpu_s):
            least = min(least, ratio / wanted_ratio(record.cpu_s))
    gap = _beyond(data, group)
    group.figures = {"rows": len(group.rows), "least_speedup": least, "worst_gap_beyond": gap}
    return group


def _compare(
    record: Record, optimum: float, scale: float, misses: list[str]
) -> tuple[list[Any], float]:
    """Return the row of a run, and how many times less CPU it took; note what is missed."""
    released, released_s = timed(lambda: as_released(record))
    solution, own_s = timed(lambda: ours(record))
    predicted = released.stats["predicted_s"]
    flat = len(record.run.units) == 1
    if flat and not math.isclose(predicted, record.period_s, rel_tol=record.tolerance):
        misses.append(f"{record.tag}: as released {predicted:.9g}, recorded {record.period_s:.9g}")
    theirs = pipedream_repaired_time(record.problem, record.plan)
    value = math.nan if solution is None else solution.value
    limit = min(theirs.value, math.inf if math.isnan(optimum) else optimum)
    if not theirs.errors and not value <= limit * (1 + SIX_DIGITS):
        misses.append(f"{record.tag}: repaired period {value:.9g}, best recorded {limit:.9g}")
    ratio = record.cpu_s * scale / max(own_s, released_s)
    if ratio < wanted_ratio(record.cpu_s):
        misses.append(f"{record.tag}: {ratio:.0f} times less CPU")
    proof = "none fits" if solution is None else solution.proof.value
    gap = math.nan if solution is None else 100 * solution.gap
    return [
        *(record.tag, record.period_s, predicted, theirs.value, optimum, value, gap, proof),
        *(record.cpu_s * scale, released_s, own_s, f"{ratio:.0f}"),
    ], ratio


def _beyond(data: Path, group: Group) -> float:
    """Add the models that the released optimizer cannot finish; return the largest gap."""
    worst = 0.0
    for model in BEYOND:
        graph = read_graph(data, model)
        for cfg in ("n4_b10", "n8_b10"):
            cluster = pipedream_cluster(pipedream_run(cfg))
            problem = Problem(graph=graph, cluster=cluster, objective=REPAIRED)
            solution, own_s = timed(lambda problem=problem: plan_pipedream(problem))
            worst = max(worst, solution.gap)
            tag = f"{model}__{cfg}"
            if solution.gap > WANTED_GAP:
                group.misses.append(f"{tag}: {solution.gap:.2%} above the bound")
            group.rows.append(
                [
                    *(tag, "killed", "", "", "", solution.value, 100 * solution.gap),
                    *(solution.proof.value, "", "", own_s, ""),
                ]
            )
    return worst


class SparseRecord(NamedTuple):
    """A recorded optimum of the tool's stage model: server file, rates, options, period."""

    server_file: str
    rates: tuple[float, float]
    options: dict[str, Any]
    period_s: float

    @property
    def compression(self) -> float | None:
        """Activation compression ratio; ``None`` = free transfers."""
        ratio = self.options["compression"]
        return None if ratio == FREE else ratio


def sparse_records(data: Path) -> Iterator[SparseRecord]:
    """Yield the recorded optima, those of several servers last."""
    text = (data / "sparsepipedream/answers_exact.txt").read_text()
    pattern = r"^(\w+) B=(\S+) acr (\S+) (all|fewer) (slowest/r|weighted) T=(\S+)"
    for name, rate, ratio, devices, shares, value in re.findall(pattern, text, re.MULTILINE):
        options = {
            "compression": FREE if ratio == "None" else float(ratio),
            "fewer": devices == "fewer",
            "shares": "weighted" if shares == "weighted" else "equal",
        }
        yield SparseRecord(name, (float(rate), float(rate)), options, float(value))
    for name, value in MINK.items():
        for shares in ("equal", "weighted"):
            options = {"compression": 1.0, "fewer": True, "shares": shares}
            yield SparseRecord(name, (1e10, 1e9), options, value)


def sparse_problem(data: Path, record: SparseRecord) -> Problem:
    """Return the problem of a server file."""
    path = data / "sparsepipedream" / f"{record.server_file}.txt"
    problem = read_server_file(
        path.read_text(),
        open_beside(str(path), lambda name: Path(name).read_text()),
        intra_bytes_per_s=record.rates[0],
        inter_bytes_per_s=record.rates[1],
    )
    return replace(problem, objective=REPAIRED)


def measure_sparse(data: Path, scale: float) -> Group:
    """Return SparsePipedream's table; the tool needs at most 1.2 CPU seconds, not compared."""
    group = Group(
        title=f"SparsePipedream: period (s); recorded seconds are scaled by {scale:.2f}",
        headers=["server file", "rate", "acr", "devices", "shares", "recorded", "ours", "stages"],
    )
    total = 0.0
    for record in sparse_records(data):
        problem = sparse_problem(data, record)
        solution, own_s = timed(
            lambda problem=problem, record=record: plan_sparse_pipedream(problem, **record.options)
        )
        value = pipedream_repaired_time(
            problem,
            solution.plan,
            allreduce_factor=ALLREDUCE_FACTOR,
            compression=record.compression,
        ).value
        total += own_s
        devices = "fewer" if record.options["fewer"] else "all"
        stages = ",".join(str(stage.num_replicas) for stage in solution.plan.stages)
        group.rows.append(
            [
                *(record.server_file, record.rates[0], record.compression, devices),
                *(record.options["shares"], record.period_s, value, stages),
            ]
        )
        if value > record.period_s * (1 + SIX_DIGITS):
            group.misses.append(
                f"{record.server_file} {record.options}: {value:.9g}, recorded {record.period_s}"
            )
    group.figures = {"rows": len(group.rows), "cpu_s": total}
    return group
