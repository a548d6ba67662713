"""Simulated annealing over placements and orders: the compiled part of the makespan search.

A move puts an op (with its group), a run of ops of one device, or two ops in exchange on other
devices, or shifts an op along the order within what it reads and who reads it. Most moves begin at
an op of the critical path, and most go to the device of something that the op reads or is read by.
A move is kept if its cost, the makespan and a price for every byte beyond the memory, is below that
of the placement held plus ``temperature x -log(uniform)``.
"""

import math
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array, group_rows
from partita.kernels import Column, Number, as_lists, compiled, kernel, pays
from partita.planners.baechi.instance import LONG, Instance
from partita.planners.baechi.replay import (
    HELD_EXCESS,
    HELD_MAKESPAN,
    NEVER,
    Walk,
    count_work,
    keep,
    new_walk,
    walk_from,
)

MODULUS = 2147483647
MULTIPLIER = 48271
SEED, PATH, CHANGED, MOVED_FROM, MOVED_TO, FIRST = 0, 1, 2, 3, 4, 5


class Moves(NamedTuple):
    """What the moves need besides the walk.

    Attributes:
        member_ptr: Ops of group k are rows ``member_ptr[k]`` to ``member_ptr[k + 1]``.
        member: The ops.
        path: The critical path, from its end.
        changed: Ops whose device the last move changed.
        before: Their devices before.
        state: State of the random numbers; ops on the path, 0 = not known; ops changed; the shift
            in the order, from and to; the first position that differs.
        best_device: The best placement so far.
        best_order: Its order.
        best: Its excess and its makespan.
    """

    member_ptr: Column
    member: Column
    path: Column
    changed: Column
    before: Column
    state: Column
    best_device: Column
    best_order: Column
    best: Column


class Annealer:
    """A search that goes on from a placement, and holds the best it has seen.

    The best has the least bytes beyond the memory, and of these the least makespan.
    """

    def __init__(
        self, g: Instance, device_of: Array, order: Array, *, seed: int = 0, effort: int
    ) -> None:
        """Begin at a placement.

        Args:
            g: The instance.
            device_of: Device of each op.
            order: The ops along the data.
            seed: Of the random numbers.
            effort: About how many moves will be tried; few on a small graph run interpreted.
        """
        walk = new_walk(g, device_of, order)
        moves = _new_moves(g, walk, seed)
        if pays(_anneal, effort * (g.num_ops + len(g.pred)), LONG):
            begin, self._anneal = compiled(_begin), compiled(_anneal)
            self._parts = (g, walk, moves)
        else:
            begin, self._anneal = _begin, _anneal
            self._parts = (as_lists(g), as_lists(walk), as_lists(moves))
        begin(*self._parts)

    def run(self, moves: int, temperature: float, price: float) -> None:
        """Try moves at a temperature in seconds, a byte too much at a price in seconds."""
        self._anneal(*self._parts, moves, max(temperature, 1e-300), price)

    @property
    def excess(self) -> float:
        """Bytes by which the best placement exceeds the memory."""
        return float(self._parts[2].best[0])

    @property
    def makespan(self) -> float:
        """Makespan of the best placement, in seconds."""
        return float(self._parts[2].best[1])

    @property
    def device_of(self) -> Array:
        """Device of each op in the best placement."""
        return np.array(self._parts[2].best_device, dtype=np.int64)

    @property
    def order(self) -> Array:
        """Order of the ops in the best placement."""
        return np.array(self._parts[2].best_order, dtype=np.int64)


def _new_moves(g: Instance, walk: Walk, seed: int) -> Moves:
    """Return the beginning of a search from a walk."""
    pointers, members = group_rows(g.group, len(g.group_kept))
    start = (seed * 7919 + 12345) % (MODULUS - 1) + 1
    return Moves(
        member_ptr=pointers.astype(np.int64),
        member=members.astype(np.int64),
        path=np.zeros(g.num_ops, dtype=np.int64),
        changed=np.zeros(g.num_ops, dtype=np.int64),
        before=np.zeros(g.num_ops, dtype=np.int64),
        state=np.array([start, 0, 0, -1, -1, 0], dtype=np.int64),
        best_device=walk.device_of.copy(),
        best_order=walk.order.copy(),
        best=np.array([np.inf, np.inf]),
    )


