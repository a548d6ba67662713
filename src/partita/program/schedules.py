"""Pipeline schedules: a schedule gives every compute instruction a key, and a device runs by key.

A schedule is one function ``Order`` here, from a ``Pipeline`` to keys for each (stage, microbatch),
and one row in ``core/schedules.py``, which names it. Keys are compared on one device only. ``W_s``,
the microbatches in flight on stage s, is its replicas plus the largest W of its successors; with

    phi(F(s, m)) = 2 m - W_s + 1        phi(B(s, m)) = 2 m + W_s

phi rises along every dependency of any stage graph, so an order by phi cannot deadlock, and for a
chain of single devices it is 1F1B.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from partita.core.columns import Array
from partita.core.order import csr
from partita.core.plan import Plan, Shard
from partita.core.program import Kind
from partita.kernels import Column, kernel, run
from partita.program.layout import Crossings, Layout

SLOTS = 5
"""Keys are multiples of this, which leaves room for what stands right before or after."""


class Pipeline(NamedTuple):
    """Input of a schedule.

    Attributes:
        plan: The plan.
        layout: Its devices.
        in_flight: ``W_s`` of each stage.
    """

    plan: Plan
    layout: Layout
    in_flight: Array


Order: TypeAlias = Mapping[Kind, Array]
"""Keys of shape (stages, microbatches) for each kind of compute instruction."""


def in_flight(plan: Plan, layout: Layout, crossing: Crossings) -> Array:
    """Return ``W_s`` for each stage."""
    count = layout.num_stages
    ptr, targets = csr(crossing.producer, crossing.reader, count)
    weight = layout.replicas.astype(np.int64)
    total = np.zeros(count, dtype=np.int64)
    run(_fill_suffix, len(targets) + count, [ptr, targets, weight], [total])
    shards = np.array([s.shard in (Shard.GRADIENTS, Shard.PARAMETERS) for s in plan.stages])
    if shards.any():
        total = _rounded_up(ptr, targets, layout, shards)
    return total.astype(np.int32)


@kernel
def _fill_suffix(ptr: Column, targets: Column, weight: Column, total: Column) -> None:
    """Fill ``total`` with each node's weight plus the largest total of its targets.

    Edges must lead from lower to higher numbers, so that one pass from the end knows all targets.
    """
    for node in range(len(total) - 1, -1, -1):
        best = 0
        for edge in range(ptr[node], ptr[node + 1]):
            best = max(best, total[targets[edge]])
        total[node] = weight[node] + best


def _rounded_up(ptr: Array, targets: Array, layout: Layout, shards: Array) -> Array:
    """Like ``_fill_suffix``, with W of sharded stages rounded up to whole rounds."""
    total = np.zeros(layout.num_stages, dtype=np.int64)
    for stage in range(layout.num_stages - 1, -1, -1):
        after = targets[ptr[stage] : ptr[stage + 1]]
        value = int(layout.replicas[stage]) + (int(total[after].max()) if len(after) else 0)
        if shards[stage]:
            value += -value % int(layout.replicas[stage])
        total[stage] = value
    return total


def order_gpipe(pipe: Pipeline) -> Order:
    """All forwards, then all backwards; stages of one device one after the other."""
    stages, microbatches = pipe.layout.num_stages, pipe.layout.num_microbatches
    stage, turn = np.arange(stages)[:, None], np.arange(microbatches)[None, :]
    forward = stage * microbatches + turn
    backward = (2 * stages - 1 - stage) * microbatches + turn
    return {Kind.FORWARD: SLOTS * forward, Kind.BACKWARD: SLOTS * backward}


def order_1f1b(pipe: Pipeline) -> Order:
    """One forward, one backward, by phi."""
    turn = 2 * np.arange(pipe.layout.num_microbatches, dtype=np.int64)[None, :]
    depth = pipe.in_flight.astype(np.int64)[:, None]
    return {Kind.FORWARD: SLOTS * (turn - depth + 1), Kind.BACKWARD: SLOTS * (turn + depth)}


def order_interleaved(pipe: Pipeline) -> Order:
    """Megatron's interleaved order; by phi where it does not apply.

    It applies to v stages on each of p devices, stage s on device s mod p, and a number of
    microbatches for each replica that is a multiple of p. Where one device holds all stages there
    is nothing to fill: a microbatch goes through all of them and back before the next one comes,
    as in fully sharded data parallelism.
    """
    plan, layout = pipe.plan, pipe.layout
    period = _interleaving(plan, layout)
    if period is None:
        return order_1f1b(pipe)
    devices, replicas = period
    chunks = layout.num_stages // devices
    stage = np.arange(layout.num_stages)[:, None]
    turn = np.arange(plan.num_microbatches)[None, :] // replicas
    rank, chunk = stage % devices, stage // devices
    if devices == 1:
        start = 2 * chunks * turn
        backward = start + 2 * chunks - 1 - chunk
        return {Kind.FORWARD: SLOTS * (start + chunk), Kind.BACKWARD: SLOTS * backward}
    total = plan.num_microbatches // replicas * chunks
    warm_up = np.minimum((devices - rank - 1) * 2 + (chunks - 1) * devices, total)
    before = turn // devices * devices * chunks + turn % devices
    forward = before + chunk * devices
    backward = before + (chunks - 1 - chunk) * devices
    steady = total - warm_up
    return {
        Kind.FORWARD: SLOTS * np.where(forward < warm_up, forward, 2 * forward - warm_up),
        Kind.BACKWARD: SLOTS
        * np.where(backward < steady, warm_up + 2 * backward + 1, warm_up + steady + backward),
    }


def _interleaving(plan: Plan, layout: Layout) -> tuple[int, int] | None:
    """Return (devices in a row, replicas) where Megatron's order applies."""
    first = plan.stages[0]
    replicas = first.num_replicas
    repeats = [index for index, stage in enumerate(plan.stages) if stage.devices == first.devices]
    devices = repeats[1] if len(repeats) > 1 else layout.num_stages
    ring = plan.stages[:devices]
    regular = all(
        stage.devices == ring[index % devices].devices and set(stage.shares) == {1}
        for index, stage in enumerate(plan.stages)
    )
    used = [device for stage in ring for group in stage.devices for device in group]
    disjoint = len(set(used)) == len(used)
    same = set(layout.replicas.tolist()) == {replicas}
    whole = layout.num_stages % devices == 0 and plan.num_microbatches % (replicas * devices) == 0
    return (devices, replicas) if regular and disjoint and same and whole else None


