"""Figures of a solution, and how plans are ranked."""

from dataclasses import replace

import numpy as np

from partita.core.graph import Labels
from partita.core.problem import Metric, Objective, Problem
from partita.core.solution import Solution
from partita.flows.compare import ranked
from partita.flows.planner_choice import planner_choice
from partita.flows.solutions import evaluated
from partita.flows.summary import describe_plan, summarise
from partita.planners.table import solve
from partita.plugins import PluginGroup
from partita.testing.builders import Figures, chain, flat_cluster, pipeline


def problem_with(memory_bytes: float) -> Problem:
    graph = chain(4, Figures(saved_bytes=100.0, tensor_bytes=1.0, parameter_bytes=8.0))
    cluster = flat_cluster(2, memory_bytes=memory_bytes)
    return Problem(graph=graph, cluster=cluster, objective=Objective(microbatches=4))


def test_a_plan_that_overfills_a_device_is_named():
    roomy = solve(problem_with(1e6), "uniform")
    tight = replace(roomy.problem, cluster=flat_cluster(2, memory_bytes=50.0))
    overfull = summarise(replace(roomy, problem=tight))
    assert summarise(roomy).overfull == ""
    assert "'d0' needs" in overfull.overfull
    assert overfull.to_json()["overfull"] == overfull.overfull


def test_devices_that_run_nothing_do_not_count_as_idle():
    names = {"op*": "d0"}
    summary = summarise(solve(problem_with(1e6), "manual", assignment=names))
    assert summary.to_json()["utilisation"] == 1.0


def test_plans_are_ranked_by_what_the_cost_model_says(monkeypatch):
    honest = solve(problem_with(1e6), "single")
    liar = Solution(
        problem=honest.problem, plan=honest.plan, metric=Metric.THROUGHPUT, value=1e-9, unit="s"
    )
    monkeypatch.setattr(PluginGroup, "find", lambda self, name: lambda problem: liar)
    found = ranked(honest.problem, [planner_choice(name, {}, {}) for name in ("liar", "uniform")])
    assert [candidate.name for candidate in found] == ["uniform", "liar"]


def test_plans_in_words():
    assert describe_plan(solve(problem_with(1e6), "single").plan) == "1 stage, 1f1b"
    assert (
        describe_plan(solve(problem_with(1e6), "uniform", replicas=2).plan) == "1 stage x 2, 1f1b"
    )


def summary_of(cut):
    """Return the summary of four ops in two blocks, wide inside, cut into two stages."""
    graph = chain(4, Figures(tensor_bytes=10.0, parameter_bytes=1.0))
    wide = np.where(np.isin(graph.tensors.producer, (0, 2)), 100.0, 10.0)
    blocks = Labels(names=("a", "b"), of=np.array([0, 0, 1, 1]))
    graph = replace(
        graph,
        ops=replace(graph.ops, blocks=blocks),
        tensors=replace(graph.tensors, bytes=wide),
    )
    cluster = flat_cluster(2)
    plan = pipeline(graph, cluster, [0, 1], microbatches=2)
    plan = replace(plan, stage_of=np.array(cut))
    return summarise(evaluated(Problem(graph=graph, cluster=cluster), plan, None))


def test_wide_cuts_inside_blocks_are_named():
    assert summary_of([0, 0, 1, 1]).cuts_inside_blocks == ""
    assert "send up to 100 B, cuts between them 10 B" in summary_of([0, 1, 1, 1]).cuts_inside_blocks
