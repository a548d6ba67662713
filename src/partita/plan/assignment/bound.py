"""A sharding cost that no placement can beat.

Two terms that do not share an edge or a weight, so their sum is a bound:

* Spread. The j heaviest nodes lie on at most j devices, so the j heaviest devices weigh at least as
  much. Of all loads that keep this, the flattest has the nodes that are heavier than the mean of
  what is left on devices of their own, and the rest evenly on the others: a sum of squares of
  deviations is Schur-convex, and these loads are majorised by all others. Where all weights are
  multiples of some unit, so are the loads, and "evenly" means the two nearest multiples.
* Cut. Every device holds a node. A graph of c connected parts leaves the devices joined by crossing
  edges in at most c parts, so that the crossing edges hold a forest of k - c links, each paid at
  the cheaper of its two directions at least: the k - c lightest edges of a minimum spanning tree.

O(n log n + k²). The heaviest nodes and the cut hold for any rules, which only remove placements.
"""

import math
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.problem import Problem
from partita.plan.assignment.instance import Instance, instance_of

_DECIMALS = 9
_MAX_UNITS = 2**52


class ShardingBound(NamedTuple):
    """A bound and its larger term.

    Attributes:
        value: No placement costs less.
        term: ``"spread"`` or ``"cut"``.
    """

    value: float
    term: str


def sharding_bound(problem: Problem) -> ShardingBound:
    """Return a sharding cost that no plan of a problem can beat, and the term that gives most."""
    return instance_bound(instance_of(problem))


def instance_bound(instance: Instance) -> ShardingBound:
    """Return the bound of an instance that stands for a whole problem."""
    spread = least_spread(instance.weight, instance.num_devices)
    cut = least_cut(instance)
    return ShardingBound(spread + cut, "spread" if spread > cut else "cut")


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
    unit = common_unit(weight)
    if unit > 0:
        rest = round(left / unit) % devices
        spread += unit**2 * rest * (devices - rest) / devices
    return spread


def common_unit(weight: Array) -> float:
    """Return the largest number that all weights are multiples of; 0 = none of few digits."""
    for decimals in range(_DECIMALS + 1):
        scaled = weight * 10.0**decimals
        if scaled.sum() >= _MAX_UNITS:
            return 0.0
        whole = np.rint(scaled)
        if bool((np.abs(scaled - whole) <= 1e-12 * np.maximum(1.0, scaled)).all()):
            unit = math.gcd(*whole.astype(np.int64).tolist())
            return float(unit / 10.0**decimals)
    return 0.0


def least_cut(instance: Instance) -> float:
    """Return what the edges between devices cost at least."""
    parts = _num_parts(instance)
    cheaper = np.minimum(instance.matrix, instance.matrix.T)
    links = np.sort(tree_links(cheaper))
    return float(links[: max(0, instance.num_devices - parts)].sum())


def _num_parts(instance: Instance) -> int:
    """Return the number of connected parts of the graph, by union and find."""
    parent = list(range(instance.num_nodes))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    parts = instance.num_nodes
    for a, b in zip(instance.source.tolist(), instance.target.tolist(), strict=True):
        one, other = root(a), root(b)
        if one != other:
            parent[one] = other
            parts -= 1
    return parts


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
