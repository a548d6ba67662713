"""Annotations: fields of a foreign file that no column of a graph holds, on their way back."""

from collections.abc import Mapping
from typing import Any

from partita.core.graph import Graph

_OP_PARTS = ("nodes", "names")
_EDGE_PARTS = ("edges", "edge_ids", "edge_sizes")


def kept_notes(graph: Graph, name: str) -> dict[str, Any]:
    """Return the annotations that a format left with a graph, as far as they still fit it.

    Columns go with the rows of the graph: where ops or edges were added or removed since, those of
    another length are left out.

    Args:
        graph: The graph.
        name: Name of the format.
    """
    notes = graph.annotations.get(name, {})
    found = dict(notes) if isinstance(notes, Mapping) else {}
    for parts, rows in ((_OP_PARTS, len(graph)), (_EDGE_PARTS, len(graph.edges))):
        for part in parts:
            if part in found:
                found[part] = _fitting(found[part], rows)
    return found


def _fitting(part: Any, rows: int) -> Any:  # noqa: ANN401 (JSON is any value)
    if isinstance(part, Mapping):
        return {key: column for key, column in part.items() if _fits(column, rows)}
    return part if _fits(part, rows) else ()


def _fits(column: object, rows: int) -> bool:
    return isinstance(column, tuple) and len(column) == rows
