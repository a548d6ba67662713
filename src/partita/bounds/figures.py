"""What all bounds look at: classes of like devices, seconds of ops there, samples of a step.

An op may run in several *ways*: the tensor-parallel degrees of the graph's variants (1 where there
are none), recomputing or not. What one way costs follows ``cost/durations.py``.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from partita.core.cluster import Cluster
from partita.core.columns import Array, derived
from partita.core.graph import Graph
from partita.core.problem import Metric, Mode, Problem
from partita.cost.durations import OpSeconds, op_seconds


class Classes(NamedTuple):
    """Devices that no plan tells apart by speed, memory or rules.

    Attributes:
        of: The class of each device of the cluster.
        members: One device of each class.
        sizes: Devices in each class.
        limit_bytes: Memory that a plan may use on a device, by class.
        allowed: ``[classes, ops]``: whether an op may run there.
    """

    of: Array
    members: tuple[int, ...]
    sizes: Array
    limit_bytes: Array
    allowed: Array


def device_classes(problem: Problem) -> Classes:
    """Return the classes of a problem's devices, in the order of their first devices."""
    return derived(problem, "device classes", lambda: _device_classes(problem))


def _device_classes(problem: Problem) -> Classes:
    row_of, matrix = problem.allowed
    index: dict[object, int] = {}
    of, members = [], []
    for number, device in enumerate(problem.cluster.devices):
        rates = (tuple(sorted(device.peak_flop_per_s.items())), device.memory_bytes_per_s)
        what = (device.type, device.kind, device.speed, device.memory_bytes)
        key = (*what, *rates, matrix[:, number].tobytes())
        if key not in index:
            index[key] = len(index)
            members.append(number)
        of.append(index[key])
    limit = problem.cluster.memory_bytes[members] * problem.objective.memory_factor
    return Classes(
        of=np.array(of, dtype=np.int64),
        members=tuple(members),
        sizes=np.bincount(of).astype(np.float64),
        limit_bytes=limit,
        allowed=matrix[:, members].T[:, row_of],
    )


class Way(NamedTuple):
    """Seconds of the graph's batch on one of the devices that share an op; rows are classes.

    Attributes:
        degree: Number of devices that share it.
        forward: Forward.
        backward: Backward, without recomputation.
        backward_input: The part of backward that the gradient of the inputs needs.
        again: Recomputation.
    """

    degree: int
    forward: Array
    backward: Array
    backward_input: Array
    again: Array


def ways(problem: Problem) -> tuple[Way, ...]:
    """Return every way in which ops may run; barred classes have infinite seconds."""
    return derived(problem, "ways", lambda: tuple(_ways(problem)))


def _ways(problem: Problem) -> Iterator[Way]:
    graph, classes = problem.graph, device_classes(problem)
    devices = [problem.cluster.devices[member] for member in classes.members]
    tables = [op_seconds(graph, device) for device in devices]
    degrees = sorted({1, *graph.variants.tp.tolist()})
    for degree in degrees:
        if degree > len(problem.cluster):
            continue
        for again in (False, True) if len(graph.variants) else (False,):
            rows = [_way(graph, table, degree, recompute=again) for table in tables]
            parts = (np.stack(part) for part in zip(*rows, strict=True))
            yield Way(degree, *(np.where(classes.allowed, part, np.inf) for part in parts))


def _way(
    graph: Graph, seconds: OpSeconds, degree: int, *, recompute: bool
) -> tuple[Array, Array, Array, Array]:
    """Return forward, backward, backward for the inputs, and recomputation of each op."""
    forward, backward = seconds.forward_s / degree, seconds.backward_s / degree
    variants = graph.variants
    rows = np.flatnonzero((variants.tp == degree) & (variants.recompute == recompute))
    if len(rows):
        ops, reference = variants.op[rows], graph.costs[0]
        here = seconds.forward_s[ops] + seconds.backward_s[ops]
        there = reference.forward_s[ops] + reference.backward_s[ops]
        scale = np.divide(here, there, out=np.ones(len(ops)), where=there > 0)
        forward[ops] = variants.forward_s[rows] * scale
        backward[ops] = variants.backward_s[rows] * scale
        if recompute:
            backward[ops] = np.maximum(backward[ops] - forward[ops], 0.0)
    explicit = ~graph.is_forward
    backward = np.where(explicit, forward + backward, backward)
    forward = np.where(explicit, 0.0, forward)
    return forward, backward, backward * seconds.input_share, forward * recompute


