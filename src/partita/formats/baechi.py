"""Cost graphs of Baechi's placers, as JSON.

``{"name", "nodes": [{"id", "name", "time_ms", "permanent_mem", "temporary_mem", "parameter_mem",
"output_mem", ...}], "edges": [{"id", "src", "dst", "bytes", "comm_ms"}], "devices": [{"id",
"memory_limit"}], ...}``. How a Problem holds it:

* An op is named by its node's id; ids need not be in topological order. ``time_ms``, the forward
  time, is ``forward_s``; Baechi places the forward pass alone.
* ``parameter_mem`` is parameters and gradients, so ``<id>.weight`` has half of it. Saved for
  backward is ``permanent_mem - parameter_mem`` (0 where that is negative), ``workspace_bytes`` is
  ``temporary_mem``, ``flops`` is ``flops``. There is no optimizer state.
* Edges out of a node with equal bytes and time read one tensor; its ``transfer_s`` is ``comm_ms``.
  (Baechi for PyTorch counts a copy for each edge: its own rules can be applied to the edges.)
* A device is ``host0/gpu<id>`` with ``memory_limit`` bytes.

The four columns of memory as they stand, other keys of nodes, edges and the document are in
``graph.annotations["baechi"]``, so that planners can apply Baechi's own rules.

Placements of Baechi, as JSON: ``{"placement": [device, ...], "order": [id, ...]}``.

``placement`` has the device of each node: a list by id where the ids are 0, 1, ..., else an object
``{"<id>": device}``. ``order`` has all ids in the order in which they were scheduled, each device
runs its own in that order; without it a topological order is taken. Other keys (start times,
favourite children, results) are ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.core.cluster import MAX_DEVICES, Cluster, Device
from partita.core.columns import MAX_BYTES, MAX_FLOPS, MAX_SECONDS, Floats, Ints, frozen_array
from partita.core.graph import Graph, OpCosts, OpTable, SampleUnit
from partita.core.placement import placement_plan
from partita.core.plan import Plan
from partita.core.problem import Metric, Mode, Objective, Problem
from partita.errors import FormatError, InvalidInputError
from partita.formats.annotations import kept_notes
from partita.formats.dnn_partitioning import op_ids
from partita.formats.edge_list import labels, unlimited_level, weights, wire
from partita.formats.json_fields import (
    MAX_ID,
    Fields,
    as_integer,
    edge_ends,
    extra_columns,
    extra_of,
    format_errors,
    plain,
    read_object,
    refuse,
    row_by_id,
    write_rows,
)
from partita.formats.milliseconds import MS_PER_S, milliseconds, seconds

FORMAT = "baechi"
MAX_MS = MAX_SECONDS * MS_PER_S
MEMORY_KEYS = ("permanent_mem", "temporary_mem", "parameter_mem", "output_mem")
_NODE_KEYS = ("id", "name", "time_ms", *MEMORY_KEYS, "flops")
_EDGE_KEYS = ("id", "src", "dst", "bytes", "comm_ms")
_DEVICE_KEYS = ("id", "memory_limit")
_TOP_KEYS = ("name", "nodes", "edges", "devices")


@format_errors()
def read_baechi(
    text: str,
    *,
    name: str = FORMAT,
    devices: int | None = None,
    memory_bytes: float | None = None,
) -> Problem:
    """Return the problem of a cost graph.

    Args:
        text: The file.
        name: Name of the graph where the file has none.
        devices: Number of devices instead of those in the file, all with the memory of its first.
        memory_bytes: Memory of every device instead of that in the file.

    Raises:
        FormatError: A value is missing or out of range, an id stands twice, an edge names a node
            that is not there, or the edges make a cycle.
    """
    document = read_object(text)
    title = document.text_or("name", name)
    nodes, edges = document.rows("nodes"), document.rows("edges")
    row_of = row_by_id(nodes)
    source, target = edge_ends(edges, row_of, ("src", "dst"), once=False)
    memory = {key: [node.number(key, high=MAX_BYTES) for node in nodes] for key in MEMORY_KEYS}
    names = tuple(str(node.integer("id", low=-MAX_ID)) for node in nodes)
    wiring = wire(
        names,
        source,
        target,
        num_bytes=[edge.number("bytes", high=MAX_BYTES) for edge in edges],
        transfer_s=[seconds(edge.number("comm_ms", high=MAX_MS)) for edge in edges],
        unread_bytes=memory["output_mem"],
    )
    graph = Graph(
        name=title,
        ops=_op_table(names, nodes, memory),
        costs=(
            OpCosts(
                forward_s=frozen_array(
                    [seconds(node.number("time_ms", high=MAX_MS)) for node in nodes], np.float64
                )
            ),
        ),
        tensors=wiring.tensors,
        edges=wiring.edges,
        outputs=wiring.outputs,
        parameters=weights(names, [size / 2 for size in memory["parameter_mem"]]),
        sample_unit=SampleUnit.MINIBATCH,
        annotations={FORMAT: _annotations(document, nodes, edges)},
    )
    return Problem(
        graph=graph,
        cluster=_cluster(document, title, devices, memory_bytes),
        objective=Objective(metric=Metric.MAKESPAN_PARALLEL, optimizer_bytes_per_element=0.0),
    )


def _op_table(
    names: tuple[str, ...], nodes: Sequence[Fields], memory: Mapping[str, list[float]]
) -> OpTable:
    saved = _saved(np.array(memory["permanent_mem"]), np.array(memory["parameter_mem"]))
    flops = [node.number_or("flops", 0.0, high=MAX_FLOPS) for node in nodes]
    titles = [node.text_or("name", "") for node in nodes]
    return OpTable(
        names=names,
        saved_bytes=saved,
        workspace_bytes=frozen_array(memory["temporary_mem"], np.float64),
        flops=frozen_array(flops, np.float64),
        # Names of real models are classes of modules; generated ones are all different.
        types=labels(titles if len(set(titles)) < len(titles) else []),
    )


def _saved(permanent: NDArray[Any], parameter: NDArray[Any]) -> Floats:
    return frozen_array(np.maximum(permanent - parameter, 0.0), np.float64)


def _annotations(
    document: Fields, nodes: Sequence[Fields], edges: Sequence[Fields]
) -> dict[str, Any]:
    found: dict[str, Any] = {key: [node.values[key] for node in nodes] for key in MEMORY_KEYS}
    titles = [node.text_or("name", "") for node in nodes]
    edge_ids = [
        edge.integer("id", low=-MAX_ID) if "id" in edge.values else row
        for row, edge in enumerate(edges)
    ]
    optional = {
        "names": titles if any(titles) else [],
        "has_flops": any("flops" in node.values for node in nodes),
        "edge_ids": [] if edge_ids == list(range(len(edges))) else edge_ids,
        "nodes": extra_columns(nodes, _NODE_KEYS),
        "edges": extra_columns(edges, _EDGE_KEYS),
        "document": document.rest(_TOP_KEYS),
    }
    return found | {key: value for key, value in optional.items() if value}


def _cluster(
    document: Fields, name: str, devices: int | None, memory_bytes: float | None
) -> Cluster:
    rows = document.rows("devices")
    numbers = list(row_by_id(rows, low=0))
    limits = [row.number("memory_limit", high=MAX_BYTES) for row in rows]
    if not rows:
        raise FormatError("devices is empty; expected at least one")
    if devices is not None:
        if not 1 <= devices <= MAX_DEVICES:
            raise InvalidInputError(f"{devices} devices; expected 1 to {MAX_DEVICES}")
        numbers, limits = list(range(devices)), limits[:1] * devices
    if memory_bytes is not None:
        limits = [memory_bytes] * len(limits)
    return Cluster(
        name=name,
        devices=tuple(
            Device(name=f"host0/gpu{number}", memory_bytes=limit)
            for number, limit in zip(numbers, limits, strict=True)
        ),
        levels=(unlimited_level(len(numbers)),),
    )


def write_baechi(problem: Problem) -> str:
    """Return a problem as a cost graph.

    A graph from elsewhere is written with the forward and (in training) backward time of each op,
    and with transfers at the bandwidth of the slowest level. Inputs of the model are left out.

    Raises:
        InvalidInputError: The graph has explicit backward ops.
    """
    graph = problem.graph
    if not graph.is_forward.all():
        raise InvalidInputError(f"graph {graph.name!r} has explicit backward ops")
    notes = kept_notes(graph, FORMAT)
    memory = _memory(graph, notes)
    training = problem.objective.mode is Mode.TRAINING
    time_s = graph.forward_s + graph.backward_s if training else graph.forward_s
    ids = op_ids(graph)
    titles = notes.get("names") or ([] if ids == list(graph.ops.names) else graph.ops.names)
    has_flops = notes.get("has_flops", bool(graph.ops.flops.any()))
    nodes = []
    for op in range(len(graph)):
        node: dict[str, Any] = {"id": int(ids[op])}
        if op < len(titles) and titles[op]:
            node["name"] = titles[op]
        node["time_ms"] = milliseconds(float(time_s[op]))
        node |= {key: values[op] for key, values in memory.items()}
        if has_flops:
            node["flops"] = float(graph.ops.flops[op])
        nodes.append(node | extra_of(notes.get("nodes", {}), op))
    return write_rows(
        {
            "name": graph.name,
            **notes.get("document", {}),
            "nodes": nodes,
            "edges": _written_edges(problem, ids, notes),
            "devices": [
                {"id": number, "memory_limit": plain(min(device.memory_bytes, MAX_BYTES))}
                for number, device in zip(
                    device_numbers(problem.cluster), problem.cluster.devices, strict=True
                )
            ],
        }
    )


def _memory(graph: Graph, notes: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Return the columns of memory: those of the file where the graph still agrees with them."""
    made = graph.tensors.producer >= 0
    parameter = 2 * graph.parameter_bytes
    columns: dict[str, NDArray[Any]] = {
        "permanent_mem": graph.ops.saved_bytes + parameter,
        "temporary_mem": graph.ops.workspace_bytes,
        "parameter_mem": parameter,
        "output_mem": np.bincount(
            graph.tensors.producer[made], weights=graph.tensors.bytes[made], minlength=len(graph)
        ),
    }
    kept = {key: notes.get(key, ()) for key in MEMORY_KEYS}
    if all(len(values) == len(graph) for values in kept.values()):
        permanent, temporary, held, _ = (
            np.array(kept[key], dtype=np.float64) for key in MEMORY_KEYS
        )
        same = (
            np.array_equal(_saved(permanent, held), graph.ops.saved_bytes)
            and np.array_equal(temporary, graph.ops.workspace_bytes)
            and np.array_equal(held / 2, graph.parameter_bytes)
        )
        if same:
            return kept
    return {key: [plain(value) for value in values.tolist()] for key, values in columns.items()}


