"""Questions that objectives ask of a plan first: where each op runs, and whether it may."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.core.cluster import Device
from partita.core.columns import Floats, Ints
from partita.core.graph import KIND_BIT, DeviceKind, Graph
from partita.core.plan import Plan
from partita.core.problem import Mode, Problem
from partita.core.rules import broken_rules
from partita.cost.durations import op_seconds
from partita.cost.memory import memory_limits
from partita.cost.tables import alike_in_time

MAX_NAMED = 5


def plan_devices(problem: Problem, plan: Plan) -> tuple[Device, ...]:
    """Return the devices that the plan names, in its order."""
    cluster = problem.cluster
    return tuple(cluster.devices[cluster.index_of[name]] for name in plan.devices)


def why_not_one_stage_each(plan: Plan) -> str | None:
    """Return why a device of the plan does not run exactly one stage, or ``None``."""
    owner: dict[int, int] = {}
    for index, stage in enumerate(plan.stages):
        for device in (device for group in stage.devices for device in group):
            if device in owner:
                name = plan.devices[device]
                return f"device {name!r} runs stages {owner[device]} and {index}; expected one"
            owner[device] = index
    return None


def why_not_implicit_training(problem: Problem) -> str | None:
    """Return why the graph is not trained with the backward pass inside its ops, or ``None``."""
    if problem.objective.mode is not Mode.TRAINING:
        return "it measures training, the problem is inference"
    if not problem.graph.is_forward.all():
        return "the graph has explicit backward ops"
    return None


def placement_errors(problem: Problem, plan: Plan, *, cpus_are_one: bool = False) -> list[str]:
    """Return the ops on a kind of device they do not run on, and the colocation classes cut apart.

    Args:
        problem: The problem.
        plan: The plan.
        cpus_are_one: Whether all CPUs count as one device for colocation.
    """
    graph = problem.graph
    devices = plan_devices(problem, plan)
    kinds, groups = [], []
    held = np.zeros((len(plan.stage_index), len(problem.cluster)), dtype=bool)
    for stage, index in plan.stage_index.items():
        used = {devices[device].kind for group in stage.devices for device in group}
        kinds.append(sum(KIND_BIT[kind] for kind in used))
        named = [plan.devices[device] for group in stage.devices for device in group]
        held[index, [problem.cluster.index_of[name] for name in named]] = True
        pooled = cpus_are_one and used == {DeviceKind.CPU}
        groups.append(len(plan.stage_index) if pooled else index)
    distinct = np.array([plan.stage_index[stage] for stage in plan.stages])[plan.stage_of]
    bad = np.flatnonzero(np.array(kinds)[distinct] & ~graph.ops.device_kinds.astype(np.int64))
    errors = []
    if len(bad):
        names = ", ".join(repr(graph.ops.names[op]) for op in bad[:MAX_NAMED].tolist())
        more = ", ..." if len(bad) > MAX_NAMED else ""
        errors.append(f"{len(bad)} ops are on a kind of device that cannot run them: {names}{more}")
    elif problem.rules:
        errors += _rule_errors(problem, plan, broken_rules(problem.allowed, held, distinct))
    return errors + _colour_errors(graph, np.array(groups)[distinct])


def _rule_errors(problem: Problem, plan: Plan, bad: NDArray[np.int64]) -> list[str]:
    if not len(bad):
        return []
    op = int(bad[0])
    stage = plan.stages[plan.stage_of[op]]
    row_of, matrix = problem.allowed
    index = problem.cluster.index_of
    device = next(
        plan.devices[device]
        for group in stage.devices
        for device in group
        if not matrix[row_of[op], index[plan.devices[device]]]
    )
    rules = ", ".join(map(str, problem.rules[:MAX_NAMED]))
    return [
        f"{len(bad)} ops are where a rule forbids it: {problem.graph.ops.names[op]!r} "
        f"on {device!r} ({rules})"
    ]


def _colour_errors(graph: Graph, group_of: NDArray[Any]) -> list[str]:
    coloured = np.flatnonzero(graph.ops.colocation >= 0)
    if not len(coloured):
        return []
    colour = graph.ops.colocation[coloured]
    size = int(colour.max()) + 1
    low = np.full(size, np.iinfo(np.int64).max)
    high = np.full(size, -1)
    np.minimum.at(low, colour, group_of[coloured])
    np.maximum.at(high, colour, group_of[coloured])
    split = np.flatnonzero(high > low)
    named = split[:MAX_NAMED].tolist()
    more = (
        [f"{len(split) - MAX_NAMED} more colocation classes are split"]
        if len(split) > MAX_NAMED
        else []
    )
    return [f"colocation class {index} is split over several devices" for index in named] + more


def memory_errors(problem: Problem, plan: Plan, need_bytes: Mapping[int, float]) -> list[str]:
    """Return an error for each device that needs more than it may use.

    Args:
        problem: The problem.
        plan: The plan.
        need_bytes: Bytes needed, by index of the device in the plan.
    """
    limits = memory_limits(problem, plan).tolist()
    return [
        f"device {plan.devices[index]!r} needs {need:.0f} bytes, limit {limits[index]:.0f}"
        for index, need in sorted(need_bytes.items())
        if need > limits[index]
    ]


def seconds_on(graph: Graph, devices: Sequence[Device], mode: Mode) -> tuple[Ints, Floats]:
    """Return ``(class_of, seconds)``: op v takes ``seconds[class_of[d], v]`` on device d.

    Forward and backward together in training, forward alone in inference.
    """
    alike = alike_in_time(devices)
    rows: list[Floats] = []
    for first in alike.first:
        seconds = op_seconds(graph, devices[first])
        rows.append(seconds.forward_s + (seconds.backward_s if mode is Mode.TRAINING else 0.0))
    return alike.of.astype(np.int32), np.stack(rows)
