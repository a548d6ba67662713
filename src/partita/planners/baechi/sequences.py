"""Orders of the ops along the data, and of the devices."""

import numpy as np

from partita.core.columns import Array
from partita.kernels import Column, kernel, run
from partita.planners.baechi.instance import LONG, Instance


def by_rank(g: Instance, rank: Array) -> Array:
    """Return the ops by falling rank, ties along the data.

    A rank that never rises along an edge, such as the longest path to the end, gives an order along
    the data.
    """
    position = np.empty(g.num_ops, dtype=np.int64)
    position[g.topological] = np.arange(g.num_ops)
    return np.lexsort((position, -rank))


def depth_first(g: Instance) -> Array:
    """Return the order that follows each branch to its end before it begins the next."""
    order = np.zeros(g.num_ops, dtype=np.int64)
    stack = np.zeros(g.num_ops + 1, dtype=np.int64)
    outputs = (np.diff(g.pred_ptr), stack, order)
    run(_depth_first, g.num_ops + len(g.pred), (g,), outputs, LONG)
    return order


@kernel
def _depth_first(g: Column, waiting: Column, stack: Column, order: Column) -> None:
    """Fill in the order: the op that became ready last goes first."""
    height, done = 0, 0
    for index in range(g.num_ops - 1, -1, -1):
        op = g.topological[index]
        if waiting[op] == 0:
            stack[height] = op
            height += 1
    while height > 0:
        height -= 1
        op = stack[height]
        order[done] = op
        done += 1
        for row in range(g.succ_ptr[op + 1] - 1, g.succ_ptr[op] - 1, -1):
            reader = g.succ[row]
            waiting[reader] -= 1
            if waiting[reader] == 0:
                stack[height] = reader
                height += 1


def fastest_first(g: Instance) -> Array:
    """Return the devices by the seconds that all ops would take there, ties as numbered."""
    total = g.seconds.reshape(-1, g.num_ops).sum(axis=1)[g.class_of]
    return np.argsort(total, kind="stable")
