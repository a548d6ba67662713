"""Piper's time per sample: Tarnawski, Narayanan and Phanishayee, NeurIPS 2021.

Stages i = 1..m in order, with data-parallel degree d_i, tensor-parallel degree t_i, and a variant
of every op (its degree and whether it recomputes). N microbatches in a batch, of which y_i =
ceil((d_i + ... + d_m) / d_i) are in flight. With c_uv the bytes of an edge, in and out the bytes
that a variant exchanges at that edge, A and B its memory per microbatch in flight and without:

    comm_i = Σ edges entering 2 (c_uv + in) / d_i + Σ edges leaving 2 (c_uv + out) / d_i
             + Σ ops 4 (d_i - 1) parameters / (d_i N)                                    bytes
    time_i = comm_i / bandwidth + Σ ops seconds / d_i
    time   = max_i time_i,     Σ ops (A y_i + B) <= memory,  d_i divides N,  Σ d_i <= N

Two readers in one stage pay twice for one tensor, as published. The bandwidth is that of the
slowest level.
"""

import math
from typing import NamedTuple

import numpy as np

from partita.core.columns import Floats, Ints, Longs, sum_by
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.problem import Metric, Problem
from partita.objectives.placed import (
    MAX_NAMED,
    memory_errors,
    placement_errors,
    why_not_implicit_training,
    why_not_one_stage_each,
)
from partita.objectives.value import Value, check_applies


class _Stages(NamedTuple):
    """Columns by stage: degrees and microbatches in flight."""

    data: Longs
    tensor: Longs
    in_flight: Longs


def why_not_piper(problem: Problem, plan: Plan) -> str | None:
    """Return why Piper's objective does not apply, or ``None``."""
    if not len(problem.graph.variants):
        return "the graph has no variants of its ops"
    if problem.cluster.matrix is not None:
        return "the cluster is a matrix of links; expected levels"
    if any(len(set(stage.shares)) > 1 for stage in plan.stage_index):
        return "replicas have unequal shares"
    return why_not_implicit_training(problem) or why_not_one_stage_each(plan)


def piper_time(problem: Problem, plan: Plan) -> Value:
    """Return the seconds per microbatch of the slowest stage.

    N is the problem's number of microbatches, else the plan's. Without a variant that the plan asks
    for, the value is ``inf`` and ``errors`` names the op.

    Raises:
        InvalidInputError: The objective does not apply.
    """
    check_applies(Metric.PIPER, why_not_piper(problem, plan))
    graph = problem.graph
    microbatches = problem.objective.microbatches or plan.num_microbatches
    stages = _stages(plan)
    row_of = _variant_rows(graph, plan, stages)
    errors = [*placement_errors(problem, plan), *_degree_errors(stages, microbatches)]
    missing = np.flatnonzero(row_of < 0)
    details = {
        "devices": int((stages.data * stages.tensor).sum()),
        "sum_of_dp": int(stages.data.sum()),
        "microbatches_in_flight": tuple(stages.in_flight.tolist()),
    }
    if len(missing):
        names = ", ".join(repr(graph.ops.names[op]) for op in missing[:MAX_NAMED].tolist())
        errors.append(f"{len(missing)} ops have no variant as the plan asks: {names}")
        return Value(metric=Metric.PIPER, value=math.inf, details=details, errors=tuple(errors))
    stage_s, need = _stage_figures(problem, plan, stages, row_of, microbatches)
    worst = int(np.argmax(stage_s))
    by_device = {
        device: float(need[index])
        for index, stage in enumerate(plan.stages)
        for group in stage.devices
        for device in group
    }
    errors += memory_errors(problem, plan, by_device)
    return Value(
        metric=Metric.PIPER,
        value=float(stage_s[worst]),
        bottleneck=f"stage {worst}",
        details=details
        | {"stage_s": tuple(stage_s.tolist()), "memory_bytes": tuple(need.tolist())},
        errors=tuple(errors),
    )


def _stages(plan: Plan) -> _Stages:
    data = np.array([stage.num_replicas for stage in plan.stages], dtype=np.int64)
    tensor = np.array([stage.tp for stage in plan.stages], dtype=np.int64)
    after = np.cumsum(data[::-1])[::-1]
    return _Stages(data, tensor, -(-after // data))


def _degree_errors(stages: _Stages, microbatches: int) -> list[str]:
    errors = [
        f"data-parallel degree {degree} does not divide {microbatches} microbatches"
        for degree in np.unique(stages.data).tolist()
        if microbatches % degree
    ]
    total = int(stages.data.sum())
    if total > microbatches:
        errors.append(f"sum of data-parallel degrees {total} exceeds {microbatches} microbatches")
    return errors


def _variant_rows(graph: Graph, plan: Plan, stages: _Stages) -> Ints:
    """Return the row of each op's variant; -1 = there is none."""
    rows = np.full(len(graph), -1, dtype=np.int32)
    variants = graph.variants
    fits = variants.tp == stages.tensor[plan.stage_of[variants.op]]
    fits &= variants.recompute == plan.recompute[variants.op]
    rows[variants.op[fits]] = np.flatnonzero(fits)
    return rows


def _stage_figures(
    problem: Problem, plan: Plan, stages: _Stages, row_of: Ints, microbatches: int
) -> tuple[Floats, Floats]:
    """Return the seconds and the memory of a device, by stage."""
    graph, variants = problem.graph, problem.graph.variants
    count = len(plan.stages)
    stage_of = plan.stage_of

    def total(values: Floats) -> Floats:
        return sum_by(stage_of, values[row_of], count)

    seconds = total(variants.forward_s + variants.backward_s)
    reduced = 4 * (stages.data - 1) * total(variants.parameter_bytes) / stages.data / microbatches
    memory = total(variants.saved_bytes) * stages.in_flight + total(variants.fixed_memory_bytes)
    source, reader = graph.edge_source, graph.edges.reader
    crossing = np.flatnonzero(source >= 0)
    crossing = crossing[stage_of[source[crossing]] != stage_of[reader[crossing]]]
    size = graph.tensors.bytes[graph.edges.tensor[crossing]]
    entering = size + sync_bytes(graph, row_of, side="in")[crossing]
    leaving = size + sync_bytes(graph, row_of, side="out")[crossing]
    edge = sum_by(stage_of[reader[crossing]], 2 * entering, count)
    edge += sum_by(stage_of[source[crossing]], 2 * leaving, count)
    rate = min((level.slowest_bytes_per_s for level in problem.cluster.levels), default=math.inf)
    return (edge / stages.data + reduced) / rate + seconds / stages.data, memory


def sync_bytes(graph: Graph, row_of: Ints, *, side: str) -> Floats:
    """Return the bytes that each edge's reader (``in``) or source (``out``) exchanges for it."""
    variants = graph.variants
    if side == "in":
        (pointers, edges), begin, values = (
            graph.in_edges,
            variants.sync_in_ptr,
            variants.sync_in_bytes,
        )
    else:
        (pointers, edges), begin, values = (
            graph.out_edges,
            variants.sync_out_ptr,
            variants.sync_out_bytes,
        )
    degree = np.diff(pointers)
    given = np.diff(begin)[row_of]
    # A variant without a list of its own exchanges nothing.
    listed = np.repeat(given == degree, degree)
    op = np.repeat(np.arange(len(graph)), degree)
    position = np.arange(len(edges)) - pointers[:-1][op]
    result = np.zeros(len(graph.edges))
    where = edges[listed]
    result[where] = values[(begin[row_of][op] + position)[listed]]
    return result
