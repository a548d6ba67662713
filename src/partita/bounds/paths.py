"""The longest way through a graph on the best devices, with the transfers that cannot be avoided.

Three bounds on when op v can start, for the ops u_1, u_2, ... that it reads from:

* path: after every u_i, on the fastest device that may run each op.
* places: ``L(v, c) = t(v, c) + max_i min_c' (L(u_i, c') + transfer from c' to c)`` over classes c
  of devices; nothing is transferred within a class, where both may be on one device.
* join: some u_i are on v's device, which runs them one after the other; from the others a transfer
  comes. If x is the last arrival, all u_i whose transfer would arrive after x are local, so that

      start(v) >= min over x of max(x, first start of the local ones + seconds of all of them)

Time runs backward in a graph of gradients, so the same recursion bounds the time that is left.

Between a critical path and work over speed lies work that can neither start at once nor end last.
If every piece of a set starts no earlier than a and is followed by at least b seconds, then

    T >= a + b + work of the set / speed of all devices

with long a and b and little work at the one end, and all work with a = b = 0 at the other.
"""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array, derived
from partita.core.graph import Graph
from partita.core.order import csr
from partita.kernels import Column, kernel, run

MOST_JOINED = 8
"""Inputs of an op up to which the join is looked at; the time is quadratic in them."""


class Steps(NamedTuple):
    """Edges between forward ops, sorted by reader.

    Attributes:
        source: The op that is read from.
        tensor: What is read.
        ptr: Rows ``ptr[v]`` to ``ptr[v + 1]`` are those of reader v.
        order: The forward ops, every one after those that it reads from.
    """

    source: Array
    tensor: Array
    ptr: Array
    order: Array


def steps(graph: Graph, *, gradients: bool = False, backward: bool = False) -> Steps:
    """Return the edges along which data flows forward.

    Args:
        graph: The graph.
        gradients: Whether only those along which gradients return.
        backward: Whether time runs backward: readers are read from.
    """
    key = ("bound steps", gradients, backward)
    return derived(graph, key, lambda: _steps(graph, gradients, backward))


def _steps(graph: Graph, gradients: bool, backward: bool) -> Steps:
    source, reader, tensor = graph.edge_source, graph.edges.reader, graph.edges.tensor
    kept = source >= 0
    kept[kept] = graph.is_forward[source[kept]] & graph.is_forward[reader[kept]]
    if gradients:
        kept &= graph.tensors.differentiable[tensor]
    rows = np.flatnonzero(kept)
    first, then = (reader, source) if backward else (source, reader)
    ptr, rows = csr(then[rows], rows, len(graph))
    order = graph.topological_order[graph.is_forward[graph.topological_order]]
    return Steps(first[rows], tensor[rows], ptr, order[::-1] if backward else order)


def path_ends(way: Steps, seconds: Array, moved_s: Array, first_s: Array | None = None) -> Array:
    """Return when each op can have ended at the earliest, by path and join.

    Args:
        way: The edges.
        seconds: Least seconds of each op.
        moved_s: Least seconds of a transfer of each edge between different devices.
        first_s: When each op may start at the earliest by itself.
    """
    start = np.zeros(len(seconds)) if first_s is None else first_s.astype(np.float64)
    run(_join, 3 * len(way.source), [way.order, way.ptr, way.source, moved_s, seconds], [start])
    return start + seconds


def place_ends(way: Steps, seconds: Array, moved_s: Array) -> Array:
    """Return when each op can have ended at the earliest, by classes of devices.

    Args:
        way: The edges.
        seconds: ``[classes, ops]``: seconds of each op; inf = barred.
        moved_s: ``[classes, classes, edges]``: least seconds from class to class; 0 within a class.
    """
    classes = len(seconds)
    end = seconds.T.copy().ravel()
    run(
        _places,
        moved_s.size,
        [way.order, way.ptr, way.source, moved_s.transpose(2, 0, 1).ravel(), np.array([classes])],
        [end],
    )
    result: Array = end.reshape(-1, classes).min(axis=1)
    return result


def has_fastest(seconds: Array) -> bool:
    """Return whether one class is the fastest on every op, so that a path never has to leave it."""
    return bool((seconds <= seconds.min(axis=0)).all(axis=1).any())


def path_to(way: Steps, ends: Array, last: int) -> tuple[Array, Array]:
    """Return the ops of a path to an op, always from the source that ends last, and its edges."""
    ops, edges = [last], []
    while way.ptr[ops[-1]] < way.ptr[ops[-1] + 1]:
        first = int(way.ptr[ops[-1]])
        sources = way.source[first : way.ptr[ops[-1] + 1]]
        latest = int(np.argmax(ends[sources]))
        edges.append(first + latest)
        ops.append(int(sources[latest]))
    return np.array(ops[::-1]), np.array(edges[::-1], dtype=np.int64)


