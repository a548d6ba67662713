"""Local search over placements (DynamicMLTrainer's ``algo_heuristic.py``).

On the sharding cost: restarts of simulated annealing with moves, swaps and exchanged labels
(``assignment/anneal.py``), from linear orders cut into runs by dynamic programming
(``assignment/starts.py``). A step costs O(degree), not O(edges x devices): changes are computed,
not the metric anew.

On any other metric: random moves of nodes, swaps, shifted borders between the runs of a pipeline
and exchanged devices, each measured by the cost model and taken if it is no worse.

Departures from the published script: it moves one node at a time from a random start (stuck as
soon as the parts are balanced, since every single move then raises the variance), takes the first
improvement, at most k - 1 moves an iteration, and labels parts by edges to successors only.
"""

import random
from collections.abc import Mapping

from partita.bounds import lower_bound
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.planners.assignment.descent import ITERATIONS, RESTARTS, improved
from partita.planners.assignment.effort import Effort, check_count
from partita.planners.assignment.measured import default_plans, ranked_starts, search_of
from partita.planners.assignment.moves import climb
from partita.planners.assignment.portfolio import (
    is_sharding,
    proof_of,
    sharding_plan,
    start_sharding,
)
from partita.planners.pipeline import solution_of
from partita.planners.search_trace import SearchTrace


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
        iterations: Of each restart: temperatures of 20,000 steps each (sharding cost; default 100)
            or plans measured (other metrics; by default 200 in all, fewer for large graphs).
        restarts: How often to start.
        seed: Of the random numbers.
        time_limit: Wall seconds; ``None`` = no limit, and the same result every time.
        trace: Told of each new best.

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
    if not is_sharding(problem):
        effort = Effort(time_limit=time_limit, goal=lower_bound(problem), trace=trace)
        rounds = iterations or default_plans(problem, restarts)
        return _measured(problem, effort, options, rounds=rounds, restarts=restarts, seed=seed)
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


def _measured(
    problem: Problem,
    effort: Effort,
    options: Mapping[str, object],
    *,
    rounds: int,
    restarts: int,
    seed: int,
) -> Solution:
    search = search_of(problem, effort)
    ranked = ranked_starts(search)
    for restart in range(restarts):
        start = search.best if restart % 2 == 0 else ranked[(restart // 2) % len(ranked)]
        climb(search, start, random.Random(seed + restart), rounds)
    return solution_of(
        problem,
        search.plan(),
        "local-search",
        options,
        proof=proof_of(effort, search.score.value),
        stats={"plans": search.measured},
    )
