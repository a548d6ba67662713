"""Max-load and single-sample latency: Tarnawski et al., NeurIPS 2020 (device placement of DNNs).

Every op is on one device. c_u is the time to move the whole output of op u between an accelerator
and the host. For an accelerator d with the ops S_d

    load(d) = Σ seconds of S_d + Σ c_u of u in S_d with a reader outside + Σ c_u of u outside with a
              reader in S_d

and a CPU's load is the seconds of its ops: CPUs never pay for communication. Max-load is the
largest load. Explicit backward ops count like others; a transfer belongs to the pass of its source.
Where training is implicit (ops have backward seconds of their own), gradients cost what activations
do.

Latency is of one sample, forward. All CPUs are one pool without limits, data is there at no cost.
An accelerator's ops are cut into pieces (piece of v = number of times that a path to v has entered
the accelerator), each piece one call: it waits for all its inputs, copies them in, computes and
copies out; all its results are there when it ends. Pieces of one accelerator may overlap unless
``serial``.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partita.core.columns import Flags, Floats, Ints, Longs, frozen_array, group_rows, sum_by
from partita.core.graph import DeviceKind, Graph
from partita.core.order import is_acyclic, topological_order
from partita.core.plan import Plan
from partita.core.problem import Metric, Mode, Problem
from partita.cost.tables import at_first_user, held_bytes
from partita.objectives.placed import (
    memory_errors,
    placement_errors,
    plan_devices,
    seconds_on,
)
from partita.objectives.value import Value, check_applies


class _Placed(NamedTuple):
    """Columns by op, and whether each device of the plan is an accelerator."""

    device_of: Ints
    seconds: Floats
    transfer_s: Floats
    source: Ints
    reader: Ints
    accelerator: Flags


def why_not_max_load(problem: Problem, plan: Plan) -> str | None:
    """Return why max-load does not apply, or ``None``."""
    return _why_no_transfer_time(problem) or plan.why_not_placed()


def why_not_latency(problem: Problem, plan: Plan) -> str | None:
    """Return why single-sample latency does not apply, or ``None``."""
    if not problem.graph.is_forward.all():
        return "the graph has explicit backward ops; the latency is of one forward pass"
    return why_not_max_load(problem, plan)


def _why_no_transfer_time(problem: Problem) -> str | None:
    graph = problem.graph
    unknown = np.isnan(graph.tensors.transfer_s[graph.edges.tensor]) & (graph.edge_source >= 0)
    if problem.cluster.matrix is not None and bool(unknown.any()):
        return "the cluster is a matrix of links, and not every tensor has a transfer time"
    return None


def transfer_seconds(problem: Problem) -> Floats:
    """Return the seconds to move the whole output of each op between an accelerator and the host.

    As the graph gives them (the largest of an op's tensors), else from bytes at the slowest level.
    """
    graph, cluster = problem.graph, problem.cluster
    made = graph.tensors.producer >= 0
    producer = graph.tensors.producer[made]
    given = graph.tensors.transfer_s[made]
    known = np.full(len(graph), np.nan)
    np.fmax.at(known, producer, given)
    rate, latency = math.inf, 0.0
    if cluster.levels:
        rate = min(level.slowest_bytes_per_s for level in cluster.levels)
        latency = max(float(level.latency_s.max()) for level in cluster.levels)
    size = sum_by(producer, graph.tensors.bytes[made], len(graph))
    return frozen_array(np.where(np.isnan(known), latency + size / rate, known), np.float64)


def _placed(problem: Problem, plan: Plan, mode: Mode) -> _Placed:
    graph = problem.graph
    devices = plan_devices(problem, plan)
    class_of, seconds = seconds_on(graph, devices, mode)
    inner = graph.edge_source >= 0
    return _Placed(
        plan.device_of,
        seconds[class_of[plan.device_of], np.arange(len(graph))],
        transfer_seconds(problem),
        graph.edge_source[inner],
        graph.edges.reader[inner],
        np.array([device.kind is not DeviceKind.CPU for device in devices]),
    )


def max_load(problem: Problem, plan: Plan) -> Value:
    """Return the largest load of a device, in seconds per sample.

    Details: ``loads_s`` by device, ``contiguous`` (no path of forward ops leaves a device and comes
    back), ``acyclic_quotient`` (forward data flows between devices without a cycle),
    ``diffmaxima_s`` (largest forward load plus largest backward load), ``devices`` used.

    Raises:
        InvalidInputError: The objective does not apply.
    """
    check_applies(Metric.MAX_LOAD, why_not_max_load(problem, plan))
    graph = problem.graph
    placed = _placed(problem, plan, problem.objective.mode)
    forward, backward = _loads(problem, plan, placed)
    load = forward + backward
    used = np.unique(placed.device_of)
    worst = used[int(np.argmax(load[used]))]
    both = graph.is_forward[placed.source] & graph.is_forward[placed.reader]
    edges = placed.device_of[placed.source[both]], placed.device_of[placed.reader[both]]
    cut = edges[0] != edges[1]
    return Value(
        metric=Metric.MAX_LOAD,
        value=float(load[worst]),
        bottleneck=f"device {plan.devices[worst]}",
        details={
            "loads_s": {plan.devices[device]: float(load[device]) for device in used.tolist()},
            "diffmaxima_s": float(forward[used].max() + backward[used].max()),
            "contiguous": _is_contiguous(graph, placed, both),
            "acyclic_quotient": is_acyclic(len(plan.devices), edges[0][cut], edges[1][cut]),
            "devices": len(used),
        },
        errors=_errors(problem, plan, placed, cpus_are_one=False),
    )


def _loads(problem: Problem, plan: Plan, placed: _Placed) -> tuple[Floats, Floats]:
    """Return the forward and the backward load of each device of the plan."""
    graph = problem.graph
    devices = plan_devices(problem, plan)
    count = len(devices)
    class_of, table = seconds_on(graph, devices, Mode.INFERENCE)
    first = table[class_of[placed.device_of], np.arange(len(graph))]
    second = placed.seconds - first
    implicit = bool(second.any())
    backward_op = ~graph.is_forward
    forward = sum_by(placed.device_of, np.where(backward_op, 0.0, first), count)
    backward = sum_by(placed.device_of, np.where(backward_op, placed.seconds, second), count)
    cut = placed.device_of[placed.source] != placed.device_of[placed.reader]
    source, reader = placed.source[cut], placed.reader[cut]
    ops = np.concatenate([source, source])
    ends = np.concatenate([placed.device_of[source], placed.device_of[reader]])
    pairs = np.unique(ops.astype(np.int64) * count + ends)
    ops, ends = pairs // count, pairs % count
    pays = np.where(placed.accelerator[ends], placed.transfer_s[ops], 0.0)
    late = backward_op[ops]
    forward += sum_by(ends, np.where(late, 0.0, pays), count)
    backward += sum_by(ends, np.where(late | implicit, pays, 0.0), count)
    return forward, backward


def _is_contiguous(graph: Graph, placed: _Placed, edges: Flags) -> bool:
    """Return whether no path of forward ops leaves a device and comes back.

    ``left[v]`` holds, as bits, the devices that some path to v was on and left.
    """
    pointers, rows = group_rows(placed.reader[edges], len(graph))
    sources = placed.source[edges][rows].tolist()
    begin = pointers.tolist()
    device = placed.device_of.tolist()
    left = [0] * len(graph)
    for op in graph.topological_order[graph.is_forward[graph.topological_order]].tolist():
        here, passed = device[op], 0
        for source in sources[begin[op] : begin[op + 1]]:
            passed |= left[source]
            if device[source] != here:
                passed |= 1 << device[source]
        if passed >> here & 1:
            return False
        left[op] = passed
    return True


def _errors(
    problem: Problem, plan: Plan, placed: _Placed, *, cpus_are_one: bool
) -> tuple[str, ...]:
    """Return broken constraints; only accelerators have a memory limit."""
    size = _device_bytes(problem, plan)
    need = {device: float(size[device]) for device in np.flatnonzero(placed.accelerator).tolist()}
    return (
        *placement_errors(problem, plan, cpus_are_one=cpus_are_one),
        *memory_errors(problem, plan, need),
    )


def _device_bytes(problem: Problem, plan: Plan) -> Floats:
    """Return what the ops of each device hold.

    A published graph gives the size of an op as its saved bytes and has no parameters; elsewhere
    parameters are added, each once per device, in training with gradients and optimizer state.
    """
    table, count = problem.graph.parameters, len(plan.devices)
    held = held_bytes(table, problem.objective).total
    users = plan.device_of[table.use_op].astype(np.int64)
    pairs = np.unique(table.use_parameter.astype(np.int64) * count + users)
    saved = sum_by(plan.device_of, problem.graph.ops.saved_bytes, count)
    return saved + sum_by(pairs % count, held[pairs // count], count)


def held_bytes_placed(problem: Problem) -> Floats:
    """Return what each op holds at least: as ``_device_bytes``, if it stood alone."""
    graph = problem.graph
    held = held_bytes(graph.parameters, problem.objective).total
    return graph.ops.saved_bytes + at_first_user(graph, held)


def single_sample_latency(problem: Problem, plan: Plan, *, serial: bool = False) -> Value:
    """Return the seconds from the start of one sample to its last result.

    Args:
        problem: The problem.
        plan: The plan.
        serial: Whether the pieces of one accelerator run one after another.

    Raises:
        InvalidInputError: The objective does not apply.
    """
    check_applies(Metric.SINGLE_SAMPLE_LATENCY, why_not_latency(problem, plan))
    placed = _placed(problem, plan, Mode.INFERENCE)
    errors = _errors(problem, plan, placed, cpus_are_one=True)
    block_of, piece_of = _blocks(problem.graph, placed)
    seconds = _block_seconds(placed, block_of)
    before, after = _block_edges(placed, block_of, piece_of, serial)
    on_accelerator = placed.accelerator[placed.device_of]
    details = {
        "pieces": len(np.unique(block_of[on_accelerator])),
        "accelerators": len(np.unique(placed.device_of[on_accelerator])),
        "ops_on_cpu": int((~on_accelerator).sum()),
    }
    if not is_acyclic(len(seconds), before, after):
        return Value(
            metric=Metric.SINGLE_SAMPLE_LATENCY,
            value=math.inf,
            bottleneck="calls that wait for one another",
            details=details,
            errors=(*errors, "cyclic dependency between accelerator calls"),
        )
    ends = _block_ends(seconds, before, after)
    last = int(np.flatnonzero(block_of == int(np.argmax(ends)))[0])
    name, device = problem.graph.ops.names[last], plan.devices[placed.device_of[last]]
    return Value(
        metric=Metric.SINGLE_SAMPLE_LATENCY,
        value=float(ends.max()),
        bottleneck=f"call with op {name!r} on {device}",
        details=details,
        errors=errors,
    )


def _blocks(graph: Graph, placed: _Placed) -> tuple[Longs, Longs]:
    """Return the block of each op (a piece of an accelerator, or one op on a CPU) and its piece."""
    count = len(placed.accelerator)
    entered = np.zeros((len(graph), count), dtype=np.int32)
    pointers, rows = group_rows(placed.reader, len(graph))
    sources = placed.source[rows]
    begin = pointers.tolist()
    device = placed.device_of.tolist()
    accelerator = placed.accelerator.tolist()
    for op in graph.topological_order.tolist():
        inputs = sources[begin[op] : begin[op + 1]]
        here = device[op]
        if len(inputs):
            known = entered[inputs]
            entered[op] = known.max(axis=0)
            if accelerator[here]:
                again = known[:, here] + (placed.device_of[inputs] != here)
                entered[op, here] = max(1, int(again.max()))
        elif accelerator[here]:
            entered[op, here] = 1
    ops = np.arange(len(graph))
    piece_of = entered[ops, placed.device_of].astype(np.int64)
    # A CPU op is a block of its own: its key is beyond those of all pieces.
    keys = np.where(
        placed.accelerator[placed.device_of],
        placed.device_of * (int(piece_of.max()) + 1) + piece_of,
        count * (int(piece_of.max()) + 1) + ops,
    )
    _, block_of = np.unique(keys, return_inverse=True)
    return block_of.astype(np.int64), piece_of


def _block_seconds(placed: _Placed, block_of: Longs) -> Floats:
    """Return the seconds of each block: copies in, compute, copies out; no copies on a CPU."""
    count = int(block_of.max()) + 1
    seconds = sum_by(block_of, placed.seconds, count)
    cut = block_of[placed.source] != block_of[placed.reader]
    source, reader = placed.source[cut], placed.reader[cut]
    ops = np.concatenate([source, source]).astype(np.int64)
    ends = np.concatenate([block_of[source], block_of[reader]])
    pairs = np.unique(ops * count + ends)
    ops, ends = pairs // count, pairs % count
    calls = np.zeros(count, dtype=bool)
    calls[block_of[placed.accelerator[placed.device_of]]] = True
    pays = np.where(calls[ends], placed.transfer_s[ops], 0.0)
    return seconds + sum_by(ends, pays, count)


def _block_edges(
    placed: _Placed, block_of: Longs, piece_of: Longs, serial: bool
) -> tuple[NDArray[Any], NDArray[Any]]:
    source, reader = block_of[placed.source], block_of[placed.reader]
    cut = source != reader
    source, reader = source[cut], reader[cut]
    if serial:
        ops = np.flatnonzero(placed.accelerator[placed.device_of])
        rows = np.unique(np.stack([placed.device_of[ops], piece_of[ops], block_of[ops]]), axis=1)
        follows = rows[0, 1:] == rows[0, :-1]
        source = np.concatenate([source, rows[2, :-1][follows]])
        reader = np.concatenate([reader, rows[2, 1:][follows]])
    return source, reader


def _block_ends(seconds: Floats, before: NDArray[Any], after: NDArray[Any]) -> Floats:
    """Return when each block ends: the longest path to it."""
    names = [""] * len(seconds)
    pointers, rows = group_rows(before, len(seconds))
    targets = after[rows].tolist()
    begin = pointers.tolist()
    lengths = seconds.tolist()
    ready = [0.0] * len(seconds)
    for block in topological_order(len(seconds), before, after, names).tolist():
        end = ready[block] + lengths[block]
        for target in targets[begin[block] : begin[block + 1]]:
            ready[target] = max(ready[target], end)
        ready[block] = end
    return np.array(ready)
