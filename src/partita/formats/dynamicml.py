"""Instances, plans and link speeds of DynamicMLTrainer.

An instance is JSON with ``node_weights``, ``edges`` (pairs of rows), ``k`` and a k x k ``matrix``
of what it costs that an edge leads from one GPU to another. How a Problem holds it:

* An op is named by its row; its weight is ``forward_s``. Weights have no unit there (they count
  parameters), so neither have these seconds, nor the metric ``sharding-cost``.
* Edges carry nothing: tensors have 0 bytes, one for each op.
* The matrix is the latency of links without a limit of bandwidth. Its diagonal does not count.
* Edges may lead to lower rows, as in the published chain, but not in a cycle.

Other keys (``k_values``, ``source``, ...) are in ``graph.annotations["dynamicml"]``.

A plan is ``{"assignment": {"<node>": gpu}}`` or ``{"parts": [[node, ...], ...]}``, part i on GPU i.

``gpu_speed.npy`` is a matrix of measured speeds; a link costs the largest speed minus its own.
"""

import io
import re
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.core.cluster import MAX_DEVICES, Cluster, Device, LinkMatrix
from partita.core.columns import MAX_SECONDS, frozen_array
from partita.core.graph import Graph, OpCosts, OpTable, SampleUnit
from partita.core.placement import placement_plan
from partita.core.plan import Plan
from partita.core.problem import Metric, Mode, Objective, Problem
from partita.errors import FormatError, InvalidInputError
from partita.formats.edge_list import wire
from partita.formats.json_fields import (
    Fields,
    as_integer,
    as_list,
    as_number,
    format_errors,
    read_object,
    refuse,
    write_rows,
)

FORMAT = "dynamicml"
NPY_MAGIC = b"\x93NUMPY"
_KEYS = ("name", "k", "node_weights", "edges", "matrix")
_HEADER = re.compile(
    r"\{'descr': '[<>|=](?:[fiu][1248])', 'fortran_order': (?:True|False), "
    r"'shape': \((\d{1,6}), (\d{1,6})\), \} *\n?"
)
_ITEM = re.compile(r"'[<>|=][fiu]([1248])'")


@format_errors()
def read_dynamicml(text: str, *, name: str = FORMAT) -> Problem:
    """Return the problem of an instance.

    Args:
        text: The file.
        name: Name of the graph where the file has none.

    Raises:
        FormatError: A value is missing or out of range, an edge names a node that is not there, the
            matrix is not k x k, or the edges make a cycle.
    """
    document = read_object(text)
    title = document.text_or("name", name)
    node_weights = _numbers(document.items("node_weights"), "node_weights")
    names = tuple(str(row) for row in range(len(node_weights)))
    source, target = _pairs(document, len(names))
    count = document.integer("k", low=1, high=MAX_DEVICES)
    notes = document.rest(_KEYS)
    wiring = wire(
        names,
        source,
        target,
        num_bytes=[0.0] * len(source),
        transfer_s=[np.nan] * len(source),
        unread_bytes=[0.0] * len(names),
    )
    graph = Graph(
        name=title,
        ops=OpTable(names=names),
        costs=(OpCosts(forward_s=frozen_array(node_weights, np.float64)),),
        tensors=wiring.tensors,
        edges=wiring.edges,
        outputs=wiring.outputs,
        sample_unit=SampleUnit.MINIBATCH,
        annotations={FORMAT: notes} if notes else {},
    )
    cluster = _cluster(_matrix(document, count), title)
    return Problem(graph=graph, cluster=cluster, objective=Objective(metric=Metric.SHARDING_COST))


def _numbers(values: Sequence[Any], place: str) -> list[float]:
    return [as_number(v, f"{place}[{i}]", high=MAX_SECONDS) for i, v in enumerate(values)]


