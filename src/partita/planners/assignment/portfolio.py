"""The best that the searches for the sharding cost find together, and how a placement is proven.

Small instances are searched exhaustively. Otherwise the placement by groups and the flat search
take turns; both start from linear orders cut by dynamic programming, which is exact on a path of
equal weights. A value that reaches the bound of ``bound.py`` is proven, whoever found it.
"""

import numpy as np

from partita.bounds import lower_bound
from partita.core.columns import Array
from partita.core.placement import placement_plan
from partita.core.plan import Plan
from partita.core.problem import Metric, Problem
from partita.core.solution import Proof, Solution
from partita.errors import InvalidInputError
from partita.planners.assignment.descent import ITERATIONS, RESTARTS, improved
from partita.planners.assignment.groups import group_levels, placed_by_groups
from partita.planners.assignment.instance import Instance, check_enough, instance_of
from partita.planners.assignment.tree import Found, search_all
from partita.planners.effort import Effort, SearchTrace, check_seconds
from partita.planners.pipeline import solution_of

EXHAUSTIVE = 2e7
"""Placements up to which a search of all of them is sure to end."""

PROMISING = 1e22
"""Placements up to which bounds may still end it."""

STEPS = 5_000_000
"""Partial placements that are looked at where the end is not sure."""

FINAL_HEATS = (0.15, 0.3, 0.6)
"""First temperatures of what refines a placement by groups: low, to keep its structure."""


def is_sharding(problem: Problem) -> bool:
    """Return whether the problem asks for the sharding cost."""
    return problem.objective.metric is Metric.SHARDING_COST


def start_sharding(
    problem: Problem, time_limit: float | None, trace: SearchTrace | None
) -> tuple[Instance, Effort]:
    """Return the instance of a problem and the limits of its search, the bound as the goal.

    Raises:
        InfeasibleError: There are fewer nodes than devices.
        InvalidInputError: The metric is another one.
    """
    if not is_sharding(problem):
        raise InvalidInputError(
            f"a search for the sharding cost is asked for {problem.objective.metric.value}"
        )
    check_seconds(time_limit)
    instance = instance_of(problem)
    check_enough(problem, instance)
    goal = lower_bound(problem)
    return instance, Effort(time_limit=time_limit, goal=goal, trace=trace)


def by_groups(
    instance: Instance,
    levels: list[Array],
    effort: Effort,
    *,
    restarts: int = RESTARTS,
    iterations: int = ITERATIONS,
    seed: int = 0,
) -> tuple[Array, float]:
    """Return a placement found group by group and refined as a whole, and its cost."""
    start = placed_by_groups(instance, levels, effort, iterations=iterations, seed=seed)
    if not np.isfinite(instance.cost(start)):
        return improved(instance, effort, restarts=restarts, iterations=iterations, seed=seed)
    return improved(
        instance,
        effort,
        start=start,
        restarts=restarts,
        iterations=iterations,
        seed=seed,
        heats=FINAL_HEATS,
    )


def sharding_plan(problem: Problem, instance: Instance, place: Array) -> Plan:
    """Return the plan of a placement of the nodes."""
    return placement_plan(
        problem.graph,
        problem.cluster.device_names,
        place[instance.node_of],
        schedule=problem.objective.placement_schedule,
    )


def proof_of(effort: Effort, cost: float, *, complete: bool = False) -> Proof:
    """Return what is known of a cost."""
    if complete or effort.reached(cost):
        return Proof.OPTIMAL
    return Proof.TIME_LIMIT if effort.timed_out else Proof.FEASIBLE


def best_assignment(
    problem: Problem,
    *,
    time_limit: float | None = None,
    iterations: int = ITERATIONS,
    seed: int = 0,
    trace: SearchTrace | None = None,
    planner: str = "auto",
) -> Solution:
    """Return the best placement for the sharding cost, proven where that is possible.

    Args:
        problem: A problem with the metric ``sharding-cost``.
        time_limit: Wall seconds; ``None`` = no limit, and the same result every time.
        iterations: Temperatures of each restart.
        seed: Of the random numbers.
        trace: Called with each new best.
        planner: Who is named in the solution.

    Raises:
        InfeasibleError: There are fewer ops than devices, or rules leave a device empty.
    """
    instance, effort = start_sharding(problem, time_limit, trace)
    place, cost = improved(instance, effort, iterations=iterations, seed=seed)
    levels = group_levels(problem, instance.matrix)
    if len(levels) > 1 and not (effort.reached(cost) or effort.is_over()):
        place, cost = min(
            (place, cost),
            by_groups(instance, levels, effort, iterations=iterations, seed=seed),
            key=lambda found: found[1],
        )
    found = Found(place, cost, complete=effort.reached(cost), steps=0)
    size = instance.num_nodes * np.log(instance.num_devices)
    if size <= np.log(PROMISING) and not (found.complete or effort.is_over()):
        limit = None if size <= np.log(EXHAUSTIVE) else STEPS
        found = search_all(instance, place, effort, iterations=limit)
    return solution_of(
        problem,
        sharding_plan(problem, instance, found.place),
        planner,
        {"time_limit": time_limit, "iterations": iterations, "seed": seed},
        proof=proof_of(effort, found.cost, complete=found.complete),
        bound=found.cost if found.complete else effort.goal,
        stats={"steps": found.steps},
    )
