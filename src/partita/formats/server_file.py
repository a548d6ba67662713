"""SparsePipedream's ``server_file``: servers, their GPUs, and a profile of the model for each GPU.

    Server0
        TitanV 1 graph_tv_short.txt
        TitanXP 3 graph_txp_short.txt

A line that begins with ``Server`` opens a server, any other is ``<gpu> <count> <profile>``; the
indentation does not matter. How a Problem holds it:

* A server is a host, a GPU a device ``Server0/gpu0`` of the type that the file names, without a
  limit of memory. Servers without GPUs are left out.
* Bandwidths are not in the file; the released tool's default is 1e8 bytes/s. Devices of a server
  meet at the level ``host``, several servers at the level ``rack``.
* The profiles must be of the same graph: the same nodes and edges, in any order. The graph has the
  times of each type; sizes, which differ where activations depend on the data, are those of the
  first type, and those of the others are in ``graph.annotations["server_file"]``.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from partita.core.cluster import MAX_DEVICES, Cluster, Device, Host, Level
from partita.core.columns import frozen_array
from partita.core.graph import Graph, OpCosts
from partita.core.problem import Metric, Objective, Problem
from partita.errors import FormatError, InvalidInputError, reason_of
from partita.formats.edge_list import weights
from partita.formats.format import OpenText
from partita.formats.json_fields import format_errors
from partita.formats.pipedream import FORMAT as PROFILE_FORMAT
from partita.formats.pipedream import read_pipedream, write_pipedream

FORMAT = "server_file"
DEFAULT_BYTES_PER_S = 1e8
KEYWORD = "Server"


class _GpuLine(NamedTuple):
    """GPUs of one type in one server."""

    line: int
    server: int
    gpu: str
    num_gpus: int
    path: str


def open_beside(file: str, open_text: OpenText) -> OpenText:
    """Return an opener that looks for a path beside a file first, then as it stands.

    A server file may name its profiles relative to itself; the released tool takes them relative
    to the working directory. Both are found.

    Args:
        file: Path of the file that names others.
        open_text: Opens one path, raises ``FileNotFoundError`` where there is none.
    """

    def opener(path: str) -> str:
        try:
            return open_text(str(PurePath(file).parent / path))
        except FileNotFoundError:
            return open_text(path)

    return opener


@format_errors()
def read_server_file(
    text: str,
    open_text: OpenText,
    *,
    name: str = "servers",
    intra_bytes_per_s: float = DEFAULT_BYTES_PER_S,
    inter_bytes_per_s: float = DEFAULT_BYTES_PER_S,
) -> Problem:
    """Return the graph and the cluster of a server file.

    Args:
        text: The file.
        open_text: Returns the text of a profile, see ``open_beside``.
        name: Name of graph and cluster.
        intra_bytes_per_s: Bandwidth between GPUs of a server.
        inter_bytes_per_s: Bandwidth between servers.

    Raises:
        FormatError: A line is not understood, a profile cannot be read, or two profiles are not of
            the same graph; names the first difference.
    """
    servers, lines = _parse(text)
    path_of = _paths(lines)
    graphs: dict[str, Graph] = {}
    for row in lines:
        if row.gpu not in graphs:
            graphs[row.gpu] = _read_profile(row, open_text, name)
    return Problem(
        graph=_merge(graphs, path_of, name),
        cluster=_cluster(servers, lines, name, intra_bytes_per_s, inter_bytes_per_s),
        objective=Objective(metric=Metric.PIPEDREAM),
    )


def _parse(text: str) -> tuple[list[str], list[_GpuLine]]:
    """Return the servers with GPUs, and their lines."""
    servers: list[str] = []
    rows: list[_GpuLine] = []
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        if line.startswith(KEYWORD):
            if len(words) != 1 or words[0] in servers:
                expected = "one new word such as 'Server1'"
                raise FormatError(f"server {line.strip()!r}; expected {expected}", line=number)
            servers.append(words[0])
        else:
            rows.append(_parse_gpus(words, number, len(servers) - 1))
    if not rows:
        raise FormatError("no GPU; expected a line 'Server0', then '<gpu> <count> <profile>'")
    if sum(row.num_gpus for row in rows) > MAX_DEVICES:
        raise FormatError(f"more than {MAX_DEVICES} GPUs")
    used = sorted({row.server for row in rows})
    renumbered = [row._replace(server=used.index(row.server)) for row in rows]
    return [servers[index] for index in used], renumbered


def _parse_gpus(words: list[str], number: int, server: int) -> _GpuLine:
    if len(words) != 3:
        shown = " ".join(words)[:60]
        raise FormatError(f"line {shown!r}; expected '<gpu> <count> <profile>'", line=number)
    gpu, count, path = words
    if server < 0:
        raise FormatError(f"GPU {gpu!r} before the first line 'Server...'", line=number)
    if not (count.isascii() and count.isdigit()) or len(count) > 6 or int(count) == 0:
        raise FormatError(f"count of {gpu!r} is {count[:20]!r}; expected 1, 2, ...", line=number)
    if any("\0" in word for word in words):
        raise FormatError("a NUL character; expected text", line=number)
    return _GpuLine(number, server, gpu, int(count), path)


def _paths(lines: list[_GpuLine]) -> dict[str, str]:
    path_of: dict[str, str] = {}
    for row in lines:
        if path_of.setdefault(row.gpu, row.path) != row.path:
            raise FormatError(
                f"profile of {row.gpu!r} is {row.path!r} here and {path_of[row.gpu]!r} before; "
                "expected one profile for each type of GPU",
                line=row.line,
            )
    return path_of


def _read_profile(row: _GpuLine, open_text: OpenText, name: str) -> Graph:
    try:
        text = open_text(row.path)
    except (OSError, ValueError) as exc:
        reason = reason_of(exc)
        raise FormatError(
            f"profile {row.path!r} of {row.gpu!r} cannot be read: {reason}", line=row.line
        ) from exc
    try:
        return read_pipedream(text, name=name)
    except FormatError as exc:
        raise exc.at(row.path) from exc


def _merge(graphs: Mapping[str, Graph], path_of: Mapping[str, str], name: str) -> Graph:
    """Return the first graph with the times of all, aligned by name."""
    first_type, first = next(iter(graphs.items()))
    costs, notes = [], {}
    for gpu, graph in graphs.items():
        if graph is not first:
            _check_same(first, graph, f"{path_of[first_type]!r}", f"{path_of[gpu]!r}")
            graph = _aligned(graph, first)  # noqa: PLW2901 (the same graph in another order)
            notes[gpu] = _differences(first, graph)
        costs.append(replace(graph.costs[0], device_type=gpu))
    annotations = {**first.annotations, FORMAT: {"paths": dict(path_of), "profiles": notes}}
    return replace(first, name=name, costs=tuple(costs), annotations=annotations)


def _check_same(a: Graph, b: Graph, path_a: str, path_b: str) -> None:
    """Refuse two graphs that differ in nodes or edges; names the first difference."""
    for what, names_a, names_b in (
        ("node", a.ops.names, b.ops.names),
        ("input", _inputs(a), _inputs(b)),
    ):
        for names, others, here, there in (
            (names_a, names_b, path_a, path_b),
            (names_b, names_a, path_b, path_a),
        ):
            known = set(others)
            missing = next((one for one in names if one not in known), None)
            if missing is not None:
                raise FormatError(
                    f"{what} {missing!r} of profile {here} is not one of profile {there}; "
                    "expected profiles of one graph"
                )
    feeds_a, feeds_b = _feeds(a), _feeds(b)
    for name in a.ops.names:
        if feeds_a[name] != feeds_b[name]:
            raise FormatError(
                f"node {name!r} reads from {_listed(feeds_a[name])} in profile {path_a}, from "
                f"{_listed(feeds_b[name])} in profile {path_b}; expected profiles of one graph"
            )


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names[:6])) + (", ..." if len(names) > 6 else "") or "nothing"


def _inputs(graph: Graph) -> list[str]:
    return [graph.tensors.names[i] for i in np.flatnonzero(graph.tensors.producer < 0)]


def _feeds(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return the names of what each op reads, in order."""
    pointers, edges = graph.in_edges
    begins = pointers.tolist()
    tensors = [graph.tensors.names[i] for i in graph.edges.tensor[edges].tolist()]
    return {
        name: tuple(tensors[begins[op] : begins[op + 1]]) for op, name in enumerate(graph.ops.names)
    }


