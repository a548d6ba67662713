"""Memory of each device while a Program runs.

    used = weights x versions + gradients + master copy + state   (all the time)
         + saved bytes of the microbatches in flight              (forward to backward)
         + posted receive buffers                                 (post to consumer)
         + largest workspace beyond what is saved later           (all the time)

A received activation lives from its RECV to the end of the last forward that reads it on that
device; what a stage keeps of it for backward is in its saved bytes, so nothing is counted twice. A
stage that recomputes keeps its inputs, what its recomputed ops read of the others and what the
others save as well, instead of what they save; that comes back while it recomputes. While an op
runs, the ops after it in its stage hold nothing of that microbatch: forward, they have not saved
yet; backward, they are done. So a workspace takes this memory first, although it is counted among
the saved bytes; not where backward is split, which frees it later. Sharded parameters, gradients
and optimizer state are divided by the replicas; a gathered copy lives until the stage's last
compute before its next gather.
"""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array, number_or_none
from partita.core.graph import HEAD, Graph
from partita.core.plan import Plan
from partita.core.problem import Mode, Problem
from partita.core.program import Kind, Program
from partita.core.timeline import Timeline
from partita.cost.degrees import degree_rows
from partita.cost.durations import cluster_devices
from partita.cost.tables import SHARD_LEVEL, held_bytes
from partita.program.layout import crossings, divisions, owners
from partita.program.matching import Matching, forward_rows, match

_LAST_OF_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


class StaticMemory(NamedTuple):
    """Bytes that each device holds for the whole step.

    Attributes:
        weights: Parameters and buffers, all versions, and the copy in the type of the arithmetic.
        gradients: Gradients of trainable parameters.
        master: Copy of the weights that the optimizer steps, with its gradients.
        state: Optimizer state.
        workspace: Largest scratch memory of an op, less what the ops after it save.
        logits: The same where that op is the head, whose scratch memory are logits and loss.
    """

    weights: Array
    gradients: Array
    master: Array
    state: Array
    workspace: Array
    logits: Array

    @property
    def optimizer(self) -> Array:
        """All that the optimizer keeps for itself."""
        return self.master + self.state

    @property
    def total(self) -> Array:
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.workspace + self.logits


class MemoryEvents(NamedTuple):
    """Changes of a device's memory, tied to instructions.

    Attributes:
        row: The instruction.
        at_end: Whether the change happens when it ends instead of when it starts.
        delta: Change in bytes.
        passing: Whether it is of a received tensor or a gathered copy, not of saved activations.
    """

    row: Array
    at_end: Array
    delta: Array
    passing: Array


class MemoryBreakdown(NamedTuple):
    """Bytes of each device at its peak, by what holds them.

    The parts up to workspace add up to the peak; with fixed and free, to the device's memory.

    Attributes:
        weights: Parameters and buffers, all versions, and the copy in the type of the arithmetic.
        gradients: Gradients.
        master: Copy of the weights that the optimizer steps, with its gradients.
        state: Optimizer state.
        activations: What forward keeps for backward, and what recomputing brings back.
        logits: Logits, loss and their gradient, where the head needs most scratch memory.
        buffers: Received tensors and gathered copies.
        workspace: Largest scratch memory of an op, less what the ops after it save.
        peak: Largest use of memory.
        fixed: Memory that plans leave to context, communicators and fragments.
        free: What is left; below 0 where the plan does not fit.
    """

    weights: Array
    gradients: Array
    master: Array
    state: Array
    activations: Array
    logits: Array
    buffers: Array
    workspace: Array
    peak: Array
    fixed: Array
    free: Array

    @property
    def optimizer(self) -> Array:
        """All that the optimizer keeps for itself."""
        return self.master + self.state

    def to_json(self, device: int) -> dict[str, float | None]:
        """Return the parts of a device as JSON values; null where its memory has no limit."""
        parts = zip(self._fields, self, strict=True)
        return {f"{name}_bytes": number_or_none(float(part[device])) for name, part in parts}


