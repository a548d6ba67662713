"""Bytes that cross the cuts of a pipeline, as they are and as PipeDream's optimizer counts them.

The cut after stage s separates the ops of stages 0..s (a down-set I of the graph) from the rest.

* live bytes: each tensor with a reader beyond the cut, once. A tensor that skips stages is relayed,
  so it crosses every cut on its way.
* released bytes: the outputs of PipeDream's augmented antichain. It holds the maximal ops of I, and
  for each maximal op a every ancestor p of a with an edge to an op that is neither a nor an
  ancestor of a. That counts too much: that op may lie inside I, under another maximal op.
"""

import numpy as np

from partita.core.columns import Flags, Floats, Ints, frozen_array, group_rows, sum_by
from partita.core.graph import Graph

UNUSED_PREFIX = "__getitem__"


def counted_ops(graph: Graph) -> Flags:
    """Return which ops count: all but unused elements of tuples, found again until none is left.

    An unused element is an op of type ``__getitem__...`` that no counted op reads. The released
    code looks for them once; on the published profiles that is the same.
    """
    counted = np.ones(len(graph), dtype=bool)
    types = graph.ops.types
    element = np.array([name.startswith(UNUSED_PREFIX) for name in types.names] + [False])
    if not element.any():
        return counted
    candidate = element[types.of]
    source, reader = graph.edge_source, graph.edges.reader
    inner = source >= 0
    while True:
        read = np.zeros(len(graph), dtype=bool)
        read[source[inner & counted[reader]]] = True
        unused = candidate & counted & ~read
        if not unused.any():
            return counted
        counted &= ~unused


def produced_bytes(graph: Graph) -> Floats:
    """Return the bytes of all tensors that each op makes."""
    made = graph.tensors.producer >= 0
    return sum_by(graph.tensors.producer[made], graph.tensors.bytes[made], len(graph))


def live_cut_bytes(graph: Graph, stage_of: Ints, num_stages: int, counted: Flags) -> Floats:
    """Return the bytes that cross the cut after each stage; 0 after the last."""
    producer = graph.tensors.producer
    edges = np.flatnonzero((graph.edge_source >= 0) & counted[graph.edges.reader])
    last = np.full(len(producer), -1, dtype=np.int64)
    np.maximum.at(last, graph.edges.tensor[edges], stage_of[graph.edges.reader[edges]])
    tensors = np.flatnonzero(producer >= 0)
    first = stage_of[producer[tensors]]
    crosses = last[tensors] > first
    size = graph.tensors.bytes[tensors[crosses]]
    begin = sum_by(first[crosses], size, num_stages)
    end = sum_by(last[tensors[crosses]], size, num_stages)
    # Exact zero after the last stage, whatever the rounding of the running sum.
    running = np.maximum(np.cumsum(begin - end), 0.0)
    running[-1] = 0.0
    return frozen_array(running, np.float64)


def released_cut_bytes(graph: Graph, stage_of: Ints, num_stages: int, counted: Flags) -> Floats:
    """Return PipeDream's output bytes of the cut after each stage, the last one too.

    ``O(stages * (ops + edges))`` steps on sets of maximal ops held as bits of a number.
    """
    pointers, edges = graph.out_edges
    keep = counted[graph.edges.reader[edges]]
    inner = edges[keep]
    pointers, rows = group_rows(graph.edge_source[inner], len(graph))
    readers = graph.edges.reader[inner][rows].tolist()
    begin = pointers.tolist()
    order = graph.topological_order[counted[graph.topological_order]][::-1].tolist()
    stages = stage_of.tolist()
    size = produced_bytes(graph).tolist()
    result = np.zeros(num_stages)
    for cut in range(num_stages):
        above = [0] * len(graph)
        maximal = 1
        total = 0.0
        for op in order:
            if stages[op] > cut:
                continue
            some, common = 0, -1
            for reader in readers[begin[op] : begin[op + 1]]:
                some |= above[reader]
                common &= above[reader]
            if not some:
                some, maximal = maximal, maximal << 1
                total += size[op]
            elif some != common:
                total += size[op]
            above[op] = some
        result[cut] = total
    return frozen_array(result, np.float64)
