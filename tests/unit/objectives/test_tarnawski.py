"""Max-load and single-sample latency, computed by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from partita.core.cluster import Cluster, Device, Level
from partita.core.graph import OpCosts
from partita.core.placement import placement_plan
from partita.core.problem import Mode, Objective, Problem
from partita.objectives.tarnawski import (
    max_load,
    single_sample_latency,
    why_not_latency,
    why_not_max_load,
)

INFERENCE = Objective(mode=Mode.INFERENCE)


@pytest.fixture
def on_devices(make_graph, mixed):
    """Return a maker of a problem and plan: seconds 1.. on accelerators, ten times that on CPUs."""

    def make(count, edges, place, *, transfer=0.5, limit=math.inf, mode=INFERENCE, **columns):
        seconds = np.arange(1.0, count + 1)
        costs = [
            OpCosts(device_type="accelerator", forward_s=seconds),
            OpCosts(device_type="cpu", forward_s=10 * seconds),
        ]
        graph = make_graph(seconds, edges, transfer=transfer, costs=costs, **columns)
        cluster = mixed(2, 2, memory_bytes=limit)
        names = ["acc0", "acc1", "cpu0", "cpu1"]
        plan = placement_plan(graph, names, np.array([names.index(name) for name in place]))
        return Problem(graph=graph, cluster=cluster, objective=mode), plan

    return make


def test_accelerators_pay_for_transfers_and_cpus_never(on_devices):
    # op0 (acc0) feeds op1 (acc1), op2 (cpu0) and op3 (acc0); op2 feeds op3.
    edges = [(0, 1), (0, 2), (0, 3), (2, 3)]
    case = on_devices(4, edges, ["acc0", "acc1", "cpu0", "acc0"])
    value = max_load(*case)
    # acc0: 1 + 4, sends op0 once (0.5), receives op2 (0.5); acc1: 2 + 0.5; cpu0: 30.
    loads = dict(value.details["loads_s"])
    assert loads == pytest.approx({"acc0": 6.0, "acc1": 2.5, "cpu0": 30.0})
    assert value.value == pytest.approx(30.0)
    assert value.bottleneck == "device cpu0"
    assert value.details["devices"] == 3


def test_a_path_that_leaves_and_comes_back_is_not_contiguous(on_devices):
    chain = [(0, 1), (1, 2)]
    back = max_load(*on_devices(3, chain, ["acc0", "acc1", "acc0"])).details
    assert (back["contiguous"], back["acyclic_quotient"]) == (False, False)
    # Two pairs that feed one another crosswise: the sets are contiguous, the quotient is cyclic.
    cross = max_load(*on_devices(4, [(0, 1), (2, 3)], ["acc0", "acc1", "acc1", "acc0"])).details
    assert (cross["contiguous"], cross["acyclic_quotient"]) == (True, False)
    split = max_load(*on_devices(3, chain, ["acc0", "acc0", "acc1"])).details
    assert (split["contiguous"], split["acyclic_quotient"]) == (True, True)


def test_backward_ops_count_and_contiguity_looks_at_forward_ops_only(on_devices):
    # Forward 0 -> 1, backward 2 -> 3 mirrored on the same devices.
    case = on_devices(
        4,
        [(0, 1), (2, 3)],
        ["acc0", "acc1", "acc1", "acc0"],
        phase=[0, 0, 1, 1],
        colocation=[0, 1, 1, 0],
    )
    value = max_load(*case)
    # Forward acc0 1 + .5, acc1 2 + .5; backward acc0 4 + .5, acc1 3 + .5.
    assert value.value == pytest.approx(6.0)
    assert value.details["diffmaxima_s"] == pytest.approx(2.5 + 4.5)
    assert value.details["contiguous"]
    assert value.details["acyclic_quotient"]
    assert value.feasible


def test_implicit_training_sends_gradients_back(make_graph, flat):
    graph = make_graph([1, 2], [(0, 1)], backward=[3, 4], transfer=0.5)
    cluster = flat(2)
    plan = placement_plan(graph, ["d0", "d1"], np.array([0, 1]))
    value = max_load(Problem(graph=graph, cluster=cluster), plan)
    assert value.value == pytest.approx(6 + 0.5 + 0.5)
    assert value.details["diffmaxima_s"] == pytest.approx(2.5 + 4.5)
    inference = Problem(graph=graph, cluster=cluster, objective=INFERENCE)
    assert max_load(inference, plan).value == pytest.approx(2.5)


def test_transfers_without_a_time_take_their_bytes_at_the_slowest_level(make_graph, flat):
    graph = make_graph([1, 2], [(0, 1)], sizes=[8, 0])
    cluster = flat(2, 4.0)
    plan = placement_plan(graph, ["d0", "d1"], np.array([0, 1]))
    assert max_load(Problem(graph=graph, cluster=cluster), plan).value == pytest.approx(4.0)


def test_broken_limits_are_listed(on_devices):
    case = on_devices(
        3,
        [(0, 1), (1, 2)],
        ["acc0", "acc0", "cpu0"],
        saved_bytes=[6, 5, 99],
        limit=10.0,
        device_kinds=[3, 3, 1],
        colocation=[-1, 4, 4],
    )
    errors = max_load(*case).errors
    assert errors == (
        "1 ops are on a kind of device that cannot run them: 'op2'",
        "colocation class 4 is split over several devices",
        "device 'acc0' needs 11 bytes, limit 10",
    )


def test_latency_runs_a_device_as_one_call(on_devices):
    # 0 -> 1 -> 2 with 1 alone on an accelerator: 10 (cpu) + (0.5 + 2 + 0.5) + 30 (cpu).
    value = single_sample_latency(*on_devices(3, [(0, 1), (1, 2)], ["cpu0", "acc0", "cpu1"]))
    assert value.value == pytest.approx(43.0)
    assert value.details == {"pieces": 1, "accelerators": 1, "ops_on_cpu": 2}
    assert value.bottleneck == "call with op 'op2' on cpu1"


def test_cpus_are_a_pool_without_limits(on_devices):
    # op0 and op1 run at once on one CPU; a class over two CPUs is not split.
    value = single_sample_latency(
        *on_devices(3, [(0, 2), (1, 2)], ["cpu0", "cpu0", "cpu1"], colocation=[1, 0, 1])
    )
    assert value.value == pytest.approx(20 + 30)
    assert value.feasible


def test_results_of_a_call_are_there_when_all_of_it_ends(on_devices):
    # acc0 runs ops 0 and 1 in one call of 1 + 2 + 0.5 (op0 goes out); op2 on acc1 waits for it.
    value = single_sample_latency(*on_devices(3, [(0, 2)], ["acc0", "acc0", "acc1"]))
    assert value.value == pytest.approx(3.5 + 3 + 0.5)


def test_a_set_that_is_left_and_entered_again_is_two_calls(on_devices):
    # 0 (acc0) -> 1 (cpu) -> 2 (acc0); op3 (acc0) has no input and joins the first piece.
    case = on_devices(4, [(0, 1), (1, 2)], ["acc0", "cpu0", "acc0", "acc0"])
    value = single_sample_latency(*case)
    # The first call takes 1 + 4 + .5, the CPU 20, the second call .5 + 3.
    assert value.value == pytest.approx(29.0)
    assert value.details["pieces"] == 2


def test_serial_changes_nothing_because_a_piece_follows_from_the_one_before(on_devices):
    # acc0 has op0, then op2 after op1 (cpu) and op4 after op3 (acc1): pieces {0} and {2, 4}.
    edges = [(0, 1), (1, 2), (0, 3), (3, 4)]
    case = on_devices(5, edges, ["acc0", "cpu0", "acc0", "acc1", "acc0"])
    # {0}: 1.5; op1: 21.5; op3: 1.5 + 4 + 1 = 6.5; {2, 4}: 21.5 + 8 + 1.
    assert single_sample_latency(*case).value == pytest.approx(30.5)
    assert single_sample_latency(*case).details["pieces"] == 3
    assert single_sample_latency(*case, serial=True).value == pytest.approx(30.5)


def test_calls_that_wait_for_one_another_are_infinite(on_devices):
    # acc0 = {0, 3}, acc1 = {1, 2} with 0 -> 1 and 2 -> 3: one call each, in a circle.
    value = single_sample_latency(
        *on_devices(4, [(0, 1), (2, 3)], ["acc0", "acc1", "acc1", "acc0"])
    )
    assert value.value == math.inf
    assert value.errors == ("cyclic dependency between accelerator calls",)


def test_they_do_not_apply_to_replicas_matrices_or_backward_ops(
    make_graph, flat, matrix, pipeline, on_devices
):
    graph = make_graph([1, 1], [(0, 1)])
    cluster = flat(2, 1.0)
    replicated = pipeline(graph, cluster, [0, 0], [["d0", "d1"]])
    problem = Problem(graph=graph, cluster=cluster)
    assert "2 replicas" in why_not_max_load(problem, replicated)
    links = matrix([[0, 1], [1, 0]])
    placed = placement_plan(graph, links.device_names, np.array([0, 1]))
    assert "matrix" in why_not_max_load(Problem(graph=graph, cluster=links), placed)
    explicit = on_devices(2, [(0, 1)], ["acc0", "acc0"], phase=[0, 1])
    assert "explicit backward" in why_not_latency(*explicit)


def test_a_cluster_without_links_moves_nothing(make_graph):
    graph = make_graph([1, 2], [(0, 1)], sizes=[5, 5])
    cluster = Cluster(devices=(Device(name="d0"),))
    plan = placement_plan(graph, ["d0"], np.array([0, 0]))
    assert max_load(Problem(graph=graph, cluster=cluster), plan).value == pytest.approx(3.0)


def test_latency_of_a_level_is_paid_for_each_transfer(make_graph):
    graph = make_graph([1, 2], [(0, 1)], sizes=[8, 0])
    level = Level(name="host", group_of=[0, 0], bandwidth_bytes_per_s=4.0, latency_s=[0.25])
    cluster = Cluster(devices=(Device(name="d0"), Device(name="d1")), levels=(level,))
    plan = placement_plan(graph, ["d0", "d1"], np.array([0, 1]))
    assert max_load(Problem(graph=graph, cluster=cluster), plan).value == pytest.approx(4.25)


def test_parameters_count_once_a_device_with_their_gradients_and_state(make_graph, flat):
    graph = make_graph([1, 1], [(0, 1)], parameters=[4, 8], saved_bytes=[1, 2])
    shared = replace(graph.parameters, use_op=[0, 1, 1], use_parameter=[0, 0, 1])
    graph = replace(graph, parameters=shared)
    cluster = flat(2, 1.0, memory_bytes=1.0)
    plan = placement_plan(graph, cluster.device_names, np.array([0, 0]))
    # 3 saved, and weights, gradients and 8 bytes for each of 1 + 2 elements; forward: 3 + 12.
    training = max_load(Problem(graph=graph, cluster=cluster), plan)
    assert training.errors == ("device 'd0' needs 51 bytes, limit 1",)
    inference = max_load(Problem(graph=graph, cluster=cluster, objective=INFERENCE), plan)
    assert inference.errors == ("device 'd0' needs 15 bytes, limit 1",)
