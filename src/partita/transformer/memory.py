"""Bytes per device of a layout, by what holds them.

Weights, gradients, master copy and optimizer state follow the one table of bytes
(``cost/tables.py``), activations those of ``activations.py``. Stages hold the activations of the
microbatches in flight (``in_flight``); logits live on the last stage, once.

The peak is that of the first or of the last stage, whichever is larger.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from partita.core.precision import DEFAULT_OPTIMIZER, Precision
from partita.cost.tables import StateBytes, fixed_bytes, state_bytes
from partita.transformer.activations import edge_bytes, kept_bytes, layer_bytes, logit_bytes
from partita.transformer.kernels import Case
from partita.transformer.price import held_params
from partita.transformer.shape import Numbers


class Memory(NamedTuple):
    """Bytes per device at the fullest moment of the fullest stage, a row for each layout.

    A framework's allocator reserves about a ninth more than it hands out.

    Attributes:
        weights: Weights that forward and backward read.
        gradients: Gradients.
        master: Copy in a higher precision.
        state: Optimizer state.
        activations: Activations of microbatches in flight.
        logits: Logits, loss and their gradient.
        buffers: Gathered units, buckets and what one backward needs for itself.
        fixed: Context, kernels and communicators, which no allocator of a framework sees.
    """

    weights: Numbers
    gradients: Numbers
    master: Numbers
    state: Numbers
    activations: Numbers
    logits: Numbers
    buffers: Numbers
    fixed: Numbers

    @property
    def held(self) -> Numbers:
        """Bytes that stay for the whole training: weights, gradients, master copy and state."""
        return self.weights + self.gradients + self.master + self.state

    @property
    def allocated(self) -> Numbers:
        """Bytes that a framework's allocator holds."""
        return sum(self[:-1])

    @property
    def total(self) -> Numbers:
        """All bytes."""
        return sum(self)


class Held(NamedTuple):
    """What a stage of a pipeline holds: numbers, or columns over layouts.

    Attributes:
        blocks: Layers.
        ends: 1 where it holds an embedding or a head (on one device both), else 0.
        flight: Microbatches whose activations it keeps.
        is_last: 1 where it computes the loss.
    """

    blocks: Numbers
    ends: Numbers
    flight: Numbers
    is_last: Numbers


def in_flight(
    depth: Numbers, vp: Numbers, turns: Numbers, place: Numbers, *, more: int = 0
) -> Numbers:
    """Return the microbatches whose activations a place of a pipeline keeps.

    One forward, one backward: as many as there are places from it to the end. Interleaved chunks
    warm up with two further chunks for each place after it (Megatron's schedule): ``p v + p - 1``
    chunks on the first, of which ``v`` are a microbatch.

    Args:
        depth: Places of the pipeline.
        vp: Chunks per place.
        turns: Microbatches of a step.
        place: Number of the place, from 0.
        more: Microbatches in flight beside those of replicas with equal shares.
    """
    virtual = depth + (depth - 1.0 - 2.0 * np.asarray(place)) / vp
    plain = depth - np.asarray(place) + more
    return np.minimum(np.where(np.asarray(vp) > 1, virtual, plain), turns)


def memory_of(
    case: Case, precision: Precision, *, optimizer: str = DEFAULT_OPTIMIZER, frozen: float = 0.0
) -> Memory:
    """Return the bytes per device of layouts whose layers are divided evenly, at their peak.

    Args:
        case: The transformer, its layouts and the rest.
        precision: The policy of dtypes.
        optimizer: Name of the optimizer.
        frozen: Share of the parameters that is not trained.
    """
    p, v, turns = case.layouts.pp, case.layouts.vp, case.microbatches
    alone = np.asarray(p) == 1
    # Where layers do not divide, a framework may give one more to the ends, too.
    blocks = np.ceil(case.sizes.layers / (p * v) - 1e-9) * v
    blocks = np.where(alone, case.sizes.layers, blocks)

    def at(place: Numbers, is_last: Numbers) -> Memory:
        held = Held(blocks, 1.0, in_flight(p, v, turns, place), is_last)
        return stage_memory(case, precision, held, optimizer=optimizer, frozen=frozen)

    first = at(0.0, np.where(alone, 1.0, 0.0))
    if np.all(alone):
        return first
    last = at(p - 1.0, 1.0)
    at_end = np.asarray(last.total) > first.total
    return Memory(*(np.where(at_end, b, a) for a, b in zip(first, last, strict=True)))