@kernel
def _uniform(m: Column) -> Number:
    """Return a random number above 0 and below 1."""
    m.state[SEED] = m.state[SEED] * MULTIPLIER % MODULUS
    return m.state[SEED] / MODULUS


@kernel
def _below(m: Column, count: int) -> Number:
    """Return a random integer from 0 to below a count."""
    return int(_uniform(m) * count)


@kernel
def _trace_path(x: Column, m: Column, num_ops: int) -> None:
    """Fill in the critical path: from the op that ends last, always what it waits for."""
    op = x.order[0]
    for index in range(num_ops):
        if x.end[x.order[index]] > x.end[op]:
            op = x.order[index]
    length = 0
    while op >= 0:
        m.path[length] = op
        length += 1
        op = x.cause[op]
    m.state[PATH] = length


@kernel
def _pick(g: Column, x: Column, m: Column) -> Number:
    """Return an op to move: two times out of three one of the critical path."""
    if _uniform(m) < 0.66:
        if m.state[PATH] == 0:
            _trace_path(x, m, g.num_ops)
        return m.path[_below(m, m.state[PATH])]
    return _below(m, g.num_ops)


@kernel
def _neighbour(g: Column, x: Column, m: Column, op: int) -> Number:
    """Return a device for an op: that of an op it reads or is read by, or any."""
    inputs = g.pred_ptr[op + 1] - g.pred_ptr[op]
    readers = g.succ_ptr[op + 1] - g.succ_ptr[op]
    if inputs + readers > 0 and _uniform(m) < 0.6:
        at = _below(m, inputs + readers)
        if at < inputs:
            return x.device_of[g.pred[g.pred_ptr[op] + at]]
        return x.device_of[g.succ[g.succ_ptr[op] + at - inputs]]
    return _below(m, g.num_devices)


@kernel
def _send(g: Column, x: Column, m: Column, op: int, device: int) -> None:
    """Put an op and its group on a device, if it may run there."""
    if x.device_of[op] == device or not g.may[op * g.num_devices + device]:
        return
    group = g.group[op]
    for row in range(m.member_ptr[group], m.member_ptr[group + 1]):
        part = m.member[row]
        old = x.device_of[part]
        m.changed[m.state[CHANGED]] = part
        m.before[m.state[CHANGED]] = old
        m.state[CHANGED] += 1
        x.work[old] -= g.seconds[g.class_of[old] * g.num_ops + part]
        x.work[device] += g.seconds[g.class_of[device] * g.num_ops + part]
        x.device_of[part] = device
        m.state[FIRST] = min(m.state[FIRST], x.position[part])


@kernel
def _send_run(g: Column, x: Column, m: Column, op: int, device: int) -> None:
    """Put an op and some that follow it on its device on another device."""
    here = x.device_of[op]
    wanted = 2 + _below(m, 6) * (1 + _below(m, 4))
    index = x.position[op]
    stop = min(g.num_ops, index + wanted * 4 * g.num_devices)
    while index < stop and wanted > 0 and m.state[CHANGED] < g.num_ops // 2:
        part = x.order[index]
        if x.device_of[part] == here:
            _send(g, x, m, part, device)
            wanted -= 1
        index += 1


@kernel
def _exchange(g: Column, x: Column, m: Column, op: int) -> None:
    """Put an op where another one is, and that one where it was."""
    reach = 4 * g.num_devices + 16
    at = x.position[op] + _below(m, 2 * reach) - reach
    if at < 0 or at >= g.num_ops:
        return
    other = x.order[at]
    if g.group[other] == g.group[op]:
        return
    here, there = x.device_of[op], x.device_of[other]
    _send(g, x, m, op, there)
    _send(g, x, m, other, here)


