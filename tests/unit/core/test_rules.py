"""Pins and bans: what they match, what they leave, and that no plan may break them."""

import numpy as np
import pytest

from partita.core.codec import read_json, write_json
from partita.core.problem import Problem
from partita.core.rules import Rule, parse_rule
from partita.errors import InfeasibleError, InvalidInputError
from partita.objectives.placed import placement_errors
from partita.planners.pipeline import pipeline_plan
from partita.planners.table import solve
from partita.testing.builders import chain, flat_cluster


def problem(*rules: Rule, ops: int = 4, devices: int = 3) -> Problem:
    return Problem(graph=chain(ops), cluster=flat_cluster(devices), rules=rules)


def may(asked: Problem) -> np.ndarray:
    row_of, matrix = asked.allowed
    return matrix[row_of]


def test_without_rules_every_op_may_run_anywhere() -> None:
    assert may(problem()).all()


def test_a_pin_leaves_its_devices_alone() -> None:
    asked = problem()
    names, devices = asked.graph.ops.names, asked.cluster.device_names
    found = may(problem(Rule(ops=names[1], devices=devices[2])))
    assert found[1].tolist() == [False, False, True]
    assert found[[0, 2, 3]].all()


def test_a_ban_takes_its_devices_away() -> None:
    asked = problem()
    found = may(problem(Rule(ops="*", devices=asked.cluster.device_names[0], forbids=True)))
    assert found[:, 0].sum() == 0
    assert found[:, 1:].all()


def test_rules_add_up() -> None:
    device = problem().cluster.device_names
    pinned = Rule(ops="*", devices="*")
    found = may(problem(pinned, Rule(ops="*", devices=device[1], forbids=True)))
    assert found[0].tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("rules", "word"),
    [
        ([Rule(ops="nowhere", devices="*")], "'nowhere' names no op"),
        ([Rule(ops="*", devices="host9/*")], "'host9/\\*' names no device"),
        ([Rule(ops="*", devices="*", forbids=True)], "runs on no device under forbid"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(rules: list[Rule], word: str) -> None:
    with pytest.raises(InvalidInputError, match=word):
        problem(*rules)


@pytest.mark.parametrize("text", ["encoder", "=gpu0", "encoder="])
def test_a_rule_needs_ops_and_devices(text: str) -> None:
    with pytest.raises(InvalidInputError, match="OPS=DEVICES"):
        parse_rule(text, forbids=False)


def test_a_plan_that_breaks_a_rule_is_named() -> None:
    device = problem().cluster.device_names
    asked = problem(Rule(ops="*", devices=device[2]))
    plan = pipeline_plan(asked, np.array([0, 0, 1, 1]), [[2], [1]])
    (error,) = placement_errors(asked, plan)
    assert repr(device[1]) in error
    assert "pin *=" in error


def test_a_planner_that_cannot_keep_a_rule_refuses() -> None:
    asked = problem(Rule(ops="*", devices=problem().cluster.device_names[2]))
    with pytest.raises(InfeasibleError, match="rule"):
        solve(asked, "uniform")


def test_rules_survive_their_document() -> None:
    asked = problem(parse_rule("*=*", forbids=False))
    assert read_json(write_json(asked)) == asked
