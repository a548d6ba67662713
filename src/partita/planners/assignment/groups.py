"""Groups of near devices, and placements that are found group by group.

The nodes are split among the outermost groups first, then inside each, down to devices. A split is
an instance of its own: the weight of a group is that of its devices, an edge between two groups
costs the mean over their devices, and the edges to nodes outside count with where those are known
to be, so that neighbours end up near across the borders of a group, too.
"""

from collections.abc import Sequence

import numpy as np

from partita.bounds.sharding import tree_links
from partita.core.columns import Array
from partita.core.problem import Problem
from partita.errors import InvalidInputError
from partita.planners.assignment.descent import improved
from partita.planners.assignment.instance import Instance, part_of
from partita.planners.assignment.starts import starts
from partita.planners.effort import Effort

_SMALL = 64
_MAX_LEVELS = 6


def group_levels(problem: Problem, matrix: Array, sizes: Sequence[int] = ()) -> list[Array]:
    """Return the group of each device at each level, outermost first; single devices last.

    Args:
        problem: The problem.
        matrix: Cost of an edge between devices.
        sizes: Groups at each level, as ``2, 3, 4``: two groups of three of four devices in the
            order of their numbers. Empty = the levels of the cluster; without levels what the
            published instance says, if it is true of the matrix; else clusters of the matrix.

    Raises:
        InvalidInputError: The sizes do not multiply to the number of devices.
    """
    count = len(matrix)
    each = np.arange(count)
    if sizes:
        levels = _blocks(sizes, count)
    elif problem.cluster.levels:
        levels = [level.group_of.astype(np.int64) for level in reversed(problem.cluster.levels)]
    else:
        noted = _noted(problem, matrix)
        levels = noted if noted else _clusters(matrix)
    distinct = [np.unique(level, return_inverse=True)[1] for level in levels]
    kept = [level for level in distinct if 1 < level.max() + 1 < count]
    return [*kept, each]


