"""In which order a device lists its compute: the schedule's own, or one of two plainer ones.

- ``device``: each device follows the plan's schedule.
- ``global``: all devices follow one order of all compute instructions of the step, by phi of
  ``program/schedules.py``, which rises along every dependency; a device's list is what falls to it.
  1F1B is that order already, so it changes the other schedules only.
- ``program``: the order in which the model's own code runs its ops, microbatch by microbatch:
  forward through all stages and back again before the next one begins.

Lowering works as ever on the new keys, so the lists are free of deadlock for the same reason, with
overlapped and with blocking transfers, and the results are the same to the bit.

``longest_levels`` is what lists, and turns of collectives, are sorted by where only some orders
between instructions are given.
"""

import heapq
import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import numpy as np

from partita.core.columns import Array
from partita.core.order import csr
from partita.core.plan import Plan, Shard
from partita.core.program import Kind
from partita.errors import InvalidInputError
from partita.kernels import Column, kernel, run
from partita.program.layout import Crossings
from partita.program.schedules import SLOTS, Order, Pipeline, order_1f1b


class ListOrder(StrEnum):
    """Order that the lists of the devices follow: see the module."""

    DEVICE = "device"
    GLOBAL = "global"
    PROGRAM = "program"


class _Listed(NamedTuple):
    """Input of an order.

    Attributes:
        keys: The keys of the plan's schedule.
        pipe: What the schedule has looked at.
        crossing: The tensors that cross stages.
    """

    keys: Order
    pipe: Pipeline
    crossing: Crossings


def ordered(order: ListOrder, keys: Order, pipe: Pipeline, crossing: Crossings) -> Order:
    """Return the keys of a schedule's instructions in another order.

    Raises:
        InvalidInputError: Weight stashing in program order: its versions follow from its schedule.
    """
    return _ORDERS[order](_Listed(keys, pipe, crossing))


def _device_order(listed: _Listed) -> Order:
    return listed.keys


def _global_order(listed: _Listed) -> Order:
    phi = order_1f1b(listed.pipe)
    return _completed(listed.keys, phi[Kind.FORWARD], phi[Kind.BACKWARD])


def _program_order(listed: _Listed) -> Order:
    plan, layout = listed.pipe.plan, listed.pipe.layout
    if plan.stashes_weights:
        raise InvalidInputError(
            f"schedule {plan.schedule.value!r} cannot be listed in program order: a microbatch "
            "would see newer weights than in its schedule; use order device or global"
        )
    place = _stage_places(listed.crossing, plan)[:, None]
    turn = np.arange(layout.num_microbatches, dtype=np.int64)[None, :]
    block, within = np.divmod(turn, _meeting_turns(plan))
    stages, length = layout.num_stages, layout.num_microbatches
    first = block * 2 * stages
    return _completed(
        listed.keys,
        SLOTS * ((first + place) * length + within),
        SLOTS * ((first + 2 * stages - 1 - place) * length + within),
    )


def _completed(keys: Order, forward: Array, backward: Array) -> Order:
    """Return keys for the kinds of a schedule: recomputation right before, weights right after."""
    beside = {Kind.RECOMPUTE: -1, Kind.BACKWARD_WEIGHT: 1}
    return {
        kind: forward if kind is Kind.FORWARD else backward + beside.get(kind, 0) for kind in keys
    }


def _meeting_turns(plan: Plan) -> int:
    """Return how many microbatches go together: all of a round where replicas meet within one."""
    meets = (Shard.GRADIENTS, Shard.PARAMETERS)
    return math.lcm(*(stage.num_replicas for stage in plan.stages if stage.shard in meets))


def _stage_places(crossing: Crossings, plan: Plan) -> Array:
    """Return the place of each stage when stages run as soon as the code comes to their first op.

    A stage waits for those that it reads from; of several that can run, the one with the earliest
    op in the order of the graph goes first.
    """
    count = len(plan.stages)
    _, first_op = np.unique(plan.stage_of, return_index=True)
    pairs = np.unique(np.stack([crossing.producer, crossing.reader]), axis=1)
    readers: list[list[int]] = [[] for _ in range(count)]
    for producer, reader in pairs.T.tolist():
        readers[producer].append(reader)
    waiting = np.bincount(pairs[1], minlength=count).tolist()
    early: list[int] = first_op.tolist()
    ready = [(early[stage], stage) for stage in range(count) if not waiting[stage]]
    heapq.heapify(ready)
    place = np.zeros(count, dtype=np.int64)
    for turn in range(count):
        _, stage = heapq.heappop(ready)
        place[stage] = turn
        for reader in readers[stage]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (early[reader], reader))
    return place


_Rule: TypeAlias = Callable[[_Listed], Order]
_ORDERS: Mapping[ListOrder, _Rule] = {
    ListOrder.DEVICE: _device_order,
    ListOrder.GLOBAL: _global_order,
    ListOrder.PROGRAM: _program_order,
}


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
