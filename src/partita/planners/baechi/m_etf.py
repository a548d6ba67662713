"""m-ETF: earliest task first, under memory limits.

Hwang et al., "Scheduling precedence graphs in systems with interprocessor communication times",
SIAM J. Comput. 1989, with memory by Jeon et al., "Baechi", SoCC 2020. From event to event, every
idle device takes a ready op whose inputs have arrived and that fits (see ``list_schedule``).
O(ops x ready ops x devices + edges x devices).

Departures from the released code (in the room ``released``): ready ops are ranked not only first
come, first served, but also by the longest path behind them, with and without transfers, and by the
memory they need; and each in turn goes where it ends first. The best of these schedules counts. Ops
without duration end, exact fits fit, idle devices choose the fastest first and not by number, and a
device holds a tensor once where the metric allows that. Where ops are stranded, copied bytes get a
price in seconds; if that does not do, they are repaired, or it is proven that nothing fits (see
``fit``).
"""

from collections.abc import Iterable, Iterator

from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.planners.baechi.fill import by_rank, fastest_first
from partita.planners.baechi.instance import Instance
from partita.planners.baechi.list_schedule import Schedule, event_schedule, plain_schedule
from partita.planners.baechi.placement import Placed, best_solution, placed, read_instance
from partita.planners.baechi.replay import least_seconds, upward_rank

PLANNER = "m-etf"
_COPY_PRICES = (1.0, 4.0, 16.0, 64.0, 1e6)
"""What copies that fill a device count like, in shares of the time that all ops take."""


def plan_m_etf(
    problem: Problem,
    *,
    channels: str | None = None,
    memory: str | None = None,
) -> Solution:
    """Let every idle device take the op that can start first.

    Args:
        problem: The problem.
        channels: ``"parallel"`` or ``"sequential"``; ``None`` = as the metric has it.
        memory: Whose rule counts, ``"baechi"`` or ``"ours"``; ``None`` = the metric's.

    Raises:
        InfeasibleError: Nothing fits.
    """
    g = read_instance(problem, channels, memory)
    options = {"channels": channels, "memory": memory}
    candidates = complete(etf_schedules(g)) or complete(frugal_schedules(g))
    if not candidates:
        from partita.planners.baechi.fit import fitted  # noqa: PLC0415 (where ops are left over)

        candidates = fitted(problem, g, PLANNER)
    return best_solution(problem, candidates, PLANNER, options)


def complete(schedules: Iterable[Schedule]) -> list[Placed]:
    """Return the schedules that place every op, as placements."""
    return [placed(schedule) for schedule in schedules if schedule.complete]


def etf_schedules(g: Instance) -> Iterator[Schedule]:
    """Yield the schedules of all ranks."""
    visit = fastest_first(g)
    far, near = upward_rank(g), upward_rank(g, transfers=0.0)
    yield event_schedule(g, visit=visit)
    yield event_schedule(g, visit=visit, rank=-far)
    yield event_schedule(g, visit=visit, rank=-near)
    yield event_schedule(g, visit=visit, rank=-g.kept)
    yield plain_schedule(g, by_rank(g, far))
    yield plain_schedule(g, by_rank(g, near))


def frugal_schedules(g: Instance) -> Iterator[Schedule]:
    """Yield schedules in which a copied byte counts like some time, for tight memory.

    List scheduling spreads readers, every one with copies of what it reads, until nothing has room.
    """
    unit = float(least_seconds(g).sum()) / g.num_devices / float(g.limit.min())
    sequences = (
        by_rank(g, upward_rank(g)),
        by_rank(g, upward_rank(g, transfers=0.0)),
        g.topological,
    )
    for share in _COPY_PRICES:
        for sequence in sequences:
            yield plain_schedule(g, sequence, price=unit * share)
