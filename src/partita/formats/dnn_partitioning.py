"""Inputs of the ``dnn-partitioning`` programs, as JSON.

Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020.
An input has ``maxSizePerFPGA``, ``maxFPGAs``, ``maxCPUs``, ``nodes`` and ``edges``; "FPGA" stands
for any accelerator. How a Problem holds it:

* An op is named by its node's id. Its latencies (ms) are the ``forward_s`` of two sets of costs,
  for the device types ``accelerator`` and ``cpu``; explicit backward ops too hold theirs there.
* ``size`` is ``saved_bytes`` and there are no parameters, so that the sum of ``saved_bytes`` over
  the ops of a device is what the published memory limit compares, exactly.
* ``isBackwardNode`` is the phase, ``supportedOnFpga`` the kinds of devices, ``colorClass`` the
  colocation class (numbered from 0; the classes of the file are in the annotations).
* An op makes one tensor. Its ``transfer_s`` is the ``cost`` (ms), which must be equal on all edges
  out of a node; its bytes are the largest ``size`` of those edges.
* ``maxFPGAs`` devices ``acc0``, ... of type ``accelerator`` with ``maxSizePerFPGA`` bytes, and
  ``maxCPUs`` devices ``cpu0``, ... of type ``cpu`` without a limit.

The mode is training where there are backward nodes, else inference. Keys that the published
programs ignore are kept in ``graph.annotations["dnn-partitioning"]``.

Splits of a ``dnn-partitioning`` input: which device runs each node, as JSON.

Either ``{"fpgas": [{"nodes": [...]}, ...], "cpus": [...]}``, as the published programs write it, or
``{"assignment": {"<node>": device}}`` with ``"acc0"``, ``"cpu0"``, or a number: 0 = the CPU, i from
1 on = accelerator i - 1. A split of the forward nodes alone places the backward nodes by their
colour class. Loads are not read, and not written: the cost model says them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from partita.core.cluster import MAX_DEVICES, Cluster, Device
from partita.core.columns import MAX_BYTES, MAX_SECONDS, frozen_array
from partita.core.graph import (
    ANY_KIND,
    KIND_BIT,
    DeviceKind,
    EdgeTable,
    Graph,
    OpCosts,
    OpTable,
    Phase,
    SampleUnit,
    TensorTable,
)
from partita.core.placement import placement_plan
from partita.core.plan import Plan
from partita.core.problem import Metric, Mode, Objective, Problem
from partita.cost.tables import held_bytes
from partita.errors import FormatError, InvalidInputError
from partita.formats.annotations import kept_notes
from partita.formats.edge_list import labels, unlimited_level
from partita.formats.json_fields import (
    MAX_ID,
    Fields,
    as_integer,
    edge_ends,
    extra_columns,
    extra_of,
    format_errors,
    read_object,
    refuse,
    row_by_id,
    write_rows,
)
from partita.formats.milliseconds import MS_PER_S, milliseconds, seconds

FORMAT = "dnn-partitioning"
ACCELERATOR = "accelerator"
CPU = "cpu"
COST_TOLERANCE_MS = 1e-6
MAX_MS = MAX_SECONDS * MS_PER_S
_TIME_KEYS = ("cpuLatency", "fpgaLatency")
_NODE_KEYS = ("id", "supportedOnFpga", *_TIME_KEYS, "isBackwardNode", "colorClass", "size")
_EDGE_KEYS = ("sourceId", "destId", "cost", "size")
_FORBIDDEN = ("containedSubnodes", "containedNodes")
_TOP_KEYS = ("maxSizePerFPGA", "maxFPGAs", "maxCPUs", "nodes", "edges")


@format_errors()
def read_dnn_partitioning(
    text: str, *, name: str = FORMAT, metric: Metric = Metric.MAX_LOAD
) -> Problem:
    """Return the problem of an input.

    Args:
        text: The file.
        name: Name of the graph.
        metric: Metric to minimise: max-load, or single-sample-latency for the latency inputs.

    Raises:
        FormatError: A value is missing or out of range, an id or edge stands twice, the costs of
            the edges out of a node differ, an edge leads from backward to forward, or in a cycle.
    """
    document = read_object(text)
    nodes, edges = document.rows("nodes"), document.rows("edges")
    row_of = row_by_id(nodes)
    source, target = edge_ends(edges, row_of, ("sourceId", "destId"), once=True)
    backward = [_is_backward(node) for node in nodes]
    for edge, before, after in zip(edges, source, target, strict=True):
        if backward[before] and not backward[after]:
            raise FormatError(f"{edge.place} leads from a backward node to a forward node")
    notes: dict[str, Any] = {
        "nodes": extra_columns(nodes, _NODE_KEYS),
        "edges": extra_columns(edges, _EDGE_KEYS),
        "document": document.rest(_TOP_KEYS),
    }
    graph = Graph(
        name=name,
        ops=_op_table(nodes, backward, notes),
        costs=tuple(
            OpCosts(
                device_type=kind,
                forward_s=frozen_array(
                    [seconds(node.number(key, high=MAX_MS)) for node in nodes], np.float64
                ),
            )
            for kind, key in ((ACCELERATOR, "fpgaLatency"), (CPU, "cpuLatency"))
        ),
        tensors=_tensor_table(nodes, edges, source, notes),
        edges=EdgeTable(
            tensor=frozen_array(source, np.int32), reader=frozen_array(target, np.int32)
        ),
        outputs=frozen_array(sorted(set(range(len(nodes))) - set(source)), np.int32),
        sample_unit=SampleUnit.MINIBATCH,
        annotations={FORMAT: {key: value for key, value in notes.items() if value}},
    )
    return Problem(
        graph=graph,
        cluster=_cluster(document, name),
        objective=Objective(
            metric=metric,
            mode=Mode.TRAINING if any(backward) else Mode.INFERENCE,
            optimizer_bytes_per_element=0.0,
        ),
    )


def _is_backward(node: Fields) -> bool:
    for key in _FORBIDDEN:
        if key in node.values:
            raise FormatError(f"{node.at(key)}: contracted nodes are not supported")
    return "isBackwardNode" in node.values and node.flag("isBackwardNode")


def _op_table(nodes: Sequence[Fields], backward: Sequence[bool], notes: dict[str, Any]) -> OpTable:
    classes: dict[int, int] = {}
    colocation = [-1] * len(nodes)
    for row, node in enumerate(nodes):
        if node.values.get("colorClass") is not None:
            color = node.integer("colorClass", low=-MAX_ID)
            colocation[row] = classes.setdefault(color, len(classes))
    notes["color_classes"] = list(classes)
    layers = notes["nodes"].get("layerId", ())
    return OpTable(
        names=tuple(str(node.integer("id", low=-MAX_ID)) for node in nodes),
        saved_bytes=frozen_array(
            [node.number_or("size", 0.0, high=MAX_BYTES) for node in nodes], np.float64
        ),
        phase=frozen_array([Phase(is_backward) for is_backward in backward], np.int8),
        colocation=frozen_array(colocation, np.int32),
        device_kinds=frozen_array(
            [
                ANY_KIND if node.flag("supportedOnFpga") else KIND_BIT[DeviceKind.CPU]
                for node in nodes
            ],
            np.int8,
        ),
        layers=labels(["" if layer is None else str(layer) for layer in layers]),
    )


def _tensor_table(
    nodes: Sequence[Fields], edges: Sequence[Fields], source: Sequence[int], notes: dict[str, Any]
) -> TensorTable:
    cost_ms: list[float | None] = [None] * len(nodes)
    size = [0.0] * len(nodes)
    sizes = [edge.number_or("size", 0.0, high=MAX_BYTES) for edge in edges]
    for edge, op, num_bytes in zip(edges, source, sizes, strict=True):
        cost = edge.number("cost", high=MAX_MS)
        known = cost_ms[op]
        if known is not None and abs(known - cost) > COST_TOLERANCE_MS:
            raise FormatError(
                f"{edge.at('cost')} is {cost}, on another edge out of the same node {known}; "
                "expected equal costs on all edges out of a node"
            )
        cost_ms[op] = cost
        size[op] = max(size[op], num_bytes)
    if any(size[op] != num_bytes for op, num_bytes in zip(source, sizes, strict=True)):
        notes["edge_sizes"] = sizes
    return TensorTable(
        names=tuple(str(node.values["id"]) for node in nodes),
        producer=frozen_array(range(len(nodes)), np.int32),
        bytes=frozen_array(size, np.float64),
        transfer_s=frozen_array([seconds(cost or 0.0) for cost in cost_ms], np.float64),
    )


def _cluster(document: Fields, name: str) -> Cluster:
    accelerators = document.integer("maxFPGAs", high=MAX_DEVICES)
    cpus = document.integer("maxCPUs", high=MAX_DEVICES)
    memory = document.number("maxSizePerFPGA", high=MAX_BYTES)
    if not 1 <= accelerators + cpus <= MAX_DEVICES:
        raise FormatError(
            f"maxFPGAs and maxCPUs are {accelerators + cpus} devices; expected 1 to {MAX_DEVICES}"
        )
    devices = [
        Device(name=f"acc{i}", type=ACCELERATOR, memory_bytes=memory) for i in range(accelerators)
    ]
    devices += [Device(name=f"cpu{i}", kind=DeviceKind.CPU, type=CPU) for i in range(cpus)]
    return Cluster(name=name, devices=tuple(devices), levels=(unlimited_level(len(devices)),))


def write_dnn_partitioning(problem: Problem) -> str:
    """Return a problem as an input.

    A graph from elsewhere is written with ``size`` = saved bytes, parameters, gradients and
    optimizer state; latency = forward and (in training) backward time; cost = the time of the op's
    outputs at the bandwidth of the slowest level, twice in training. Ids are the rows of the ops
    unless their names are numbers. Inputs of the model are left out.

    Raises:
        InvalidInputError: Its accelerators differ, or it has no times for one of its devices.
    """
    graph, cluster = problem.graph, problem.cluster
    notes = kept_notes(graph, FORMAT)
    accelerator = _only(cluster, DeviceKind.GPU)
    cpu = _only(cluster, DeviceKind.CPU)
    times_s = (_latency_s(problem, cpu, CPU), _latency_s(problem, accelerator, ACCELERATOR))
    latency = dict(zip(_TIME_KEYS, times_s, strict=True))
    ids = op_ids(graph)
    size = _sizes(problem)
    classes = notes.get("color_classes", ())
    nodes = []
    for op, name in enumerate(graph.ops.names):
        node: dict[str, Any] = {} if ids[op] == name else {"name": name}
        node |= extra_of(notes.get("nodes", {}), op)
        node["id"] = int(ids[op])
        node["supportedOnFpga"] = bool(graph.ops.device_kinds[op] & KIND_BIT[DeviceKind.GPU])
        node |= {key: milliseconds(float(values[op])) for key, values in latency.items()}
        node["isBackwardNode"] = bool(graph.ops.phase[op])
        color = int(graph.ops.colocation[op])
        if color >= 0:
            node["colorClass"] = classes[color] if color < len(classes) else color
        node["size"] = float(size[op])
        nodes.append(node)
    gpus = [device for device in cluster.devices if device.kind is DeviceKind.GPU]
    memory = min((device.memory_bytes for device in gpus), default=MAX_BYTES)
    return write_rows(
        {
            **notes.get("document", {}),
            "maxSizePerFPGA": float(min(memory, MAX_BYTES)),
            "maxFPGAs": len(gpus),
            "maxCPUs": len(cluster) - len(gpus),
            "nodes": nodes,
            "edges": _edges(problem, ids, notes),
        }
    )


def _edges(problem: Problem, ids: Sequence[str], notes: Mapping[str, Any]) -> list[dict[str, Any]]:
    graph = problem.graph
    cost_s, num_bytes = _transfers(problem)
    sizes = notes.get("edge_sizes", ())
    seen: set[tuple[int, int]] = set()
    edges = []
    for row, (op, after) in enumerate(
        zip(graph.edge_source.tolist(), graph.edges.reader.tolist(), strict=True)
    ):
        if op < 0 or (op, after) in seen:
            continue
        seen.add((op, after))
        edges.append(
            {
                **extra_of(notes.get("edges", {}), row),
                "sourceId": int(ids[op]),
                "destId": int(ids[after]),
                "cost": milliseconds(cost_s[op]),
                "size": sizes[row] if row < len(sizes) else num_bytes[op],
            }
        )
    return edges


def op_ids(graph: Graph) -> list[str]:
    """Return the id of each op: its name where all names are whole numbers, else its row."""
    names = graph.ops.names
    if all(name.removeprefix("-").isdecimal() and name.isascii() for name in names) and all(
        len(name) <= 15 and str(int(name)) == name for name in names
    ):
        return list(names)
    return [str(row) for row in range(len(names))]


def _only(cluster: Cluster, kind: DeviceKind) -> Device | None:
    """Return the first device of a kind, if all of them are alike."""
    found = [device for device in cluster.devices if device.kind is kind]
    alike = {(device.type, device.memory_bytes, device.speed) for device in found}
    if len(alike) > 1 and kind is DeviceKind.GPU:
        raise InvalidInputError(
            f"cluster {cluster.name!r} has {len(alike)} sorts of accelerators; this format has one"
        )
    return found[0] if found else None


def _latency_s(problem: Problem, device: Device | None, default: str) -> Any:  # noqa: ANN401
    """Return the column of seconds of each op on a device, or on a type that is not there."""
    graph = problem.graph
    by_type = {costs.device_type: costs for costs in graph.costs}
    wanted = default if device is None else device.type
    costs = by_type.get(wanted) or by_type.get("")
    if costs is None and device is not None:
        raise InvalidInputError(f"graph {graph.name!r} has no times for device type {wanted!r}")
    costs = costs or graph.costs[0]
    training = problem.objective.mode is Mode.TRAINING
    total = costs.forward_s + costs.backward_s if training else costs.forward_s
    return total if device is None else total / device.speed


def _sizes(problem: Problem) -> Any:  # noqa: ANN401 (a column)
    graph, table = problem.graph, problem.graph.parameters
    held = held_bytes(table, problem.objective).total
    total = graph.ops.saved_bytes.copy()
    np.add.at(total, table.use_op, held[table.use_parameter])
    return total


def _transfers(problem: Problem) -> tuple[list[float], list[float]]:
    """Return seconds and bytes of the outputs of each op."""
    graph, cluster = problem.graph, problem.cluster
    tensors = graph.tensors
    rates = [level.bandwidth_bytes_per_s.min() for level in cluster.levels]
    if cluster.matrix is not None:
        rates.append(cluster.matrix.bandwidth_bytes_per_s.min())
    slowest = float(min(rates, default=np.inf))
    both_ways = problem.objective.mode is Mode.TRAINING and bool(graph.is_forward.all())
    computed = tensors.bytes / slowest * np.where(both_ways & tensors.differentiable, 2.0, 1.0)
    time_s = np.where(np.isnan(tensors.transfer_s), computed, tensors.transfer_s)
    made = tensors.producer >= 0
    op, count = tensors.producer[made], len(graph)
    return (
        np.bincount(op, weights=time_s[made], minlength=count).tolist(),
        np.bincount(op, weights=tensors.bytes[made], minlength=count).tolist(),
    )


MAX_NAMED = 5


@format_errors()
def read_split(text: str, problem: Problem) -> Plan:
    """Return the plan of a split.

    Raises:
        FormatError: A node is not there, stands twice or is not placed, or a device is not there.
    """
    document = read_object(text)
    row_of = {name: row for row, name in enumerate(op_ids(problem.graph))}
    if "assignment" in document.values:
        named = _assigned(document.object("assignment"), row_of)
    else:
        named = _listed(document, row_of)
    device_of = [-1] * len(problem.graph)
    devices = {kind: _devices(problem, kind) for kind in DeviceKind}
    for row, (kind, number, place) in named.items():
        if number >= len(devices[kind]):
            raise FormatError(
                f"{place} uses {kind.value} {number}; the problem has {len(devices[kind])} of them"
            )
        device_of[row] = devices[kind][number]
    _follow_colors(problem, device_of)
    missing = [problem.graph.ops.names[row] for row, one in enumerate(device_of) if one < 0]
    if missing:
        raise FormatError(
            f"{len(missing)} nodes are not placed, such as {', '.join(missing[:MAX_NAMED])}"
        )
    return placement_plan(
        problem.graph,
        problem.cluster.device_names,
        frozen_array(device_of, np.int32),
        schedule=problem.objective.placement_schedule,
    )


def _devices(problem: Problem, kind: DeviceKind) -> list[int]:
    devices = problem.cluster.devices
    return [index for index, device in enumerate(devices) if device.kind is kind]


_Named = Mapping[int, tuple[DeviceKind, int, str]]


def _listed(document: Fields, row_of: Mapping[str, int]) -> _Named:
    """Return kind, number and place for each row named in the lists of machines."""
    found: dict[int, tuple[DeviceKind, int, str]] = {}
    for key, kind in (("fpgas", DeviceKind.GPU), ("cpus", DeviceKind.CPU)):
        machines = document.rows(key) if key in document.values else []
        for number, machine in enumerate(machines):
            for item in machine.items("nodes"):
                place = machine.at("nodes")
                row = row_of.get(str(as_integer(item, place, low=-MAX_ID)))
                if row is None or row in found:
                    refuse(place, item, "the id of a node that is not placed before")
                found[row] = (kind, number, place)
    return found


def _assigned(assignment: Fields, row_of: Mapping[str, int]) -> _Named:
    found: dict[int, tuple[DeviceKind, int, str]] = {}
    for key, value in assignment.values.items():
        if key not in row_of:
            refuse("assignment", key, "the id of a node")
        found[row_of[key]] = (*_device(value, assignment.at(key)), assignment.at(key))
    return found


def _device(value: Any, place: str) -> tuple[DeviceKind, int]:  # noqa: ANN401 (JSON is any value)
    if isinstance(value, str):
        prefix, digits = value[:3], value[3:]
        kinds = {"acc": DeviceKind.GPU, "cpu": DeviceKind.CPU}
        if prefix in kinds and _is_short_number(digits):
            return kinds[prefix], int(digits)
        if not _is_short_number(value):
            refuse(place, value, "a device such as 'acc0', 'cpu0', 0 (the CPU) or 1 (acc0)")
        value = int(value)
    number = as_integer(value, place)
    return (DeviceKind.GPU, number - 1) if number else (DeviceKind.CPU, 0)


def _is_short_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


def _follow_colors(problem: Problem, device_of: list[int]) -> None:
    """Put ops that are not placed where an op of their colocation class is."""
    colors = problem.graph.ops.colocation.tolist()
    device_of_color = {
        color: device for color, device in zip(colors, device_of, strict=True) if device >= 0
    }
    for row, color in enumerate(colors):
        if device_of[row] < 0 and color >= 0:
            device_of[row] = device_of_color.get(color, -1)


def write_split(problem: Problem, plan: Plan) -> str:
    """Return a plan as a split, with an entry for every device of the problem.

    Raises:
        InvalidInputError: The plan does not fit the problem, or runs an op on several devices.
    """
    plan.check_fits(problem)
    if why := plan.why_not_placed():
        raise InvalidInputError(f"a split cannot hold the plan: {why}")
    ids = op_ids(problem.graph)
    nodes: dict[str, list[int]] = {name: [] for name in problem.cluster.device_names}
    for row, device in enumerate(plan.device_of.tolist()):
        nodes[plan.devices[device]].append(int(ids[row]))
    names = problem.cluster.device_names
    return write_rows(
        {
            key: [{"nodes": nodes[names[index]]} for index in _devices(problem, kind)]
            for key, kind in (("fpgas", DeviceKind.GPU), ("cpus", DeviceKind.CPU))
        }
    )
