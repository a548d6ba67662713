"""m-TOPO: fill one device after the other along a topological order.

Jeon et al., "Baechi: Fast Device Placement of Machine Learning Graphs", SoCC 2020. With ``cap``
the devices are filled evenly, to about

    cap = total kept / devices + largest kept

else up to their memory. O(edges x devices), times the tries for the cap.

Departures from the released code (in the room ``released``): the cap is the smallest share of the
devices' memory that holds everything without going back, instead of a sum that is compared with
another quantity and fails on graphs that fit; the memory of the devices counts with a cap, too; an
op that fits none of the devices left goes to any that has room; and the order follows the data even
where the numbers of the ops do not. Ops that fit nowhere are repaired (see ``fit``).
"""

from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.planners.baechi.fill import balanced_fill, fastest_first, fill_devices
from partita.planners.baechi.placement import best_solution, placed, read_instance

PLANNER = "m-topo"


def plan_m_topo(
    problem: Problem,
    *,
    cap: bool = True,
    channels: str | None = None,
    memory: str | None = None,
) -> Solution:
    """Fill the devices one after the other along a topological order.

    Args:
        problem: The problem.
        cap: Whether to fill all devices evenly; else each up to its memory.
        channels: ``"parallel"`` or ``"sequential"``; ``None`` = as the metric has it.
        memory: Whose rule counts, ``"baechi"`` or ``"ours"``; ``None`` = the metric's.

    Raises:
        InfeasibleError: Nothing fits.
    """
    g = read_instance(problem, channels, memory)
    options = {"cap": cap, "channels": channels, "memory": memory}
    if cap:
        found = balanced_fill(g, g.topological)
    else:
        found = fill_devices(g, g.topological, g.limit, visit=fastest_first(g))
    if found.complete:
        candidates = [placed(found)]
    else:
        from partita.planners.baechi.fit import fitted  # noqa: PLC0415 (where ops are left over)

        candidates = fitted(problem, g, PLANNER)
    return best_solution(problem, candidates, PLANNER, options)
