"""Frontiers, plans and clock plans side by side, by one accounting."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from partita.core.energy import TIE, EnergyOrigin, Frontier
from partita.documents import OpenedFile, open_file
from partita.energy.frontier.savings import (
    Savings,
    claimed_frontier,
    frontier_of,
    model_of,
    planned_clocks,
    played,
    savings,
    waiting_w,
)
from partita.errors import FormatError, InvalidInputError
from partita.flows.energy.source import (
    EnergySource,
    EnergySourceFields,
    SearchFields,
    Source,
    StragglerFields,
    read_clock_file,
    read_source,
    source_words,
)
from partita.flows.results import Result
from partita.formats.perseus import read_frontier_csv
from partita.requests import OnProgress, declare, make, part, silent
from partita.units import format_joules


@dataclass(frozen=True, kw_only=True)
class CompareEnergyRequest(EnergySourceFields, SearchFields, StragglerFields):
    """Plans, profiles, frontiers and clocks that are set side by side."""

    items: tuple[Source, ...] = declare(
        (), is_argument=True, is_required=True, help="Files to compare."
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Compared:
    """One of several.

    Attributes:
        name: What it is called.
        what: Solved here, claimed by a file, or one clock plan; and whether it is modelled.
        frontier: Its points.
        waiting_w: Power of a whole pipeline that waits.
        is_bounded: Whether its gap to a bound is known.
        savings: What it saves without a straggler, and with one.
        assumed: What was assumed, a sentence each.
    """

    name: str
    what: str
    frontier: Frontier
    waiting_w: float
    is_bounded: bool
    savings: tuple[Savings, Savings]
    assumed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return its best points and what they save as JSON values."""
        frontier = self.frontier
        return {
            "name": self.name,
            "what": self.what,
            "origin": frontier.origin.value,
            "points": len(frontier),
            "all_max_s": frontier.all_max_s,
            "all_max_j": frontier.all_max_j,
            "fastest_s": float(frontier.time_s[0]),
            "fastest_j": float(frontier.energy_j[0]),
            "best_s": frontier.best_s,
            "best_j": float(frontier.energy_j.min()),
            "gap": float(frontier.gap.max()) if self.is_bounded else None,
            "savings": [gain.to_json() for gain in self.savings],
            "assumed": list(self.assumed),
        }

    def row(self) -> Mapping[str, object]:
        """Return its row of the table."""
        frontier = self.frontier
        # Without a point that is no slower than all clocks at their highest there is no saving in
        # the time of these.
        in_time = float(frontier.time_s[0]) <= frontier.all_max_s * (1 + TIE)
        return {
            "": self.name,
            "what": self.what,
            "T_min": f"{float(frontier.time_s[0]):.5g} s",
            "energy": format_joules(float(frontier.energy_j[0])),
            "saved": _saved(1 - float(frontier.energy_j[0]) / frontier.all_max_j),
            "in all-max": _saved(self.savings[0].saving) if in_time else "-",
            "T*": f"{frontier.best_s:.5g} s",
            "at T*": _saved(1 - float(frontier.energy_j.min()) / frontier.all_max_j),
            "straggler": _saved(self.savings[1].saving),
            "gap": f"{100 * float(frontier.gap.max()):.2f} %" if self.is_bounded else "-",
        }


