"""The space that Piper's search goes through: ideals of the graph, and stages between them.

All ideals, where they and the stages between them are few enough; then the search is exact over all
plans. Else a window of ideals around one topological order, over nodes that are joined along that
order until there are few enough.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array, group_rows, sum_by
from partita.core.graph import Graph
from partita.kernels import compiled
from partita.planners.lattice.ideals import Ideals, enumerate_ideals, window
from partita.planners.lattice.quotient import Quotient, collapse, node_sums, quotient
from partita.planners.piper.choices import Choices
from partita.planners.piper.kernels import fill_stages
from partita.planners.piper.tables import Items, Lattice, Nodes, Stages


class Room(NamedTuple):
    """How large a space may become.

    Attributes:
        ideals: Most ideals.
        cells: Most stages, times tensor-parallel degrees.
        window: Most ideals where all of them are too many; the stages between them must fit.
        nodes: Most nodes where the ideals are too many; more are joined along the order.
    """

    ideals: int
    cells: int
    window: int
    nodes: int


THOROUGH = Room(ideals=20_000, cells=1_500_000, window=800, nodes=400)
BRIEF = Room(ideals=1_000, cells=150_000, window=400, nodes=200)
"""For saying why nothing fits, where being exact does not pay."""
MAX_ITEMS = 2_000
"""Ops that choose recomputation one by one; of more, whole nodes choose."""
INTERPRETED = 600
"""Stages times degrees that are left to the interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Space:
    """Everything that does not depend on the time or on the degrees of stages.

    Attributes:
        node_of: The node of every op.
        lattice: The ideals.
        whole: Whether these are all ideals of the graph.
        nodes: Figures of the nodes.
        stages: Figures of the stages.
        items: Slower choices of ops (or nodes) that take less memory.
        item_of: The item of every op.
        is_compiled: Whether it is large enough for compiled kernels.
    """

    node_of: Array
    lattice: Lattice
    whole: bool
    nodes: Nodes
    stages: Stages
    items: Items
    item_of: Array
    is_compiled: bool


def space_of(graph: Graph, choices: Choices, limit_bytes: float, room: Room) -> Space:
    """Return the space of a graph for devices with some memory."""
    q = quotient(graph)
    ideals = enumerate_ideals(q, room.ideals)
    cells = room.cells // len(choices.degrees)
    if ideals is not None:
        found = _filled(graph, choices, limit_bytes, q, ideals, cells)
        if found is not None:
            return found
    known = np.where(np.isfinite(choices.seconds[0]), choices.seconds[0], 0.0)
    q = _shortened(q, node_sums(q, known), room.nodes)
    ideals = window(q, np.arange(q.num_nodes), room.window)
    found = _filled(graph, choices, limit_bytes, q, ideals, len(ideals) ** 2)
    assert found is not None, "all stages have room"
    return replace(found, whole=False)


def _shortened(q: Quotient, weight: Array, most: int) -> Quotient:
    """Join nodes that follow one another in the order, until there are few enough."""
    if q.num_nodes <= most:
        return q
    # Half of a node's place is its share of the weight, half its number.
    place = np.cumsum(weight) / max(float(weight.sum()), 1e-300)
    place = (place + np.arange(1, q.num_nodes + 1) / q.num_nodes) / 2
    return collapse(q, np.minimum((place * most).astype(np.int64), most - 1))


