"""Local search over placements (DynamicMLTrainer's ``algo_heuristic.py``).

Restarts of simulated annealing with moves, swaps and exchanged labels
(``assignment/anneal.py``), from linear orders cut into runs by dynamic programming
(``assignment/starts.py``). A step costs O(degree), not O(edges x devices): changes are computed,
not the metric anew.

Departures from the published script: it moves one node at a time from a random start (stuck as
soon as the parts are balanced, since every single move then raises the variance), takes the first
improvement, at most k - 1 moves an iteration, and labels parts by edges to successors only.
"""

from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.planners.assignment.descent import ITERATIONS, RESTARTS, improved
from partita.planners.assignment.portfolio import (
    proof_of,
    sharding_plan,
    start_sharding,
)
from partita.planners.effort import SearchTrace, check_count
from partita.planners.pipeline import solution_of


def plan_local_search(
    problem: Problem,
    *,
    iterations: int | None = None,
    restarts: int = RESTARTS,
    seed: int = 0,
    time_limit: float | None = None,
    trace: SearchTrace | None = None,
) -> Solution:
    """Improve placements step by step, from several starts.

    Args:
        problem: The problem.
        iterations: Temperatures of each restart, of 20,000 steps each; ``None`` = 100.
        restarts: How often to start.
        seed: Of the random numbers.
        time_limit: Wall seconds; ``None`` = no limit, and the same result every time.
        trace: Called with each new best.

    Raises:
        InfeasibleError: Nothing that was found fits.
    """
    check_count("iterations", iterations)
    check_count("restarts", restarts)
    options = {
        "iterations": iterations,
        "restarts": restarts,
        "seed": seed,
        "time_limit": time_limit,
    }
    instance, effort = start_sharding(problem, time_limit, trace)
    place, cost = improved(
        instance, effort, restarts=restarts, iterations=iterations or ITERATIONS, seed=seed
    )
    return solution_of(
        problem,
        sharding_plan(problem, instance, place),
        "local-search",
        options,
        proof=proof_of(effort, cost),
        bound=effort.goal,
    )