def static_memory(problem: Problem, plan: Plan, program: Program) -> StaticMemory:
    """Return what each device holds all the time."""
    alike = _alike_devices(plan)
    device, parameter, stage, tied = _held(problem, plan, alike.first)
    level = np.array([SHARD_LEVEL[part.shard] for part in plan.stages])[stage]
    division, kind = divisions(plan), problem.graph.parameters.expert[parameter].astype(np.int64)
    held = held_bytes(problem.graph.parameters, problem.objective).at(parameter)
    # What could be trained is divided in inference, too, and gathered for every forward.
    held = held._replace(trained=problem.graph.parameters.trainable[parameter])
    held = held.on_device(
        level=np.where(tied, 0, level),
        replicas=division.group[stage, kind],
        tp=division.parts[stage, kind],
    )
    rests = 1 - np.array([part.offload_optimizer for part in plan.stages])[stage]
    versions = _versions(program, plan)[stage]

    def held_by_device(each: Array) -> Array:
        return np.bincount(device, weights=each, minlength=len(plan.devices))[alike.first[alike.of]]

    extra, workspace, logits = _stage_memory(problem, plan, program)
    return StaticMemory(
        held_by_device(held.weights * versions + held.copy) + extra,
        held_by_device(held.gradients),
        held_by_device(held.master * rests),
        held_by_device(held.state * rests),
        workspace,
        logits,
    )


class _AlikeDevices(NamedTuple):
    """Devices in classes that run the same stages, so that they hold the same all the time.

    Attributes:
        of: The class of each device.
        first: The first device of each class.
    """

    of: Array
    first: Array


def _alike_devices(plan: Plan) -> _AlikeDevices:
    """Return the classes of a plan's devices: thousands of replicas of a stage are one."""
    stages: list[list[int]] = [[] for _ in plan.devices]
    for index, stage in enumerate(plan.stage_index):
        for group in stage.devices:
            for device in group:
                stages[device].append(index)
    class_of: dict[tuple[int, ...], int] = {}
    of = np.array([class_of.setdefault(tuple(held), len(class_of)) for held in stages], np.int64)
    return _AlikeDevices(of, np.unique(of, return_index=True)[1])


def _held(problem: Problem, plan: Plan, holders: Array) -> tuple[Array, Array, Array, Array]:
    """Return device, parameter and lowest stage of everything held, and whether it is tied.

    Args:
        problem: The problem.
        plan: A plan for it.
        holders: The devices that are looked at.
    """
    parameter, stage = owners(problem.graph, plan)
    tied = np.bincount(parameter, minlength=len(problem.graph.parameters)) > 1
    wanted = set(holders.tolist())
    devices = [
        [d for group in part.devices for d in group if d in wanted] for part in plan.stage_index
    ]
    of = np.array([plan.stage_index[part] for part in plan.stages])[stage]
    counts = np.array([len(part) for part in devices])[of]
    flat = [np.array(devices[kind], dtype=np.int64) for kind in range(len(devices))]
    device = (
        np.concatenate([flat[kind] for kind in of.tolist()]) if len(of) else np.zeros(0, np.int64)
    )
    parameter, stage = np.repeat(parameter, counts), np.repeat(stage, counts)
    order = np.lexsort((stage, device, parameter))
    device, parameter, stage = device[order], parameter[order], stage[order]
    first = np.ones(len(device), dtype=bool)
    first[1:] = (device[1:] != device[:-1]) | (parameter[1:] != parameter[:-1])
    parameter = parameter[first]
    return device[first], parameter, stage[first], tied[parameter]


