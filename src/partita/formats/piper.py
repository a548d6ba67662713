"""Inputs of Piper, as JSON.

Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization",
NeurIPS 2021. An input has ``maxMemoryPerDevice``, ``maxDevices``, ``bandwidth``, ``mbsInBatch``,
``nodes`` and ``edges``; a node has options ("TMPCs") for each tensor-parallel degree. How a Problem
holds it:

* An op is named by its node's id. Each option is a row of ``graph.variants``: with ``recompute``
  for ``"activation recomp"``, without for ``"vanilla"``. ``memoryUsageA`` is ``saved_bytes``,
  ``memoryUsageB`` is ``fixed_memory_bytes``; ``syncTimeFw`` and ``syncTimeBw`` are bytes, by
  in-edge and by out-edge of the op.
* ``timePerSample`` is forward and backward together: a third is forward, the rest is backward, and
  their sum is again exactly the time of the file.
* The reference costs, saved bytes and parameter (``<id>.weight``) of an op are those of its vanilla
  option without tensor parallelism, or of the smallest degree that there is.
* Edges out of a node may carry different bytes; each number of bytes is a tensor of its own.
* ``maxDevices`` equal devices with ``maxMemoryPerDevice`` bytes, each with a port of ``bandwidth``.

One batch of the graph is one of the ``mbsInBatch`` microbatches. Times are taken as they stand: the
published ResNet file has milliseconds, which its objective adds to seconds of communication.

Plans of Piper, as JSON: ``{"stages": [...]}`` in the order of the pipeline.

A stage has ``nodes``, ``dataParallelDegree`` (replicas), ``tensorParallelDegree`` and, for each
node, the option that it runs (``TMPCids``). Devices are not named: the stages take those of the
problem in their order.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from partita.core.cluster import MAX_DEVICES, Cluster, Device, Level
from partita.core.columns import MAX_BYTES, MAX_SECONDS, frozen_array
from partita.core.graph import Graph, OpCosts, OpTable, SampleUnit, VariantTable
from partita.core.plan import Plan, Stage, equal_microbatches
from partita.core.problem import Metric, Objective, Problem, Schedule
from partita.cost.tables import at_each_user, held_bytes
from partita.errors import FormatError, InvalidInputError
from partita.formats.annotations import kept_notes
from partita.formats.dnn_partitioning import op_ids
from partita.formats.edge_list import weights, wire
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

FORMAT = "piper"
RECOMPUTE_OF_OPTION = {"vanilla": False, "activation recomp": True}
OPTION_OF_RECOMPUTE = {flag: name for name, flag in RECOMPUTE_OF_OPTION.items()}
MAX_MICROBATCHES = 10_000_000
_TOP_KEYS = ("maxDevices", "maxMemoryPerDevice", "bandwidth", "mbsInBatch", "nodes", "edges")
_EDGE_KEYS = ("sourceId", "destId", "communicationCost")
_SYNC_KEYS = ("syncTimeFw", "syncTimeBw")


class _Option(NamedTuple):
    """One way to run a node."""

    op: int
    tp: int
    recompute: bool
    time_s: float
    parameter_bytes: float
    saved_bytes: float
    fixed_bytes: float
    sync_in: list[float]
    sync_out: list[float]


@format_errors()
def read_piper(
    text: str,
    *,
    name: str = FORMAT,
    devices: int | None = None,
    memory_bytes: float | None = None,
    microbatches: int | None = None,
    bandwidth_bytes_per_s: float | None = None,
) -> Problem:
    """Return the problem of an input.

    Args:
        text: The file.
        name: Name of the graph.
        devices: Number of devices instead of that in the file.
        memory_bytes: Memory of a device instead of that in the file.
        microbatches: Microbatches in a batch instead of those in the file.
        bandwidth_bytes_per_s: Bandwidth out of a device instead of that in the file.

    Raises:
        FormatError: A value is missing or out of range, an id, edge or option stands twice, an
            option is not known, lacks an edge of its node, or the edges make a cycle.
    """
    document = read_object(text)
    nodes, edges = document.rows("nodes"), document.rows("edges")
    row_of = row_by_id(nodes)
    source, target = edge_ends(edges, row_of, ("sourceId", "destId"), once=True)
    ids = [node.integer("id", low=-MAX_ID) for node in nodes]
    before: list[list[int]] = [[] for _ in nodes]
    after: list[list[int]] = [[] for _ in nodes]
    for start, end in zip(source, target, strict=True):
        before[end].append(ids[start])
        after[start].append(ids[end])
    options = [
        option
        for op, node in enumerate(nodes)
        for option in _options(op, node, before[op], after[op])
    ]
    extra = {
        "nodes": extra_columns(nodes, ("id", "TMPCs")),
        "edges": extra_columns(edges, _EDGE_KEYS),
        "document": document.rest(_TOP_KEYS),
    }
    sizes = [edge.number("communicationCost", high=MAX_BYTES) for edge in edges]
    batch = document.integer("mbsInBatch", low=1, high=MAX_MICROBATCHES)
    given = (devices, memory_bytes, bandwidth_bytes_per_s)
    return Problem(
        graph=_graph(name, ids, options, (source, target, sizes), extra),
        cluster=_cluster(document, name, given),
        objective=Objective(
            metric=Metric.PIPER,
            microbatches=batch if microbatches is None else microbatches,
            optimizer_bytes_per_element=0.0,
        ),
    )


def _graph(
    name: str,
    ids: Sequence[int],
    options: Sequence[_Option],
    edges: tuple[list[int], list[int], list[float]],
    extra: Mapping[str, Any],
) -> Graph:
    names = tuple(map(str, ids))
    source, target, sizes = edges
    reference = _references(len(names), options)
    split = [_split(option.time_s) for option in reference]
    wiring = wire(
        names,
        source,
        target,
        num_bytes=sizes,
        transfer_s=[np.nan] * len(sizes),
        unread_bytes=[0.0] * len(names),
    )
    return Graph(
        name=name,
        ops=OpTable(
            names=names,
            saved_bytes=frozen_array([one.saved_bytes for one in reference], np.float64),
        ),
        costs=(
            OpCosts(
                forward_s=frozen_array([part[0] for part in split], np.float64),
                backward_s=frozen_array([part[1] for part in split], np.float64),
            ),
        ),
        tensors=wiring.tensors,
        edges=wiring.edges,
        outputs=wiring.outputs,
        parameters=weights(names, [option.parameter_bytes for option in reference]),
        variants=_variants(options),
        sample_unit=SampleUnit.MINIBATCH,
        annotations={FORMAT: {key: value for key, value in extra.items() if value}},
    )


def _options(op: int, node: Fields, before: list[int], after: list[int]) -> list[_Option]:
    found: list[_Option] = []
    by_degree = node.object("TMPCs")
    for degree in by_degree.values:
        place = by_degree.at(degree)
        if not (degree.isascii() and degree.isdigit()) or len(degree) > 9:
            refuse(place, degree, "a tensor-parallel degree such as '2'")
        tp = as_integer(int(degree), place, low=1)
        for row in by_degree.rows(degree):
            kind = row.need("id")
            if not isinstance(kind, str) or kind not in RECOMPUTE_OF_OPTION:
                refuse(row.at("id"), kind, " or ".join(map(repr, RECOMPUTE_OF_OPTION)))
            found.append(
                _Option(
                    op=op,
                    tp=tp,
                    recompute=RECOMPUTE_OF_OPTION[kind],
                    time_s=row.number("timePerSample", high=MAX_SECONDS),
                    parameter_bytes=row.number("parameterSize", high=MAX_BYTES),
                    saved_bytes=row.number("memoryUsageA", high=MAX_BYTES),
                    fixed_bytes=row.number("memoryUsageB", high=MAX_BYTES),
                    sync_in=_syncs(row.object("syncTimeFw"), before),
                    sync_out=_syncs(row.object("syncTimeBw"), after),
                )
            )
    if not found:
        raise FormatError(f"{by_degree.place} has no option; expected one for at least one degree")
    keys = [(option.tp, option.recompute) for option in found]
    if len(set(keys)) < len(keys):
        raise FormatError(f"{by_degree.place} has an option twice for one degree")
    return found


def _syncs(row: Fields, neighbours: list[int]) -> list[float]:
    """Return the bytes of each neighbour, which must be all that the row has."""
    values = [row.number(str(neighbour), high=MAX_BYTES) for neighbour in neighbours]
    if len(row.values) != len(neighbours):
        known = set(map(str, neighbours))
        odd = next(key for key in row.values if key not in known)
        refuse(row.place, odd, "only the ids of nodes on the other end of an edge")
    return values


def _split(time_s: float) -> tuple[float, float]:
    """Return a third and the rest; their sum is exact, because the difference from b is."""
    backward_s = time_s - time_s / 3
    return time_s - backward_s, backward_s


def _references(num_ops: int, options: Sequence[_Option]) -> list[_Option]:
    best: list[_Option | None] = [None] * num_ops
    for option in options:
        known = best[option.op]
        if known is None or (option.tp, option.recompute) < (known.tp, known.recompute):
            best[option.op] = option
    return [option for option in best if option is not None]


def _variants(options: Sequence[_Option]) -> VariantTable:
    split = [_split(option.time_s) for option in options]

    def pointers(lengths: Sequence[int]) -> Any:  # noqa: ANN401 (a column)
        return frozen_array(np.cumsum([0, *lengths]), np.int32)

    return VariantTable(
        op=frozen_array([option.op for option in options], np.int32),
        tp=frozen_array([option.tp for option in options], np.int32),
        recompute=frozen_array([option.recompute for option in options], np.bool_),
        forward_s=frozen_array([part[0] for part in split], np.float64),
        backward_s=frozen_array([part[1] for part in split], np.float64),
        parameter_bytes=frozen_array([option.parameter_bytes for option in options], np.float64),
        saved_bytes=frozen_array([option.saved_bytes for option in options], np.float64),
        fixed_memory_bytes=frozen_array([option.fixed_bytes for option in options], np.float64),
        sync_in_ptr=pointers([len(option.sync_in) for option in options]),
        sync_in_bytes=frozen_array([v for option in options for v in option.sync_in], np.float64),
        sync_out_ptr=pointers([len(option.sync_out) for option in options]),
        sync_out_bytes=frozen_array([v for option in options for v in option.sync_out], np.float64),
    )


def _cluster(
    document: Fields, name: str, given: tuple[int | None, float | None, float | None]
) -> Cluster:
    in_file = (
        document.integer("maxDevices", low=1, high=MAX_DEVICES),
        document.number("maxMemoryPerDevice", high=MAX_BYTES),
        document.number("bandwidth", high=MAX_BYTES),
    )
    devices, memory, bandwidth = (
        value if other is None else other for value, other in zip(in_file, given, strict=True)
    )
    count = int(devices)
    if not 1 <= count <= MAX_DEVICES:
        raise InvalidInputError(f"{count} devices; expected 1 to {MAX_DEVICES}")
    return Cluster(
        name=name,
        devices=tuple(
            Device(name=f"host0/gpu{index}", memory_bytes=float(memory)) for index in range(count)
        ),
        levels=(
            Level(
                name="host",
                group_of=frozen_array(np.zeros(count), np.int32),
                bandwidth_bytes_per_s=frozen_array([bandwidth], np.float64),
                port_per_device=True,
            ),
        ),
    )


def write_piper(problem: Problem) -> str:
    """Return a problem as an input.

    A graph without variants is written with one option a node: ``vanilla`` without tensor
    parallelism, ``memoryUsageA`` = saved bytes, ``memoryUsageB`` = parameters, gradients and
    optimizer state. Inputs of the model are left out.

    Raises:
        InvalidInputError: The format cannot say it: explicit backward ops, devices that differ, or
            links that are not one level.
    """
    graph, cluster = problem.graph, problem.cluster
    alike = {(device.type, device.speed, device.memory_bytes) for device in cluster.devices}
    if len(alike) > 1 or cluster.matrix is not None or len(cluster.levels) != 1:
        raise InvalidInputError(
            f"cluster {cluster.name!r} is not a number of equal devices at one level of links"
        )
    if not graph.is_forward.all():
        raise InvalidInputError(f"graph {graph.name!r} has explicit backward ops")
    notes = kept_notes(graph, FORMAT)
    ids = op_ids(graph)
    variants = graph.variants if len(graph.variants) else _plain_variants(problem)
    options = _written_options(graph, variants, ids)
    memory = cluster.devices[0].memory_bytes
    return write_rows(
        {
            **notes.get("document", {}),
            "maxDevices": len(cluster),
            "maxMemoryPerDevice": float(min(memory, MAX_BYTES)),
            "bandwidth": float(min(cluster.levels[0].bandwidth_bytes_per_s.min(), MAX_BYTES)),
            "mbsInBatch": problem.objective.microbatches or 1,
            "nodes": [
                {
                    "id": int(ids[op]),
                    **({} if ids[op] == name else {"name": name}),
                    **extra_of(notes.get("nodes", {}), op),
                    "TMPCs": options[op],
                }
                for op, name in enumerate(graph.ops.names)
            ],
            "edges": _written_edges(graph, ids, notes.get("edges", {})),
        }
    )


def _written_edges(
    graph: Graph, ids: Sequence[str], extra: Mapping[str, Sequence[Any]]
) -> list[dict[str, Any]]:
    """Return an edge for each pair of ops, with the bytes of all tensors that pass between them."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    seen: set[tuple[int, int]] = set()
    tensors = graph.edges.tensor.tolist()
    pairs = zip(graph.edge_source.tolist(), graph.edges.reader.tolist(), strict=True)
    for row, (before, after) in enumerate(pairs):
        if before < 0 or (tensors[row], after) in seen:
            continue
        seen.add((tensors[row], after))
        edge = found.setdefault(
            (before, after),
            {
                **extra_of(extra, row),
                "sourceId": int(ids[before]),
                "destId": int(ids[after]),
                "communicationCost": 0.0,
            },
        )
        edge["communicationCost"] += float(graph.tensors.bytes[tensors[row]])
    return list(found.values())


