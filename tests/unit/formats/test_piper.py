import copy
import dataclasses
import json
import random

import pytest

from partita.catalogue.examples import example
from partita.core.graph import EdgeTable
from partita.core.problem import Metric
from partita.errors import FormatError, InvalidInputError
from partita.formats.piper import read_piper, write_piper


def option(kind="vanilla", time=0.1, fw=(), bw=(), **values):
    return {
        "id": kind,
        "timePerSample": time,
        "parameterSize": 8.0,
        "memoryUsageA": 3.0,
        "memoryUsageB": 5.0,
        "syncTimeFw": dict(fw),
        "syncTimeBw": dict(bw),
    } | values


DOCUMENT = {
    "maxDevices": 3,
    "maxMemoryPerDevice": 8e9,
    "bandwidth": 25e9,
    "mbsInBatch": 12,
    "nodes": [
        {
            "id": 4,
            "name": "first",
            "TMPCs": {
                "1": [
                    option(bw={"9": 0.0, "7": 1.0}),
                    option("activation recomp", 0.7, bw={"9": 2.0, "7": 3.0}, memoryUsageA=1.0),
                ],
                "2": [option(time=0.06, bw={"9": 64.0, "7": 65.0})],
            },
        },
        {"id": 7, "name": "last", "TMPCs": {"1": [option(fw={"9": 11.0, "4": 12.0})]}},
        {
            "id": 9,
            "name": "middle",
            "TMPCs": {"2": [option("activation recomp", fw={"4": 5.0}, bw={"7": 6.0})]},
        },
    ],
    "edges": [
        {"sourceId": 9, "destId": 7, "communicationCost": 30.0},
        {"sourceId": 4, "destId": 9, "communicationCost": 10.0},
        {"sourceId": 4, "destId": 7, "communicationCost": 20.0},
    ],
}


def changed(change):
    document = copy.deepcopy(DOCUMENT)
    change(document)
    return json.dumps(document)


TEXT = json.dumps(DOCUMENT)


def test_every_option_is_a_variant():
    variants = read_piper(TEXT).graph.variants
    assert variants.op.tolist() == [0, 0, 0, 1, 2]
    assert variants.tp.tolist() == [1, 1, 2, 1, 2]
    assert variants.recompute.tolist() == [False, True, False, False, True]
    assert variants.saved_bytes.tolist() == [3, 1, 3, 3, 3]
    assert variants.fixed_memory_bytes.tolist() == [5] * 5
    assert variants.parameter_bytes.tolist() == [8] * 5


def test_syncs_follow_the_edges_of_the_op():
    graph = read_piper(TEXT).graph
    variants = graph.variants
    assert variants.sync_in_ptr.tolist() == [0, 0, 0, 0, 2, 3]
    assert variants.sync_in_bytes.tolist() == [11, 12, 5]
    assert variants.sync_out_bytes.tolist() == [0, 1, 2, 3, 64, 65, 6]
    pointers, edges = graph.out_edges
    assert [graph.ops.names[graph.edges.reader[e]] for e in edges[: pointers[1]]] == ["9", "7"]


def test_the_parts_of_a_time_add_up_exactly():
    rng = random.Random(3)
    for _ in range(300):
        time = rng.random() * 10.0 ** rng.randint(-8, 8)
        text = changed(
            lambda d, time=time: d["nodes"][0]["TMPCs"]["1"][0].update(timePerSample=time)
        )
        graph = read_piper(text).graph
        assert graph.forward_s[0] + graph.backward_s[0] == time
        assert graph.forward_s[0] == pytest.approx(time / 3)


def test_the_reference_is_vanilla_without_tensor_parallelism_where_there_is_one():
    graph = read_piper(TEXT).graph
    assert (graph.forward_s + graph.backward_s).tolist() == [0.1, 0.1, 0.1]
    assert graph.ops.saved_bytes.tolist() == [3, 3, 3]
    assert graph.parameters.names == ("4.weight", "7.weight", "9.weight")
    assert graph.costs[0].device_type == ""


def test_edges_with_other_bytes_are_other_tensors():
    graph = read_piper(TEXT).graph
    assert graph.tensors.names == ("9", "4", "4#1", "7")
    assert graph.tensors.bytes.tolist() == [30, 10, 20, 0]
    assert graph.edges.tensor.tolist() == [0, 1, 2]
    assert graph.outputs.tolist() == [3]
    equal = read_piper(changed(lambda d: d["edges"][2].update(communicationCost=10.0))).graph
    assert equal.tensors.names == ("9", "4", "7")


