"""Seconds of a training step of a transformer in closed form, split by what takes them.

A step runs ``M`` microbatches through ``p`` stages of ``v`` chunks: ``M`` times the slowest stage,
``(p - 1) / v`` times a stage for filling and draining, what of the gradients' reduction does not
hide under the last backward (and of the gather under the first forward), and the update. A stage
is blocks (``kernels.py``) and collectives (``cost/links.py``), of which a share shows that depends
on the framework:

- tensor parallel: two all-reduces per block and pass, or with ``sp`` two gathers and two
  reduce-scatters;
- context parallel: a ring of keys and values under attention, or an all-to-all;
- experts: an all-to-all to them and one back;
- fully sharded units: a gather in each pass and a reduce-scatter, one unit ahead. Collectives that
  run under compute take processors from it.

The order of ranks (tp, cp, dp, pp from the inside, unless a layout has another) says how many ranks
of a group share a host.
Everything broadcasts: one call prices thousands of layouts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from partita.core.graph import DTYPE_BYTES
from partita.core.precision import DEFAULT_OPTIMIZER, Precision, parse_precision
from partita.core.program import Kind
from partita.cost.degrees import host_update_s
from partita.cost.links import Fabric, group_collective_s
from partita.cost.tables import state_bytes
from partita.errors import InvalidInputError
from partita.transformer.activations import kept_bytes
from partita.transformer.kernels import (
    Arithmetic,
    Block,
    Case,
    Job,
    Machine,
    block_s,
    load_constants,
    longer_s,
    software_of,
)
from partita.transformer.layout import Layout, Layouts, columns_of
from partita.transformer.shape import Numbers, Shape, sizes_of


def job_of(
    precision: Precision,
    *,
    batch: int,
    sequence_length: int,
    optimizer: str = DEFAULT_OPTIMIZER,
    frozen: float = 0.0,
    block_scaled: bool = False,
) -> Job:
    """Return a job under a policy of dtypes.

    Args:
        precision: The policy.
        batch: Sequences of a step.
        sequence_length: Tokens of a sequence.
        optimizer: Name of the optimizer.
        frozen: Share of the weights that is not trained.
        block_scaled: Whether float8 is scaled by blocks, as on Blackwell.
    """
    state = state_bytes(precision, optimizer, frozen=frozen)
    float8 = float(precision.compute == "float8")
    return Job(
        batch=batch,
        sequence_length=sequence_length,
        arithmetic=Arithmetic(float8, float8 * block_scaled),
        reduced_bytes=float(DTYPE_BYTES[precision.reduction]),
        # Gathers of float8 weights move their 16-bit shape's half only where every layer is float8.
        gathered_bytes=float(max(2, DTYPE_BYTES[precision.gather])),
        update_bytes=float(state.update_traffic),
        trained=1.0 - frozen,
        element_bytes=float(DTYPE_BYTES[precision.activations]),
    )


class Steps(NamedTuple):
    """Seconds of steps, a row for each layout, by what takes them.

    Attributes:
        compute_s: Kernels, and hosts that are slower than them.
        recompute_s: Of that, what is computed again.
        tensor_s: Tensor-parallel collectives that show.
        context_s: Context-parallel ones.
        expert_s: All-to-all of experts that shows.
        pipeline_s: Sends between stages that show.
        bubble_s: Waiting for the pipeline to fill and drain.
        data_s: Gathers and reductions of data parallelism that show.
        optimizer_s: The update.
        loading_s: Reading data.
        offload_s: Activations on their way to host memory and back that show.
    """

    compute_s: Numbers
    recompute_s: Numbers
    tensor_s: Numbers
    context_s: Numbers
    expert_s: Numbers
    pipeline_s: Numbers
    bubble_s: Numbers
    data_s: Numbers
    optimizer_s: Numbers
    loading_s: Numbers
    offload_s: Numbers

    @property
    def step_s(self) -> Numbers:
        """Seconds of a step."""
        blocks = self.compute_s + self.tensor_s + self.context_s + self.expert_s
        around = self.pipeline_s + self.bubble_s + self.data_s + self.optimizer_s
        return blocks + around + self.loading_s + self.offload_s


def price_layouts(
    shape: Shape,
    layouts: Sequence[Layout],
    machine: Machine,
    *,
    batch: int,
    sequence_length: int,
    optimizer: str = DEFAULT_OPTIMIZER,
) -> Steps:
    """Return the steps of layouts of one framework, stack and precision.

    Raises:
        InvalidInputError: The layouts are of several frameworks, stacks or precisions.
    """
    kinds = {(row.framework, row.stack, row.precision, row.tp_overlap) for row in layouts}
    if len(kinds) != 1:
        raise InvalidInputError(
            f"layouts of {len(kinds)} combinations of framework, stack, precision and overlap; "
            "expected one, priced by itself"
        )
    job = job_of(
        parse_precision(layouts[0].precision),
        batch=batch,
        sequence_length=sequence_length,
        optimizer=optimizer,
        block_scaled=machine.graphs,
    )
    software = software_of(layouts[0], machine)
    return price(
        Case(sizes_of(shape), columns_of(layouts), job, machine, software, load_constants())
    )


class Groups(NamedTuple):
    """Groups of ranks of layouts on a fabric.

    Attributes:
        fabric: The links.
        layouts: The layouts.
    """

    fabric: Fabric
    layouts: Layouts

    def near(self, *degrees: str) -> Numbers:
        """Return ranks that share a host of a group over some degrees."""
        ranks: Numbers = np.ones(1)
        for name in degrees:
            apart = self.layouts.strides[name]
            most = np.maximum(getattr(self.layouts, name), 1.0)
            ranks = ranks * np.clip(np.floor(self.fabric.devices_per_host / apart), 1.0, most)
        return ranks

    @property
    def tensor(self) -> Numbers:
        """Ranks of a tensor-parallel group in one host."""
        return self.near("tp")

    @property
    def context(self) -> Numbers:
        """Ranks of a context-parallel group in one host."""
        return self.near("cp")

    @property
    def replicas(self) -> Numbers:
        """Ranks that hold the same dense part in one host."""
        return self.near("cp", "dp")

    def experts(self, apart: Numbers) -> Numbers:
        """Return ranks of a stage in one host of which every ``apart``-th is counted."""
        return np.maximum(np.floor(self.near("tp", "cp", "dp") / apart), 1.0)

    def seconds(self, kind: Kind, ranks: Numbers, near: Numbers, size: Numbers) -> Numbers:
        """Return seconds of a collective over ranks of which ``near`` share a host."""
        return group_collective_s(
            self.fabric, kind, *map(np.asarray, (ranks, np.minimum(near, ranks), size))
        )

    @property
    def stages_near(self) -> Numbers:
        """Whether stages of a pipeline and the next ones share a host, but for those at its end."""
        return self.layouts.strides["pp"] < self.fabric.devices_per_host

    def send(self, near: Numbers, size: Numbers) -> Numbers:
        """Return seconds of a transfer, inside a host where ``near`` holds."""
        per_host = np.where(near, 2.0, 1.0)
        return group_collective_s(
            self.fabric, Kind.SEND, np.asarray(2.0), per_host, np.asarray(size)
        )


class _Shown(NamedTuple):
    """Communication that shows in one forward pass of one block."""

    tensor: Numbers
    context: Numbers
    expert: Numbers

    @property
    def all(self) -> Numbers:
        """All of it."""
        return self.tensor + self.context + self.expert


class _Held(NamedTuple):
    """Parameters per device before sharding, and the ranks that hold the same.

    Attributes:
        block: Parameters of a block that all tokens pass.
        experts: Parameters of a block's experts.
        ends: Parameters of embedding and head.
        blocks: Blocks of a stage.
        replicas: Ranks that hold the same dense part.
        expert_replicas: Ranks that hold the same experts.
    """

    block: Numbers
    experts: Numbers
    ends: Numbers
    blocks: Numbers
    replicas: Numbers
    expert_replicas: Numbers

    @property
    def dense(self) -> Numbers:
        """Parameters of a stage that all tokens pass."""
        return self.block * self.blocks + self.ends

    @property
    def routed(self) -> Numbers:
        """Parameters of a stage's experts."""
        return self.experts * self.blocks


