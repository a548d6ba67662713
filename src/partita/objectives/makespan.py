"""Baechi's makespan: when the last forward op ends, with parallel or with sequential channels.

Jeon et al., "Baechi: Fast Device Placement of Machine Learning Graphs", SoCC 2020. Every op is on
one device; a device runs its ops one at a time, in one global order given by the numbers of the
stages. Inside a stage ops run along the data; the op with remote inputs goes first and the one with
remote readers last where the data allows it, as ``core.placement`` cuts them; other ties by the
graph's order.

* parallel (the PyTorch version): a transfer starts when its producer ends, any number at a time.
* sequential (the TensorFlow version): each device has one channel for sends and receives. When an
  op is committed, what it lacks is fetched, in the order of its arguments:

      send = max(end of producer, channel of source)        channel of source = send + t
      receive = max(send, channel of target)                channel of target = receive + t

  which is the arrival. A tensor is fetched once by a device, or, with ``per_edge``, once for each
  edge, as in graphs whose tensors are named by edge.

Memory follows the rules of Baechi for PyTorch, where every parameter is trained and there is no
optimizer. An op keeps ``permanent`` bytes (parameters, their gradients, what forward saves), needs
``temporary`` bytes (workspace) while it runs, and copies of its remote inputs stay on its device;
in the parallel version each edge from another device is a copy. Nothing is ever released. Op by op,
in the order of commitment, with ``copies`` the bytes that op v fetches:

    fits:   used + copies + permanent + temporary <= limit,   peak + copies + parameters <= limit
    then:   peak = max(peak, used + permanent + temporary);   used += permanent
            peak = max(peak, used + copies);                  used += copies

where parameters include gradients. The recorded peak leaves out copies and workspace together.
"""

import heapq
from typing import NamedTuple

import numpy as np

from partita.core.columns import Floats, Ints, Longs, group_rows, sum_by
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.problem import Metric, Mode, Problem
from partita.cost.durations import cluster_devices
from partita.cost.links import transfer_s
from partita.cost.memory import memory_limits
from partita.objectives.placed import (
    placement_errors,
    plan_devices,
    seconds_on,
)
from partita.objectives.value import Value, check_applies


class OpTimes(NamedTuple):
    """Times at which the forward ops run.

    Attributes:
        order: The forward ops in the order they are committed.
        start_s: Start of each op of the graph; NaN for explicit backward ops.
        end_s: End of each op.
        copied_bytes: Bytes that each op fetched from other devices.
        transfers: Number of transfers between devices.
    """

    order: Longs
    start_s: Floats
    end_s: Floats
    copied_bytes: Floats
    transfers: int


def why_not_makespan(problem: Problem, plan: Plan) -> str | None:
    """Return why the makespan does not apply, or ``None``."""
    if not bool(problem.graph.is_forward.any()):
        return "the graph has no forward op"
    return plan.why_not_placed()


def makespan_parallel(problem: Problem, plan: Plan) -> Value:
    """Return the seconds until the last forward op ends, transfers in parallel.

    Raises:
        InvalidInputError: The objective does not apply.
    """
    check_applies(Metric.MAKESPAN_PARALLEL, why_not_makespan(problem, plan))
    return _value(problem, plan, Metric.MAKESPAN_PARALLEL, parallel_times(problem, plan))


def makespan_sequential(problem: Problem, plan: Plan, *, per_edge: bool = False) -> Value:
    """Return the seconds until the last forward op ends, one channel for each device.

    Args:
        problem: The problem.
        plan: The plan.
        per_edge: Whether a tensor is sent again for each edge into a device.

    Raises:
        InvalidInputError: The objective does not apply.
    """
    check_applies(Metric.MAKESPAN_SEQUENTIAL, why_not_makespan(problem, plan))
    times = sequential_times(problem, plan, per_edge=per_edge)
    return _value(problem, plan, Metric.MAKESPAN_SEQUENTIAL, times)


class _Walk(NamedTuple):
    """Input of a walk over the ops: plain lists, because it goes op by op."""

    order: list[int]
    device_of: list[int]
    seconds: list[float]
    begin: list[int]
    source: list[int]
    tensor: list[int]
    size_bytes: list[float]
    transfer_s: list[float]


