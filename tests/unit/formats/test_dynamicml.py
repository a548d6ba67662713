import copy
import io
import json

import numpy as np
import pytest

from partita.catalogue.examples import example
from partita.core.placement import placement_plan
from partita.core.plan import Plan, Stage
from partita.core.problem import Metric
from partita.errors import FormatError, InvalidInputError
from partita.formats.dynamicml import (
    read_assignment,
    read_dynamicml,
    read_speed_matrix,
    write_assignment,
    write_dynamicml,
    write_speed_matrix,
)

DOCUMENT = {
    "name": "toy",
    "k": 2,
    "node_weights": [2.0, 3, 0.5],
    "edges": [[2, 0], [0, 1], [2, 1]],
    "matrix": [[0, 1.5], [0.25, 7]],
    "k_values": [2],
    "spec": {"seed": 1},
}
TEXT = json.dumps(DOCUMENT)


def changed(change):
    document = copy.deepcopy(DOCUMENT)
    change(document)
    return json.dumps(document)


def test_weights_are_seconds_and_the_matrix_latency():
    problem = read_dynamicml(TEXT)
    assert problem.graph.name == "toy"
    assert problem.graph.forward_s.tolist() == [2.0, 3.0, 0.5]
    assert not problem.graph.tensors.bytes.any()
    assert problem.cluster.matrix.latency_s.tolist() == [0, 1.5, 0.25, 7]
    assert np.isinf(problem.cluster.matrix.bandwidth_bytes_per_s).all()
    assert problem.objective.metric is Metric.SHARDING_COST


def test_edges_may_lead_to_lower_rows():
    graph = read_dynamicml(TEXT).graph
    assert graph.edge_source.tolist() == [2, 0, 2]
    assert graph.edges.reader.tolist() == [0, 1, 1]
    assert graph.topological_order.tolist() == [2, 0, 1]


def test_instances_come_back():
    problem = read_dynamicml(TEXT)
    written = write_dynamicml(problem)
    assert json.loads(written) == DOCUMENT
    assert read_dynamicml(written) == problem
    assert write_dynamicml(read_dynamicml(written)) == written


def test_a_name_is_taken_where_the_file_has_none():
    text = changed(lambda d: d.pop("name"))
    assert read_dynamicml(text, name="x").graph.name == "x"
    assert read_dynamicml(TEXT, name="x").graph.name == "toy"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("k"), ["'k'"]),
        (lambda d: d.update(k=3), ["matrix", "3 rows"]),
        (lambda d: d.update(k=0), ["k is 0"]),
        (lambda d: d["matrix"][1].append(1), ["matrix[1]", "2 numbers"]),
        (lambda d: d["matrix"].__setitem__(1, 5), ["matrix[1] is 5", "a list"]),
        (lambda d: d["matrix"][0].__setitem__(1, -1), ["matrix[0][1] is -1"]),
        (lambda d: d["node_weights"].__setitem__(2, "x"), ["node_weights[2] is 'x'"]),
        (lambda d: d["node_weights"].__setitem__(2, 1e300), ["node_weights[2]"]),
        (lambda d: d["edges"].append([0, 3]), ["edges[3] is 3", "0 to 2"]),
        (lambda d: d["edges"].append([0]), ["edges[3]", "a pair"]),
        (lambda d: d["edges"].append([1, 2]), ["cycle"]),
        (lambda d: d["edges"].append([1, 1]), ["cycle"]),
        (lambda d: d.update(node_weights=[], edges=[]), ["at least one op"]),
        (lambda d: d.update(name=3), ["name is 3"]),
    ],
)
def test_errors_name_place_value_and_what_would_do(change, words):
    with pytest.raises(FormatError) as caught:
        read_dynamicml(changed(change))
    for word in words:
        assert word in str(caught.value)


def test_extra_keys_may_not_be_nested_without_end():
    deep = "[" * 40 + "]" * 40
    with pytest.raises(FormatError, match="x is nested"):
        read_dynamicml(TEXT[:-1] + f', "x": {deep}}}')


def test_levels_are_written_as_the_cost_of_the_mean_tensor():
    problem = example("six-node-chain")
    document = json.loads(write_dynamicml(problem))
    mean = problem.graph.tensors.bytes.mean()
    assert document["matrix"][0][1] == pytest.approx(mean / 1e8)
    assert document["matrix"][0][0] == 0
    assert document["edges"] == [[0, 1], [1, 2], [2, 3], [3, 4]]


