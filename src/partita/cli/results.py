"""``partita results``: what past runs came to, side by side."""

import math

import click

from partita.cli.console import percent, print_json, stdout_console, table
from partita.cli.from_request import takes
from partita.cli.options import output_options
from partita.flows.past_runs import Curves, ResultsRequest, results_request
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
    ("vs first", "right"),
)


@click.command(epilog="Example: partita results runs/2026-11-16_gpt3-small_2xcpu_1f1b_001 --json")
@takes(ResultsRequest)
@output_options
def command(request: ResultsRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """List past runs, or compare the RUNS that are named.

    RUNS are run directories, or their names under --runs. --curves compares their losses at equal
    steps, tokens or seconds.
    """
    del quiet, debug  # there is no progress; main reads debug
    found = results_request(request)
    if as_json:
        print_json(found.to_json())
    elif not found.runs:
        click.echo(str(found))
    elif found.curves is not None:
        _print_curves(found.curves)
        if request.plot is not None:
            click.echo(f"wrote {request.plot}")
    else:
        first = _step_s(found.runs[0])
        stdout_console().print(table(_COLUMNS, [_row(run, first) for run in found.runs]))


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
    text = curve_picture(shown, width=min(console.width, 100), encoding=console.encoding)
    console.print(text, markup=False, highlight=False)


def _step_s(run: PastRun) -> float:
    return float(run.results.get("median_step_s") or "nan")


def _row(run: PastRun, first_s: float) -> list[str]:
    results, step_s = run.results, _step_s(run)
    losses = results.get("losses") or []
    check = results.get("check")
    verdict = "-"
    if check:
        differs = not check.get("equal") or (check.get("module") or {}).get("equal") is False
        verdict = "DIFFERS" if differs else "equal"
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
        "-" if math.isnan(step_s / first_s) else f"{step_s / first_s:.2f} x",
    ]
