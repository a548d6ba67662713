"""Groups of devices first, then inside them (DynamicMLTrainer's ``algo_hierarchical.py``).

The groups are those of ``groups=2,3,4`` (two of three of four devices in their order), else the
levels of the cluster, else the published ``k_values`` if the matrix agrees, else clusters of the
matrix. Every split is a small instance of its own (``assignment/groups.py``),
and a final annealing at low temperature refines the whole: O(n k) steps in all, where a flat search
has k times as many places to look at. Thousands of devices are ordinary.

Departures from the published script, which averages the matrix in contiguous blocks whatever it
holds and forgets the edges that leave a part: these edges count, in both directions; a group gets
as many nodes as it has devices at least; the metric is reported and not the constant 0; blocks are
only believed where they are nearer inside than outside.
"""

from collections.abc import Sequence

from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError
from partita.planners.assignment.descent import ITERATIONS, RESTARTS
from partita.planners.assignment.groups import group_levels
from partita.planners.assignment.portfolio import (
    by_groups,
    proof_of,
    sharding_plan,
    start_sharding,
)
from partita.planners.effort import SearchTrace, check_count
from partita.planners.pipeline import solution_of


def plan_hierarchical(
    problem: Problem,
    *,
    groups: str | Sequence[int] = "",
    iterations: int | None = None,
    restarts: int = RESTARTS,
    seed: int = 0,
    time_limit: float | None = None,
    trace: SearchTrace | None = None,
) -> Solution:
    """Split the ops among groups of devices, and each part inside its group.

    Args:
        problem: The problem.
        groups: Groups at each level, outermost first, such as ``2,3,4``; empty = as the cluster is.
        iterations: Temperatures of each restart, of 20,000 steps each; ``None`` = 100.
        restarts: How often the whole is refined.
        seed: Of the random numbers.
        time_limit: Wall seconds; ``None`` = no limit, and the same result every time.
        trace: Called with each new best.

    Raises:
        InfeasibleError: Nothing that was found fits.
        InvalidInputError: The groups are not the devices there are.
    """
    check_count("iterations", iterations)
    check_count("restarts", restarts)
    sizes = _sizes(groups)
    options = {
        "groups": ",".join(str(size) for size in sizes),
        "iterations": iterations,
        "restarts": restarts,
        "seed": seed,
        "time_limit": time_limit,
    }
    instance, effort = start_sharding(problem, time_limit, trace)
    place, cost = by_groups(
        instance,
        group_levels(problem, instance.matrix, sizes),
        effort,
        restarts=restarts,
        iterations=iterations or ITERATIONS,
        seed=seed,
    )
    return solution_of(
        problem,
        sharding_plan(problem, instance, place),
        "hierarchical",
        options,
        proof=proof_of(effort, cost),
        bound=effort.goal,
    )


def _sizes(groups: str | Sequence[int]) -> list[int]:
    parts = groups.split(",") if isinstance(groups, str) else list(groups)
    try:
        return [int(part) for part in parts if str(part).strip()]
    except ValueError as exc:
        raise InvalidInputError(
            f"groups is {groups!r}; expected numbers such as 2,3,4, outermost first"
        ) from exc
