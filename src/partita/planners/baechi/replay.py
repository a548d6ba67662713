"""The makespan of a placement with an order, as ``cost.objectives.makespan`` has it.

One walk over the ops in their order gives every start, what each device holds, and by how much that
exceeds its memory. A change of the placement leaves the walk before the first changed op as it was,
so it starts again from the last of some checkpoints before, and it stops as soon as the makespan
cannot stay below what would be accepted: an op that ends at t is followed by the longest path of
its readers, and a device that is idle at t by all the work that is still before it.
"""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.kernels import Column, Number, kernel, run
from partita.planners.baechi.instance import LONG, Instance
from partita.planners.baechi.list_schedule import transfer

NEVER = np.inf


class Walk(NamedTuple):
    """A placement with an order, and the walk along it.

    Attributes:
        device_of: Device of each op.
        order: The ops along the data.
        position: Where each op is in the order.
        end: When each op ends.
        trial: The same, of the walk that is being tried.
        cause: What each op waits for: the op before it on its device or one it reads; -1 = nothing.
        trial_cause: The same, of the walk that is being tried.
        tail: Least seconds from the end of each op to the end of all.
        work: Seconds of all ops of each device.
        free: When each device is idle, during a walk.
        left: Seconds of the ops of each device that are not walked yet.
        used: Bytes each device holds.
        peak: The most it ever held.
        last: The op it ran last; -1 = none.
        channel: When its channel is idle.
        got: When tensor t is on device d.
        stamp: The walk in which ``got`` was set.
        marks: Checkpoints: excess so far, then free, used, peak, last and work done of each device,
            every ``stride`` ops.
        trial_marks: The same, of the walk that is being tried.
        result: Makespan and excess bytes of the walk; then of what is held; then the number of
            walks so far.
    """

    device_of: Column
    order: Column
    position: Column
    end: Column
    trial: Column
    cause: Column
    trial_cause: Column
    tail: Column
    work: Column
    free: Column
    left: Column
    used: Column
    peak: Column
    last: Column
    channel: Column
    got: Column
    stamp: Column
    marks: Column
    trial_marks: Column
    result: Column


MAKESPAN, EXCESS, HELD_MAKESPAN, HELD_EXCESS, WALKS = 0, 1, 2, 3, 4
NUM_MARKS = 64
FIELDS = 5


def new_walk(g: Instance, device_of: Array, order: Array) -> Walk:
    """Return the walk along an order, not yet done."""
    n, size = g.num_ops, g.num_devices
    position = np.empty(n, dtype=np.int64)
    position[order] = np.arange(n)
    cells = g.num_tensors * size if g.once else 1
    return Walk(
        device_of=device_of.astype(np.int64),
        order=order.astype(np.int64),
        position=position,
        end=np.zeros(n),
        trial=np.zeros(n),
        cause=np.full(n, -1, dtype=np.int64),
        trial_cause=np.full(n, -1, dtype=np.int64),
        tail=tails(g),
        work=np.zeros(size),
        free=np.zeros(size),
        left=np.zeros(size),
        used=np.zeros(size),
        peak=np.zeros(size),
        last=np.full(size, -1, dtype=np.int64),
        channel=np.zeros(size),
        got=np.zeros(cells),
        stamp=np.zeros(cells, dtype=np.int64),
        marks=np.zeros((NUM_MARKS + 1) * (FIELDS * size + 1)),
        trial_marks=np.zeros((NUM_MARKS + 1) * (FIELDS * size + 1)),
        result=np.zeros(5),
    )


def least_seconds(g: Instance) -> Array:
    """Return the seconds of each op on the fastest device that it may run on."""
    seconds = g.seconds.reshape(-1, g.num_ops)[g.class_of]
    allowed = g.may.reshape(g.num_ops, g.num_devices).T > 0
    least: Array = np.where(allowed, seconds, np.inf).min(axis=0)
    return least


