import dataclasses
import json
import random

import numpy as np
import pytest

from partita.catalogue.examples import example
from partita.core.placement import placement_plan
from partita.core.plan import Plan, Stage, pipeline_stages
from partita.errors import FormatError, InvalidInputError
from partita.formats.baechi import read_baechi, read_placement, write_baechi, write_placement


def placed(plan):
    return [plan.devices[device] for device in plan.device_of]


def test_a_placement_is_by_id_and_the_order_is_kept():
    problem = example("baechi-fig1")
    text = '{"placement": [0, 0, 1, 1, 1, 0], "order": [0, 1, 4, 2, 5, 3], "start": [0]}'
    plan = read_placement(text, problem)
    assert placed(plan) == [f"host0/gpu{i}" for i in (0, 0, 1, 1, 1, 0)]
    plan.check_fits(problem)
    written = write_placement(problem, plan)
    assert json.loads(written)["placement"] == [0, 0, 1, 1, 1, 0]
    assert read_placement(written, problem) == plan


def renumbered():
    """A problem whose ids are neither 0, 1, ... nor in order, with devices 7 and 2."""
    document = json.loads(write_baechi(example("baechi-fig2")))
    for node in document["nodes"]:
        node["id"] = 30 - 10 * node["id"]
    for edge in document["edges"]:
        edge["src"], edge["dst"] = 30 - 10 * edge["src"], 30 - 10 * edge["dst"]
    for device, number in zip(document["devices"], (7, 2), strict=True):
        device["id"] = number
    return read_baechi(json.dumps(document))


def test_other_ids_are_read_from_and_written_to_an_object():
    problem = renumbered()
    text = '{"placement": {"30": 7, "20": 2, "10": 7, "0": 2}}'
    plan = read_placement(text, problem)
    assert placed(plan) == [f"host0/gpu{i}" for i in (7, 2, 7, 2)]
    written = write_placement(problem, plan)
    assert json.loads(written)["placement"] == {"30": 7, "20": 2, "10": 7, "0": 2}
    assert write_placement(problem, read_placement(written, problem)) == written


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", ["'placement'"]),
        ('{"placement": [0, 0, 0, 0, 0]}', ["1 nodes are not placed", "5"]),
        ('{"placement": [0, 0, 0, 0, 0, 2]}', ["placement[5] is 2", "2 devices"]),
        ('{"placement": [0, 0, 0, 0, 0, 0, 0]}', ["'6'", "id of a node"]),
        ('{"placement": {"x": 0}}', ["'x'"]),
        ('{"placement": 3}', ["placement is 3"]),
        ('{"placement": [0, 0, 0, 0, 0, 0], "order": [0, 1, 2]}', ["3 nodes", "each of 6"]),
        ('{"placement": [0, 0, 0, 0, 0, 0], "order": [0, 0, 1, 2, 3, 4]}', ["5 nodes in 6"]),
        ('{"placement": [0, 0, 0, 0, 0, 0], "order": [0, 1, 2, 3, 4, 9]}', ["order[5] is 9"]),
        ('{"placement": [0, 0, 0, 0, 0, 0], "order": [1, 0, 2, 4, 5, 3]}', ["runs '1' before '0'"]),
    ],
)
def test_placements_that_do_not_fit_are_refused(text, words):
    with pytest.raises(FormatError) as caught:
        read_placement(text, example("baechi-fig1"))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["baechi-fig1", "baechi-fig3", "gpt-small", "resnet50"])
def test_any_placement_comes_back_byte_for_byte(name):
    problem = example(name)
    rng = random.Random(5)
    for share in (1, 2, 5, len(problem.graph)):
        devices = [rng.randrange(len(problem.cluster)) for _ in range(share)]
        device_of = np.array(
            [devices[op * share // len(problem.graph)] for op in range(len(problem.graph))]
        )
        plan = placement_plan(problem.graph, problem.cluster.device_names, device_of)
        text = write_placement(problem, plan)
        again = read_placement(text, problem)
        assert again == plan
        assert write_placement(problem, again) == text


def test_a_plan_with_other_stages_is_cut_again_and_then_stays():
    problem = example("baechi-fig3")
    plan = Plan(
        fingerprint=problem.graph.fingerprint,
        devices=problem.cluster.device_names,
        stage_of=np.array([0, 0, 1, 1, 1, 2, 2, 2, 2]),
        stages=pipeline_stages([[0], [1], [0]]),
    )
    text = write_placement(problem, plan)
    again = read_placement(text, problem)
    assert again.device_of.tolist() == plan.device_of.tolist()
    assert write_placement(problem, again) == text


def test_replicas_cannot_be_written():
    problem = example("baechi-fig2")
    plan = Plan(
        fingerprint=problem.graph.fingerprint,
        devices=problem.cluster.device_names,
        stage_of=[0] * 4,
        stages=(Stage(devices=((0,), (1,))),),
        microbatch_sizes=[1, 1],
    )
    with pytest.raises(InvalidInputError, match="replicas"):
        write_placement(problem, plan)


def test_a_plan_for_another_graph_is_not_written():
    problem = example("baechi-fig2")
    plan = placement_plan(problem.graph, problem.cluster.device_names, np.zeros(4, int))
    other = dataclasses.replace(plan, fingerprint="0" * 32)
    with pytest.raises(InvalidInputError, match="fingerprint"):
        write_placement(problem, other)