class Batch(NamedTuple):
    """The samples of a step: as asked, with what is left open at its best.

    Attributes:
        turns: Microbatches that a step has at least.
        most_turns: Microbatches that it has at most.
        batches: Samples of a step over the graph's batch size.
        largest: Samples that the largest microbatch has at least, over the graph's batch size.
        smallest: Samples that each microbatch has at least, likewise.
        equal: Whether all microbatches have one given size.
    """

    turns: int
    most_turns: int
    batches: float
    largest: float
    smallest: float
    equal: bool


def batch_of(problem: Problem) -> Batch:
    """Return the samples of a step.

    Count and size give the samples of a step, which are fixed. Where neither is given, there may be
    from one microbatch to one for each sample. A latency is that of the problem's microbatch.
    """
    objective, graph = problem.objective, problem.graph
    total = problem.microbatches * problem.microbatch_size
    sized = objective.microbatch_size is not None or objective.metric is Metric.LATENCY
    given = sized or objective.microbatches is not None
    return Batch(
        turns=problem.microbatches if given else 1,
        most_turns=problem.microbatches if given else total,
        batches=total / graph.batch_size,
        largest=(problem.microbatch_size if given else 1) / graph.batch_size,
        smallest=(problem.microbatch_size if sized else 1) / graph.batch_size,
        equal=sized,
    )


def step_factor(problem: Problem) -> Array:
    """Return how many times its seconds each op takes in a step at least."""
    batch, fixed = batch_of(problem), problem.graph.ops.fixed_share
    return fixed * batch.turns + (1 - fixed) * batch.batches


def turn_factor(problem: Problem, samples: float) -> Array:
    """Return how many times its seconds each op takes for a microbatch.

    Args:
        problem: The problem.
        samples: Samples of the microbatch over the graph's batch size.
    """
    fixed = problem.graph.ops.fixed_share
    return fixed + (1 - fixed) * samples


class Links(NamedTuple):
    """The best that any two different devices have.

    Attributes:
        bandwidth_bytes_per_s: Largest bandwidth.
        latency_s: Smallest latency.
    """

    bandwidth_bytes_per_s: float
    latency_s: float


def best_link(cluster: Cluster) -> Links:
    """Return the best link of a cluster with several devices; infinite where there is none."""
    if cluster.matrix is not None and len(cluster) > 1:
        apart = ~np.eye(len(cluster), dtype=bool).ravel()
        matrix = cluster.matrix
        return Links(
            float(matrix.bandwidth_bytes_per_s[apart].max()), float(matrix.latency_s[apart].min())
        )
    if not cluster.levels:
        return Links(math.inf, 0.0)
    return Links(
        max(float(level.bandwidth_bytes_per_s.max()) for level in cluster.levels),
        min(float(level.latency_s.min()) for level in cluster.levels),
    )


class Units(NamedTuple):
    """Ops that must stay together, as one.

    Attributes:
        of: The unit of each op.
        num_units: Number of units.
    """

    of: Array
    num_units: int

    def total(self, values: Array) -> Array:
        """Return the sums of values over the ops of each unit; the last axis is that of ops."""
        if self.num_units == values.shape[-1]:
            return values
        flat = values.reshape(-1, values.shape[-1])
        rows = [np.bincount(self.of, weights=row, minlength=self.num_units) for row in flat]
        return np.stack(rows).reshape(*values.shape[:-1], self.num_units)


def units(graph: Graph) -> Units:
    """Return the colocation classes and the free ops of a graph."""
    return derived(graph, "bound units", lambda: _units(graph))


def _units(graph: Graph) -> Units:
    colour = graph.ops.colocation.astype(np.int64)
    if not bool((colour >= 0).any()):
        return Units(np.arange(len(graph)), len(graph))
    alone = int(colour.max()) + 1 + np.arange(len(graph))
    _, of = np.unique(np.where(colour >= 0, colour, alone), return_inverse=True)
    return Units(of.ravel(), int(of.max()) + 1)


def first_users(graph: Graph, counted: Array | None = None) -> Array:
    """Return for each parameter the first op that uses it; -1 = none (of those counted)."""
    table = graph.parameters
    use = np.ones(len(table.use_op), dtype=bool) if counted is None else counted[table.use_op]
    first = np.full(len(table), len(graph), dtype=np.int64)
    np.minimum.at(first, table.use_parameter[use], table.use_op[use])
    return np.where(first < len(graph), first, -1)


def at_first_user(graph: Graph, values: Array, counted: Array | None = None) -> Array:
    """Return for each op the sum of values of the parameters that it is the first to use."""
    first = first_users(graph, counted)
    held = first >= 0
    result: Array = np.bincount(first[held], weights=values[held], minlength=len(graph))
    return result


def trains(problem: Problem) -> bool:
    """Return whether the problem is one of training."""
    return problem.objective.mode is Mode.TRAINING
