"""Baechi's planners and the search for placements, on small problems."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core.graph import Phase
from partita.core.placement import placement_plan
from partita.core.problem import Metric, Mode, Objective, Problem
from partita.core.rules import Rule
from partita.core.solution import Proof
from partita.cost.judge import measure
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.baechi.annealing import Annealer
from partita.planners.baechi.best import best_placement
from partita.planners.baechi.favourites import (
    greedy_favourites,
    lp_favourites,
    overwriting_favourites,
)
from partita.planners.baechi.fit import find_fit, why_nothing_fits
from partita.planners.baechi.improve import anneal_placements
from partita.planners.baechi.instance import Channels, MemoryRule, instance_of
from partita.planners.baechi.list_schedule import event_schedule
from partita.planners.baechi.m_etf import plan_m_etf
from partita.planners.baechi.m_sct import plan_m_sct
from partita.planners.baechi.m_topo import plan_m_topo
from partita.planners.baechi.placement import Placed, plan_of
from partita.planners.baechi.replay import makespan_of, upward_rank
from partita.planners.effort import Effort, SearchTrace
from partita.released.baechi import (
    plan_m_etf_released,
    plan_m_sct_released,
    plan_m_topo_released,
    released_schedule,
)
from partita.testing.builders import Figures, chain, flat_cluster, graph_of, host_cluster

PARALLEL = Objective(metric=Metric.MAKESPAN_PARALLEL)
SEQUENTIAL = Objective(metric=Metric.MAKESPAN_SEQUENTIAL)
PLANNERS = (plan_m_topo, plan_m_etf, plan_m_sct)


def with_ops(graph, **columns):
    return replace(graph, ops=replace(graph.ops, **columns))


def problem_of(num_ops, edges, figures, *, devices=2, objective=PARALLEL, **cluster):
    graph = graph_of(num_ops, edges, figures)
    cluster = flat_cluster(devices, **{"bandwidth_bytes_per_s": 10.0, **cluster})
    return Problem(graph=graph, cluster=cluster, objective=objective)


def instance(problem, channels=Channels.PARALLEL, memory=MemoryRule.BAECHI):
    return instance_of(problem, channels, memory)


@st.composite
def small_problems(draw, most=5):
    """Return a random problem of a few ops, with memory that may be short."""
    count = draw(st.integers(2, most))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=6))
    whole = st.integers(0, 6)

    def column():
        return [float(value) for value in draw(st.lists(whole, min_size=count, max_size=count))]

    figures = Figures(
        forward_s=column(), tensor_bytes=column(), saved_bytes=column(), parameter_bytes=column()
    )
    speeds = draw(st.sampled_from([(1.0, 1.0), (1.0, 2.0)]))
    return problem_of(
        count,
        edges,
        figures,
        objective=draw(st.sampled_from([PARALLEL, SEQUENTIAL])),
        memory_bytes=float(draw(st.integers(10, 80))),
        speeds=speeds,
        bandwidth_bytes_per_s=2.0,
    )


def orders_of(graph):
    """Yield every order of the ops along the data."""
    inner = graph.edge_source >= 0
    before = list(zip(graph.edge_source[inner], graph.edges.reader[inner], strict=True))
    for order in itertools.permutations(range(len(graph))):
        at = {op: index for index, op in enumerate(order)}
        if all(at[a] < at[b] for a, b in before):
            yield np.array(order)


def brute_force(problem):
    """Return the least makespan over all placements and orders that fit; None for none."""
    best = None
    names = problem.cluster.device_names
    for order in orders_of(problem.graph):
        for device_of in itertools.product(range(len(names)), repeat=len(problem.graph)):
            plan = placement_plan(problem.graph, names, np.array(device_of), order=order)
            value = measure(problem, plan)
            if not value.errors and (best is None or value.value < best):
                best = value.value
    return best


def solved(planner, problem, **options):
    try:
        return planner(problem, **options).value
    except InfeasibleError:
        return None


@settings(max_examples=20)
@given(small_problems(most=4))
def test_no_planner_beats_brute_force(problem):
    best = brute_force(problem)
    for planner in (*PLANNERS, lambda p: best_placement(p, iterations=200)):
        value = solved(planner, problem)
        assert value is None or (best is not None and value >= best * (1 - 1e-9))


@settings(max_examples=20)
@given(small_problems(most=4))
def test_the_search_finds_the_best_placement_or_proves_that_there_is_none(problem):
    best = brute_force(problem)
    if best is None:
        with pytest.raises(InfeasibleError, match="would do"):
            best_placement(problem, iterations=600)
    else:
        assert best_placement(problem, iterations=600).value == pytest.approx(best)


@settings(max_examples=20)
@given(small_problems(most=4))
def test_what_is_proven_not_to_fit_does_not(problem):
    channels = Channels(problem.objective.metric.value.removeprefix("makespan-"))
    if why_nothing_fits(problem, instance(problem, channels)) is not None:
        assert brute_force(problem) is None


@settings(max_examples=40)
@given(small_problems(most=6), st.randoms(use_true_random=False))
def test_a_walk_has_the_value_of_the_cost_model(problem, rng):
    channels = Channels(problem.objective.metric.value.removeprefix("makespan-"))
    g = instance(problem, channels)
    device_of = np.array([rng.randrange(2) for _ in range(len(problem.graph))])
    order = g.topological
    value = measure(problem, plan_of(problem, Placed(device_of, order, 0.0)))
    assert makespan_of(g, device_of, order)[0] == pytest.approx(value.value)


@settings(max_examples=40)
@given(small_problems(most=6))
def test_a_schedule_is_what_the_cost_model_makes_of_it(problem):
    channels = Channels(problem.objective.metric.value.removeprefix("makespan-"))
    schedule = event_schedule(instance(problem, channels))
    if schedule.complete:
        found = Placed(schedule.device_of, schedule.order, schedule.makespan)
        assert measure(problem, plan_of(problem, found)).value == pytest.approx(schedule.makespan)


@pytest.mark.parametrize("channels", [None, "parallel", "sequential"])
@pytest.mark.parametrize("planner", PLANNERS)
def test_every_op_of_a_fork_is_placed(planner, channels):
    edges = [(0, 1), (0, 2), (1, 3), (2, 3)]
    problem = problem_of(4, edges, Figures(forward_s=[1.0, 3.0, 3.0, 1.0]), latency_s=0.5)
    solution = planner(problem, channels=channels)
    assert solution.options["channels"] == channels
    assert solution.value <= 8.0
    assert solution == planner(problem, channels=channels)


def test_etf_uses_a_second_device_and_topo_fills_both_evenly():
    figures = Figures(forward_s=2.0, saved_bytes=10.0)
    problem = problem_of(4, [(0, 1), (2, 3)], figures, memory_bytes=1000.0)
    assert plan_m_etf(problem).value == 4.0
    assert sorted(plan_m_topo(problem).plan.device_of.tolist()) == [0, 0, 1, 1]
    assert plan_m_topo(problem, cap=False).plan.device_of.tolist() == [0, 0, 0, 0]


def test_ops_without_duration_end():
    problem = problem_of(3, [(0, 1), (1, 2)], Figures(forward_s=[0.0, 0.0, 2.0]))
    assert plan_m_etf(problem).value == 2.0
    with pytest.raises(InfeasibleError, match=r"m-etf.*1.*3 ops;.*'op1'"):
        plan_m_etf_released(problem)


def test_an_exact_fit_fits():
    """Each device holds one op; the second a copy of what it reads, and not a byte more."""
    figures = Figures(saved_bytes=[6.0, 2.0], tensor_bytes=[4.0, 0.0])
    problem = problem_of(2, [(0, 1)], figures, memory_bytes=6.0)
    assert sorted(plan_m_etf(problem).plan.device_of.tolist()) == [0, 1]
    with pytest.raises(InfeasibleError, match=r"copies.*'op1'"):
        plan_m_etf_released(problem)


def test_a_tensor_counts_once_where_the_metric_allows_it():
    """Two readers of one tensor on the other device: two copies by edges, one by tensors."""
    figures = Figures(saved_bytes=[10.0, 1.0, 1.0], tensor_bytes=[5.0, 0.0, 0.0])
    edges = [(0, 1), (0, 2)]
    for objective, fits in ((PARALLEL, False), (SEQUENTIAL, True)):
        problem = problem_of(3, edges, figures, memory_bytes=10.0, objective=objective)
        placed = find_fit(instance(problem, Channels(objective.metric.value[9:])))
        assert (placed is not None) == fits


def test_stranded_ops_are_placed_with_fewer_copies():
    """Spreading the readers would fill every device with copies."""
    count = 12
    edges = [(0, reader) for reader in range(1, count)]
    sizes = [9.0, *[0.0] * (count - 1)]
    figures = Figures(saved_bytes=1.0, tensor_bytes=sizes, forward_s=1.0)
    problem = problem_of(count, edges, figures, memory_bytes=20.0, bandwidth_bytes_per_s=1e9)
    g = instance(problem)
    assert not released_schedule(g).complete
    assert plan_m_etf(problem).value <= count


@pytest.mark.parametrize("planner", [*PLANNERS, best_placement])
def test_an_op_that_is_too_large_is_named_with_what_would_do(planner):
    problem = problem_of(3, [(0, 1)], Figures(saved_bytes=[1.0, 50.0, 1.0]), memory_bytes=40.0)
    with pytest.raises(InfeasibleError, match=r"'op1'.*50.*'d0',.*; 1\.2"):
        planner(problem)


def test_ops_that_are_too_much_or_too_many_are_proven_so():
    figures = Figures(saved_bytes=30.0)
    too_much = problem_of(3, [], figures, memory_bytes=40.0)
    with pytest.raises(InfeasibleError, match=r"90.*10.*2 devices"):
        plan_m_etf(too_much)
    too_many = problem_of(3, [], figures, memory_bytes=55.0)
    with pytest.raises(InfeasibleError, match=r"3 devices.*55"):
        plan_m_etf(too_many)


def test_a_chain_whose_copies_have_no_room_is_searched_to_the_end():
    figures = Figures(saved_bytes=10.0, tensor_bytes=8.0)
    problem = problem_of(4, [(0, 1), (1, 2), (2, 3)], figures, memory_bytes=21.0)
    with pytest.raises(InfeasibleError, match="placement has"):
        plan_m_etf(problem)
    wider = replace(problem, cluster=flat_cluster(2, memory_bytes=28.0))
    assert plan_m_etf(wider).value > 0


def test_the_memory_that_would_do_does():
    figures = Figures(saved_bytes=[5.0, 9.0, 7.0, 8.0], tensor_bytes=3.0)
    problem = problem_of(4, [(0, 1), (1, 2), (2, 3)], figures, memory_bytes=12.0)
    with pytest.raises(InfeasibleError, match="would do") as caught:
        best_placement(problem, iterations=100)
    factor = float(str(caught.value).split("; ")[-1].split()[0])
    enough = flat_cluster(2, memory_bytes=12.0 * factor, bandwidth_bytes_per_s=10.0)
    assert best_placement(replace(problem, cluster=enough), iterations=100).value > 0


def test_inference_needs_no_room_for_what_training_saves():
    figures = Figures(saved_bytes=30.0, parameter_bytes=1.0)
    problem = problem_of(4, [], figures, memory_bytes=40.0)
    with pytest.raises(InfeasibleError):
        plan_m_etf(problem)
    infers = replace(problem, objective=replace(PARALLEL, mode=Mode.INFERENCE))
    assert plan_m_etf(infers).value == 2.0


def test_the_memory_factor_is_a_limit():
    problem = problem_of(4, [], Figures(saved_bytes=10.0), memory_bytes=20.0)
    assert plan_m_etf(problem).value == 2.0
    half = replace(problem, objective=replace(PARALLEL, memory_factor=0.5))
    with pytest.raises(InfeasibleError, match="nothing fits"):
        plan_m_etf(half)


def test_the_rule_for_memory_can_be_chosen():
    """By Baechi's rule nothing is released; by ours what an op received is."""
    figures = Figures(saved_bytes=0.0, tensor_bytes=8.0)
    problem = problem_of(3, [(0, 1), (0, 2)], figures, memory_bytes=15.0)
    strict = instance(problem, memory=MemoryRule.BAECHI)
    loose = instance(problem, memory=MemoryRule.OURS)
    assert (strict.stays, strict.once, loose.stays, loose.once) == (1, 0, 0, 1)
    assert plan_m_etf(problem, memory="ours").options["memory"] == "ours"