def tails(g: Instance) -> Array:
    """Return the longest path after each op, transfers left out."""
    tail = np.zeros(g.num_ops)
    inputs = (g, least_seconds(g), np.zeros(len(g.pred)))
    run(_fill_tails, g.num_ops + len(g.pred), inputs, (tail,), LONG)
    return tail


def upward_rank(g: Instance, *, transfers: float = 1.0) -> Array:
    """Return the longest path from the start of each op, with mean seconds of ops and transfers.

    Args:
        g: The instance.
        transfers: How much of the transfers counts.
    """
    size = g.num_devices
    seconds = g.seconds.reshape(-1, g.num_ops)[g.class_of].mean(axis=0)
    apart = ~np.eye(size, dtype=bool).ravel()
    if size > 1:
        linked = float(g.latency[apart].mean()) + g.size * float((1 / g.bandwidth[apart]).mean())
        moving = np.where(np.isnan(g.given), linked, g.given) * transfers
    else:
        moving = np.zeros(len(g.pred))
    tail = np.zeros(g.num_ops)
    run(_fill_tails, g.num_ops + len(g.pred), (g, seconds, moving), (tail,), LONG)
    rank: Array = tail + seconds
    return rank


@kernel
def _fill_tails(g: Column, seconds: Column, moving: Column, tail: Column) -> None:
    """Fill in the longest path after each op."""
    for index in range(g.num_ops - 1, -1, -1):
        op = g.topological[index]
        for row in range(g.pred_ptr[op], g.pred_ptr[op + 1]):
            source = g.pred[row]
            tail[source] = max(tail[source], moving[row] + seconds[op] + tail[op])


def makespan_of(g: Instance, device_of: Array, order: Array) -> tuple[float, float]:
    """Return the makespan of a placement, and the bytes by which it exceeds the memory."""
    walk = new_walk(g, device_of, order)
    run(_walk_all, 4 * (g.num_ops + len(g.pred)), (g,), (walk,), LONG)
    return float(walk.result[MAKESPAN]), float(walk.result[EXCESS])


@kernel
def _walk_all(g: Column, x: Column) -> None:
    """Walk the whole order."""
    count_work(g, x)
    walk_from(g, x, 0, NEVER, 0.0)


@kernel
def count_work(g: Column, x: Column) -> None:
    """Fill in the seconds of each device's ops."""
    for device in range(g.num_devices):
        x.work[device] = 0.0
    for op in range(g.num_ops):
        device = x.device_of[op]
        x.work[device] += g.seconds[g.class_of[device] * g.num_ops + op]


@kernel
def stride_of(g: Column) -> Number:
    """Return how many ops lie between checkpoints."""
    return g.num_ops // NUM_MARKS + 1


@kernel
def _enter(g: Column, x: Column, begin: int) -> Number:
    """Set the devices as they are at a checkpoint, or idle at the beginning; return the excess."""
    size = g.num_devices
    base = begin // stride_of(g) * (FIELDS * size + 1)
    for device in range(size):
        x.channel[device] = 0.0
        if begin == 0:
            x.free[device], x.used[device], x.peak[device] = 0.0, 0.0, 0.0
            x.left[device], x.last[device] = x.work[device], -1
            continue
        at = base + 1 + device
        x.free[device], x.used[device] = x.marks[at], x.marks[at + size]
        x.peak[device], x.last[device] = x.marks[at + 2 * size], int(x.marks[at + 3 * size])
        # Work that moved to or from a device did so behind the checkpoint.
        x.left[device] = x.work[device] - x.marks[at + 4 * size]
    return x.marks[base] if begin > 0 else 0.0


@kernel
def _mark(g: Column, x: Column, index: int, excess: float) -> None:
    """Keep the devices as they are as a checkpoint of the walk that is being tried."""
    size = g.num_devices
    base = index // stride_of(g) * (FIELDS * size + 1)
    x.trial_marks[base] = excess
    for device in range(size):
        at = base + 1 + device
        x.trial_marks[at], x.trial_marks[at + size] = x.free[device], x.used[device]
        x.trial_marks[at + 2 * size] = x.peak[device]
        x.trial_marks[at + 3 * size] = x.last[device]
        x.trial_marks[at + 4 * size] = x.work[device] - x.left[device]


