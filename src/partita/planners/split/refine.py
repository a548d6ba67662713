"""Splits whose parts need not follow one another: simulated annealing from a contiguous one.

Where the nodes are colocation classes, any assignment is a split. Moves are incremental: a node
that goes from device a to device b changes the loads of a and b alone, by its seconds and by nets
that begin or cease to be cut there. Rounds alternate between exploring (from the first split, hot)
and polishing (from the best so far, cool). All random numbers follow from the seed, so with a given
number of moves the result does too. ``O(nets of the nodes moved)`` a move, some two million moves a
second compiled.

The same annealing serves contiguous splits (circles between devices are refused) and the latency of
one sample, both at ``O(ops + edges)`` a move.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array, Flags, Floats, Longs, frozen_array, sum_by
from partita.kernels import Threshold, run
from partita.planners.annealing import anneal_rounds
from partita.planners.effort import Effort
from partita.planners.lattice.nets import Nets, nets_by_node
from partita.planners.split.anneal_kernel import (
    LOADS,
    MODULUS,
    ORDERED_LOADS,
    Given,
    OpFlow,
    Scratch,
    Split,
    anneal_split,
)
from partita.planners.split.model import SplitModel

INTERPRETED_WORK = 150_000
"""Nets and edges looked at up to which the interpreter is quick enough."""
ROUND_MOVES, ORDERED_ROUND_MOVES = 500_000, 200_000
ORDERED_ROUND_WORK = 100_000_000
ROUNDS, FEWER_ROUNDS, MANY_NODES = 40, 16, 1_000
ORDERED_ROUNDS = 4
LARGEST_CLUSTER = 30.0
COLD = 0.0001
BARRED = 1e3
"""Seconds of a node where it may not run, in units of all work."""


class _Manner(NamedTuple):
    """How a round goes: from the best so far or the start, how hot, how close to the maximum."""

    from_best: bool
    heat: float
    doublings: int


MANNERS = (
    _Manner(from_best=False, heat=2.0, doublings=4),
    _Manner(from_best=False, heat=0.5, doublings=5),
    _Manner(from_best=False, heat=2.0, doublings=4),
    _Manner(from_best=True, heat=0.02, doublings=5),
)
"""In turn. Hot rounds cross between shapes of splits, the last one balances what was found."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """A device for every node.

    Attributes:
        value: The largest load; infinite while some device lacks memory or a node may not run.
        device_of: A place in ``devices_in_order`` for every node.
    """

    value: float
    device_of: Longs


def devices_in_order(model: SplitModel) -> Longs:
    """Return the devices of the cluster by class, as assignments number them."""
    return np.array([device for members in model.devices for device in members], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """What the order of things means for an assignment.

    Attributes:
        goal: ``ORDERED_LOADS``: no data may flow in a circle between devices; ``LATENCY``: the
            value is the time of the last result; ``LOADS``: order means nothing.
        node_of: The node of every op; here an op is the unit of the flow.
        succ_ptr: Op i comes before ``succ[succ_ptr[i]:succ_ptr[i + 1]]``.
        succ: See ``succ_ptr``.
        op_s: Seconds of each op on devices that run op by op.
        is_block: Whether each device runs all it has as one call.
    """

    goal: int
    node_of: Longs
    succ_ptr: Longs
    succ: Longs
    op_s: Floats
    is_block: Flags


def no_flow(model: SplitModel) -> Flow:
    """Return that order means nothing."""
    none = np.zeros(0, dtype=np.int64)
    blocks = np.ones(model.num_devices, dtype=bool)
    return Flow(
        goal=LOADS,
        node_of=none,
        succ_ptr=np.zeros(1, dtype=np.int64),
        succ=none,
        op_s=np.zeros(0),
        is_block=blocks,
    )


def ordered_flow(model: SplitModel) -> Flow:
    """Return that the parts of a split must follow one another, by the order of the nodes."""
    count = model.q.num_nodes
    return Flow(
        goal=ORDERED_LOADS,
        node_of=np.arange(count),
        succ_ptr=model.q.succ_ptr,
        succ=model.q.succ,
        op_s=np.zeros(count),
        is_block=np.ones(model.num_devices, dtype=bool),
    )


def _move_work(flow: Flow) -> int:
    """Return about how many nets and edges are looked at in a move."""
    return 4 + (len(flow.node_of) + len(flow.succ) if flow.goal != LOADS else 0)


def round_moves(model: SplitModel, flow: Flow) -> int:
    """Return the moves of a round, from hot to cold: by size, less than a second."""
    nodes, work = model.q.num_nodes, _move_work(flow)
    if flow.goal == LOADS:
        return min(ROUND_MOVES, 20 * nodes**3)
    # Few nodes get as many moves as need no compiling.
    few = min(20 * nodes**3, max(2 * nodes**3, INTERPRETED_WORK // (ORDERED_ROUNDS * work)))
    return min(ORDERED_ROUND_MOVES, few, max(250, ORDERED_ROUND_WORK // work))


def default_moves(model: SplitModel, flow: Flow) -> int:
    """Return the moves of an annealing that nobody limits: some seconds at most."""
    nodes, rounds = model.q.num_nodes, ORDERED_ROUNDS
    if flow.goal == LOADS:
        rounds = min(ROUNDS if nodes <= MANY_NODES else FEWER_ROUNDS, 2 + nodes // 2)
    return round_moves(model, flow) * rounds


def anneal(
    model: SplitModel,
    flow: Flow,
    start: Array,
    effort: Effort,
) -> Assignment:
    """Return the best assignment of an annealing that starts from a given one.

    Args:
        model: The costs.
        flow: What the order of things means.
        start: The first assignment; it may break memory limits.
        effort: Limits; a step is a move. Without any, as many moves as suit the size.
    """
    given, order = _given(model, flow)
    columns = (given, order, flow.goal)
    moves = effort.steps(default_moves(model, flow))
    first = (np.asarray(start), MANNERS[0], effort.seed, 0)
    origin = _round(model, columns, first, scale=1.0)
    scale = origin.value if 0 < origin.value < np.inf else float(given.seconds.max()) or 1.0
    rounds = max(1, -(-moves // max(1, round_moves(model, flow))))
    work = moves * _move_work(flow)

    def run_round(number: int, best: Assignment) -> Assignment:
        manner = MANNERS[number % len(MANNERS)]
        begin = best if manner.from_best else origin
        turn = (begin.device_of, manner, effort.seed * 7919 + number, moves // rounds)
        return _round(model, columns, turn, scale=scale, work=work)

    return anneal_rounds(origin, run_round, effort, rounds=rounds, sure=1)


def _given(model: SplitModel, flow: Flow) -> tuple[Given, OpFlow]:
    """Return what the kernel reads; a node takes very long where it may not run."""
    nodes = model.q.num_nodes
    total = float(np.where(np.isfinite(model.seconds), model.seconds, 0.0).sum())
    longest = BARRED * (total + 1e-9)
    net_ptr, net_of = nets_by_node(model.nets, nodes)
    share_ptr, share_of = nets_by_node(model.shared, nodes)
    given = Given(
        seconds=np.where(np.isfinite(model.seconds), model.seconds, longest).ravel(),
        class_of=_class_of(model),
        pays=model.pays,
        limit_bytes=np.maximum(model.limit_bytes, 1e-9),
        node_bytes=model.node_bytes,
        net_ptr=net_ptr,
        net_of=net_of,
        pin_ptr=model.nets.ptr,
        pin=model.nets.pins,
        net_s=model.net_s,
        share_ptr=share_ptr,
        share_of=share_of,
        share_bytes=model.shared_bytes,
    )
    op_s = np.where(np.isfinite(flow.op_s), flow.op_s, longest)
    # Frozen, as those of a graph are: Numba would compile again for columns that are not.
    node_of = frozen_array(flow.node_of, np.int64)
    succ_ptr, succ = frozen_array(flow.succ_ptr, np.int64), frozen_array(flow.succ, np.int64)
    return given, OpFlow(node_of, succ_ptr, succ, op_s, flow.is_block)


def _class_of(model: SplitModel) -> Longs:
    return np.repeat(np.arange(model.num_classes), [len(members) for members in model.devices])


def _round(
    model: SplitModel,
    columns: tuple[Given, OpFlow, int],
    effort: tuple[Array, _Manner, int, int],
    *,
    scale: float,
    work: int = 0,
) -> Assignment:
    """Return the best assignment of one annealing: from a start, in a manner, by a seed."""
    given, flow, goal = columns
    start, manner, seed, moves = effort
    device_of, best_of = np.array([start, start], dtype=np.int64)
    load, used, inside, held = _loads(model, given.seconds, device_of)
    split = Split(
        device_of=device_of,
        load=load,
        used=used,
        inside=inside.ravel(),
        held=held.ravel(),
        power=np.zeros(len(load)),
        best_of=best_of,
        best=np.array([np.inf]),
    )
    setting = np.array([manner.heat, COLD, scale, manner.doublings, LARGEST_CLUSTER])
    random_state = (seed * 69621 + 12345) % (MODULUS - 1) + 1
    run(
        anneal_split,
        work,
        (given, flow, setting),
        (
            np.array([random_state, moves, goal]),
            split,
            _scratch(len(device_of), len(load), len(flow.node_of)),
        ),
        Threshold(INTERPRETED_WORK + 1),
    )
    return Assignment(value=float(split.best[0]), device_of=best_of)


def _scratch(nodes: int, devices: int, ops: int) -> Scratch:
    chosen, target, mark = np.zeros((3, nodes + 1), dtype=np.int64)
    next_op, block_of = np.zeros((2, ops), dtype=np.int64)
    waiting, queue = np.zeros((2, devices + ops), dtype=np.int64)
    return Scratch(
        chosen=chosen,
        target=target,
        mark=mark,
        first_op=np.zeros(devices, dtype=np.int64),
        next_op=next_op,
        block_of=block_of,
        waiting=waiting,
        ready=np.zeros(devices + ops),
        queue=queue,
    )


def _loads(
    model: SplitModel, seconds: Array, device_of: Longs
) -> tuple[Floats, Floats, Longs, Longs]:
    """Return load and bytes of each device, and how many pins of each net are on it."""
    class_of = _class_of(model)
    count, nodes = len(class_of), model.q.num_nodes
    inside = _pins_on(model.nets, device_of, count)
    held = _pins_on(model.shared, device_of, count)
    table = seconds.reshape(model.num_classes, nodes)
    load = sum_by(device_of, table[class_of[device_of], np.arange(nodes)], count)
    size = np.diff(model.nets.ptr)[:, None]
    cut = (inside > 0) & (inside < size)
    load += np.where(model.pays[class_of], model.net_s @ cut, 0.0)
    used = sum_by(device_of, model.node_bytes, count) + model.shared_bytes @ (held > 0)
    return load, used, inside, held


def _pins_on(nets: Nets, device_of: Longs, count: int) -> Longs:
    net = np.repeat(np.arange(len(nets)), np.diff(nets.ptr))
    keys = net * count + device_of[nets.pins]
    return np.bincount(keys, minlength=len(nets) * count).reshape(len(nets), count)