@pytest.mark.parametrize("planner", PLANNERS)
def test_groups_stay_whole_pins_hold_and_backward_follows(planner):
    phase = [Phase.FORWARD] * 4 + [Phase.BACKWARD] * 4
    graph = with_ops(
        chain(8, Figures(tensor_bytes=1.0)), phase=phase, colocation=[0, 1, 2, 0, 0, 2, 1, 0]
    )
    pins = (Rule(ops="op1", devices="d1"), Rule(ops="op0", devices="d1", forbids=True))
    problem = Problem(graph=graph, cluster=flat_cluster(2), objective=PARALLEL, rules=pins)
    device = planner(problem).plan.device_of
    assert device[0] == device[3] == device[4] == device[7] == 0
    assert device[1] == device[6] == 1
    assert device[2] == device[5]


def test_fast_devices_and_near_ones_are_preferred():
    figures = Figures(forward_s=4.0, tensor_bytes=100.0)
    mixed = flat_cluster(2, speeds=(1.0, 4.0), bandwidth_bytes_per_s=10.0)
    chained = Problem(graph=chain(3, figures), cluster=mixed, objective=PARALLEL)
    assert plan_m_etf(chained).plan.device_of.tolist() == [1, 1, 1]
    hosts = host_cluster(2, 2, inside_bytes_per_s=1e3, between_bytes_per_s=1.0)
    fork = graph_of(3, [(0, 1), (0, 2)], figures)
    used = plan_m_etf(Problem(graph=fork, cluster=hosts, objective=PARALLEL)).plan.device_of
    assert len({device // 2 for device in used.tolist()}) == 1
    assert len(set(used.tolist())) == 2


def test_renumbered_ops_have_the_same_makespan():
    rng = random.Random(5)
    count = 20
    edges = [(rng.randrange(op), op) for op in range(1, count) for _ in range(2)]
    edges = sorted(set(edges))
    seconds = [rng.random() for _ in range(count)]
    sizes = [rng.random() for _ in range(count)]
    problem = problem_of(count, edges, Figures(forward_s=seconds, tensor_bytes=sizes))
    number = list(range(count))
    rng.shuffle(number)
    back = [number.index(op) for op in range(count)]
    figures = Figures(
        forward_s=[seconds[op] for op in back], tensor_bytes=[sizes[op] for op in back]
    )
    renumbered = problem_of(count, [(number[a], number[b]) for a, b in edges], figures)
    assert plan_m_etf(problem).value == pytest.approx(plan_m_etf(renumbered).value)


def test_topo_as_released_needs_numbers_along_the_data():
    problem = problem_of(3, [(2, 0), (0, 1)], Figures())
    assert plan_m_topo(problem).value == 3.0
    with pytest.raises(InfeasibleError, match=r"'op0'.*before"):
        plan_m_topo_released(problem)


def test_topo_as_released_fails_where_its_cap_is_too_small():
    figures = Figures(saved_bytes=1.0, tensor_bytes=4.0)
    problem = problem_of(6, [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)], figures, devices=3)
    with pytest.raises(InfeasibleError, match=r"1.*6 ops,.*'op5'"):
        plan_m_topo_released(problem)
    assert plan_m_topo(problem).value > 0


@pytest.mark.parametrize("favourites", [lp_favourites, overwriting_favourites])
def test_favourites_save_the_longest_transfers(favourites):
    """Of two readers the one with more behind it should follow, and each op follows one at most."""
    figures = Figures(forward_s=[1.0, 1.0, 1.0, 5.0], tensor_bytes=[10.0, 10.0, 1.0, 1.0])
    g = instance(problem_of(4, [(0, 1), (0, 2), (2, 3)], figures))
    assert favourites(g, 0.5).tolist() == [2, -1, 3, -1]
    assert greedy_favourites(g, upward_rank(g)).tolist() == [2, -1, 3, -1]
    alone = instance(problem_of(2, [], Figures()))
    assert favourites(alone, 0.5).tolist() == [-1, -1]


def test_sct_waits_for_a_favourite_child():
    figures = Figures(forward_s=[2.0, 2.0, 3.0, 3.0], tensor_bytes=20.0)
    problem = problem_of(4, [(0, 2), (1, 3)], figures)
    solution = plan_m_sct(problem)
    assert solution.value == 5.0
    assert solution.stats["favourites"] == 2
    assert plan_m_sct_released(problem).value == 5.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": "serial"}, "option 'channels' is 'serial'; expected 'parallel' or"),
        ({"memory": "none"}, "option 'memory' is 'none'; expected 'baechi' or 'ours'"),
        ({"threshold": 1.5}, "option 'threshold' is 1.5; expected 0 to 1"),
    ],
)
def test_options_have_few_values(options, message):
    with pytest.raises(InvalidInputError, match=message):
        plan_m_sct(problem_of(2, [(0, 1)], Figures()), **options)


