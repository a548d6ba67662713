"""A point of a frontier that keeps some limits, with its clocks."""

from dataclasses import dataclass
from typing import Any, TypeAlias

from partita.core.energy import Frontier
from partita.documents import OpenedFile, load
from partita.energy.frontier.choose import PointLimits, choose_point
from partita.energy.frontier.frontier import TRIES
from partita.energy.frontier.savings import (
    Played,
    model_of,
    played,
    sources_of,
    waiting_w,
    with_point_at,
)
from partita.errors import InvalidInputError
from partita.flows.energy.source import ORIGIN_WORDS, HasFrontier, claims, share
from partita.flows.results import Result
from partita.formats.perseus import write_clock_plan
from partita.requests import OnProgress, Request, declare, make, silent
from partita.units import format_joules

FrontierSource: TypeAlias = str | OpenedFile | Frontier | HasFrontier
"""A frontier: the path of its file, the file opened already, itself, or a result that has one."""


@dataclass(frozen=True, kw_only=True)
class ChooseRequest(Request):
    """A frontier, and the limits that the chosen point has to keep."""

    frontier: FrontierSource = declare(
        "", is_argument=True, help="Read the file that 'partita energy frontier -o' wrote."
    )
    slowdown: float | None = declare(None, help="Slower than all-max by at most: 0.02 = 2 %.")
    deadline: float | None = declare(None, help="Seconds that a step may take.")
    energy: float | None = declare(None, help="Joules that a step may use.")
    power: float | None = declare(None, help="Watts that all devices may draw on average.")
    straggler: float | None = declare(None, help="Seconds that somebody makes all steps take.")
    least_energy: bool = declare(False, help="Choose the point of least energy, T*.")
    tries: int = declare(
        TRIES,
        minimum=0,
        maximum=100_000_000,
        help="Search this long for better clocks where the gap to the bound is large.",
    )

    def limits(self) -> PointLimits:
        """Return the limits."""
        return PointLimits(
            least_energy=self.least_energy,
            slowdown=self.slowdown,
            deadline_s=self.deadline,
            energy_j=self.energy,
            power_w=self.power,
            straggler_s=self.straggler,
        )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ChosenClocks(Result):
    """A point of a frontier.

    Attributes:
        frontier: The frontier, with a point at the limit of time where there is one.
        point: The index of the chosen point in it.
        limits: What it keeps.
    """

    frontier: Frontier
    point: int
    limits: PointLimits

    @property
    def time_s(self) -> float:
        """Seconds of a step."""
        return float(self.frontier.time_s[self.point])

    @property
    def energy_j(self) -> float:
        """Joules of a step."""
        return float(self.frontier.energy_j[self.point])

    @property
    def waiting_j(self) -> float | None:
        """Joules of waiting for the straggler; None where nobody waits or no power is known."""
        until_s = self.limits.straggler_s
        if until_s is None or until_s <= self.time_s or self.frontier.profile is None:
            return None
        return waiting_w(self.frontier) * (until_s - self.time_s)

    def step(self) -> Played:
        """Return a step with these clocks, simulated."""
        return played(model_of(*sources_of(self.frontier)), self.frontier.clocks(self.point))

    def clock_plan(self, *, named: bool = True) -> str:
        """Return the clocks as a plan that Zeus reads, and without names Perseus's artifact."""
        model, clocks = model_of(*sources_of(self.frontier)), self.frontier.clocks(self.point)
        step = played(model, clocks)
        comment = claims(step.time_s, step.energy_j, self.frontier.origin)
        return write_clock_plan(model.program, clocks, named=named, comment=comment)

    def to_json(self) -> dict[str, Any]:
        """Return the point and what it is measured against as JSON values."""
        frontier = self.frontier
        return {
            "point": self.point,
            "points": len(frontier),
            "time_s": self.time_s,
            "energy_j": self.energy_j,
            "power_w": self.energy_j / self.time_s,
            "bound_j": float(frontier.bound_j[self.point]),
            "gap": float(frontier.gap[self.point]),
            "all_max_s": frontier.all_max_s,
            "all_max_j": frontier.all_max_j,
            "waiting_j": self.waiting_j,
            "origin": frontier.origin.value,
        }

    def lines(self) -> list[str]:
        """Return the point in one line, and in a second one what waiting for a straggler takes."""
        frontier, point = self.frontier, self.point
        beats = ", faster and cheaper than all-max" if point in frontier.better_than_all_max else ""
        lines = [
            f"point {point} of {len(frontier)}: step {self.time_s:.5g} s "
            f"({100 * (self.time_s / frontier.all_max_s - 1):+.2f} %), "
            f"{format_joules(self.energy_j)} "
            f"({share(self.energy_j / frontier.all_max_j - 1)} against all-max{beats}) · "
            f"gap to bound {100 * float(frontier.gap[point]):.2f} % · "
            f"{ORIGIN_WORDS[frontier.origin]}"
        ]
        if self.waiting_j is not None:
            lines.append(
                f"waiting for the straggler until {self.limits.straggler_s:.5g} s: "
                f"{format_joules(self.waiting_j)} more"
            )
        return lines


def choose_clocks(
    frontier: FrontierSource,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of ChooseRequest)
) -> ChosenClocks:
    """Choose the point of a frontier that keeps some limits; without any the fastest.

    Within limits of time the cheapest point is taken, solved for where the frontier has none at the
    limit; within limits of energy and power the fastest of its points.

    Args:
        frontier: A frontier, a result that has one, or the path of a file that holds one.
        on_progress: Called with each step.
        **options: The fields of :class:`ChooseRequest`: options of ``partita energy choose``.

    Raises:
        InvalidInputError: The file holds something else, or a limit is no number >= 0.
        InfeasibleError: No point keeps the limits.
    """
    return choose_request(make(ChooseRequest, frontier=frontier, **options), on_progress)


def choose_request(request: ChooseRequest, on_progress: OnProgress = silent) -> ChosenClocks:
    """Choose the point that a request asks for; see :func:`choose_clocks`."""
    frontier, limits = _read_frontier(request.frontier), request.limits()
    limit_s = _time_limit(frontier, limits)
    if limit_s is not None:
        on_progress(f"the point at {limit_s:.5g} s")
        frontier = with_point_at(frontier, limit_s, tries=request.tries)
    return ChosenClocks(frontier=frontier, point=choose_point(frontier, limits), limits=limits)


def _read_frontier(source: FrontierSource) -> Frontier:
    if isinstance(source, Frontier):
        return source
    if isinstance(source, str):
        found, name = load(source), source
    elif isinstance(source, OpenedFile):
        found, name = source.load(), source.name
    else:
        return source.frontier
    if not isinstance(found, Frontier):
        raise InvalidInputError(
            f"{name!r} holds a {type(found).__name__.lower()}, not a frontier; make one with "
            "'partita energy frontier -o'"
        )
    return found


def _time_limit(frontier: Frontier, limits: PointLimits) -> float | None:
    """Return the seconds that a step may take; None where nothing limits it."""
    times = [limit for limit in (limits.deadline_s, limits.straggler_s) if limit is not None]
    if limits.slowdown is not None:
        times.append(frontier.all_max_s * (1 + limits.slowdown))
    return min(times, default=None)