def _aligned(graph: Graph, like: Graph) -> Graph:
    """Return a graph with nodes and edges in the order of another that has the same ones."""
    row_of = {name: row for row, name in enumerate(graph.ops.names)}
    ops = np.array([row_of[name] for name in like.ops.names])
    tensor_of = {name: row for row, name in enumerate(graph.tensors.names)}
    tensors = np.array([tensor_of[name] for name in like.tensors.names])
    costs = graph.costs[0]
    return replace(
        like,
        ops=replace(like.ops, saved_bytes=graph.ops.saved_bytes[ops]),
        costs=(replace(costs, forward_s=costs.forward_s[ops], backward_s=costs.backward_s[ops]),),
        tensors=replace(
            like.tensors,
            bytes=graph.tensors.bytes[tensors],
            load_s=graph.tensors.load_s[tensors],
        ),
        parameters=weights(like.ops.names, graph.parameter_bytes[ops].tolist()),
        annotations=graph.annotations,
    )


def _differences(first: Graph, graph: Graph) -> dict[str, Any]:
    """Return what a profile says otherwise than the first, besides times."""
    found: dict[str, Any] = {}
    for what, values, others in (
        ("tensor_bytes", graph.tensors.bytes, first.tensors.bytes),
        ("load_s", graph.tensors.load_s, first.tensors.load_s),
        ("parameter_bytes", graph.parameter_bytes, first.parameter_bytes),
    ):
        if not np.array_equal(values, others):
            found[what] = values.tolist()
    if graph.annotations != first.annotations:
        found[PROFILE_FORMAT] = graph.annotations[PROFILE_FORMAT]
    return found


