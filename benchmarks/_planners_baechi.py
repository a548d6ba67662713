"""Baechi: the released placements again, the time they take, and what ``auto`` makes of the inputs.

Three tables. *As released*: m-TOPO, m-ETF and m-SCT must give the recorded placement and makespan,
or fail where the recorded run failed. m-TOPO with a cap ignores the memory; where its plan breaks a
limit it is refused, and only the placement is compared. The program of m-SCT is degenerate: rows of
HiGHS's dual simplex are reproduced from the graph, those of other solvers given their favourites.
*Time*: CPU seconds of the same calls on 20,000 ops. *auto*: at or below every recorded plan that
keeps its limits, on every graph, number of devices and memory; where nothing fits, a proof.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _planners_common import Group, timed
from objectives import baechi_graph, read_json

from partita.core.problem import Metric, Problem
from partita.core.solution import Solution
from partita.errors import InfeasibleError
from partita.formats.baechi import read_baechi
from partita.planners.baechi.instance import Channels, Instance, MemoryRule, instance_of
from partita.planners.baechi.list_schedule import Schedule, event_schedule
from partita.planners.baechi.placement import best_solution, placed
from partita.planners.table import get_planner, solve
from partita.released.baechi import released_fill, released_schedule

MS = 1000.0
TOLERANCE = 1e-9
TIMES_M_ETF, TIMES_M_SCT, TIMES_WITHOUT_PROGRAM = 300, 6, 100
TIME_LIMIT_S = 2.0
PLANNER_OF = {"topo": "m-topo", "topo_nocap": "m-topo", "etf": "m-etf", "sct": "m-sct"}
HIGHS_SIMPLEX = ("highs", "highs-ds")


class Case(NamedTuple):
    """A recorded run with its plan, if it has one."""

    answer: dict[str, Any]
    plan: dict[str, Any] | None

    @property
    def makespan(self) -> float | None:
        """The recorded makespan in ms; None where the run failed."""
        return self.answer.get("makespan")

    @property
    def words(self) -> list[str]:
        """The cells that tell the case."""
        answer = self.answer
        memory = answer.get("mem_mode") or answer.get("mem_factor") or "file"
        solver = answer.get("solver") if answer["algo"] == "sct" else ""
        return [answer["graph"], answer["algo"], solver or "", str(memory)]


def measure_group(data: Path, scale: float) -> list[Group]:
    """Return the three tables."""
    reader = _Reader(data)
    return [_as_released(reader), _time(reader, scale), _auto(reader)]


class _Reader:
    """Reads problems and records, each file once."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.texts: dict[str, str] = {}

    def cases(self) -> Iterator[Case]:
        """Yield all recorded runs with parallel channels."""
        plans = read_json(self.data / "baechi/plans.json.gz")
        for name in ("dummy_results.json", "real_model_results.json", "answers.json"):
            for answer in read_json(self.data / "baechi" / name):
                kept = answer if "placement" in answer else plans.get(answer.get("case"))
                yield Case(answer, kept)

    def problem(self, answer: dict[str, Any]) -> Problem:
        """Return the problem of a recorded run."""
        text = self.text(answer["graph"])
        limit = answer.get("memory_limit")
        if limit is None and "mem_mode" in answer:
            figures = json.loads(text)
            share = figures["total_permanent"] / answer["n_devices"]
            ample = answer["mem_mode"] == "ample"
            limit = 1e15 if ample else int(answer["mem_mode"] * share + figures["max_peak"])
        if limit is None and "mem_factor" in answer:
            limit = int(answer["mem_factor"] * 6.92e9)
        return read_baechi(text, devices=answer.get("n_devices"), memory_bytes=limit)

    def text(self, graph: str) -> str:
        """Return the text of a graph."""
        if graph not in self.texts:
            self.texts[graph] = baechi_graph(self.data, graph)
        return self.texts[graph]


def _instance(problem: Problem) -> Instance:
    return instance_of(problem, Channels.PARALLEL, MemoryRule.BAECHI)


def _solved(problem: Problem, planner: str, **options: Any) -> Solution | InfeasibleError:
    try:
        return solve(problem, planner, **options)
    except InfeasibleError as exc:
        return exc


