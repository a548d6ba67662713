import dataclasses
import json
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest

from partita.core.cluster import Cluster, Device
from partita.core.codec import (
    FORMATS,
    MAX_UNFOLDED_ROWS,
    VERSIONS,
    decode,
    decode_as,
    encode,
    format_of,
    parse_json,
    read_json,
    type_of,
    write_json,
)
from partita.core.graph import Graph
from partita.core.plan import Plan, Stage
from partita.core.problem import Objective, Problem
from partita.core.program import Program
from partita.core.solution import Solution
from partita.cost.predict import simulate
from partita.errors import FormatError, InvalidInputError
from partita.planners.table import solve
from partita.program.lower import lower
from partita.testing.builders import (
    Figures,
    Traits,
    chain,
    flat_cluster,
    paired_cluster,
    small_energy_profile,
    small_frontier,
)
from partita.testing.fleet_builders import small_history, small_trace, steep


def small_solution() -> Solution:
    graph = chain(4, Figures(parameter_bytes=8.0, tensor_bytes=2.0), Traits(tied=[(0, 3)]))
    return solve(Problem(graph=graph, cluster=flat_cluster(2, memory_bytes=1e9)), "uniform")


def every_type() -> dict[str, object]:
    """Return one small object of each type that has a document."""
    solution = small_solution()
    problem, plan = solution.problem, solution.plan
    objects = (problem.graph, problem.cluster, problem.objective, problem, plan, solution)
    objects = (*objects, lower(problem, plan), simulate(problem, plan))
    profile = dataclasses.replace(small_energy_profile(), switch_s=0.01)
    objects = (*objects, profile, small_frontier())
    objects = (*objects, steep(), small_trace(), small_history())
    return {format_of(type(value)): value for value in objects}


def refusal(document: object) -> str:
    with pytest.raises(FormatError) as caught:
        decode(document)
    return str(caught.value)


def changed(name: str, path: str, value: object) -> dict[str, Any]:
    """Return the document of a small object with one value changed, or left out for ``...``."""
    document = json.loads(json.dumps(encode(every_type()[name])))
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    owner = document
    for key in parents:
        owner = owner[key]
    if value is ...:
        del owner[last]
    else:
        owner[last] = value
    return document


def test_there_is_a_format_for_every_type_and_each_comes_back_equal():
    objects = every_type()
    assert set(objects) == set(FORMATS)
    for name, value in objects.items():
        document = encode(value)
        assert list(document)[:2] == ["format", "version"]
        assert (document["format"], document["version"]) == (name, VERSIONS[name])
        assert decode(document) == value
        text = write_json(value)
        assert read_json(text) == value
        assert write_json(read_json(text)) == text


def test_no_field_of_a_type_is_hidden_by_the_head_of_its_document():
    for name, value in every_type().items():
        assert len(encode(value)) == len(dataclasses.fields(type_of(name))) + 2
    assert encode(every_type()["partita.program"])["weight_version"]


def test_a_field_that_came_later_is_silent_where_it_is_not_used():
    assert "switch_s" not in encode(small_energy_profile())
    assert encode(every_type()["partita.energy-profile"])["switch_s"] == 0.01


def test_text_has_a_line_for_each_field_and_is_ascii():
    cluster = Cluster(name="größe ☃ \ud800", devices=(Device(name="d"),))
    text = write_json(cluster)
    assert text.isascii()
    assert text.splitlines()[1:3] == ['"format": "partita.cluster",', '"version": 1,']
    assert len(text.splitlines()) == len(dataclasses.fields(Cluster)) + 4
    assert read_json(text).name == "größe ☃ \ud800"
    assert json.loads(text) == encode(cluster)


def test_unknown_and_unlimited_numbers_are_null_and_inf():
    device = encode(Cluster(devices=(Device(name="d"),)))["devices"][0]
    assert device["memory_bytes"] == "inf"
    assert device["price_per_hour"] is None
    matrix = encode(paired_cluster(2))["matrix"]
    assert matrix["bandwidth_bytes_per_s"] == ["inf"] * 4


def test_long_equal_columns_are_written_once():
    document = encode(chain(100, Figures(forward_s=2.5)))
    assert document["costs"][0]["forward_s"] == {"every": 2.5, "rows": 100}
    assert document["costs"][0]["backward_input_s"] == {"every": None, "rows": 100}
    assert document["ops"]["colocation"] == {"every": -1, "rows": 100}
    assert document["parameters"]["trainable"] == {"every": True, "rows": 100}
    assert encode(chain(3))["ops"]["colocation"] == [-1, -1, -1]


