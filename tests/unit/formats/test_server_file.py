import dataclasses

import numpy as np
import pytest

from partita.catalogue.examples import example
from partita.core.problem import Metric
from partita.errors import FormatError, InvalidInputError
from partita.formats.server_file import (
    open_beside,
    read_server_file,
    server_profiles,
    write_server_file,
)


def node(name, desc="Linear", forward=1.0, act=8.0, param=4.0):
    return (
        f"{name} -- {desc} -- forward_compute_time={forward:.3f}, backward_compute_time=0.000, "
        f"activation_size={act}, parameter_size={param:.3f}"
    )


EDGES = ["\ti -- a", "\ta -- b", "\ti -- b"]
FAST = "\n".join([node("i", "Input", 0.5, 2.0, 0), node("a"), node("b", forward=2.0), *EDGES])
SLOW = "\n".join(
    [
        node("b", "Linear(bias)", 4.0, 9.0),
        node("i", "Input", 0.25, 2.0, 0),
        node("a", forward=3.0, param=0),
        "\ta -- b",
        "\ti -- b",
        "\ti -- a",
    ]
)
FILES = {"fast.txt": FAST, "slow.txt": SLOW}
TWO = "Server0\n    Fast 1 fast.txt\n    Slow 3 slow.txt\nServer1\n    Slow 2 slow.txt\n"


def opened(path, files=FILES):
    if path not in files:
        raise FileNotFoundError(2, "No such file or directory", path)
    return files[path]


def test_servers_are_hosts_and_gpus_devices_with_types():
    cluster = read_server_file(TWO, opened).cluster
    assert [host.name for host in cluster.hosts] == ["Server0", "Server1"]
    assert cluster.device_names == (
        *("Server0/gpu0", "Server0/gpu1", "Server0/gpu2", "Server0/gpu3"),
        *("Server1/gpu0", "Server1/gpu1"),
    )
    assert [d.type for d in cluster.devices] == ["Fast", "Slow", "Slow", "Slow", "Slow", "Slow"]
    assert [d.host for d in cluster.devices] == [0, 0, 0, 0, 1, 1]
    assert {d.memory_bytes for d in cluster.devices} == {float("inf")}


def test_bandwidths_are_the_released_default_unless_given():
    cluster = read_server_file(TWO, opened).cluster
    assert [level.name for level in cluster.levels] == ["host", "rack"]
    assert [level.bandwidth_bytes_per_s.tolist() for level in cluster.levels] == [[1e8, 1e8], [1e8]]
    given = read_server_file(TWO, opened, intra_bytes_per_s=1e10, inter_bytes_per_s=1e9)
    rates = [level.bandwidth_bytes_per_s.tolist() for level in given.cluster.levels]
    assert rates == [[1e10, 1e10], [1e9]]


def test_one_server_has_one_level():
    problem = read_server_file("Server0\nFast 2 fast.txt", opened)
    assert [level.name for level in problem.cluster.levels] == ["host"]
    assert problem.objective.metric is Metric.PIPEDREAM


def test_profiles_are_aligned_by_name():
    graph = read_server_file(TWO, opened).graph
    assert [costs.device_type for costs in graph.costs] == ["Fast", "Slow"]
    assert graph.costs[0].forward_s.tolist() == [0.001, 0.002]
    assert graph.costs[1].forward_s.tolist() == [0.003, 0.004]
    assert graph.tensors.bytes.tolist() == [2.0, 8.0, 8.0]


def test_what_the_profiles_say_otherwise_is_kept():
    notes = read_server_file(TWO, opened).graph.annotations["server_file"]
    assert notes["paths"] == {"Fast": "fast.txt", "Slow": "slow.txt"}
    slow = notes["profiles"]["Slow"]
    assert slow["tensor_bytes"] == (2.0, 8.0, 9.0)
    assert slow["parameter_bytes"] == (0.0, 4.0)
    assert slow["load_s"] == (0.00025, 0.0, 0.0)


def test_files_come_back_byte_for_byte():
    problem = read_server_file(TWO, opened)
    profiles = server_profiles(problem)
    assert write_server_file(problem) == TWO
    assert profiles["fast.txt"] == FAST
    again = read_server_file(TWO, profiles.__getitem__)
    assert again == problem
    assert server_profiles(again) == profiles


def test_empty_servers_blank_lines_and_indents_do_not_matter():
    text = "\ufeffServer7\r\n\r\nServer0\r\nFast 1 fast.txt\r\n\t Slow 1 slow.txt\r\nServerX"
    cluster = read_server_file(text, opened).cluster
    assert [host.name for host in cluster.hosts] == ["Server0"]
    assert len(cluster) == 2


