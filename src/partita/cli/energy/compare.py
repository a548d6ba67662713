"""``partita energy compare``: frontiers, plans and clock plans side by side, by one accounting."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from partita.cli.console import print_json, progress, stdout_console, table
from partita.cli.energy.inputs import (
    EnergySource,
    read_clock_file,
    read_source,
    source_options,
    take_source_options,
    tries_option,
)
from partita.cli.options import FiniteRange, output_options
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
from partita.errors import FormatError
from partita.formats.perseus import read_frontier_csv
from partita.units import format_joules


@click.command(
    epilog="Example: partita energy compare profile.csv published.csv.gz freqs_pipeline_00000.py "
    "--microbatches 12 --blocking-power 83.64"
)
@click.argument("items", nargs=-1, required=True)
@source_options
@click.option("--points", type=click.IntRange(1, 2000), default=50, show_default=True)
@tries_option
@click.option(
    "--straggler", type=FiniteRange(1), default=1.2, show_default=True, help="T' / all-max."
)
@click.option(
    "--pipelines",
    type=click.IntRange(2),
    default=16,
    show_default=True,
    help="Pipelines that wait for the straggler.",
)
@output_options
def command(items: tuple[str, ...], **rest: Any) -> None:
    """Say what each of ITEMS saves against all clocks at their highest.

    An item is a plan, an energy profile or a frontier; or, after one of these, points that somebody
    claims (a CSV with time and energy, such as Perseus's iteration_time_energy.csv) or a clock plan
    (.py), which is played on the first. Savings with a straggler are those of all pipelines.
    """
    rest.pop("debug")
    options = take_source_options(rest)
    with progress("comparing", quiet=rest["quiet"] or rest["as_json"]) as tell:
        found = _compared(items, options, _solver(rest), tell)
    gains = [_gains(each, rest["straggler"], rest["pipelines"]) for each in found]
    if rest["as_json"]:
        figures = [_figures(each, gain) for each, gain in zip(found, gains, strict=True)]
        print_json({"items": figures})
        return
    console = stdout_console()
    rows = [_row(each, gain) for each, gain in zip(found, gains, strict=True)]
    console.print(table(_COLUMNS, rows))
    console.print(
        "saved against all clocks at their highest: in T_min, in the time of all-max, in T*, and "
        f"with a straggler {rest['straggler']:g} times as slow among {rest['pipelines']} pipelines"
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


def _compared(
    items: Sequence[str],
    options: dict[str, Any],
    solve: Callable[[EnergySource], Frontier],
    tell: Callable[[str], None],
) -> list[Compared]:
    found: list[Compared] = []
    base: EnergySource | None = None
    for item in items:
        tell(item)
        file = open_file(item)
        foreign = _is_clock_plan(item) or _is_points(file)
        if not foreign:
            source = read_source(file, options, alone=len(items) == 1)
            base = base or source
            found.append(_solved(source, solve))
        elif base is None:
            raise click.UsageError(
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


def _solver(rest: Mapping[str, Any]) -> Callable[[EnergySource], Frontier]:
    """Return what solves a source as the options say."""
    return lambda source: frontier_of(
        source.solution,
        source.profile,
        points=rest["points"],
        stragglers=(rest["straggler"],),
        tries=rest["tries"],
    )


def _solved(source: EnergySource, solve: Callable[[EnergySource], Frontier]) -> Compared:
    frontier = source.frontier or solve(source)
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


def _gains(each: Compared, straggler: float, pipelines: int) -> tuple[Savings, Savings]:
    return (
        savings(each.frontier),
        savings(each.frontier, straggler=straggler, pipelines=pipelines, waiting=each.waiting_w),
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
