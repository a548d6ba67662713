"""Every format of the table against the same rules, on the built-in problems.

What a format cannot hold it refuses with an ``InvalidInputError``; what it writes it reads again,
and writes again byte for byte.
"""

import gzip
from contextlib import suppress

import numpy as np
import pytest

from partita.catalogue.examples import EXAMPLES, example
from partita.core.placement import is_pipeline, placement_plan
from partita.core.plan import Plan, equal_microbatches, pipeline_stages
from partita.core.problem import Problem, Schedule
from partita.core.solution import Solution
from partita.errors import FormatError, InvalidInputError, PartitaError
from partita.formats.detect import FORMATS, detect_format, read_any, write_as
from partita.formats.server_file import server_profiles

TEXT_FORMATS = [name for name in FORMATS if name != "dynamicml-speed"]
NEEDS_PROBLEM = [name for name in FORMATS if name.endswith("-plan")]


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
    found = read_any(data, open_text=open_text, problem=problem)
    return solved(solution.problem, found) if isinstance(found, Plan) else found


def written_files(name):
    """Return a format's files of all built-in problems that it can hold, with their solutions."""
    found = []
    for solution in (one for both in SOLUTIONS.values() for one in both):
        if name == "pipedream-plan" and len(solution.plan) > len(solution.problem.cluster):
            continue
        try:
            found.append((as_bytes(write_as(solution, name)), solution))
        except InvalidInputError:
            continue
    return found


FILES = {name: written_files(name) for name in FORMATS}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_holds_some_built_in_problem(name):
    assert FILES[name]


@pytest.mark.parametrize("name", FORMATS)
def test_content_tells_the_format(name):
    for data, _ in FILES[name]:
        assert detect_format(data) == name


@pytest.mark.parametrize("name", FORMATS)
def test_what_we_wrote_comes_back_byte_for_byte(name):
    for data, solution in FILES[name]:
        again = read_back(data, name, solution)
        assert as_bytes(write_as(again, name)) == data


@pytest.mark.parametrize("name", FORMATS)
def test_reading_twice_gives_equal_objects(name):
    data, solution = FILES[name][0]
    assert read_back(data, name, solution) == read_back(data, name, solution)


@pytest.mark.parametrize("name", TEXT_FORMATS)
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


@pytest.mark.parametrize("name", FORMATS)
def test_packed_files_are_read(name):
    data, solution = FILES[name][0]
    assert read_back(gzip.compress(data), name, solution) == read_back(data, name, solution)


@pytest.mark.parametrize("name", FORMATS)
def test_a_truncated_file_is_refused_or_read_but_never_breaks(name):
    data, solution = min(FILES[name], key=lambda file: len(file[0]))
    for size in sorted({len(data) * part // 64 for part in range(64)}):
        with suppress(PartitaError):
            read_back(data[:size], name, solution)


@pytest.mark.parametrize("name", FORMATS)
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
