"""All placements, as far as time allows (DynamicMLTrainer's ``algo_bash.py``).

On the sharding cost: branch and bound (``assignment/tree.py``) from a placement that a short
annealing has found. It ends with a proof; the published script enumerates set partitions times
labels, Stirling{n, k} k!, without a bound, and starts from singletons, so that under a time limit
it sees terrible ones only. Values that reach the bound of ``cost.bounds`` are proven at
once.

On any other metric: every way to put each node (ops that must share a device) on one device, those
nearest to a good pipeline first, each measured by the cost model; devices that can stand for each
other are exchanged for nothing. O(k^n) plans. It is exact for ``max-load``, where a plan is a
placement. Elsewhere plans may replicate stages, recompute or order ops otherwise, so a value is
proven only where it meets the cost model's bound.

Departures: anytime with any limit, not only time; parts that must not be empty are never empty;
labels are searched together with parts.
"""

import math
from collections.abc import Mapping

from partita.bounds import lower_bound
from partita.core.problem import Metric, Problem
from partita.core.solution import Proof, Solution
from partita.planners.assignment.descent import improved
from partita.planners.assignment.exhaustive import measure_all, ranked_starts, search_of
from partita.planners.assignment.portfolio import (
    is_sharding,
    proof_of,
    sharding_plan,
    start_sharding,
)
from partita.planners.assignment.tree import search_all
from partita.planners.effort import Effort, SearchTrace, check_count, check_seconds
from partita.planners.pipeline import solution_of


def plan_brute_force(
    problem: Problem,
    *,
    time_limit: float = 10.0,
    iterations: int | None = None,
    trace: SearchTrace | None = None,
) -> Solution:
    """Search all placements; the best so far when a limit is reached.

    Args:
        problem: The problem.
        time_limit: Wall seconds.
        iterations: Partial placements (sharding cost) or plans (other metrics) to look at; ``None``
            = no limit. A search that ends by it is the same every time.
        trace: Called with each new best.

    Raises:
        InfeasibleError: Nothing that was found fits.
    """
    check_count("iterations", iterations)
    check_seconds(time_limit)
    options = {"time_limit": time_limit, "iterations": iterations}
    if not is_sharding(problem):
        return _measured(problem, options, Effort(time_limit=time_limit, trace=trace))
    instance, effort = start_sharding(problem, time_limit, trace)
    start, _ = improved(instance, effort, restarts=2, iterations=20)
    found = search_all(instance, start, effort, iterations=iterations)
    return solution_of(
        problem,
        sharding_plan(problem, instance, found.place),
        "brute-force",
        options,
        proof=proof_of(effort, found.cost, complete=found.complete),
        bound=found.cost if found.complete else effort.goal,
        stats={"steps": found.steps, "complete": found.complete},
    )


def _measured(problem: Problem, options: Mapping[str, float | None], effort: Effort) -> Solution:
    effort.goal = lower_bound(problem)
    iterations = options["iterations"]
    search = search_of(problem, effort, math.inf if iterations is None else iterations)
    complete = measure_all(search, ranked_starts(search)[0])
    exact = complete and problem.objective.metric is Metric.MAX_LOAD
    proof = proof_of(effort, search.score.value, complete=exact)
    return solution_of(
        problem,
        search.plan(),
        "brute-force",
        options,
        proof=proof,
        bound=search.score.value if proof is Proof.OPTIMAL else 0.0,
        stats={"plans": search.measured, "complete": complete},
    )
