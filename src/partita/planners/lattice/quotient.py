"""Graphs contracted to what a split may cut: sets of ops that stay together, and their order.

Ops of one colocation class are one node. The order of the nodes is that of the forward ops;
explicit backward ops ride with their class. A class without a forward op would float freely: it is
ordered as its mirror image, each backward edge u -> v read as v -> u, which is how the forward ops
that it stands for would lie (Tarnawski et al. 2020 add the same artificial nodes). Nodes on a
common cycle can only be cut together, and become one node.

``O(ops + edges)`` but for sorting; nothing recurses.
"""

from dataclasses import dataclass

import numpy as np

from partita.core.columns import Array, Longs, frozen_array, group_rows, sum_by
from partita.core.graph import Graph
from partita.core.order import is_acyclic, topological_order
from partita.cost.tables import joined_ops
from partita.planners.lattice.nets import Nets, joined_nets, nets_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quotient:
    """A DAG whose nodes are sets of ops that stay together.

    Attributes:
        node_of: The node of every op.
        num_nodes: Nodes are numbered so that edges lead to higher numbers.
        pred_ptr: Node v comes after ``pred[pred_ptr[v]:pred_ptr[v + 1]]``, each once, ascending.
        pred: See ``pred_ptr``.
        succ_ptr: Node v comes before ``succ[succ_ptr[v]:succ_ptr[v + 1]]``, each once, ascending.
        succ: See ``succ_ptr``.
        nets: Tensors (``key``) with the nodes that make and read them, where these are several;
            those of backward ops too, inputs of the model not.
    """

    node_of: Longs
    num_nodes: int
    pred_ptr: Longs
    pred: Longs
    succ_ptr: Longs
    succ: Longs
    nets: Nets

    @property
    def net_tensor(self) -> Longs:
        """The tensor of the graph that each net stands for."""
        return self.nets.key

    @property
    def net_source(self) -> Longs:
        """The node that produces each net."""
        return self.nets.source

    @property
    def net_ptr(self) -> Longs:
        """Where the nodes of each net begin in ``net_pins``."""
        return self.nets.ptr

    @property
    def net_pins(self) -> Longs:
        """The distinct nodes of each net, the source included."""
        return self.nets.pins

    @property
    def edges(self) -> tuple[Longs, Longs]:
        """The precedence edges, as columns of sources and targets."""
        source = np.repeat(np.arange(self.num_nodes, dtype=np.int64), np.diff(self.succ_ptr))
        return source, self.succ


def quotient(graph: Graph, *, merge: Array | None = None) -> Quotient:
    """Return a graph with the ops of each colocation class, and of each cycle, contracted.

    Args:
        graph: The graph.
        merge: A label for each op; ops with the same one are joined as well. -1 = none.
    """
    _, group = np.unique(_first_places(graph, _groups(graph, merge)), return_inverse=True)
    inner = np.flatnonzero(graph.edge_source >= 0)
    source, reader = graph.edge_source[inner], graph.edges.reader[inner]
    before, after = _precedence(graph, group, source, reader)
    node_of_group, source_node, target_node = _settled(int(group.max()) + 1, before, after)
    node_of = node_of_group[group]
    count = int(node_of.max()) + 1
    nets = nets_of(graph.edges.tensor[inner], node_of[source], node_of[reader], count)
    return _quotient(node_of, count, (source_node, target_node), nets)


def unordered_quotient(graph: Graph) -> Quotient:
    """Return the colocation classes of a graph with their nets and no precedence between them.

    For splits whose parts need not follow one another: nothing has to be joined for a cycle.
    """
    _, node_of = np.unique(_first_places(graph, _groups(graph, None)), return_inverse=True)
    count = int(node_of.max()) + 1
    inner = np.flatnonzero(graph.edge_source >= 0)
    source, reader = graph.edge_source[inner], graph.edges.reader[inner]
    nets = nets_of(graph.edges.tensor[inner], node_of[source], node_of[reader], count)
    none = np.zeros(0, dtype=np.int64)
    return _quotient(node_of, count, (none, none), nets)


def _first_places(graph: Graph, group: Array) -> Array:
    """Return, for each op, the place of the first op of its group in the topological order."""
    place = np.empty(len(graph), dtype=np.int64)
    place[graph.topological_order] = np.arange(len(graph))
    first = np.full(int(group.max()) + 1, len(graph))
    np.minimum.at(first, group, place)
    return np.asarray(first[group])


