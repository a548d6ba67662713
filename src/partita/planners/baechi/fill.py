"""Filling devices one after the other along an order: m-TOPO, and starts under tight memory."""

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
