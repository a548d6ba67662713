"""The time-energy frontier of a plan or a profile, and what it saves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partita.core.energy import Frontier
from partita.energy.frontier.savings import Savings, frontier_figures, frontier_of, savings
from partita.flows.energy.source import (
    ORIGIN_WORDS,
    EnergySource,
    EnergySourceFields,
    SearchFields,
    Source,
    StragglerFields,
    read_source,
    share,
    source_words,
)
from partita.flows.results import Result
from partita.flows.summary import describe_plan
from partita.requests import OnProgress, declare, make, part, silent
from partita.units import format_joules


@dataclass(frozen=True, kw_only=True)
class FrontierRequest(EnergySourceFields, SearchFields, StragglerFields):
    """A plan or a profile whose time-energy frontier is wanted."""

    source: Source = declare("", is_argument=True, help="A plan, or an energy profile.")
    at: tuple[float, ...] = declare(
        (),
        above=0,
        help="A further time in seconds, between the fastest step and T*; several times.",
    )
    to_slowest: bool = declare(False, help="Go on beyond the least energy.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FrontierResult(Result):
    """A frontier with what it saves.

    Attributes:
        source: The plan and the profile that it is of.
        frontier: The frontier: what is saved to a file.
        savings: Without a straggler, and with one.
    """

    source: EnergySource
    frontier: Frontier
    savings: tuple[Savings, Savings]

    def to_json(self) -> dict[str, Any]:
        """Return the frontier and its savings as JSON values."""
        return {
            "source": self.source.name,
            "plan": describe_plan(self.source.solution.plan),
            **frontier_figures(self.frontier),
            "savings": [each.to_json() for each in self.savings],
            "assumed": list(self.source.assumed),
        }

    def lines(self) -> list[str]:
        """Return the frontier in three lines: what it is of, what is saved at once, and at T*."""
        words = (
            f"{describe_plan(self.source.solution.plan)} on {len(self.frontier.devices)} devices"
        )
        origin = ORIGIN_WORDS[self.frontier.origin]
        return [f"{self.source.name} · {words} · {origin}", *headlines(self.frontier)]

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each point."""
        columns = zip(
            self.frontier.time_s.tolist(),
            self.frontier.energy_j.tolist(),
            self.frontier.bound_j.tolist(),
            strict=True,
        )
        return [{"step (s)": t, "energy (J)": e, "bound (J)": b} for t, e, b in columns]


def frontier(
    source: Source,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of FrontierRequest)
) -> FrontierResult:
    """Find the least energy for every time of a step of a plan, or of a profile's stages.

    Args:
        source: A plan, an energy profile or a frontier, or the path of a file that holds one.
        on_progress: Called with each step.
        **options: The fields of :class:`FrontierRequest`: options of ``partita energy frontier``.

    Raises:
        InvalidInputError: The file holds something else, or an option does not apply to it.
    """
    return frontier_request(make(FrontierRequest, source=source, **options), on_progress)


def frontier_request(request: FrontierRequest, on_progress: OnProgress = silent) -> FrontierResult:
    """Find the frontier that a request asks for; see :func:`frontier`."""
    on_progress(f"reading {source_words(request.source)}")
    found = read_source(request.source, part(EnergySourceFields, request))
    on_progress(f"{found.name}: {describe_plan(found.solution.plan)}")
    solved = frontier_of(
        found.solution,
        found.profile,
        points=request.points,
        to_slowest=request.to_slowest,
        at=request.at,
        stragglers=(request.straggler,),
        tries=request.tries,
    )
    gains = (
        savings(solved),
        savings(solved, straggler=request.straggler, pipelines=request.pipelines),
    )
    return FrontierResult(source=found, frontier=solved, savings=gains)


def headlines(frontier: Frontier) -> list[str]:
    """Return a frontier in two lines: what is saved at once, and at T*."""
    base = savings(frontier)
    best = float(frontier.energy_j.min())
    at_once = f"{format_joules(frontier.all_max_j)} -> {format_joules(base.energy_j)}"
    return [
        f"T_min {frontier.fastest_s:.5g} s  all-max {at_once} ({share(-base.saving)}, no slowdown)",
        f"T* {frontier.best_s:.5g} s  {format_joules(best)} "
        f"({share(best / frontier.all_max_j - 1)})  "
        f"gap to bound {100 * float(frontier.gap.max()):.2f} %",
    ]
