"""A bound of Piper's objective that is found without a plan: an oracle for its planner."""

import math

import numpy as np

from partita.core.problem import Metric, Problem
from partita.errors import InfeasibleError
from partita.planners.piper.choices import Allowed, choices_of
from partita.planners.piper.planner import ROUNDED
from partita.planners.piper.pools import Pool, search_in
from partita.planners.piper.space import THOROUGH, space_of


def piper_bound(problem: Problem) -> tuple[float, str]:
    """Return what no plan of a problem is below by Piper's objective, and what says so.

    It is ``inf`` where no plan keeps the memory, and 0 where nothing is known: for other metrics,
    graphs without variants, and a number of microbatches that is left open.
    """
    given = problem.objective.microbatches is not None
    if problem.objective.metric is not Metric.PIPER or not len(problem.graph.variants) or not given:
        return 0.0, "none"
    try:
        choices = choices_of(problem, Allowed(), for_bound=True)
    except InfeasibleError:
        return math.inf, "no plan fits"
    everything = np.arange(len(problem.cluster))
    size = float(problem.limit_bytes.max())
    pool = Pool(devices=everything, size=size * ROUNDED[0])
    space = space_of(problem.graph, choices, pool.size, THOROUGH)
    search = search_in(problem, Allowed(), choices, space, pool)
    if not space.whole:
        return search.start()
    found = search.best()
    if not found.stages:
        return found.bound, "no plan fits"
    simple, term = search.start()
    return (found.bound, "search") if found.bound > simple else (simple, term)