def _stage_memory(problem: Problem, plan: Plan, program: Program) -> tuple[Array, Array, Array]:
    """Return by device: memory of variants that no column holds, the largest workspace, logits."""
    graph, share = problem.graph, _largest_share(problem, plan)
    ranks = np.array([stage.ranks for stage in plan.stages])[plan.stage_of]
    above = graph.ops.workspace_bytes * share / ranks
    trains = problem.objective.mode is Mode.TRAINING
    splits = bool((program.kind == Kind.BACKWARD_WEIGHT).any())
    if trains and not splits and not len(graph.variants) and not len(graph.degrees):
        above = above + (_pending(problem, plan) - _saved_after(problem, plan)) / ranks
    rows = _degree_rows(problem, plan)
    above[rows >= 0] = graph.degrees.workspace_bytes[rows[rows >= 0]] * share
    scratch, loss = np.zeros((2, len(plan.stages)))
    np.maximum.at(scratch, plan.stage_of, above)
    if len(graph.degrees):
        head = graph.degrees.kind_of == HEAD
        np.maximum.at(loss, plan.stage_of[head], above[head])
    fixed = _variant_memory(problem, plan)
    extra, workspace, logits = np.zeros((3, len(plan.devices)))
    for stage in np.flatnonzero((scratch > 0) | (fixed > 0)).tolist():
        part = plan.stages[stage]
        for device in (device for group in part.devices for device in group):
            workspace[device] = max(workspace[device], scratch[stage])
            logits[device] = max(logits[device], loss[stage])
            extra[device] += fixed[stage]
    is_loss = logits >= workspace
    return extra, np.where(is_loss, 0.0, workspace), np.where(is_loss, logits, 0.0)


def _degree_rows(problem: Problem, plan: Plan) -> Array:
    """Return the row of degrees of each op; their bytes are the same on all types of devices."""
    rows = np.full(len(problem.graph), -1, dtype=np.int64)
    index = problem.cluster.index_of
    for name in {problem.cluster.devices[index[device]].type for device in plan.devices}:
        rows = np.maximum(rows, degree_rows(problem, plan, name))
    return rows


def _largest_share(problem: Problem, plan: Plan) -> float:
    """Return the largest microbatch over the batch that the graph's figures are of."""
    return float(plan.microbatch_sizes.max() / problem.graph.batch_size)


class TiedUses(NamedTuple):
    """Who uses the trained parameters that several ops use.

    Attributes:
        op: An op, once for each of them that it uses.
        row: Which of them.
        bytes: Bytes of the gradient of each.
    """

    op: Array
    row: Array
    bytes: Array


def tied_uses(problem: Problem) -> TiedUses:
    """Return who uses tied parameters in training; nobody in inference."""
    table = problem.graph.parameters
    pairs = np.unique(np.stack([table.use_parameter, table.use_op]).astype(np.int64), axis=1)
    users = np.bincount(pairs[0], minlength=len(table))
    trains = problem.objective.mode is Mode.TRAINING
    tied = np.flatnonzero((users > 1) & table.trainable & trains)
    row = np.full(len(table), -1, dtype=np.int64)
    row[tied] = np.arange(len(tied))
    here = row[pairs[0]] >= 0
    size = table.bytes[tied].astype(np.float64)
    return TiedUses(pairs[1][here], row[pairs[0]][here], size)


def _pending(problem: Problem, plan: Plan) -> Array:
    """Return for each op the gradients of tied parameters that wait while its backward runs.

    Autograd adds the parts of a gradient up as they come and hands the sum over with the last one:
    between two ops of a stage that use one parameter its part is there beside the gradients, and at
    the first of them the part and the sum.
    """
    graph, tied = problem.graph, tied_uses(problem)
    place = np.empty(len(graph), dtype=np.int64)
    place[graph.topological_order] = np.arange(len(graph))
    found = np.zeros(len(graph))
    for row, size in enumerate(tied.bytes.tolist()):
        users = tied.op[tied.row == row]
        for stage in np.unique(plan.stage_of[users]).tolist():
            at = place[users[plan.stage_of[users] == stage]]
            between = (plan.stage_of == stage) & (place >= at.min()) & (place < at.max())
            found[between] += size
            found[between & (place == at.min())] += size
    return found


