"""Baechi's planners as released, faults included: Jeon et al., SoCC 2020.

m-TOPO fills devices in the order of the ops' numbers, never returns to a device, and with a cap
looks at no memory. m-ETF and m-SCT let idle devices choose as they are numbered, ready ops first
come, first served; an op without duration never ends, and room for copies is asked for twice.
m-SCT's favourites come from the program with every bound as a row. What does not depend on these
faults is shared with the repaired planners (``planners/baechi``).
"""

import numpy as np

from partita.core.columns import Array
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import InfeasibleError
from partita.kernels import Column, Number, kernel, run
from partita.planners.baechi.favourites import check_threshold, overwriting_favourites
from partita.planners.baechi.instance import LONG, Instance, op_name
from partita.planners.baechi.list_schedule import (
    NEVER,
    REFUSED,
    Schedule,
    choose,
    enlist,
    fits,
    give,
    inform_readers,
    look,
    new_state,
    place,
    schedule_of,
    wake,
)
from partita.planners.baechi.placement import Placed, best_solution, placed, read_instance


def plan_m_topo_released(
    problem: Problem,
    *,
    cap: bool = True,
    channels: str | None = None,
    memory: str | None = None,
) -> Solution:
    """Fill the devices one after the other in the order of the ops' numbers.

    Args:
        problem: The problem.
        cap: Whether to fill all devices to about the same sum; else each up to its memory.
        channels: ``"parallel"`` or ``"sequential"``; ``None`` = as the metric has it.
        memory: Whose rule counts, ``"baechi"`` or ``"ours"``; ``None`` = the metric's.

    Raises:
        InfeasibleError: The released code would fail, or its placement breaks a limit.
    """
    g = read_instance(problem, channels, memory)
    most = float(np.sum(g.kept) // g.num_devices + np.max(g.kept)) if cap else None
    found = released_fill(g, np.arange(g.num_ops), most)
    if found.refused >= 0:
        raise InfeasibleError(
            "m-topo as released places ops in the order of their numbers, and op "
            f"{op_name(problem, found.refused)} comes before one that it reads"
        )
    if not found.complete:
        left = g.num_ops - len(found.order)
        raise InfeasibleError(
            f"m-topo as released cannot place {left} of {g.num_ops} ops, the first of them "
            f"{op_name(problem, len(found.order))}"
        )
    options = {"cap": cap, "as_released": True, "channels": channels, "memory": memory}
    return best_solution(problem, [placed(found)], "m-topo", options)


def plan_m_etf_released(
    problem: Problem, *, channels: str | None = None, memory: str | None = None
) -> Solution:
    """Let every idle device take the op that can start first.

    Args:
        problem: The problem.
        channels: ``"parallel"`` or ``"sequential"``; ``None`` = as the metric has it.
        memory: Whose rule counts, ``"baechi"`` or ``"ours"``; ``None`` = the metric's.

    Raises:
        InfeasibleError: The released code would fail, or its placement breaks a limit.
    """
    g = read_instance(problem, channels, memory)
    found = _checked(problem, released_schedule(g), "m-etf")
    options = {"as_released": True, "channels": channels, "memory": memory}
    return best_solution(problem, [found], "m-etf", options)


def plan_m_sct_released(
    problem: Problem,
    *,
    threshold: float = 0.5,
    channels: str | None = None,
    memory: str | None = None,
) -> Solution:
    """Keep ops next to their favourite children, and schedule them as early as possible.

    Args:
        problem: The problem.
        threshold: Largest value of an edge in the linear program that makes a favourite child, 0 to
            1; the PyTorch version has 0.5, the TensorFlow version 0.1.
        channels: ``"parallel"`` or ``"sequential"``; ``None`` = as the metric has it.
        memory: Whose rule counts, ``"baechi"`` or ``"ours"``; ``None`` = the metric's.

    Raises:
        InfeasibleError: The released code would fail, or its placement breaks a limit.
        InvalidInputError: The threshold is not one.
    """
    check_threshold(threshold)
    g = read_instance(problem, channels, memory)
    favourite = overwriting_favourites(g, threshold)
    found = _checked(problem, released_schedule(g, favourite), "m-sct")
    options = {
        "threshold": threshold,
        "as_released": True,
        "channels": channels,
        "memory": memory,
    }
    stats = {"favourites": int((favourite >= 0).sum())}
    return best_solution(problem, [found], "m-sct", options, stats=stats)


def _checked(problem: Problem, schedule: Schedule, planner: str) -> Placed:
    """Return a schedule of the released code.

    Raises:
        InfeasibleError: It would fail: it found no room for the copies of an op that it had let in,
            or ops are stranded.
    """
    if schedule.refused >= 0:
        raise InfeasibleError(
            f"{planner} as released fails: no room for copies of what op "
            f"{op_name(problem, schedule.refused)} reads"
        )
    if not schedule.complete:
        stranded = int((schedule.device_of < 0).argmax())
        raise InfeasibleError(
            f"{planner} as released places {len(schedule.order)} of {len(schedule.device_of)} ops; "
            f"op {op_name(problem, stranded)} is left over"
        )
    return placed(schedule)


def released_fill(g: Instance, sequence: Array, cap: float | None) -> Schedule:
    """Return the schedule of the released m-TOPO.

    It never returns to a device, and with a cap it does not look at the memory of the devices. It
    stops at an op that comes before one that it reads: ``refused``.
    """
    state = new_state(g, None)
    inputs = (g, sequence, np.inf if cap is None else cap)
    run(_fill, 4 * g.steps, inputs, (state,), LONG)
    return schedule_of(state)


def released_schedule(g: Instance, favourite: Array | None = None) -> Schedule:
    """Return the schedule of the released m-ETF, or of its m-SCT.

    Args:
        g: The instance.
        favourite: The favourite child of each op, -1 = none; ``None`` = m-ETF.
    """
    state = new_state(g, None)
    children = np.full(g.num_ops, -1, dtype=np.int64) if favourite is None else favourite
    inputs = (g, children, np.arange(g.num_devices), int(favourite is not None))
    run(_event_loop, 8 * g.steps, inputs, (state,), LONG)
    return schedule_of(state)


@kernel
def _fill(g: Column, sequence: Column, cap: float, s: Column) -> None:
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


@kernel
def _has_room_twice(g: Column, s: Column, op: int, device: int) -> Number:
    """Return whether every copy of an op's inputs fits again after all have been counted."""
    total = s.used[device] + g.kept[op] + s.copies[op * g.num_devices + device]
    for row in range(g.pred_ptr[op], g.pred_ptr[op + 1]):
        remote = s.device_of[g.pred[row]] != device
        if remote and total + g.size[row] > g.limit[device]:
            return False
    return True


@kernel
def _settle(g: Column, s: Column, now: float) -> None:
    """Let the ops that end now end, device by device; those without duration never do."""
    for device in range(g.num_devices):
        if s.busy[device] and s.free[device] <= now:
            s.busy[device] = 0
            op = s.last[device]
            if g.seconds[g.class_of[device] * g.num_ops + op] <= 0:
                continue
            inform_readers(g, s, op, 1)
        if not s.busy[device]:
            s.free[device] = max(s.free[device], now)


@kernel
def _take_turns(g: Column, s: Column, visit: Column, now: float) -> Number:
    """Let each idle device take an op, up to one without room; return when something happens."""
    following = NEVER
    turn = 0
    while turn < g.num_devices:
        device = visit[turn]
        turn += 1
        if s.busy[device]:
            following = min(following, s.free[device])
            continue
        op, later = choose(g, s, device, now)
        following = min(following, later)
        if op < 0:
            continue
        if not _has_room_twice(g, s, op, device):
            s.count[REFUSED] = op
            return NEVER
        if give(g, s, visit, turn, op, device):
            turn, following = 0, NEVER
        following = min(following, s.free[device])
    return following


@kernel
def _event_loop(
    g: Column, favourite: Column, visit: Column, has_favourites: int, s: Column
) -> None:
    """Schedule from event to event."""
    for op in range(g.num_ops):
        if s.waiting[op] == 0:
            enlist(g, s, op, 1)
    now = 0.0
    while now < NEVER:
        _settle(g, s, now)
        if has_favourites:
            for device in range(g.num_devices):
                if not s.busy[device]:
                    wake(g, s, favourite, device)
        now = _take_turns(g, s, visit, now)