def _written_edges(
    problem: Problem, ids: Sequence[str], notes: Mapping[str, Any]
) -> list[dict[str, Any]]:
    graph, cluster = problem.graph, problem.cluster
    rates = [level.slowest_bytes_per_s for level in cluster.levels]
    if cluster.matrix is not None:
        rates.append(float(cluster.matrix.bandwidth_bytes_per_s.min()))
    given = graph.tensors.transfer_s
    moved = graph.tensors.bytes / min(rates, default=np.inf)
    time_s = np.where(np.isnan(given), moved, given).tolist()
    edge_ids = notes.get("edge_ids", ())
    edges: list[dict[str, Any]] = []
    for row, tensor in enumerate(graph.edges.tensor.tolist()):
        before = int(graph.edge_source[row])
        if before < 0:
            continue
        edges.append(
            {
                "id": edge_ids[row] if row < len(edge_ids) else len(edges),
                "src": int(ids[before]),
                "dst": int(ids[graph.edges.reader[row]]),
                "bytes": plain(graph.tensors.bytes[tensor]),
                "comm_ms": milliseconds(time_s[tensor]),
                **extra_of(notes.get("edges", {}), row),
            }
        )
    return edges


def device_numbers(cluster: Cluster) -> list[int]:
    """Return the number of each device: that in ``host0/gpu<number>``, else its row."""
    names = [name.removeprefix("host0/gpu") for name in cluster.device_names]
    if all(name.isascii() and name.isdigit() and len(name) <= 16 for name in names) and all(
        str(int(name)) == name for name in names
    ):
        return [int(name) for name in names]
    return list(range(len(names)))