def test_long_tuples_of_few_parts_are_written_once_each():
    stages = tuple(Stage(devices=((index % 2,),)) for index in range(20))
    plan = Plan(fingerprint="f", devices=("a", "b"), stage_of=np.arange(20), stages=stages)
    document = encode(plan)
    assert [part["devices"] for part in document["stages"]["distinct"]] == [[[0]], [[1]]]
    assert document["stages"]["of"] == [0, 1] * 10
    again = decode(document)
    assert again == plan
    assert len({id(stage) for stage in again.stages}) == 2
    unlike = tuple(Stage(devices=((index,),)) for index in range(9))
    devices = tuple("abcdefghi")
    plan = Plan(fingerprint="f", devices=devices, stage_of=np.arange(9), stages=unlike)
    assert isinstance(encode(plan)["stages"], list)


def test_long_tuples_of_parts_without_a_hash_are_plain_lists():
    solution = small_solution()
    solution = dataclasses.replace(solution, alternatives=(solution.plan,) * 9)
    assert isinstance(encode(solution)["alternatives"], list)
    assert read_json(write_json(solution)) == solution


def test_numbers_of_numpy_are_written_as_numbers():
    graph = dataclasses.replace(chain(2), batch_size=np.int64(3))
    device = Device(name="d", memory_bytes=np.float32(2.0), idle_w=np.float64(1.5))
    assert read_json(write_json(graph)).batch_size == 3
    assert encode(Cluster(devices=(device,)))["devices"][0]["memory_bytes"] == 2.0


def test_remarks_come_back_as_they_were():
    remarks = {"b": [1, {"c": None}], "a": {"x": [1.5, "y", True]}, "": []}
    graph = read_json(write_json(dataclasses.replace(chain(2), annotations=remarks)))
    assert graph.annotations == {"b": (1, {"c": None}), "a": {"x": (1.5, "y", True)}, "": ()}
    assert list(graph.annotations) == ["b", "a", ""]


def test_an_object_without_a_document_is_refused():
    with pytest.raises(InvalidInputError, match=r"Device.*document"):
        write_json(Device(name="d"))
    with pytest.raises(InvalidInputError, match=r"int.*document"):
        encode(5)


def test_a_document_of_another_type_is_refused():
    assert isinstance(decode_as(encode(chain(2)), Graph), Graph)
    with pytest.raises(FormatError, match=r"^expected a partita\.plan, got a partita\.graph$"):
        decode_as(encode(chain(2)), Plan)


@pytest.mark.parametrize("name", FORMATS)
def test_a_newer_version_is_refused_by_name(name):
    newest = VERSIONS[name]
    document = encode(every_type()[name]) | {"version": newest + 1, "news": True}
    assert refusal(document) == (
        f"this {name} is of version {newest + 1}, newer than the {newest} that this Partita reads; "
        "upgrade Partita"
    )


@pytest.mark.parametrize("version", [None, 0, -1, True, "1", 1.0, [1]])
def test_a_version_that_is_none_is_refused(version):
    message = refusal(encode(Objective()) | {"version": version})
    assert message == f"version of this partita.objective is {version!r}; expected 1"


@pytest.mark.parametrize("document", [None, 5, "x", [], [{}], True])
def test_a_document_is_an_object(document):
    assert refusal(document).startswith("expected a JSON object, got ")


@pytest.mark.parametrize("name", [None, "", "partita.nonsense", 3, ["partita.plan"], {}])
def test_a_document_says_its_format(name):
    message = refusal({"format": name, "version": 1})
    assert message.startswith(f"format is {name!r}; expected one of partita.graph, ")
    assert refusal({}).startswith("format is None; expected one of")


