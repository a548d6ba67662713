"""Why nothing fits: the limit that is missed, where and by how much."""

from dataclasses import replace

import numpy as np
import pytest

from partita.core.problem import Problem
from partita.core.rules import Rule
from partita.planners.obstacle import Needs, obstacle, places, unfound
from partita.testing.builders import Figures, chain, flat_cluster


def needs_of(unit_bytes, limit_bytes, **changes):
    """Return the needs of a chain, a unit for each op, on as many devices as there are limits."""
    unit_bytes, limit_bytes = np.array(unit_bytes, float), np.array(limit_bytes, float)
    graph, cluster = chain(len(unit_bytes), Figures()), flat_cluster(len(limit_bytes))
    needs = Needs(
        problem=Problem(graph=graph, cluster=cluster),
        unit_of=np.arange(len(unit_bytes)),
        unit_bytes=unit_bytes,
        devices=np.arange(len(limit_bytes)),
        limit_bytes=limit_bytes,
        may=np.ones((len(limit_bytes), len(unit_bytes)), dtype=bool),
        total_bytes=float(unit_bytes.sum()),
    )
    return replace(needs, **changes)


def test_a_unit_that_is_too_large_is_named_with_the_largest_device_that_may_run_it():
    may = np.array([[True, True], [True, False]])
    needs = needs_of([10, 70], [50, 90], may=may, counted="weights")
    assert obstacle(needs).startswith(
        "op 'op1' needs 70 B (weights), 20 B more than the limit of 50 B of 'd0'"
    )
    assert "with the 1 ops that must share" in obstacle(
        needs_of([120, 0], [50, 90], unit_of=np.zeros(2, int))
    )


@pytest.mark.parametrize(
    ("limits", "whole"), [([40, 50], r"all 2 devices ('d0' to 'd1')"), ([60], "device 'd0' may")]
)
def test_units_that_exceed_all_devices_are_named_with_their_sum(limits, whole):
    text = obstacle(needs_of([30, 30, 40], limits))
    assert "the ops need 100 B" in text
    assert f"{100 - sum(limits)} B more than {whole}" in text


def test_what_the_devices_keep_free_is_no_room():
    assert not obstacle(needs_of([30, 30], [40, 40]))
    assert "10 B more than all 2" in obstacle(needs_of([30, 30], [40, 40], room_bytes=50.0))


def test_ops_that_no_device_may_run_together_are_named():
    needs = needs_of([1, 1, 1], [9, 9], unit_of=np.array([0, 1, 0]))
    rules = (Rule(ops="op0", devices="d0"), Rule(ops="op2", devices="d1"))
    problem = replace(needs.problem, rules=rules)
    needs = replace(needs, problem=problem, may=places(problem, needs.unit_of, 3).T)
    text = obstacle(needs)
    assert text == "no device may run op 'op0' and 1 that must share its device, such as 'op2'"


def test_a_search_that_found_nothing_names_the_smallest_device_or_the_op_with_fewest():
    may = np.array([[True, True], [False, True]])
    needs = needs_of([30, 30], [50, 40], may=may)
    assert not obstacle(needs)
    assert "no cut over 2 devices keeps 'd1' within 40 B, with 60 B" in unfound(needs, "cut")
    by_rules = unfound(needs, "cut", by_rules=True)
    assert by_rules == unfound(replace(needs, total_bytes=30.0), "cut")
    assert "op 'op0' may run on 1 of 2 devices, such as 'd0', and no cut" in by_rules