@kernel
def _receive(g: Column, x: Column, op: int, begin: int, walk: int) -> tuple[float, float, int]:
    """Return when an op can start, the bytes copied for it, and what it waits for."""
    device = x.device_of[op]
    at, copies, cause = x.free[device], 0.0, x.last[device]
    for row in range(g.pred_ptr[op], g.pred_ptr[op + 1]):
        source = g.pred[row]
        other = x.device_of[source]
        arrival = x.trial[source] if x.position[source] >= begin else x.end[source]
        if other != device:
            if not g.sequential:
                arrival += transfer(g, row, other, device)
                copies += g.size[row]
            else:
                place = g.tensor[row] * g.num_devices + device
                if x.stamp[place] != walk:
                    seconds = transfer(g, row, other, device)
                    send = max(arrival, x.channel[other])
                    x.channel[other] = send + seconds
                    x.channel[device] = max(send, x.channel[device]) + seconds
                    x.got[place] = x.channel[device]
                    x.stamp[place] = walk
                    copies += g.size[row]
                arrival = x.got[place]
        if arrival > at:
            at, cause = arrival, source
    return at, copies, cause


@kernel
def _hold(g: Column, x: Column, op: int, copies: float) -> Number:
    """Count what an op needs on its device; return the bytes by which that is too much."""
    device = x.device_of[op]
    used, peak = x.used[device], x.peak[device]
    inside = used + g.kept[op] + g.scratch[op]
    need = max(inside + copies, peak + copies + g.held[op])
    used += g.kept[op]
    x.peak[device] = max(peak, inside, used + copies)
    x.used[device] = used + copies * g.stays
    return max(0.0, need - g.limit[device])


@kernel
def walk_from(g: Column, x: Column, first: int, most: float, weight: float) -> Number:
    """Walk the order from the checkpoint before a position.

    Args:
        g: The instance.
        x: The walk; ``trial`` and ``result`` are filled.
        first: The first position that may differ from the walk that is held.
        most: Cost above which the walk is given up.
        weight: Cost of a byte that is too much.

    Returns:
        The makespan and the weighted excess together, or infinity if the walk was given up.
    """
    stride = stride_of(g)
    begin = 0 if g.once else first // stride * stride
    excess = _enter(g, x, begin)
    x.result[WALKS] += 1
    walk = int(x.result[WALKS])
    makespan = 0.0
    for device in range(g.num_devices):
        makespan = max(makespan, x.free[device])
    for index in range(begin, g.num_ops):
        if index % stride == 0:
            _mark(g, x, index, excess)
        op = x.order[index]
        device = x.device_of[op]
        at, copies, cause = _receive(g, x, op, begin, walk)
        excess += _hold(g, x, op, copies)
        seconds = g.seconds[g.class_of[device] * g.num_ops + op]
        end = at + seconds
        x.trial[op], x.trial_cause[op] = end, cause
        x.free[device], x.last[device] = end, op
        x.left[device] -= seconds
        makespan = max(makespan, end)
        if max(end + max(x.tail[op], x.left[device] * 0.999999), makespan) + weight * excess > most:
            return NEVER
    x.result[MAKESPAN], x.result[EXCESS] = makespan, excess
    return makespan + weight * excess


@kernel
def keep(g: Column, x: Column, first: int) -> None:
    """Hold the walk that was tried."""
    stride = stride_of(g)
    begin = 0 if g.once else first // stride * stride
    for index in range(begin, g.num_ops):
        op = x.order[index]
        x.end[op], x.cause[op] = x.trial[op], x.trial_cause[op]
    width = FIELDS * g.num_devices + 1
    for cell in range(begin // stride * width, len(x.marks)):
        x.marks[cell] = x.trial_marks[cell]
    x.result[HELD_MAKESPAN], x.result[HELD_EXCESS] = x.result[MAKESPAN], x.result[EXCESS]