@pytest.mark.parametrize(
    ("name", "path", "value", "words"),
    [
        ("plan", "stage", [], "plan: unknown key 'stage'; known are fingerprint, devices,"),
        ("graph", "ops.kind", 0, "graph.ops: unknown key 'kind'; known are names, fixed_share"),
        ("plan", "stage_of", ..., "plan: key 'stage_of' is missing"),
        ("graph", "ops.names", ..., "graph.ops: key 'names' is missing"),
        ("program", "weight_version", ..., "program: key 'weight_version' is missing"),
        ("plan", "devices", "d0", "plan.devices is 'd0'; expected a list"),
        ("plan", "devices.0", 7, "plan.devices[0] is 7; expected a string"),
        ("plan", "stages.1", [], "plan.stages[1] is []; expected an object"),
        ("plan", "stages.1.devices.0", 3, "plan.stages[1].devices[0] is 3; expected a list"),
        ("plan", "stages.1.devices.0.0", "a", "plan.stages[1].devices[0][0] is 'a'; expected a w"),
        ("plan", "stages.0.shares.0", 1.0, "plan.stages[0].shares[0] is 1.0; expected a whole n"),
        ("plan", "stages.0.shares.0", True, "plan.stages[0].shares[0] is True; expected a whole"),
        ("plan", "stage_of.2", 0.5, "plan.stage_of[2] is 0.5; expected a whole number"),
        ("plan", "stage_of.2", True, "plan.stage_of[2] is True; expected a whole number"),
        ("plan", "stage_of.2", None, "plan.stage_of[2] is None; expected a whole number"),
        ("plan", "stage_of", None, "plan.stage_of is None; expected a list"),
        ("plan", "stage_of", 5, "plan.stage_of is 5; expected a list"),
        ("plan", "recompute.1", 1, "plan.recompute[1] is 1; expected true or false"),
        ("plan", "schedule", "2f2b", "plan.schedule is '2f2b'; expected one of gpipe, 1f1b,"),
        ("plan", "schedule", 1, "plan.schedule is 1; expected one of gpipe, 1f1b,"),
        ("plan", "stages.0.shard", None, "plan.stages[0].shard is None; expected one of none, op"),
        ("plan", "stage_of.0", 2**31, "plan.stage_of holds a number beyond the range of int32"),
        ("plan", "stage_of.0", 2**63, "plan.stage_of holds a number beyond the range of int32"),
        ("plan", "stage_of.0", 7, "plan: stage of an op of row 0 is 7; expected 0 to 1"),
        ("plan", "fingerprint", 7, "plan.fingerprint is 7; expected a string"),
        ("graph", "name", None, "graph.name is None; expected a string"),
        ("graph", "batch_size", 2.0, "graph.batch_size is 2.0; expected a whole number"),
        ("graph", "batch_size", "2", "graph.batch_size is '2'; expected a whole number"),
        ("graph", "batch_size", 10**30, "graph: batch_size is 10000000"),
        ("graph", "annotations", [], "graph.annotations is []; expected an object"),
        ("graph", "costs.0.forward_s.1", "x", "graph.costs[0].forward_s[1] is 'x'; expected a nu"),
        ("graph", "costs.0.forward_s.1", True, "graph.costs[0].forward_s[1] is True; expected a "),
        ("graph", "costs.0.forward_s.1", [1], "graph.costs[0].forward_s[1] is [1]; expected a nu"),
        ("graph", "costs.0.forward_s.1", None, "graph.costs[0]: forward_s of row 1 is nan; expec"),
        ("graph", "costs.0.forward_s.1", "inf", "graph.costs[0]: forward_s of row 1 is inf; expe"),
        ("graph", "costs.0.forward_s.1", 1e308, "graph.costs[0]: forward_s of row 1 is 1e+308; e"),
        ("graph", "costs.0.forward_s.1", 10**310, "graph.costs[0].forward_s holds a number beyon"),
        ("graph", "costs.0.origin", "guess", "graph.costs[0].origin is 'guess'; expected one of "),
        ("graph", "edges.reader.1", 0, "graph: the graph has a cycle: 'op0' -> 'op0'; expected a"),
        ("graph", "parameters.dtypes.0", "x", "graph.parameters: parameter dtypes ['x'] are not "),
        ("cluster", "devices.0.speed", "fast", "cluster.devices[0].speed is 'fast'; expected a n"),
        ("cluster", "devices.0.speed", True, "cluster.devices[0].speed is True; expected a number"),
        ("cluster", "devices.0.speed", 10**310, "cluster.devices[0].speed is 1000"),
        ("cluster", "devices.0.speed", None, "cluster.devices[0]: device 'd0': speed is nan; exp"),
        ("cluster", "devices.0.kind", "tpu", "cluster.devices[0].kind is 'tpu'; expected one of "),
        ("cluster", "devices.0.peak_flop_per_s", [1], "cluster.devices[0].peak_flop_per_s is [1]"),
        (
            "cluster",
            "devices.0.peak_flop_per_s",
            {"int8": "1"},
            "cluster.devices[0].peak_flop_per_s.int8 is '1'; expected a number",
        ),
        ("cluster", "levels.0.port_per_device", 0, "cluster.levels[0].port_per_device is 0; expe"),
        ("cluster", "matrix", [], "cluster.matrix is []; expected an object"),
        ("objective", "microbatches", 0.5, "objective.microbatches is 0.5; expected a whole numb"),
        ("objective", "microbatches", 0, "objective: microbatches is 0; expected 1 to 1000000"),
        ("problem", "graph.loss", 99, "problem.graph: loss is tensor 99; there are"),
        ("solution", "plan.fingerprint", "x", "solution: the plan is for a graph with fingerpr"),
        ("solution", "proof", "sure", "solution.proof is 'sure'; expected one of optimal, feas"),
        ("program", "kind.0", 99, "program: kind of row 0 is 99; expected 0 to 13"),
        ("program", "ptr.0", 1, "program: ptr of the program does not cover its "),
        ("timeline", "limit_bytes", [1.0], "timeline: limit_bytes has 1 values for 2 devices"),
        ("timeline", "origin", "dreamt", "timeline.origin is 'dreamt'; expected one of simulated"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(name, path, value, words):
    assert refusal(changed(f"partita.{name}", path, value)).startswith(words)


def test_keys_with_a_default_may_be_left_out():
    document = encode(small_solution().plan)
    for key in ("schedule", "microbatch_sizes", "recompute"):
        del document[key]
    assert decode(document).microbatch_sizes.tolist() == [1]
    assert decode({"format": "partita.objective", "version": 1}) == Objective()


def test_a_wrong_row_is_named_also_behind_unlimited_ones():
    document = changed("partita.graph", "costs.0.forward_s", ["inf", 1.0, "x", 2.0])
    assert refusal(document).startswith("graph.costs[0].forward_s[2] is 'x'; expected a number")


def test_long_values_are_shortened_in_messages():
    message = refusal(changed("partita.plan", "schedule", "x" * 10_000))
    assert len(message) < 250
    assert "xxx..." in message


def test_keys_that_are_no_strings_are_refused_too():
    assert refusal(encode(Objective()) | {1: 2, "a": 3}).startswith("objective: unknown key 1")


def row_column(**column: object) -> dict[str, Any]:
    return changed("partita.graph", "costs.0.backward_s", column)


def test_a_short_column_unfolds():
    graph = decode(row_column(every=3, rows=4))
    assert graph.backward_s.tolist() == [3.0] * 4
    assert graph.backward_s.dtype == np.float64


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ({"every": 1.0, "rows": 3}, "graph.costs[0]: backward_s has 3 values for 4 rows"),
        ({"every": 1.0, "rows": 0}, "graph.costs[0]: backward_s has 0 values for 4 rows"),
        ({"every": 1.0, "rows": -1}, "graph.costs[0].backward_s.rows is -1; expected 0 to 67108"),
        ({"every": 1.0, "rows": 1.5}, "graph.costs[0].backward_s.rows is 1.5; expected a whole "),
        ({"every": 1.0, "rows": True}, "graph.costs[0].backward_s.rows is True; expected a whol"),
        ({"every": 1.0, "rows": None}, "graph.costs[0].backward_s.rows is None; expected a whol"),
        ({"every": "x", "rows": 4}, "graph.costs[0].backward_s.every[0] is 'x'; expected a numb"),
        ({"every": [1.0], "rows": 4}, "graph.costs[0].backward_s.every[0] is [1.0]; expected a "),
        ({"every": "inf", "rows": 4}, "graph.costs[0]: backward_s of row 0 is inf; expected 0 to"),
        ({"every": 1.0}, "graph.costs[0].backward_s is {'every': 1.0}; expected a list, or an ob"),
        ({"every": 1.0, "rows": 4, "x": 1}, "graph.costs[0].backward_s is {'every': 1.0, 'rows'"),
        ({}, "graph.costs[0].backward_s is {}; expected a list, or an object with"),
    ],
)
def test_short_columns_that_cannot_be_are_refused(column, words):
    assert refusal(row_column(**column)).startswith(words)


@pytest.mark.parametrize("rows", [10**12, 2**31, MAX_UNFOLDED_ROWS + 1, 10**40])
def test_a_short_column_of_a_malicious_size_is_refused_at_once(rows):
    document = row_column(every=1.0, rows=rows)
    tracemalloc.start()
    begin = time.process_time()
    message = refusal(document)
    seconds = time.process_time() - begin
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message.startswith("graph.costs[0].backward_s.rows is ")
    assert "(a document unfolds to 67108864)" in message
    assert seconds < 1
    assert peak < 10e6


def test_many_short_columns_do_not_unfold_to_more_than_one_may(monkeypatch):
    monkeypatch.setattr("partita.core.codec.MAX_UNFOLDED_ROWS", 100)
    costs = [
        {"device_type": str(index), "forward_s": {"every": 1.0, "rows": 30}} for index in range(4)
    ]
    message = refusal(changed("partita.graph", "costs", costs))
    assert message.startswith("graph.costs[3].forward_s.rows is 30; expected 0 to 10 (a document")


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ({"distinct": [{"devices": [[0]]}], "of": [0, 1]}, "plan.stages.of is 'an index out of "),
        ({"distinct": [{"devices": [[0]]}], "of": [0, -1]}, "plan.stages.of is 'an index out of"),
        ({"distinct": [], "of": [0]}, "plan.stages.of is 'an index out of range'; expected 0 to"),
        ({"distinct": [{"devices": [[0]]}], "of": [0.0]}, "plan.stages.of[0] is 0.0; expected a"),
        (
            {"distinct": [{"devices": [[0]]}], "of": {"every": 0, "rows": 10**9}},
            "plan.stages.of is {'every': 0, 'rows': 1000000000}; expected a list",
        ),
        ({"distinct": {}, "of": []}, "plan.stages.distinct is {}; expected a list"),
        ({"distinct": [{"devices": [[]]}], "of": [0]}, "plan.stages.distinct[0]: a stage needs"),
        ({"distinct": []}, "plan.stages is {'distinct': []}; expected a list"),
        ({"distinct": [], "of": []}, "plan: a plan needs at least one stage and one microbatch"),
    ],
)
def test_shared_parts_that_cannot_be_are_refused(stages, words):
    assert refusal(changed("partita.plan", "stages", stages)).startswith(words)