def _saved_after(problem: Problem, plan: Plan) -> Array:
    """Return for each op what the ops after it in its stage save of the largest microbatch."""
    graph = problem.graph
    saved = graph.ops.saved_at(_largest_share(problem, plan))
    order = graph.topological_order
    order = order[np.argsort(plan.stage_of[order], kind="stable")]
    until = np.cumsum(saved[order])
    last = np.searchsorted(plan.stage_of[order], plan.stage_of[order], side="right") - 1
    after = np.zeros(len(graph))
    after[order] = until[last] - until
    return after


def _variant_memory(problem: Problem, plan: Plan) -> Array:
    """Return the memory of each stage's variants that no other figure holds."""
    variants = problem.graph.variants
    if not len(variants):
        return np.zeros(len(plan.stages))
    tp = np.array([stage.tp for stage in plan.stages])[plan.stage_of]
    chosen = (tp[variants.op] == variants.tp) & (plan.recompute[variants.op] == variants.recompute)
    extra = np.maximum(variants.fixed_memory_bytes - variants.parameter_bytes, 0.0)
    return np.bincount(
        plan.stage_of[variants.op[chosen]], weights=extra[chosen], minlength=len(plan.stages)
    )


def _versions(program: Program, plan: Plan) -> Array:
    """Return how many versions of its weights each stage holds at the most."""
    versions = np.ones(len(plan.stages), dtype=np.int64)
    if not plan.stashes_weights:
        return versions
    kind = program.kind
    order = np.lexsort((np.arange(len(program)), program.stage, program.device))
    stage, steps = program.stage[order], (kind[order] == Kind.UPDATE).astype(np.int64)
    home = program.device[order].astype(np.int64) * len(plan.stages) + stage
    done = np.cumsum(steps)
    begins = np.r_[True, home[1:] != home[:-1]]
    base = np.maximum.accumulate(np.where(begins, done - steps, 0))
    backward = np.flatnonzero(kind[order] == Kind.BACKWARD)
    alive = (done - base)[backward] - program.version[order][backward] + 1
    np.maximum.at(versions, stage[backward], alive)
    return versions


def saved_by_stage(problem: Problem, plan: Plan, samples: Array) -> tuple[Array, Array]:
    """Return what a microbatch keeps from forward to backward, and what recomputing brings back.

    Both have the shape (stages, microbatches).
    """
    ops, graph = problem.graph.ops, problem.graph
    count = len(plan.stages)
    ranks = np.array([stage.ranks for stage in plan.stages], dtype=np.float64)[plan.stage_of]
    again = plan.recompute
    saved, fixed = ops.saved_bytes.copy(), ops.saved_fixed_bytes.copy()
    for row in range(len(graph.variants)):
        op = int(graph.variants.op[row])
        same = graph.variants.tp[row] == plan.stages[plan.stage_of[op]].tp
        if same and graph.variants.recompute[row] == again[op]:
            saved[op] = graph.variants.saved_bytes[row] * graph.variants.tp[row]
            fixed[op] = 0.0
    saved, fixed = saved / ranks, fixed / ranks
    rows = _degree_rows(problem, plan)
    # Sets of activations that are recomputed are in the saved bytes of their rows.
    saved[rows >= 0] = graph.degrees.saved_bytes[rows[rows >= 0]]
    fixed[rows >= 0] = 0.0
    rests = 1 - np.array([stage.offload_activations for stage in plan.stages])[plan.stage_of]
    saved, fixed = saved * rests, fixed * rests
    scale = samples / graph.batch_size

    def total(mask: Array) -> Array:
        constant = np.bincount(plan.stage_of, weights=fixed * mask, minlength=count)
        linear = np.bincount(plan.stage_of, weights=(saved - fixed) * mask, minlength=count)
        return constant[:, None] + linear[:, None] * scale[None, :]

    kept, brought = total(~again), total(again)
    recomputes = np.bincount(plan.stage_of, weights=again, minlength=count) > 0
    if len(graph.variants):
        return kept + brought, np.zeros_like(brought)
    crossing = crossings(graph, plan)
    inputs = graph.tensors.bytes_at(samples, graph.batch_size, crossing.tensor[:, None])
    np.add.at(kept, crossing.reader, inputs * recomputes[crossing.reader][:, None])
    tensor, stage = _kept_for_others(graph, plan)
    inside = graph.tensors.bytes_at(samples, graph.batch_size, tensor[:, None])
    np.add.at(kept, stage, inside)
    return kept, brought


