"""Stages that the user gives, as indices over layers (Merak's ``custom:0,8,14,20,26``)."""

from collections.abc import Sequence

from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.planners.pipeline import layered_plan, solution_of


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