def stage_memory(
    case: Case,
    precision: Precision,
    stage: Held,
    *,
    optimizer: str = DEFAULT_OPTIMIZER,
    frozen: float = 0.0,
) -> Memory:
    """Return the bytes per device of one stage of layouts.

    Args:
        case: The transformer, its layouts and the rest.
        precision: The policy of dtypes.
        stage: What the stage holds.
        optimizer: Name of the optimizer.
        frozen: Share of the parameters that is not trained.
    """
    layouts, sizes, element = case.layouts, case.sizes, case.job.element_bytes
    held = held_params(case)
    held = held._replace(blocks=stage.blocks, ends=held.ends * stage.ends)
    # Gradients in a higher precision beside the master copy live in the update alone, when no
    # activation does.
    lasting = replace(precision, master_gradients=None)
    each = state_bytes(lasting, optimizer, frozen=frozen)
    brief = state_bytes(precision, optimizer, frozen=frozen).master - each.master
    zero = np.asarray(layouts.zero)
    shards = np.where(zero >= 3, layouts.shards, held.replicas)
    dense = _state(each, held.dense, zero, shards)
    routed = _state(each, held.routed, zero, held.expert_replicas)
    weights, gradients, master, state = (a + b for a, b in zip(dense, routed, strict=True))
    # Units that stay gathered between microbatches (FSDP2 under a pipeline) keep whole weights as
    # they are gathered, and whole sums of gradients as they are reduced, beside their shards.
    stays = (zero == 2) & (np.asarray(layouts.pp) > 1)
    whole = held.dense + held.routed
    shard = held.dense / shards + held.routed / held.expert_replicas
    weights = np.where(stays, shard * each.weights + whole * case.job.gathered_bytes, weights)
    gradients = np.where(stays, whole * case.job.reduced_bytes, gradients)

    tokens = case.tokens
    full = np.asarray(layouts.again["full"]) > 0
    # One block more lives while it is computed again, and about as much while its gradients do;
    # tensor parallelism gathers the sequence for inputs and gradients of both parts of a block.
    grads = np.where(np.asarray(case.software.unfused) > 0, 0.3, 1.0)
    passing = np.where(full, 1.0 + grads, 0.5) * layer_bytes(case)
    gathered = 4.0 * element * tokens * sizes.hidden * (np.asarray(layouts.sp) > 0)
    # Parts of attention over a divided sequence are merged in float32, beside gathered keys.
    c = np.asarray(layouts.cp)
    keys = 4.0 * element * c * sizes.kv_width
    merged = tokens / layouts.tp * (8.0 * sizes.queries + keys)
    gathered = gathered + np.where(c > 1, merged, 0.0)
    kept = kept_bytes(case) * stage.blocks * (1.0 - layouts.offload_activations)
    activations = (kept + edge_bytes(case)) * stage.flight
    logits = logit_bytes(case) * stage.is_last

    unit, moved = held.block + held.experts, case.job.gathered_bytes
    units = np.where(zero >= 3, 2.0 * moved * unit + 4.0 * unit + moved * held.ends, 0.0)
    bucket = np.where(
        (held.replicas > 1) & (zero < 3),
        np.minimum(held.dense, 4.0e7) * case.job.reduced_bytes,
        0.0,
    )
    divided = np.where(zero >= 1, shard, whole)
    buffers = units + bucket + passing + gathered
    buffers = np.maximum(buffers, divided * brief - activations - logits)
    groups = (layouts.tp, layouts.pp, layouts.cp, layouts.ep, layouts.dp)
    return Memory(
        weights=weights,
        gradients=gradients,
        master=master * (1.0 - layouts.offload_optimizer),
        state=state * (1.0 - layouts.offload_optimizer),
        activations=activations,
        logits=logits,
        buffers=buffers,
        fixed=fixed_bytes(sum((np.asarray(degree) > 1) * 1.0 for degree in groups)),
    )


def _state(
    each: StateBytes, params: Numbers, level: Numbers, shards: Numbers
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return weights, gradients, master copy and state of parameters under sharding."""
    here = each.on_device(level=np.asarray(level), replicas=np.asarray(shards))
    copies = np.asarray(here.copy)
    return (
        params * (here.weights + copies),
        params * here.gradients,
        params * here.master,
        params * here.state,
    )
