"""Every row of the table of formats against the same rules.

Rows that hold graphs, plans and clusters write the built-in problems, the others documents that
hold what they do; what cannot be written has a sample here. What a format cannot hold it refuses
with an ``InvalidInputError``; what it writes it reads again, and writes again byte for byte. What
cannot be read without more says so in one line.
"""

import gzip
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.examples import EXAMPLES, example
from partita.catalogue.inventory import Completion
from partita.core.placement import is_pipeline, placement_plan
from partita.core.plan import Plan, equal_microbatches, pipeline_stages
from partita.core.problem import Problem, Schedule
from partita.core.solution import Solution
from partita.documents import formats, load
from partita.errors import FormatError, InvalidInputError, PartitaError
from partita.formats.detect import detect, format_for, read_any, write_as
from partita.formats.format import Format, Holds, Source
from partita.formats.server_file import server_profiles
from partita.formats.synergy import read_synergy_profile, write_synergy_profile

SAMPLES = Path(__file__).parent.parent / "golden" / "documents_v1" / "documents"
TEXT_FORMATS = [name for name, row in formats().items() if not row.is_binary]
NEEDS_PROBLEM = [name for name, row in formats().items() if row.holds is Holds.PLAN]
NEEDS_MORE = {
    "perseus-frontier": "energy compare",
    "synergy-trace": "fleet trace",
    "synergy-models": "--profiles",
    "philly": "fleet trace",
    "submissions": "fleet trace",
}
"""Rows that are recognised and not read as they stand, and what the message names instead."""
LISTED = {
    "nvidia-smi": ("a100-nvswitch.txt", ""),
    "nccl-topology": ("h100-nvswitch.xml", "h100"),
    "slurm": ("show-node.txt", ""),
    "kubernetes": ("h100-leaves.json", ""),
    "hostfile": ("deepspeed.txt", "a100"),
}
"""Rows of lists of hosts, a file of each, and the type of GPUs that it does not name."""
READERS = Path(__file__).parent.parent / "golden" / "readers"
ONLY_READ = {
    **{name: (READERS / name / file).read_text() for name, (file, _) in LISTED.items()},
    "synergy-models": '{"cpu_axis_per_gpu": [1], "mem_axis_gb_per_gpu": [1], "sets": {}}\n',
    "philly": '[{"attempts": [], "submitted_time": "2017-10-03 07:29:14"}]\n',
    "submissions": "timestamp,duration,gpus\n1,5,2\n",
}
"""Rows that are not written, and a file of each."""
GIVEN = {
    **ONLY_READ,
    "synergy-profile": write_synergy_profile(
        read_synergy_profile(
            '[{"2": 0.5}, {"2": {"0": 40.0, "100": 20.0}}, {"2": {"0": 100.0, "100": 0.0}}]',
            name="job",
        )
    ),
}
"""Rows whose files are not written from documents."""
DOCUMENTS = {
    Holds.ENERGY_PROFILE: "energy-profile-modelled.json",
    Holds.FRONTIER: "frontier-whole.json",
    Holds.TRACE: "trace-drawn.json",
}
"""What rows that hold no graph, plan or cluster are given to write."""
READ = [name for name in formats() if name not in NEEDS_MORE]


def solved(problem, plan):
    metric = problem.objective.metric
    return Solution(problem=problem, plan=plan, metric=metric, value=1.0, unit="s")


def solutions(name):
    """Return a placement and, where the parts allow it, a pipeline of a built-in problem."""
    problem = example(name)
    count, size = len(problem.cluster), len(problem.graph)
    position = np.empty(size, dtype=int)
    position[problem.graph.topological_order] = np.arange(size)
    part_of = position * count // size
    names = problem.cluster.device_names
    yield solved(problem, placement_plan(problem.graph, names, part_of))
    if is_pipeline(problem.graph, part_of):
        plan = Plan(
            fingerprint=problem.graph.fingerprint,
            devices=names,
            stage_of=part_of,
            stages=pipeline_stages([[index] for index in range(count)]),
            schedule=Schedule.GPIPE,
            microbatch_sizes=equal_microbatches(1, problem.graph.batch_size),
        )
        yield solved(problem, plan)


SOLUTIONS = {name: tuple(solutions(name)) for name in EXAMPLES}


def as_bytes(written):
    return written if isinstance(written, bytes) else written.encode()


def read_back(data, name, solution):
    """Return what was written as something that can be written again."""
    files = server_profiles(solution.problem) if name == "server-file" else {}

    def open_text(path):
        if path not in files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return files[path]

    problem = solution.problem if name in NEEDS_PROBLEM else None
    found = read_any(
        data,
        open_text=open_text,
        problem=problem,
        completion=Completion(catalogue=load_catalogue(), given=LISTED.get(name, ("", ""))[1]),
        formats=formats(),
    )
    return solved(solution.problem, found) if isinstance(found, Plan) else found


