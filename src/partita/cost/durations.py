"""Seconds of ops, stages and instructions.

An op that takes ``t`` seconds for the graph's batch takes ``t (c + (1 - c) n / batch)`` for n
samples, ``c`` its fixed share, divided by the speed of the device. Costs are the graph's for the
device's type; for a type without costs they are scaled by the ratio of the two rooflines and called
modelled. An op that several ranks divide takes its variant's time, or that of its degrees with the
calls among them, where the graph has one, else an equal part.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from partita.core.cluster import Device
from partita.core.columns import Array, derived
from partita.core.graph import Graph, OpCosts
from partita.core.plan import Plan, Shard
from partita.core.problem import Mode, Problem
from partita.core.program import FIRST_COLLECTIVE, Kind, Program
from partita.cost.degrees import call_seconds, degree_rows, host_update_s
from partita.cost.links import collective_s, transfer_s
from partita.cost.tables import cluster_classes, fold_backward, held_bytes
from partita.errors import UnsupportedError
from partita.program.layout import divisions


class OpSeconds(NamedTuple):
    """Seconds of each op for the graph's batch on one device.

    Attributes:
        forward_s: Forward.
        backward_s: Backward, both parts.
        input_share: Share of backward that computes input gradients; half where not known.
        modelled: Whether they were scaled from another type of device.
    """

    forward_s: Array
    backward_s: Array
    input_share: Array
    modelled: bool


def op_seconds(graph: Graph, device: Device) -> OpSeconds:
    """Return the seconds of every op on a device.

    Raises:
        UnsupportedError: The graph has no costs for the type, and they cannot be scaled.
    """
    key = ("op seconds", device.type, device.speed, _peak(graph, device), device.memory_bytes_per_s)
    return derived(graph, key, lambda: _op_seconds(graph, device))


def _peak(graph: Graph, device: Device) -> float:
    rates = device.peak_flop_per_s
    return rates.get(graph.dtype) or rates.get("float32") or min(rates.values(), default=0.0)


def _op_seconds(graph: Graph, device: Device) -> OpSeconds:
    peak = _peak(graph, device)
    costs, scale = _costs_for(graph, device.type, peak, device.memory_bytes_per_s)
    factor = (1.0 if scale is None else scale) / device.speed
    with np.errstate(divide="ignore", invalid="ignore"):
        known = costs.backward_input_s / costs.backward_s
    share = np.where(np.isfinite(known), known, 0.5)
    return OpSeconds(costs.forward_s * factor, costs.backward_s * factor, share, scale is not None)


def _costs_for(
    graph: Graph, device_type: str, peak: float, memory: float
) -> tuple[OpCosts, Array | None]:
    by_type = {costs.device_type: costs for costs in graph.costs}
    if device_type in by_type:
        return by_type[device_type], None
    if "" in by_type:
        return by_type[""], None
    if not device_type:
        return graph.costs[0], None
    for costs in graph.costs:
        if peak and memory and costs.peak_flop_per_s and costs.memory_bytes_per_s:
            here = _roofline_s(graph, peak, memory)
            there = _roofline_s(graph, costs.peak_flop_per_s, costs.memory_bytes_per_s)
            ratio = np.divide(here, there, out=np.full(len(graph), np.nan), where=there > 0)
            total = here.sum() / there.sum() if there.sum() > 0 else costs.peak_flop_per_s / peak
            return costs, np.where(np.isnan(ratio), total, ratio)
    raise UnsupportedError(
        f"graph {graph.name!r} has costs for {', '.join(sorted(by_type))}, none for device type "
        f"{device_type!r}, and no peak rates to scale by; profile it there, or give the device a "
        "type of the catalogue"
    )


def _roofline_s(graph: Graph, peak: float, memory: float) -> Array:
    """Return the larger of arithmetic and memory time of each op, forward."""
    touched = graph.parameter_bytes.copy()
    produced = graph.tensors.producer >= 0
    np.add.at(touched, graph.tensors.producer[produced], graph.tensors.bytes[produced])
    np.add.at(touched, graph.edges.reader, graph.tensors.bytes[graph.edges.tensor])
    return np.maximum(graph.ops.flops / peak, touched / memory)


class StageSeconds(NamedTuple):
    """Times of stages as ``fixed + per_sample * n``; rows are classes of devices, columns stages.

    Attributes:
        class_of: The class of each device of the plan.
        forward: ``(fixed, per_sample)`` of the forward pass.
        backward: Backward without recomputation.
        backward_input: The part of backward for the inputs.
        recompute: Forward time of the recomputed ops.
        update_s: Seconds of the weight update, by class and stage.
        modelled: Whether any time was scaled from another type.
    """

    class_of: Array
    forward: tuple[Array, Array]
    backward: tuple[Array, Array]
    backward_input: tuple[Array, Array]
    recompute: tuple[Array, Array]
    update_s: Array
    modelled: bool


def stage_seconds(problem: Problem, plan: Plan) -> StageSeconds:
    """Return the times of every stage on every class of device that the plan uses."""
    alike = cluster_classes(problem.cluster)
    to_cluster = cluster_devices(problem, plan.devices)
    used, class_of = np.unique(alike.of[to_cluster], return_inverse=True)
    representative = [problem.cluster.devices[alike.first[index]] for index in used.tolist()]
    tables = [_class_seconds(problem, plan, device) for device in representative]
    pairs = [
        (np.stack([t[part][0] for t in tables]), np.stack([t[part][1] for t in tables]))
        for part in range(4)
    ]
    calls = call_seconds(problem, plan, to_cluster)
    for part, waits in enumerate(calls):
        pairs[part] = (pairs[part][0] + waits[0], pairs[part][1] + waits[1])
    return StageSeconds(
        class_of.ravel().astype(np.int32),
        pairs[0],
        pairs[1],
        pairs[2],
        pairs[3],
        np.stack([_update_s(problem, plan, device) for device in representative]),
        any(op_seconds(problem.graph, device).modelled for device in representative),
    )


def _class_seconds(problem: Problem, plan: Plan, device: Device) -> list[tuple[Array, Array]]:
    """Return forward, backward, backward-input and recompute coefficients of each stage."""
    graph = problem.graph
    seconds = op_seconds(graph, device)
    forward, backward = _with_variants(graph, plan, seconds)
    forward, backward = fold_backward(graph, forward, backward)
    recompute = np.where(plan.recompute, forward, 0.0)
    rows = degree_rows(problem, plan, device.type)
    if (rows >= 0).any():
        divided, row = rows >= 0, rows[rows >= 0]
        for values, table in (
            (forward, graph.degrees.forward_s),
            (backward, graph.degrees.backward_s),
            (recompute, graph.degrees.recompute_s),
        ):
            values[divided] = table[row] / device.speed
        # Ops that recompute by themselves, and not as one of the sets, run forward again.
        recompute = np.where(plan.recompute & (recompute == 0), forward, recompute)
    count = len(plan.stages)

    def by_stage(values: Array) -> tuple[Array, Array]:
        constant, linear = (
            np.bincount(plan.stage_of, weights=part, minlength=count)
            for part in graph.ops.time_parts(values)
        )
        return constant, linear / graph.batch_size

    return [
        by_stage(part) for part in (forward, backward, backward * seconds.input_share, recompute)
    ]


def _with_variants(graph: Graph, plan: Plan, seconds: OpSeconds) -> tuple[Array, Array]:
    """Return forward and backward of each op on one of its stage's tensor-parallel devices."""
    ranks = np.array([stage.ranks for stage in plan.stages])[plan.stage_of]
    forward, backward = seconds.forward_s / ranks, seconds.backward_s / ranks
    variants = graph.variants
    if not len(variants):
        return forward, backward
    tp = np.array([stage.tp for stage in plan.stages])[plan.stage_of]
    fits = (tp[variants.op] == variants.tp) & (plan.recompute[variants.op] == variants.recompute)
    ops = variants.op[fits]
    reference = graph.costs[0]
    here = seconds.forward_s[ops] + seconds.backward_s[ops]
    there = reference.forward_s[ops] + reference.backward_s[ops]
    scale = np.divide(here, there, out=np.ones(len(ops)), where=there > 0)
    forward[ops] = variants.forward_s[fits] * scale
    backward[ops] = variants.backward_s[fits] * scale
    # A variant's backward holds its recomputation, which is added again as forward time.
    again = variants.recompute[fits]
    backward[ops[again]] = np.maximum(backward[ops[again]] - forward[ops[again]], 0.0)
    return forward, backward


