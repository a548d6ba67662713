"""Piper's time per sample, computed by hand."""

import math

import numpy as np
import pytest

from partita.core.cluster import Cluster, Device
from partita.core.graph import VariantTable
from partita.core.problem import Objective, Problem
from partita.objectives.piper import piper_time, why_not_piper


@pytest.fixture
def graph(make_graph):
    """Return op0 -> op1, op0 -> op2, op1 -> op2, each of t = 1 and t = 2, op2 also recomputing."""
    rows = [(0, 1, False), (0, 2, False), (1, 1, False), (1, 2, False), (2, 1, False), (2, 1, True)]
    ops = np.array([row[0] for row in rows])
    ins = {0: [], 1: [1.0], 2: [2.0, 3.0]}
    outs = {0: [4.0, 5.0], 1: [6.0], 2: []}
    variants = VariantTable(
        op=ops,
        tp=np.array([row[1] for row in rows]),
        recompute=np.array([row[2] for row in rows]),
        forward_s=np.array([2.0, 1.0, 2.0, 1.0, 3.0, 3.0]),
        backward_s=np.array([4.0, 2.0, 4.0, 2.0, 6.0, 9.0]),
        parameter_bytes=np.array([10.0, 5.0, 20.0, 10.0, 30.0, 30.0]),
        saved_bytes=np.array([7.0, 4.0, 7.0, 4.0, 9.0, 1.0]),
        fixed_memory_bytes=np.array([100.0, 50.0, 100.0, 50.0, 100.0, 108.0]),
        sync_in_ptr=np.cumsum([0] + [len(ins[op]) for op in ops]),
        sync_in_bytes=np.array([x for op in ops for x in ins[op]]),
        sync_out_ptr=np.cumsum([0] + [len(outs[op]) for op in ops]),
        sync_out_bytes=np.array([x for op in ops for x in outs[op]]),
    )
    return make_graph([0] * 3, [(0, 1), (0, 2), (1, 2)], sizes=[40, 60, 0], variants=variants)


def _problem(graph, flat, *, devices=6, limit=math.inf, microbatches=8):
    cluster = flat(devices, 10.0, memory_bytes=limit)
    return Problem(graph=graph, cluster=cluster, objective=Objective(microbatches=microbatches))


def test_time_of_two_stages(graph, flat, pipeline):
    problem = _problem(graph, flat)
    groups = [["d0", "d1", "d2", "d3"], ["d4"]]
    plan = pipeline(graph, problem.cluster, [0, 0, 1], groups, tp=[2, 1], microbatches=8)
    value = piper_time(problem, plan)
    # Stage 0: d = 2, t = 2: leaving 2*(40+5) + 2*(60+6) = 222, /2 = 111; 4*1*15/(2*8) = 3.75;
    # (111 + 3.75)/10 + 6/2 = 14.475. Stage 1: entering 2*(40+2) + 2*(60+3) = 210; 210/10 + 9 = 30.
    assert value.details["stage_s"] == pytest.approx((14.475, 30.0))
    assert value.value == pytest.approx(30.0)
    assert value.bottleneck == "stage 1"
    assert value.details["devices"] == 5
    assert value.details["sum_of_dp"] == 3
    # y = ceil(3/2) = 2 and 1: 2*(4+4) + 100 and 9 + 100.
    assert value.details["microbatches_in_flight"] == (2, 1)
    assert value.details["memory_bytes"] == pytest.approx((116.0, 109.0))
    assert value.feasible


def test_recomputation_is_a_choice_of_each_op(graph, flat, pipeline):
    problem = _problem(graph, flat, limit=115.0)
    groups = [["d0", "d1", "d2", "d3"], ["d4"]]
    plan = pipeline(
        graph, problem.cluster, [0, 0, 1], groups, tp=[2, 1], recompute=[False, False, True]
    )
    value = piper_time(problem, plan)
    assert value.value == pytest.approx(33.0)
    assert value.details["memory_bytes"] == pytest.approx((116.0, 109.0))
    assert value.errors == tuple(f"device 'd{i}' needs 116 bytes, limit 115" for i in range(4))


def test_degrees_must_fit_the_microbatches(graph, flat, pipeline):
    problem = _problem(graph, flat, microbatches=4)
    plan = pipeline(
        graph, problem.cluster, [0, 1, 1], [["d0", "d1", "d2"], ["d3", "d4"]], microbatches=6
    )
    assert piper_time(problem, plan).errors == (
        "data-parallel degree 3 does not divide 4 microbatches",
        "sum of data-parallel degrees 5 exceeds 4 microbatches",
    )


def test_an_op_without_the_variant_is_infinite_and_named(graph, flat, pipeline):
    problem = _problem(graph, flat)
    plan = pipeline(graph, problem.cluster, [0, 0, 0], [["d0", "d1"]], tp=[2])
    value = piper_time(problem, plan)
    assert value.value == math.inf
    assert value.errors == ("1 ops have no variant as the plan asks: 'op2'",)


def test_one_device_exchanges_nothing(graph, pipeline):
    cluster = Cluster(devices=(Device(name="d0"),))
    plan = pipeline(graph, cluster, [0, 0, 0], [["d0"]])
    assert piper_time(Problem(graph=graph, cluster=cluster), plan).value == pytest.approx(21.0)


def test_it_needs_variants_levels_and_equal_shares(graph, make_graph, flat, matrix, pipeline):
    plain = make_graph([1.0], [])
    cluster = flat(2, 1.0)
    plan = pipeline(plain, cluster, [0], [["d0"]])
    assert "no variants" in why_not_piper(Problem(graph=plain, cluster=cluster), plan)
    uneven = pipeline(graph, cluster, [0, 0, 0], [["d0", "d1"]], shares=[[2, 1]])
    assert "unequal shares" in why_not_piper(Problem(graph=graph, cluster=cluster), uneven)
    links = matrix([[0]])
    alone = pipeline(graph, links, [0, 0, 0], [["d0"]])
    assert "matrix" in why_not_piper(Problem(graph=graph, cluster=links), alone)
