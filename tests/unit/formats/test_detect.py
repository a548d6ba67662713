import dataclasses
import gzip
import json

import numpy as np
import pytest

from partita import plugins
from partita.catalogue.examples import example
from partita.core.cluster import Cluster
from partita.core.graph import Graph
from partita.core.placement import placement_plan
from partita.core.plan import Plan
from partita.core.problem import Metric, Problem
from partita.core.solution import Solution
from partita.errors import FormatError, InvalidInputError, UnsupportedError
from partita.formats import detect
from partita.formats.detect import detect_format, format_for, read_any, write_as
from partita.formats.format import Format, Holds
from partita.formats.table import FORMATS

PROFILE = (
    "a -- Linear -- forward_compute_time=1.000, backward_compute_time=2.000, "
    "activation_size=8.0, parameter_size=0.000"
)
SPLIT = '{"fpgas": [{"nodes": [0, 1, 2, 3]}], "cpus": []}'


def solution(name="baechi-fig2"):
    problem = example(name)
    plan = placement_plan(
        problem.graph, problem.cluster.device_names, np.zeros(len(problem.graph), int)
    )
    return Solution(
        problem=problem, plan=plan, metric=problem.objective.metric, value=1.0, unit="s"
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (PROFILE, "pipedream"),
        (PROFILE + " -- stage_id=3", "pipedream-plan"),
        ("\n\nServer0\n  A 1 a.txt", "server-file"),
        ('{"nodes": [], "edges": [], "maxFPGAs": 1}', "dnn-partitioning"),
        ('{"nodes": [], "edges": [], "mbsInBatch": 1}', "piper"),
        ('{"node_weights": [], "edges": [], "matrix": []}', "dynamicml"),
        ('{"nodes": [], "edges": [], "devices": []}', "baechi"),
        ('{"stages": []}', "piper-plan"),
        (SPLIT, "dnn-partitioning-plan"),
        ('{"placement": []}', "baechi-plan"),
        ('{"parts": []}', "dynamicml-plan"),
        ('{"assignment": {}}', "dynamicml-plan"),
        ('{"format": "partita.plan"}', "partita"),
        ("\x93NUMPY", "dynamicml-speed"),
    ],
)
def test_formats_are_known_by_content(text, name):
    assert detect_format(text.encode("latin-1")) == name
    if name != "dynamicml-speed":
        assert detect_format(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()) == name


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["empty"]),
        (b" \n\t", ["empty"]),
        (b"hello", ["no known format"]),
        (b"\0\0\0", ["no known format"]),
        (b"a\n\xff\xfe", ["line 2", "0xff", "UTF-8"]),
        (b"[1, 2]", ["a list"]),
        (b'{"a": 1}', ["'a'"]),
        (b"{}", ["(none)"]),
        (b"name: x\n", ["YAML"]),
    ],
)
def test_unknown_content_is_one_clear_error_with_the_known_formats(data, words):
    with pytest.raises(FormatError) as caught:
        read_any(data)
    for word in [*words, *(form.title for form in FORMATS.values())]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a": ', ["not valid JSON"]),
        (b'{"a": 1, "a": 2}', ["'a'", "twice"]),
        (b'{"a": NaN}', ["NaN"]),
        (b"[" * 100_000, ["nested too deeply"]),
        (b'{"nodes": ' + b"[" * 600 + b"]" * 600 + b', "edges": [], "maxFPGAs": 1}', ["nodes[0]"]),
        (b'{"a": ' + b"9" * 5000 + b"}", ["not valid JSON"]),
        (b"\x1f\x8b", ["gzip"]),
        (b"\x1f\x8b\x08\x00" + b"x" * 50, ["gzip"]),
        (gzip.compress(PROFILE.encode(), mtime=0)[:-9], ["gzip"]),
        (b'{"format": "partita.plan", "version": 99}', ["newer"]),
        (b'{"format": 3}', ["format is 3"]),
        (b"Server0\n A 1 a.txt", ["'a.txt'", "cannot be opened here"]),
        (b"stage,instruction,frequency,time\n0,forward,9,1\n", ["no column 'energy'"]),
        (b"stage,instruction,power limit,time,energy\n", ["no column 'frequency'"]),
    ],
)
def test_broken_files_are_refused(data, words):
    with pytest.raises(FormatError) as caught:
        read_any(data)
    for word in words:
        assert word in str(caught.value)


def test_packed_files_are_unpacked():
    graph = read_any(gzip.compress(PROFILE.encode()), name="g")
    assert isinstance(graph, Graph)
    assert graph.name == "g"


