"""Hyperedges of a contracted graph: a producer with all that read from it, paid once per device."""

from dataclasses import dataclass

import numpy as np

from partita.core.columns import Array, Longs, group_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nets:
    """Sets of nodes that a cut pays for when they are not all on one side.

    Attributes:
        key: What each net stands for, such as a tensor of the graph.
        source: The node that produces it.
        ptr: Net i has the nodes ``pins[ptr[i]:ptr[i + 1]]``, the source among them, ascending.
        pins: See ``ptr``.
    """

    key: Longs
    source: Longs
    ptr: Longs
    pins: Longs

    def __len__(self) -> int:
        return len(self.key)


def nets_of(key: Array, source: Array, reader: Array, num_nodes: int) -> Nets:
    """Return the nets that span two nodes or more.

    Args:
        key: The net that each edge belongs to.
        source: The node that each edge leaves; the same for all edges of a net.
        reader: The node that each edge enters.
        num_nodes: Number of nodes.
    """
    cut = source != reader
    key, source, reader = (np.asarray(column[cut], np.int64) for column in (key, source, reader))
    found, first, net = np.unique(key, return_index=True, return_inverse=True)
    pairs = np.unique(np.concatenate([net * num_nodes + source, net * num_nodes + reader]))
    ptr = np.zeros(len(found) + 1, dtype=np.int64)
    np.cumsum(np.bincount(pairs // max(num_nodes, 1), minlength=len(found)), out=ptr[1:])
    return Nets(key=found, source=source[first], ptr=ptr, pins=pairs % max(num_nodes, 1))


def joined_nets(nets: Nets, label: Array, num_nodes: int) -> Nets:
    """Return the nets after nodes with one label have become one node."""
    size = np.diff(nets.ptr)
    return nets_of(
        np.repeat(nets.key, size),
        label[np.repeat(nets.source, size)],
        label[nets.pins],
        num_nodes,
    )


def nets_by_node(nets: Nets, num_nodes: int) -> tuple[Longs, Longs]:
    """Return ``(ptr, nets)``: the nets that each node is a pin of, ascending."""
    ptr, rows = group_rows(nets.pins, num_nodes)
    net = np.repeat(np.arange(len(nets), dtype=np.int64), np.diff(nets.ptr))
    return ptr, net[rows]