def _update_s(problem: Problem, plan: Plan, device: Device) -> Array:
    """Return seconds to read and write weights, gradients and optimizer state of each stage."""
    table = problem.graph.parameters
    if problem.objective.mode is Mode.INFERENCE or not device.memory_bytes_per_s:
        return np.zeros(len(plan.stages))
    trained = table.trainable[table.use_parameter]
    stage = plan.stage_of[table.use_op][trained]
    parameter = table.use_parameter[trained]
    once = np.unique(np.stack([stage, parameter]), axis=1) if len(stage) else np.zeros((2, 0), int)
    held = held_bytes(table, problem.objective)
    division = divisions(plan)
    kind = table.expert[once[1]].astype(np.int64)
    sharded = np.array([stage.shard is not Shard.NONE for stage in plan.stages])[once[0]]
    split = division.parts[once[0], kind] * np.where(sharded, division.group[once[0], kind], 1)
    away = np.array([stage.offload_optimizer for stage in plan.stages])[once[0]]
    traffic = held.update_traffic[once[1]]
    there = host_update_s(table.elements[once[1]], traffic)
    spent = (1 - away) * traffic / device.memory_bytes_per_s + away * there
    result: Array = np.bincount(once[0], weights=spent / split, minlength=len(plan.stages))
    return result


