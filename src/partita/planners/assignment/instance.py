"""The sharding cost of a problem as plain arrays: nodes, edges between them, devices.

Ops that must share a device are one node. With W_g the weight on device g, t_g its share and c_g a
factor, a placement p of the nodes costs

    Σ_g c_g (W_g - t_g)²  +  Σ_{u -> v} M[p(u), p(v)]  +  Σ_v field[v, p(v)]

For a whole problem c = 1, t = mean of W and field = 0, which is the metric ``sharding-cost``; a
part of it, as the hierarchical search sees one, uses all three.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.bounds.sharding import link_latencies
from partita.core.columns import Array
from partita.core.problem import Mode, Problem
from partita.cost.tables import joined_ops
from partita.errors import InfeasibleError
from partita.planners import obstacle


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """What is placed, and where.

    Attributes:
        node_of: Node of every op.
        weight: Weight of each node.
        source: Source node of each edge between two nodes.
        target: Its target node.
        matrix: Cost of an edge between two devices, diagonal 0.
        share: Weight that each device should have (t).
        factor: What a squared deviation from it costs (c).
        least: Nodes that each device needs at least.
        allowed: Whether a node may be on a device, nodes times devices; ``None`` = anywhere.
        field: Cost of a node on a device, nodes times devices; ``None`` = nothing.
    """

    node_of: Array
    weight: Array
    source: Array
    target: Array
    matrix: Array
    share: Array
    factor: Array
    least: Array
    allowed: NDArray[np.bool_] | None = None
    field: Array | None = None

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.weight)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.matrix)

    def cost(self, place: NDArray[Any]) -> float:
        """Return what a device for each node costs; ``inf`` where a device has too few nodes."""
        if bool((np.bincount(place, minlength=self.num_devices) < self.least).any()):
            return float("inf")
        load = np.bincount(place, self.weight, self.num_devices)
        spread = float((self.factor * (load - self.share) ** 2).sum())
        crossing = float(self.matrix[place[self.source], place[self.target]].sum())
        outside = 0.0
        if self.field is not None:
            outside = float(self.field[np.arange(self.num_nodes), place].sum())
        return spread + crossing + outside


def instance_of(problem: Problem) -> Instance:
    """Return the sharding cost of a problem, whatever its metric.

    Raises:
        InfeasibleError: No device may run all ops of a node.
    """
    graph, size = problem.graph, len(problem.cluster)
    training = problem.objective.mode is Mode.TRAINING
    seconds = graph.forward_s + graph.backward_s if training else graph.forward_s
    node_of, count = joined(graph.ops.colocation)
    inner = graph.edge_source >= 0
    ends = node_of[graph.edge_source[inner]], node_of[graph.edges.reader[inner]]
    between = ends[0] != ends[1]
    weight = np.bincount(node_of, seconds, count)
    return Instance(
        node_of=node_of,
        weight=weight,
        source=ends[0][between],
        target=ends[1][between],
        matrix=link_latencies(problem.cluster),
        share=np.full(size, weight.sum() / size),
        factor=np.ones(size),
        least=np.ones(size, dtype=np.int64),
        allowed=places(problem, node_of, count),
    )


def joined(colocation: NDArray[Any]) -> tuple[Array, int]:
    """Return the node of every op, ops of a colocation class together, and their number.

    Nodes are numbered by their first op.
    """
    _, first, inverse = np.unique(joined_ops(colocation), return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse], len(first)


def places(problem: Problem, node_of: Array, count: int) -> NDArray[np.bool_] | None:
    """Return where each node may be, nodes times devices; ``None`` = all of them anywhere.

    Raises:
        InfeasibleError: No device may run all ops of a node.
    """
    if bool(problem.allowed[1].all()):
        return None
    allowed = obstacle.places(problem, node_of, count)
    stuck = np.flatnonzero(~allowed.any(axis=1))
    if len(stuck):
        raise InfeasibleError(obstacle.no_device(problem, np.flatnonzero(node_of == stuck[0])))
    return allowed


def check_enough(problem: Problem, instance: Instance) -> None:
    """Check that every device can have a node, as the sharding cost asks.

    Raises:
        InfeasibleError: There are too few nodes, or rules leave a device without one; names it.
    """
    nodes, names = instance.num_nodes, problem.cluster.device_names
    if nodes < len(names):
        raise InfeasibleError(
            f"{nodes} ops (classes that share a device count once) cannot fill {len(names)} "
            f"devices, so {names[nodes]!r} would be empty; use at most {nodes} devices"
        )
    empty = np.flatnonzero(one_for_each(instance) < 0)
    if len(empty):
        raise InfeasibleError(
            f"the rules leave no op for device {names[int(empty[0])]!r}, and the sharding cost "
            "asks for one on every device; forbid less, or leave the device out"
        )


def one_for_each(instance: Instance) -> Array:
    """Return a node for each device that may be there, none twice; -1 = there is none left."""
    if instance.allowed is None:
        nodes = np.arange(instance.num_devices)
        return np.where(nodes < instance.num_nodes, nodes, -1)
    from scipy.sparse import csr_array  # noqa: PLC0415 (only where there are rules)
    from scipy.sparse.csgraph import maximum_bipartite_matching  # noqa: PLC0415 (likewise)

    matched: Array = maximum_bipartite_matching(csr_array(instance.allowed), perm_type="row")
    return matched


def part_of(
    instance: Instance, nodes: Array, groups: Sequence[Array], matrix: Array, field: Array
) -> Instance:
    """Return the instance of some nodes over groups of devices.

    A group may hold a node where one of its devices may; its devices share its weight evenly.

    Args:
        instance: The whole.
        nodes: The nodes, ascending.
        groups: The devices of each group.
        matrix: Cost of an edge between groups.
        field: What a node in a group costs with all that is placed elsewhere.
    """
    sizes = np.array([len(group) for group in groups])
    allowed = instance.allowed
    if allowed is not None:
        allowed = np.stack([allowed[nodes][:, group].any(axis=1) for group in groups], axis=1)
    index = np.full(instance.num_nodes, -1)
    index[nodes] = np.arange(len(nodes))
    inner = (index[instance.source] >= 0) & (index[instance.target] >= 0)
    weight = instance.weight[nodes]
    mean = weight.sum() / sizes.sum()
    return replace(
        instance,
        node_of=np.arange(len(nodes)),
        weight=weight,
        source=index[instance.source[inner]],
        target=index[instance.target[inner]],
        matrix=matrix,
        share=mean * sizes,
        factor=1.0 / sizes,
        least=sizes.astype(np.int64),
        allowed=allowed,
        field=field,
    )


def neighbours(instance: Instance) -> tuple[Array, Array, Array, Array]:
    """Return ``(ptr, other, out, back)``: each node's neighbours, with edges to and from them."""
    n = instance.num_nodes
    pair = np.concatenate(
        [instance.source * n + instance.target, instance.target * n + instance.source]
    )
    leads = np.concatenate([np.ones(len(instance.source)), np.zeros(len(instance.source))])
    keys, inverse = np.unique(pair, return_inverse=True)
    out = np.bincount(inverse, leads, len(keys))
    back = np.bincount(inverse, 1.0 - leads, len(keys))
    ptr = np.searchsorted(keys, np.arange(n + 1) * n)
    return ptr.astype(np.int64), (keys % n).astype(np.int64), out, back
