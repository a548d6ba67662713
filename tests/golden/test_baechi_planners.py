"""Baechi's planners give the recorded placements, and the search is never above them.

Records: runs of the published placer, in the shared data folder (its README says how they were
made). Rows of m-SCT solved by HiGHS's dual simplex are reproduced from the graph alone.
"""

import gzip
import json

import numpy as np
import pytest

from partita.errors import InfeasibleError
from partita.formats.baechi import read_baechi
from partita.planners.baechi.best import best_placement
from partita.planners.baechi.instance import Channels, MemoryRule, instance_of
from partita.planners.baechi.m_etf import plan_m_etf
from partita.released.baechi import (
    plan_m_etf_released,
    plan_m_sct_released,
    plan_m_topo_released,
    released_fill,
    released_schedule,
)

MS = 1000.0
GRAPHS = (
    "graph_fig1",
    "graph_fig2",
    "graph_fig21",
    "graph_fig3",
    "inception_v3_b64",
    "transformer_b64",
    "layered_200",
)
OPTIMA = {"graph_fig1": 9.0, "graph_fig2": 13.0, "graph_fig21": 22.0, "graph_fig3": 29.0}


@pytest.fixture(scope="module")
def texts(shared_data):
    folder = shared_data / "baechi/graphs"
    return {name: (folder / f"{name}.json").read_text() for name in GRAPHS}


@pytest.fixture(scope="module")
def records(shared_data):
    """Return the recorded runs of the small graphs, each with its plan."""
    folder = shared_data / "baechi"
    plans = json.loads(gzip.decompress((folder / "plans.json.gz").read_bytes()))
    found = []
    for name in ("answers.json", "dummy_results.json", "real_model_results.json"):
        for answer in json.loads((folder / name).read_text()):
            if answer["graph"] in GRAPHS:
                plan = answer if "placement" in answer else plans.get(answer.get("case"))
                found.append((answer, plan))
    return found


def problem_of(texts, answer):
    text = texts[answer["graph"]]
    limit = answer.get("memory_limit")
    if limit is None and "mem_mode" in answer:
        graph, factor = json.loads(text), answer["mem_mode"]
        share = graph["total_permanent"] / answer["n_devices"]
        limit = 1e15 if factor == "ample" else int(factor * share + graph["max_peak"])
    if limit is None and "mem_factor" in answer:
        limit = int(answer["mem_factor"] * 6.92e9)
    return read_baechi(text, devices=answer.get("n_devices"), memory_bytes=limit)


def instance(problem):
    return instance_of(problem, Channels.PARALLEL, MemoryRule.BAECHI)


def check_solved(planner, problem, answer, plan):
    """Check the placement of a run, or that it fails where the recorded one failed."""
    if "makespan" not in answer:
        with pytest.raises(InfeasibleError, match="as released"):
            planner(problem)
        return
    solution = planner(problem)
    assert solution.plan.device_of.tolist() == plan["placement"]
    assert solution.value * MS == pytest.approx(answer["makespan"], rel=1e-9)


def test_etf_as_released_places_as_recorded(texts, records):
    rows = [row for row in records if row[0]["algo"] == "etf"]
    assert len(rows) == 25
    for answer, plan in rows:
        problem = problem_of(texts, answer)
        check_solved(plan_m_etf_released, problem, answer, plan)
        if plan is not None:
            assert released_schedule(instance(problem)).order.tolist() == plan["order"]


@pytest.mark.parametrize(("algorithm", "cap"), [("topo", True), ("topo_nocap", False)])
def test_topo_as_released_places_as_recorded(texts, records, algorithm, cap):
    """With a cap the memory is ignored, and a plan that breaks it is refused, not changed."""
    for answer, plan in records:
        if answer["algo"] != algorithm:
            continue
        problem = problem_of(texts, answer)
        g = instance(problem)
        most = float(np.sum(g.kept) // g.num_devices + np.max(g.kept)) if cap else None
        schedule = released_fill(g, np.arange(g.num_ops), most)
        assert schedule.complete == ("makespan" in answer)
        if plan is None:
            with pytest.raises(InfeasibleError, match="as released"):
                plan_m_topo_released(problem, cap=cap)
            continue
        assert schedule.device_of.tolist() == plan["placement"]
        assert schedule.order.tolist() == plan["order"]
        limit = g.limit[0]
        if max(answer["device_peak"].values()) <= limit * 0.9:
            check_solved(lambda p: plan_m_topo_released(p, cap=cap), problem, answer, plan)


def test_sct_as_released_schedules_recorded_favourites_as_recorded(texts, records):
    """Whatever solver chose the favourites."""
    rows = [row for row in records if row[0]["algo"] == "sct" and row[1] is not None]
    assert len(rows) > 40
    for answer, plan in rows:
        g = instance(problem_of(texts, answer))
        favourite = np.full(g.num_ops, -1)
        for parent, child in plan["favorite"].items():
            favourite[int(parent)] = child
        schedule = released_schedule(g, favourite)
        assert schedule.device_of.tolist() == plan["placement"]
        assert schedule.order.tolist() == plan["order"]
        assert (schedule.start * MS).tolist() == pytest.approx(plan["start"])


def test_sct_as_released_finds_the_favourites_of_the_recorded_simplex(texts, records):
    for answer, plan in records:
        if answer["algo"] == "sct" and answer["solver"] in ("highs", "highs-ds"):
            problem = problem_of(texts, answer)
            check_solved(plan_m_sct_released, problem, answer, plan)


def test_the_search_is_at_or_below_every_record_and_says_where_nothing_fits(texts, records):
    best = {}
    for answer, _ in records:
        key = (answer["graph"], answer.get("mem_mode"), answer.get("mem_factor"))
        key += (answer.get("n_devices") if answer["graph"] not in OPTIMA else None,)
        known = best.setdefault(key, [answer, np.inf])
        if "makespan" in answer and answer["algo"] != "topo":
            best[key] = [answer, min(known[1], answer["makespan"])]
    for answer, makespan in best.values():
        problem = problem_of(texts, answer)
        if makespan == np.inf and answer["graph"] != "layered_200":
            with pytest.raises(InfeasibleError, match="nothing fits"):
                best_placement(problem, iterations=100)
            continue
        value = best_placement(problem, iterations=4000).value * MS
        assert value <= makespan * (1 + 1e-9)
        assert value >= OPTIMA.get(answer["graph"], 0.0) * (1 - 1e-9)


@pytest.mark.slow
def test_compiled_kernels_give_the_same_answer(shared_data, monkeypatch):
    """On a graph that is large enough, against the interpreted ones."""
    text = (shared_data / "baechi/graphs/layered_5000.json").read_text()
    problem = read_baechi(text, devices=4, memory_bytes=1e15)
    compiled = plan_m_etf(problem)
    monkeypatch.setattr("partita.kernels.pays", lambda *_: False)
    interpreted = plan_m_etf(read_baechi(text, devices=4, memory_bytes=1e15))
    assert compiled == interpreted
    assert compiled.value * MS < 1684.0
