"""Parts of a graph that only an expensive transfer can split.

Without the tensors that are cheaper to move than a threshold, a graph falls into parts. Whoever
splits one of the parts moves a tensor of at least that price; whoever does not, keeps it together.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from partita.bounds.paths import steps
from partita.core.columns import Array
from partita.core.graph import Graph
from partita.cost.tables import Units, units
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
    order = np.argsort(-paid)
    source, reader, paid = way.source[order], reader[order], paid[order]
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
            label[x] = label[label[x]]
            x = label[x]
        while label[y] != y:
            label[y] = label[label[y]]
            y = label[y]
        label[max(x, y)] = min(x, y)
    # Roots are the lowest nodes of their parts, so that one pass reaches them all.
    for node in range(len(label)):
        label[node] = label[label[node]]