def improved(problem, device_of, **effort):
    """Return the devices and the order that annealing finds from a placement."""
    g = instance(problem)
    start = Placed(device_of, g.topological, makespan_of(g, device_of, g.topological)[0])
    found = anneal_placements(problem, g, [start], Effort(**effort))
    return found.device_of, found.order


def test_improving_is_repeatable_never_worse_and_traced():
    rng = random.Random(3)
    count = 14
    edges = sorted({(rng.randrange(op), op) for op in range(1, count) for _ in range(2)})
    figures = Figures(
        forward_s=[rng.uniform(1, 5) for _ in range(count)],
        tensor_bytes=[rng.uniform(1, 20) for _ in range(count)],
    )
    problem = problem_of(count, edges, figures, devices=3)
    start = np.array([rng.randrange(3) for _ in range(count)])
    g = instance(problem)
    trace = SearchTrace()
    device_of, order = improved(problem, start, iterations=600, trace=trace)
    again = improved(problem, start, iterations=600)
    assert np.array_equal(device_of, again[0])
    assert np.array_equal(order, again[1])
    value, excess = makespan_of(g, device_of, order)
    assert excess == 0
    assert value < makespan_of(g, start, g.topological)[0]
    assert trace.points[-1][1] == value
    timed = improved(problem, start, time_limit=0.05, seed=1)
    assert makespan_of(g, *timed)[0] <= trace.points[0][1]