def test_shared_parts_may_not_be_shared_again():
    inner: Any = [{"devices": [[0]]}]
    for _ in range(200):
        inner = {"distinct": inner, "of": [0]}
    assert refusal(changed("partita.plan", "stages", inner)).startswith("plan.stages.distinct is {")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: not valid JSON: "),
        ("{", "line 1: not valid JSON: "),
        ('{"a": 1,\n "b": }', "line 2: not valid JSON: "),
        ("garbage", "line 1: not valid JSON: "),
        ("\x00\x01", "line 1: not valid JSON: "),
        ("[1, NaN]", "NaN is not a JSON number; expected a finite one"),
        ("[Infinity]", "Infinity is not a JSON number; expected a finite one"),
        ("[-Infinity]", "-Infinity is not a JSON number; expected a finite one"),
        ('{"a": 1, "b": 2, "a": 3}', "key 'a' stands twice in one object"),
        ('{"x": {"a": 1, "a": 1}}', "key 'a' stands twice in one object"),
        ("[" * 100_000 + "]" * 100_000, "not valid JSON: nested too deeply"),
        ('{"a":' * 100_000, "not valid JSON: nested too deeply"),
        ("1" * 5000, "not valid JSON: a number has too many digits"),
        ('"\\ud800', "line 1: not valid JSON: "),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_texts_that_are_no_json_are_refused(text, words):
    with pytest.raises(FormatError) as caught:
        parse_json(text)
    assert str(caught.value).startswith(words)