def _recorded_favourites(case: Case) -> np.ndarray:
    assert case.plan is not None
    favourite = np.full(len(case.plan["placement"]), -1)
    for parent, child in case.plan["favorite"].items():
        favourite[int(parent)] = child
    return favourite


def _as_released(reader: _Reader) -> Group:
    group = Group(
        title="Baechi as released: makespan in ms, parallel channels",
        headers=["graph", "algorithm", "solver", "memory", "devices", "recorded", "ours", "same"],
    )
    counts = {"placements": 0, "failures": 0, "given_favourites": 0}
    for case in reader.cases():
        algorithm = case.answer["algo"]
        large = case.answer["graph"] == "layered_20000"
        if algorithm == "sct" and large:
            continue  # timed in the second table
        problem = reader.problem(case.answer)
        other_solver = algorithm == "sct" and case.answer["solver"] not in HIGHS_SIMPLEX
        if other_solver and case.plan is None:
            continue
        if other_solver:
            schedule = released_schedule(_instance(problem), _recorded_favourites(case))
            found, makespan = schedule.device_of, schedule.makespan * MS
            kind = "given_favourites"
        else:
            found, makespan = _placement(problem, algorithm)
            kind = "failures" if case.makespan is None else "placements"
        same = _is_same(case, found, makespan)
        counts[kind] += same
        row = [*case.words, len(problem.cluster)]
        group.rows.append([*row, case.makespan or "fails", makespan or "fails", same])
        if not same:
            group.misses.append(f"as released: {' '.join(map(str, row))}")
    group.figures = counts
    return group