def test_a_type_twice_in_a_server_counts_twice():
    text = "Server0\nFast 1 fast.txt\nSlow 1 slow.txt\nFast 2 fast.txt"
    problem = read_server_file(text, opened)
    assert [device.type for device in problem.cluster.devices] == ["Fast", "Slow", "Fast", "Fast"]
    assert read_server_file(write_server_file(problem), opened) == problem


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 0, ["no GPU"]),
        ("Server0", 0, ["no GPU"]),
        ("Fast 1 fast.txt", 1, ["'Fast'", "before the first"]),
        ("Server0\nFast 1", 2, ["'Fast 1'", "expected"]),
        ("Server0\nFast one fast.txt", 2, ["'one'", "1, 2"]),
        ("Server0\nFast 0 fast.txt", 2, ["'0'"]),
        ("Server0\nFast -1 fast.txt", 2, ["'-1'"]),
        ("Server0\nFast 99999999999 fast.txt", 2, ["count"]),
        ("Server0\nFast 65536 fast.txt\nSlow 1 slow.txt", 0, ["more than 65536"]),
        ("Server0\nFast 1 fast.txt\nServer0\nFast 1 fast.txt", 3, ["Server0", "new word"]),
        ("Server 0\nFast 1 fast.txt", 1, ["'Server 0'"]),
        ("Server0\nFast 1 no.txt", 2, ["'no.txt'", "no such file"]),
        (
            "Server0\nFast 1 fast.txt\nFast 1 slow.txt",
            3,
            ["'slow.txt'", "'fast.txt'", "one profile"],
        ),
        ("Server0\nFast 1 fa\0st.txt", 2, ["NUL"]),
    ],
)
def test_errors_have_line_value_and_what_would_do(text, line, words):
    with pytest.raises(FormatError) as caught:
        read_server_file(text, opened)
    assert caught.value.line == line
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda text: text.replace("a -- ", "c -- ").replace("-- a", "-- c"),
            ["'a'", "'fast.txt'", "'other.txt'"],
        ),
        (lambda text: f"{node('z')}\n{text}", ["'z'", "'other.txt'"]),
        (lambda text: text.replace("\ti -- b\n\ti -- a", "\ti -- a"), ["'b'", "'a', 'i'", "'a'"]),
        (lambda text: text.replace("\ta -- b\n\ti -- b", "\ti -- b\n\ta -- b"), ["'i', 'a'"]),
        (lambda text: text.replace("Input", "Stem"), ["'i'"]),
    ],
)
def test_profiles_of_different_graphs_are_refused_with_the_first_difference(change, words):
    files = {"fast.txt": FAST, "other.txt": change(SLOW)}
    text = "Server0\nFast 1 fast.txt\nSlow 1 other.txt"
    with pytest.raises(FormatError) as caught:
        read_server_file(text, lambda path: opened(path, files))
    for word in words:
        assert word in str(caught.value)


def test_an_error_in_a_profile_has_its_path_and_line():
    files = {"fast.txt": FAST.replace("activation_size=8.0", "activation_size=x")}
    with pytest.raises(FormatError) as caught:
        read_server_file("Server0\nFast 1 fast.txt", lambda path: opened(path, files))
    assert (caught.value.path, caught.value.line) == ("fast.txt", 2)


def test_paths_are_looked_for_beside_the_file_first():
    files = {"data/a.txt": "beside", "a.txt": "here", "b.txt": "here"}
    opener = open_beside("data/servers.txt", lambda path: opened(path, files))
    assert opener("a.txt") == "beside"
    assert opener("b.txt") == "here"
    with pytest.raises(FileNotFoundError):
        opener("c.txt")


def test_a_problem_from_elsewhere_gets_words_for_names():
    problem = example("gpt-small")
    text = write_server_file(problem)
    assert text == "Server-host0\n    a100 4 a100/graph.txt\n"
    again = read_server_file(text, server_profiles(problem).__getitem__)
    assert write_server_file(again) == text


def test_a_type_without_times_is_refused():
    problem = example("six-node-chain")
    short = dataclasses.replace(problem.graph, costs=problem.graph.costs[:1])
    with pytest.raises(InvalidInputError, match="'TitanXP'"):
        server_profiles(dataclasses.replace(problem, graph=short))


def test_profiles_follow_changed_times():
    problem = read_server_file(TWO, opened)
    slow = dataclasses.replace(problem.graph.costs[1], forward_s=np.array([0.5, 0.25]))
    graph = dataclasses.replace(problem.graph, costs=(problem.graph.costs[0], slow))
    written = server_profiles(dataclasses.replace(problem, graph=graph))["slow.txt"]
    assert "forward_compute_time=500.000" in written
    assert "activation_size=9.0" in written
