"""Memory of each device while a Program runs.

    used = weights x versions + gradients + optimizer state       (all the time)
         + saved bytes of the microbatches in flight              (forward to backward)
         + posted receive buffers                                 (post to consumer)
         + largest workspace beyond what is saved later           (all the time)

A received activation lives from its RECV to the end of the last forward that reads it on that
device; what a stage keeps of it for backward is in its saved bytes, so nothing is counted twice. A
stage that recomputes keeps its inputs instead of what its recomputed ops save; that comes back
while it recomputes. While an op runs, the ops after it in its stage hold nothing of that
microbatch: forward, they have not saved yet; backward, they are done. So a workspace takes this
memory first, although it is counted among the saved bytes; not where backward is split, which frees
it later. Sharded parameters, gradients and optimizer state are divided by the replicas;
a gathered copy lives until the stage's last compute before its next gather.
"""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.plan import Plan
from partita.core.problem import Mode, Problem
from partita.core.program import Kind, Program
from partita.core.timeline import Timeline
from partita.cost.tables import SHARD_LEVEL, held_bytes
from partita.program.layout import crossings, owners, tensor_bytes
from partita.program.matching import Matching, forward_rows, match

_LAST_OF_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


class StaticMemory(NamedTuple):
    """Bytes that each device holds for the whole step.

    Attributes:
        weights: Parameters and buffers, all versions.
        gradients: Gradients of trainable parameters.
        optimizer: Optimizer state, and the master copy that it steps.
        workspace: Largest scratch memory of an op, less what the ops after it save.
    """

    weights: Array
    gradients: Array
    optimizer: Array
    workspace: Array

    @property
    def total(self) -> Array:
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.workspace


class MemoryEvents(NamedTuple):
    """Changes of a device's memory, tied to instructions.

    Attributes:
        row: The instruction.
        at_end: Whether the change happens when it ends instead of when it starts.
        delta: Change in bytes.
    """

    row: Array
    at_end: Array
    delta: Array


def static_memory(problem: Problem, plan: Plan, program: Program) -> StaticMemory:
    """Return what each device holds all the time."""
    device, parameter, stage, tied = _held(problem, plan)
    tp, replicas, level = _stage_columns(plan)
    held = held_bytes(problem.graph.parameters, problem.objective).at(parameter)
    held = held.on_device(
        level=np.where(tied, 0, level[stage]), replicas=replicas[stage], tp=tp[stage]
    )
    versions = _versions(program, plan)[stage]
    size = len(plan.devices)
    extra, workspace = _stage_memory(problem, plan, program)
    return StaticMemory(
        np.bincount(device, weights=held.weights * versions, minlength=size) + extra,
        np.bincount(device, weights=held.gradients, minlength=size),
        np.bincount(device, weights=held.stepped, minlength=size),
        workspace,
    )


def _stage_columns(plan: Plan) -> tuple[Array, Array, Array]:
    """Return tensor-parallel degree, replicas and level of sharding of each stage."""
    rows = [(stage.tp, stage.num_replicas, SHARD_LEVEL[stage.shard]) for stage in plan.stages]
    tp, replicas, shard = np.array(rows, dtype=np.int64).T
    return tp, replicas, shard


def _held(problem: Problem, plan: Plan) -> tuple[Array, Array, Array, Array]:
    """Return device, parameter and lowest stage of everything held, and whether it is tied."""
    parameter, stage = owners(problem.graph, plan)
    tied = np.bincount(parameter, minlength=len(problem.graph.parameters)) > 1
    devices = [[d for group in part.devices for d in group] for part in plan.stage_index]
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


def _stage_memory(problem: Problem, plan: Plan, program: Program) -> tuple[Array, Array]:
    """Return by device: memory of variants that no column holds, and the largest workspace."""
    above = problem.graph.ops.workspace_bytes * _largest_share(problem, plan)
    trains = problem.objective.mode is Mode.TRAINING
    splits = bool((program.kind == Kind.BACKWARD_WEIGHT).any())
    if trains and not splits and not len(problem.graph.variants):
        above = above - _saved_after(problem, plan)
    scratch = np.zeros(len(plan.stages))
    np.maximum.at(scratch, plan.stage_of, above)
    fixed = _variant_memory(problem, plan)
    extra, workspace = np.zeros(len(plan.devices)), np.zeros(len(plan.devices))
    for stage in np.flatnonzero((scratch > 0) | (fixed > 0)).tolist():
        part = plan.stages[stage]
        for device in (device for group in part.devices for device in group):
            workspace[device] = max(workspace[device], scratch[stage] / part.tp)
            extra[device] += fixed[stage]
    return extra, workspace


def _largest_share(problem: Problem, plan: Plan) -> float:
    """Return the largest microbatch over the batch that the graph's figures are of."""
    return float(plan.microbatch_sizes.max() / problem.graph.batch_size)


