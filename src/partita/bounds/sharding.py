"""Bounds of DynamicMLTrainer's sharding cost: its two sums, each at its least.

They share no edge and no weight, so their sum is a bound.

* Spread. The j heaviest units (ops that must share a device) lie on at most j devices, so the j
  heaviest devices weigh at least as much. Of all loads that keep this, the flattest has the units
  that are heavier than the mean of what is left on devices of their own, and the rest evenly on the
  others: a sum of squares of deviations is Schur-convex, and these loads are majorised by all
  others. Where all weights are multiples of some number, so are the loads, and "evenly" means the
  two nearest multiples.
* Cut. Every device holds an op. A graph of c connected parts leaves the devices joined by crossing
  edges in at most c parts, so that the crossing edges hold a forest of k - c links, each paid at
  the cheaper of its two directions at least: the k - c lightest edges of a minimum spanning tree.

O(n log n + k²). Both hold for any rules, which only remove placements.
"""

import math
from collections.abc import Iterator

import numpy as np

from partita.bounds.figures import Bound, Effort, trains
from partita.core.cluster import Cluster
from partita.core.columns import Array
from partita.core.graph import Graph
from partita.core.problem import Problem
from partita.cost.tables import units
from partita.errors import InvalidInputError

_DECIMALS = 9
MAX_PAIRED = 4096
"""Devices of which each pair is looked at: 128 MiB for each column of pairs."""
_MAX_MULTIPLES = 2**52


def sharding_bounds(problem: Problem, effort: Effort) -> Iterator[Bound]:
    """Yield the bound, named for its larger part."""
    del effort
    graph, cluster = problem.graph, problem.cluster
    seconds = graph.forward_s + graph.backward_s if trains(problem) else graph.forward_s
    spread = least_spread(units(graph).total(seconds), len(cluster))
    latency = link_latencies(cluster)
    links = np.sort(tree_links(np.minimum(latency, latency.T)))
    cut = float(links[: max(0, len(cluster) - _num_parts(graph))].sum())
    yield Bound(spread + cut, "spread of weights" if spread > cut else "cut")


def link_latencies(cluster: Cluster) -> Array:
    """Return the latency between each two devices, source by target, 0 on the diagonal.

    Raises:
        InvalidInputError: There are so many devices that their pairs do not fit in memory.
    """
    size = len(cluster)
    if size > MAX_PAIRED:
        raise InvalidInputError(
            f"cluster {cluster.name!r} has {size:,} devices; the metric looks at each pair of "
            f"devices and takes at most {MAX_PAIRED:,}; use fewer, or --objective throughput"
        )
    source, target = np.divmod(np.arange(size * size), size)
    latency = np.zeros(size * size)
    apart = source != target
    latency[apart] = cluster.links(source[apart], target[apart]).latency_s
    return latency.reshape(size, size)


def least_spread(weight: Array, num_devices: int) -> float:
    """Return the least sum of squared deviations of loads from their mean."""
    total = float(weight.sum())
    mean = total / num_devices
    spread, left, devices = 0.0, total, num_devices
    for heavy in np.sort(weight)[::-1].tolist():
        if devices == 1 or heavy * devices <= left:
            break
        spread += (heavy - mean) ** 2
        left -= heavy
        devices -= 1
    spread += devices * (left / devices - mean) ** 2
    step = common_step(weight)
    if step > 0:
        rest = round(left / step) % devices
        spread += step**2 * rest * (devices - rest) / devices
    return spread


def common_step(weight: Array) -> float:
    """Return the largest number that all weights are multiples of; 0 = none of few digits."""
    for decimals in range(_DECIMALS + 1):
        scaled = weight * 10.0**decimals
        if scaled.sum() >= _MAX_MULTIPLES:
            return 0.0
        whole = np.rint(scaled)
        if bool((np.abs(scaled - whole) <= 1e-12 * np.maximum(1.0, scaled)).all()):
            return float(math.gcd(*whole.astype(np.int64).tolist()) / 10.0**decimals)
    return 0.0


def tree_links(cost: Array) -> Array:
    """Return the links of a minimum spanning tree of all devices (Prim, O(k²))."""
    size = len(cost)
    nearest = cost[0].copy()
    outside = np.ones(size, dtype=bool)
    outside[0] = False
    links = np.zeros(size - 1)
    for step in range(size - 1):
        device = int(np.argmin(np.where(outside, nearest, np.inf)))
        links[step] = nearest[device]
        outside[device] = False
        nearest = np.minimum(nearest, cost[device])
    return links


def _num_parts(graph: Graph) -> int:
    """Return the number of parts of the graph that neither an edge nor a unit joins."""
    own = units(graph)
    inner = graph.edge_source >= 0
    source, reader = own.of[graph.edge_source[inner]], own.of[graph.edges.reader[inner]]
    label: Array = np.arange(own.num_units)
    while True:
        lower = label.copy()
        np.minimum.at(lower, source, label[reader])
        np.minimum.at(lower, reader, label[source])
        lower = np.minimum(lower, lower[lower])
        if np.array_equal(lower, label):
            return len(np.unique(label))
        label = lower