def _saved(value: float) -> str:
    return f"{100 * value:.2f} %"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EnergyComparison(Result):
    """Several frontiers, plans and clock plans by one accounting.

    Attributes:
        items: Each with what it saves, in the order in which they were given.
    """

    items: tuple[Compared, ...]

    @property
    def assumed(self) -> tuple[str, ...]:
        """What was assumed of any, each sentence once."""
        return tuple(dict.fromkeys(line for each in self.items for line in each.assumed))

    def to_json(self) -> dict[str, Any]:
        """Return all as JSON values."""
        return {"items": [each.to_json() for each in self.items]}

    def lines(self) -> list[str]:
        """Return what the columns of the table say."""
        slow = self.items[0].savings[1]
        return [
            "saved against all clocks at their highest: in T_min, in the time of all-max, in T*, "
            f"and with a straggler {slow.straggler:g} times as slow among {slow.pipelines} "
            "pipelines"
        ]

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each."""
        return [each.row() for each in self.items]


def compare_energy(
    *items: Source,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of CompareEnergyRequest)
) -> EnergyComparison:
    """Say what each of some plans, profiles, frontiers and clocks saves against full clocks.

    Args:
        *items: Plans, energy profiles and frontiers, or the paths of their files; after one of
            these, paths of points that somebody claims, or of clock plans.
        on_progress: Called with each step.
        **options: The fields of :class:`CompareEnergyRequest`: options of ``partita energy
            compare``.

    Raises:
        InvalidInputError: There is nothing to compare, a file holds something else, or claims come
            before a plan, a profile or a frontier.
    """
    return compare_energy_request(make(CompareEnergyRequest, items=items, **options), on_progress)


def compare_energy_request(
    request: CompareEnergyRequest, on_progress: OnProgress = silent
) -> EnergyComparison:
    """Compare what a request names; see :func:`compare_energy`."""
    found: list[Compared] = []
    base: EnergySource | None = None
    if not request.items:
        raise InvalidInputError("there is nothing to compare; name a plan, a profile or a frontier")
    for item in request.items:
        on_progress(source_words(item))
        source = open_file(item) if isinstance(item, str) else item
        if not isinstance(source, OpenedFile) or not (_is_clock_plan(source) or _is_points(source)):
            fields = part(EnergySourceFields, request)
            read = read_source(source, fields, alone=len(request.items) == 1)
            base = base or read
            found.append(_solved(read, request))
        elif base is None:
            raise InvalidInputError(
                f"{source.name} says nothing of all-max; name a plan, a profile or a frontier "
                "before it"
            )
        else:
            found.append(_foreign(source, base, found[0], request))
    return EnergyComparison(items=tuple(found))


def _is_clock_plan(file: OpenedFile) -> bool:
    return Path(file.name).suffix.lower() == ".py"


def _is_points(file: OpenedFile) -> bool:
    try:
        return file.format == "perseus-frontier"
    except FormatError:
        return False


def _solved(source: EnergySource, request: CompareEnergyRequest) -> Compared:
    frontier = source.frontier or frontier_of(
        source.solution,
        source.profile,
        points=request.points,
        stragglers=(request.straggler,),
        tries=request.tries,
    )
    return Compared(
        name=source.name,
        what=_labelled("solved", frontier.origin),
        frontier=frontier,
        waiting_w=waiting_w(frontier),
        is_bounded=True,
        savings=_gains(frontier, waiting_w(frontier), request),
        assumed=source.assumed,
    )


def _labelled(what: str, origin: EnergyOrigin) -> str:
    return f"{what}, modelled" if origin is EnergyOrigin.MODELLED else what


def _foreign(
    file: OpenedFile, base: EnergySource, first: Compared, request: StragglerFields
) -> Compared:
    item = file.name
    name = Path(item).name.removesuffix(".gz").rpartition(".")[0]
    if _is_clock_plan(file):
        model = model_of(base.solution, base.profile)
        step = played(model, planned_clocks(model.program, read_clock_file(file).entries))
        times, joules = np.array([step.time_s]), np.array([step.energy_j])
        what = _labelled("clock plan", base.profile.origin)
    else:
        try:
            times, joules = read_frontier_csv(file.text)
        except FormatError as exc:
            raise exc.at(item) from exc
        what = "claimed"
    frontier = claimed_frontier(times, joules, first.frontier)
    return Compared(
        name=name,
        what=what,
        frontier=frontier,
        waiting_w=first.waiting_w,
        is_bounded=False,
        savings=_gains(frontier, first.waiting_w, request),
    )


def _gains(frontier: Frontier, waiting: float, request: StragglerFields) -> tuple[Savings, Savings]:
    return (
        savings(frontier),
        savings(
            frontier, straggler=request.straggler, pipelines=request.pipelines, waiting=waiting
        ),
    )
