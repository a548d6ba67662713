"""Clusters with more devices than a plan makes use of are searched on fewer."""

from dataclasses import replace

import pytest

from partita.bounds import bound
from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.core.cluster import Cluster
from partita.core.problem import Objective, Problem
from partita.core.rules import parse_rule
from partita.cost.judge import judge
from partita.errors import InfeasibleError
from partita.planners.auto import reach
from partita.planners.auto.planner import plan_auto
from partita.planners.auto.reach import FEWEST_DEVICES, Reach, useful_devices, within_reach
from partita.testing.builders import Figures, chain, flat_cluster


def _cluster(text: str) -> Cluster:
    return read_shorthand(text, load_catalogue())


def _problem(cluster: Cluster, **figures: float) -> Problem:
    graph = chain(6, Figures(forward_s=1.0, backward_s=2.0, **figures))
    return Problem(graph=graph, cluster=cluster, objective=Objective(microbatches=4))


def test_the_first_hosts_of_each_kind_are_kept_whole():
    problem = _problem(_cluster("300x8xa100+300x4xv100+200x8xa100"))
    near = within_reach(problem).near.cluster
    kinds = [device.type for device in near.devices]
    assert kinds.count("a100") == kinds.count("v100") == FEWEST_DEVICES
    assert near.device_names[:8] == problem.cluster.device_names[:8]
    assert {sum(d.host == host for d in near.devices) for host in range(64)} == {8}


def test_large_models_and_many_microbatches_make_use_of_more():
    few = _problem(_cluster("1024x8xa100"))
    many = replace(few, objective=Objective(microbatches=300))
    assert useful_devices(few) == FEWEST_DEVICES
    assert useful_devices(many) == 2048  # 300 replicas of 6 ops
    limit = float(few.limit_bytes.min())
    large = _problem(few.cluster, parameter_bytes=100 * limit)
    assert useful_devices(replace(large, objective=Objective(microbatches=100))) > 512


@pytest.mark.parametrize("count", [600, 1000])
def test_clusters_of_about_that_size_stay_as_they_are(count):
    problem = _problem(_cluster(f"{count}xa100"))
    assert within_reach(problem).near is problem


def test_rules_and_matrices_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(reach, "FEWEST_DEVICES", 2)
    monkeypatch.setattr(reach, "USEFUL_STAGES", 1)
    ruled = _problem(_cluster("16x2xa100"))
    ruled = replace(ruled, rules=(parse_rule("op0=host9/gpu1", forbids=False),))
    assert within_reach(ruled).near is ruled


def test_devices_that_plans_use_are_kept(monkeypatch):
    monkeypatch.setattr(reach, "FEWEST_DEVICES", 2)
    monkeypatch.setattr(reach, "USEFUL_STAGES", 1)
    problem = _problem(_cluster("16x2xa100"))
    near = within_reach(problem, {"host15/gpu1"}).near
    assert near.cluster.device_names[-1] == "host15/gpu1"
    assert len(near.cluster) < len(problem.cluster)


def test_the_answer_is_that_of_the_devices_within_reach_and_the_bound_of_all(monkeypatch):
    monkeypatch.setattr(reach, "FEWEST_DEVICES", 8)
    monkeypatch.setattr(reach, "USEFUL_STAGES", 2)
    whole, part = _problem(_cluster("64x2xa100")), _problem(_cluster("4x2xa100"))
    found, near = plan_auto(whole, iterations=20), plan_auto(part, iterations=20)
    assert within_reach(whole).near.cluster.device_names == part.cluster.device_names
    assert found.problem is whole
    assert (found.value, found.plan.stages) == (near.value, near.plan.stages)
    assert found.lower_bound == bound(whole).value <= near.lower_bound


def test_all_devices_are_searched_where_nothing_fits_on_those_within_reach(monkeypatch):
    problem = _problem(flat_cluster(6, memory_bytes=80.0), parameter_bytes=10.0)
    assert len(plan_auto(problem, iterations=5).plan.devices) > 1
    monkeypatch.setattr(
        "partita.planners.auto.planner.within_reach",
        lambda asked, _: Reach(asked, replace(asked, cluster=asked.cluster.only({"d0"}))),
    )
    assert len(plan_auto(problem, iterations=5).plan.devices) > 1
    hopeless = _problem(flat_cluster(6, memory_bytes=20.0), parameter_bytes=10.0)
    with pytest.raises(InfeasibleError):
        plan_auto(hopeless, iterations=5)


def test_a_step_that_uses_thousands_of_devices_is_searched_as_a_part_of_itself(monkeypatch):
    monkeypatch.setattr(reach, "MOST_DEVICES", 4)
    monkeypatch.setattr(reach, "PART_DEVICES", 4)
    problem = _problem(_cluster("8x1xa100+8x1xv100"))
    problem = replace(problem, objective=Objective(microbatches=16))
    found = within_reach(problem)
    assert found.near.cluster.device_names == (
        "host0/gpu0",
        "host1/gpu0",
        "host8/gpu0",
        "host9/gpu0",
    )
    assert found.near.objective.microbatches == 4
    solution = plan_auto(problem, iterations=20)
    plan = solution.plan
    assert solution.value == judge(problem, plan).score
    assert solution.lower_bound == bound(problem).value
    assert plan.num_microbatches == 16
    assert len(set(plan.devices)) == len(plan.devices) > 4
    smaller = plan_auto(found.near, iterations=20)
    assert solution.value < 1.1 * smaller.value  # as much work on each device


@pytest.mark.parametrize("microbatches", [None, 15])
def test_what_cannot_be_divided_is_searched_whole(monkeypatch, microbatches):
    monkeypatch.setattr(reach, "MOST_DEVICES", 4)
    monkeypatch.setattr(reach, "PART_DEVICES", 4)
    problem = _problem(_cluster("8x1xa100"))
    problem = replace(problem, objective=Objective(microbatches=microbatches))
    assert within_reach(problem).near is problem