def _plain_variants(problem: Problem) -> VariantTable:
    graph = problem.graph
    fixed = at_each_user(graph, held_bytes(graph.parameters, problem.objective).total)
    return VariantTable(
        op=frozen_array(range(len(graph)), np.int32),
        forward_s=graph.forward_s,
        backward_s=graph.backward_s,
        parameter_bytes=graph.parameter_bytes,
        saved_bytes=graph.ops.saved_bytes,
        fixed_memory_bytes=frozen_array(fixed, np.float64),
    )


def _written_options(
    graph: Graph, variants: VariantTable, ids: Sequence[str]
) -> list[dict[str, list[dict[str, Any]]]]:
    found: list[dict[str, list[dict[str, Any]]]] = [{} for _ in range(len(graph))]
    sides = (graph.in_edges, graph.out_edges)
    columns = (
        (variants.sync_in_ptr, variants.sync_in_bytes),
        (variants.sync_out_ptr, variants.sync_out_bytes),
    )
    ends = (graph.edge_source, graph.edges.reader)
    for row, op in enumerate(variants.op.tolist()):
        option: dict[str, Any] = {
            "id": OPTION_OF_RECOMPUTE[bool(variants.recompute[row])],
            "timePerSample": float(variants.forward_s[row] + variants.backward_s[row]),
            "parameterSize": float(variants.parameter_bytes[row]),
            "memoryUsageA": float(variants.saved_bytes[row]),
            "memoryUsageB": float(variants.fixed_memory_bytes[row]),
        }
        for key, (begin, edges), (ptr, values), end in zip(
            _SYNC_KEYS, sides, columns, ends, strict=True
        ):
            there = end[edges[begin[op] : begin[op + 1]]].tolist()
            amounts = values[ptr[row] : ptr[row + 1]].tolist() or [0.0] * len(there)
            option[key] = {
                ids[other]: amount
                for other, amount in zip(there, amounts, strict=True)
                if other >= 0
            }
        found[op].setdefault(str(variants.tp[row]), []).append(option)
    return found