def _filled(
    graph: Graph, choices: Choices, limit_bytes: float, q: Quotient, ideals: Ideals, most: int
) -> Space | None:
    """Return the space with its stages; ``None`` where they are more than ``most``."""
    nodes = _nodes(graph, choices, q)
    lattice = Lattice(
        _members(ideals, q.num_nodes), ideals.step_ptr, ideals.step_target, ideals.step_node
    )
    degrees = len(choices.degrees)
    rows = min(len(ideals) * (len(ideals) - 1) // 2, most)
    is_compiled = rows * degrees > INTERPRETED
    fill = compiled(fill_stages) if is_compiled else fill_stages
    stages = Stages(
        np.zeros(len(ideals) + 1, np.int64),
        np.empty(rows, np.int64),
        np.full(rows, np.iinfo(np.int64).max),
        *(np.empty((rows, degrees)) for _ in range(4)),
        *(np.empty((rows, degrees), np.int64) for _ in range(2)),
    )
    count = fill(nodes, lattice, limit_bytes, stages)
    if count < 0:
        return None
    stages = Stages(stages.ptr, *(np.ascontiguousarray(column[:count]) for column in stages[1:]))
    items, item_of = _items(choices, q)
    return Space(
        node_of=q.node_of,
        lattice=lattice,
        whole=True,
        nodes=nodes,
        stages=stages,
        items=items,
        item_of=item_of,
        is_compiled=is_compiled,
    )


def restricted(space: Space, row_of: Array, matrix: Array) -> Space:
    """Return a space whose stages run only on devices that all of their ops may run on.

    Args:
        space: The space.
        row_of: Row of ``matrix`` for each op.
        matrix: Whether ops of a row may run on each device.
    """
    if matrix.all():
        return space
    stages, member = space.stages, space.lattice.member
    held = np.zeros((member.shape[1], len(matrix)), dtype=np.int64)
    held[space.node_of, row_of] = 1
    lower = np.repeat(np.arange(len(member)), np.diff(stages.ptr))
    rights = ((member[stages.upper] - member[lower]) @ held) > 0
    kinds, kind_of = np.unique(rights, axis=0, return_inverse=True)
    most = np.array([int(matrix[kind].all(axis=0).sum()) for kind in kinds])
    return replace(space, stages=stages._replace(most=most[kind_of.ravel()]))


def _members(ideals: Ideals, num_nodes: int) -> Array:
    """Return whether each node is in each ideal."""
    octets = ideals.sets.astype("<u8").view(np.uint8).reshape(len(ideals), -1)
    return np.unpackbits(octets, axis=1, count=num_nodes, bitorder="little")


def _nodes(graph: Graph, choices: Choices, q: Quotient) -> Nodes:
    def total(values: Array) -> Array:
        return np.stack([node_sums(q, row) for row in values])

    fast = choices.saved + choices.fixed
    least = fast - np.where(
        np.isfinite(choices.extra_s), np.maximum(choices.less_saved + choices.less_fixed, 0), 0
    )
    source, target, edge_of, cut = _node_edges(graph, q)
    count = len(source)

    def by_edge(values: Array) -> Array:
        return np.stack([sum_by(edge_of, row[cut], count) for row in values])

    leave_s = by_edge(choices.leave_s)
    return Nodes(
        total(choices.seconds),
        total(choices.saved),
        total(choices.fixed),
        total(choices.reduce_s),
        total(least),
        np.stack([sum_by(source, row, q.num_nodes) for row in leave_s]),
        group_rows(target, q.num_nodes)[0],
        source,
        by_edge(choices.enter_s),
        leave_s,
        by_edge(choices.kept[None])[0],
    )


def _node_edges(graph: Graph, q: Quotient) -> tuple[Array, Array, Array, Array]:
    """Return source and target of the edges between nodes, by target, and whose sums they are.

    The last two are: the edge between nodes of each edge of the graph that joins two, and those
    edges of the graph. Explicit backward edges are left out: every edge is charged both ways.
    """
    source, reader = graph.edge_source, graph.edges.reader
    cut = np.flatnonzero((source >= 0) & graph.is_forward[reader])
    cut = cut[graph.is_forward[source[cut]]]
    cut = cut[q.node_of[source[cut]] != q.node_of[reader[cut]]]
    key = q.node_of[reader[cut]] * q.num_nodes + q.node_of[source[cut]]
    pairs, edge_of = np.unique(key, return_inverse=True)
    return pairs % q.num_nodes, pairs // q.num_nodes, edge_of, cut


def _items(choices: Choices, q: Quotient) -> tuple[Items, Array]:
    """Return the slower choices, and the item of every op."""
    count = len(q.node_of)
    if count <= MAX_ITEMS:
        columns = (choices.extra_s, choices.less_saved, choices.less_fixed)
        order = _by_rate(*columns)
        item_of = np.empty(count, dtype=np.int64)
        item_of[order] = np.arange(count)
        sorted_columns = (np.ascontiguousarray(column[:, order]) for column in columns)
        return Items(q.node_of[order], *sorted_columns), item_of
    there = np.isfinite(choices.extra_s)

    def total(values: Array) -> Array:
        return np.stack([node_sums(q, row) for row in np.where(there, values, 0.0)])

    extra_s = np.where(total(np.ones(there.shape)) > 0, total(choices.extra_s), np.inf)
    less = (total(choices.less_saved), total(choices.less_fixed))
    return Items(np.arange(q.num_nodes), extra_s, *less), q.node_of


def _by_rate(extra_s: Array, less_saved: Array, less_fixed: Array) -> Array:
    """Return items nearly in the order of seconds a byte, like ones together."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.nan_to_num(extra_s[0] / less_saved[0], nan=np.inf)
    keys = [row for column in (less_fixed, less_saved, extra_s) for row in column]
    return np.lexsort([*keys, rate])
