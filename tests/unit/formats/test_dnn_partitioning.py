import copy
import dataclasses
import json

import pytest

from partita.catalogue.examples import example
from partita.core.graph import DeviceKind
from partita.core.problem import Metric, Mode
from partita.errors import FormatError, InvalidInputError
from partita.formats.dnn_partitioning import (
    op_ids,
    read_dnn_partitioning,
    write_dnn_partitioning,
)


def node(number, **values):
    return {
        "id": number,
        "supportedOnFpga": 1,
        "cpuLatency": 23.0,
        "fpgaLatency": 1.37,
        "isBackwardNode": 0,
        "size": 0.1,
    } | values


DOCUMENT = {
    "maxSizePerFPGA": 4.5,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [
        node(77, name="x", colorClass=-3, layerId=4),
        node(5, colorClass=900, supportedOnFpga=False),
        node(-2, isBackwardNode=True, colorClass=900, fpgaLatency=2, size=0.2),
    ],
    "edges": [
        {"sourceId": 77, "destId": 5, "cost": 0.5, "size": 100.0},
        {"sourceId": 77, "destId": -2, "cost": 0.5, "size": 60.0},
    ],
}


def changed(change):
    document = copy.deepcopy(DOCUMENT)
    change(document)
    return json.dumps(document)


TEXT = json.dumps(DOCUMENT)


def test_latencies_are_costs_of_two_device_types():
    graph = read_dnn_partitioning(TEXT).graph
    assert [costs.device_type for costs in graph.costs] == ["accelerator", "cpu"]
    assert graph.costs[0].forward_s.tolist() == [1.37 / 1000, 1.37 / 1000, 0.002]
    assert graph.costs[1].forward_s.tolist() == [0.023, 0.023, 0.023]
    assert not graph.costs[0].backward_s.any()


def test_columns_of_ops():
    graph = read_dnn_partitioning(TEXT).graph
    assert graph.ops.names == ("77", "5", "-2")
    assert graph.ops.saved_bytes.tolist() == [0.1, 0.1, 0.2]
    assert len(graph.parameters) == 0
    assert graph.ops.phase.tolist() == [0, 0, 1]
    assert graph.ops.colocation.tolist() == [0, 1, 1]
    assert graph.ops.device_kinds.tolist() == [3, 2, 3]
    assert graph.annotations["dnn-partitioning"]["color_classes"] == (-3, 900)


def test_an_op_has_one_tensor_with_the_time_of_its_edges():
    tensors = read_dnn_partitioning(TEXT).graph.tensors
    assert tensors.producer.tolist() == [0, 1, 2]
    assert tensors.transfer_s.tolist() == [0.0005, 0.0, 0.0]
    assert tensors.bytes.tolist() == [100.0, 0.0, 0.0]


def test_devices_and_objective():
    problem = read_dnn_partitioning(TEXT)
    assert problem.cluster.device_names == ("acc0", "acc1", "cpu0")
    assert problem.cluster.memory_bytes.tolist() == [4.5, 4.5, float("inf")]
    assert [d.kind for d in problem.cluster.devices] == [*[DeviceKind.GPU] * 2, DeviceKind.CPU]
    assert problem.objective.metric is Metric.MAX_LOAD
    assert problem.objective.mode is Mode.TRAINING
    forward = changed(lambda d: (d["nodes"].pop(), d["edges"].pop()))
    latency = read_dnn_partitioning(forward, metric=Metric.SINGLE_SAMPLE_LATENCY)
    assert latency.objective.mode is Mode.INFERENCE
    assert latency.objective.metric is Metric.SINGLE_SAMPLE_LATENCY


def test_all_keys_come_back():
    text = changed(lambda d: d.update(comment={"a": [1]}) or d["edges"][0].update(note="n"))
    problem = read_dnn_partitioning(text)
    written = write_dnn_partitioning(problem)
    assert json.loads(written) == json.loads(text)
    assert read_dnn_partitioning(written) == problem
    assert write_dnn_partitioning(read_dnn_partitioning(written)) == written