def instruction_seconds(problem: Problem, plan: Plan, program: Program) -> Array:
    """Return how long each instruction takes, once its inputs are there and its ports are free."""
    stages = stage_seconds(problem, plan)
    seconds = np.zeros(len(program))
    compute = np.flatnonzero(program.is_compute)
    seconds[compute] = _compute_seconds(problem, plan, program, stages, compute)
    sends = np.flatnonzero(program.kind == Kind.SEND)
    seconds[sends] = _send_seconds(problem, program, sends)
    collectives = np.flatnonzero(program.kind >= FIRST_COLLECTIVE)
    seconds[collectives] = _collective_seconds(problem, plan, program, collectives)
    return seconds


def _compute_seconds(
    problem: Problem, plan: Plan, program: Program, stages: StageSeconds, rows: Array
) -> Array:
    kind, stage = program.kind[rows], program.stage[rows]
    row_class = stages.class_of[program.device[rows]]
    samples = program.microbatch_sizes[program.microbatch[rows]].astype(np.float64)
    early = bool((kind == Kind.RECOMPUTE).any())
    result = np.zeros(len(rows))

    def fill(where: Array, table: tuple[Array, Array], sign: float = 1.0) -> None:
        at = (row_class[where], stage[where])
        result[where] += sign * (table[0][at] + table[1][at] * samples[where])

    for code, tables in (
        (Kind.FORWARD, [(stages.forward, 1.0)]),
        (Kind.RECOMPUTE, [(stages.recompute, 1.0)]),
        (Kind.BACKWARD, [(stages.backward, 1.0), *([] if early else [(stages.recompute, 1.0)])]),
        (Kind.BACKWARD_INPUT, [(stages.backward_input, 1.0), (stages.recompute, 1.0)]),
        (Kind.BACKWARD_WEIGHT, [(stages.backward, 1.0), (stages.backward_input, -1.0)]),
    ):
        where = np.flatnonzero(kind == code)
        for table, sign in tables:
            fill(where, table, sign)
    loads = np.flatnonzero(kind == Kind.LOAD)
    tensor = program.tensor[rows[loads]]
    result[loads] = problem.graph.tensors.load_s[tensor] * samples[loads] / problem.graph.batch_size
    updates = np.flatnonzero(kind == Kind.UPDATE)
    result[updates] = stages.update_s[row_class[updates], stage[updates]]
    return np.maximum(result, 0.0)


def _send_seconds(problem: Problem, program: Program, rows: Array) -> Array:
    to_cluster = cluster_devices(problem, program.devices)
    tensors = problem.graph.tensors
    samples = program.microbatch_sizes[program.microbatch[rows]]
    given = tensors.transfer_s[program.tensor[rows]] * samples / problem.graph.batch_size
    return transfer_s(
        problem.cluster,
        to_cluster[program.device[rows]],
        to_cluster[program.peer[rows]],
        program.bytes[rows],
        given,
    )


def _collective_seconds(problem: Problem, plan: Plan, program: Program, rows: Array) -> Array:
    to_cluster = cluster_devices(problem, program.devices)
    known: dict[tuple[int, int, int, int, bool], float] = {}
    result = np.zeros(len(rows))
    # The last of several rounds of a bucket on a device.
    last = {key: row for row, key in zip(rows.tolist(), _buckets(program, rows), strict=True)}
    for index, (row, bucket) in enumerate(zip(rows.tolist(), _buckets(program, rows), strict=True)):
        stage = plan.stages[int(program.stage[row])]
        kind, group, size = (int(x[row]) for x in (program.kind, program.group, program.bytes))
        ends = last[bucket] == row
        key = (kind, group, size, stage.shard_group, ends)
        if key not in known:
            members = to_cluster[program.group_of(row)]
            known[key] = _reduced_s(
                problem, Kind(kind), members, size, stage.shard_group, ends=ends
            )
        result[index] = known[key]
    return result


def _buckets(program: Program, rows: Array) -> Iterator[tuple[int, int, int]]:
    """Return device, kind and bucket of collectives."""
    columns = (program.device, program.kind, program.bucket)
    return zip(*(column[rows].tolist() for column in columns), strict=True)


def _reduced_s(
    problem: Problem, kind: Kind, members: Array, size: float, group: int, *, ends: bool
) -> float:
    """Return seconds of a collective of a bucket; among several shard groups it has two parts.

    ``ends`` says that it is the last round of a step.
    """
    cluster = problem.cluster
    if kind is not Kind.REDUCE_SCATTER or not group or len(members) <= group:
        return collective_s(cluster, kind, members, size)
    # Each group scatters in every round; those who hold one shard reduce its sum once per step.
    inner = max(
        collective_s(cluster, kind, members[first : first + group], size)
        for first in range(0, len(members), group)
    )
    if not ends:
        return inner
    return inner + collective_s(cluster, Kind.ALL_REDUCE, members[::group], size / group)


def cluster_devices(problem: Problem, names: tuple[str, ...]) -> Array:
    """Return the index in the cluster of each named device."""
    index_of: Mapping[str, int] = problem.cluster.index_of
    return np.array([index_of[name] for name in names], dtype=np.int32)
