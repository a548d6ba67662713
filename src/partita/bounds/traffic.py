"""Bounds by what has to travel between groups of devices: single devices, hosts, racks.

Without the tensors that are cheaper to move than a threshold, a graph falls into parts. Whoever
splits one of the parts moves a tensor of at least that price; whoever does not, keeps it together.

Take a part H of the graph that cannot be split below a price, and the groups of one level. A
microbatch has H whole in one group, or it crosses: then it moves a tensor of at least that
price between groups, and its gradient back.

* Two groups have microbatches whole: then both hold all parameters of H, whose gradients are
  reduced between them. Every ring leaves each of its groups, at least once: P bytes over what
  leaves the group.
* One group g alone has: with z the share of samples that cross, g does (1 - z) of the work of H,
  and the ports between groups carry z of the price. The larger is least at ``A K / (A + K)``, with
  A the seconds of H in group g and K those of the ports if all cross.

Groups with one port share it among all their devices. Not applied to graphs with tensor-parallel
variants, whose ops may be split over groups, nor to inference, which reduces nothing.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from partita.bounds.assignment import speed_weights
from partita.bounds.figures import Bound, batch_of, trains
from partita.bounds.paths import steps
from partita.core.cluster import Cluster
from partita.core.columns import Array
from partita.core.graph import Graph
from partita.core.precision import wire_bytes
from partita.core.problem import Problem
from partita.cost.tables import Units, at_first_user, device_classes, units
from partita.kernels import Column, kernel, run

QUANTILES = (0.5, 0.2, 0.0)


class Part(NamedTuple):
    """A part of a graph.

    Attributes:
        holds: Whether it holds each op.
        price: Least price of a tensor whose ends are on both sides, if the part is split.
    """

    holds: Array
    price: float


def parts(graph: Graph, price: Array, weight: Array) -> Iterator[Part]:
    """Yield the heaviest part for several thresholds.

    Args:
        graph: The graph.
        price: What it costs to move each tensor between forward ops.
        weight: Weight of each op.
    """
    way = steps(graph)
    if not len(way.source):
        return
    reader = np.repeat(np.arange(len(graph)), np.diff(way.ptr))
    paid = price[way.tensor]
    # The dearest first: thresholds fall, and each joins only the edges since the one before.
    order = np.argsort(-paid)
    source, reader, paid = way.source[order], reader[order], paid[order]
    # Ops that must stay together are one part from the start.
    label, done = _first_of_group(units(graph)), 0
    quantiles = dict.fromkeys(paid[int((1 - q) * (len(paid) - 1))] for q in QUANTILES)
    for threshold in (float(value) for value in quantiles if value > 0):
        count = int(np.searchsorted(-paid, -threshold, side="right"))
        run(_unite, len(paid), [source[done:count], reader[done:count]], [label])
        done = count
        heaviest = int(np.argmax(np.bincount(label, weights=weight, minlength=len(graph))))
        yield Part(label == heaviest, threshold)


def _first_of_group(group: Units) -> Array:
    """Return the first op of each op's unit."""
    if group.num_units == len(group.of):
        return np.arange(len(group.of))
    _, first = np.unique(group.of, return_index=True)
    return np.asarray(first[group.of])


@kernel
def _unite(a: Column, b: Column, label: Column) -> None:
    """Join the parts of two nodes in each row; ``label`` is the root of the part of each node."""
    for row in range(len(a)):
        x, y = a[row], b[row]
        while label[x] != x:
            # Halving the path on the way keeps later walks short.
            label[x] = label[label[x]]
            x = label[x]
        while label[y] != y:
            label[y] = label[label[y]]
            y = label[y]
        label[max(x, y)] = min(x, y)
    # Roots are the lowest nodes of their parts, so that one pass reaches them all.
    for node in range(len(label)):
        label[node] = label[label[node]]


class Groups(NamedTuple):
    """Groups of devices, and what leaves them.

    Attributes:
        of: The group of each device.
        leaving_bytes_per_s: Most that all ports out of a group carry in a collective, by group.
        fastest_bytes_per_s: Largest bandwidth of a link between groups.
        latency_s: Least latency of a link between groups.
        num_ports: Ports out that links between groups use.
    """

    of: Array
    leaving_bytes_per_s: Array
    fastest_bytes_per_s: float
    latency_s: float
    num_ports: int