def num_paths(way: Steps, busy: Array) -> int:
    """Return a number of paths that hold every op that takes time: no more run at once."""
    of = np.arange(len(busy))
    place = np.empty(len(busy), dtype=np.int64)
    place[way.order] = np.arange(len(way.order))
    followed = np.zeros(len(busy), dtype=np.int64)
    run(_cover, len(way.source), [way.order, way.ptr, way.source, place], [followed, of])
    return len(np.unique(of[way.order][busy[way.order]]))


@kernel
def _join(  # noqa: C901 (one compiled loop)
    order: Column, ptr: Column, source: Column, moved_s: Column, seconds: Column, start: Column
) -> None:
    """Raise ``start`` to when each op can start, by path and join."""
    for node in order:
        begin, finish = ptr[node], ptr[node + 1]
        earliest = start[node]
        for edge in range(begin, finish):
            op = source[edge]
            earliest = max(earliest, start[op] + seconds[op])
        if 1 < finish - begin <= MOST_JOINED:
            # Try every last arrival x: none (cut = begin - 1: all inputs are local), or that of one
            # input. Inputs whose transfer would arrive after x must then be local.
            best = -1.0
            for cut in range(begin - 1, finish):
                arrival = 0.0
                if cut >= begin:
                    arrival = start[source[cut]] + seconds[source[cut]] + moved_s[cut]
                busy = 0.0
                first = -1.0
                for edge in range(begin, finish):
                    op = source[edge]
                    if start[op] + seconds[op] + moved_s[edge] > arrival:
                        # An op that is read by several edges computes once.
                        repeated = False
                        for other in range(begin, edge):
                            if source[other] == op:
                                again = start[op] + seconds[op] + moved_s[other] > arrival
                                repeated = repeated or again
                        if not repeated:
                            busy += seconds[op]
                        if first < 0.0 or start[op] < first:
                            first = start[op]
                ready = max(arrival, first + busy) if first >= 0.0 else arrival
                if best < 0.0 or ready < best:
                    best = ready
            earliest = max(earliest, best)
        start[node] = earliest


@kernel
def _places(
    order: Column, ptr: Column, source: Column, moved_s: Column, count: Column, end: Column
) -> None:
    """Add to ``end``, the seconds of each op and class, when that op can start there."""
    classes = count[0]
    # end is [op, class] and moved_s [edge, from class, to class], both as one row.
    for node in order:
        for here in range(classes):
            ready = 0.0
            for edge in range(ptr[node], ptr[node + 1]):
                least = -1.0
                for there in range(classes):
                    moved = moved_s[(edge * classes + there) * classes + here]
                    arrival = end[source[edge] * classes + there] + moved
                    if least < 0.0 or arrival < least:
                        least = arrival
                ready = max(ready, least)
            end[node * classes + here] += ready


@kernel
def _cover(
    order: Column, ptr: Column, source: Column, place: Column, followed: Column, of: Column
) -> None:
    """Give each op the path of the latest op that it reads from and that nobody follows yet."""
    for node in order:
        before = -1
        for edge in range(ptr[node], ptr[node + 1]):
            op = source[edge]
            if followed[op] == 0 and (before < 0 or place[op] > place[before]):
                before = op
        if before >= 0:
            followed[before] = 1
            of[node] = of[before]


BINS = 48


class Pieces(NamedTuple):
    """Pieces of work.

    Attributes:
        head_s: When each can start at the earliest.
        tail_s: Seconds that follow its end at least.
        work: Its least weighted device-seconds.
    """

    head_s: Array
    tail_s: Array
    work: Array


def window_bound(pieces: Pieces, speed: float) -> float:
    """Return the best bound over pairs of thresholds a and b.

    Args:
        pieces: The pieces of work.
        speed: Weight of all devices together.
    """
    busy = pieces.work > 0
    if not busy.any():
        return 0.0
    head, tail = _thresholds(pieces.head_s[busy]), _thresholds(pieces.tail_s[busy])
    row = np.searchsorted(head, pieces.head_s[busy], side="right") - 1
    column = np.searchsorted(tail, pieces.tail_s[busy], side="right") - 1
    shape = (len(head), len(tail))
    cells = np.bincount(
        row * len(tail) + column, weights=pieces.work[busy], minlength=shape[0] * shape[1]
    )
    beyond = cells.reshape(shape)[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1]
    value = head[:, None] + tail[None, :] + beyond / speed
    return float(value[beyond > 0].max())


def _thresholds(values: Array) -> Array:
    """Return some of the values in ascending order, the smallest among them."""
    distinct = np.unique(values)
    if len(distinct) <= BINS:
        return distinct
    return distinct[np.linspace(0, len(distinct) - 1, BINS).astype(np.int64)]
