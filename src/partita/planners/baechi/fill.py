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


def fill_as_released(g: Instance, sequence: Array, cap: float | None) -> Schedule:
    """Return the schedule of the released m-TOPO.

    It never returns to a device, and with a cap it does not look at the memory of the devices. It
    stops at an op that comes before one that it reads: ``refused``.
    """
    state = new_state(g, None)
    inputs = (g, sequence, np.inf if cap is None else cap)
    run(_fill_released, 4 * g.steps, inputs, (state,), LONG)
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


@kernel
def _fill_released(g: Column, sequence: Column, cap: float, s: Column) -> None:
    """Fill devices as the released code does."""
    device = 0
    for op in sequence:
        for row in range(g.pred_ptr[op], g.pred_ptr[op + 1]):
            if s.device_of[g.pred[row]] < 0:
                s.count[REFUSED] = op
                return
        while device < g.num_devices:
            look(g, s, op, device)
            if cap < np.inf and s.used[device] + g.kept[op] + g.scratch[op] <= cap:
                break
            if cap == np.inf and fits(g, s, op, device):
                break
            device += 1
        if device == g.num_devices:
            return
        place(g, s, op, device)
