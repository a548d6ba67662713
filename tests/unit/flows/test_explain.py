"""What-ifs of a plan: which are tried, and how long they search."""

from typing import Any

import pytest

import partita
from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.core.cluster import MAX_DEVICES
from partita.core.problem import Objective, Problem
from partita.flows import explain as flow
from partita.planners.table import solve
from partita.testing.builders import chain


@pytest.fixture
def solution():
    cluster = read_shorthand("2xa100", load_catalogue())
    problem = Problem(graph=chain(4), cluster=cluster, objective=Objective(microbatches=2))
    return solve(problem, "auto", time_limit=6.0, iterations=2)


def _limits(monkeypatch, solution, **options: Any) -> list[float]:
    seen: list[float] = []

    def planner(_name: str, **given: Any):
        seen.append(given["time_limit"])
        return lambda problem: solution

    monkeypatch.setattr(flow, "get_planner", planner)
    partita.explain(solution, **options)
    return seen


def test_what_ifs_share_the_seconds_of_the_search(monkeypatch, solution):
    assert _limits(monkeypatch, solution) == [2.0] * 3
    assert _limits(monkeypatch, solution, what_if=("bandwidth=2x",)) == [6.0]
    assert _limits(monkeypatch, solution, what_if=("bandwidth=2x",) * 100) == [0.5] * 100


def test_a_cluster_that_cannot_grow_is_not_asked_to(monkeypatch, solution):
    monkeypatch.setattr(flow, "MAX_DEVICES", 2)
    assert MAX_DEVICES > 2
    assert len(_limits(monkeypatch, solution)) == 2