def held_params(case: Case) -> _Held:
    """Return what one device of an end stage holds of the parameters, before sharding."""
    sizes, layouts, h = case.sizes, case.layouts, case.sizes.hidden
    share = sizes.expert_share
    dense = sizes.attention_params + (1.0 - share) * sizes.matrices * h * sizes.ffn
    dense = dense + share * h * (sizes.matrices * sizes.shared_ffn + sizes.experts)
    experts = share * sizes.experts * sizes.matrices * h * sizes.expert_ffn
    end = sizes.vocab * h / layouts.tp
    inner, replicas = layouts.ep * layouts.etp, layouts.dp * layouts.cp
    return _Held(
        block=dense / layouts.tp,
        experts=experts / inner,
        ends=np.where(np.asarray(layouts.pp) > 1, end, end * sizes.ends),
        blocks=sizes.layers / layouts.pp,
        replicas=replicas,
        expert_replicas=np.maximum(1.0, layouts.tp * replicas / inner),
    )


def price(case: Case) -> Steps:
    """Return the seconds of steps, a row for each layout; they must be possible."""
    sizes, layouts, software, figures = case.sizes, case.layouts, case.software, case.figures
    groups = Groups(case.machine.fabric, case.layouts)
    block = block_s(case)
    held = held_params(case)
    p, v = layouts.pp, layouts.vp
    shown = _shown(case, groups, block)

    # One block, with the host where it is slower than the device.
    forward = longer_s(block.forward + shown.all, block.host)
    partly = block.again + block.expert_replay * shown.expert
    again = np.where(np.asarray(block.replay) > 0, forward, partly)
    backward = longer_s(block.backward + shown.all + shown.context, block.host) + again
    units = _units_s(case, groups, held, forward, backward).added

    # One stage. Where the last one has a layer less the head weighs less, and frameworks that
    # place layers freely balance some of it.
    staged = np.asarray(p) > 1
    most = np.where(staged, np.ceil(sizes.layers / (p * v) - 1e-9) * v, sizes.layers)
    head_tensor = _head_tensor(case, groups)
    head = block.head + head_tensor
    away = _away_s(case, forward, backward)
    each = forward + backward + units + away
    short = np.clip(most * p - sizes.layers, 0.0, 1.0)
    beyond = np.where(
        staged,
        np.maximum(figures["common.head"] * head - short * each, 0.0),
        head + block.embedding,
    )
    splits = (np.asarray(layouts.sp) > 0) | (np.asarray(software.sends_split) > 0)
    sent = case.job.element_bytes * case.tokens * sizes.hidden
    sent = sent / np.where(splits, layouts.tp, 1.0)
    send = groups.send(groups.stages_near, sent)
    alone, interleaved = software.sends_shown
    sends = 2.0 * v * send * np.where(np.asarray(v) > 1, interleaved, alone)
    sends = sends + 2.0 * v * np.where(np.asarray(v) > 1, figures["common.chunk_s"], 0.0)
    bubble = (p - 1.0) / v * (each * most + 2.0 * v * send)

    runs = case.microbatches * most
    seconds = _divided(runs, block, shown, forward + backward)
    last = np.where(staged, 0.0, case.microbatches * head_tensor)
    chunk = held.blocks / v
    data = runs * units + _replicas_s(case, groups, held, forward * chunk, backward * chunk)
    return Steps(
        compute_s=seconds[0] + case.microbatches * beyond - last,
        recompute_s=runs * again,
        tensor_s=seconds[1] + last,
        context_s=seconds[2],
        expert_s=seconds[3],
        pipeline_s=np.where(staged, case.microbatches * sends, 0.0),
        bubble_s=np.where(staged, bubble, 0.0),
        data_s=data,
        optimizer_s=_update_s(case, held),
        loading_s=case.job.loading_s + 0.0 * data,
        offload_s=runs * away,
    )