def _saved_after(problem: Problem, plan: Plan) -> Array:
    """Return for each op what the ops after it in its stage save of the largest microbatch."""
    graph = problem.graph
    fixed = graph.ops.saved_fixed_bytes
    saved = fixed + (graph.ops.saved_bytes - fixed) * _largest_share(problem, plan)
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
    tp = np.array([stage.tp for stage in plan.stages], dtype=np.float64)
    again = plan.recompute
    saved, fixed = ops.saved_bytes.copy(), ops.saved_fixed_bytes.copy()
    for row in range(len(graph.variants)):
        op = int(graph.variants.op[row])
        same = graph.variants.tp[row] == plan.stages[plan.stage_of[op]].tp
        if same and graph.variants.recompute[row] == again[op]:
            saved[op] = graph.variants.saved_bytes[row] * graph.variants.tp[row]
            fixed[op] = 0.0
    scale = samples / graph.batch_size

    def total(mask: Array) -> Array:
        constant = np.bincount(plan.stage_of, weights=fixed * mask, minlength=count)
        linear = np.bincount(plan.stage_of, weights=(saved - fixed) * mask, minlength=count)
        return (constant[:, None] + linear[:, None] * scale[None, :]) / tp[:, None]

    kept, brought = total(~again), total(again)
    recomputes = np.bincount(plan.stage_of, weights=again, minlength=count) > 0
    if len(graph.variants):
        return kept + brought, np.zeros_like(brought)
    crossing = crossings(graph, plan)
    inputs = tensor_bytes(graph, samples[None, :], crossing.tensor[:, None])
    np.add.at(kept, crossing.reader, inputs * recomputes[crossing.reader][:, None])
    return kept, brought


def memory_events(problem: Problem, plan: Plan, program: Program) -> MemoryEvents:
    """Return all changes of memory, in no particular order."""
    samples = program.microbatch_sizes.astype(np.float64)
    matching = match(program)
    parts = [_buffer_events(problem, plan, program, matching)]
    if problem.objective.mode is Mode.TRAINING:
        kept, brought = saved_by_stage(problem, plan, samples)
        parts.append(_activation_events(program, kept))
        parts.append(_recompute_events(program, brought))
        parts.append(_gather_events(program, matching))
    return _joined(*parts)


def _events(row: Array, delta: Array, *, at_end: bool) -> MemoryEvents:
    return MemoryEvents(row.astype(np.int64), np.full(len(row), at_end), delta.astype(np.float64))


def _joined(*parts: MemoryEvents) -> MemoryEvents:
    return MemoryEvents(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _buffer_events(
    problem: Problem, plan: Plan, program: Program, matching: Matching
) -> MemoryEvents:
    """Receive buffers: from the post to the end of the last reader on the device."""
    rows = np.flatnonzero((program.kind == Kind.RECV) & (matching.consumer >= 0))
    until = matching.consumer[rows].copy()
    _extend_to_last_reader(problem, plan, program, rows, until)
    size = program.bytes[rows].astype(np.float64)
    return _joined(_events(rows, size, at_end=False), _events(until, -size, at_end=True))


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


def _activation_events(program: Program, kept: Array) -> MemoryEvents:
    forward = np.flatnonzero(program.kind == Kind.FORWARD)
    backward = np.flatnonzero(np.isin(program.kind, _LAST_OF_BACKWARD))
    return _joined(
        _events(forward, kept[program.stage[forward], program.microbatch[forward]], at_end=False),
        _events(
            backward, -kept[program.stage[backward], program.microbatch[backward]], at_end=True
        ),
    )


def _recompute_events(program: Program, brought: Array) -> MemoryEvents:
    """Return recomputed activations: from RECOMPUTE, or backward's start, to backward's end."""
    early = np.flatnonzero(program.kind == Kind.RECOMPUTE)
    starts = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
    begin = early if len(early) else np.flatnonzero(np.isin(program.kind, starts))
    finish = np.flatnonzero(np.isin(program.kind, _LAST_OF_BACKWARD))
    return _joined(
        _events(begin, brought[program.stage[begin], program.microbatch[begin]], at_end=False),
        _events(finish, -brought[program.stage[finish], program.microbatch[finish]], at_end=True),
    )


def _gather_events(program: Program, matching: Matching) -> MemoryEvents:
    """Copies of sharded parameters: from their gather to the last compute before the next one."""
    rows = np.flatnonzero((program.kind == Kind.ALL_GATHER) & (program.stage >= 0))
    consumer = matching.consumer[rows]
    rows, consumer = rows[consumer >= 0], consumer[consumer >= 0]
    size = program.bytes[rows].astype(np.float64)
    last = _last_before_next(program, rows, consumer)
    return _joined(_events(rows, size, at_end=False), _events(last, -size, at_end=True))


def _last_before_next(program: Program, rows: Array, consumer: Array) -> Array:
    """Return the last compute of the stage before its next gather."""
    last = consumer.copy()
    gathers = set(rows.tolist())
    compute = program.is_compute
    for index, row in enumerate(rows.tolist()):
        device, stage = int(program.device[row]), int(program.stage[row])
        for after in range(int(consumer[index]) + 1, int(program.ptr[device + 1])):
            if program.stage[after] == stage and after in gathers:
                break
            if (
                compute[after]
                and program.stage[after] == stage
                and program.kind[after] != Kind.UPDATE
            ):
                last[index] = after
    return last


def _running(
    problem: Problem, plan: Plan, program: Program
) -> tuple[Array, MemoryEvents, Array, Array]:
    """Return the static memory, and the events in list order with their device and memory after."""
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


def peak_memory(problem: Problem, plan: Plan, program: Program) -> Array:
    """Return the largest use of memory of each device, whatever the times.

    Compute and the posts of receives happen in list order, so the peak follows from the lists.
    """
    base, _, device, used = _running(problem, plan, program)
    peak = base.copy()
    np.maximum.at(peak, device, used)
    return peak


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