def _blocks(sizes: Sequence[int], count: int) -> list[Array]:
    if any(size < 1 for size in sizes) or int(np.prod(sizes)) != count:
        shown = " x ".join(str(size) for size in sizes)
        raise InvalidInputError(f"groups {shown} are not the {count} devices there are")
    made = np.cumprod(sizes)
    return [np.arange(count) // (count // int(groups)) for groups in made]


def _noted(problem: Problem, matrix: Array) -> list[Array]:
    """Return the levels that the instance states, where groups are nearer inside than outside."""
    stated = problem.graph.annotations.get("dynamicml", {}).get("k_values", ())
    sizes = [size for size in stated if isinstance(size, int)]
    if len(sizes) < 2 or int(np.prod(sizes)) != len(matrix):
        return []
    levels = _blocks(sizes, len(matrix))
    apart = ~np.eye(len(matrix), dtype=bool)
    for level in levels:
        same = level[:, None] == level[None, :]
        inside, outside = matrix[same & apart], matrix[~same]
        if len(inside) and len(outside) and inside.max() > outside.min():
            return []
    return levels


def _clusters(matrix: Array) -> list[Array]:
    """Return the parts joined by links up to some cost, for a few costs, the highest first."""
    cost = np.maximum(matrix, matrix.T)
    steps = np.unique(tree_links(cost))[::-1][1:]
    if len(steps) > _MAX_LEVELS:
        steps = steps[np.linspace(0, len(steps) - 1, _MAX_LEVELS).astype(int)]
    return [_joined_up_to(cost, float(step)) for step in steps]


def _joined_up_to(cost: Array, limit: float) -> Array:
    size = len(cost)
    label = np.full(size, -1)
    for device in range(size):
        if label[device] >= 0:
            continue
        label[device] = device
        stack = [device]
        while stack:
            near = np.flatnonzero((cost[stack.pop()] <= limit) & (label < 0))
            label[near] = device
            stack += near.tolist()
    return label


def placed_by_groups(
    instance: Instance, levels: Sequence[Array], effort: Effort, *, iterations: int, seed: int
) -> Array:
    """Return a placement that is found from the outermost groups to the devices.

    Args:
        instance: What is placed.
        levels: Group of each device at each level, the last one all devices.
        effort: Limits.
        iterations: Temperatures for a split of all nodes; smaller ones get a part of it.
        seed: Of the random numbers.
    """
    where = np.zeros(instance.num_nodes, dtype=np.int64)
    outer = np.zeros(instance.num_devices, dtype=np.int64)
    for level in levels:
        splitting = _Splitting(instance, outer, level, where)
        for block in range(int(outer.max()) + 1):
            splitting.split(block, effort, iterations=iterations, seed=seed)
        where, outer = splitting.found, level
    return where


class _Splitting:
    """One level: nodes in outer groups are split among the inner groups of each.

    Attributes:
        found: Inner group of each node, -1 before its outer group was split.
    """

    def __init__(self, instance: Instance, outer: Array, inner: Array, where: Array) -> None:
        self.found = np.full(instance.num_nodes, -1)
        self._instance = instance
        self._where = where
        self._groups = [np.flatnonzero(inner == group) for group in range(int(inner.max()) + 1)]
        self._outer_of = outer[[int(group[0]) for group in self._groups]]
        # Edges from an inner group to an inner one, to an outer one, and the same way back.
        self._near = _mean_costs(instance.matrix, inner, inner)
        self._out = _mean_costs(instance.matrix, inner, outer)
        self._back = _mean_costs(instance.matrix, outer, inner)

    def split(self, block: int, effort: Effort, *, iterations: int, seed: int) -> None:
        """Split the nodes of an outer group."""
        inside = np.flatnonzero(self._outer_of == block)
        nodes = np.flatnonzero(self._where == block)
        if len(inside) == 1:
            self.found[nodes] = inside[0]
            return
        part = part_of(
            self._instance,
            nodes,
            [self._groups[group] for group in inside.tolist()],
            self._near[np.ix_(inside, inside)],
            self._field(nodes, inside),
        )
        start = starts(part)[0]
        if len(nodes) >= _SMALL and np.isfinite(part.cost(start)) and not effort.is_over():
            rounds = max(2, iterations * len(nodes) // self._instance.num_nodes)
            start, _ = improved(
                part,
                effort.within(),
                start=start,
                restarts=2,
                iterations=rounds,
                seed=seed,
                heats=(0.3, 1.0),
            )
        self.found[nodes] = inside[start]

    def _field(self, nodes: Array, inside: Array) -> Array:
        """Return what the edges to other outer groups cost, by node and inner group."""
        instance = self._instance
        row = np.full(instance.num_nodes, -1)
        row[nodes] = np.arange(len(nodes))
        field = np.zeros((len(nodes), len(inside)))
        for here, there, near, far in (
            (instance.source, instance.target, self._near, self._out),
            (instance.target, instance.source, self._near.T, self._back.T),
        ):
            leaves = np.flatnonzero((row[here] >= 0) & (row[there] < 0))
            other = there[leaves]
            known = self.found[other] >= 0
            costs = np.where(
                known[:, None],
                near[inside][:, self.found[other]].T,
                far[inside][:, self._where[other]].T,
            )
            np.add.at(field, row[here[leaves]], costs)
        return field


def _mean_costs(matrix: Array, rows: Array, columns: Array) -> Array:
    """Return the mean cost of an edge from each group of some devices to each group of others.

    Inside a group 0, as the nodes of a group may still share a device.
    """
    sums = matrix
    for axis, label in ((0, rows), (1, columns)):
        order = np.argsort(label, kind="stable")
        begin = np.flatnonzero(np.diff(label[order], prepend=-1))
        sums = np.add.reduceat(np.take(sums, order, axis=axis), begin, axis=axis)
    pairs = np.outer(np.bincount(rows), np.bincount(columns))
    means: Array = sums / pairs
    if rows is columns:
        np.fill_diagonal(means, 0.0)
    return means