def test_devices_and_objective():
    problem = read_piper(TEXT)
    assert len(problem.cluster) == 3
    assert set(problem.cluster.memory_bytes.tolist()) == {8e9}
    (level,) = problem.cluster.levels
    assert level.bandwidth_bytes_per_s.tolist() == [25e9]
    assert level.port_per_device
    assert problem.objective.metric is Metric.PIPER
    assert problem.objective.microbatches == 12


def test_the_file_can_be_overridden():
    problem = read_piper(
        TEXT, devices=8, memory_bytes=2.0**31, microbatches=1920, bandwidth_bytes_per_s=2.0**34
    )
    assert len(problem.cluster) == 8
    assert problem.cluster.memory_bytes[7] == 2.0**31
    assert problem.cluster.levels[0].bandwidth_bytes_per_s[0] == 2.0**34
    assert problem.objective.microbatches == 1920
    with pytest.raises(FormatError, match="0 devices"):
        read_piper(TEXT, devices=0)


def test_all_keys_come_back():
    text = changed(lambda d: d.update(comment=[1, {"a": None}]))
    problem = read_piper(text)
    written = write_piper(problem)
    assert json.loads(written) == json.loads(text)
    assert read_piper(written) == problem
    assert write_piper(read_piper(written)) == written


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("mbsInBatch"), ["'mbsInBatch'"]),
        (lambda d: d.update(mbsInBatch=0), ["mbsInBatch is 0"]),
        (lambda d: d.update(bandwidth=0), ["bandwidth", "more than 0"]),
        (lambda d: d["nodes"][0].pop("TMPCs"), ["nodes[0]", "'TMPCs'"]),
        (lambda d: d["nodes"][0].update(TMPCs={}), ["nodes[0].TMPCs", "no option"]),
        (lambda d: d["nodes"][0]["TMPCs"].update(x=[]), ["nodes[0].TMPCs.x is 'x'"]),
        (lambda d: d["nodes"][0]["TMPCs"].update({"0": []}), ["nodes[0].TMPCs.0 is 0"]),
        (lambda d: d["nodes"][0]["TMPCs"]["1"][0].update(id="fast"), ["'fast'", "vanilla"]),
        (lambda d: d["nodes"][0]["TMPCs"]["1"][1].update(id="vanilla"), ["twice"]),
        (
            lambda d: d["nodes"][0]["TMPCs"]["1"][0].update(timePerSample=-1),
            ["timePerSample is -1"],
        ),
        (lambda d: d["nodes"][1]["TMPCs"]["1"][0]["syncTimeFw"].pop("4"), ["syncTimeFw", "'4'"]),
        (lambda d: d["nodes"][1]["TMPCs"]["1"][0]["syncTimeBw"].update({"4": 1}), ["syncTimeBw"]),
        (lambda d: d["edges"].append(d["edges"][0]), ["edges[3] repeats edges[0]"]),
        (lambda d: d["edges"][0].update(communicationCost=None), ["communicationCost is None"]),
    ],
)
def test_errors_name_place_value_and_what_would_do(change, words):
    with pytest.raises(FormatError) as caught:
        read_piper(changed(change))
    for word in words:
        assert word in str(caught.value)


def test_a_cycle_is_refused():
    def change(document):
        document["edges"].append({"sourceId": 7, "destId": 4, "communicationCost": 1.0})
        for row in document["nodes"]:
            for options in row["TMPCs"].values():
                for one in options:
                    if row["id"] == 4:
                        one["syncTimeFw"]["7"] = 0.0
                    if row["id"] == 7:
                        one["syncTimeBw"]["4"] = 0.0

    with pytest.raises(FormatError, match="cycle"):
        read_piper(changed(change))


def test_a_problem_from_elsewhere_has_one_option_a_node():
    problem = example("gpt-small")
    written = write_piper(problem)
    document = json.loads(written)
    assert document["mbsInBatch"] == 8
    first = document["nodes"][0]["TMPCs"]["1"][0]
    weights = problem.graph.parameter_bytes[0]
    assert first["memoryUsageB"] == 2 * weights + 8 * weights / 4
    assert write_piper(read_piper(written)) == written


@pytest.mark.parametrize("name", ["chain201", "resnet50"])
def test_devices_that_differ_cannot_be_written(name):
    with pytest.raises(InvalidInputError, match="devices at"):
        write_piper(example(name))


def test_tensors_between_two_ops_are_one_edge():
    problem = read_piper(TEXT)
    graph = problem.graph
    edges = EdgeTable(tensor=[0, 1, 2, 1], reader=[1, 2, 1, 1])
    plain = dataclasses.replace(graph, edges=edges, variants=type(graph.variants)())
    document = json.loads(write_piper(dataclasses.replace(problem, graph=plain)))
    assert [edge["communicationCost"] for edge in document["edges"]] == [30, 10, 30]
