"""Ops that the ranks of a stage divide: their costs at its degrees, and their communication.

A graph with a table of degrees (``Graph.degrees``) knows what one device does of an op at degrees
of tensor, context and expert parallelism; the calls among those devices are priced on the links
between them. The host updates the state that rests in its memory.
"""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.graph import Graph
from partita.core.plan import Plan, Stage
from partita.core.problem import Problem
from partita.core.program import Kind
from partita.cost.links import collective_s
from partita.errors import UnsupportedError

HOST_LINK_BYTES_PER_S = 2.5e10
"""Rate between a device and its host's memory: what PCIe 4.0 x16 reaches."""
HOST_UPDATE_BYTES_PER_S = 2.0e10
"""Memory traffic of an update on the host, per device."""
NO_RECOMPUTATION = "none"


def host_update_s(elements: Array | float, traffic_bytes: Array | float) -> Array:
    """Return seconds of an update on the host: gradients go there (4 bytes), weights come back (2).

    Args:
        elements: Number of elements.
        traffic_bytes: Bytes that the update reads and writes.
    """
    moved = np.asarray(elements) * 6.0 / HOST_LINK_BYTES_PER_S
    return moved + np.asarray(traffic_bytes) / HOST_UPDATE_BYTES_PER_S


def degree_rows(problem: Problem, plan: Plan, device_type: str) -> Array:
    """Return the row of ``graph.degrees`` of each op on a type of device; -1 = none.

    Only stages that have devices of that type are looked at.

    Raises:
        UnsupportedError: There are no costs at the degrees of its stage.
    """
    table = problem.graph.degrees
    rows = np.full(len(problem.graph), -1, dtype=np.int64)
    if not len(table):
        return rows
    index = problem.cluster.index_of
    types = np.array([problem.cluster.devices[index[name]].type for name in plan.devices])
    distinct = plan.stage_index
    there = [bool((types[np.array(s.devices)] == device_type).any()) for s in distinct]
    number_of = np.array([distinct[stage] for stage in plan.stages])[plan.stage_of]
    for stage, number in distinct.items():
        here = number_of == number if there[number] else np.zeros(len(rows), dtype=bool)
        for kind in np.unique(table.kind_of[here]).tolist():
            if kind >= 0:
                found = _row(problem.graph, stage, kind, device_type)
                rows[here & (table.kind_of == kind)] = found
    return rows


def _row(graph: Graph, stage: Stage, kind: int, device_type: str) -> int:
    table = graph.degrees
    again = stage.recompute or NO_RECOMPUTATION
    # Ops without experts cost the same whoever divides the experts.
    for ep in (stage.ep, 1):
        for of in (device_type, ""):
            row = table.row_of.get((kind, of, stage.tp, stage.cp, ep, again))
            if row is not None:
                return row
    op = graph.ops.names[int(np.argmax(table.kind_of == kind))]
    raise UnsupportedError(
        f"op {op!r} has no costs on {device_type or 'this device'} at tensor-parallel degree "
        f"{stage.tp}, context {stage.cp}, experts {stage.ep}, recomputing {again!r}; "
        "estimate the model for these degrees"
    )


class CallSeconds(NamedTuple):
    """Seconds of each stage's calls as ``fixed + per_sample * n``.

    Attributes:
        forward: Of the forward pass.
        backward: Of the backward pass.
    """

    forward: tuple[Array, Array]
    backward: tuple[Array, Array]


def call_seconds(problem: Problem, plan: Plan, cluster_device: Array) -> CallSeconds:
    """Return the seconds that each stage waits for calls among its ranks.

    Args:
        problem: The problem.
        plan: A plan for it.
        cluster_device: The device of the cluster of each device of the plan.
    """
    count = len(plan.stages)
    parts = np.zeros((2, 2, count))
    known: dict[tuple[Stage, bytes], Array] = {}
    for number, stage in enumerate(plan.stages if len(problem.graph.degrees) else ()):
        if len(stage) == 1:
            continue
        first = problem.cluster.devices[int(cluster_device[stage.devices[0][0]])]
        rows = degree_rows(problem, plan, first.type)[plan.stage_of == number]
        key = (stage, np.sort(rows).tobytes())
        if key not in known:
            known[key] = _stage_calls(problem, stage, rows[rows >= 0], cluster_device)
        parts[:, :, number] = known[key]
    return CallSeconds((parts[0, 0], parts[0, 1]), (parts[1, 0], parts[1, 1]))


def _stage_calls(problem: Problem, stage: Stage, rows: Array, cluster_device: Array) -> Array:
    """Return seconds by (pass, fixed or per sample) of one stage's calls."""
    table, batch = problem.graph.degrees, problem.graph.batch_size
    total = np.zeros((2, 2))
    for what, kind, groups in (
        ("tensor", Kind.ALL_GATHER, _tensor_groups(stage)),
        ("context", Kind.ALL_GATHER, _context_groups(stage)),
        ("expert", Kind.ALL_TO_ALL, _expert_groups(stage)),
    ):
        sizes = getattr(table, f"{what}_bytes")[rows]
        calls = np.stack([getattr(table, f"{what}_calls{end}")[rows] for end in ("", "_back")])
        if len(groups[0]) < 2 or not calls.any():
            continue
        for size in np.unique(sizes).tolist():
            times = calls[:, sizes == size].sum(axis=1)
            # Replicas may lie differently over hosts; the slowest one counts.
            start, whole = (
                max(
                    collective_s(problem.cluster, kind, cluster_device[list(group)], moved)
                    for group in groups
                )
                for moved in (0.0, size)
            )
            total[:, 0] += times * start
            total[:, 1] += times * (whole - start) / batch
    return total


def _tensor_groups(stage: Stage) -> list[tuple[int, ...]]:
    return [
        group[first : first + stage.tp]
        for group in stage.devices
        for first in range(0, stage.ranks, stage.tp)
    ]


def _context_groups(stage: Stage) -> list[tuple[int, ...]]:
    return [group[rank :: stage.tp] for group in stage.devices for rank in range(stage.tp)]


def _expert_groups(stage: Stage) -> list[tuple[int, ...]]:
    flat = [device for group in stage.devices for device in group]
    size = stage.expert_parts if stage.ep > 1 else 1
    return [tuple(flat[first : first + size]) for first in range(0, len(flat), size)]
