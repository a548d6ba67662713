"""A placement problem as flat columns, the form in which the kernels read it.

Only forward ops are scheduled; they are numbered along the graph's rows. Explicit backward ops
follow the forward ops of their colocation class, else the op whose result they read.
"""

from enum import StrEnum
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array, derived, group_rows, sum_by
from partita.core.graph import Graph
from partita.core.problem import Metric, Mode, Problem
from partita.cost.tables import at_each_user, held_bytes, joined_ops
from partita.errors import InfeasibleError
from partita.kernels import Threshold
from partita.objectives.makespan import baechi_needs
from partita.objectives.placed import seconds_on

LONG = Threshold(size=500_000)
"""Steps of a kernel from which compiled code is worth the import of Numba."""


class Channels(StrEnum):
    """How transfers share the devices' links."""

    PARALLEL = "parallel"
    SEQUENTIAL = "sequential"


class MemoryRule(StrEnum):
    """Whose rule says what fits: Baechi's, where nothing is released, or the cost model's."""

    BAECHI = "baechi"
    OURS = "ours"


class Instance(NamedTuple):
    """What the kernels read; n forward ops, D devices, flat arrays.

    Attributes:
        num_ops: Number of forward ops.
        num_devices: Number of devices.
        num_tensors: Number of tensors of the graph.
        sequential: 1 where each device has one channel.
        once: 1 where a device holds a tensor once (an op then has one in-edge for each tensor), 0
            where it holds a copy for each edge.
        stays: 1 where copies stay on a device, 0 where they are released after their reader.
        pred_ptr: In-edges of op v are rows ``pred_ptr[v]`` to ``pred_ptr[v + 1]``.
        pred: The op that each in-edge comes from.
        tensor: The tensor it carries.
        size: Its bytes.
        given: Its seconds between any two devices, NaN where they follow from the link.
        succ_ptr: Out-edges of op v, likewise, in the order of the graph's edges.
        succ: The op that each out-edge leads to.
        succ_row: The in-edge that it is.
        class_of: Class of each device; op v takes ``seconds[class * n + v]``.
        seconds: See ``class_of``.
        latency: Seconds of a message from device a to b, at ``a * D + b``.
        bandwidth: Bytes a second from a to b, likewise.
        kept: Bytes that an op keeps.
        scratch: Bytes it needs besides while it runs.
        held: The part of ``kept`` that is there before it runs.
        limit: Bytes of each device.
        may: Whether op v may run on device d, at ``v * D + d``.
        group: Ops with the same group share a device.
        group_kept: Bytes that the ops of a group keep.
        topological: The ops along the data.
    """

    num_ops: int
    num_devices: int
    num_tensors: int
    sequential: int
    once: int
    stays: int
    pred_ptr: Array
    pred: Array
    tensor: Array
    size: Array
    given: Array
    succ_ptr: Array
    succ: Array
    succ_row: Array
    class_of: Array
    seconds: Array
    latency: Array
    bandwidth: Array
    kept: Array
    scratch: Array
    held: Array
    limit: Array
    may: Array
    group: Array
    group_kept: Array
    topological: Array

    @property
    def steps(self) -> int:
        """Steps of a kernel that looks at every edge on every device."""
        return (self.num_ops + len(self.pred)) * self.num_devices


def default_channels(problem: Problem) -> Channels:
    """Return the channels that the problem's metric has; parallel where it says nothing."""
    sequential = problem.objective.metric is Metric.MAKESPAN_SEQUENTIAL
    return Channels.SEQUENTIAL if sequential else Channels.PARALLEL


def default_memory(problem: Problem) -> MemoryRule:
    """Return the rule by which the problem's metric checks memory."""
    baechi = (Metric.MAKESPAN_PARALLEL, Metric.MAKESPAN_SEQUENTIAL)
    return MemoryRule.BAECHI if problem.objective.metric in baechi else MemoryRule.OURS


def forward_ops(graph: Graph) -> Array:
    """Return the rows of the ops that are scheduled."""
    return np.flatnonzero(graph.is_forward)


def op_name(problem: Problem, op: int) -> str:
    """Return the name of a forward op, quoted."""
    return repr(problem.graph.ops.names[int(forward_ops(problem.graph)[op])])


def instance_of(problem: Problem, channels: Channels, memory: MemoryRule) -> Instance:
    """Return the columns of a problem, made once for each problem.

    Raises:
        InfeasibleError: The rules leave no device for ops that must share one.
    """
    key = ("placement instance", channels, memory)
    return derived(problem, key, lambda: _instance(problem, channels, memory))


