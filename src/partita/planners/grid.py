"""What a trainer's own configuration says, as a plan: what does my setup cost?"""

import logging
from collections.abc import Mapping

from partita.core.grid import Grid, plan_of_grid, precision_of
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError
from partita.planners.manual import plan_manual
from partita.planners.pipeline import solution_of
from partita.trainers.device_map import assignment_of

logger = logging.getLogger(__name__)
SHOWN = ("pp", "dp", "tp", "cp", "ep", "chunks", "cuts", "shard", "recompute", "microbatch_size")


def plan_grid(problem: Problem, *, grid: Grid | Mapping[str, str]) -> Solution:
    """Return the plan of a grid, or of a device map.

    Args:
        problem: The problem; what the grid does not say (replicas, cuts, batch) follows from it.
        grid: A grid, or devices by module.

    Raises:
        InfeasibleError: It does not fit the model, the cluster or a memory.
        InvalidInputError: Its degrees do not fit the step.
    """
    if isinstance(grid, Mapping):
        return plan_manual(problem, assignment=assignment_of(problem, grid))
    if not isinstance(grid, Grid):
        raise InvalidInputError("planner 'grid' needs a file: grid:train.sh")
    priced = precision_of(problem)
    if grid.precision and priced and grid.precision != priced:
        logger.warning(
            "the configuration trains in %s, the costs are those of %s: --precision %s prices it",
            grid.precision,
            priced,
            grid.precision,
        )
    plan = plan_of_grid(problem, grid)
    values = {name: getattr(grid, name) for name in SHOWN}
    values["cuts"] = list(grid.cuts)
    return solution_of(problem, plan, "grid", {"grid": values})
