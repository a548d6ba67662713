"""Hot loops over columns, interpreted on small inputs and compiled on large ones.

A kernel is a plain function that only indexes its arguments, so that it runs on lists and, compiled
by Numba with an on-disk cache, on arrays. Numba is imported only where it pays: for an input of
``COMPILE_FROM`` rows, or once a kernel was interpreted on ``COMPILE_AFTER`` rows in all, as a
search over many plans does.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from partita.core.columns import Array

COMPILE_FROM = 30_000
COMPILE_AFTER = 3_000_000
_interpreted: Counter[Callable[..., None]] = Counter()
"""Rows that each kernel was interpreted on, which decides how it runs and not what it returns."""

Column: TypeAlias = Any
"""What a kernel indexes: a list, or compiled an array."""


@cache
def _compiled(kernel: Callable[..., None]) -> Callable[..., None]:
    from numba import njit  # noqa: PLC0415 (loaded only where it pays)

    result: Callable[..., None] = njit(cache=True)(kernel)
    return result


def run_kernel(
    kernel: Callable[..., None],
    size: int,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
) -> None:
    """Run a kernel on inputs, filling outputs, interpreted or compiled.

    Args:
        kernel: The kernel.
        size: Rows that it works on, in all calls together where the caller knows of more.
        inputs: Columns that it reads.
        outputs: Columns that it changes.
    """
    if size >= COMPILE_FROM or _interpreted[kernel] >= COMPILE_AFTER:
        _compiled(kernel)(*inputs, *outputs)
        return
    _interpreted[kernel] += size
    lists = [array.tolist() for array in outputs]
    kernel(*(array.tolist() for array in inputs), *lists)
    for array, values in zip(outputs, lists, strict=True):
        array[:] = values


def csr(source: Array, target: Array, num_nodes: int) -> tuple[Array, Array]:
    """Return ``(ptr, targets)`` of a graph, the targets of each source together."""
    order = np.argsort(source, kind="stable")
    pointers = np.zeros(num_nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(source, minlength=num_nodes), out=pointers[1:])
    return pointers, target[order].astype(np.int64)


def longest_levels(
    ptr: Column, targets: Column, waiting: Column, queue: Column, level: Column, count: Column
) -> None:
    """Fill ``level`` with the longest path to each node, ``count[0]`` with the nodes reached."""
    tail = 0
    for node in range(len(level)):
        if waiting[node] == 0:
            queue[tail] = node
            tail += 1
    head = 0
    while head < tail:
        node = queue[head]
        head += 1
        above = level[node] + 1
        for edge in range(ptr[node], ptr[node + 1]):
            after = targets[edge]
            level[after] = max(level[after], above)
            waiting[after] -= 1
            if waiting[after] == 0:
                queue[tail] = after
                tail += 1
    count[0] = tail


def heaviest_suffix(ptr: Column, targets: Column, weight: Column, total: Column) -> None:
    """Fill ``total`` with each node's weight plus the largest total of its targets.

    Edges must lead from lower to higher numbers.
    """
    for node in range(len(total) - 1, -1, -1):
        best = 0
        for edge in range(ptr[node], ptr[node + 1]):
            best = max(best, total[targets[edge]])
        total[node] = weight[node] + best