def _divided(
    runs: Numbers, block: Block, shown: _Shown, seconds: Numbers
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return compute and the three kinds of communication that add up to blocks' seconds.

    Where the host is slower than the device, its time covers what would have shown.
    """
    passes = 2.0 + block.replay
    parts = (
        passes * shown.tensor,
        (passes + 1.0) * shown.context,
        (2.0 + block.expert_replay) * shown.expert,
    )
    total = parts[0] + parts[1] + parts[2]
    kept = runs * np.minimum(total, seconds) / np.maximum(total, 1e-30)
    compute = runs * np.maximum(seconds - total, 0.0)
    return compute, kept * parts[0], kept * parts[1], kept * parts[2]


def _head_tensor(case: Case, groups: Groups) -> Numbers:
    """Return the collectives of a loss over a divided vocabulary."""
    t, tokens = case.layouts.tp, case.tokens
    size = case.job.element_bytes * tokens * case.sizes.hidden
    whole = groups.seconds(Kind.ALL_REDUCE, t, groups.tensor, size)
    small = groups.seconds(Kind.ALL_REDUCE, t, groups.tensor, 4.0 * tokens)
    return case.software.tp_exposed[0] * whole + 3.0 * small


def _shown(case: Case, groups: Groups, block: Block) -> _Shown:
    """Return the communication of a block's forward that shows."""
    sizes, layouts, software, tokens = case.sizes, case.layouts, case.software, case.tokens
    t, sp = layouts.tp, np.asarray(layouts.sp) > 0
    size = case.job.element_bytes * tokens * sizes.hidden
    whole = software.tp_exposed[1] * groups.seconds(Kind.ALL_REDUCE, t, groups.tensor, size)
    split = software.tp_exposed[0] * 2.0 * groups.seconds(Kind.ALL_GATHER, t, groups.tensor, size)
    # Blocks with experts have one pair only: their feed-forward part is not split.
    tensor = (2.0 - sizes.expert_share) * np.where(sp, split, whole)
    context = _context(case, groups, block.core) if np.any(np.asarray(layouts.cp) > 1) else 0.0
    if not case.has_experts:
        return _Shown(tensor, context + 0.0 * tensor, 0.0 * tensor)
    return _Shown(
        tensor, context + 0.0 * tensor, sizes.expert_share * _experts(case, groups, block)
    )


def _experts(case: Case, groups: Groups, block: Block) -> Numbers:
    """Return what shows of a block's way to its experts and back, and of their tensor groups.

    Inside a host most of an exchange is copying, which ``expert_passes`` counts. Over the network
    all of it shows, unless the work of another microbatch hides it; what goes to several experts
    of one host crosses the network once where the dispatcher knows (DeepEP, HybridEP).
    """
    sizes, layouts, software = case.sizes, case.layouts, case.software
    sent = case.job.element_bytes * case.split_tokens * sizes.top_k * sizes.hidden
    near = np.minimum(groups.experts(layouts.etp), layouts.ep)
    swap = 2.0 * groups.seconds(Kind.ALL_TO_ALL, layouts.ep, near, sent)
    hosts = np.maximum(np.ceil(layouts.ep / near), 1.0)
    far = hosts > 1
    top_k = np.maximum(sizes.top_k, 1.0)
    once = hosts / top_k * (1.0 - (1.0 - 1.0 / hosts) ** top_k)
    swap = swap * np.where(far & (np.asarray(software.expert_once) > 0), once, 1.0)
    hides = case.figures["common.hidden"] * (block.forward + block.backward) / 2.0
    late = np.maximum(software.expert_late * swap, np.where(far, swap - hides, 0.0))
    shows = np.where(far, 1.0, software.expert_exposed) * swap
    shows = np.where(np.asarray(layouts.expert_overlap) > 0, late, shows)
    inner = groups.seconds(Kind.ALL_GATHER, layouts.etp, groups.experts(1.0), sent * layouts.etp)
    return shows + 2.0 * software.tp_exposed[0] * inner


def _context(case: Case, groups: Groups, core_s: Numbers) -> Numbers:
    """Return what shows of a ring of keys and values, of their gather, or of an all-to-all."""
    sizes, layouts, tokens = case.sizes, case.layouts, case.tokens
    t, c = layouts.tp, layouts.cp
    element = case.job.element_bytes
    keys = 2.0 * element * tokens * np.maximum(sizes.kv_heads / t, 1.0) * sizes.key_dim
    ring = (c - 1.0) * groups.send(groups.context >= c, keys)
    late = np.maximum(ring - case.figures["common.hidden"] * core_s * (c - 1.0) / c, 0.0)
    ring = late + case.figures["common.ring"] * ring
    gather = groups.seconds(Kind.ALL_GATHER, c, groups.context, keys * c)
    width = sizes.queries + sizes.values + 2.0 * sizes.kv_width
    swap = groups.seconds(Kind.ALL_TO_ALL, c, groups.context, element * tokens * width / t)
    shared = np.where(np.asarray(case.software.ring_hidden) > 0, ring, gather)
    found = np.where(np.asarray(layouts.ring) > 0, shared, swap)
    return np.where(np.asarray(c) > 1, found, 0.0)


def _away_s(case: Case, forward: Numbers, backward: Numbers) -> Numbers:
    """Return what shows of a block's activations that go to host memory and come back."""
    share = np.asarray(case.layouts.offload_activations)
    if not np.any(share > 0):
        return 0.0 * forward
    moved = share * kept_bytes(case) / case.machine.host_bytes_per_s
    hides = case.figures["common.hidden"]
    return np.maximum(moved - hides * forward, 0.0) + np.maximum(moved - hides * backward, 0.0)


class _Units(NamedTuple):
    """What gathers and reductions of sharded units add to a block and microbatch.

    Attributes:
        added: Seconds that they add, with what of them nothing hides.
        slowed: Of it, what compute under their collectives loses.
    """

    added: Numbers
    slowed: Numbers


def _units_s(
    case: Case, groups: Groups, held: _Held, forward: Numbers, backward: Numbers
) -> _Units:
    """Return what gathers and reductions of sharded units add to a block and microbatch."""
    layouts, job, zero = case.layouts, case.job, np.asarray(case.layouts.zero)
    if not np.any(zero >= 2):
        return _Units(0.0 * forward, 0.0 * forward)
    # Ranks that hold the same experts lie ep x etp ranks of the stage apart.
    near = groups.experts(layouts.ep * layouts.etp)

    def over(kind: Kind, each_bytes: Numbers) -> Numbers:
        dense = groups.seconds(kind, layouts.shards, groups.replicas, each_bytes * held.block)
        if not case.has_experts:
            return dense
        return dense + groups.seconds(kind, held.expert_replicas, near, each_bytes * held.experts)

    gather = over(Kind.ALL_GATHER, job.gathered_bytes)
    reduced = over(Kind.REDUCE_SCATTER, job.reduced_bytes)

    def beside(compute: Numbers, moved: Numbers) -> Numbers:
        """Return what compute loses to collectives that run under it."""
        taken = case.figures["common.taken"] * np.minimum(compute, moved)
        return np.maximum(taken, case.software.unit_exposed * moved)

    def added(compute: Numbers, moved: Numbers) -> Numbers:
        return np.maximum(beside(compute, moved), moved - compute)

    whole = added(forward, gather) + added(backward, gather + reduced)
    slowed = beside(forward, gather) + beside(backward, gather + reduced)
    gradients = np.where(layouts.pp == 1, added(backward, reduced), 0.0)
    return _Units(
        added=np.where(zero >= 3, whole, np.where(zero == 2, gradients, 0.0)),
        slowed=np.where(
            zero >= 3,
            slowed,
            np.where((zero == 2) & (np.asarray(layouts.pp) == 1), beside(backward, reduced), 0.0),
        ),
    )


def _replicas_s(
    case: Case, groups: Groups, held: _Held, forward: Numbers, backward: Numbers
) -> Numbers:
    """Return seconds per step of reductions and gathers over replicas that show.

    ``forward`` and ``backward`` are those of one chunk of layers, under which they may run.
    """
    layouts, job, figures = case.layouts, case.job, case.figures
    near = groups.experts(layouts.ep * layouts.etp)

    def over(kind: Kind, each_bytes: Numbers) -> Numbers:
        dense = groups.seconds(kind, held.replicas, groups.replicas, each_bytes * held.dense)
        if not case.has_experts:
            return dense
        routed = groups.seconds(kind, held.expert_replicas, near, each_bytes * held.routed)
        return dense + np.where(np.asarray(held.routed) > 0, routed, 0.0)

    scatter = over(Kind.REDUCE_SCATTER, job.reduced_bytes)
    gather = over(Kind.ALL_GATHER, job.gathered_bytes)
    # Buckets of max(40e6, 1e6 ranks) parameters: the last one has nothing left to hide under.
    tail = np.minimum(1.0, np.maximum(40e6, 1e6 * held.replicas) / np.maximum(held.dense, 1.0))
    hides = figures["common.hidden"]
    late = np.maximum(scatter - hides * backward, tail * scatter)
    early = np.maximum(gather - hides * forward, tail * gather)
    hidden = np.asarray(case.software.gradients_hidden) > 0
    plain = np.where(hidden, late + early, over(Kind.ALL_REDUCE, job.reduced_bytes))
    zero = np.asarray(layouts.zero)
    if not np.any(zero >= 2):
        return plain * job.trained
    ranks, inside = layouts.shards, groups.replicas
    shard = held.dense / ranks
    copies, apart = held.replicas / ranks, np.maximum(np.floor(inside / ranks), 1.0)
    across = groups.seconds(Kind.ALL_REDUCE, copies, apart, job.reduced_bytes * shard)
    ends_in = groups.seconds(Kind.ALL_GATHER, ranks, inside, job.gathered_bytes * held.ends)
    ends_out = groups.seconds(Kind.REDUCE_SCATTER, ranks, inside, job.reduced_bytes * held.ends)
    # Embedding and head are units of their own, of which about half shows.
    units = figures["common.copies"] * across
    units = units + 0.5 * case.microbatches * (2.0 * ends_in + ends_out)
    once = np.where(layouts.pp == 1, 0.5 * gather + case.microbatches * ends_out, plain)
    return job.trained * np.where(zero >= 3, units, np.where(zero == 2, once, plain))


def _update_s(case: Case, held: _Held) -> Numbers:
    """Return seconds of the update: memory traffic, and the host's part of what is offloaded."""
    layouts, machine, figures = case.layouts, case.machine, case.figures
    zero = np.asarray(layouts.zero)
    shards = np.where(zero >= 3, layouts.shards, held.replicas)
    divided = held.dense / shards + held.routed / held.expert_replicas
    stepped = np.where(zero >= 1, divided, held.dense + held.routed) * case.job.trained
    here = stepped * case.job.update_bytes / machine.bytes_per_s + figures["common.update_s"]
    away = host_update_s(stepped, stepped * case.job.update_bytes)
    share = layouts.offload_optimizer
    return (1.0 - share) * here + share * away


class Passes(NamedTuple):
    """Seconds of one microbatch on one device, a row for each layout, as a simulator needs them.

    Attributes:
        forward_s: A block's forward, without communication.
        backward_s: Its backward, without communication and recomputation.
        recompute_s: What its backward computes again.
        tensor_s: Tensor-parallel collectives of a forward that show.
        context_s: Context-parallel ones; backward has them twice.
        expert_s: Those of experts.
        replay: 1 where recomputation repeats them; of experts ``expert_replay``.
        expert_replay: See ``replay``.
        units_s: What sharded units add to a block's two passes.
        slowed_s: Of that, what compute loses to their collectives under it.
        offload_s: What shows in its two passes of activations that host memory keeps.
        head_s: Head, loss, their backward and collectives.
        embedding_s: Embedding and its backward.
        send_s: Sending activations to the next stage.
        near_s: Sending them inside a host.
        far_s: Sending them to another host.
        chunk_s: What a virtual stage adds to each of its passes: launches of its messages, and
            the messages where nothing hides them.
        data_s: Reductions and gathers of a whole stage that show, once per step.
        update_s: The update of a whole stage.
    """

    forward_s: Numbers
    backward_s: Numbers
    recompute_s: Numbers
    tensor_s: Numbers
    context_s: Numbers
    expert_s: Numbers
    replay: Numbers
    expert_replay: Numbers
    units_s: Numbers
    slowed_s: Numbers
    offload_s: Numbers
    head_s: Numbers
    embedding_s: Numbers
    send_s: Numbers
    near_s: Numbers
    far_s: Numbers
    chunk_s: Numbers
    data_s: Numbers
    update_s: Numbers

    @property
    def block_s(self) -> Numbers:
        """Both passes of a block with all that shows."""
        shown = (2.0 + self.replay) * self.tensor_s + (3.0 + self.replay) * self.context_s
        shown = shown + (2.0 + self.expert_replay) * self.expert_s
        kept = self.units_s + self.offload_s
        return self.forward_s + self.backward_s + self.recompute_s + shown + kept


def passes_of(case: Case) -> Passes:
    """Return the seconds of blocks and ends, which stages are made of."""
    groups = Groups(case.machine.fabric, case.layouts)
    layouts, block, held = case.layouts, block_s(case), held_params(case)
    shown = _shown(case, groups, block)
    forward = longer_s(block.forward + shown.all, block.host)
    backward = longer_s(block.backward + shown.all + shown.context, block.host)
    splits = (np.asarray(layouts.sp) > 0) | (np.asarray(case.software.sends_split) > 0)
    sent = case.job.element_bytes * case.tokens * case.sizes.hidden
    sent = sent / np.where(splits, layouts.tp, 1.0)
    chunk = held.blocks / layouts.vp
    again = np.where(np.asarray(block.replay) > 0, block.forward, block.again)
    send = groups.send(groups.stages_near, sent)
    late = np.where(np.asarray(case.software.sends_shown[1]) < 1, 0.0, send)
    virtual = np.asarray(layouts.vp) > 1
    units = _units_s(case, groups, held, forward, backward)
    return Passes(
        forward_s=forward - shown.all,
        backward_s=backward - shown.all - shown.context,
        recompute_s=again,
        tensor_s=shown.tensor,
        context_s=shown.context,
        expert_s=shown.expert,
        replay=block.replay,
        expert_replay=block.expert_replay,
        units_s=units.added,
        slowed_s=units.slowed,
        offload_s=_away_s(case, forward, backward),
        head_s=block.head + _head_tensor(case, groups),
        embedding_s=block.embedding,
        send_s=send,
        near_s=groups.send(np.asarray(True), sent),
        far_s=groups.send(np.asarray(False), sent),
        chunk_s=np.where(virtual, case.figures["common.chunk_s"] + late, 0.0),
        data_s=_replicas_s(case, groups, held, forward * chunk, backward * chunk),
        update_s=_update_s(case, held),
    )
