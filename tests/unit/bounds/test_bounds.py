"""Each term of the bounds, on problems whose best value is known."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import linprog

from partita.bounds import Effort, bound, bounds, lower_bound
from partita.bounds.assignment import Need, Room, assignment_dual, work_over_speed
from partita.bounds.paths import Pieces, num_paths, steps, window_bound
from partita.bounds.sharding import link_latencies
from partita.bounds.traffic import groups_of
from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.core.cluster import Cluster, Device, Level
from partita.core.graph import DeviceKind, OpCosts, VariantTable
from partita.core.problem import Metric, Mode, Objective, Problem, Schedule
from partita.core.program import Kind
from partita.core.rules import Rule
from partita.cost.links import collective_s
from partita.errors import InvalidInputError
from partita.testing.brute_force import brute_force
from partita.testing.builders import (
    Figures,
    chain,
    diamond,
    flat_cluster,
    graph_of,
    host_cluster,
    paired_cluster,
)


def problem_of(graph, cluster, **objective):
    return Problem(graph=graph, cluster=cluster, objective=Objective(**objective))


def value_of(problem, term):
    return max((one.value for one in bounds(problem) if one.term == term), default=0.0)


def test_work_is_spread_over_all_devices():
    problem = problem_of(chain(4), flat_cluster(2, speeds=(1.0, 3.0)), microbatches=8)
    assert bound(problem).value == pytest.approx(4 * 3 * 8 / 4)
    assert bound(problem).term == "work over speed"


def test_open_microbatches_pay_fixed_parts_once():
    graph = chain(2)
    graph = replace(graph, ops=replace(graph.ops, fixed_share=np.ones(2)))
    left_open = problem_of(graph, flat_cluster(1))
    given = problem_of(graph, flat_cluster(1), microbatches=8)
    assert value_of(left_open, "work over speed") == pytest.approx(6.0)
    assert value_of(given, "work over speed") == pytest.approx(48.0)


def test_loads_and_updates_are_work():
    graph = chain(1, Figures(parameter_bytes=4.0, load_s=0.5))
    device = Device(name="d0", memory_bytes_per_s=10.0)
    problem = problem_of(graph, Cluster(devices=(device,)), microbatches=2)
    # 2 x (3 s + 0.5 s), and 3 x 4 bytes + 2 x 8 bytes of state at 10 bytes/s.
    assert value_of(problem, "work over speed") == pytest.approx(7.0 + 2.8)


@pytest.mark.parametrize("seed", range(6))
def test_the_dual_is_close_to_the_linear_program_and_never_above(seed):
    rng = np.random.default_rng(seed)
    classes, units = 3, 30
    cost = rng.uniform(1, 10, (classes, units))
    cost[0, 0] = math.inf
    held = rng.uniform(1, 5, units)
    devices = rng.integers(1, 4, classes).astype(float)
    limit = np.array([held.sum() * 0.2, held.sum(), math.inf])
    exact = solved_program(cost, held, devices, limit)
    for effort, share in ((Effort.QUICK, 0.97), (Effort.FULL, 0.998)):
        found = assignment_dual(Need(cost, held), Room(devices, limit), effort).value
        assert share * exact <= found <= exact * (1 + 1e-9)
    assert work_over_speed(cost, devices) <= exact


def solved_program(cost, held, devices, limit):
    """Return the least T: variables are x[class, unit], then T."""
    classes, units = cost.shape
    rows, above = [], []
    for c in range(classes):
        row = np.zeros(classes * units + 1)
        row[c * units : (c + 1) * units] = np.where(np.isfinite(cost[c]), cost[c], 0)
        row[-1] = -devices[c]
        rows.append(row)
        above.append(0.0)
        if math.isfinite(limit[c]):
            row = np.zeros(classes * units + 1)
            row[c * units : (c + 1) * units] = held
            rows.append(row)
            above.append(limit[c])
    equal = np.hstack([np.tile(np.eye(units), classes), np.zeros((units, 1))])
    top = [(0, None if finite else 0) for finite in np.isfinite(cost).ravel()] + [(0, None)]
    target = np.zeros(classes * units + 1)
    target[-1] = 1
    return linprog(
        target, A_ub=np.array(rows), b_ub=above, A_eq=equal, b_eq=np.ones(units), bounds=top
    ).fun


def test_types_that_suit_different_ops_need_the_linear_program():
    graph = chain(2)
    first = OpCosts(device_type="a", forward_s=np.array([1.0, 1.0]))
    second = OpCosts(device_type="b", forward_s=np.array([2.0, 8.0]))
    graph = replace(graph, costs=(first, second))
    devices = (Device(name="d0", type="a"), Device(name="d1", type="b"))
    level = Level(
        name="host", group_of=np.zeros(2, np.int32), bandwidth_bytes_per_s=np.array([9.0])
    )
    problem = problem_of(graph, Cluster(devices=devices, levels=(level,)), microbatches=6)
    # d1 takes two thirds of op0: 6 x (1/3 + 1) = 6 x 2 x 2/3 = 8.
    found = bound(problem, effort=Effort.FULL)
    assert found.term == "assignment LP"
    assert found.value == pytest.approx(8.0, rel=1e-3)


def test_one_microbatch_of_a_unit_is_never_spread():
    graph = chain(3, Figures(forward_s=[1.0, 1.0, 20.0], backward_s=0.0))
    problem = problem_of(graph, flat_cluster(4), microbatches=5, microbatch_size=1)
    # Five microbatches on four devices: one device takes two.
    assert bound(problem) == bounds(problem)[2]
    assert bound(problem).term == "indivisible op"
    assert bound(problem).value == pytest.approx(40.0)


def test_a_step_that_flushes_takes_a_microbatch_forward_and_back():
    problem = problem_of(chain(4), flat_cluster(8), microbatches=1, schedule=Schedule.ONE_F_ONE_B)
    assert bound(problem).value == pytest.approx(12.0)
    stashed = replace(problem.objective, schedule=Schedule.PIPEDREAM)
    assert lower_bound(replace(problem, objective=stashed)) == pytest.approx(3.0)


def test_a_chain_keeps_no_more_devices_busy_than_it_has_microbatches():
    cluster = flat_cluster(4, speeds=(1.0, 1.0, 0.5, 0.5))
    problem = problem_of(chain(4), cluster, microbatches=3, schedule=Schedule.GPIPE)
    assert value_of(problem, "few microbatches") == pytest.approx(3 * 12 / 2.5)
    assert num_paths(steps(diamond(3)), np.ones(5, dtype=bool)) == 3


def test_gradients_return_along_the_paths_that_carry_them():
    graph = graph_of(3, [(0, 1), (1, 2)], Figures(forward_s=1.0, backward_s=5.0))
    cut = replace(graph.tensors, differentiable=np.array([False, True, False, True]))
    problem = problem_of(
        replace(graph, tensors=cut), flat_cluster(3), microbatches=1, schedule=Schedule.GPIPE
    )
    # Forward through all three, then back through op2 alone, or op1 and op0 alone.
    assert value_of(problem, "critical path") == pytest.approx(12.0)


def test_split_backward_waits_for_the_input_part_alone():
    graph = chain(2, Figures(forward_s=1.0, backward_s=4.0, backward_input_s=1.0))
    given = {"microbatches": 1, "schedule": Schedule.ZERO_BUBBLE}
    problem = problem_of(graph, flat_cluster(1), **given)
    assert value_of(problem, "critical path") == pytest.approx(4.0)
    assert bound(problem).value == pytest.approx(10.0)


def test_a_window_adds_what_comes_before_and_after():
    pieces = Pieces(np.array([0.0, 2.0, 2.0]), np.array([5.0, 3.0, 3.0]), np.array([1.0, 4.0, 4.0]))
    assert window_bound(pieces, 2.0) == pytest.approx(2 + 3 + 8 / 2)
    assert window_bound(Pieces(*np.zeros((3, 2))), 1.0) == 0.0


def test_joining_is_serial_or_moved():
    figures = Figures(forward_s=1.0, tensor_bytes=100.0)
    slow = flat_cluster(3, bandwidth_bytes_per_s=10.0)
    problem = problem_of(diamond(3, figures), slow, metric=Metric.MAKESPAN_PARALLEL)
    assert bound(problem).value == pytest.approx(5.0)
    assert brute_force(problem).value == pytest.approx(5.0)
    fast = flat_cluster(3, bandwidth_bytes_per_s=1e3)
    problem = problem_of(diamond(3, figures), fast, metric=Metric.MAKESPAN_SEQUENTIAL)
    assert 3.0 < bound(problem).value <= brute_force(problem).value


def test_places_pay_for_moves_between_kinds():
    graph = chain(3, Figures(forward_s=1.0, tensor_bytes=20.0))
    graph = replace(graph, ops=replace(graph.ops, device_kinds=np.array([1, 3, 1])))
    problem = problem_of(graph, flat_cluster(1), metric=Metric.MAKESPAN_PARALLEL)
    assert lower_bound(problem) == pytest.approx(3.0)
    pinned = replace(
        problem_of(graph, flat_cluster(2, bandwidth_bytes_per_s=10.0), metric=Metric.LATENCY),
        rules=(Rule(ops="op1", devices="d1"), Rule(ops="op1", devices="d0", forbids=True)),
    )
    assert lower_bound(pinned) <= brute_force(pinned).value
    both = replace(pinned, rules=(*pinned.rules, Rule(ops="op0", devices="d0")))
    assert lower_bound(both) == pytest.approx(3.0 + 2.0)


def test_memory_that_holds_half_forces_a_move():
    figures = Figures(forward_s=1.0, parameter_bytes=100.0, tensor_bytes=10.0)
    cluster = flat_cluster(4, bandwidth_bytes_per_s=10.0, memory_bytes=900.0)
    problem = problem_of(chain(4, figures), cluster, metric=Metric.LATENCY)
    assert bound(problem).term == "memory forces a split"
    assert bound(problem).value == pytest.approx(5.0)
    assert brute_force(problem).value == pytest.approx(5.0)


def test_whoever_splits_the_load_pays_for_the_cut():
    graph = chain(4, Figures(tensor_bytes=10.0))
    cluster = flat_cluster(2, bandwidth_bytes_per_s=10.0)
    problem = problem_of(graph, cluster, metric=Metric.MAX_LOAD)
    assert bound(problem).term == "cut"
    assert bound(problem).value == pytest.approx(brute_force(problem).value)


def test_the_largest_ops_stand_on_few_devices():
    graph = chain(3, Figures(forward_s=[10.0, 1.0, 1.0], backward_s=0.0))
    problem = problem_of(graph, flat_cluster(3), metric=Metric.MAX_LOAD, mode=Mode.INFERENCE)
    assert bound(problem).term == "indivisible op"
    assert bound(problem).value == pytest.approx(10.0)
    equal = problem_of(chain(3), flat_cluster(2), metric=Metric.MAX_LOAD)
    assert bound(equal).value == pytest.approx(6.0)


def test_colocated_ops_are_one():
    graph = chain(4)
    graph = replace(graph, ops=replace(graph.ops, colocation=np.array([0, 0, 0, -1])))
    problem = problem_of(graph, flat_cluster(2), metric=Metric.MAX_LOAD)
    assert bound(problem).value == pytest.approx(9.0)


def test_a_long_op_needs_replicas_that_reduce():
    graph = chain(1, Figures(parameter_bytes=100.0))
    cluster = flat_cluster(2, bandwidth_bytes_per_s=100.0)
    problem = problem_of(graph, cluster, metric=Metric.PIPEDREAM_REPAIRED)
    assert bound(problem).term == "indivisible op"
    assert bound(problem).value == pytest.approx(2.5)
    assert brute_force(problem).value == pytest.approx(2.5)


def test_a_stage_is_reduced_or_cut():
    graph = chain(4, Figures(parameter_bytes=1e3, tensor_bytes=1e3))
    cluster = host_cluster(2, 1, inside_bytes_per_s=10.0, between_bytes_per_s=10.0)
    problem = problem_of(graph, cluster, metric=Metric.PIPEDREAM_REPAIRED)
    assert bound(problem).term in ("cut", "gradient reduction")
    assert lower_bound(problem) <= brute_force(problem).value


def test_the_released_time_needs_one_or_two_levels():
    problem = problem_of(chain(2), paired_cluster(2), metric=Metric.PIPEDREAM)
    assert bounds(problem) == []


def test_slow_links_make_groups_share_or_reduce():
    graph = chain(4, Figures(parameter_bytes=1e4, tensor_bytes=1e3))
    cluster = host_cluster(2, 1, inside_bytes_per_s=1e3, between_bytes_per_s=10.0)
    objective = {"microbatches": 2, "microbatch_size": 1, "schedule": Schedule.ONE_F_ONE_B}
    problem = problem_of(graph, cluster, **objective)
    assert bound(problem).term == "cut"
    assert 12.0 < bound(problem).value <= brute_force(problem).value


@pytest.mark.parametrize(
    "name",
    ["8xh100", "8xmi300x", "2xdgx-h100", "3xdgx-a100", "2xdgx-b200+8xl40s", "4x2xt4", "2xp4d"],
)
def test_no_reduction_is_faster_than_what_leaves_a_group(name):
    cluster = read_shorthand(name, load_catalogue())
    rng = np.random.default_rng(0)
    for groups in groups_of(cluster):
        for size in (2, 3, 5, 8, len(cluster)):
            members = np.sort(rng.permutation(len(cluster))[:size])
            if len(np.unique(groups.of[members])) < 2:
                continue
            for kind in (Kind.ALL_REDUCE, Kind.ALL_GATHER):
                seconds = collective_s(cluster, kind, members, 1e10)
                part = 1.0 if kind is Kind.ALL_REDUCE else 0.5
                assert seconds >= part * 1e10 / groups.leaving_bytes_per_s.max()


def with_variants(graph, memory):
    """Return a graph whose ops may be split in two at 20 % more work, with some memory each."""
    ops = np.repeat(np.arange(len(graph)), 2)
    degrees = np.tile([1, 2], len(graph))
    table = VariantTable(
        op=ops,
        tp=degrees,
        forward_s=np.where(degrees == 1, 1.0, 0.6),
        backward_s=np.where(degrees == 1, 2.0, 1.2),
        fixed_memory_bytes=np.where(degrees == 1, memory, memory / 2),
    )
    return replace(graph, variants=table)


def test_pipers_ops_take_their_cheapest_variant():
    graph = with_variants(chain(2), 0.0)
    problem = problem_of(graph, flat_cluster(4), metric=Metric.PIPER, microbatches=4)
    assert bound(problem).value == pytest.approx(6 / 4)
    few = replace(problem, objective=replace(problem.objective, microbatches=1))
    # One microbatch: one replica in all, so one stage holds both ops, on two devices.
    assert bound(few).term == "few microbatches"
    assert bound(few).value == pytest.approx(3.6)
    assert brute_force(few).value == pytest.approx(3.6)


def test_pipers_memory_makes_the_leaner_variant_pay():
    graph = with_variants(chain(2), 100.0)
    lean = np.where(graph.variants.tp == 1, 100.0, 30.0)
    graph = replace(graph, variants=replace(graph.variants, fixed_memory_bytes=lean))
    cluster = flat_cluster(2, memory_bytes=70.0)
    problem = problem_of(graph, cluster, metric=Metric.PIPER, microbatches=4)
    assert bound(problem).value == pytest.approx(3.6)
    assert brute_force(problem).value == pytest.approx(3.6)


def test_variants_allow_splits_in_a_step():
    problem = problem_of(
        with_variants(chain(2), 0.0),
        flat_cluster(2),
        microbatches=1,
        schedule=Schedule.ONE_F_ONE_B,
    )
    # Split and recomputing, an op without such a variant takes half of its time.
    assert value_of(problem, "critical path") == pytest.approx(3.0)
    assert lower_bound(problem) <= brute_force(problem).value


def test_one_sample_takes_the_longest_path_on_the_best_device():
    problem = problem_of(
        diamond(2, Figures(tensor_bytes=10.0)),
        flat_cluster(2, bandwidth_bytes_per_s=10.0),
        metric=Metric.SINGLE_SAMPLE_LATENCY,
    )
    assert bound(problem).value == pytest.approx(3.0)
    assert lower_bound(problem) <= brute_force(problem).value


def test_a_slower_place_may_have_the_shorter_way():
    figures = Figures(tensor_bytes=10.0)
    costs = tuple(
        OpCosts(device_type=name, forward_s=np.array(seconds))
        for name, seconds in {"a": [1.0, 9.0], "b": [9.0, 1.0], "c": [9.0, 1.5]}.items()
    )
    devices = (
        Device(name="d0", type="a"),
        Device(name="d1", type="b"),
        Device(name="d2", type="c", kind=DeviceKind.CPU),
    )
    level = Level(
        name="host", group_of=np.zeros(3, np.int32), bandwidth_bytes_per_s=np.array([10.0])
    )
    cluster = Cluster(devices=devices, levels=(level,))
    graph = replace(chain(2, figures), costs=costs)
    problem = problem_of(graph, cluster, metric=Metric.SINGLE_SAMPLE_LATENCY)
    # From d0 to a CPU one copy is paid, to d1 two.
    assert bound(problem).value == pytest.approx(1.0 + 1.0 + 1.5)
    assert brute_force(problem).value == pytest.approx(3.5)


def test_uneven_weights_and_links_are_a_cost():
    graph = chain(3, Figures(forward_s=[4.0, 1.0, 1.0], backward_s=0.0))
    cluster = paired_cluster(2, latency_s=0.5)
    problem = problem_of(graph, cluster, metric=Metric.SHARDING_COST)
    assert bound(problem).value == pytest.approx(2.0 + 0.5)
    assert brute_force(problem).value == pytest.approx(2.0 + 0.5)
    levels = problem_of(graph, flat_cluster(2), metric=Metric.SHARDING_COST)
    assert bound(levels).value == brute_force(levels).value == pytest.approx(2.0)


def test_a_bound_is_found_once_and_a_metric_without_figures_has_none():
    problem = problem_of(chain(2), flat_cluster(2))
    assert bound(problem) is bound(problem)
    assert bound(problem, effort=Effort.FULL).value >= bound(problem).value
    assert lower_bound(problem_of(chain(2), flat_cluster(2), metric=Metric.ENERGY)) == 0.0


def test_pairs_of_too_many_devices_are_refused_before_any_are_made() -> None:
    cluster = read_shorthand("8192x8xa100", load_catalogue())
    with pytest.raises(InvalidInputError, match="65,536 devices"):
        link_latencies(cluster)
