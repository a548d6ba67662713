"""Bounds of DynamicMLTrainer's sharding cost: its two sums, each at its least.

* Spread: the k largest units stand on at most k devices, so the k largest weights of devices sum up
  to no less. Weights that only keep this have the least sum of squares when they are as equal as
  the largest units allow.
* Edges: every device holds an op, so the devices that edges join form at most as many components as
  the graph has: a spanning forest of the cheapest links, the dearest left out where the graph has
  several components.
"""

from collections.abc import Iterator

import numpy as np

from partita.core.columns import Array
from partita.core.graph import Graph
from partita.core.problem import Problem
from partita.cost.bounds.bound import Bound, Effort
from partita.cost.bounds.figures import trains, units


def sharding_bounds(problem: Problem, effort: Effort) -> Iterator[Bound]:
    """Yield the bound, named for its larger part."""
    del effort
    matrix = problem.cluster.matrix
    if matrix is None:
        return
    graph, devices = problem.graph, len(problem.cluster)
    seconds = graph.forward_s + graph.backward_s if trains(problem) else graph.forward_s
    spread = _least_spread(units(graph).total(seconds), devices)
    latency = matrix.latency_s.reshape(devices, devices)
    edges = _cheapest_tree(np.minimum(latency, latency.T))
    several = _num_components(graph) - 1
    cut = float(np.sort(edges)[: max(0, devices - 1 - several)].sum())
    yield Bound(spread + cut, "cut" if cut >= spread else "indivisible op")


def _least_spread(weights: Array, devices: int) -> float:
    """Return the least sum of squared differences from the mean."""
    largest = np.sort(weights)[::-1][: devices - 1]
    left, mean = float(weights.sum()), float(weights.sum()) / devices
    total = 0.0
    for taken, weight in enumerate(largest.tolist()):
        level = left / (devices - taken)
        if weight <= level:
            break
        total += (weight - mean) ** 2
        left -= weight
    else:
        taken = len(largest)
    return total + (devices - taken) * (left / (devices - taken) - mean) ** 2


def _cheapest_tree(price: Array) -> Array:
    """Return the prices of the links of a cheapest spanning tree."""
    size = len(price)
    near, outside = price[0].copy(), np.ones(size, dtype=bool)
    outside[0] = False
    taken = []
    for _ in range(size - 1):
        node = int(np.flatnonzero(outside)[np.argmin(near[outside])])
        taken.append(float(near[node]))
        outside[node] = False
        near = np.minimum(near, price[node])
    return np.array(taken)


def _num_components(graph: Graph) -> int:
    """Return the number of parts of the graph that no edge joins."""
    inner = graph.edge_source >= 0
    source, reader = graph.edge_source[inner], graph.edges.reader[inner]
    label: Array = np.arange(len(graph))
    while True:
        lower = label.copy()
        np.minimum.at(lower, source, label[reader])
        np.minimum.at(lower, reader, label[source])
        lower = np.minimum(lower, lower[lower])
        if np.array_equal(lower, label):
            return len(np.unique(label))
        label = lower