def _kept_for_others(graph: Graph, plan: Plan) -> tuple[Array, Array]:
    """Return the tensors that a stage keeps besides what its ops save by themselves, and the stage.

    Those are what ops that recompute read of others in their stage, and what ops keep for one that
    recomputes: what several save counts with the first of them, and ``relu`` saves its result, as
    the product after it does. What an op that does not recompute counts is there in any case; where
    it is not known who does, as in graphs of other tools, it may be counted twice.
    """
    edges, again, stage_of = graph.edges, plan.recompute, plan.stage_of
    maker, keeps = graph.tensors.producer[edges.tensor], edges.keeper >= 0
    keeper = np.full(len(graph.tensors), -1, dtype=np.int64)
    keeper[edges.tensor[keeps]] = edges.keeper[keeps]
    counted = keeper[edges.tensor]
    here = (maker >= 0) & (stage_of[maker] == stage_of[edges.reader])
    known = here & (counted >= 0) & (stage_of[counted] == stage_of[maker])
    read = here & again[edges.reader] & ~again[maker]
    shared = known & keeps & again[counted] & ~again[edges.reader]
    tensor = np.unique(edges.tensor[(read | shared) & ~(known & ~again[counted])])
    return tensor, stage_of[graph.tensors.producer[tensor]]


def memory_events(problem: Problem, plan: Plan, program: Program) -> MemoryEvents:
    """Return all changes of memory, in no particular order."""
    terms = memory_terms(problem, plan, program)
    moved = program.bytes.astype(np.float64)
    values = [moved, moved]
    if problem.objective.mode is Mode.TRAINING:
        kept = saved_by_stage(problem, plan, program.microbatch_sizes.astype(np.float64))
        values += [part.ravel() for part in kept]
    delta = np.zeros(len(terms.row))
    for part, column in enumerate(values):
        here = terms.part == part
        delta[here] = column[terms.cell[here]]
    passing = terms.part <= GATHERED
    return MemoryEvents(terms.row, terms.at_end, delta * terms.sign, passing)


class MemoryTerms(NamedTuple):
    """Changes of a device's memory, tied to instructions, by what they hold instead of bytes.

    Attributes:
        row: The instruction.
        at_end: Whether the change happens when it ends instead of when it starts.
        sign: 1 where memory is taken, -1 where it is given back.
        part: One of ``RECEIVED``, ``GATHERED``, ``KEPT`` and ``RECOMPUTED``.
        cell: The instruction that received or gathered; of what is kept or recomputed, the stage
            times the number of microbatches plus the microbatch.
    """

    row: Array
    at_end: Array
    sign: Array
    part: Array
    cell: Array


RECEIVED, GATHERED, KEPT, RECOMPUTED = range(4)


