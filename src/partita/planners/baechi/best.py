"""The best placement within limits: Baechi's planners and fills, then local search.

The portfolio: m-ETF with all its ranks and, where ops are stranded, with prices for copies, m-SCT
with greedy favourites and, where the graph is small enough, with those of the linear program, fills
along two orders, and, where nothing of this fits, what ``fit`` finds. The distinct ones with the
shortest makespans are where ``improve`` begins. Makespan by the problem's channels, under Baechi's
memory rule; where nothing fits, ``fit`` says why.
"""

from collections.abc import Iterator

from partita.bounds import lower_bound
from partita.core.problem import Problem
from partita.core.solution import Proof, Solution
from partita.planners.baechi.favourites import (
    greedy_favourites,
    lp_favourites,
    overwriting_favourites,
)
from partita.planners.baechi.fill import (
    balanced_fill,
    depth_first,
    fastest_first,
    fill_devices,
)
from partita.planners.baechi.fit import fitted
from partita.planners.baechi.improve import anneal_placements
from partita.planners.baechi.instance import Instance, MemoryRule, default_channels, instance_of
from partita.planners.baechi.list_schedule import Schedule, event_schedule
from partita.planners.baechi.m_etf import complete, etf_schedules, frugal_schedules
from partita.planners.baechi.placement import Placed, best_solution
from partita.planners.baechi.replay import upward_rank
from partita.planners.effort import Effort, SearchTrace

PLANNER = "placement"
_STARTS = 4
_WORTH_IMPROVING = 1.3
"""Starts that are more than this above the best one are left out."""
_SHARE = 0.6
"""Share of the time that is left for the local search."""
_STEPS, _FEWEST_MOVES, _MOST_MOVES = 6e7, 1_000, 100_000
_SURE = 3
"""Further starts of small graphs that are made however long they take: m-SCT both ways."""
_MOST_EDGES = 4_000
"""Edges up to which the linear program takes a small part of a second."""


def best_placement(
    problem: Problem,
    *,
    time_limit: float | None = None,
    iterations: int | None = None,
    seed: int = 0,
    trace: SearchTrace | None = None,
) -> Solution:
    """Return the best placement of single ops that a portfolio and local search find.

    Args:
        problem: The problem.
        time_limit: Seconds; not all ways to place are tried where they take longer.
        iterations: Moves to try in the local search, for the same result every time. Where neither
            is given, a number of them that takes a second or so.
        seed: Of the random numbers.
        trace: Where the best values are recorded.

    Raises:
        InfeasibleError: Nothing fits.
    """
    g = instance_of(problem, default_channels(problem), MemoryRule.BAECHI)
    if time_limit is None and iterations is None:
        iterations = int(min(_MOST_MOVES, max(_FEWEST_MOVES, _STEPS / (g.num_ops + len(g.pred)))))
    effort = Effort(iterations=iterations, time_limit=time_limit, seed=seed, trace=trace)
    starts = _starts(g, effort)
    starts = _distinct(starts or fitted(problem, g, PLANNER))[:_STARTS]
    effort.goal = lower_bound(problem)
    best = anneal_placements(problem, g, starts, effort)
    options = {"iterations": iterations, "time_limit": time_limit, "seed": seed}
    return best_solution(
        problem,
        [best, *starts],
        PLANNER,
        options,
        proof=Proof.OPTIMAL if effort.reached(best.makespan) else Proof.FEASIBLE,
        stats={"moves": effort.spent, "starts": len(starts)},
    )


def _starts(g: Instance, effort: Effort) -> list[Placed]:
    """Return the complete placements of the portfolio; the first are asked for in any case."""
    schedules = [event_schedule(g), *etf_schedules(g)]
    starts = complete(schedules)
    for number, schedule in enumerate(_further(g, stranded=len(starts) < len(schedules))):
        starts += complete([schedule])
        late = effort.left_s < _SHARE * (effort.time_limit or 0.0)
        if starts and late and (number >= _SURE or len(g.succ) > _MOST_EDGES):
            break
    return starts


def _further(g: Instance, *, stranded: bool) -> Iterator[Schedule]:
    """Yield schedules of the other ways to place; some may have stranded ops."""
    if stranded:
        yield from frugal_schedules(g)
    rank, visit = upward_rank(g), fastest_first(g)
    chosen = [greedy_favourites(g, rank)]
    if len(g.succ) <= _MOST_EDGES:
        chosen += [overwriting_favourites(g, 0.5), lp_favourites(g, 0.1)]
    for favourite in chosen:
        yield event_schedule(g, favourite=favourite, visit=visit)
        yield event_schedule(g, favourite=favourite, visit=visit, rank=-rank)
    for sequence in (g.topological, depth_first(g)):
        yield fill_devices(g, sequence, g.limit, visit=visit)
        yield balanced_fill(g, sequence)


def _distinct(found: list[Placed]) -> list[Placed]:
    """Return the placements by makespan, one of each value, without hopeless ones."""
    result: list[Placed] = []
    for item in sorted(found, key=lambda item: item.makespan):
        if result and item.makespan > result[0].makespan * _WORTH_IMPROVING:
            break
        if not result or item.makespan > result[-1].makespan * (1 + 1e-9):
            result.append(item)
    return result
