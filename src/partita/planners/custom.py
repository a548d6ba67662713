"""Stages that the user gives, as indices over layers (Merak's ``custom:0,8,14,20,26``)."""

from collections.abc import Sequence

from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError
from partita.planners.pipeline import cut_layers, main_devices, pipeline_plan, solution_of


def plan_custom(
    problem: Problem, *, boundaries: Sequence[int], replicas: int = 1, tp: int = 1
) -> Solution:
    """Let stage k be the layers from boundary k up to boundary k + 1.

    Args:
        problem: The problem.
        boundaries: From 0 to the number of layers, ascending.
        replicas: Replicas of every stage.
        tp: Devices that divide the tensors of a replica.

    Raises:
        InfeasibleError: A device has too little memory.
        InvalidInputError: Wrong boundaries (says how many layers there are), or too few devices.
    """
    plan = layered_plan(problem, boundaries, replicas, tp=tp)
    options: dict[str, object] = {"boundaries": list(boundaries), "replicas": replicas}
    if tp > 1:
        options["tp"] = tp
    return solution_of(problem, plan, "custom", options)


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
