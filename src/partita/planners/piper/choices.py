"""Variants of each op in Piper's terms: tensor-parallel degrees, recomputing or not."""

import math
from dataclasses import dataclass

import numpy as np

from partita.core.cluster import Cluster
from partita.core.columns import Array
from partita.core.graph import Graph
from partita.core.problem import Problem
from partita.errors import InfeasibleError
from partita.objectives.piper import sync_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """What ops may do; figures are ``[degree, op]``, those of edges ``[degree, edge]``.

    Attributes:
        degrees: Tensor-parallel degrees, ascending.
        seconds: Of a microbatch by the faster choice; inf = the op has no such degree.
        saved: Bytes for each microbatch in flight, faster choice.
        fixed: Bytes besides.
        extra_s: Seconds more of the slower choice, which takes less memory; inf = there is none.
        less_saved: Bytes less for each microbatch in flight, slower choice.
        less_fixed: Bytes less besides; often negative.
        recompute: Whether the faster choice is the one that recomputes.
        reduce_s: Seconds a microbatch that a further replica's gradients take.
        enter_s: Seconds a microbatch of an edge at the stage that it enters, if it is cut.
        leave_s: Seconds of it at the stage that it leaves.
        kept: Bytes that an edge keeps where it enters, for each microbatch in flight, by edge.
        exact: Whether the two choices of an op differ in seconds and memory alone. Where not, the
            dearer of the two figures is taken for both, or the cheaper one for a bound.
    """

    degrees: Array
    seconds: Array
    saved: Array
    fixed: Array
    extra_s: Array
    less_saved: Array
    less_fixed: Array
    recompute: Array
    reduce_s: Array
    enter_s: Array
    leave_s: Array
    kept: Array
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Kinds of parallelism that a plan may use.

    Attributes:
        data_parallel: Whether a stage may have several replicas.
        tensor_parallel: Whether ops may be split over devices.
        recompute: Whether activations may be computed again.
    """

    data_parallel: bool = True
    tensor_parallel: bool = True
    recompute: bool = True


def choices_of(problem: Problem, allowed: Allowed, *, for_bound: bool = False) -> Choices:
    """Return what the ops of a problem may do.

    Args:
        problem: The problem.
        allowed: Kinds of parallelism.
        for_bound: Whether figures that depend on the choice are taken at their least.

    Raises:
        InfeasibleError: An op has no variant of the kinds allowed.
    """
    graph, variants = problem.graph, problem.graph.variants
    most = len(problem.cluster) if allowed.tensor_parallel else 1
    usable = (variants.tp <= most) & (allowed.recompute | ~variants.recompute)
    degrees = np.unique(variants.tp[usable]).astype(np.int64)
    rows = np.full((2, len(degrees), len(graph)), -1, dtype=np.int64)
    held = np.flatnonzero(usable)
    place = np.searchsorted(degrees, variants.tp[held])
    rows[variants.recompute[held].astype(np.int64), place, variants.op[held]] = held
    _check_every_op_runs(graph, rows)
    seconds = _column(variants.forward_s + variants.backward_s, rows, math.inf)
    saved, fixed = _column(variants.saved_bytes, rows), _column(variants.fixed_memory_bytes, rows)
    # The faster choice; of two equally fast ones that which takes less memory, then the plain one.
    slower_plain = (seconds[1] < seconds[0]) | (
        (seconds[1] == seconds[0]) & (saved[1] + fixed[1] < saved[0] + fixed[0])
    )
    fast = slower_plain.astype(np.int64)[None]
    both = (rows[0] >= 0) & (rows[1] >= 0)
    quick, slow = (np.take_along_axis(seconds, index, 0)[0] for index in (fast, 1 - fast))
    both_differ, parts = _shared_parts(problem, rows, for_bound=for_bound)
    return Choices(
        degrees=degrees,
        seconds=quick,
        saved=np.take_along_axis(saved, fast, 0)[0],
        fixed=np.take_along_axis(fixed, fast, 0)[0],
        extra_s=np.subtract(slow, quick, out=np.full(quick.shape, math.inf), where=both),
        less_saved=_difference(saved, fast, both),
        less_fixed=_difference(fixed, fast, both),
        recompute=slower_plain,
        reduce_s=parts[0],
        enter_s=parts[1],
        leave_s=parts[2],
        kept=np.zeros(len(graph.edges)),
        exact=not both_differ,
    )


def slowest_link(cluster: Cluster) -> float:
    """Return the bandwidth of the slowest level, or of the slowest pair; inf = there are none."""
    if cluster.matrix is not None:
        size = len(cluster)
        between = cluster.matrix.bandwidth_bytes_per_s.reshape(size, size)[
            ~np.eye(size, dtype=bool)
        ]
        return float(between.min()) if size > 1 else math.inf
    return min((level.slowest_bytes_per_s for level in cluster.levels), default=math.inf)


def _check_every_op_runs(graph: Graph, rows: Array) -> None:
    lost = np.flatnonzero(~(rows >= 0).any(axis=(0, 1)))
    if len(lost):
        raise InfeasibleError(
            f"op {graph.ops.names[int(lost[0])]!r} has no variant that may be used here; allow "
            "tensor parallelism or recomputation, or use more devices"
        )


def _column(values: Array, rows: Array, missing: float = 0.0) -> Array:
    """Return a column of the variants by recomputation, degree and op."""
    return np.where(rows >= 0, values[rows], missing)


def _difference(values: Array, fast: Array, both: Array) -> Array:
    """Return how much less the slower choice takes."""
    less = np.take_along_axis(values, fast, 0)[0] - np.take_along_axis(values, 1 - fast, 0)[0]
    return np.where(both, less, 0.0)


def _shared_parts(
    problem: Problem, rows: Array, *, for_bound: bool
) -> tuple[bool, tuple[Array, Array, Array]]:
    """Return whether choices differ in what they exchange, and seconds of reductions and edges."""
    graph, variants = problem.graph, problem.graph.variants
    rate = slowest_link(problem.cluster)
    plain, again = (np.where(rows[i] >= 0, rows[i], rows[1 - i]) for i in (0, 1))
    pick = np.minimum if for_bound else np.maximum
    parameters = [variants.parameter_bytes[side] for side in (plain, again)]
    differs = not np.array_equal(*parameters)
    reduce_s = 4 * pick(*parameters) / (problem.microbatches * rate)
    size = graph.tensors.bytes[graph.edges.tensor]
    edges = []
    for side in ("in", "out"):
        first, second = (
            np.stack([sync_bytes(graph, row_of, side=side) for row_of in choice])
            for choice in (plain, again)
        )
        differs = differs or not np.array_equal(first, second)
        edges.append(2 * (size + pick(first, second)) / rate)
    return differs, (reduce_s, edges[0], edges[1])