def _cluster(
    servers: list[str],
    lines: list[_GpuLine],
    name: str,
    intra_bytes_per_s: float,
    inter_bytes_per_s: float,
) -> Cluster:
    numbers = [0] * len(servers)
    devices = []
    for row in lines:
        for _ in range(row.num_gpus):
            number = numbers[row.server]
            numbers[row.server] += 1
            path = f"{servers[row.server]}/gpu{number}"
            devices.append(Device(name=path, host=row.server, type=row.gpu))
    hosts = frozen_array([device.host for device in devices], np.int32)
    levels = [
        Level(
            name="host",
            group_of=hosts,
            bandwidth_bytes_per_s=frozen_array([intra_bytes_per_s] * len(servers), np.float64),
        )
    ]
    if len(servers) > 1:
        levels.append(
            Level(
                name="rack",
                group_of=np.zeros_like(hosts),
                bandwidth_bytes_per_s=frozen_array([inter_bytes_per_s], np.float64),
            )
        )
    return Cluster(
        name=name,
        hosts=tuple(Host(name=server) for server in servers),
        devices=tuple(devices),
        levels=tuple(levels),
    )


def write_server_file(problem: Problem) -> str:
    """Return the server file of a problem; the profiles that it names are ``server_profiles``.

    A host or type whose name is not one word, or a host not called ``Server...``, gets another.
    Bandwidths, memory and CPUs cannot be said and are left out.

    Raises:
        InvalidInputError: The graph has no times for a type of GPU in the cluster.
    """
    cluster = problem.cluster
    paths = _profile_paths(problem)
    lines = []
    for index, host in enumerate(cluster.hosts):
        types = [device.type for device in cluster.devices if device.host == index]
        if types:
            word = _word(host.name)
            lines.append(word if word.startswith(KEYWORD) else f"{KEYWORD}-{word}")
        while types:
            count = next((i for i, one in enumerate(types) if one != types[0]), len(types))
            lines.append(f"    {_word(types[0])} {count} {paths[types[0]]}")
            types = types[count:]
    return "\n".join(lines) + "\n"


def server_profiles(problem: Problem) -> dict[str, str]:
    """Return the text of each profile that the server file of a problem names, by path.

    Raises:
        InvalidInputError: The graph has no times for a type of GPU in the cluster.
    """
    return {
        path: write_pipedream(_profile(problem.graph, device_type))
        for device_type, path in _profile_paths(problem).items()
    }


def _profile_paths(problem: Problem) -> dict[str, str]:
    known = problem.graph.annotations.get(FORMAT, {}).get("paths", {})
    types = dict.fromkeys(device.type for device in problem.cluster.devices)
    return {one: known.get(one) or f"{_word(one)}/graph.txt" for one in types}


def _word(name: str) -> str:
    return "-".join(name.split()) or "gpu"


def _profile(graph: Graph, device_type: str) -> Graph:
    """Return the graph as it was profiled on one type of GPU."""
    notes = graph.annotations.get(FORMAT, {}).get("profiles", {}).get(device_type, {})
    tensors, parameters = graph.tensors, graph.parameters
    if "tensor_bytes" in notes:
        tensors = replace(tensors, bytes=frozen_array(notes["tensor_bytes"], np.float64))
    if "load_s" in notes:
        tensors = replace(tensors, load_s=frozen_array(notes["load_s"], np.float64))
    if "parameter_bytes" in notes:
        parameters = weights(graph.ops.names, notes["parameter_bytes"])
    kept = notes.get(PROFILE_FORMAT, graph.annotations.get(PROFILE_FORMAT))
    return replace(
        graph,
        costs=(_costs(graph, device_type),),
        tensors=tensors,
        parameters=parameters,
        annotations={} if kept is None else {PROFILE_FORMAT: kept},
    )


def _costs(graph: Graph, device_type: str) -> OpCosts:
    by_type = {costs.device_type: costs for costs in graph.costs}
    for one in (device_type, ""):
        if one in by_type:
            return by_type[one]
    known = ", ".join(map(repr, by_type))
    raise InvalidInputError(f"graph {graph.name!r} has times for {known}, not for {device_type!r}")