@format_errors()
def read_placement(text: str, problem: Problem) -> Plan:
    """Return the plan of a placement.

    Raises:
        FormatError: A node is not there, not placed or twice in the order, a device is not there,
            or the order is not topological.
    """
    document = read_object(text)
    row_of = {int(name): row for row, name in enumerate(op_ids(problem.graph))}
    device_of = _devices(document, row_of, problem)
    order = None
    if document.values.get("order") is not None:
        rows = []
        for position, item in enumerate(document.items("order")):
            node = as_integer(item, f"order[{position}]", low=-MAX_ID)
            if node not in row_of:
                refuse(f"order[{position}]", item, "the id of a node")
            rows.append(row_of[node])
        order = frozen_array(rows, np.int32)
        if len(set(rows)) != len(problem.graph) or len(rows) != len(problem.graph):
            raise FormatError(
                f"order names {len(set(rows))} nodes in {len(rows)} places; "
                f"expected each of {len(problem.graph)} once"
            )
    return _plan(problem, problem.cluster.device_names, device_of, order)


def _plan(problem: Problem, devices: tuple[str, ...], device_of: Ints, order: Ints | None) -> Plan:
    return placement_plan(
        problem.graph,
        devices,
        device_of,
        order=order,
        schedule=problem.objective.placement_schedule,
    )


