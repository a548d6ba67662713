"""Baechi's makespans, computed by hand."""

import numpy as np
import pytest

from partita.core.placement import placement_plan
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.errors import InvalidInputError
from partita.objectives.makespan import (
    commit_order,
    makespan_parallel,
    makespan_sequential,
    parallel_times,
    sequential_times,
)


@pytest.fixture
def place(make_graph, flat):
    """Return a maker of a problem and plan with ops on devices 0, 1, ..."""

    def make(seconds, edges, device_of, *, transfer=2.0, order=None, **columns):
        graph = make_graph(seconds, edges, transfer=transfer, **columns)
        cluster = flat(max(device_of) + 1)
        plan = placement_plan(graph, cluster.device_names, np.array(device_of), order=order)
        return Problem(graph=graph, cluster=cluster), plan

    return make


def test_parallel_transfers_start_when_the_producer_ends(place):
    # op0 on d0 feeds op1 and op2 on d1: both arrive at 1 + 2; op1 runs 3..5, op2 5..9.
    case = place([1, 2, 4], [(0, 1), (0, 2)], [0, 1, 1])
    value = makespan_parallel(*case)
    assert value.value == pytest.approx(9.0)
    assert value.bottleneck == "op 'op2' on d1 ends last"
    assert dict(value.details["busy_s"]) == pytest.approx({"d0": 1.0, "d1": 6.0})
    assert parallel_times(*case).start_s.tolist() == pytest.approx([0, 3, 5])


def test_a_tensor_is_fetched_once_by_a_device_or_once_by_each_edge(place):
    case = place([1, 2, 4], [(0, 1), (0, 2)], [0, 1, 1])
    once = makespan_sequential(*case)
    assert (once.value, once.details["transfers"]) == (pytest.approx(9.0), 1)
    again = makespan_sequential(*case, per_edge=True)
    # The second copy is sent 3..5 and has arrived when op1 ends.
    assert (again.value, again.details["transfers"]) == (pytest.approx(9.0), 2)
    slow = place([1, 1, 4], [(0, 1), (0, 2)], [0, 1, 1], transfer=5.0)
    assert makespan_sequential(*slow).value == pytest.approx(1 + 5 + 1 + 4)
    assert makespan_sequential(*slow, per_edge=True).value == pytest.approx(1 + 5 + 5 + 4)


def test_one_channel_serves_sends_and_receives(place):
    # op0 and op1 end at 1 on d0 and d1; op2 on d1 reads op0, op3 on d0 reads op1.
    edges = [(0, 2), (1, 3)]
    case = place([1, 1, 1, 1], edges, [0, 1, 1, 0])
    assert makespan_parallel(*case).value == pytest.approx(4.0)
    # op2 is committed first: both channels are taken 1..3; op3's transfer goes 3..5.
    assert sequential_times(*case).start_s.tolist() == pytest.approx([0, 0, 3, 5])
    assert makespan_sequential(*case).value == pytest.approx(6.0)
    turned = place([1, 1, 1, 1], edges, [0, 1, 1, 0], order=np.array([0, 1, 3, 2]))
    assert sequential_times(*turned).start_s.tolist() == pytest.approx([0, 0, 5, 3])


def test_a_receiver_that_is_busy_takes_a_transfer_later_than_it_is_sent(place):
    # d2 fetches from d0 (1..3) and from d1: sent 1..3, received 3..5.
    case = place([1, 1, 1], [(0, 2), (1, 2)], [0, 1, 2])
    assert makespan_sequential(*case).value == pytest.approx(6.0)
    assert makespan_parallel(*case).value == pytest.approx(4.0)


def test_the_order_of_a_device_follows_the_stages_not_the_graph(place):
    # On d1 op2 (with a remote input) is committed before the free op1.
    case = place([2, 3, 1], [(0, 2)], [0, 1, 1], order=np.array([0, 2, 1]))
    times = parallel_times(*case)
    assert times.order.tolist() == [0, 2, 1]
    assert times.start_s.tolist() == pytest.approx([0, 5, 4])


def test_inside_a_stage_remote_inputs_go_first_and_remote_readers_last(make_graph, flat, pipeline):
    # Stage 1: op1 is free, op2 reads op0 of d0, op3 is read by op4 of d0, op5 reads op1 and op3.
    edges = [(0, 2), (3, 4), (1, 5), (3, 5)]
    graph = make_graph([1] * 6, edges, transfer=1.0)
    cluster = flat(2)
    plan = pipeline(graph, cluster, [0, 1, 1, 1, 2, 1], [["d0"], ["d1"], ["d0"]])
    assert commit_order(graph, plan).tolist() == [0, 2, 1, 3, 5, 4]


def test_transfers_without_a_time_follow_the_links(make_graph, two_level):
    graph = make_graph([1, 1, 1], [(0, 1), (0, 2)], sizes=[12, 0, 0])
    cluster = two_level(2, 2, 6.0, 2.0)
    plan = placement_plan(graph, cluster.device_names, np.array([0, 1, 2]))
    times = parallel_times(Problem(graph=graph, cluster=cluster), plan)
    assert times.start_s.tolist() == pytest.approx([0, 1 + 2, 1 + 6])


def test_explicit_backward_ops_do_not_count(place):
    value = makespan_parallel(*place([1, 50], [(0, 1)], [0, 0], phase=[0, 1]))
    assert value.value == pytest.approx(1.0)


def test_replicated_stages_are_refused(make_graph, flat, pipeline):
    graph = make_graph([1.0], [])
    cluster = flat(2)
    plan = pipeline(graph, cluster, [0], [["d0", "d1"]])
    problem = Problem(graph=graph, cluster=cluster)
    for objective in (makespan_parallel, makespan_sequential):
        with pytest.raises(InvalidInputError, match=r"expected.*device.*each"):
            objective(problem, plan)


def test_memory_follows_baechi_and_names_the_first_op_that_does_not_fit(make_graph, flat):
    # Each op keeps 2 * 3 bytes of parameters and gradients and saves 4; op1 copies 5 from op0 and
    # needs 7 more while it runs.
    columns = {"saved_bytes": [4, 4], "workspace_bytes": [0, 7]}
    graph = make_graph([1, 1], [(0, 1)], sizes=[5, 0], transfer=1.0, parameters=[3, 3], **columns)
    for limit, fits in ((22.0, True), (21.0, False)):
        cluster = flat(2, memory_bytes=limit)
        plan = placement_plan(graph, cluster.device_names, np.array([0, 1]))
        value = makespan_parallel(Problem(graph=graph, cluster=cluster), plan)
        assert value.feasible == fits
        # The recorded peak is max(10 + 7, 10 + 5), without the copy beside the workspace.
        assert dict(value.details["peak_bytes"]) == {"d0": 10.0, "d1": 17.0}
        assert dict(value.details["used_bytes"]) == {"d0": 10.0, "d1": 15.0}
    assert value.errors == ("device 'd1' needs 22 bytes at op 'op1', limit 21",)


def test_inference_keeps_parameters_alone(make_graph, flat):
    graph = make_graph([1], [], parameters=[3], saved_bytes=[4])
    cluster = flat(1)
    plan = placement_plan(graph, cluster.device_names, np.array([0]), schedule=Schedule.INFERENCE)
    objective = Objective(mode=Mode.INFERENCE)
    value = makespan_parallel(Problem(graph=graph, cluster=cluster, objective=objective), plan)
    assert dict(value.details["used_bytes"]) == {"d0": 3.0}