def collapse(q: Quotient, label: Array) -> Quotient:
    """Return a quotient with the nodes of each label joined, and what then lies on a cycle.

    Args:
        q: The quotient.
        label: A label for each node; -1 = the node stays alone.
    """
    group = joined_ops(np.asarray(label))
    before, after = q.edges
    node_of_group, source, target = _settled(int(group.max()) + 1, group[before], group[after])
    node_of_old = node_of_group[group]
    count = int(node_of_old.max()) + 1
    nets = joined_nets(q.nets, node_of_old, count)
    return _quotient(node_of_old[q.node_of], count, (source, target), nets)


def node_sums(q: Quotient, values_per_op: Array) -> Array:
    """Return the sum of a column of the ops, by node."""
    return sum_by(q.node_of, values_per_op, q.num_nodes)


def _quotient(node_of: Array, count: int, edges: tuple[Array, Array], nets: Nets) -> Quotient:
    """Return a quotient from edges that are sorted by source and target, each once."""
    source, target = edges
    succ_ptr, _ = group_rows(source, count)
    pred_ptr, rows = group_rows(target, count)
    return Quotient(
        node_of=frozen_array(node_of, np.int64),
        num_nodes=count,
        pred_ptr=frozen_array(pred_ptr, np.int64),
        pred=frozen_array(source[rows], np.int64),
        succ_ptr=frozen_array(succ_ptr, np.int64),
        succ=frozen_array(target, np.int64),
        nets=nets,
    )


def _groups(graph: Graph, merge: Array | None) -> Array:
    """Return a small number for each set of ops that colocation and ``merge`` tie together."""
    group = joined_ops(graph.ops.colocation)
    if merge is None:
        return group
    label = np.asarray(merge)
    tied = np.flatnonzero(label >= 0)
    root = list(range(int(group.max()) + 1))

    def find(item: int) -> int:
        while root[item] != item:
            root[item] = root[root[item]]
            item = root[item]
        return item

    head: dict[int, int] = {}
    for part, name in zip(group[tied].tolist(), label[tied].tolist(), strict=True):
        first, second = sorted((find(part), find(head.setdefault(name, part))))
        root[second] = first
    _, joined = np.unique([find(item) for item in range(len(root))], return_inverse=True)
    return np.asarray(joined[group])


def _precedence(graph: Graph, group: Array, source: Array, reader: Array) -> tuple[Array, Array]:
    """Return which groups come before which: forward edges, and mirrored ones of orphans."""
    forward = graph.is_forward
    orphan = np.ones(int(group.max()) + 1, dtype=bool)
    orphan[group[forward]] = False
    along = forward[source] & forward[reader]
    back = ~forward[source] & ~forward[reader] & (orphan[group[source]] | orphan[group[reader]])
    before = np.concatenate([group[source[along]], group[reader[back]]])
    after = np.concatenate([group[reader[along]], group[source[back]]])
    return before, after


def _settled(count: int, before: Array, after: Array) -> tuple[Array, Array, Array]:
    """Return the node of each group, and the edges between nodes, sorted and each once.

    Groups on a common cycle become one node; nodes are numbered in a topological order, ties by the
    smallest group.
    """
    cut = before != after
    before, after = before[cut].astype(np.int64), after[cut].astype(np.int64)
    part = np.arange(count)
    if not is_acyclic(count, before, after):
        part = _components(count, before, after)
        count = int(part.max()) + 1
        before, after = part[before], part[after]
        cut = before != after
        before, after = before[cut], after[cut]
    order = topological_order(count, before, after, ())
    number = np.empty(count, dtype=np.int64)
    number[order] = np.arange(count)
    pairs = np.unique(number[before] * count + number[after])
    return number[part], pairs // count, pairs % count


def _components(count: int, before: Array, after: Array) -> Array:
    """Return the strongly connected component of each group, numbered by smallest member."""
    import rustworkx  # noqa: PLC0415 (only where there is a cycle)

    graph = rustworkx.PyDiGraph(multigraph=False)
    graph.add_nodes_from(range(count))
    graph.extend_from_edge_list(list(zip(before.tolist(), after.tolist(), strict=True)))
    smallest = np.empty(count, dtype=np.int64)
    for component in rustworkx.strongly_connected_components(graph):
        smallest[component] = min(component)
    _, part = np.unique(smallest, return_inverse=True)
    return np.asarray(part)
