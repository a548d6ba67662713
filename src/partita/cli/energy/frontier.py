"""``partita energy frontier``: time against energy of a plan, or of a profile's stages."""

import shlex
from pathlib import Path

import click
import numpy as np

from partita.cli.console import (
    picture_signs,
    print_json,
    progress,
    stdout_console,
    table,
    terminal_width,
)
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options, report_option, write_page
from partita.core.energy import EnergyOrigin, Frontier
from partita.documents import save, write_bytes, write_text
from partita.energy.frontier.savings import Played, Savings, model_of, savings
from partita.errors import InvalidInputError, reason_of
from partita.flows.energy.frontier import FrontierRequest, FrontierResult, frontier_request
from partita.flows.energy.source import claims
from partita.formats.perseus import write_clock_plan, write_frontier_csv
from partita.report.charts import ORIGINS, frontier_chart, render
from partita.report.clock_svg import clock_svg
from partita.report.picture import frontier_picture
from partita.requests import arguments_of
from partita.units import format_joules

MOST_ROWS = 12
"""Points that the table shows; all are in the JSON and the files."""


@click.command(
    cls=Documented,
    epilog="Example: partita energy frontier profile.csv --microbatches 96 --blocking-power 83.64 "
    "--picture frontier.svg -o frontier.json\n\n"
    "partita energy frontier gpt-small.plan.json --plans clocks\n\n"
    "partita energy frontier --stages 65.7,58.2,56.1,58.1ms --backward 2x --device a100 "
    "--microbatches 32",
)
@takes(FrontierRequest)
@click.option("--picture", help="Write the curve as a picture, .svg, .png or .pdf.")
@click.option("--plans", help="Write the clocks of every point: DIR/freqs_pipeline_%05d.py.")
@click.option("-o", "--output", help="Write the frontier: FILE.json, or its points as FILE.csv.")
@report_option
@output_options
def command(
    request: FrontierRequest,
    *,
    picture: str | None,
    plans: str | None,
    output: str | None,
    report_file: str | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Find the least energy for every time of a step of SOURCE.

    SOURCE is a plan (what 'partita plan' wrote; its devices are modelled unless --profile names
    their energy), or an energy profile: Perseus's profile.csv or what 'partita energy profile'
    wrote, whose stages run as one pipeline. Without SOURCE the stages are those whose times
    --stages says, on a modelled --device. Every point has a real clock for every instruction, and
    its time and energy are simulated.
    """
    del debug  # read by main
    with progress("frontier", quiet=quiet or as_json) as on_progress:
        result = frontier_request(request, on_progress)
    written = _write(result, picture=picture, plans=plans, output=output)
    if report_file is not None:
        from partita.flows.pages import frontier_page  # noqa: PLC0415 (only where it is asked for)

        again = shlex.join(["partita", "energy", "frontier", *arguments_of(request)])
        page = frontier_page(result.frontier, name=result.source.name, command=again)
        write_page(page, report_file, quiet=quiet or as_json)
    if as_json:
        print_json({**result.to_json(), "written": written})
        return
    _show(result, written)


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


def _show(result: FrontierResult, written: list[str]) -> None:
    console, frontier = stdout_console(), result.frontier
    for line in (*result.lines(), *result.switching()):
        console.print(line)
    _, encoding = picture_signs(console)
    click.echo(frontier_picture(frontier, terminal_width(), encoding=encoding), nl=False)
    console.print(table(_COLUMNS, _rows(frontier)))
    better = frontier.better_than_all_max
    if better:
        console.print(
            f"{len(better)} of {len(frontier)} points are faster and cheaper than all clocks at "
            "their highest: above some clock the devices throttle"
        )
    for gain in result.savings:
        console.print(savings_line(gain))
    for line in result.source.assumed:
        console.print(f"assumed: {line}", style="dim")
    for path in written:
        console.print(f"written: {path}")


def _write(
    result: FrontierResult, *, picture: str | None, plans: str | None, output: str | None
) -> list[str]:
    written, frontier = [], result.frontier
    if picture:
        title = result.source.name
        write_bytes(picture, render(lambda: frontier_chart(frontier, title=title), picture))
        written.append(picture)
    if plans:
        written.append(_write_plans(result, Path(plans)))
    if output:
        if Path(output).suffix.lower() == ".csv":
            write_text(output, write_frontier_csv(frontier))
        else:
            save(frontier, output)
        written.append(output)
    return written


def clock_picture(path: str, step: Played, origin: EnergyOrigin, title: str) -> str:
    """Write a step coloured by clock, and return the path.

    Raises:
        InvalidInputError: The name does not end in .svg, which is all that pipelines are drawn as.
    """
    if Path(path).suffix.lower() != ".svg":
        raise InvalidInputError(f"--picture {path!r}: only .svg files can be written")
    facts = [f"{format_joules(step.energy_j)}, {format_joules(step.waiting_j)} of it waiting"]
    title = f"{title} ({ORIGINS[origin]})"
    write_text(path, clock_svg(step.timeline, title=title, facts=facts))
    return path


def _write_plans(result: FrontierResult, folder: Path) -> str:
    """Write the clocks of every point; as Perseus numbers them, the last is the fastest."""
    frontier = result.frontier
    program = model_of(result.source.solution, result.source.profile).program
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise InvalidInputError(f"--plans {folder} cannot be made: {reason_of(exc)}") from exc
    for point in range(len(frontier)):
        comment = claims(
            float(frontier.time_s[point]), float(frontier.energy_j[point]), frontier.origin
        )
        text = write_clock_plan(program, frontier.clocks(point), comment=comment)
        write_text(folder / f"freqs_pipeline_{len(frontier) - 1 - point:05d}.py", text)
    return f"{folder}/freqs_pipeline_*.py"