def groups_of(cluster: Cluster) -> Iterator[Groups]:
    """Yield the groups of every level that has several, single devices first."""
    size = len(cluster)
    if size < 2:
        return
    # A matrix has a port for every ordered pair, and no groups but single devices.
    if cluster.matrix is not None:
        rate = cluster.matrix.bandwidth_bytes_per_s.reshape(size, size).copy()
        np.fill_diagonal(rate, 0.0)
        apart = ~np.eye(size, dtype=bool).ravel()
        wait = float(cluster.matrix.latency_s[apart].min())
        ports = size * (size - 1)
        yield Groups(np.arange(size), rate.sum(axis=1), float(rate.max()), wait, ports)
        return
    owner: Array = np.arange(size)
    for inner in range(len(cluster.levels)):
        if len(np.unique(owner)) > 1:
            yield _groups(cluster, owner, inner)
        owner = cluster.levels[inner].group_of


def _groups(cluster: Cluster, owner: Array, inner: int) -> Groups:
    """Return groups that levels from ``inner`` on join."""
    _, first, of = np.unique(owner, return_index=True, return_inverse=True)
    sizes = np.bincount(of.ravel())
    leaving, ports, fastest, wait = np.zeros(len(first)), 0, 0.0, np.inf
    child = owner
    for level in cluster.levels[inner:]:
        # A group may leave through its ports at every level above it, and the bound must allow for
        # all of them together.
        rate = level.bandwidth_bytes_per_s[level.group_of[first]]
        # Collectives may be faster than transfers: in switches, or over several links at once.
        most = level.fastest_collective_bytes_per_s[level.group_of[first]]
        leaving = leaving + most * (sizes if level.port_per_device else 1)
        ports += len(cluster) if level.port_per_device else len(np.unique(child))
        fastest = max(fastest, float(rate.max()))
        wait = min(wait, float(level.latency_s[level.group_of[first]].min()))
        child = level.group_of
    return Groups(of.ravel(), leaving, fastest, wait, ports)


def traffic_bounds(problem: Problem, total: Array) -> Iterator[Bound]:
    """Yield bounds of a step by what travels.

    Args:
        problem: The problem.
        total: ``[classes, ops]``: device-seconds of each op in a step.
    """
    if not trains(problem) or len(problem.graph.variants):
        return
    table = problem.graph.parameters
    moved = wire_bytes(table, problem.objective.precision).reduced
    trained = at_first_user(problem.graph, np.where(table.trainable, moved, 0.0))
    weights = speed_weights(total)
    for groups in groups_of(problem.cluster):
        if not np.isfinite(groups.fastest_bytes_per_s) and not _timed(problem):
            continue
        price = _price_s(problem, groups)
        for part in parts(problem.graph, price, total.min(axis=0)):
            alone = seconds_in_groups(problem, groups, total[:, part.holds], weights)
            crossing = part.price * batch_of(problem).batches / groups.num_ports
            with np.errstate(divide="ignore"):
                # A K / (A + K) for the best group, as a sum of inverses that also holds for 0 and
                # infinity.
                split = float((1 / (1 / alone + 1 / crossing)).min())
            reduced = float(trained[part.holds].sum() / groups.leaving_bytes_per_s.max())
            # Either case may be what a plan does: the lower of the two is the bound.
            yield Bound(split, "cut") if split < reduced else Bound(reduced, "gradient reduction")


def _timed(problem: Problem) -> bool:
    """Return whether some tensor's seconds are given."""
    return not bool(np.isnan(problem.graph.tensors.transfer_s).all())


def _price_s(problem: Problem, groups: Groups) -> Array:
    """Return the port-seconds to move each tensor of a batch between groups, and its gradient."""
    tensors = problem.graph.tensors
    size = (tensors.bytes - tensors.bytes_at(0.0)) / groups.fastest_bytes_per_s
    once = np.where(np.isnan(tensors.transfer_s), size, tensors.transfer_s)
    return once * np.where(tensors.differentiable, 2.0, 1.0)


def seconds_in_groups(problem: Problem, groups: Groups, cost: Array, weights: Array) -> Array:
    """Return the least seconds of some work inside each group; inf where it may not run."""
    classes = device_classes(problem)
    size = len(groups.leaving_bytes_per_s)
    held = np.zeros((size, len(classes.sizes)))
    np.add.at(held, (groups.of, classes.of), 1.0)
    # Groups with the same classes take the same least cost; each kind is summed once.
    kinds, of = np.unique(held > 0, axis=0, return_inverse=True)
    weighted = cost * weights[:, None]
    least = np.array([weighted[kind].min(axis=0).sum() for kind in kinds])
    result: Array = least[of.ravel()] / (held @ weights)
    return result
