"""``partita energy frontier``: time against energy of a plan, or of a profile's stages."""

import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

from partita.cli.console import (
    print_json,
    progress,
    stdout_console,
    table,
    terminal_width,
)
from partita.cli.energy.inputs import (
    ORIGIN_WORDS,
    EnergySource,
    claims,
    read_source,
    source_options,
    take_source_options,
    tries_option,
)
from partita.cli.options import FiniteRange, output_options
from partita.core.energy import Frontier
from partita.documents import save, write_bytes, write_text
from partita.energy.frontier.savings import (
    Savings,
    frontier_figures,
    frontier_of,
    model_of,
    savings,
)
from partita.errors import InvalidInputError
from partita.flows.summary import describe_plan
from partita.formats.perseus import write_clock_plan, write_frontier_csv
from partita.report.charts import frontier_chart, render
from partita.report.frontier_picture import frontier_picture
from partita.units import format_joules

MOST_ROWS = 12
"""Points that the table shows; all are in the JSON and the files."""


@click.command(
    epilog="Example: partita energy frontier profile.csv --microbatches 96 --blocking-power 83.64 "
    "--picture frontier.svg -o frontier.json\n\n"
    "partita energy frontier gpt-small.plan.json --plans clocks"
)
@click.argument("source")
@source_options
@click.option("--points", type=click.IntRange(1, 2000), default=50, show_default=True)
@click.option(
    "--at",
    type=FiniteRange(0, min_open=True),
    multiple=True,
    help="A further time in seconds, between the fastest step and T*; several times.",
)
@tries_option
@click.option("--to-slowest", is_flag=True, help="Go on beyond the least energy.")
@click.option(
    "--straggler",
    type=FiniteRange(1),
    default=1.2,
    show_default=True,
    help="Of the savings: T' / all-max.",
)
@click.option(
    "--pipelines",
    type=click.IntRange(2),
    default=16,
    show_default=True,
    help="Of the savings with a straggler: pipelines that wait for each other.",
)
@click.option("--picture", help="Write the curve as a picture, .svg, .png or .pdf.")
@click.option("--plans", help="Write the clocks of every point: DIR/freqs_pipeline_%05d.py.")
@click.option("-o", "--output", help="Write the frontier: FILE.json, or its points as FILE.csv.")
@output_options
def command(source: str, **rest: Any) -> None:
    """Find the least energy for every time of a step of SOURCE.

    SOURCE is a plan (what 'partita plan' wrote; its devices are modelled unless --profile names
    their energy), or an energy profile: Perseus's profile.csv or what 'partita energy profile'
    wrote, whose stages run as one pipeline. Every point has a real clock for every instruction, and
    its time and energy are simulated.
    """
    rest.pop("debug")
    options = take_source_options(rest)
    quiet = rest["quiet"] or rest["as_json"]
    with progress("frontier", quiet=quiet) as tell:
        tell(f"reading {source}")
        found = read_source(source, options)
        tell(f"{found.name}: {describe_plan(found.solution.plan)}")
        frontier = frontier_of(
            found.solution,
            found.profile,
            points=rest["points"],
            to_slowest=rest["to_slowest"],
            at=rest["at"],
            stragglers=(rest["straggler"],),
            tries=rest["tries"],
        )
    gains = [
        savings(frontier),
        savings(frontier, straggler=rest["straggler"], pipelines=rest["pipelines"]),
    ]
    written = _write(frontier, found, rest)
    if rest["as_json"]:
        print_json(
            {
                "source": found.name,
                "plan": describe_plan(found.solution.plan),
                **frontier_figures(frontier),
                "savings": [gain.to_json() for gain in gains],
                "assumed": list(found.assumed),
                "written": written,
            }
        )
        return
    _show(frontier, found, gains, written)


def share(value: float) -> str:
    """Return a change of energy for people, to a tenth of a percent."""
    return f"{100 * value:+.1f} %"


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


def savings_line(gain: Savings) -> str:
    """Return what is saved, in one line."""
    saved = f"{100 * gain.saving:.1f} %"
    if gain.straggler <= 1:
        return f"saved without a straggler: {saved} (point {gain.point})"
    return (
        f"saved with a straggler {gain.straggler:g} times as slow, {gain.pipelines} pipelines: "
        f"{saved} (the others at point {gain.point})"
    )


