import copy
import dataclasses
import json
import random

import numpy as np
import pytest

from partita.catalogue.examples import example
from partita.core.graph import EdgeTable, Phase
from partita.core.placement import placement_plan
from partita.core.plan import Plan, Stage, pipeline_stages
from partita.core.problem import Metric
from partita.errors import FormatError, InvalidInputError
from partita.formats.baechi import (
    device_numbers,
    read_baechi,
    read_placement,
    write_baechi,
    write_placement,
)


def node(number, time_ms=1.0, permanent=10, parameter=4, **values):
    return {
        "id": number,
        "name": "Linear",
        "time_ms": time_ms,
        "permanent_mem": permanent,
        "temporary_mem": 3.5,
        "parameter_mem": parameter,
        "output_mem": 6,
    } | values


def edge(number, src, dst, size=6, ms=0.5):
    return {"id": number, "src": src, "dst": dst, "bytes": size, "comm_ms": ms}


DOCUMENT = {
    "name": "toy",
    "seed": 3,
    "nodes": [node(2), node(0, 0.302, flops=8.0), node(1, permanent=3, parameter=5)],
    "edges": [edge(0, 0, 2), edge(1, 0, 1), edge(5, 2, 1, ms=0.7), edge(7, 2, 1)],
    "devices": [{"id": 3, "memory_limit": 4.0}, {"id": 1, "memory_limit": 5}],
    "total_permanent": 23,
}
TEXT = json.dumps(DOCUMENT)


def changed(change):
    document = copy.deepcopy(DOCUMENT)
    change(document)
    return json.dumps(document)


def test_columns_of_ops():
    graph = read_baechi(TEXT).graph
    assert graph.ops.names == ("2", "0", "1")
    assert graph.forward_s.tolist() == [0.001, 0.302 / 1000, 0.001]
    assert not graph.backward_s.any()
    assert graph.ops.saved_bytes.tolist() == [6, 6, 0]
    assert graph.ops.workspace_bytes.tolist() == [3.5] * 3
    assert graph.parameters.bytes.tolist() == [2, 2, 2.5]
    assert graph.ops.flops.tolist() == [0, 8, 0]
    assert graph.ops.types.names == ("Linear",)


def test_raw_columns_are_kept():
    notes = read_baechi(TEXT).graph.annotations["baechi"]
    assert notes["permanent_mem"] == (10, 10, 3)
    assert notes["parameter_mem"] == (4, 4, 5)
    assert notes["edge_ids"] == (0, 1, 5, 7)
    assert notes["document"] == {"seed": 3, "total_permanent": 23}


def test_edges_with_equal_bytes_and_time_read_one_tensor():
    graph = read_baechi(TEXT).graph
    assert graph.tensors.names == ("0", "2", "2#1", "1")
    assert graph.edges.tensor.tolist() == [0, 0, 1, 2]
    assert graph.tensors.transfer_s.tolist()[:3] == [0.0005, 0.0007, 0.0005]
    assert np.isnan(graph.tensors.transfer_s[3])
    assert graph.tensors.bytes[3] == 6


def test_devices_and_objective():
    problem = read_baechi(TEXT)
    assert problem.cluster.device_names == ("host0/gpu3", "host0/gpu1")
    assert problem.cluster.memory_bytes.tolist() == [4, 5]
    assert device_numbers(problem.cluster) == [3, 1]
    assert problem.objective.metric is Metric.MAKESPAN_PARALLEL
    assert problem.objective.optimizer_bytes_per_element == 0


def test_devices_can_be_overridden():
    problem = read_baechi(TEXT, devices=3, memory_bytes=7.0)
    assert problem.cluster.device_names == ("host0/gpu0", "host0/gpu1", "host0/gpu2")
    assert problem.cluster.memory_bytes.tolist() == [7, 7, 7]
    assert read_baechi(TEXT, devices=2).cluster.memory_bytes.tolist() == [4, 4]
    with pytest.raises(FormatError, match="0 devices"):
        read_baechi(TEXT, devices=0)


