"""A map from ops to devices that the user gives."""

from collections.abc import Mapping

import numpy as np

from partita.core.columns import Array
from partita.core.placement import is_pipeline, placement_plan
from partita.core.plan import Plan, Stage, equal_microbatches
from partita.core.problem import Problem
from partita.core.rules import name_matcher
from partita.core.solution import Solution
from partita.errors import InvalidInputError
from partita.planners.pipeline import solution_of


def plan_manual(problem: Problem, *, assignment: Mapping[str, str]) -> Solution:
    """Place ops as a map says.

    Args:
        problem: The problem.
        assignment: Devices by op. A key is the name of an op, a module path that holds it
            (``encoder.layers.0``), or a pattern with ``*``; every op must be claimed by one device.

    Raises:
        InfeasibleError: A device has too little memory.
        InvalidInputError: An op is not claimed, or by two devices, or a device is not there.
    """
    names = problem.graph.ops.names
    cluster = problem.cluster
    device_of = np.full(len(names), -1)
    claimed_by: dict[int, str] = {}
    claimed_ops = name_matcher(names)
    for key, device in assignment.items():
        if device not in cluster.index_of:
            known = ", ".join(cluster.device_names[:8])
            raise InvalidInputError(f"{key!r} is on device {device!r}, which is not one of {known}")
        claimed = claimed_ops(key)
        if not claimed:
            raise InvalidInputError(f"{key!r} names no op of graph {problem.graph.name!r}")
        for op in claimed:
            if device_of[op] not in (-1, cluster.index_of[device]):
                raise InvalidInputError(
                    f"op {names[op]!r} is claimed twice, by {claimed_by[op]!r} and by {key!r}"
                )
            device_of[op], claimed_by[op] = cluster.index_of[device], key
    if (device_of < 0).any():
        missing = names[int(np.argmax(device_of < 0))]
        raise InvalidInputError(f"op {missing!r} is placed nowhere; every op must be on one device")
    return solution_of(
        problem, _plan(problem, device_of), "manual", {"assignment": dict(assignment)}
    )


def _plan(problem: Problem, device_of: Array) -> Plan:
    """Return a pipeline with one stage a device where the map allows it, else a placement."""
    sizes = equal_microbatches(problem.microbatches, problem.microbatch_size)
    schedule = problem.objective.pipeline_schedule
    fine = placement_plan(
        problem.graph,
        problem.cluster.device_names,
        device_of,
        schedule=schedule,
        microbatch_sizes=sizes,
    )
    if not is_pipeline(problem.graph, device_of):
        return fine
    first: dict[int, int] = {}
    for stage, part in enumerate(fine.stages):
        first.setdefault(part.devices[0][0], stage)
    order = _device_order(problem, device_of, first)
    number = {device: stage for stage, device in enumerate(order)}
    return Plan(
        fingerprint=problem.graph.fingerprint,
        devices=problem.cluster.device_names,
        stage_of=[number[device] for device in device_of.tolist()],  # type: ignore[arg-type]
        stages=tuple(Stage(devices=((device,),)) for device in order),
        schedule=schedule,
        microbatch_sizes=sizes,
    )


def _device_order(problem: Problem, device_of: Array, first: dict[int, int]) -> list[int]:
    """Return the used devices so that data flows from earlier to later ones."""
    graph = problem.graph
    source, reader = graph.edge_source, graph.edges.reader
    inner = source >= 0
    inner[inner] = graph.is_forward[source[inner]] & graph.is_forward[reader[inner]]
    pairs = {
        (a, b)
        for a, b in zip(
            device_of[source[inner]].tolist(), device_of[reader[inner]].tolist(), strict=True
        )
        if a != b
    }
    waiting = {device: sum(1 for _, b in pairs if b == device) for device in first}
    order: list[int] = []
    while waiting:
        ready = min((d for d, count in waiting.items() if count == 0), key=lambda d: first[d])
        order.append(ready)
        del waiting[ready]
        for a, b in pairs:
            if a == ready:
                waiting[b] -= 1
    return order