def test_a_byte_order_mark_and_other_line_ends_do_no_harm():
    text = write_json(chain(3))
    assert read_json("\ufeff" + text) == chain(3)
    assert read_json(text.replace("\n", "\r\n")) == chain(3)


@pytest.mark.parametrize("digits", ["1e400", "-1e400", "1" * 400 + ".0"], ids=range(3))
def test_a_number_beyond_the_range_of_doubles_is_not_taken_for_unlimited(digits):
    text = write_json(Cluster(devices=(Device(name="d", memory_bytes=7.0),)))
    with pytest.raises(FormatError, match="numbers; expected"):
        read_json(text.replace('"memory_bytes":7.0', f'"memory_bytes":{digits}'))


@pytest.mark.parametrize("name", ["partita.objective", "partita.plan", "partita.cluster"])
def test_a_text_cut_at_any_place_is_refused_and_nothing_else_happens(name):
    text = write_json(every_type()[name])
    end = len(text.rstrip())
    for place in range(end):
        with pytest.raises(FormatError):
            read_json(text[:place])
    assert read_json(text[:end]) == every_type()[name]


def test_a_text_with_any_character_gone_wrong_is_read_or_refused():
    text = write_json(Objective(microbatches=12))
    for place in range(len(text)):
        for wrong in ('"', "{", "]", "9", "-", "\\", "\x00", ""):
            try:
                read_json(text[:place] + wrong + text[place + 1 :])
            except FormatError:
                continue


