"""``partita results``: what past runs came to, side by side."""

import math
from collections.abc import Mapping
from typing import Any

import click

from partita.cli.console import percent, picture_signs, print_json, stdout_console, table
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.flows.runs.follow import Follower
from partita.flows.runs.past import Curves, OpenRun, ResultsRequest, results_request
from partita.report.curves import curve_picture
from partita.runtime.directory import PastRun
from partita.units import format_seconds

_COLUMNS = (
    ("run", "left"),
    ("plan", "left"),
    ("steps", "right"),
    ("loss", "right"),
    ("step", "right"),
    ("samples/s", "right"),
    ("predicted", "right"),
    ("check", "left"),
    ("state", "left"),
    ("vs first", "right"),
)


@click.command(
    cls=Documented,
    epilog="Example: partita results runs/2026-11-16_gpt3-small_2xcpu_1f1b_001 --json",
)
@takes(ResultsRequest)
@output_options
def command(request: ResultsRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """List past runs, or compare the RUNS that are named.

    RUNS are run directories, or their names under --runs. --curves compares their losses at equal
    steps, tokens or seconds. --follow and --cancel are for a run that 'run --on' or 'train --on'
    has started: the one that is named, or the newest.
    """
    del debug  # read by main
    follower = Follower() if quiet or as_json else Follower(on_row=_show_row, on_line=_show_line)
    try:
        found = results_request(request, follower)
    except KeyboardInterrupt:
        if not request.follow:
            raise
        click.echo("the run goes on; --follow shows it again, --cancel ends it", err=True)
        return
    if as_json:
        print_json(found.to_json())
    elif not (found.runs or found.unfinished):
        click.echo(str(found))
    elif found.curves is not None:
        _print_curves(found.curves)
        if request.plot is not None:
            click.echo(f"wrote {request.plot}")
    else:
        first = _step_s(found.runs[0]) if found.runs else math.nan
        rows = [_row(run, first) for run in found.runs]
        rows += [_open_row(run) for run in found.unfinished]
        stdout_console().print(table(_COLUMNS, rows))


def _show_row(row: Mapping[str, Any]) -> None:
    """Show a step of a run that is followed."""
    words = [f"run: step {row['step']}"]
    if "loss" in row:
        words.append(f"loss {row['loss']:.4f}")
    if "held_out_loss" in row:
        words.append(f"held out {row['held_out_loss']:.4f}")
    if "step_s" in row:
        words.append(f"{format_seconds(row['step_s'])} a step")
    click.echo("  ".join(words), err=True)


def _show_line(line: str) -> None:
    click.echo(f"run: {line}", err=True)


def _print_curves(curves: Curves) -> None:
    console = stdout_console()
    titles = [(curves.over, "right"), *((name, "right") for name in curves.points)]
    rows = [
        [f"{at:g}", *("-" if loss is None else f"{loss:.4g}" for loss in losses)]
        for at, losses in curves.rows
    ]
    ends = ["-" if not own else f"{own[-1][1]:.4g}" for own in curves.held_out.values()]
    if any(end != "-" for end in ends):
        rows.append(["held out", *ends])
    console.print(table(titles, rows))
    shown = [(name, points) for name, points in curves.points.items() if points]
    text = curve_picture(shown, width=min(console.width, 100), encoding=picture_signs(console)[1])
    console.print(text, markup=False, highlight=False)


def _step_s(run: PastRun) -> float:
    return float(run.results.get("median_step_s") or "nan")


def _state(results: Mapping[str, Any]) -> str:
    """Return what is to be known before figures of a run are compared with those of others."""
    words = ["emulated"] if results.get("origin") == "emulated" else []
    words += ["stopped"] if results.get("stopped") else []
    words += ["busy machine"] if results.get("busy") else []
    return ", ".join(words)


def _open_row(run: OpenRun) -> list[str]:
    """Return the row of a run that has no results."""
    first = next(iter(run.error.splitlines()), "")
    why = f": {first}" if first else ""
    cells = dict.fromkeys((title for title, _ in _COLUMNS), "-")
    return list((cells | {"run": run.name, "state": f"{run.state}{why}"}).values())


def _row(run: PastRun, first_s: float) -> list[str]:
    results, step_s = run.results, _step_s(run)
    losses = results.get("losses") or []
    verdict = "-" if run.differs is None else "DIFFERS" if run.differs else "equal"
    predicted = float(results.get("predicted_step_s") or "nan")
    return [
        run.name,
        str(results.get("plan", "-")),
        str(results.get("steps", "-")),
        f"{losses[-1]:.4g}" if losses and losses[-1] is not None else "-",
        "-" if math.isnan(step_s) else format_seconds(step_s),
        f"{results['samples_per_s']:.4g}" if "samples_per_s" in results else "-",
        percent(predicted / step_s - 1, sign=True),
        verdict,
        _state(results),
        "-" if math.isnan(step_s / first_s) else f"{step_s / first_s:.2f} x",
    ]