def test_a_search_needs_an_effort_that_makes_sense():
    problem = problem_of(2, [(0, 1)], Figures())
    with pytest.raises(InvalidInputError, match="time limit"):
        improved(problem, np.zeros(2, dtype=int))
    with pytest.raises(InvalidInputError, match="iterations is -1; expected 0"):
        best_placement(problem, iterations=-1)


def test_annealing_removes_what_is_too_much():
    problem = problem_of(4, [], Figures(saved_bytes=10.0), memory_bytes=20.0)
    g = instance(problem)
    search = Annealer(g, np.zeros(4), np.arange(4), effort=100)
    assert search.excess > 0
    search.run(100, 1.0, 10.0)
    assert search.excess == 0
    assert search.makespan == 2.0


def test_the_best_placement_of_a_chain_is_proven():
    """Nothing is gained by a second device, and the longest path says so."""
    problem = problem_of(4, [(0, 1), (1, 2), (2, 3)], Figures(tensor_bytes=5.0))
    solution = best_placement(problem)
    assert (solution.value, solution.proof) == (4.0, Proof.OPTIMAL)
    assert solution.options["time_limit"] is None


def test_other_metrics_are_measured_by_their_own_rule():
    problem = problem_of(
        6, [(0, 1), (1, 2)], Figures(parameter_bytes=2.0), objective=Objective(microbatches=2)
    )
    for planner in PLANNERS:
        solution = planner(problem)
        assert solution.metric is Metric.THROUGHPUT
        assert solution.value == pytest.approx(measure(problem, solution.plan).value)
