import gzip
import json

import numpy as np
import pytest

from partita.catalogue.examples import example
from partita.core.cluster import Cluster
from partita.core.graph import Graph
from partita.core.placement import placement_plan
from partita.core.plan import Plan
from partita.core.problem import Metric, Problem
from partita.core.solution import Solution
from partita.errors import FormatError, InvalidInputError
from partita.formats import detect
from partita.formats.detect import FORMATS, detect_format, format_for, read_any, write_as

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


def test_yaml_is_left_to_the_caller():
    cluster = example("baechi-fig1").cluster
    seen = []
    data = b"# a cluster\n---\nname: x\n"
    assert read_any(data, read_yaml=lambda text: seen.append(text) or cluster) is cluster
    assert seen == [data.decode()]
    profile = PROFILE.replace("a --", "a: --", 1).encode()
    assert isinstance(read_any(profile, read_yaml=lambda _: cluster), Graph)


def test_own_documents_are_read():
    problem = example("baechi-fig3")
    assert read_any(write_as(problem, "partita").encode()) == problem


def test_what_a_format_cannot_hold_is_refused():
    cluster = example("baechi-fig1").cluster
    for name in FORMATS:
        if name not in ("partita", "dynamicml-speed"):
            with pytest.raises(InvalidInputError, match="this format holds"):
                write_as(cluster, name)
    with pytest.raises(InvalidInputError, match="'x' is not one of partita"):
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
