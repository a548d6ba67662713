"""``partita energy compare``: frontiers, plans and clock plans side by side, by one accounting."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from partita.cli.console import print_json, progress, stdout_console, table
from partita.cli.from_request import takes
from partita.cli.options import output_options
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
from partita.flows.energy import (
    EnergySource,
    EnergySourceFields,
    SearchFields,
    StragglerFields,
    read_clock_file,
    read_source,
)
from partita.formats.perseus import read_frontier_csv
from partita.requests import OnProgress, declare, part
from partita.units import format_joules


@dataclass(frozen=True, kw_only=True)
class CompareRequest(EnergySourceFields, SearchFields, StragglerFields):
    """Plans, profiles, frontiers and clocks that are set side by side."""

    items: tuple[str, ...] = declare(
        (), is_argument=True, is_required=True, help="Files to compare."
    )


@click.command(
    epilog="Example: partita energy compare profile.csv published.csv.gz freqs_pipeline_00000.py "
    "--microbatches 12 --blocking-power 83.64"
)
@takes(CompareRequest)
@output_options
def command(request: CompareRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """Say what each of ITEMS saves against all clocks at their highest.

    An item is a plan, an energy profile or a frontier; or, after one of these, points that somebody
    claims (a CSV with time and energy, such as Perseus's iteration_time_energy.csv) or a clock plan
    (.py), which is played on the first. Savings with a straggler are those of all pipelines.
    """
    del debug  # read by main
    with progress("comparing", quiet=quiet or as_json) as on_progress:
        found = _compared(request, on_progress)
    gains = [_gains(each, request) for each in found]
    if as_json:
        figures = [_figures(each, gain) for each, gain in zip(found, gains, strict=True)]
        print_json({"items": figures})
        return
    console = stdout_console()
    rows = [_row(each, gain) for each, gain in zip(found, gains, strict=True)]
    console.print(table(_COLUMNS, rows))
    console.print(
        "saved against all clocks at their highest: in T_min, in the time of all-max, in T*, and "
        f"with a straggler {request.straggler:g} times as slow among {request.pipelines} pipelines"
    )
    for line in dict.fromkeys(line for each in found for line in each.assumed):
        console.print(f"assumed: {line}", style="dim")


@dataclass(frozen=True, kw_only=True, eq=False)
class Compared:
    """One of several.

    Attributes:
        name: What it is called.
        what: Solved here, claimed by a file, or one clock plan; and whether it is modelled.
        frontier: Its points.
        waiting_w: Power of a whole pipeline that waits.
        is_bounded: Whether its gap to a bound is known.
        assumed: What was assumed, a sentence each.
    """

    name: str
    what: str
    frontier: Frontier
    waiting_w: float
    is_bounded: bool
    assumed: tuple[str, ...] = ()


def _compared(request: CompareRequest, on_progress: OnProgress) -> list[Compared]:
    found: list[Compared] = []
    base: EnergySource | None = None
    for item in request.items:
        on_progress(item)
        file = open_file(item)
        foreign = _is_clock_plan(item) or _is_points(file)
        if not foreign:
            fields = part(EnergySourceFields, request)
            source = read_source(file, fields, alone=len(request.items) == 1)
            base = base or source
            found.append(_solved(source, request))
        elif base is None:
            raise InvalidInputError(
                f"{item} says nothing of all-max; name a plan, a profile or a frontier before it"
            )
        else:
            found.append(_foreign(file, base, found[0]))
    return found


def _is_clock_plan(item: str) -> bool:
    return Path(item).suffix.lower() == ".py"


def _is_points(file: OpenedFile) -> bool:
    try:
        return file.format == "perseus-frontier"
    except FormatError:
        return False


def _solved(source: EnergySource, request: CompareRequest) -> Compared:
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
        assumed=source.assumed,
    )


def _labelled(what: str, origin: EnergyOrigin) -> str:
    return f"{what}, modelled" if origin is EnergyOrigin.MODELLED else what


def _foreign(file: OpenedFile, base: EnergySource, first: Compared) -> Compared:
    item = file.name
    name = Path(item).name.removesuffix(".gz").rpartition(".")[0]
    if _is_clock_plan(item):
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
    return Compared(
        name=name,
        what=what,
        frontier=claimed_frontier(times, joules, first.frontier),
        waiting_w=first.waiting_w,
        is_bounded=False,
    )


def _gains(each: Compared, request: StragglerFields) -> tuple[Savings, Savings]:
    slow = {"straggler": request.straggler, "pipelines": request.pipelines}
    return (
        savings(each.frontier),
        savings(each.frontier, waiting=each.waiting_w, **slow),  # type: ignore[arg-type]
    )


_COLUMNS = (
    *(("", "left"), ("what", "left"), ("T_min", "right"), ("energy", "right")),
    *(("saved", "right"), ("in all-max", "right"), ("T*", "right"), ("at T*", "right")),
    *(("straggler", "right"), ("gap", "right")),
)


def _row(each: Compared, gains: tuple[Savings, Savings]) -> list[str]:
    frontier = each.frontier
    return [
        each.name,
        each.what,
        f"{float(frontier.time_s[0]):.5g} s",
        format_joules(float(frontier.energy_j[0])),
        _saved(1 - float(frontier.energy_j[0]) / frontier.all_max_j),
        _saved(gains[0].saving) if _in_time(frontier) else "-",
        f"{frontier.best_s:.5g} s",
        _saved(1 - float(frontier.energy_j.min()) / frontier.all_max_j),
        _saved(gains[1].saving),
        f"{100 * float(frontier.gap.max()):.2f} %" if each.is_bounded else "-",
    ]


def _in_time(frontier: Frontier) -> bool:
    """Return whether a point is no slower than all clocks at their highest."""
    return float(frontier.time_s[0]) <= frontier.all_max_s * (1 + TIE)


def _saved(value: float) -> str:
    return f"{100 * value:.2f} %"


def _figures(each: Compared, gains: tuple[Savings, Savings]) -> dict[str, Any]:
    frontier = each.frontier
    return {
        "name": each.name,
        "what": each.what,
        "origin": frontier.origin.value,
        "points": len(frontier),
        "all_max_s": frontier.all_max_s,
        "all_max_j": frontier.all_max_j,
        "fastest_s": float(frontier.time_s[0]),
        "fastest_j": float(frontier.energy_j[0]),
        "best_s": frontier.best_s,
        "best_j": float(frontier.energy_j.min()),
        "gap": float(frontier.gap.max()) if each.is_bounded else None,
        "savings": [gain.to_json() for gain in gains],
        "assumed": list(each.assumed),
    }
