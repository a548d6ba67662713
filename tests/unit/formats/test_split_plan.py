import json

import pytest

from partita.core.plan import Plan, Stage
from partita.core.problem import Schedule
from partita.errors import FormatError, InvalidInputError
from partita.formats.dnn_partitioning import read_dnn_partitioning, read_split, write_split


def node(name, color, *, backward=False):
    return {
        "id": name,
        "supportedOnFpga": True,
        "cpuLatency": 1,
        "fpgaLatency": 1,
        "isBackwardNode": backward,
        "colorClass": color,
    }


@pytest.fixture(scope="module")
def problem():
    document = {
        "maxSizePerFPGA": 10,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": [node(10, 0), node(20, 1), node(30, 2), node(21, 1, backward=True)],
        "edges": [
            {"sourceId": 10, "destId": 20, "cost": 1},
            {"sourceId": 20, "destId": 30, "cost": 1},
        ],
    }
    return read_dnn_partitioning(json.dumps(document))


def placed(plan):
    return [plan.devices[device] for device in plan.device_of]


@pytest.mark.parametrize(
    "text",
    [
        '{"fpgas": [{"nodes": [10, 30]}, {"nodes": [20, 21]}], "cpus": [{"nodes": []}]}',
        '{"maxLoad": -1, "fpgas": [{"load": 1, "nodes": [30, 10]}, {"nodes": [20]}]}',
        '{"assignment": {"10": "acc0", "20": "acc1", "30": 1}}',
        '{"assignment": {"10": 1, "20": "2", "30": "acc0", "21": "acc1"}}',
    ],
)
def test_both_forms_are_read_and_backward_follows_its_colour(problem, text):
    plan = read_split(text, problem)
    assert placed(plan) == ["acc0", "acc1", "acc0", "acc1"]
    plan.check_fits(problem)


def test_zero_is_the_cpu(problem):
    plan = read_split('{"assignment": {"10": 0, "20": "cpu0", "30": "0"}}', problem)
    assert set(placed(plan)) == {"cpu0"}


def test_splits_come_back_byte_for_byte(problem):
    plan = read_split('{"fpgas": [{"nodes": [10]}, {"nodes": [20, 30]}]}', problem)
    text = write_split(problem, plan)
    assert json.loads(text) == {
        "fpgas": [{"nodes": [10]}, {"nodes": [20, 30, 21]}],
        "cpus": [{"nodes": []}],
    }
    assert read_split(text, problem) == plan
    assert write_split(problem, read_split(text, problem)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", ["4 nodes are not placed", "10"]),
        ('{"fpgas": [{"nodes": [10, 20]}]}', ["1 nodes are not placed", "30"]),
        ('{"fpgas": [{"nodes": [10, 10]}]}', ["10", "not placed before"]),
        ('{"fpgas": [{"nodes": [11]}]}', ["11", "id of a node"]),
        ('{"fpgas": [{"nodes": ["x"]}]}', ["'x'", "whole number"]),
        ('{"fpgas": [{"nodes": 3}]}', ["fpgas[0].nodes is 3", "a list"]),
        ('{"fpgas": [{}]}', ["fpgas[0]", "'nodes'"]),
        ('{"fpgas": [{"nodes": []}, {"nodes": []}, {"nodes": [10]}]}', ["gpu 2", "has 2"]),
        ('{"cpus": [{"nodes": []}, {"nodes": [10]}]}', ["cpu 1", "has 1"]),
        ('{"assignment": {"11": 0}}', ["'11'"]),
        ('{"assignment": {"10": "gpu0"}}', ["'gpu0'", "acc0"]),
        ('{"assignment": {"10": -1}}', ["-1"]),
        ('{"assignment": {"10": "acc99999999999"}}', ["acc0"]),
        ('{"assignment": []}', ["assignment is a list"]),
        ("[1]", ["the document is a list"]),
    ],
)
def test_errors_name_place_value_and_what_would_do(problem, text, words):
    with pytest.raises(FormatError) as caught:
        read_split(text, problem)
    for word in words:
        assert word in str(caught.value)


def test_replicas_cannot_be_written(problem):
    plan = Plan(
        fingerprint=problem.graph.fingerprint,
        devices=("acc0", "acc1"),
        stage_of=[0, 0, 0, 0],
        stages=(Stage(devices=((0,), (1,))),),
        schedule=Schedule.GPIPE,
        microbatch_sizes=[1, 1],
    )
    with pytest.raises(InvalidInputError, match="replicas"):
        write_split(problem, plan)
