"""Orders on directed graphs given as columns of sources and destinations; no recursion."""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.core.columns import group_rows
from partita.errors import InvalidInputError


def topological_order(
    num_nodes: int, source: NDArray[Any], target: NDArray[Any], names: Sequence[str]
) -> NDArray[np.int32]:
    """Return the nodes with every source before its target; ties by smallest index.

    Linear where the nodes are already numbered so; else O((nodes + edges) log nodes).

    Raises:
        InvalidInputError: There is a cycle; names one.
    """
    if bool((source < target).all()):
        return np.arange(num_nodes, dtype=np.int32)
    order, waiting = _kahn(num_nodes, source, target)
    if len(order) < num_nodes:
        cycle = _some_cycle(waiting, source, target)
        path = " -> ".join(repr(names[node]) for node in [*cycle, cycle[0]][:8])
        more = "" if len(cycle) < 8 else f" ... ({len(cycle)} in all)"
        raise InvalidInputError(f"the graph has a cycle: {path}{more}; expected a DAG")
    return np.array(order, dtype=np.int32)


def is_acyclic(num_nodes: int, source: NDArray[Any], target: NDArray[Any]) -> bool:
    """Return whether a directed graph has no cycle."""
    if bool((source < target).all()):
        return True
    return len(_kahn(num_nodes, source, target)[0]) == num_nodes


def _kahn(
    num_nodes: int, source: NDArray[Any], target: NDArray[Any]
) -> tuple[list[int], list[int]]:
    by_source = np.argsort(source, kind="stable")
    targets = target[by_source].tolist()
    pointers = np.zeros(num_nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(source, minlength=num_nodes), out=pointers[1:])
    begin = pointers.tolist()
    waiting = np.bincount(target, minlength=num_nodes).tolist()
    ready = [node for node, count in enumerate(waiting) if count == 0]
    order: list[int] = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for after in targets[begin[node] : begin[node + 1]]:
            waiting[after] -= 1
            if waiting[after] == 0:
                heapq.heappush(ready, after)
    return order, waiting


def _some_cycle(waiting: list[int], source: NDArray[Any], target: NDArray[Any]) -> list[int]:
    """Return a cycle among the nodes that still wait: each has a predecessor that waits too."""
    before: dict[int, int] = {}
    for start, end in zip(source.tolist(), target.tolist(), strict=True):
        if waiting[start] > 0 and waiting[end] > 0:
            before.setdefault(end, start)
    node = next(iter(before))
    seen: dict[int, int] = {}
    walk: list[int] = []
    while node not in seen:
        seen[node] = len(walk)
        walk.append(node)
        node = before[node]
    return walk[seen[node] :][::-1]


def csr(
    source: NDArray[Any], target: NDArray[Any], num_nodes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ``(ptr, targets)`` of a graph: node n leads to ``targets[ptr[n]:ptr[n + 1]]``."""
    pointers, rows = group_rows(source, num_nodes)
    return pointers, target[rows].astype(np.int64)
