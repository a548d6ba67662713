"""The longest path to each node of a directed graph: orders of lists, turns of collectives."""

import numpy as np

from partita.core.columns import Array
from partita.core.order import csr
from partita.kernels import Column, kernel, run


def longest_levels(source: Array, target: Array, num_nodes: int) -> tuple[Array, int]:
    """Return the edges of the longest path to each node, and how many nodes have one.

    Nodes on or behind a circle have none; if all nodes are counted there is no circle.
    """
    ptr, targets = csr(source, target, num_nodes)
    waiting = np.bincount(target, minlength=num_nodes).astype(np.int64)
    queue, level, count = (np.zeros(size, dtype=np.int64) for size in (num_nodes, num_nodes, 1))
    run(_fill_levels, len(source), [ptr, targets], [waiting, queue, level, count])
    return level, int(count[0])


@kernel
def _fill_levels(
    ptr: Column, targets: Column, waiting: Column, queue: Column, level: Column, count: Column
) -> None:
    """Fill ``level`` with the longest path to each node, ``count[0]`` with the nodes reached.

    A node enters the queue when the last of its ``waiting`` sources has left it, so that its level
    is final by then.
    """
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
