"""Units: the ops that a search keeps together, few enough to try many splits of them.

A unit is a node of the contracted graph (ops that must share a device, or lie on a cycle). Where
these are more than ``most_units``, runs of a linear order are joined: by layers where the graph has
them, else depth first, cut where little data flow. Runs of an order along the data have no cycle
among them. Ops with other rights (rules, kinds of devices) are not joined.
"""

import numpy as np

from partita.core.columns import Array, sum_by
from partita.core.problem import Problem
from partita.planners.lattice.orders import linear_orders
from partita.planners.lattice.quotient import Quotient, collapse, node_sums, quotient
from partita.planners.pipeline import has_layers, layer_of_ops

MAX_UNITS = 480
UNITS_PER_DEVICE = 4


def most_units(problem: Problem) -> int:
    """Return how many units a search over a problem likes at most."""
    return max(MAX_UNITS, UNITS_PER_DEVICE * len(problem.cluster))


def units_of(problem: Problem) -> Quotient:
    """Return the units of a problem."""
    graph = problem.graph
    q = quotient(graph)
    most = most_units(problem)
    if q.num_nodes <= most:
        return q
    order = layer_order(problem, q)
    if order is None:
        order = linear_orders(q, weight=node_sums(q, graph.forward_s), count=1)[0]
    work = node_sums(q, graph.forward_s + graph.backward_s)
    net = np.repeat(np.arange(len(q.net_tensor)), np.diff(q.net_ptr))
    size = graph.tensors.bytes[q.net_tensor]
    (cut,) = crossing_sums(order, q.net_source, net, q.net_pins, (size,))
    points = np.union1d(
        cut_points(sums_before(work[order]), cut, most), _changes(problem, q, order)
    )
    run = np.zeros(len(order) + 1, dtype=np.int64)
    run[points[:-1]] = 1
    label = np.empty(len(order), dtype=np.int64)
    label[order] = np.cumsum(run)[:-1]
    return collapse(q, label)


def layer_order(problem: Problem, q: Quotient) -> Array | None:
    """Return the nodes by layer; ``None`` without layers, or where an edge leads back."""
    graph = problem.graph
    if not has_layers(graph):
        return None
    of_op, _ = layer_of_ops(graph)
    layer = np.full(q.num_nodes, -1, dtype=np.int64)
    np.maximum.at(layer, q.node_of, of_op)
    source, target = q.edges
    if bool((layer[source] > layer[target]).any()):
        return None
    return np.lexsort((np.arange(q.num_nodes), layer))


def _changes(problem: Problem, q: Quotient, order: Array) -> Array:
    """Return the places of an order where the rights of the nodes change."""
    row_of, matrix = problem.allowed
    if len(matrix) == 1:
        return np.zeros(0, dtype=np.int64)
    rights = sum_by(q.node_of, row_of.astype(np.float64), q.num_nodes) / np.bincount(q.node_of)
    return 1 + np.flatnonzero(np.diff(rights[order]) != 0)


def sums_before(values: Array) -> Array:
    """Return the sums of what lies before each place of the last axis, 0 for the first."""
    zero = np.zeros((*values.shape[:-1], 1))
    result: Array = np.concatenate([zero, np.cumsum(values, axis=-1)], axis=-1)
    return result


def crossing_sums(
    order: Array, source: Array, net: Array, pin: Array, columns: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Return sums of columns of the nets that cross each place of an order.

    Args:
        order: The nodes.
        source: The node that makes each net.
        net: With ``pin``: pairs of a net and a node that reads it.
        pin: See ``net``.
        columns: Values of the nets.
    """
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    first = place[source]
    last = first.copy()
    np.maximum.at(last, net, place[pin])
    result = []
    for values in columns:
        change = np.zeros(len(order) + 2)
        np.add.at(change, first + 1, values)
        np.add.at(change, last + 1, -values)
        result.append(np.cumsum(change)[:-1])
    return tuple(result)


def cut_points(before: Array, cut: Array, most: int) -> Array:
    """Return places to cut an order at, the ends included.

    Where there are more than ``most``, the order is divided into windows of equal work, and each
    gives the place over which the least data flow; ties go to the first.

    Args:
        before: Work before each place.
        cut: Bytes that cross each place.
        most: How many places at most.
    """
    size = len(before)
    if size <= most:
        return np.arange(size)
    total = float(before[-1]) or 1.0
    window = np.minimum((before / total * (most - 2)).astype(np.int64), most - 3)
    inner = np.arange(1, size - 1)
    by_window = inner[np.lexsort((inner, cut[inner], window[inner]))]
    first = np.ones(len(by_window), dtype=bool)
    first[1:] = window[by_window[1:]] != window[by_window[:-1]]
    return np.concatenate([[0], np.sort(by_window[first]), [size - 1]])