def _pairs(document: Fields, num_nodes: int) -> tuple[list[int], list[int]]:
    ends: tuple[list[int], list[int]] = ([], [])
    for row, item in enumerate(document.items("edges")):
        place = f"edges[{row}]"
        pair = as_list(item, place)
        if len(pair) != 2:
            refuse(place, pair, "a pair of nodes")
        for side, value in zip(ends, pair, strict=True):
            side.append(as_integer(value, place, high=num_nodes - 1))
    return ends


def _matrix(document: Fields, count: int) -> NDArray[Any]:
    rows = document.items("matrix")
    if len(rows) != count:
        refuse("matrix", f"a list of {len(rows)} rows", f"{count} rows, as k says")
    values: list[list[float]] = []
    for row, item in enumerate(rows):
        place = f"matrix[{row}]"
        numbers = _numbers(as_list(item, place), place)
        if len(numbers) != count:
            refuse(place, f"a list of {len(numbers)} numbers", f"{count} numbers, as k says")
        values.append(numbers)
    return np.array(values, dtype=np.float64)


def _cluster(latency_s: NDArray[Any], name: str) -> Cluster:
    size = len(latency_s)
    return Cluster(
        name=name,
        devices=tuple(Device(name=f"host0/gpu{index}") for index in range(size)),
        matrix=LinkMatrix(
            bandwidth_bytes_per_s=frozen_array(np.full(size * size, np.inf), np.float64),
            latency_s=frozen_array(latency_s.ravel(), np.float64),
        ),
    )


def write_dynamicml(problem: Problem) -> str:
    """Return a problem as an instance: weights are forward and backward seconds of the reference.

    Links without a matrix are written as the latency plus the time of the mean tensor. Inputs of
    the model are left out.
    """
    graph = problem.graph
    notes = graph.annotations.get(FORMAT, {})
    training = problem.objective.mode is Mode.TRAINING
    total = graph.forward_s + graph.backward_s if training else graph.forward_s
    pairs = zip(graph.edge_source.tolist(), graph.edges.reader.tolist(), strict=True)
    costs = _link_costs(problem)
    return write_rows(
        {
            "name": graph.name,
            "k": len(costs),
            "node_weights": total.tolist(),
            "edges": [[before, after] for before, after in pairs if before >= 0],
            "matrix": costs.tolist(),
            **notes,
        }
    )


def _link_costs(problem: Problem) -> NDArray[Any]:
    cluster, tensors = problem.cluster, problem.graph.tensors
    size = len(cluster)
    if cluster.matrix is not None:
        latency = cluster.matrix.latency_s
        rate = cluster.matrix.bandwidth_bytes_per_s
    else:
        source, target = np.divmod(np.arange(size * size), size)
        links = cluster.links(source, target)
        latency, rate = links.latency_s, links.bandwidth_bytes_per_s
    mean = float(tensors.bytes.mean()) if len(tensors) else 0.0
    moved = np.divide(mean, rate, out=np.zeros(size * size), where=rate > 0)
    costs = (latency + moved).reshape(size, size)
    if cluster.matrix is None:
        np.fill_diagonal(costs, 0.0)
    return costs


@format_errors()
def read_assignment(text: str, problem: Problem) -> Plan:
    """Return the plan of an assignment or a list of parts.

    Raises:
        FormatError: A node is not there, stands twice or is not placed, or a GPU is not there.
    """
    document = read_object(text)
    row_of = {name: row for row, name in enumerate(problem.graph.ops.names)}
    if "parts" in document.values:
        placed = [
            (str(node), gpu, f"parts[{gpu}]")
            for gpu, part in enumerate(document.items("parts"))
            for node in as_list(part, f"parts[{gpu}]")
        ]
    else:
        given = document.object("assignment")
        placed = [(node, value, given.at(node)) for node, value in given.values.items()]
    device_of = [-1] * len(problem.graph)
    for node, gpu, place in placed:
        if node not in row_of or device_of[row_of[node]] >= 0:
            refuse(place, node, "a node of the graph that is not placed before")
        device_of[row_of[node]] = as_integer(gpu, place, high=len(problem.cluster) - 1)
    missing = [name for name, row in row_of.items() if device_of[row] < 0]
    if missing:
        raise FormatError(f"{len(missing)} nodes are not placed, such as {missing[0]}")
    return placement_plan(
        problem.graph,
        problem.cluster.device_names,
        frozen_array(device_of, np.int32),
        schedule=problem.objective.placement_schedule,
    )