def test_remarks_nested_too_deeply_are_refused():
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    message = refusal(changed("partita.graph", "annotations", {"x": deep}))
    assert message == "graph: annotations are nested more than 100 deep"


def test_a_program_keeps_the_versions_of_its_weights():
    program = every_type()["partita.program"]
    assert isinstance(program, Program)
    program = dataclasses.replace(program, version=np.arange(len(program)))
    assert decode(encode(program)).version.tolist() == list(range(len(program)))


def test_a_fleets_document_of_version_1_has_other_units() -> None:
    document = {
        "format": "partita.sensitivity",
        "version": 1,
        "name": "x",
        "iteration_s": 1.0,
        "cpus": [1.0, 2.0],
        "memory_gb": [1.5, 4],
        "speed": {"every": 1.0, "rows": 2},
        "working_gb": 2,
        "storage_mb_per_s": {"every": 3, "rows": 2},
        "memory_cpus": [1.0],
        "memory_gib_per_s": [2.0],
    }
    found = decode(document)
    assert found.memory_bytes.tolist() == [1.5e9, 4e9]
    assert found.working_bytes == 2e9
    assert found.storage_bytes_per_s.tolist() == [3e6, 3e6]
    assert found.memory_bytes_per_s.tolist() == [2.0 * 2**30]
    assert decode(encode(found)) == found
    with pytest.raises(FormatError, match="unknown key 'memory_gb'"):
        decode({**document, "version": 2})
    with pytest.raises(FormatError, match=r"memory_bytes\[0\] is 'much'; expected a number"):
        decode({**document, "memory_gb": ["much", 1.0]})


def _many_devices(count: int) -> Cluster:
    kinds = (
        {"type": "a", "clocks_mhz": (1.0, 2.0), "peak_flop_per_s": {"float32": 1.0}},
        {"type": "b", "price_per_hour": 2.0},
    )
    devices = tuple(
        Device(name=f"d{row}", host=0, memory_bytes=5.0, **kinds[row % 2]) for row in range(count)
    )
    return dataclasses.replace(flat_cluster(count), devices=devices)


def test_devices_of_large_clusters_are_said_once_and_their_names_apart():
    cluster = _many_devices(2000)
    document = encode(cluster)["devices"]
    assert list(document) == ["distinct", "of", "each"]
    assert [part["type"] for part in document["distinct"]] == ["a", "b"]
    assert list(document["each"]) == ["name"]  # all are of one host
    again = read_json(write_json(cluster))
    assert again.devices == cluster.devices
    assert encode(again) == encode(cluster)
    assert isinstance(encode(_many_devices(900))["devices"], list)  # as documents always were


def test_devices_that_all_differ_stay_a_list():
    cluster = _many_devices(1200)
    each = tuple(
        dataclasses.replace(device, speed=1.0 + row) for row, device in enumerate(cluster.devices)
    )
    cluster = dataclasses.replace(cluster, devices=each)
    assert isinstance(encode(cluster)["devices"], list)
    assert read_json(write_json(cluster)).devices == each


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"each": {"name": ["x"]}}, r"devices\.each\.name is .*a list of 1200 values"),
        ({"each": {"size": ["x"] * 1200}}, r"devices\.each is .*an object with keys of name"),
        ({"each": {"dvfs": [1] * 1200}}, r"devices\.each\.dvfs is .*names or numbers"),
        ({"each": {"name": [7] * 1200}}, r"devices\.each\.name\[0\] is 7; expected a string"),
        ({"each": {"speed": [1] + [-1] * 1199}}, r"devices\[1\]: device .*speed is -1"),
        ({"each": 5}, r"devices\.each is 5"),
        ({"distinct": [5, 6]}, r"devices\.distinct\[0\] is 5; expected an object"),
        ({"of": [2] * 1200}, r"devices\.of is .*0 to 1"),
    ],
)
def test_broken_parts_that_are_alike_are_refused_by_place(change, message):
    document = encode(_many_devices(1200))
    kinds = [{"name": "x", **part} for part in document["devices"]["distinct"]]
    document["devices"] = {**document["devices"], "distinct": kinds, **change}
    with pytest.raises(FormatError, match=message):
        decode(document)