@format_errors()
def read_piper_plan(text: str, problem: Problem) -> Plan:
    """Return the plan of a list of stages, for the microbatches of the problem (else the fewest).

    Raises:
        FormatError: A node is not there, stands twice or is missing, an option is not one of the
            node's, or there are too few devices or a degree that does not divide the microbatches.
    """
    rows = read_object(text).rows("stages")
    row_of = {name: row for row, name in enumerate(op_ids(problem.graph))}
    stage_of = [-1] * len(problem.graph)
    recompute = [False] * len(problem.graph)
    stages: list[Stage] = []
    used = 0
    for number, row in enumerate(rows):
        replicas = row.integer("dataParallelDegree", low=1)
        tp = row.integer("tensorParallelDegree", low=1)
        if used + replicas * tp > len(problem.cluster):
            raise FormatError(
                f"{row.place} needs devices {used} to {used + replicas * tp - 1}; "
                f"the problem has {len(problem.cluster)}"
            )
        stages.append(_stage(used, replicas, tp))
        used += replicas * tp
        for op, flag in _ops(row, row_of, problem, tp).items():
            if stage_of[op] >= 0:
                refuse(row.at("nodes"), problem.graph.ops.names[op], "each node once")
            stage_of[op], recompute[op] = number, flag
    missing = [name for name, stage in zip(row_of, stage_of, strict=True) if stage < 0]
    if missing:
        raise FormatError(f"{len(missing)} nodes are in no stage, such as {missing[0]}")
    microbatches = problem.objective.microbatches or int(np.lcm.reduce([s.round for s in stages]))
    plan = Plan(
        fingerprint=problem.graph.fingerprint,
        devices=problem.cluster.device_names[:used],
        stage_of=frozen_array(stage_of, np.int32),
        stages=tuple(stages),
        schedule=Schedule.ONE_F_ONE_B,
        microbatch_sizes=equal_microbatches(microbatches, problem.microbatch_size),
        recompute=frozen_array(recompute, np.bool_),
    )
    plan.check_fits(problem)
    return plan