def _walk(problem: Problem, plan: Plan) -> _Walk:
    graph = problem.graph
    class_of, seconds = seconds_on(graph, plan_devices(problem, plan), Mode.INFERENCE)
    op_seconds = seconds[class_of[plan.device_of], np.arange(len(graph))]
    edges = _forward_edges(graph)
    pointers, rows = group_rows(graph.edges.reader[edges], len(graph))
    edges = edges[rows]
    source, reader = graph.edge_source[edges], graph.edges.reader[edges]
    tensor = graph.edges.tensor[edges]
    place = cluster_devices(problem, plan.devices)[plan.device_of]
    seconds_of_edge = transfer_s(
        problem.cluster,
        *(place[source], place[reader]),
        *(graph.tensors.bytes[tensor], graph.tensors.transfer_s[tensor]),
    )
    return _Walk(
        commit_order(graph, plan).tolist(),
        plan.device_of.tolist(),
        op_seconds.tolist(),
        pointers.tolist(),
        source.tolist(),
        tensor.tolist(),
        graph.tensors.bytes[tensor].tolist(),
        seconds_of_edge.tolist(),
    )


def _forward_edges(graph: Graph) -> Longs:
    """Return the edges between forward ops, in the order of each reader's arguments."""
    edges = np.flatnonzero(graph.edge_source >= 0)
    both = graph.is_forward[graph.edge_source[edges]] & graph.is_forward[graph.edges.reader[edges]]
    return edges[both]


def commit_order(graph: Graph, plan: Plan) -> Longs:
    """Return the forward ops by stage, inside a stage as the module says."""
    edges = _forward_edges(graph)
    source, reader = graph.edge_source[edges], graph.edges.reader[edges]
    remote = plan.device_of[source] != plan.device_of[reader]
    rank = np.ones(len(graph), dtype=np.int64)
    rank[source[remote]] = 2
    rank[reader[remote]] = 0
    position = np.empty(len(graph), dtype=np.int64)
    position[graph.topological_order] = np.arange(len(graph))
    key = (plan.stage_of * 3 + rank) * len(graph) + position
    forward = np.flatnonzero(graph.is_forward)
    if bool((key[source] < key[reader]).all()):
        return forward[np.argsort(key[forward])]
    return _smallest_first(graph, key, source, reader)


def _smallest_first(graph: Graph, key: Longs, source: Ints, reader: Ints) -> Longs:
    """Return the forward ops along the data, at each step the one with the smallest key."""
    pointers, rows = group_rows(source, len(graph))
    readers = reader[rows].tolist()
    begin = pointers.tolist()
    waiting = np.bincount(reader, minlength=len(graph)).tolist()
    op_of = {int(key[op]): op for op in np.flatnonzero(graph.is_forward).tolist()}
    keys = key.tolist()
    ready = [number for number, op in op_of.items() if not waiting[op]]
    heapq.heapify(ready)
    order = []
    while ready:
        op = op_of[heapq.heappop(ready)]
        order.append(op)
        for after in readers[begin[op] : begin[op + 1]]:
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(ready, keys[after])
    return np.array(order, dtype=np.int64)


def parallel_times(problem: Problem, plan: Plan) -> OpTimes:
    """Return when the ops run if transfers do not hinder one another; each edge is a transfer."""
    walk = _walk(problem, plan)
    free = [0.0] * len(plan.devices)
    start, end = _unknown(problem), _unknown(problem)
    copied = [0.0] * len(problem.graph)
    transfers = 0
    for op in walk.order:
        device = walk.device_of[op]
        at = free[device]
        for row in range(walk.begin[op], walk.begin[op + 1]):
            source = walk.source[row]
            arrival = end[source]
            if walk.device_of[source] != device:
                arrival += walk.transfer_s[row]
                copied[op] += walk.size_bytes[row]
                transfers += 1
            at = max(at, arrival)
        start[op] = at
        end[op] = free[device] = at + walk.seconds[op]
    return _op_times(walk.order, start, end, copied, transfers)


def sequential_times(problem: Problem, plan: Plan, *, per_edge: bool = False) -> OpTimes:
    """Return when the ops run if each device has one channel."""
    walk = _walk(problem, plan)
    free = [0.0] * len(plan.devices)
    channel = [0.0] * len(plan.devices)
    start, end = _unknown(problem), _unknown(problem)
    copied = [0.0] * len(problem.graph)
    arrival_of: dict[tuple[int, int], float] = {}
    for op in walk.order:
        device = walk.device_of[op]
        at = free[device]
        for row in range(walk.begin[op], walk.begin[op + 1]):
            source = walk.source[row]
            other = walk.device_of[source]
            if other == device:
                at = max(at, end[source])
                continue
            key = (row, device) if per_edge else (walk.tensor[row], device)
            if key not in arrival_of:
                seconds = walk.transfer_s[row]
                send = max(end[source], channel[other])
                channel[other] = send + seconds
                channel[device] = max(send, channel[device]) + seconds
                arrival_of[key] = channel[device]
                copied[op] += walk.size_bytes[row]
            at = max(at, arrival_of[key])
        start[op] = at
        end[op] = free[device] = at + walk.seconds[op]
    return _op_times(walk.order, start, end, copied, len(arrival_of))