def test_all_keys_come_back():
    text = changed(lambda d: [row.setdefault("flops", 0.0) for row in d["nodes"]])
    problem = read_baechi(text)
    written = write_baechi(problem)
    assert json.loads(written) == json.loads(text)
    assert read_baechi(written) == problem
    assert write_baechi(read_baechi(written)) == written


def test_changed_memory_is_written_instead_of_the_raw_columns():
    problem = read_baechi(TEXT)
    ops = dataclasses.replace(problem.graph.ops, saved_bytes=[1.0, 2.0, 3.0])
    graph = dataclasses.replace(problem.graph, ops=ops)
    document = json.loads(write_baechi(dataclasses.replace(problem, graph=graph)))
    assert [row["permanent_mem"] for row in document["nodes"]] == [5, 6, 8]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("devices"), ["'devices'"]),
        (lambda d: d.update(devices=[]), ["devices is empty"]),
        (lambda d: d["devices"][0].update(id=1), ["devices[1].id is 1", "devices[0]"]),
        (lambda d: d["devices"][0].update(memory_limit=0), ["memory_bytes"]),
        (lambda d: d["nodes"][0].pop("output_mem"), ["nodes[0]", "'output_mem'"]),
        (lambda d: d["nodes"][0].update(time_ms=-1), ["nodes[0].time_ms is -1"]),
        (lambda d: d["nodes"][0].update(permanent_mem=1e30), ["nodes[0].permanent_mem"]),
        (lambda d: d["nodes"][0].update(name=3), ["nodes[0].name is 3"]),
        (lambda d: d["nodes"][0].update(id=0), ["nodes[1].id is 0", "nodes[0]"]),
        (lambda d: d["edges"][0].update(dst=9), ["edges[0].dst is 9"]),
        (lambda d: d["edges"][0].update(id="x"), ["edges[0].id is 'x'"]),
        (lambda d: d["edges"].append(edge(9, 1, 0)), ["cycle"]),
    ],
)
def test_errors_name_place_value_and_what_would_do(change, words):
    with pytest.raises(FormatError) as caught:
        read_baechi(changed(change))
    for word in words:
        assert word in str(caught.value)


def test_a_problem_from_elsewhere_is_written_whole():
    problem = example("gpt-small")
    written = write_baechi(problem)
    document = json.loads(written)
    assert document["nodes"][0]["name"] == "embedding.word"
    assert document["devices"][0] == {"id": 0, "memory_limit": 80 * 2**30}
    rate = problem.cluster.levels[0].bandwidth_bytes_per_s[0]
    first = document["edges"][0]
    assert first["comm_ms"] == pytest.approx(1000 * first["bytes"] / rate)
    assert write_baechi(read_baechi(written)) == written


def test_backward_ops_cannot_be_written():
    problem = read_baechi(TEXT)
    ops = dataclasses.replace(problem.graph.ops, phase=[Phase.FORWARD] * 2 + [Phase.BACKWARD])
    graph = dataclasses.replace(problem.graph, ops=ops)
    with pytest.raises(InvalidInputError, match="backward"):
        write_baechi(dataclasses.replace(problem, graph=graph))


def test_annotations_that_no_longer_fit_are_left_out():
    text = changed(lambda d: [row.update(extra=row["id"]) for row in (*d["nodes"], *d["edges"])])
    problem = read_baechi(text)
    graph = problem.graph
    edges = EdgeTable(tensor=graph.edges.tensor[:2], reader=graph.edges.reader[:2])
    fewer = dataclasses.replace(graph, edges=edges)
    document = json.loads(write_baechi(dataclasses.replace(problem, graph=fewer)))
    assert [edge["id"] for edge in document["edges"]] == [0, 1]
    assert "extra" not in document["edges"][0]
    assert document["nodes"][0]["extra"] == 2


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
