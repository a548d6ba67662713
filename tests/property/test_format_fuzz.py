"""Whatever a file holds, reading it ends in a core object or in one of our errors.

Seeds are files that the formats themselves write; they are cut, repeated and overwritten.
"""

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.catalogue.examples import example
from partita.core.placement import placement_plan
from partita.core.plan import Plan
from partita.core.solution import Solution
from partita.documents import load
from partita.errors import InvalidInputError, PartitaError
from partita.formats.detect import FORMATS, Source, read_any, write_as
from partita.formats.format import Holds
from partita.formats.server_file import server_profiles

DETERMINISTIC = settings(derandomize=True, deadline=None, max_examples=150, database=None)
PIECES = (
    *(b"NaN", b"Infinity", b"-1", b"1e308", b"1e400", b"0.1", b"1e-320", b"9" * 30, b"9" * 5000),
    *(b"\0", b"\xff", b"\xef\xbb\xbf", b"\r\n", b"\n", b"\t", b" -- ", b", ", b"=", b"; ", b"#"),
    *(b"{", b"}", b"[", b"]", b"{}", b"[]", b'"', b'"a"', b"\\ud800", b"null", b"true", b":"),
    *(b"0", b"1", b"2", b"7", b"Server", b"stage_id=1", b'"inf"', b'"nodes": ', b"[" * 2000),
)
SOURCES = {
    "server-file": "six-node-chain",
    "dynamicml-speed": "chain201",
    "piper-plan": "baechi-fig1",
    "synergy-cluster": "gpt-small",
}
SAMPLES = Path(__file__).parent.parent / "golden" / "documents_v1" / "documents"
DOCUMENTS = {
    Holds.ENERGY_PROFILE: "energy-profile-modelled.json",
    Holds.FRONTIER: "frontier-whole.json",
    Holds.TRACE: "trace-drawn.json",
}
"""What rows that hold no graph, plan or cluster are given to write."""
READERS = Path(__file__).parent.parent / "golden" / "readers"
LISTED = {
    "nvidia-smi": "a100-nvswitch.txt",
    "nccl-topology": "h100-nvswitch.xml",
    "slurm": "show-node.txt",
    "kubernetes": "h100-leaves.json",
    "hostfile": "deepspeed.txt",
}
"""Lists of hosts, and a file of each."""
GIVEN = {
    **{name: (READERS / name / file).read_bytes() for name, file in LISTED.items()},
    "synergy-models": b'{"cpu_axis_per_gpu": [1], "mem_axis_gb_per_gpu": [1], "sets": {}}\n',
    "synergy-profile": b'[{"2": 0.5}, {"2": {"0": 4.0, "100": 2.0}}, {"2": {"0": 1.0, "100": 0}}]',
    "philly": b'[{"attempts": [], "submitted_time": "2017-10-03 07:29:14"}]\n',
    "submissions": b"timestamp,duration,gpus\n1,5,2\n",
}
"""Files of rows that are not written from documents."""


def solution(name):
    problem = example(name)
    device_of = np.zeros(len(problem.graph), dtype=int)
    plan = placement_plan(problem.graph, problem.cluster.device_names, device_of)
    return Solution(
        problem=problem, plan=plan, metric=problem.objective.metric, value=1.0, unit="s"
    )


SOLUTIONS = {name: solution(SOURCES.get(name, "baechi-fig2")) for name in FORMATS}
PROFILES = server_profiles(SOLUTIONS["server-file"].problem)


def seed_of(name):
    if name in GIVEN:
        return GIVEN[name]
    file = DOCUMENTS.get(FORMATS[name].holds)
    written = write_as(load(SAMPLES / file) if file else SOLUTIONS[name], name)
    return written if isinstance(written, bytes) else written.encode()


SEEDS = {name: seed_of(name) for name in FORMATS}


def open_text(path):
    if path not in PROFILES:
        raise FileNotFoundError(2, "No such file or directory", path)
    return PROFILES[path]


@st.composite
def mutated(draw, seed):
    """Draw a file that differs from a good one in one to four places."""
    data = seed
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(data)))
        end = begin + draw(st.integers(0, 1 + min(60, len(data) - begin)))
        action = draw(st.sampled_from(("delete", "repeat", "replace", "replace", "cut")))
        if action == "delete":
            data = data[:begin] + data[end:]
        elif action == "repeat":
            data = data[:end] + data[begin:end] + data[end:]
        elif action == "replace":
            data = data[:begin] + draw(st.sampled_from(PIECES)) + data[end:]
        else:
            data = data[:begin]
    return data


def read_or_refuse(name, data):
    """Return what is read, or ``None`` where it is refused as it should be."""
    try:
        return read_any(data, name=name, open_text=open_text, problem=SOLUTIONS[name].problem)
    except PartitaError:
        return None


@pytest.mark.parametrize("name", FORMATS)
@DETERMINISTIC
@given(data=st.data())
def test_mutated_files_are_read_or_refused(name, data):
    found = read_or_refuse(name, data.draw(mutated(SEEDS[name])))
    if isinstance(found, Plan):
        found.check_fits(SOLUTIONS[name].problem)


@pytest.mark.parametrize("name", FORMATS)
@DETERMINISTIC
@given(data=st.data())
def test_every_reader_refuses_the_files_of_others(name, data):
    other = data.draw(st.sampled_from(sorted(FORMATS)))
    raw = data.draw(st.one_of(st.just(SEEDS[other]), mutated(SEEDS[other])))
    source = Source(
        data=raw,
        name=name,
        open_text=open_text,
        problem=SOLUTIONS[name].problem,
    )
    with suppress(PartitaError):
        FORMATS[name].read(source)


@settings(DETERMINISTIC, max_examples=400)
@given(data=st.binary(max_size=200))
def test_random_bytes_are_read_or_refused(data):
    read_or_refuse("partita", data)


@settings(DETERMINISTIC, max_examples=300)
@given(lines=st.lists(st.sampled_from([*SEEDS["pipedream"].decode().splitlines(), "", "\t", "x"])))
def test_shuffled_lines_are_read_or_refused(lines):
    read_or_refuse("pipedream", "\n".join(lines).encode())


@pytest.mark.parametrize("name", FORMATS)
@settings(DETERMINISTIC, max_examples=60)
@given(data=st.data())
def test_what_is_read_can_be_written_and_then_stays(name, data):
    """Change one digit, so that the file often stays good."""
    seed = SEEDS[name]
    digits = [i for i, byte in enumerate(seed) if byte in b"0123456789"]
    where = data.draw(st.sampled_from(digits))
    digit = data.draw(st.sampled_from(b"0123456789"))
    found = read_or_refuse(name, seed[:where] + bytes([digit]) + seed[where + 1 :])
    if found is None:
        return
    problem = SOLUTIONS[name].problem
    once = written(found, name, problem)
    if once is None:
        return
    opened = server_profiles(found) if name == "server-file" else {}
    again = read_any(once, name=name, open_text=opened.__getitem__, problem=problem)
    assert written(again, name, problem) == once


def written(found, name, problem):
    if isinstance(found, Plan):
        metric = problem.objective.metric
        found = Solution(problem=problem, plan=found, metric=metric, value=1.0, unit="s")
    try:
        text = write_as(found, name)
    except InvalidInputError:
        return None
    return text if isinstance(text, bytes) else text.encode()
