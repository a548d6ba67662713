"""PipeDream's planner against all pipelines of small problems; its repaired faults by number."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.planners.pipelines import compositions, cuts, rows

from partita.core.cluster import Cluster, Device, Level
from partita.core.graph import DeviceKind, Graph
from partita.core.plan import Plan
from partita.core.problem import Metric, Objective, Problem, Schedule
from partita.core.rules import Rule
from partita.core.solution import Proof
from partita.errors import InfeasibleError, InvalidInputError
from partita.formats.pipedream import read_pipedream
from partita.objectives.pipedream import pipedream_time, why_not_pipedream
from partita.objectives.repaired import pipedream_repaired_time
from partita.planners.effort import SearchTrace
from partita.planners.pipedream.bound import bound_of
from partita.planners.pipedream.build import plan_on, whole_shares
from partita.planners.pipedream.model import model_of
from partita.planners.pipedream.planner import plan_pipedream
from partita.planners.pipedream.search import Best, minimise
from partita.planners.pipedream.site import site_of
from partita.planners.table import Planner, solve
from partita.released.pipedream import Options, plan_pipedream_released, released_plan
from partita.testing.builders import (
    Figures,
    Traits,
    chain,
    flat_cluster,
    graph_of,
    host_cluster,
    random_dag,
)

REPAIRED = Objective(metric=Metric.PIPEDREAM_REPAIRED)
RELEASED = Objective(metric=Metric.PIPEDREAM)
SLACK = 1 + 1e-7
SEEDS = st.integers(0, 10**6)
SMALL = settings(max_examples=12, deadline=None, derandomize=True)


def bound_on(problem: Problem) -> tuple[float, str]:
    """Return the best bound of a problem, and its name."""
    return bound_of(model_of(problem), site_of(problem))


def some_graph(seed: int, num_ops: int = 5) -> Graph:
    return random_dag(num_ops, random.Random(seed), tied=0, window=3)


def flat_problem(seed: int, *, devices: int = 3, memory_bytes: float = float("inf")) -> Problem:
    rng = random.Random(seed)
    cluster = flat_cluster(
        devices, bandwidth_bytes_per_s=rng.choice([5.0, 20.0, 100.0]), memory_bytes=memory_bytes
    )
    return Problem(graph=some_graph(seed), cluster=cluster, objective=REPAIRED)


def best_row(problem: Problem, **options: bool) -> float:
    """Return the least value of all pipelines on consecutive devices that keep the limits."""
    values = [pipedream_repaired_time(problem, plan) for plan in rows(problem, **options)]
    return min((value.value for value in values if not value.errors), default=float("inf"))


@SMALL
@given(SEEDS)
def test_a_flat_cluster_is_solved_exactly(seed: int) -> None:
    problem = flat_problem(seed, devices=1 + seed % 4)
    solution = plan_pipedream(problem)
    assert solution.value == pytest.approx(best_row(problem), rel=1e-7)
    assert solution.proof is Proof.OPTIMAL
    assert solution.gap < 1e-6


@SMALL
@given(SEEDS)
def test_memory_limits_the_search_exactly(seed: int) -> None:
    """B9: versions in flight, gradients and optimizer state count, for the last stage too."""
    problem = flat_problem(seed, memory_bytes=300.0 + seed % 7 * 250)
    best = best_row(problem)
    if np.isinf(best):
        with pytest.raises(InfeasibleError, match=r"'op\d+'|'d0'"):
            plan_pipedream(problem)
    else:
        assert plan_pipedream(problem).value == pytest.approx(best, rel=1e-7)


def test_an_input_with_several_readers_is_planned_where_it_fits_once() -> None:
    """Memory of a stage that reads an input twice is held once; the search takes it twice."""
    figures = Figures(forward_s=1.0, backward_s=0.0, input_bytes=60.0, parameter_bytes=0.0)
    graph = graph_of(3, [(0, 2), (1, 2)], figures)
    cluster = flat_cluster(2, memory_bytes=100.0, bandwidth_bytes_per_s=0.1)
    problem = Problem(graph=graph, cluster=cluster, objective=REPAIRED)
    assert model_of(problem).overcounts
    assert plan_pipedream(problem).value == best_row(problem) == 1.5


@SMALL
@given(SEEDS, st.booleans(), st.booleans())
def test_straight_pipelines_and_all_devices_are_searched_exactly(
    seed: int, straight: bool, fewer: bool
) -> None:
    problem = flat_problem(seed)
    solution = plan_pipedream(problem, straight=straight, fewer=fewer)
    best = best_row(problem, straight=straight, exact=not fewer)
    assert solution.value == pytest.approx(best, rel=1e-7)
    assert straight <= all(stage.num_replicas == 1 for stage in solution.plan.stages)
    assert fewer or len(solution.plan.devices) == 3


@SMALL
@given(SEEDS)
def test_rows_of_devices_through_servers_are_searched_exactly(seed: int) -> None:
    """B3, B7: stages on any nested ideals, which span servers and share them."""
    cluster = host_cluster(2, 2, inside_bytes_per_s=50.0, between_bytes_per_s=10.0 + seed % 3 * 10)
    problem = Problem(graph=some_graph(seed, 4), cluster=cluster, objective=REPAIRED)
    solution = plan_pipedream(problem)
    assert solution.value <= best_row(problem) * SLACK
    assert solution.lower_bound <= solution.value


@SMALL
@given(SEEDS)
def test_no_bound_exceeds_the_best_of_all_placements_on_servers(seed: int) -> None:
    rng = random.Random(seed)
    cluster = host_cluster(2, 2, inside_bytes_per_s=30.0, between_bytes_per_s=8.0)
    problem = Problem(graph=some_graph(seed, 4), cluster=cluster, objective=REPAIRED)
    value, term = bound_on(problem)
    best = min(
        pipedream_repaired_time(problem, plan).value for plan in scattered_pipelines(problem, rng)
    )
    assert 0 < value <= best * SLACK, term
    assert plan_pipedream(problem).value >= value


def scattered_pipelines(problem: Problem, rng: random.Random) -> list[Plan]:
    """Return pipelines with every cut, on devices in every split and some orders."""
    count = len(problem.cluster)
    orders = [rng.sample(range(count), count) for _ in range(3)]
    return [
        plan_on(
            problem,
            stage_of,
            [order[end - size : end] for size, end in zip(sizes, ends, strict=True)],
        )
        for stage_of in cuts(problem.graph, count)
        for used in range(int(stage_of.max()) + 1, count + 1)
        for sizes in compositions(int(stage_of.max()) + 1, used)
        for ends in [np.cumsum(sizes).tolist()]
        for order in orders
    ]


@SMALL
@given(SEEDS, st.booleans(), st.booleans(), st.sampled_from([None, 1.0, 4.0]))
def test_released_values_are_those_of_its_own_objective(
    seed: int, straight: bool, fewer: bool, compression: float | None
) -> None:
    """B12: memory and fewer devices together are no crash."""
    problem = replace(flat_problem(seed), objective=RELEASED)
    solution = plan_pipedream_released(
        problem, straight=straight, fewer=fewer, compression=compression
    )
    best = min(
        pipedream_time(problem, plan, compression=compression).value
        for plan in rows(problem, straight=straight, exact=not fewer)
    )
    assert solution.stats["predicted_s"] == pytest.approx(best, rel=1e-9)


@SMALL
@given(SEEDS)
def test_the_released_memory_rule_is_kept(seed: int) -> None:
    problem = replace(flat_problem(seed, memory_bytes=150.0 + seed % 5 * 60), objective=RELEASED)
    values = [pipedream_time(problem, plan) for plan in rows(problem, exact=True)]
    best = min(value.value for value in values if not value.errors)
    options = Options(straight=False, fewer=False, memory=True, compression=1.0)
    assert released_plan(problem, options, 1000).period_s == pytest.approx(best, rel=1e-9)


@SMALL
@given(SEEDS)
def test_released_values_on_servers_are_those_of_its_own_objective(seed: int) -> None:
    """Chains only: with branches the released code splits ops (B3)."""
    rng = random.Random(seed)
    figures = Figures(
        forward_s=[rng.uniform(1, 9) for _ in range(5)],
        tensor_bytes=[rng.uniform(1, 50) for _ in range(5)],
        parameter_bytes=[rng.uniform(1, 50) for _ in range(5)],
    )
    cluster = host_cluster(2, 2, inside_bytes_per_s=50.0, between_bytes_per_s=10.0)
    problem = Problem(graph=chain(5, figures), cluster=cluster, objective=RELEASED)
    values = [
        pipedream_time(problem, plan).value
        for plan in tied_pipelines(problem)
        if why_not_pipedream(problem, plan) is None
    ]
    solution = plan_pipedream_released(problem, compression=1.0)
    assert solution.stats["predicted_s"] == pytest.approx(min(values), rel=1e-9)
    assert solution.value == pytest.approx(min(values), rel=1e-9)


def tied_pipelines(problem: Problem) -> list[Plan]:
    """Return the pipelines of two servers of two devices that use all four."""
    inner = [[[0], [1]], [[0, 1]]]
    layouts = [
        [[d + 2 * s for d in group] for s, part in enumerate(pair) for group in part]
        for pair in product(inner, inner)
    ]
    layouts += [[[d, d + 2] for d in (0, 1)], [[0, 2, 1, 3]]]
    return [
        plan_on(problem, stage_of, groups)
        for stage_of in cuts(problem.graph, 4)
        for groups in layouts
        if len(groups) == int(stage_of.max()) + 1
    ]


@SMALL
@given(SEEDS)
def test_joining_light_ops_loses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    graph = some_graph(seed, 6)
    light = np.array([rng.random() < 0.5 for _ in range(6)])
    costs = graph.costs[0]
    zero = replace(
        costs,
        forward_s=np.where(light, 0.0, costs.forward_s),
        backward_s=np.where(light, 0.0, costs.backward_s),
        backward_input_s=np.full(6, np.nan),
    )
    table = graph.parameters
    heavy_uses = ~light[table.use_op]
    bare = replace(
        table, use_op=table.use_op[heavy_uses], use_parameter=table.use_parameter[heavy_uses]
    )
    graph = replace(graph, costs=(zero,), parameters=bare)
    cluster = flat_cluster(3, bandwidth_bytes_per_s=rng.choice([2.0, 10.0]))
    problem = Problem(graph=graph, cluster=cluster, objective=REPAIRED)
    assert plan_pipedream(problem).value == pytest.approx(best_row(problem), rel=1e-7)


def test_light_ops_are_joined_or_float() -> None:
    """An element of a tuple, and a state that nobody computes."""
    figures = Figures(
        forward_s=[1.0, 0.0, 1.0, 0.0],
        backward_s=0.0,
        tensor_bytes=[8.0, 4.0, 2.0, 0.0],
        parameter_bytes=0.0,
    )
    graph = graph_of(4, [(0, 1), (1, 2), (3, 2)], figures)
    model = model_of(Problem(graph=graph, cluster=flat_cluster(2)))
    assert model.q.num_nodes == 2
    assert model.floating.tolist() == [False, False, False, True]
    assert sorted(model.net_bytes.tolist()) == [0.0, 4.0]


def test_all_sources_count() -> None:
    """B2: the released search sees the first source and what follows it; the other is left out."""
    figures = Figures(forward_s=[1.0, 9.0, 1.0], backward_s=0.0)
    graph = graph_of(3, [(0, 2), (1, 2)], figures)
    problem = Problem(graph=graph, cluster=flat_cluster(2), objective=REPAIRED)
    assert plan_pipedream(problem, straight=True).value == 9.0
    alone = graph_of(2, [], Figures(forward_s=[1.0, 9.0], backward_s=0.0))
    problem = Problem(graph=alone, cluster=flat_cluster(1), objective=RELEASED)
    solution = plan_pipedream_released(problem)
    assert solution.stats["predicted_s"] == 1.0
    assert solution.value == 10.0


def test_the_output_of_the_first_stage_is_charged() -> None:
    """B4: as released a cut after the first stage costs by the replicas of the second alone."""
    figures = Figures(
        forward_s=[1.0, 5.0], backward_s=0.0, tensor_bytes=[30.0, 0.0], parameter_bytes=0.0
    )
    cluster = flat_cluster(4, bandwidth_bytes_per_s=10.0)
    problem = Problem(graph=chain(2, figures), cluster=cluster, objective=RELEASED)
    released = plan_pipedream_released(problem, compression=1.0, straight=False)
    mended = plan_pipedream(replace(problem, objective=REPAIRED))
    assert released.stats["predicted_s"] <= mended.value
    assert mended.value == 1.5
    assert mended.stats["predicted_s"] == mended.value


def test_devices_stay_unused_where_that_is_better() -> None:
    """B6: four replicas synchronise for longer than one device computes."""
    figures = Figures(forward_s=1.0, backward_s=0.0, parameter_bytes=1000.0, tensor_bytes=1000.0)
    cluster = flat_cluster(4, bandwidth_bytes_per_s=1.0)
    problem = Problem(graph=chain(2, figures), cluster=cluster, objective=REPAIRED)
    assert plan_pipedream(problem).value == 2.0
    assert len(plan_pipedream(problem).plan.devices) == 1
    assert plan_pipedream(problem, fewer=False).value > 100


def test_transfers_are_free_only_as_released() -> None:
    """B10: leaving the compression out."""
    figures = Figures(forward_s=1.0, backward_s=0.0, tensor_bytes=1000.0, parameter_bytes=1e6)
    cluster = flat_cluster(2, bandwidth_bytes_per_s=1.0)
    problem = Problem(graph=chain(2, figures), cluster=cluster, objective=RELEASED)
    assert plan_pipedream_released(problem).stats["predicted_s"] == 1.0
    mended = replace(problem, objective=REPAIRED)
    assert plan_pipedream(mended).value == 2.0
    assert plan_pipedream(mended, compression=2000.0).stats["predicted_s"] == 1.0


@pytest.mark.parametrize("planner", [plan_pipedream, plan_pipedream_released])
def test_more_straight_stages_than_cuts_are_infeasible_and_said_so(planner: Planner) -> None:
    """B13."""
    problem = Problem(graph=chain(3), cluster=flat_cluster(4), objective=REPAIRED)
    with pytest.raises(InfeasibleError, match="'d3' would stay empty"):
        planner(problem, straight=True, fewer=False)


def test_a_deep_chain_is_no_recursion() -> None:
    """B14."""
    problem = Problem(graph=chain(3000), cluster=flat_cluster(4), objective=REPAIRED)
    solution = plan_pipedream(problem, ideals=1000, orders=1, iterations=0)
    assert solution.value == pytest.approx(3000 * 3.0 / 4, rel=1e-3)


def test_released_search_refuses_too_many_states_and_mixed_devices() -> None:
    """B1, B16: one line instead of memory without end, and of a bare assertion."""
    wide = graph_of(14, [(0, op) for op in range(1, 13)] + [(op, 13) for op in range(1, 13)])
    problem = Problem(graph=wide, cluster=flat_cluster(2), objective=RELEASED)
    with pytest.raises(InvalidInputError, match="more than 1000 states"):
        plan_pipedream_released(problem, ideals=1000)
    mixed = replace(problem, cluster=flat_cluster(2, speeds=(1.0, 2.0)))
    with pytest.raises(InvalidInputError, match="equal devices"):
        plan_pipedream_released(mixed)


def test_several_sources_beyond_the_limit_of_states_are_refused_too() -> None:
    graph = graph_of(12, [(op, 11) for op in range(11)])
    problem = Problem(graph=graph, cluster=flat_cluster(2), objective=RELEASED)
    assert plan_pipedream_released(problem).stats["states"] == 2
    with pytest.raises(InvalidInputError, match="states"):
        plan_pipedream_released(problem, ideals=1)


def test_graphs_with_too_many_ideals_are_solved_by_orders_and_neighbourhoods() -> None:
    """B1."""
    graph = random_dag(24, random.Random(3), tied=0, window=12)
    cluster = flat_cluster(3, bandwidth_bytes_per_s=20.0)
    problem = Problem(graph=graph, cluster=cluster, objective=REPAIRED)
    exact = plan_pipedream(problem, ideals=100_000)
    assert exact.proof is Proof.OPTIMAL
    near = plan_pipedream(problem, ideals=200)
    assert near.proof is Proof.FEASIBLE
    assert exact.value <= near.value * SLACK <= exact.value * 1.1
    assert near.lower_bound <= exact.value
    alone = plan_pipedream(problem, ideals=50, orders=1, iterations=0)
    assert near.value <= alone.value


def test_shares_follow_the_speed_of_unequal_devices() -> None:
    cluster = flat_cluster(2, speeds=(1.0, 3.0))
    problem = Problem(graph=chain(1), cluster=cluster, objective=REPAIRED)
    solution = plan_pipedream(problem)
    assert solution.value == pytest.approx(3 / 4)
    assert solution.plan.stages[0].shares == (1, 3)
    assert whole_shares(np.array([1.0, 0.0])) == ()
    assert whole_shares(np.array([1.0, 2.0]), 4) == (3, 1)


def test_given_microbatches_are_dealt_evenly() -> None:
    objective = replace(REPAIRED, microbatches=4)
    problem = Problem(graph=chain(1), cluster=flat_cluster(3), objective=objective)
    solution = plan_pipedream(problem)
    assert solution.plan.stages[0].num_replicas == 2
    assert solution.plan.num_microbatches == 4


def test_replicas_with_a_small_common_multiple_are_preferred() -> None:
    rng = random.Random(1)
    figures = Figures(
        forward_s=[rng.uniform(1, 30) for _ in range(8)], tensor_bytes=0.0, parameter_bytes=0.0
    )
    problem = Problem(graph=chain(8, figures), cluster=flat_cluster(40), objective=REPAIRED)
    solution = plan_pipedream(problem, fewer=None)
    assert solution.plan.num_microbatches <= 5040


def test_replicas_without_a_common_multiple_in_reach_give_way() -> None:
    """Every op fills a device, and stages of prime numbers of replicas would be the best."""
    primes = [19.0, 17.0, 13.0, 11.0, 7.0, 5.0, 3.0, 2.0]
    figures = Figures(forward_s=primes, backward_s=0.0, parameter_bytes=4.0)
    cluster = flat_cluster(77, memory_bytes=1500.0)
    objective = replace(REPAIRED, optimizer_bytes_per_element=1000.0)
    problem = Problem(graph=chain(8, figures), cluster=cluster, objective=objective)
    solution = plan_pipedream(problem)
    assert len(solution.plan.stages) == 8
    assert solution.plan.num_microbatches <= 55440
    assert 1.0 < solution.value < 1.4


@SMALL
@given(SEEDS)
def test_a_narrow_search_of_a_row_is_never_better_than_the_wide_one(seed: int) -> None:
    cluster = host_cluster(3, 2, inside_bytes_per_s=50.0, between_bytes_per_s=10.0 + seed % 3 * 10)
    problem = Problem(graph=some_graph(seed), cluster=cluster, objective=REPAIRED)
    wide = plan_pipedream(problem).value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partita.planners.pipedream.row.WIDE_STEPS", 0)
        narrow = plan_pipedream(problem).value
    assert wide <= narrow * SLACK <= wide * 1.5


def test_elements_of_tuples_that_nobody_reads_go_with_their_op() -> None:
    numbers = "forward_compute_time=1.0, backward_compute_time=1.0, activation_size=4.0, "
    lines = [
        f"node{k} -- {what} -- {numbers}parameter_size=0.0"
        for k, what in enumerate(("LSTM", "__getitem__(0)", "__getitem__(1)", "Linear"))
    ]
    edges = ["\tnode0 -- node1", "\tnode0 -- node2", "\tnode1 -- node3"]
    graph = read_pipedream("\n".join([*lines, *edges]))
    cluster = flat_cluster(3, bandwidth_bytes_per_s=1e6)
    problem = Problem(graph=graph, cluster=cluster, objective=REPAIRED)
    model = model_of(problem)
    assert model.q.num_nodes == 3
    assert model.q.node_of[0] == model.q.node_of[2]
    assert plan_pipedream(problem, straight=True).value == pytest.approx(0.002)


def test_a_search_without_memory_is_refused_where_its_plan_does_not_fit() -> None:
    figures = Figures(parameter_bytes=100.0)
    cluster = flat_cluster(2, memory_bytes=500.0)
    problem = Problem(graph=chain(2, figures), cluster=cluster, objective=REPAIRED)
    with pytest.raises(InfeasibleError, match="device 'd0' needs"):
        plan_pipedream(problem, memory=False)
    released = Options(straight=True, fewer=False, memory=True, compression=1.0)
    with pytest.raises(InfeasibleError, match="bytes on device 'd0'"):
        released_plan(replace(problem, cluster=flat_cluster(2, memory_bytes=50.0)), released, 100)


def test_servers_are_planned_for_the_released_objective_too() -> None:
    """Pipelines that it cannot measure, such as stages across servers, are passed over."""
    figures = Figures(forward_s=[1.0, 4.0, 1.0], backward_s=0.0, tensor_bytes=1.0)
    cluster = host_cluster(2, 2, inside_bytes_per_s=50.0, between_bytes_per_s=20.0)
    problem = Problem(graph=chain(3, figures), cluster=cluster, objective=RELEASED)
    solution = plan_pipedream(problem)
    assert why_not_pipedream(problem, solution.plan) is None
    assert solution.value <= 3.0


def test_time_is_kept_between_rows_of_devices() -> None:
    cluster = flat_cluster(12, speeds=[1.0, 2.0, 3.0] * 4, bandwidth_bytes_per_s=20.0)
    graph = random_dag(24, random.Random(3), tied=0, window=12)
    problem = Problem(graph=graph, cluster=cluster, objective=REPAIRED)
    hasty = plan_pipedream(problem, ideals=50, orders=2, iterations=0, time_limit=1e-9)
    patient = plan_pipedream(problem, ideals=50, orders=2, iterations=0)
    assert patient.lower_bound <= patient.value <= hasty.value


def three_level_problem(graph: Graph, speeds: Sequence[float]) -> Problem:
    """Return a throughput problem on hosts of two devices, two hosts a rack."""
    cluster = flat_cluster(len(speeds), speeds=speeds)
    levels = tuple(
        Level(
            name=name,
            group_of=np.arange(len(speeds), dtype=np.int32) // size,
            bandwidth_bytes_per_s=np.full(-(-len(speeds) // size), rate),
        )
        for name, size, rate in (
            ("host", 2, 100.0),
            ("rack", 4, 40.0),
            ("network", len(speeds), 10.0),
        )
    )
    objective = Objective(metric=Metric.THROUGHPUT, microbatches=8, microbatch_size=1)
    return Problem(graph=graph, cluster=replace(cluster, levels=levels), objective=objective)


def test_servers_with_too_many_choices_are_solved_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of unequal devices, none small enough for all choices: by rows, each once."""
    problem = three_level_problem(some_graph(3, 8), [1.0, 2.0, 2.0, 3.5])
    small = plan_pipedream(problem).stats["predicted_s"]
    monkeypatch.setattr("partita.planners.pipedream.mixed.MAX_STEPS", 0)
    solution = plan_pipedream(problem)
    assert small <= solution.stats["predicted_s"] * SLACK <= small * 1.5
    assert solution.lower_bound <= solution.value