_COLUMNS = (
    *(("point", "right"), ("step", "right"), ("vs all-max", "right"), ("energy", "right")),
    *(("vs all-max", "right"), ("mean power", "right"), ("gap to bound", "right"), ("", "left")),
)


def _rows(frontier: Frontier) -> list[list[str]]:
    count = len(frontier)
    shown = np.unique(np.linspace(0, count - 1, min(count, MOST_ROWS)).round().astype(int))
    better = frontier.better_than_all_max
    rows = [["all-max", *_cells(frontier, frontier.all_max_s, frontier.all_max_j), "-", ""]]
    for point in sorted({*shown.tolist(), *better[-1:], savings(frontier).point}):
        time_s, energy_j = float(frontier.time_s[point]), float(frontier.energy_j[point])
        note = "beats all-max" if point in better else ""
        gap = f"{100 * float(frontier.gap[point]):.2f} %"
        rows.append([str(point), *_cells(frontier, time_s, energy_j), gap, note])
    return rows


def _cells(frontier: Frontier, time_s: float, energy_j: float) -> list[str]:
    slower, cheaper = time_s / frontier.all_max_s - 1, energy_j / frontier.all_max_j - 1
    return [
        f"{time_s:.5g} s",
        f"{100 * slower:+.2f} %",
        format_joules(energy_j),
        f"{100 * cheaper:+.2f} %",
        f"{energy_j / time_s:,.0f} W",
    ]


def _show(
    frontier: Frontier, found: EnergySource, gains: list[Savings], written: list[str]
) -> None:
    console = stdout_console()
    words = f"{describe_plan(found.solution.plan)} on {len(frontier.devices)} devices"
    console.print(f"{found.name} · {words} · {ORIGIN_WORDS[frontier.origin]}")
    for line in headlines(frontier):
        console.print(line)
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    click.echo(frontier_picture(frontier, terminal_width(), encoding=encoding), nl=False)
    console.print(table(_COLUMNS, _rows(frontier)))
    better = frontier.better_than_all_max
    if better:
        console.print(
            f"{len(better)} of {len(frontier)} points are faster and cheaper than all clocks at "
            "their highest: above some clock the devices throttle"
        )
    for gain in gains:
        console.print(savings_line(gain))
    for line in found.assumed:
        console.print(f"assumed: {line}", style="dim")
    for path in written:
        console.print(f"written: {path}")


def _write(frontier: Frontier, found: EnergySource, rest: dict[str, Any]) -> list[str]:
    written = []
    if rest["picture"]:
        drawn = render(lambda: frontier_chart(frontier, title=found.name), rest["picture"])
        write_bytes(rest["picture"], drawn)
        written.append(rest["picture"])
    if rest["plans"]:
        written.append(_write_plans(frontier, found, Path(rest["plans"])))
    if rest["output"]:
        if Path(rest["output"]).suffix.lower() == ".csv":
            write_text(rest["output"], write_frontier_csv(frontier))
        else:
            save(frontier, rest["output"])
        written.append(rest["output"])
    return written


def write_picture(path: str, text: str) -> None:
    """Write a picture.

    Raises:
        InvalidInputError: The name does not end in .svg, which is all that pipelines are drawn as.
    """
    if Path(path).suffix.lower() != ".svg":
        raise InvalidInputError(f"--picture {path!r}: only .svg files can be written")
    write_text(path, text)


def _write_plans(frontier: Frontier, found: EnergySource, folder: Path) -> str:
    """Write the clocks of every point; as Perseus numbers them, the last is the fastest."""
    program = model_of(found.solution, found.profile).program
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise InvalidInputError(f"--plans {folder} cannot be made: {exc.strerror}") from exc
    for point in range(len(frontier)):
        comment = claims(
            float(frontier.time_s[point]), float(frontier.energy_j[point]), frontier.origin
        )
        text = write_clock_plan(program, frontier.clocks(point), comment=comment)
        write_text(folder / f"freqs_pipeline_{len(frontier) - 1 - point:05d}.py", text)
    return f"{folder}/freqs_pipeline_*.py"
