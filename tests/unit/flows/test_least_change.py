"""What makes an infeasible problem feasible: applied as printed, the planner finds a plan."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import Phase, assume, given, reject, settings
from hypothesis import strategies as st

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.parse import parse_cluster
from partita.catalogue.what_if import what_if
from partita.core.graph import Graph, Labels
from partita.core.problem import Metric, Objective, Problem
from partita.core.rules import parse_rule
from partita.core.solution import Solution
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.least_change import (
    PRECISION,
    Relaxation,
    Ways,
    least_number,
    needed_memory,
    relaxations,
    rounded_up,
    scaled_memory,
)
from partita.objectives.placed import placement_errors
from partita.planners.single import plan_single
from partita.planners.table import Planner, get_planner
from partita.planners.uniform import plan_uniform
from partita.profiler.estimate.recompute import with_recomputation
from partita.testing.builders import Figures, chain, flat_cluster, random_dag

METRICS = (
    Metric.THROUGHPUT,
    Metric.LATENCY,
    Metric.MAX_LOAD,
    Metric.MAKESPAN_PARALLEL,
    Metric.PIPEDREAM_REPAIRED,
)
QUICKLY = (Phase.explicit, Phase.reuse, Phase.generate)
"""Phases of a test that solves many problems for each example: no time for shrinking."""
QUICK = ("single", "uniform", "parameters")
LARGE = Figures(
    parameter_bytes=[4.0, 60.0, 4.0, 4.0, 4.0, 4.0],
    saved_bytes=30.0,
    tensor_bytes=5.0,
    batch_size=8,
)


def least_change(problem: Problem, planner: Planner, ways: Ways | None = None) -> Relaxation | None:
    """Return the first change that helps; None where nothing that is tried does."""
    return next(relaxations(problem, planner, ways), None)


def applied(problem: Problem, change: Relaxation) -> Problem:
    """Return a problem changed as the command line would change it."""
    arguments = [word for word in change.arguments if word != "--recompute"]
    values = dict(zip(arguments[::2], arguments[1::2], strict=True))
    objective = problem.objective
    if "--memory-factor" in values:
        objective = replace(objective, memory_factor=float(values["--memory-factor"]))
    if "--microbatch-size" in values:
        objective = replace(
            objective,
            microbatch_size=int(values["--microbatch-size"]),
            microbatches=int(values["--microbatches"]),
        )
    cluster = problem.cluster
    if "--what-if" in values:
        cluster = what_if(cluster, values["--what-if"], load_catalogue())
    graph = problem.graph
    if "--recompute" in change.arguments:
        graph = with_recomputation(graph)
    rules = tuple(rule for rule in problem.rules if rule not in change.without)
    return replace(problem, graph=graph, cluster=cluster, objective=objective, rules=rules)


def is_infeasible(problem: Problem, planner: Callable[[Problem], Solution]) -> bool:
    try:
        planner(problem)
    except InfeasibleError:
        return True
    return False


def layered(problem: Problem) -> Problem:
    """Return the problem with a layer for each op, so that blocks can be computed again."""
    count = len(problem.graph)
    names = tuple(f"layer{index}" for index in range(count))
    ops = replace(problem.graph.ops, layers=Labels(names=names, of=np.arange(count)))
    return replace(problem, graph=replace(problem.graph, ops=ops))


@st.composite
def tight_problems(draw: st.DrawFn) -> Problem:
    """Small random problems with little memory and some rules."""
    num_ops, devices = draw(st.integers(2, 7)), draw(st.integers(1, 3))
    pins = st.builds(
        lambda op, device, ban: parse_rule(f"op{op}=d{device}", forbids=ban),
        st.integers(0, num_ops - 1),
        st.integers(0, devices - 1),
        st.booleans(),
    )
    objective = Objective(
        metric=draw(st.sampled_from(METRICS)),
        memory_factor=draw(st.sampled_from([0.05, 0.3, 1.0])),
    )
    memory = draw(st.floats(1.0, 400.0))
    cluster = flat_cluster(devices, bandwidth_bytes_per_s=1e3, memory_bytes=memory)
    rng = random.Random(draw(st.integers(0, 10**6)))
    try:
        return Problem(
            graph=random_dag(num_ops, rng, tied=0),
            cluster=cluster,
            objective=objective,
            rules=tuple(draw(st.lists(pins, max_size=2))),
        )
    except InvalidInputError:  # rules that leave an op without a device
        reject()


def check_change(problem: Problem, planner: Callable[[Problem], Solution]) -> None:
    """Check that what is printed makes a problem feasible, and that its rules hold."""
    try:
        assume(is_infeasible(problem, planner))
    except InvalidInputError:  # the metric does not apply to this planner's plans
        reject()
    change = least_change(problem, planner)
    assert change is not None
    again = planner(applied(problem, change))
    assert placement_errors(again.problem, again.plan) == []
    assert again.value == change.solution.value


@settings(max_examples=60, phases=QUICKLY)
@given(problem=tight_problems(), name=st.sampled_from(QUICK))
def test_what_is_printed_for_an_infeasible_problem_makes_it_feasible(
    problem: Problem, name: str
) -> None:
    check_change(problem, get_planner(name))


@pytest.mark.parametrize("metric", [Metric.THROUGHPUT, Metric.MAX_LOAD])
def test_so_it_is_with_a_planner_that_searches(metric: Metric) -> None:
    cluster = flat_cluster(2, bandwidth_bytes_per_s=1e3, memory_bytes=50.0)
    graph = chain(4, replace(LARGE, parameter_bytes=60.0))
    problem = Problem(graph=graph, cluster=cluster, objective=Objective(metric=metric))
    planner = get_planner("auto", iterations=3)
    assert is_infeasible(problem, planner)
    change = least_change(problem, planner, Ways(precision=0.2))
    assert change is not None
    assert not is_infeasible(applied(problem, change), planner)


@pytest.mark.parametrize("metric", METRICS)
def test_the_memory_is_the_least_that_is_enough(metric: Metric) -> None:
    cluster = flat_cluster(2, bandwidth_bytes_per_s=1e3, memory_bytes=100.0)
    problem = Problem(graph=chain(6, LARGE), cluster=cluster, objective=Objective(metric=metric))
    change = least_change(problem, plan_uniform)
    assert change is not None
    text = change.arguments[1].removeprefix("memory=").removesuffix("x")
    assert change.arguments == ("--what-if", f"memory={text}x")
    less = scaled_memory(problem, float(text) * (1 - 4 * PRECISION))
    assert is_infeasible(less, plan_uniform)
    assert "instead of 100 B" in change.words


def test_a_larger_share_of_the_memory_comes_before_more_of_it() -> None:
    cluster = flat_cluster(2, memory_bytes=1e6)
    problem = Problem(
        graph=chain(6, LARGE), cluster=cluster, objective=Objective(memory_factor=1e-4)
    )
    change = least_change(problem, plan_single)
    assert change is not None
    assert change.arguments[0] == "--memory-factor"
    assert not is_infeasible(applied(problem, change), plan_single)


def test_a_planner_that_plans_otherwise_with_less_memory_is_bisected() -> None:
    cluster = flat_cluster(3, memory_bytes=50.0)
    problem = Problem(graph=chain(6, LARGE), cluster=cluster)
    asked: list[float] = []

    def planner(changed: Problem) -> Solution:
        """One device where it fits, else as many as there are."""
        asked.append(changed.cluster.devices[0].memory_bytes)
        try:
            return plan_single(changed)
        except InfeasibleError:
            return plan_uniform(changed)

    change = least_change(problem, planner)
    uniform = least_change(problem, plan_uniform)
    assert change is not None
    assert uniform is not None
    assert change.arguments == uniform.arguments
    assert len(asked) < 25


def test_every_kind_of_change_is_found_and_helps() -> None:
    cluster = parse_cluster("2xa100", lambda path: path, load_catalogue())
    memory = 4e3 / cluster.devices[0].memory_bytes
    figures = replace(LARGE, parameter_bytes=40.0, saved_bytes=800.0)
    problem = Problem(
        graph=chain(8, figures),
        cluster=what_if(cluster, f"memory={memory}x", load_catalogue()),
        objective=Objective(microbatches=2),
        rules=(parse_rule("op0=host0/gpu0", forbids=False),),
    )
    problem = layered(problem)
    assert is_infeasible(problem, plan_uniform)
    changes = list(relaxations(problem, plan_uniform))
    kinds = [change.arguments[:1] for change in changes]
    assert kinds == [("--what-if",), ("--microbatch-size",), ("--recompute",), ("--what-if",)]
    assert changes[-1].arguments[1].startswith("+")
    for change in changes:
        assert not is_infeasible(applied(problem, change), plan_uniform)
        assert change.to_json()["arguments"] == list(change.arguments)


def test_where_neither_smaller_microbatches_nor_recomputation_do_both_may() -> None:
    figures = replace(LARGE, parameter_bytes=1.0, saved_bytes=[1.0, *[800.0] * 6, 1.0])
    graph = chain(8, figures)
    problem = layered(
        Problem(
            graph=graph,
            cluster=flat_cluster(1, memory_bytes=300.0),
            objective=Objective(microbatches=1),
        )
    )
    found = list(relaxations(problem, plan_single))
    assert [change.arguments[-1] for change in found][1:] == ["--recompute"]
    assert found[1].arguments[0] == "--microbatch-size"
    assert not is_infeasible(applied(problem, found[1]), plan_single)


def test_when_it_is_too_late_nothing_more_is_tried() -> None:
    problem = Problem(graph=chain(6, LARGE), cluster=flat_cluster(2, memory_bytes=50.0))
    assert least_change(problem, plan_uniform, Ways(stop=lambda: True)) is None
    answers = iter([False, False])
    late = Ways(stop=lambda: next(answers, True))
    found = list(relaxations(problem, plan_uniform, late))
    assert len(found) == 1
    assert not is_infeasible(applied(problem, found[0]), plan_uniform)


def test_a_rule_that_is_in_the_way_is_named() -> None:
    rules = (parse_rule("op5=d0", forbids=False), parse_rule("op1=d1", forbids=True))
    problem = Problem(graph=chain(6), cluster=flat_cluster(2), rules=rules)
    change = least_change(problem, plan_uniform)
    assert change is not None
    assert change.without == (rules[0],)
    assert change.words == "without pin op5=d0"
    assert change.to_json()["without"] == ["pin op5=d0"]
    assert not is_infeasible(applied(problem, change), plan_uniform)


def test_rules_that_are_in_the_way_together_are_named_together() -> None:
    rules = (parse_rule("op5=d0", forbids=False), parse_rule("op4=d0", forbids=False))
    problem = Problem(graph=chain(6), cluster=flat_cluster(2), rules=rules)
    change = least_change(problem, plan_uniform)
    assert change is not None
    assert change.without == rules


def test_memory_and_a_rule_that_are_in_the_way_together_are_both_named() -> None:
    rule = parse_rule("op5=d0", forbids=False)
    cluster = flat_cluster(2, memory_bytes=50.0)
    problem = Problem(graph=chain(6, LARGE), cluster=cluster, rules=(rule,))
    change = least_change(problem, plan_uniform)
    assert change is not None
    assert change.without == (rule,)
    assert change.arguments[0] == "--what-if"
    assert "without pin op5=d0" in change.words
    assert not is_infeasible(applied(problem, change), plan_uniform)


def test_nothing_is_said_where_nothing_helps() -> None:
    def refuses(problem: Problem) -> Solution:
        raise InfeasibleError(f"no plan for {problem.graph.name!r}")

    problem = Problem(graph=chain(3), cluster=flat_cluster(2))
    assert least_change(problem, refuses) is None


def test_smaller_microbatches_are_tried_with_a_graph_of_their_own() -> None:
    graph = chain(4, replace(LARGE, parameter_bytes=1.0))
    problem = Problem(
        graph=graph,
        cluster=flat_cluster(1, memory_bytes=60.0),
        objective=Objective(microbatches=2, microbatch_size=8),
    )
    sizes: list[int] = []

    def graph_at(size: int) -> Graph:
        sizes.append(size)
        return graph

    found = islice(relaxations(problem, plan_single, Ways(graph_at=graph_at)), 2)
    change = list(found)[-1]
    assert sizes == [4, 2]
    assert change.arguments == ("--microbatch-size", "2", "--microbatches", "8")


def test_what_a_plan_needs_is_what_it_fits_with() -> None:
    for metric in METRICS:
        problem = Problem(
            graph=chain(6, LARGE),
            cluster=flat_cluster(2, memory_bytes=50.0),
            objective=Objective(metric=metric),
        )
        plan = plan_uniform(scaled_memory(problem, 1e6)).plan
        need = needed_memory(problem, plan, 1e6)
        assert not is_infeasible(scaled_memory(problem, need * 1.0001), plan_uniform)
        assert is_infeasible(scaled_memory(problem, need * 0.999), plan_uniform)


@given(st.floats(1e-6, 1e9))
def test_numbers_are_rounded_up(value: float) -> None:
    first, second = (float(text) for text in islice(rounded_up(value), 2))
    assert value <= first * (1 + 2e-7)
    assert first <= value * 1.0011
    assert second > first


@given(st.integers(1, 300), st.integers(1, 200))
def test_the_least_number_is_found_with_few_tries(least: int, first: int) -> None:
    tried: list[int] = []

    def is_enough(number: int) -> bool:
        tried.append(number)
        return number >= least

    found = least_number(is_enough, lambda number: number <= 1000, first=first)
    assert found == max(least, first)
    assert len(tried) <= 30
    assert least_number(lambda _: False, lambda number: number <= 1000) is None
