"""m-SCT: small communication times, with favourite children, under memory limits.

Hanen and Munier, "An approximation algorithm for scheduling dependent tasks on m processors with
small communication delays", 1995, with memory by Jeon et al., "Baechi", SoCC 2020. A linear program
chooses for each op at most one reader that should follow it on its device (see ``favourites``);
then ops are scheduled as by m-ETF, but a device whose last op has a ready favourite child waits for
that child, unless another op is urgent (see ``list_schedule``). The program dominates the time:
O(edges) rows and columns, sparse, dual simplex.

Departures from the released code (in the room ``released``), besides those of m-ETF: HiGHS solves
the program, without the rows that follow from others; the favourites are a matching; and they are
tried with several ranks of the ready ops. The program has many optima. With the HiGHS of SciPy 1.17
and the recorded order of the rows the favourites are those recorded with HiGHS's dual simplex;
those of other solvers are other optima of the same program.
"""

from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.planners.baechi.favourites import check_threshold, lp_favourites
from partita.planners.baechi.fill import fastest_first
from partita.planners.baechi.fit import fitted
from partita.planners.baechi.list_schedule import event_schedule
from partita.planners.baechi.m_etf import complete, frugal_schedules
from partita.planners.baechi.placement import best_solution, read_instance
from partita.planners.baechi.replay import upward_rank

PLANNER = "m-sct"


def plan_m_sct(
    problem: Problem,
    *,
    threshold: float = 0.5,
    channels: str | None = None,
    memory: str | None = None,
) -> Solution:
    """Keep ops next to their favourite children, and schedule them as early as possible.

    Args:
        problem: The problem.
        threshold: Largest value of an edge in the linear program that makes a favourite child, 0 to
            1; the PyTorch version has 0.5, the TensorFlow version 0.1.
        channels: ``"parallel"`` or ``"sequential"``; ``None`` = as the metric has it.
        memory: Whose rule counts, ``"baechi"`` or ``"ours"``; ``None`` = the metric's.

    Raises:
        InfeasibleError: Nothing fits.
        InvalidInputError: The threshold is not one.
    """
    check_threshold(threshold)
    g = read_instance(problem, channels, memory)
    options = {"threshold": threshold, "channels": channels, "memory": memory}
    favourite = lp_favourites(g, threshold)
    stats = {"favourites": int((favourite >= 0).sum())}
    visit = fastest_first(g)
    candidates = complete(
        event_schedule(g, favourite=favourite, visit=visit, rank=rank)
        for rank in (None, -upward_rank(g))
    )
    candidates = candidates or complete(frugal_schedules(g)) or fitted(problem, g, PLANNER)
    return best_solution(problem, candidates, PLANNER, options, stats=stats)