def _op_times(
    order: list[int], start: list[float], end: list[float], copied: list[float], transfers: int
) -> OpTimes:
    columns = np.array(start), np.array(end), np.array(copied)
    return OpTimes(np.array(order, dtype=np.int64), *columns, transfers)


def _unknown(problem: Problem) -> list[float]:
    return [float("nan")] * len(problem.graph)


def _value(problem: Problem, plan: Plan, metric: Metric, times: OpTimes) -> Value:
    ends = times.end_s[times.order]
    last = int(times.order[int(np.argmax(ends))])
    device_of = plan.device_of[times.order]
    busy = sum_by(device_of, ends - times.start_s[times.order], len(plan.devices))
    used = np.unique(device_of).tolist()
    name = problem.graph.ops.names[last]
    memory = footprint(problem, plan, times.order, times.copied_bytes)
    return Value(
        metric=metric,
        value=float(ends.max()),
        bottleneck=f"op {name!r} on {plan.devices[plan.device_of[last]]} ends last",
        details={
            "busy_s": {plan.devices[device]: float(busy[device]) for device in used},
            "used_bytes": {plan.devices[d]: float(memory.used_bytes[d]) for d in used},
            "peak_bytes": {plan.devices[d]: float(memory.peak_bytes[d]) for d in used},
            "transfers": times.transfers,
        },
        errors=(*placement_errors(problem, plan), *memory.errors),
    )


class Footprint(NamedTuple):
    """Memory of the devices of a plan.

    Attributes:
        used_bytes: What each device holds at the end.
        peak_bytes: Its recorded peak.
        errors: The first op on each device that does not fit.
    """

    used_bytes: Floats
    peak_bytes: Floats
    errors: tuple[str, ...]


def footprint(problem: Problem, plan: Plan, order: Longs, copied_bytes: Floats) -> Footprint:
    """Return the memory of each device.

    Args:
        problem: The problem.
        plan: A plan with one device for each op.
        order: The ops in the order of commitment.
        copied_bytes: Bytes that each op fetches from other devices.
    """
    graph = problem.graph
    permanent, temporary, held = baechi_needs(graph, problem.objective.mode)
    limit = memory_limits(problem, plan).tolist()
    device_of = plan.device_of.tolist()
    rows = [values.tolist() for values in (permanent, temporary, held, copied_bytes)]
    used = [0.0] * len(limit)
    peak = [0.0] * len(limit)
    failed: dict[int, str] = {}
    for op in order.tolist():
        device = device_of[op]
        kept, scratch, parameters, copies = (values[op] for values in rows)
        need = max(used[device] + copies + kept + scratch, peak[device] + copies + parameters)
        if need > limit[device] and device not in failed:
            name = f"device {plan.devices[device]!r}"
            failed[device] = (
                f"{name} needs {need:.0f} bytes at op {graph.ops.names[op]!r}, "
                f"limit {limit[device]:.0f}"
            )
        peak[device] = max(peak[device], used[device] + kept + scratch)
        used[device] += kept
        peak[device] = max(peak[device], used[device] + copies)
        used[device] += copies
    return Footprint(
        np.array(used), np.array(peak), tuple(failed[device] for device in sorted(failed))
    )


class Needs(NamedTuple):
    """Bytes of each op by Baechi's rule; every parameter counts as trained, without an optimizer.

    Attributes:
        permanent: What stays from forward on: parameters, their gradients, what forward saves.
        temporary: Workspace.
        parameters: Parameters and their gradients alone.
    """

    permanent: Floats
    temporary: Floats
    parameters: Floats


def held_bytes_baechi(problem: Problem) -> Floats:
    """Return what each forward op holds at least; backward ops hold nothing of their own."""
    held = baechi_needs(problem.graph, problem.objective.mode).permanent
    return np.where(problem.graph.is_forward, held, 0.0)


def baechi_needs(graph: Graph, mode: Mode) -> Needs:
    """Return what each op needs by Baechi's rule."""
    if mode is Mode.INFERENCE:
        return Needs(graph.parameter_bytes, graph.ops.workspace_bytes, graph.parameter_bytes)
    held = 2 * graph.parameter_bytes
    return Needs(graph.ops.saved_bytes + held, graph.ops.workspace_bytes, held)