@pytest.mark.parametrize(
    "text", ['{"assignment": {"2": 0, "0": 0, "1": 1}}', '{"parts": [[0, 2], [1]]}']
)
def test_both_forms_of_plans_are_read(text):
    problem = read_dynamicml(TEXT)
    plan = read_assignment(text, problem)
    assert plan.device_of.tolist() == [0, 1, 0]
    written = write_assignment(problem, plan)
    assert json.loads(written) == {"assignment": {"0": 0, "1": 1, "2": 0}}
    assert read_assignment(written, problem) == plan
    assert write_assignment(problem, read_assignment(written, problem)) == written


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", ["'assignment'"]),
        ('{"assignment": {}}', ["3 nodes are not placed"]),
        ('{"assignment": {"0": 2}}', ["assignment.0 is 2", "0 to 1"]),
        ('{"assignment": {"0": -1}}', ["-1"]),
        ('{"assignment": {"7": 0}}', ["'7'"]),
        ('{"parts": [[0, 1, 2], [0]]}', ["parts[1]", "'0'"]),
        ('{"parts": [[0], [1], [2]]}', ["parts[2] is 2"]),
        ('{"parts": [0]}', ["parts[0] is 0", "a list"]),
    ],
)
def test_plans_that_do_not_fit_are_refused(text, words):
    with pytest.raises(FormatError) as caught:
        read_assignment(text, read_dynamicml(TEXT))
    for word in words:
        assert word in str(caught.value)


def test_devices_are_numbered_as_in_the_cluster():
    problem = read_dynamicml(TEXT)
    plan = placement_plan(problem.graph, ["host0/gpu1"], np.zeros(3, int))
    assert json.loads(write_assignment(problem, plan))["assignment"]["0"] == 1


def test_replicas_cannot_be_written():
    problem = read_dynamicml(TEXT)
    plan = Plan(
        fingerprint=problem.graph.fingerprint,
        devices=problem.cluster.device_names,
        stage_of=[0, 0, 0],
        stages=(Stage(devices=((0,), (1,))),),
        microbatch_sizes=[1, 1],
    )
    with pytest.raises(InvalidInputError, match="replicas"):
        write_assignment(problem, plan)


def saved(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "u1", ">f4"])
def test_the_cost_of_a_link_is_the_largest_speed_minus_its_own(dtype):
    cluster = read_speed_matrix(saved(np.eye(3, dtype=dtype)), name="c")
    assert cluster.name == "c"
    assert cluster.matrix.latency_s.reshape(3, 3).tolist() == (1 - np.eye(3)).tolist()


def test_speeds_come_back_byte_for_byte():
    speed = np.random.default_rng(0).random((5, 5)).astype(np.float32)
    written = write_speed_matrix(read_speed_matrix(saved(speed)))
    assert write_speed_matrix(read_speed_matrix(written)) == written
    identity = np.eye(3)
    assert write_speed_matrix(read_speed_matrix(saved(identity))) == saved(identity)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["not an .npy"]),
        (b"\x93NUMPY", ["not an .npy"]),
        (saved(np.eye(3))[:-1], ["bytes; expected"]),
        (saved(np.eye(3)) + b"x", ["bytes; expected"]),
        (saved(np.zeros((2, 3))), ["2 x 3", "square"]),
        (saved(np.zeros(4)), ["matrix"]),
        (saved(np.array([["a"]])), ["matrix of numbers"]),
        (saved(-np.eye(2)), ["-1.0"]),
        (saved(np.full((2, 2), np.nan)), ["nan"]),
        (saved(np.eye(3)).replace(b"(3, 3)", b"(9, 9)"), ["bytes; expected"]),
        (saved(np.eye(3)).replace(b"<f8", b"<f1"), ["bytes"]),
        (saved(np.eye(3)).replace(b"'<f8'", b"'|O' "), ["matrix of numbers"]),
        (b"\x93NUMPY\x09\x00" + saved(np.eye(3))[8:], ["matrix"]),
    ],
)
def test_matrices_that_are_none_are_refused(data, words):
    with pytest.raises(FormatError) as caught:
        read_speed_matrix(data)
    for word in words:
        assert word in str(caught.value)


def test_levels_have_no_speed_matrix():
    with pytest.raises(InvalidInputError, match="no matrix"):
        write_speed_matrix(example("gpt-small").cluster)