def _devices(document: Fields, row_of: Mapping[int, int], problem: Problem) -> Ints:
    given = document.need("placement")
    if isinstance(given, list):
        values = {str(node): device for node, device in enumerate(given)}
    else:
        values = document.object("placement").values
    index_of = {number: i for i, number in enumerate(device_numbers(problem.cluster))}
    device_of = [-1] * len(row_of)
    for node, value in values.items():
        digits = node.removeprefix("-")
        known = digits.isascii() and digits.isdigit() and len(digits) <= 15
        if not known or int(node) not in row_of:
            refuse("placement", node, "the id of a node")
        number = as_integer(value, f"placement[{node}]")
        if number not in index_of:
            refuse(f"placement[{node}]", value, f"one of {len(index_of)} devices")
        device_of[row_of[int(node)]] = index_of[number]
    missing = [node for node, row in row_of.items() if device_of[row] < 0]
    if missing:
        raise FormatError(f"{len(missing)} nodes are not placed, such as {missing[0]}")
    return frozen_array(device_of, np.int32)


def write_placement(problem: Problem, plan: Plan) -> str:
    """Return a plan as a placement, with an order that gives the same stages again.

    Raises:
        InvalidInputError: The plan does not fit the problem, or runs an op on several devices.
    """
    plan.check_fits(problem)
    if why := plan.why_not_placed():
        raise InvalidInputError(f"a placement cannot hold the plan: {why}")
    # A plan from elsewhere may cut its stages otherwise than a placement does: cut them again.
    order = _order(problem.graph, plan)
    order = _order(problem.graph, _plan(problem, plan.devices, plan.device_of, order))
    ids = [int(name) for name in op_ids(problem.graph)]
    numbers = device_numbers(problem.cluster)
    number = [numbers[problem.cluster.index_of[name]] for name in plan.devices]
    device_of = {
        node: number[device] for node, device in zip(ids, plan.device_of.tolist(), strict=True)
    }
    by_row = sorted(ids) == list(range(len(ids)))
    placement = (
        [device_of[node] for node in range(len(ids))]
        if by_row
        else {str(node): device for node, device in device_of.items()}
    )
    return write_rows({"placement": placement, "order": [ids[op] for op in order.tolist()]})


def _order(graph: Graph, plan: Plan) -> Ints:
    """Return a topological order that runs stage after stage.

    In a stage, an op with an input from another device comes first and one with a reader on another
    device last, where the data allow it: that is where a placement cuts.
    """
    source, reader = graph.edge_source, graph.edges.reader
    inner = (source >= 0) & graph.is_forward[source] & graph.is_forward[reader]
    source, reader = source[inner], reader[inner]
    device_of, stage_of = plan.device_of, plan.stage_of
    remote = device_of[source] != device_of[reader]
    local = stage_of[source] == stage_of[reader]
    rank = np.ones(len(graph), dtype=np.int64)
    opens, closes, follows, leads = (np.zeros(len(graph), dtype=bool) for _ in range(4))
    opens[reader[remote]] = True
    closes[source[remote]] = True
    follows[reader[local]] = True
    leads[source[local]] = True
    rank[closes & ~leads] = 2
    rank[opens & ~follows] = 0
    position = np.empty(len(graph), dtype=np.int64)
    position[graph.topological_order] = np.arange(len(graph))
    return frozen_array(np.lexsort((position, rank, stage_of)), np.int32)