@kernel
def _shift(x: Column, begin: int, end: int) -> None:
    """Move the op at one position of the order to another."""
    op = x.order[begin]
    step = 1 if end > begin else -1
    index = begin
    while index != end:
        moved = x.order[index + step]
        x.order[index] = moved
        x.position[moved] = index
        index += step
    x.order[end] = op
    x.position[op] = end


@kernel
def _reorder(g: Column, x: Column, m: Column, op: int) -> None:
    """Move an op along the order, within what it reads and who reads it."""
    here = x.position[op]
    reach = 8 + 8 * g.num_devices
    low, high = max(0, here - reach), min(g.num_ops - 1, here + reach)
    for row in range(g.pred_ptr[op], g.pred_ptr[op + 1]):
        low = max(low, x.position[g.pred[row]] + 1)
    for row in range(g.succ_ptr[op], g.succ_ptr[op + 1]):
        high = min(high, x.position[g.succ[row]] - 1)
    there = low + _below(m, high - low + 1)
    if there == here:
        return
    _shift(x, here, there)
    m.state[MOVED_FROM], m.state[MOVED_TO] = here, there
    m.state[FIRST] = min(m.state[FIRST], here, there)


@kernel
def _move(g: Column, x: Column, m: Column) -> None:
    """Make a random move."""
    m.state[CHANGED], m.state[MOVED_FROM], m.state[FIRST] = 0, -1, g.num_ops
    op = _pick(g, x, m)
    kind = _uniform(m)
    if kind < 0.35:
        _send(g, x, m, op, _neighbour(g, x, m, op))
    elif kind < 0.5:
        _send(g, x, m, op, _neighbour(g, x, m, op))
        _reorder(g, x, m, op)
    elif kind < 0.75:
        _reorder(g, x, m, op)
    elif kind < 0.88:
        _send_run(g, x, m, op, _neighbour(g, x, m, op))
    else:
        _exchange(g, x, m, op)


@kernel
def _undo(g: Column, x: Column, m: Column) -> None:
    """Take the last move back."""
    if m.state[MOVED_FROM] >= 0:
        _shift(x, m.state[MOVED_TO], m.state[MOVED_FROM])
    for row in range(m.state[CHANGED] - 1, -1, -1):
        op, old = m.changed[row], m.before[row]
        now = x.device_of[op]
        x.work[now] -= g.seconds[g.class_of[now] * g.num_ops + op]
        x.work[old] += g.seconds[g.class_of[old] * g.num_ops + op]
        x.device_of[op] = old


@kernel
def _note_best(x: Column, m: Column, num_ops: int) -> None:
    """Keep what is held if nothing better is: less excess, or as much and a shorter makespan."""
    excess, makespan = x.result[HELD_EXCESS], x.result[HELD_MAKESPAN]
    if excess > m.best[0] or (excess == m.best[0] and makespan >= m.best[1]):
        return
    m.best[0], m.best[1] = excess, makespan
    for op in range(num_ops):
        m.best_device[op] = x.device_of[op]
        m.best_order[op] = x.order[op]


@kernel
def _begin(g: Column, x: Column, m: Column) -> None:
    """Walk the placement for the first time."""
    count_work(g, x)
    walk_from(g, x, 0, NEVER, 0.0)
    keep(g, x, 0)
    m.state[PATH] = 0
    _note_best(x, m, g.num_ops)


@kernel
def _anneal(g: Column, x: Column, m: Column, moves: int, temperature: float, price: float) -> None:
    """Try a number of moves at one temperature, a byte too much at a price."""
    cost = x.result[HELD_MAKESPAN] + price * x.result[HELD_EXCESS]
    count_work(g, x)
    for _ in range(moves):
        _move(g, x, m)
        if m.state[FIRST] == g.num_ops:
            continue
        most = cost - temperature * math.log(_uniform(m))
        found = walk_from(g, x, m.state[FIRST], most, price)
        if found > most:
            _undo(g, x, m)
            continue
        cost = found
        keep(g, x, m.state[FIRST])
        m.state[PATH] = 0
        _note_best(x, m, g.num_ops)