def test_a_packed_file_may_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(detect, "MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(FormatError, match="more than 1000 bytes"):
        read_any(gzip.compress(b" " * 1001))


@pytest.mark.parametrize(
    "text", [SPLIT, '{"stages": []}', '{"placement": []}', '{"assignment": {}}']
)
def test_a_foreign_plan_needs_its_problem(text):
    with pytest.raises(FormatError, match="give the problem"):
        read_any(text.encode())


def test_a_foreign_plan_is_read_with_its_problem():
    plan = read_any(
        b'{"assignment": {"0": 0, "1": 1, "2": 1, "3": 0}}', problem=example("baechi-fig2")
    )
    assert isinstance(plan, Plan)
    assert plan.device_of.tolist() == [0, 1, 1, 0]


def test_an_assignment_for_dnn_partitioning_names_kinds_of_devices():
    problem = read_any(write_as(example("baechi-fig2"), "dnn-partitioning").encode())
    plan = read_any(b'{"assignment": {"0": 2, "1": 1, "2": 1, "3": "acc1"}}', problem=problem)
    assert plan.device_of.tolist() == [1, 0, 0, 1]


def test_a_stage_file_is_a_graph_alone_and_a_plan_with_its_problem():
    solved = solution()
    text = write_as(solved, "pipedream-plan").encode()
    assert isinstance(read_any(text), Graph)
    assert read_any(text, problem=solved.problem).stage_of.tolist() == [0, 0, 0, 0]


def test_a_row_of_the_caller_is_asked_last():
    cluster = example("baechi-fig1").cluster
    seen = []
    row = Format(
        title="YAML",
        holds=Holds.CLUSTER,
        sniff=detect.looks_like_yaml,
        read=lambda source: seen.append(source.text) or cluster,
        write=lambda _: "",
        is_fallback=True,
    )
    rows = {"yaml": row, **FORMATS}
    data = b"# a cluster\n---\nname: x\n"
    assert read_any(data, formats=rows) is cluster
    assert seen == [data.decode()]
    profile = PROFILE.replace("a --", "a: --", 1).encode()
    assert isinstance(read_any(profile, formats=rows), Graph)


def test_own_documents_are_read():
    problem = example("baechi-fig3")
    assert read_any(write_as(problem, "partita").encode()) == problem


def test_what_a_format_cannot_hold_is_refused():
    cluster = example("baechi-fig1").cluster
    for name, row in FORMATS.items():
        if row.holds in (Holds.GRAPH, Holds.PROBLEM, Holds.PLAN):
            with pytest.raises(InvalidInputError, match="this format holds"):
                write_as(cluster, name)
    with pytest.raises(InvalidInputError, match=r"'x'.*partita"):
        write_as(cluster, "x")
    with pytest.raises(InvalidInputError, match="written from a solution"):
        write_as(example("baechi-fig1"), "piper-plan")


def test_parts_of_a_solution_are_found():
    solved = solution()
    assert isinstance(read_any(write_as(solved, "pipedream").encode()), Graph)
    assert isinstance(read_any(write_as(solved, "baechi").encode()), Problem)
    chain = solution("chain201")
    assert isinstance(read_any(write_as(chain, "dynamicml-speed")), Cluster)
    assert isinstance(read_any(write_as(chain.problem.cluster, "dynamicml-speed")), Cluster)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a.json", "partita"),
        ("g/x.npy", "dynamicml-speed"),
        ("graph.TXT", "pipedream"),
        ("-", "partita"),
    ],
)
def test_the_format_of_an_output_follows_its_ending(path, name):
    assert format_for(path, example("chain201")) == name


def test_a_solution_becomes_a_stage_file():
    assert format_for("gpus=4.txt", solution()) == "pipedream-plan"


def test_the_metric_of_a_problem_survives_its_own_format():
    problem = read_any(write_as(example("baechi-fig1"), "baechi").encode())
    assert problem.objective.metric is Metric.MAKESPAN_PARALLEL
    assert json.loads(write_as(problem, "baechi"))["name"] == "baechi-fig1"


class _Entry:
    """An entry point, as importlib.metadata gives it."""

    def __init__(self, name, load):
        self.name, self.value, self.load = name, f"elsewhere:{name}", load


def _lines_format(**changes):
    row = Format(
        title="a list of ops",
        holds=Holds.GRAPH,
        sniff=lambda source: source.first_line == "OPS",
        read=lambda _: example("baechi-fig1").graph,
        write=lambda _: "OPS\n",
    )
    return dataclasses.replace(row, **changes)


def _install(monkeypatch, *entries):
    monkeypatch.setattr(plugins, "installed", lambda _: {entry.name: entry for entry in entries})


def test_a_plug_in_reads_and_writes_its_format(monkeypatch):
    _install(monkeypatch, _Entry("lines", _lines_format))
    assert detect_format(b"OPS\na\n") == "lines"
    assert read_any(b"OPS\na\n") == example("baechi-fig1").graph
    assert write_as(example("baechi-fig1"), "lines") == "OPS\n"


def test_broken_plug_ins_are_a_warning_each_and_nothing_else(monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("oh")

    _install(
        monkeypatch,
        _Entry("absent", fails),
        _Entry("other", lambda: 3),
        _Entry("sniffs", lambda: _lines_format(sniff=fails)),
        _Entry("lines", _lines_format),
    )
    assert detect_format(b"OPS\n") == "lines"
    assert detect_format(PROFILE.encode()) == "pipedream"
    assert [record.getMessage().split(" is a plug-in")[0] for record in caplog.records] == [
        "format 'absent'",
        "format 'other'",
        "format 'sniffs'",
    ]
    with pytest.raises(UnsupportedError, match="'absent' is a plug-in"):
        write_as(example("baechi-fig1"), "absent")


def test_a_failing_reader_of_a_plug_in_is_one_line_that_names_it(monkeypatch):
    _install(monkeypatch, _Entry("lines", lambda: _lines_format(read=lambda _: 1 / 0)))
    with pytest.raises(UnsupportedError, match="'lines' is a plug-in and failed: ZeroDivision"):
        read_any(b"OPS\n")
