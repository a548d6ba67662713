"""Costs that a measured step shows: what was made slower is found, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest

from partita.core.plan import Plan, Stage
from partita.core.problem import Problem
from partita.core.timeline import TimelineOrigin
from partita.cost.measured import calibrate
from partita.cost.predict import Disturbance, simulate
from partita.errors import InvalidInputError
from partita.program.lower import lower
from partita.program.order import ListOrder
from partita.testing.builders import Figures, chain, flat_cluster, host_cluster, pipeline

GRAPH = chain(8, Figures(forward_s=0.1, backward_s=0.2, tensor_bytes=1e6, parameter_bytes=1e6))


def posed(cluster):
    return Problem(graph=GRAPH, cluster=cluster)


def test_a_slow_device_gets_its_speed_and_the_new_costs_predict_the_step():
    problem = posed(flat_cluster(4, bandwidth_bytes_per_s=1e9))
    plan = pipeline(GRAPH, problem.cluster, [0, 1, 2], microbatches=4)
    measured = simulate(problem, plan, disturbance=Disturbance(slow={"d1": 2.0}))
    found = calibrate(problem, plan, measured)
    assert found.seen == pytest.approx({"d0": 1, "d1": 2, "d2": 1})
    assert found.slowest == pytest.approx(("d1", 2.0))
    assert found.devices["d3"] == pytest.approx(1.0)  # as the others of its type
    assert found.stages == {}
    again = found.applied(problem, plan)
    assert [device.speed for device in again.cluster.devices] == pytest.approx([1, 0.5, 1, 1])
    assert simulate(again, plan).makespan_s == pytest.approx(measured.makespan_s)


def test_devices_that_did_not_run_are_as_slow_as_their_type():
    problem = posed(flat_cluster(3))
    plan = pipeline(GRAPH, problem.cluster, [0, 1], microbatches=4)
    slow = posed(flat_cluster(3, speeds=[0.5, 0.5, 0.5]))
    found = calibrate(problem, plan, simulate(slow, plan))
    assert found.devices == pytest.approx({"d0": 2, "d1": 2, "d2": 2})


def test_a_stage_that_is_slower_than_others_of_its_device_changes_its_ops():
    problem = posed(flat_cluster(2))
    stages = tuple(Stage(devices=((device,),)) for device in (0, 1, 0, 1))
    plan = Plan(
        fingerprint=GRAPH.fingerprint,
        devices=problem.cluster.device_names,
        stage_of=np.arange(8) // 2,
        stages=stages,
        microbatch_sizes=np.ones(4, dtype=int),
    )
    costs = GRAPH.costs[0]
    slower = replace(costs, backward_s=costs.backward_s * np.where(plan.stage_of == 2, 2.0, 1.0))
    real = replace(problem, graph=replace(GRAPH, costs=(slower,)))
    measured = simulate(real, plan)
    found = calibrate(problem, plan, measured)
    again = found.applied(problem, plan)
    # Stage 2 stands out on d0; d1 is as it was.
    assert found.seen["d1"] == pytest.approx(1.0)
    assert found.stages[0, 2, "backward"] > 1.2
    assert simulate(again, plan).makespan_s == pytest.approx(measured.makespan_s)


def test_slow_links_are_found_by_level():
    fast = host_cluster(2, 2, inside_bytes_per_s=1e9, between_bytes_per_s=1e9)
    slow = host_cluster(2, 2, inside_bytes_per_s=1e9, between_bytes_per_s=2.5e8)
    problem = posed(fast)
    plan = pipeline(GRAPH, fast, [0, 1, 2, 3], microbatches=4)
    found = calibrate(problem, plan, simulate(posed(slow), plan))
    assert found.levels["host"] == pytest.approx((1.0, 1.0))
    assert found.levels["network"] == pytest.approx((4.0,))
    again = found.applied(problem, plan).cluster
    assert again.levels[1].bandwidth_bytes_per_s.tolist() == pytest.approx([2.5e8])


def test_collectives_tell_of_links_where_nothing_else_crosses_them():
    problem = posed(flat_cluster(2, bandwidth_bytes_per_s=1e9))
    plan = pipeline(GRAPH, problem.cluster, [(0, 1)], microbatches=4)
    slow = posed(flat_cluster(2, bandwidth_bytes_per_s=5e8))
    found = calibrate(problem, plan, simulate(slow, plan))
    assert found.levels["host"] == pytest.approx((2.0,), rel=0.01)


def test_a_timeline_of_any_order_is_understood_and_one_of_another_plan_refused():
    problem = posed(flat_cluster(2))
    plan = pipeline(GRAPH, problem.cluster, [0, 1], microbatches=4)
    program = lower(problem, plan, order=ListOrder.PROGRAM)
    played = simulate(problem, plan, program=program)
    assert calibrate(problem, plan, played).slowest[1] == pytest.approx(1.0)
    measured = replace(played, origin=TimelineOrigin.MEASURED)
    assert calibrate(problem, plan, measured).slowest[1] == pytest.approx(1.0)
    other = pipeline(GRAPH, problem.cluster, [0, 1], microbatches=3)
    with pytest.raises(InvalidInputError, match=r"those.*plan"):
        calibrate(problem, other, measured)