def order_zero_bubble(pipe: Pipeline) -> Order:
    """ZB-H1: 1F1B with the weight part of backward delayed to fill the bubble.

    The weight part of a microbatch stands after the input part of the one ``max W - W_s`` later,
    so that no stage keeps more activations than the first stage of 1F1B.
    """
    base = order_1f1b(pipe)
    delay = (pipe.in_flight.max() - pipe.in_flight).astype(np.int64)[:, None]
    return {
        Kind.FORWARD: base[Kind.FORWARD],
        Kind.BACKWARD_INPUT: base[Kind.BACKWARD],
        Kind.BACKWARD_WEIGHT: base[Kind.BACKWARD] + 2 * SLOTS * delay + 1,
    }


def order_split(pipe: Pipeline) -> Order:
    """1F1B that sends the gradient of a stage's inputs before it computes that of its weights.

    Nothing is kept longer than in 1F1B, and the way back through the pipeline is the input part.
    """
    base = order_1f1b(pipe)
    return {
        Kind.FORWARD: base[Kind.FORWARD],
        Kind.BACKWARD_INPUT: base[Kind.BACKWARD],
        Kind.BACKWARD_WEIGHT: base[Kind.BACKWARD] + 1,
    }


def order_early_recompute(pipe: Pipeline) -> Order:
    """1F1B that recomputes activations while the gradient is still on its way."""
    base = order_1f1b(pipe)
    return {**base, Kind.RECOMPUTE: base[Kind.BACKWARD] - 1}


def order_inference(pipe: Pipeline) -> Order:
    """Forwards only, as soon as they can run."""
    return {Kind.FORWARD: order_1f1b(pipe)[Kind.FORWARD]}
