"""What planners share: cutting an order into stages, and turning a plan into a solution."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from partita.bounds import lower_bound
from partita.core.cluster import Cluster
from partita.core.columns import Array
from partita.core.graph import DeviceKind, Graph
from partita.core.plan import Plan, Stage, equal_microbatches
from partita.core.problem import Problem
from partita.core.solution import Proof, Solution
from partita.cost.judge import Limit, check_memory, judge
from partita.errors import InfeasibleError, InvalidInputError


def main_devices(problem: Problem) -> list[int]:
    """Return the devices that plain planners use: all accelerators, or all CPUs without any."""
    return main_devices_of(problem.cluster)


def main_devices_of(cluster: Cluster) -> list[int]:
    """Return the accelerators of a cluster, or its CPUs where there are none."""
    devices = cluster.devices
    kinds = [DeviceKind.GPU, DeviceKind.CPU]
    kind = next(kind for kind in kinds if any(device.kind is kind for device in devices))
    return [index for index, device in enumerate(devices) if device.kind is kind]


def layer_of_ops(graph: Graph) -> tuple[Array, int]:
    """Return the layer of each op, and the number of layers.

    Without layers every forward op is one, in topological order. An op that has no layer joins the
    latest layer that it reads from. Explicit backward ops get -1.

    Raises:
        InvalidInputError: There is no forward op.
    """
    order = graph.topological_order[graph.is_forward[graph.topological_order]]
    if not len(order):
        raise InvalidInputError(f"graph {graph.name!r} has no forward op to cut into stages")
    layers = graph.ops.layers
    layer = np.full(len(graph), -1, dtype=np.int64)
    if not has_layers(graph):
        layer[order] = np.arange(len(order))
        return layer, len(order)
    layer[order] = layers.of[order]
    ptr, edges = graph.in_edges
    for op in order[layer[order] < 0].tolist():
        sources = graph.edge_source[edges[ptr[op] : ptr[op + 1]]]
        layer[op] = max([0, *(int(layer[s]) for s in sources.tolist() if s >= 0)])
    return layer, len(layers.names)


def has_layers(graph: Graph) -> bool:
    """Return whether the graph says in which layer its ops are."""
    return len(graph.ops.layers.of) > 0 and len(graph.ops.layers.names) > 0


def cut_layers(graph: Graph, boundaries: Sequence[int]) -> Array:
    """Return the stage of each op, stage k = layers from boundary k up to boundary k + 1.

    Raises:
        InvalidInputError: The boundaries do not ascend from 0 to the number of layers, or the cut
            splits ops that must stay together.
    """
    layer, count = layer_of_ops(graph)
    what = "layers" if has_layers(graph) else "ops"
    if len(boundaries) < 2 or boundaries[0] != 0:
        raise InvalidInputError(
            f"boundaries {list(boundaries)} must start with 0 and end with {count}"
        )
    if boundaries[-1] != count:
        raise InvalidInputError(
            f"the last boundary is {boundaries[-1]}; graph {graph.name!r} has {count} {what}, "
            f"so it must be {count}"
        )
    if any(a >= b for a, b in pairwise(boundaries)):
        raise InvalidInputError(f"boundaries {list(boundaries)} must ascend")
    stage = np.searchsorted(np.asarray(boundaries), layer, side="right") - 1
    return _with_backward(graph, stage)


def _with_backward(graph: Graph, stage: Array) -> Array:
    """Let explicit backward ops follow a forward op of their class, else what they read."""
    backward = np.flatnonzero(~graph.is_forward)
    color = graph.ops.colocation
    home: dict[int, int] = {}
    for op in np.flatnonzero(graph.is_forward & (color >= 0)).tolist():
        known = home.setdefault(int(color[op]), int(stage[op]))
        if known != stage[op]:
            raise InvalidInputError(
                f"op {graph.ops.names[op]!r} must share a device with an op of stage {known}, "
                f"but is cut into stage {stage[op]}"
            )
    ptr, edges = graph.in_edges
    for op in graph.topological_order[np.isin(graph.topological_order, backward)].tolist():
        sources = graph.edge_source[edges[ptr[op] : ptr[op + 1]]]
        near = max((int(stage[s]) for s in sources.tolist() if s >= 0 and stage[s] >= 0), default=0)
        stage[op] = home.get(int(color[op]), near) if color[op] >= 0 else near
        home.setdefault(int(color[op]), int(stage[op]))
    return stage


def allowed_boundaries(graph: Graph) -> Array:
    """Return the layer indices at which a cut splits no colocation class."""
    layer, count = layer_of_ops(graph)
    blocked = np.zeros(count + 1, dtype=np.int64)
    tied = np.flatnonzero(graph.is_forward & (graph.ops.colocation >= 0))
    if len(tied):
        color = graph.ops.colocation[tied]
        first = np.full(int(color.max()) + 1, count)
        last = np.zeros(int(color.max()) + 1, dtype=np.int64)
        np.minimum.at(first, color, layer[tied])
        np.maximum.at(last, color, layer[tied])
        inside = last > first
        np.add.at(blocked, first[inside] + 1, 1)
        np.add.at(blocked, last[inside] + 1, -1)
    return np.flatnonzero(np.cumsum(blocked)[: count + 1] == 0)


def legal_boundaries(graph: Graph, wanted: Sequence[int]) -> list[int]:
    """Return boundaries over layers, each moved to the next one that splits no colocation class.

    Boundaries that would end a stage of layers without ops are left out.
    """
    layer, count = layer_of_ops(graph)
    allowed = allowed_boundaries(graph)
    moved = np.unique(np.append(allowed[np.searchsorted(allowed, np.asarray(wanted))], count))
    held = np.unique(layer[layer >= 0])
    _, first = np.unique(np.searchsorted(held, moved), return_index=True)
    return [*moved[first[:-1]].tolist(), int(moved[-1])]


def pipeline_plan(
    problem: Problem,
    stage_of: Array,
    groups: Sequence[Sequence[int]],
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
) -> Plan:
    """Return a pipeline: stage k runs on the k-th group of cluster devices, ``tp`` a replica."""
    used = [device for group in groups for device in group]
    names = problem.cluster.device_names
    index = {device: number for number, device in enumerate(dict.fromkeys(used))}
    stages = [
        Stage(
            devices=tuple(
                tuple(index[device] for device in group[first : first + tp])
                for first in range(0, len(group), tp)
            ),
            sequence_parallel=sequence_parallel,
        )
        for group in groups
    ]
    return Plan(
        fingerprint=problem.graph.fingerprint,
        devices=tuple(names[device] for device in index),
        stage_of=stage_of,
        stages=tuple(stages),
        schedule=problem.objective.pipeline_schedule,
        microbatch_sizes=equal_microbatches(problem.microbatches, problem.microbatch_size),
    )


def solution_of(  # noqa: PLR0913 (what a planner knows of its plan)
    problem: Problem,
    plan: Plan,
    planner: str,
    options: Mapping[str, Any],
    *,
    proof: Proof = Proof.FEASIBLE,
    bound: float = 0.0,
    stats: Mapping[str, Any] | None = None,
    alternatives: Sequence[Plan] = (),
) -> Solution:
    """Return a plan with its value and a bound, after checking that it fits.

    Args:
        problem: The problem.
        plan: The plan.
        planner: Name of the planner.
        options: Options it was called with.
        proof: What the planner knows of the value.
        bound: What no plan of the problem can be below, as the planner proved it.
        stats: Figures about the search.
        alternatives: Other plans worth a look, best first.

    Raises:
        InfeasibleError: It breaks a limit of the devices or of the objective.
    """
    plan.check_fits(problem)
    found = judge(problem, plan)
    value = found.value
    if found.limit is Limit.METRIC:
        raise InfeasibleError(f"{planner} found no plan that fits: {found.reason}")
    if found.limit is Limit.RULE:
        raise InfeasibleError(f"{planner or 'the plan'} breaks a rule: {found.reason}")
    if found.limit is Limit.MEMORY:
        check_memory(problem, plan)
    return Solution(
        problem=problem,
        plan=plan,
        metric=problem.objective.metric,
        value=value.value,
        unit=value.unit,
        lower_bound=min(max(lower_bound(problem), bound), value.value),
        proof=proof,
        planner=planner,
        options=options,
        stats=stats or {},
        alternatives=tuple(alternatives),
    )


def layered_plan(
    problem: Problem, boundaries: Sequence[int], replicas: int, *, tp: int = 1
) -> Plan:
    """Return the pipeline whose stages are layers between boundaries, on consecutive devices.

    Raises:
        InvalidInputError: Wrong boundaries, or too few devices.
    """
    devices = main_devices(problem)
    count = len(boundaries) - 1
    stage_of = cut_layers(problem.graph, list(boundaries))
    for what, value in (("replicas", replicas), ("tp", tp)):
        if value < 1:
            raise InvalidInputError(f"{what} is {value}; expected 1 or more")
    each = replicas * tp
    if count * each > len(devices):
        raise InvalidInputError(
            f"{count} stages of {replicas} replicas need {count * each} devices; "
            f"there are {len(devices)}"
        )
    groups = [devices[stage * each : (stage + 1) * each] for stage in range(count)]
    return pipeline_plan(problem, stage_of, groups, tp=tp)