def _stage(first: int, replicas: int, tp: int) -> Stage:
    groups = [
        range(first + replica * tp, first + (replica + 1) * tp) for replica in range(replicas)
    ]
    return Stage(devices=tuple(tuple(group) for group in groups))


def _ops(row: Fields, row_of: Mapping[str, int], problem: Problem, tp: int) -> dict[int, bool]:
    """Return the ops of a stage and whether each recomputes."""
    options = row.object("TMPCids") if "TMPCids" in row.values else Fields({}, row.at("TMPCids"))
    variants = problem.graph.variants
    found: dict[int, bool] = {}
    for item in row.items("nodes"):
        name = str(as_integer(item, row.at("nodes"), low=-MAX_ID))
        if name not in row_of or row_of[name] in found:
            refuse(row.at("nodes"), item, "the id of a node, each once")
        option = options.text_or(name, OPTION_OF_RECOMPUTE[False])
        if option not in RECOMPUTE_OF_OPTION:
            refuse(options.at(name), option, " or ".join(map(repr, RECOMPUTE_OF_OPTION)))
        recompute = RECOMPUTE_OF_OPTION[option]
        if len(variants) and (row_of[name], tp, recompute) not in variants.row_of:
            raise FormatError(
                f"{row.place}: node {name} has no option {option!r} for tensor-parallel degree {tp}"
            )
        found[row_of[name]] = recompute
    return found


def write_piper_plan(problem: Problem, plan: Plan) -> str:
    """Return a plan as a list of stages.

    Raises:
        InvalidInputError: The plan does not fit the problem, gives replicas uneven shares, or runs
            two stages on one device.
    """
    plan.check_fits(problem)
    flat = [device for stage in plan.stages for group in stage.devices for device in group]
    if len(set(flat)) < len(flat):
        raise InvalidInputError("a Piper plan has one stage for each device; here one has several")
    if any(len(set(stage.shares)) > 1 for stage in plan.stages):
        raise InvalidInputError("a Piper plan shares microbatches evenly; here shares differ")
    ids = op_ids(problem.graph)
    ops: list[list[int]] = [[] for _ in plan.stages]
    for op, stage in enumerate(plan.stage_of.tolist()):
        ops[stage].append(op)
    return write_rows(
        {
            "stages": [
                {
                    "nodes": [int(ids[op]) for op in members],
                    "dataParallelDegree": stage.num_replicas,
                    "tensorParallelDegree": stage.tp,
                    "TMPCids": {
                        ids[op]: OPTION_OF_RECOMPUTE[bool(plan.recompute[op])] for op in members
                    },
                }
                for stage, members in zip(plan.stages, ops, strict=True)
            ]
        }
    )
