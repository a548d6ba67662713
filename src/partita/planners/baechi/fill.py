"""Orders of ops and devices, and filling devices along them: m-TOPO, starts in tight memory."""

import numpy as np

from partita.core.columns import Array
from partita.kernels import Column, Number, kernel, run
from partita.planners.baechi.instance import LONG, Instance
from partita.planners.baechi.list_schedule import (
    REFUSED,
    Schedule,
    fits,
    look,
    new_state,
    place,
    schedule_of,
)

HALVINGS = 12
"""How often a search for the least cap or memory halves its interval."""


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


def fill_devices(g: Instance, sequence: Array, caps: Array, *, visit: Array) -> Schedule:
    """Return the schedule that stays on a device until an op does not fit, then takes the next.

    An op that fits none of the devices that are left goes to the first that has room for it.

    Args:
        g: The instance.
        sequence: All ops along the data.
        caps: Bytes that the ops on each device may keep, at the most.
        visit: The devices in the order in which they are filled.
    """
    state = new_state(g, None)
    run(_fill, 4 * g.steps, (g, sequence, caps, visit), (state,), LONG)
    return schedule_of(state)


def balanced_fill(g: Instance, sequence: Array) -> Schedule:
    """Return the fill with the least cap, the same share of every device, that places all."""
    visit = fastest_first(g)
    room = np.minimum(g.limit, g.kept.sum())
    low, high = 0.0, 1.0
    best = fill_devices(g, sequence, room, visit=visit)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = fill_devices(g, sequence, room * middle, visit=visit)
        returns = found.complete and _goes_back(found, visit)
        if found.complete and not returns:
            best, high = found, middle
        else:
            low = middle
    return best


def _goes_back(schedule: Schedule, visit: Array) -> bool:
    """Return whether a fill returned to a device that it had left."""
    turn = np.argsort(visit)[schedule.device_of[schedule.order]]
    return bool((np.diff(turn) < 0).any())


@kernel
def _has_room(g: Column, s: Column, op: int, device: int, cap: float) -> Number:
    """Return whether an op fits a device below its cap."""
    look(g, s, op, device)
    new = g.group_kept[g.group[op]] if s.home[g.group[op]] < 0 else 0.0
    return s.used[device] + s.reserved[device] + new <= cap and fits(g, s, op, device)


@kernel
def _fill(g: Column, sequence: Column, caps: Column, visit: Column, s: Column) -> None:
    """Fill devices; ops that fit nowhere are left out, with all that need them."""
    current = 0
    for op in sequence:
        chosen = -1
        turn = current
        while turn < g.num_devices and chosen < 0:
            if _has_room(g, s, op, visit[turn], caps[visit[turn]]):
                chosen, current = visit[turn], turn
            turn += 1
        turn = 0
        while turn < g.num_devices and chosen < 0:
            if _has_room(g, s, op, visit[turn], np.inf):
                chosen = visit[turn]
            turn += 1
        if chosen < 0:
            s.count[REFUSED] = op
            return
        place(g, s, op, chosen)
