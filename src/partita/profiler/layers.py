"""Layers as published partitions count them, put on the ops of a captured graph."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from partita.core.graph import Graph, Labels
from partita.errors import InvalidInputError


def label_layers(graph: Graph, layers: Sequence[tuple[str, Sequence[str]]]) -> Graph:
    """Return a graph whose ops carry the layers of published partitions.

    An op belongs to the layer with the longest module path above it. One of no layer belongs to
    that of the op before it (the loss to the last), and the first ones to the first layer.

    Args:
        graph: A captured graph, whose ops know their modules.
        layers: Name and module paths of each layer, in order; none = the graph as it is.

    Raises:
        InvalidInputError: A layer holds no op: the paths are not of this model.
    """
    if not layers:
        return graph
    row_of = {path: row for row, (_, paths) in enumerate(layers) for path in paths}
    modules, current, rows = graph.ops.modules, 0, []
    for label in modules.of.tolist():
        path = modules.names[label] if label >= 0 else ""
        while path and path not in row_of:
            path = path.rpartition(".")[0]
        current = row_of.get(path, current)
        rows.append(current)
    names = tuple(name for name, _ in layers)
    missing = sorted(set(range(len(names))) - set(rows))
    if missing:
        raise InvalidInputError(
            f"layer {names[missing[0]]!r} holds no op of {graph.name!r}; its modules are not there"
        )
    labels = Labels(names=names, of=np.array(rows))
    return replace(graph, ops=replace(graph.ops, layers=labels))