def test_periods_without_a_value_of_their_own_are_bisected() -> None:
    """Where a solution's value is the period that was asked for, steps must not be tiny."""
    best: Best[float] = Best()
    minimise(lambda period: (period, period) if period >= 7 else None, best, 1.0)
    assert best.value == pytest.approx(7.0, rel=1e-8)
    assert best.probes < 60


def test_a_test_that_no_period_passes_is_given_up_soon() -> None:
    tried: list[float] = []
    best: Best[float] = Best()
    minimise(tried.append, best, 1.0)
    assert best.found is None
    assert len(tried) < 10
    assert max(tried) > 1e20


def test_unequal_devices_get_a_fixed_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps give a plan that is no better, always the same; a time limit replaces them."""
    graph = random_dag(16, random.Random(3), tied=0, window=8)
    problem = three_level_problem(graph, [1.0, 2.0, 3.5, 1.0, 2.0, 2.0])
    full = plan_pipedream(problem, ideals=300, orders=4)
    monkeypatch.setattr("partita.planners.pipedream.repaired.MOST_STEPS", 1)
    few = [plan_pipedream(problem, ideals=300, orders=4) for _ in range(2)]
    timed = plan_pipedream(problem, ideals=300, orders=4, time_limit=1e6)
    periods = [solution.stats["predicted_s"] for solution in (timed, full, few[0])]
    assert periods[0] <= periods[1] * SLACK
    assert periods[1] <= periods[2] * SLACK
    assert few[0].plan == few[1].plan


def test_compression_divides_the_cuts_of_the_repaired_objective() -> None:
    figures = Figures(forward_s=1.0, backward_s=0.0, tensor_bytes=30.0, parameter_bytes=0.0)
    cluster = flat_cluster(2, bandwidth_bytes_per_s=10.0)
    problem = Problem(graph=chain(2, figures), cluster=cluster, objective=REPAIRED)
    plan = plan_on(problem, np.array([0, 1]), [[0], [1]])
    values = [
        pipedream_repaired_time(problem, plan, compression=ratio).value
        for ratio in (1.0, 3.0, None)
    ]
    assert values == [6.0, 2.0, 1.0]
    with pytest.raises(InvalidInputError, match="compression is 0"):
        pipedream_repaired_time(problem, plan, compression=0.0)


def test_pins_hold_and_bans_too() -> None:
    figures = Figures(forward_s=1.0, backward_s=0.0, tensor_bytes=1.0, parameter_bytes=1.0)
    problem = Problem(
        graph=chain(4, figures),
        cluster=host_cluster(2, 1, inside_bytes_per_s=1e3, between_bytes_per_s=1e3),
        objective=REPAIRED,
        rules=(Rule(ops="op0", devices="d1"), Rule(ops="op3", devices="d1", forbids=True)),
    )
    plan = plan_pipedream(problem).plan
    first, last = (plan.stages[plan.stage_of[op]] for op in (0, 3))
    assert [plan.devices[d] for (d,) in first.devices] == ["d1"]
    assert [plan.devices[d] for (d,) in last.devices] == ["d0"]


def test_rules_that_no_pipeline_keeps_are_refused_by_name() -> None:
    problem = Problem(
        graph=chain(3),
        cluster=flat_cluster(2),
        objective=REPAIRED,
        rules=(
            Rule(ops="op0", devices="d0"),
            Rule(ops="op1", devices="d1"),
            Rule(ops="op2", devices="d0"),
        ),
    )
    with pytest.raises(InfeasibleError, match=r"'op0'.*1.*2 devices,.*'d0'"):
        plan_pipedream(problem)


def test_tied_parameters_are_measured_as_they_are() -> None:
    graph = chain(6, Figures(parameter_bytes=50.0), Traits(tied=[(0, 5)]))
    cluster = flat_cluster(3, bandwidth_bytes_per_s=10.0)
    problem = Problem(graph=graph, cluster=cluster, objective=REPAIRED)
    solution = plan_pipedream(problem)
    assert solution.lower_bound <= best_row(problem) <= solution.value * SLACK


def test_the_trace_falls_to_the_value() -> None:
    trace = SearchTrace()
    graph = random_dag(24, random.Random(3), tied=0, window=12)
    cluster = flat_cluster(3, bandwidth_bytes_per_s=20.0)
    problem = Problem(graph=graph, cluster=cluster, objective=REPAIRED)
    solution = plan_pipedream(problem, ideals=50, time_limit=0.0, trace=trace)
    assert trace.points
    assert trace.points[-1][1] == solution.stats["predicted_s"]


def test_options_out_of_range_are_refused() -> None:
    problem = Problem(graph=chain(2), cluster=flat_cluster(1), objective=REPAIRED)
    with pytest.raises(InvalidInputError, match="compression is 0"):
        plan_pipedream(problem, compression=0.0)
    with pytest.raises(InvalidInputError, match="orders is -1"):
        plan_pipedream(problem, orders=-1)


def test_bounds_name_their_argument() -> None:
    """Work, an op that cannot be split, and ops that a large tensor keeps together."""
    slow = Figures(forward_s=[8.0, 1.0], backward_s=0.0, parameter_bytes=[1e6, 0.0])
    cluster = flat_cluster(4, bandwidth_bytes_per_s=1.0)
    problem = Problem(graph=chain(2, slow), cluster=cluster, objective=REPAIRED)
    assert bound_on(problem) == (8.0, "indivisible op")
    work = replace(problem, graph=chain(8, Figures(forward_s=1.0, backward_s=0.0)))
    assert bound_on(work) == (2.0, "work")
    joined = Figures(
        forward_s=3.0, backward_s=0.0, tensor_bytes=[1e9, 1e9, 0.0, 0.0], parameter_bytes=10.0
    )
    value, term = bound_on(replace(problem, graph=chain(4, joined)))
    assert term == "sync or cut"
    assert 3.0 < value <= plan_pipedream(replace(problem, graph=chain(4, joined))).value


def test_a_device_that_was_not_searched_takes_the_proof_away():
    devices = (Device(name="gpu0"), Device(name="cpu0", kind=DeviceKind.CPU, speed=0.9))
    level = Level(
        name="host", group_of=np.zeros(2, np.int32), bandwidth_bytes_per_s=np.full(1, 1e9)
    )
    cluster = Cluster(devices=devices, levels=(level,))
    objective = Objective(metric=Metric.PIPEDREAM_REPAIRED)
    problem = Problem(graph=chain(4), cluster=cluster, objective=objective)
    found = plan_pipedream(problem)
    assert found.proof is Proof.FEASIBLE
    assert found.lower_bound < solve(problem, "brute-force", iterations=100).value * (1 + 1e-9)


def test_stages_that_share_a_parameter_do_not_stash_weights():
    graph = chain(4, traits=Traits(tied=[(0, 3)]))
    objective = Objective(metric=Metric.PIPEDREAM_REPAIRED)
    problem = Problem(graph=graph, cluster=flat_cluster(4), objective=objective)
    apart = plan_on(problem, np.array([0, 0, 1, 1]), [[0], [1]])
    assert apart.schedule is Schedule.ONE_F_ONE_B
    assert plan_on(problem, np.array([0, 0, 0, 0]), [[0]]).schedule is Schedule.PIPEDREAM