def _instance(problem: Problem, channels: Channels, memory: MemoryRule) -> Instance:
    graph, cluster = problem.graph, problem.cluster
    ops = forward_ops(graph)
    number = np.full(len(graph), -1, dtype=np.int64)
    number[ops] = np.arange(len(ops))
    source, reader = graph.edge_source, graph.edges.reader
    inner = np.flatnonzero(source >= 0)
    inner = inner[graph.is_forward[source[inner]] & graph.is_forward[reader[inner]]]
    once = channels is Channels.SEQUENTIAL or memory is MemoryRule.OURS
    if once:
        read = reader[inner].astype(np.int64) * len(graph.tensors) + graph.edges.tensor[inner]
        inner = inner[np.sort(np.unique(read, return_index=True)[1])]
    pred_ptr, rows = group_rows(number[reader[inner]], len(ops))
    into = inner[rows]
    succ_ptr, out = group_rows(number[source[inner]], len(ops))
    tensor = graph.edges.tensor[into].astype(np.int64)
    class_of, seconds = seconds_on(graph, cluster.devices, Mode.INFERENCE)
    latency, bandwidth = _links(problem)
    kept, scratch, held = (values[ops] for values in _needs(problem, memory))
    group = _groups(graph, ops)
    order = number[graph.topological_order]
    return Instance(
        num_ops=len(ops),
        num_devices=len(cluster),
        num_tensors=len(graph.tensors),
        sequential=int(channels is Channels.SEQUENTIAL),
        once=int(once),
        stays=int(memory is MemoryRule.BAECHI),
        pred_ptr=pred_ptr.astype(np.int64),
        pred=number[source[into]],
        tensor=tensor,
        size=graph.tensors.bytes[tensor],
        given=graph.tensors.transfer_s[tensor],
        succ_ptr=succ_ptr.astype(np.int64),
        succ=number[reader[inner[out]]],
        succ_row=np.argsort(rows)[out],
        class_of=class_of.astype(np.int64),
        seconds=np.ascontiguousarray(seconds[:, ops]).ravel(),
        latency=latency,
        bandwidth=bandwidth,
        kept=kept,
        scratch=scratch,
        held=held,
        limit=problem.limit_bytes.copy(),  # some searches shrink it: kernels know one kind of array
        may=_may(problem, ops),
        group=group,
        group_kept=sum_by(group, kept, int(group.max()) + 1),
        topological=order[order >= 0],
    )


def _links(problem: Problem) -> tuple[Array, Array]:
    """Return latency and bandwidth of every ordered pair of devices."""
    size = len(problem.cluster)
    pair = np.arange(size * size)
    links = problem.cluster.links(pair // size, pair % size)
    # A pair without a link takes forever, and so does no bandwidth.
    bandwidth = np.where(links.bandwidth_bytes_per_s > 0, links.bandwidth_bytes_per_s, 1e-300)
    return links.latency_s.astype(np.float64), bandwidth


def _needs(problem: Problem, memory: MemoryRule) -> tuple[Array, Array, Array]:
    """Return the bytes that each op keeps, those it needs to run, and those held from the start."""
    graph, objective = problem.graph, problem.objective
    trains = objective.mode is Mode.TRAINING
    if memory is MemoryRule.BAECHI:
        return baechi_needs(graph, objective.mode)
    held = at_each_user(graph, held_bytes(graph.parameters, objective).total)
    share = problem.microbatch_size / graph.batch_size
    saved = graph.ops.saved_at(share)
    return (
        held + saved * problem.microbatches * trains,
        graph.ops.workspace_bytes * share,
        held,
    )


def _groups(graph: Graph, ops: Array) -> Array:
    """Return a group for each forward op: its colocation class, else one of its own."""
    return joined_ops(graph.ops.colocation[ops])


def _may(problem: Problem, ops: Array) -> Array:
    """Return where each forward op may run; ops of a class may run where all of it may."""
    graph = problem.graph
    row_of, matrix = problem.allowed
    may = matrix[row_of]
    color = graph.ops.colocation
    tied = np.flatnonzero(color >= 0)
    if len(tied):
        common = np.ones((int(color.max()) + 1, len(problem.cluster)), dtype=bool)
        np.logical_and.at(common, color[tied], may[tied])
        may = may.copy()
        may[tied] = common[color[tied]]
        stuck = np.flatnonzero(~may.any(axis=1))
        if len(stuck):
            from partita.planners.obstacle import no_device  # noqa: PLC0415 (says why)

            raise InfeasibleError(no_device(problem, np.flatnonzero(color == color[stuck[0]])))
    return np.ascontiguousarray(may[ops], dtype=np.int8).ravel()


def every_op(problem: Problem, forward: Array) -> Array:
    """Return a device for every op of the graph, given those of the forward ops.

    An explicit backward op runs with its class, else where the first thing it reads is made.
    """
    graph = problem.graph
    row_of, matrix = problem.allowed
    device_of = np.full(len(graph), -1, dtype=np.int64)
    device_of[forward_ops(graph)] = forward
    color = graph.ops.colocation
    home = {int(color[op]): int(device_of[op]) for op in forward_ops(graph).tolist()}
    ptr, edges = graph.in_edges
    for op in graph.topological_order.tolist():
        if device_of[op] >= 0:
            continue
        sources = graph.edge_source[edges[ptr[op] : ptr[op + 1]]]
        near = [int(device_of[s]) for s in sources.tolist() if s >= 0 and device_of[s] >= 0]
        allowed = np.flatnonzero(matrix[row_of[op]]).tolist()
        wanted = [home[int(color[op])]] if color[op] >= 0 and int(color[op]) in home else near
        device_of[op] = next((device for device in wanted if device in allowed), allowed[0])
        if color[op] >= 0:
            home.setdefault(int(color[op]), int(device_of[op]))
    return device_of