def test_optional_keys_may_be_missing():
    def change(document):
        for row in document["nodes"]:
            for key in ("isBackwardNode", "size", "colorClass"):
                row.pop(key, None)
        for edge in document["edges"]:
            del edge["size"]

    graph = read_dnn_partitioning(changed(change)).graph
    assert not graph.ops.saved_bytes.any()
    assert graph.ops.colocation.tolist() == [-1, -1, -1]
    assert graph.is_forward.all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("maxFPGAs"), ["'maxFPGAs'"]),
        (lambda d: d.update(maxFPGAs=-1), ["maxFPGAs is -1"]),
        (lambda d: d.update(maxFPGAs=0, maxCPUs=0), ["0 devices"]),
        (lambda d: d.update(maxFPGAs=10**9), ["maxFPGAs", "65536"]),
        (lambda d: d.update(maxSizePerFPGA=0), ["memory_bytes"]),
        (lambda d: d.update(maxCPUs=0), ["'5'", "no kind of device"]),
        (lambda d: d.update(nodes={}), ["nodes is an object", "a list"]),
        (lambda d: d.update(nodes=[]), ["id of a node"]),
        (lambda d: d["nodes"].append(3), ["nodes[3] is 3", "an object"]),
        (lambda d: d["nodes"].append(node(5)), ["nodes[3].id is 5", "nodes[1]"]),
        (lambda d: d["nodes"][0].pop("cpuLatency"), ["nodes[0]", "'cpuLatency'"]),
        (lambda d: d["nodes"][1].update(fpgaLatency=-1), ["nodes[1].fpgaLatency is -1"]),
        (lambda d: d["nodes"][1].update(fpgaLatency=1e300), ["nodes[1].fpgaLatency is 1e+300"]),
        (lambda d: d["nodes"][1].update(size=10**400), ["nodes[1].size is 1000"]),
        (lambda d: d["nodes"][1].update(id=1.5), ["nodes[1].id is 1.5"]),
        (lambda d: d["nodes"][1].update(id=True), ["nodes[1].id is True"]),
        (lambda d: d["nodes"][1].update(supportedOnFpga=2), ["supportedOnFpga is 2"]),
        (lambda d: d["nodes"][1].update(containedNodes=[1]), ["containedNodes"]),
        (lambda d: d["edges"][0].update(destId=9), ["edges[0].destId is 9", "id of a node"]),
        (lambda d: d["edges"][1].update(destId=5), ["edges[1] repeats edges[0]"]),
        (lambda d: d["edges"][1].update(cost=0.6), ["edges[1].cost is 0.6", "0.5", "equal costs"]),
        (lambda d: d["edges"].append({"sourceId": -2, "destId": 5, "cost": 0}), ["backward"]),
        (lambda d: d["edges"].append({"sourceId": 5, "destId": 77, "cost": 0}), ["cycle"]),
    ],
)
def test_errors_name_place_value_and_what_would_do(change, words):
    with pytest.raises(FormatError) as caught:
        read_dnn_partitioning(changed(change))
    for word in words:
        assert word in str(caught.value)


def test_costs_within_the_published_tolerance_are_equal():
    text = changed(lambda d: d["edges"][1].update(cost=0.5 + 5e-7))
    assert read_dnn_partitioning(text).graph.tensors.transfer_s[0] == (0.5 + 5e-7) / 1000


def test_a_problem_from_elsewhere_is_written_whole():
    problem = example("gpt-small")
    written = write_dnn_partitioning(problem)
    document = json.loads(written)
    assert document["maxFPGAs"] == 4
    assert document["nodes"][0]["name"] == "embedding.word"
    assert write_dnn_partitioning(read_dnn_partitioning(written)) == written
    total_ms = sum(row["fpgaLatency"] for row in document["nodes"])
    costs = problem.graph.costs[0]
    assert total_ms == pytest.approx(1000 * (costs.forward_s + costs.backward_s).sum())


def test_accelerators_that_differ_cannot_be_written():
    with pytest.raises(InvalidInputError, match="2 sorts of accelerators"):
        write_dnn_partitioning(example("resnet50"))


def test_a_device_without_times_cannot_be_written():
    problem = example("gpt-small")
    graph = dataclasses.replace(problem.graph, costs=problem.graph.costs[1:])
    with pytest.raises(InvalidInputError, match="'a100'"):
        write_dnn_partitioning(dataclasses.replace(problem, graph=graph))


@pytest.mark.parametrize(
    ("names", "ids"),
    [(("3", "-7"), ["3", "-7"]), (("03", "1"), ["0", "1"]), (("x", "1"), ["0", "1"])],
)
def test_ids_are_names_where_all_are_numbers(names, ids):
    graph = read_dnn_partitioning(TEXT).graph
    ops = dataclasses.replace(graph.ops, names=(*names, "5"))
    assert op_ids(dataclasses.replace(graph, ops=ops))[:2] == ids