def written_files(name):
    """Return a format's files of all that it can hold, each with the solution that it is of."""
    any_solution = SOLUTIONS["chain201"][0]
    if name in GIVEN:
        return [(GIVEN[name].encode(), any_solution)]
    if formats()[name].holds in DOCUMENTS:
        value = load(SAMPLES / DOCUMENTS[formats()[name].holds])
        return [(as_bytes(write_as(value, name)), any_solution)]
    found = []
    for solution in (one for both in SOLUTIONS.values() for one in both):
        if name == "pipedream-plan" and len(solution.plan) > len(solution.problem.cluster):
            continue
        try:
            found.append((as_bytes(write_as(solution, name, formats())), solution))
        except InvalidInputError:
            continue
    return found


FILES = {name: written_files(name) for name in formats()}


@pytest.mark.parametrize("name", formats())
def test_every_format_has_a_file(name):
    assert FILES[name]


@pytest.mark.parametrize("name", formats())
def test_content_tells_the_format(name):
    for data, _ in FILES[name]:
        assert detect(Source(data=data), formats())[0] == name


@pytest.mark.parametrize("name", [name for name in READ if name not in ONLY_READ])
def test_what_we_wrote_comes_back_byte_for_byte(name):
    for data, solution in FILES[name]:
        again = read_back(data, name, solution)
        assert as_bytes(write_as(again, name, formats())) == data


@pytest.mark.parametrize("name", READ)
def test_reading_twice_gives_equal_objects(name):
    data, solution = FILES[name][0]
    assert read_back(data, name, solution) == read_back(data, name, solution)


@pytest.mark.parametrize("name", [name for name in TEXT_FORMATS if name in READ])
def test_byte_order_mark_and_line_ends_do_not_matter(name):
    data, solution = FILES[name][0]
    plain = read_back(data, name, solution)
    for other in (
        b"\xef\xbb\xbf" + data,
        data.replace(b"\n", b"\r\n"),
        data.rstrip(b"\n"),
        data + b"\n\n",
    ):
        assert read_back(other, name, solution) == plain


@pytest.mark.parametrize("name", READ)
def test_packed_files_are_read(name):
    data, solution = FILES[name][0]
    assert read_back(gzip.compress(data), name, solution) == read_back(data, name, solution)


@pytest.mark.parametrize("name", formats())
def test_a_truncated_file_is_refused_or_read_but_never_breaks(name):
    data, solution = min(FILES[name], key=lambda file: len(file[0]))
    for size in sorted({len(data) * part // 64 for part in range(64)}):
        with suppress(PartitaError):
            read_back(data[:size], name, solution)


@pytest.mark.parametrize("name", READ)
def test_the_structure_survives(name):
    for data, solution in FILES[name]:
        found = read_back(data, name, solution)
        graph = getattr(found, "graph", found if not isinstance(found, Problem) else None)
        if not hasattr(graph, "edge_source"):
            continue
        before = solution.problem.graph
        inner = before.edge_source >= 0
        pairs = list(zip(before.edge_source[inner], before.edges.reader[inner], strict=True))
        kept = graph.edge_source >= 0
        assert len(graph) == len(before)
        assert list(zip(graph.edge_source[kept], graph.edges.reader[kept], strict=True)) == pairs


@pytest.mark.parametrize("name", NEEDS_MORE)
def test_what_needs_more_says_who_reads_it(name):
    for data, _ in FILES[name]:
        with pytest.raises(FormatError, match=NEEDS_MORE[name]):
            read_any(data, formats=formats())


@pytest.mark.parametrize("name", ONLY_READ)
def test_what_cannot_be_written_says_so(name):
    with pytest.raises(InvalidInputError, match="read only"):
        write_as(example("chain201"), name)


@pytest.mark.parametrize("name", [name for name, row in formats().items() if row.endings])
def test_an_ending_stands_for_its_format(name):
    row = formats()[name]
    kinds = row.writes_by_ending
    value = SOLUTIONS["chain201"][0] if Solution in kinds else example("chain201")
    if row.holds in DOCUMENTS:
        value = load(SAMPLES / DOCUMENTS[row.holds])
    assert {format_for(f"out{ending}", value, formats()) for ending in row.endings} == {name}


@pytest.mark.parametrize("name", formats())
def test_every_row_says_what_it_is(name):
    row = formats()[name]
    assert isinstance(row, Format)
    assert row.title
    assert len({other.title for other in formats().values()}) == len(formats())


@pytest.mark.parametrize("name", NEEDS_PROBLEM)
def test_placements_survive(name):
    for data, solution in FILES[name]:
        plan = read_back(data, name, solution).plan
        old = [solution.plan.devices[device] for device in solution.plan.device_of]
        new = [plan.devices[device] for device in plan.device_of]
        if name == "pipedream-plan":
            assert plan.stage_of.tolist() == solution.plan.stage_of.tolist()
        else:
            assert new == old


@pytest.mark.parametrize("name", [n for n in NEEDS_PROBLEM if n != "pipedream-plan"])
def test_a_plan_for_another_graph_is_refused(name):
    data, solution = max(FILES[name], key=lambda file: len(file[0]))
    other = next(p for n in EXAMPLES if len((p := example(n)).graph) < len(solution.problem.graph))
    with pytest.raises(FormatError):
        read_any(data, problem=other)