def memory_terms(problem: Problem, plan: Plan, program: Program) -> MemoryTerms:
    """Return all changes of memory, in no particular order, whatever they amount to."""
    matching = match(program)
    parts = _buffer_terms(problem, plan, program, matching)
    if problem.objective.mode is Mode.TRAINING:
        parts += _activation_terms(program)
        parts += _recompute_terms(program)
    parts += _gather_terms(program, matching)
    return MemoryTerms(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _terms(row: Array, cell: Array, part: int, *, at_end: bool) -> MemoryTerms:
    size = len(row)
    return MemoryTerms(
        row.astype(np.int64),
        np.full(size, at_end),
        np.full(size, -1 if at_end else 1),
        np.full(size, part),
        cell.astype(np.int64),
    )


def _cells(program: Program, row: Array) -> Array:
    cell: Array = program.stage[row].astype(np.int64) * program.num_microbatches
    return cell + program.microbatch[row]


def _buffer_terms(
    problem: Problem, plan: Plan, program: Program, matching: Matching
) -> list[MemoryTerms]:
    """Receive buffers: from the post to the end of the last reader on the device."""
    rows = np.flatnonzero((program.kind == Kind.RECV) & (matching.consumer >= 0))
    until = matching.consumer[rows].copy()
    _extend_to_last_reader(problem, plan, program, rows, until)
    return [
        _terms(rows, rows, RECEIVED, at_end=False),
        _terms(until, rows, RECEIVED, at_end=True),
    ]


def _extend_to_last_reader(
    problem: Problem, plan: Plan, program: Program, rows: Array, until: Array
) -> None:
    """Let an activation that several stages of a device read live until the last of them."""
    crossing = crossings(problem.graph, plan)
    count = np.bincount(crossing.tensor, minlength=len(problem.graph.tensors))
    begin = np.concatenate([[0], np.cumsum(count)])
    several = np.flatnonzero(~program.gradient[rows] & (count[program.tensor[rows]] > 1))
    tensor = program.tensor[rows[several]]
    times = count[tensor]
    index = np.repeat(several, times)
    offset = np.arange(len(index)) - np.repeat(np.cumsum(times) - times, times)
    stage = crossing.reader[np.repeat(begin[tensor], times) + offset]
    reader = forward_rows(
        program, program.device[rows[index]], stage, program.microbatch[rows[index]]
    )
    np.maximum.at(until, index[reader >= 0], reader[reader >= 0])


def _activation_terms(program: Program) -> list[MemoryTerms]:
    forward = np.flatnonzero(program.kind == Kind.FORWARD)
    backward = np.flatnonzero(np.isin(program.kind, _LAST_OF_BACKWARD))
    return [
        _terms(forward, _cells(program, forward), KEPT, at_end=False),
        _terms(backward, _cells(program, backward), KEPT, at_end=True),
    ]


def _recompute_terms(program: Program) -> list[MemoryTerms]:
    """Return recomputed activations: from RECOMPUTE, or backward's start, to backward's end."""
    early = np.flatnonzero(program.kind == Kind.RECOMPUTE)
    starts = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
    begin = early if len(early) else np.flatnonzero(np.isin(program.kind, starts))
    finish = np.flatnonzero(np.isin(program.kind, _LAST_OF_BACKWARD))
    return [
        _terms(begin, _cells(program, begin), RECOMPUTED, at_end=False),
        _terms(finish, _cells(program, finish), RECOMPUTED, at_end=True),
    ]


def _gather_terms(program: Program, matching: Matching) -> list[MemoryTerms]:
    """Copies of sharded parameters: from their gather to the last compute before the next one."""
    rows = np.flatnonzero((program.kind == Kind.ALL_GATHER) & (program.stage >= 0))
    consumer = matching.consumer[rows]
    rows, consumer = rows[consumer >= 0], consumer[consumer >= 0]
    last = _last_before_next(program, rows, consumer)
    return [
        _terms(rows, rows, GATHERED, at_end=False),
        _terms(last, rows, GATHERED, at_end=True),
    ]


def _last_before_next(program: Program, rows: Array, consumer: Array) -> Array:
    """Return the last compute of the stage before its next gather."""
    size = len(program)
    home = program.device.astype(np.int64) * (int(program.stage.max(initial=0)) + 1)
    home = (home + program.stage) * (size + 1)
    order = np.argsort(home[rows] + rows)
    after = home[rows] + consumer
    # What follows the compute that waits, up to the next gather of its stage on its device.
    gathers = np.append((home[rows] + rows)[order], np.iinfo(np.int64).max)
    place = np.searchsorted(gathers, after, side="right")
    until = np.minimum(gathers[np.minimum(place, len(rows))], home[rows] + size)
    own = np.flatnonzero(program.is_compute & (program.kind != Kind.UPDATE))
    computes = np.sort(home[own] + own)
    last = np.searchsorted(computes, until) - 1
    found = computes[np.maximum(last, 0)]
    result: Array = np.where((last >= 0) & (found > after), found - home[rows], consumer)
    return result


def _running(
    problem: Problem, plan: Plan, program: Program, base: Array | None = None
) -> tuple[Array, MemoryEvents, Array, Array]:
    """Return the static memory, and the events in list order with their device and memory after."""
    if base is None:
        base = static_memory(problem, plan, program).total
    events = memory_events(problem, plan, program)
    order = np.lexsort((events.delta > 0, 2 * events.row + events.at_end))
    events = MemoryEvents(*(column[order] for column in events))
    device = program.device[events.row]
    running = np.cumsum(events.delta)
    begins = np.flatnonzero(np.r_[True, device[1:] != device[:-1]]) if len(order) else order
    lengths = np.diff(np.r_[begins, len(order)])
    before = (running - events.delta)[begins]
    return base, events, device, running - np.repeat(before, lengths) + base[device]


def memory_limits(problem: Problem, plan: Plan) -> Array:
    """Return the bytes that a plan may use on each of its devices."""
    limits: Array = problem.limit_bytes[cluster_devices(problem, plan.devices)]
    return limits


def peak_memory(problem: Problem, plan: Plan, program: Program) -> Array:
    """Return the largest use of memory of each device, whatever the times.

    Compute and the posts of receives happen in list order, so the peak follows from the lists.
    """
    base, _, device, used = _running(problem, plan, program)
    peak = base.copy()
    np.maximum.at(peak, device, used)
    return peak


def memory_breakdown(problem: Problem, plan: Plan, program: Program) -> MemoryBreakdown:
    """Return where the memory of each device goes at its peak; at the first of several."""
    static = static_memory(problem, plan, program)
    base, events, device, used = _running(problem, plan, program, static.total)
    passing = np.cumsum(np.where(events.passing, events.delta, 0.0))
    size = len(plan.devices)
    kept, buffers, peak = np.zeros(size), np.zeros(size), base.copy()
    ends = np.searchsorted(device, np.arange(size + 1))
    for index in range(size):
        first, last = int(ends[index]), int(ends[index + 1])
        at = first + int(np.argmax(used[first:last])) if first < last else -1
        if at < 0 or used[at] <= base[index]:
            continue
        peak[index] = used[at]
        buffers[index] = passing[at] - (passing[first - 1] if first else 0.0)
        kept[index] = used[at] - base[index] - buffers[index]
    memory = problem.cluster.memory_bytes[cluster_devices(problem, plan.devices)]
    limit = memory_limits(problem, plan)
    with np.errstate(invalid="ignore"):
        fixed = np.where(np.isfinite(memory), memory - limit, 0.0)
    return MemoryBreakdown(
        static.weights,
        static.gradients,
        static.master,
        static.state,
        kept,
        static.logits,
        buffers,
        static.workspace,
        peak,
        fixed,
        limit - peak,
    )


def memory_curve(
    problem: Problem, plan: Plan, program: Program, timeline: Timeline
) -> tuple[Array, Array, Array]:
    """Return device, time and bytes of every change, sorted by device and time."""
    base, events, device, used = _running(problem, plan, program)
    time_s = np.where(events.at_end, timeline.end_s[events.row], timeline.start_s[events.row])
    first = np.arange(len(plan.devices), dtype=np.int32)
    owner = np.concatenate([first, device])
    moment = np.concatenate([np.zeros(len(first)), time_s])
    level = np.concatenate([base, np.maximum(used, 0.0)])
    order = np.lexsort((np.arange(len(owner)), moment, owner))
    return owner[order], moment[order], level[order]