def write_assignment(problem: Problem, plan: Plan) -> str:
    """Return a plan as an assignment of ops to the numbers of devices in the cluster.

    Raises:
        InvalidInputError: The plan does not fit the problem, or runs an op on several devices.
    """
    plan.check_fits(problem)
    if why := plan.why_not_placed():
        raise InvalidInputError(f"an assignment cannot hold the plan: {why}")
    number = [problem.cluster.index_of[name] for name in plan.devices]
    gpus = [number[device] for device in plan.device_of.tolist()]
    return write_rows({"assignment": dict(zip(problem.graph.ops.names, gpus, strict=True))})


@format_errors()
def read_speed_matrix(data: bytes, *, name: str = FORMAT) -> Cluster:
    """Return the cluster of a ``gpu_speed.npy``.

    Args:
        data: The file.
        name: Name of the cluster.

    Raises:
        FormatError: It is not a square matrix of numbers of 0 or more.
    """
    speed = _load_square(data)
    if not (np.isfinite(speed).all() and (speed >= 0).all()):
        bad = speed[~(np.isfinite(speed) & (speed >= 0))][0]
        raise FormatError(f"a speed is {bad}; expected numbers of 0 or more")
    return _cluster(speed.max() - speed, name)


def _load_square(data: bytes) -> NDArray[Any]:
    """Return the matrix in an ``.npy`` file.

    The header is compared with the one form that NumPy writes before NumPy reads it, so that no
    header can ask for more memory than the file holds, for objects, or for Python.
    """
    if not data.startswith(NPY_MAGIC) or len(data) < 12:
        raise FormatError("not an .npy file of NumPy")
    width = 2 if data[6] == 1 else 4
    begin = 8 + width
    length = struct.unpack("<H" if width == 2 else "<I", data[8:begin])[0]
    header = data[begin : begin + length].decode("latin-1")
    match, item = _HEADER.fullmatch(header), _ITEM.search(header)
    if data[6] not in (1, 2, 3) or data[7] != 0 or match is None or item is None:
        raise FormatError(
            f"the .npy file holds {header.strip()[:80]!r}; expected a matrix of numbers"
        )
    rows, columns = int(match.group(1)), int(match.group(2))
    if rows != columns or not 1 <= rows <= MAX_DEVICES:
        raise FormatError(
            f"the .npy file holds {rows} x {columns} numbers; expected a square matrix"
        )
    expected = begin + length + rows * columns * int(item.group(1))
    if len(data) != expected:
        raise FormatError(f"the .npy file has {len(data)} bytes; expected {expected}")
    try:
        loaded = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, OSError, EOFError, TypeError) as exc:
        raise FormatError(f"not an .npy file that NumPy can read: {exc}") from exc
    return np.asarray(loaded, dtype=np.float64)


def write_speed_matrix(cluster: Cluster) -> bytes:
    """Return a ``gpu_speed.npy`` (float64) with the largest cost minus the cost of each link.

    Raises:
        InvalidInputError: The cluster has levels instead of a matrix of links.
    """
    if cluster.matrix is None:
        raise InvalidInputError(f"cluster {cluster.name!r} has no matrix of links to write")
    size = len(cluster)
    costs = cluster.matrix.latency_s.reshape(size, size)
    buffer = io.BytesIO()
    np.save(buffer, costs.max() - costs, allow_pickle=False)
    return buffer.getvalue()