def _placement(problem: Problem, algorithm: str) -> tuple[Any, float | None]:
    """Return device of each op and makespan in ms as released; None where it fails."""
    options = {"cap": algorithm == "topo"} if algorithm.startswith("topo") else {}
    found = _solved(problem, PLANNER_OF[algorithm], as_released=True, **options)
    if isinstance(found, Solution):
        return found.plan.device_of, found.value * MS
    if algorithm != "topo":
        return None, None
    g = _instance(problem)
    cap = float(np.sum(g.kept) // g.num_devices + np.max(g.kept))
    schedule: Schedule = released_fill(g, np.arange(g.num_ops), cap)
    return (schedule.device_of, schedule.makespan * MS) if schedule.complete else (None, None)


def _is_same(case: Case, device_of: Any, makespan: float | None) -> bool:
    if case.makespan is None or makespan is None:
        return case.makespan is None and makespan is None
    if case.plan is not None and list(device_of) != case.plan["placement"]:
        return False
    return math.isclose(makespan, case.makespan, rel_tol=TOLERANCE)


def _time(reader: _Reader, scale: float) -> Group:
    group = Group(
        title="Baechi on 20,000 ops: CPU seconds, recorded ones as they would be here",
        headers=["planner", "devices", "recorded ms", "ms", "recorded s", "s", "times", "asked"],
    )
    _warm_up(reader)
    for case in reader.cases():
        if case.answer["graph"] != "layered_20000" or case.makespan is None:
            continue
        for task in _tasks(case.answer):
            problem = reader.problem(case.answer)
            solution, spent = timed(lambda task=task, problem=problem: task.call(problem))
            times, value = task.recorded_s * scale / spent, solution.value * MS
            key = f"{task.name} {case.answer['n_devices']}"
            cells = [case.makespan, value, task.recorded_s * scale, spent, times, task.asked]
            group.rows.append([task.name, case.answer["n_devices"], *cells])
            group.figures[f"times {key}"] = round(times)
            if times < task.asked:
                group.misses.append(f"{key}: {times:.0f} times faster; expected {task.asked}")
            if task.is_whole and value > case.makespan * (1 + TOLERANCE):
                group.misses.append(f"{key}: {value} ms; recorded {case.makespan}")
    return group


class Task(NamedTuple):
    """Something to time: what, the recorded seconds, and how many times faster it must be."""

    name: str
    recorded_s: float
    call: Callable[[Problem], Solution]
    asked: int
    is_whole: bool = True


def _tasks(answer: dict[str, Any]) -> list[Task]:
    whole = answer["user_s"]
    if answer["algo"] == "etf":
        return [
            Task("m-etf", whole, get_planner("m-etf"), TIMES_M_ETF),
            Task("m-etf as released", whole, get_planner("m-etf", as_released=True), TIMES_M_ETF),
        ]
    if answer["algo"] == "sct":
        rest = whole - answer["lp"]["lp_user"]
        return [
            Task("m-sct", whole, get_planner("m-sct"), TIMES_M_SCT),
            Task("m-sct as released", whole, get_planner("m-sct", as_released=True), TIMES_M_SCT),
            Task(
                "m-sct without the program",
                rest,
                _scheduled,
                TIMES_WITHOUT_PROGRAM,
                is_whole=False,
            ),
        ]
    return []


def _scheduled(problem: Problem) -> Solution:
    """Return the solution of m-SCT's schedule, each op's first reader its favourite child."""
    g = _instance(problem)
    favourite = np.full(g.num_ops, -1)
    has_reader = np.diff(g.succ_ptr) > 0
    favourite[has_reader] = g.succ[g.succ_ptr[:-1][has_reader]]
    schedule = event_schedule(g, favourite=favourite)
    return best_solution(problem, [placed(schedule)], "m-sct", {})


def _warm_up(reader: _Reader) -> None:
    """Load every kernel on other problems of the same size: smaller ones are interpreted."""
    for memory in (1.5, "ample"):
        answer = {"graph": "layered_20000", "n_devices": 3, "mem_mode": memory}
        problem = reader.problem(answer)
        for planner in ("m-etf", "m-sct"):
            for as_released in (False, True):
                _solved(problem, planner, as_released=as_released)
    _scheduled(problem)


def _auto(reader: _Reader) -> Group:
    group = Group(
        title=f"auto on Baechi's inputs, {TIME_LIMIT_S:g} s each: makespan in ms",
        headers=[*("graph", "channels", "devices", "memory"), "recorded", "ours", "bound", "CPU s"],
    )
    proven, improved = 0, 0
    for words, problem, recorded in _questions(reader):
        found, spent = timed(
            lambda problem=problem: _solved(problem, "auto", time_limit=TIME_LIMIT_S)
        )
        if isinstance(found, InfeasibleError):
            proof = "nothing fits" in str(found)
            proven += proof
            group.rows.append(
                [*words, recorded or "fails", "proof" if proof else "none", "", spent]
            )
            if recorded is not None or not proof:
                group.misses.append(f"auto: {' '.join(map(str, words))}: {found}")
            continue
        value = found.value * MS
        group.rows.append([*words, recorded or "fails", value, found.lower_bound * MS, spent])
        if recorded is not None and value > recorded * (1 + TOLERANCE):
            group.misses.append(f"auto: {' '.join(map(str, words))}: {value}, recorded {recorded}")
        improved += recorded is not None and value < recorded * (1 - 1e-6)
    group.figures = {"auto_rows": len(group.rows), "improved": improved, "proven": proven}
    return group


def _questions(reader: _Reader) -> Iterator[tuple[list[Any], Problem, float | None]]:
    """Yield each distinct problem with the best recorded makespan that keeps the limits, if any."""
    best: dict[tuple[Any, ...], tuple[dict[str, Any], float | None]] = {}
    for case in reader.cases():
        answer = case.answer
        problem = reader.problem(answer)
        key = (answer["graph"], "parallel", len(problem.cluster), case.words[3])
        known = best.setdefault(key, (answer, None))[1]
        # m-TOPO with a cap looks at no limit; what it finds elsewhere is never the best.
        if case.makespan is not None and answer["algo"] != "topo":
            best[key] = (answer, min(case.makespan, known or math.inf))
    for key, (answer, makespan) in best.items():
        yield list(key), reader.problem(answer), makespan
    sequential: dict[tuple[str, int], float] = {}
    for answer in read_json(reader.data / "baechi/tf_sequential_results.json"):
        pair = (answer["graph"], answer["n_devices"])
        sequential[pair] = min(answer["makespan"], sequential.get(pair, math.inf))
    for (graph, devices), makespan in sequential.items():
        problem = read_baechi(reader.text(graph), devices=devices, memory_bytes=1e15)
        objective = replace(problem.objective, metric=Metric.MAKESPAN_SEQUENTIAL)
        words = [graph, "sequential", devices, "ample"]
        yield words, replace(problem, objective=objective), makespan
