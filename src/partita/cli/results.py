"""``partita results``: what past runs came to, side by side."""

import math
from pathlib import Path
from typing import Any

import click

from partita.cli.console import percent, print_json, stdout_console, table
from partita.cli.options import output_options
from partita.flows.run_requests import RUNS
from partita.runtime.directory import PastRun, past_runs, read_run
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
@click.argument("names", metavar="[RUNS]...", nargs=-1)
@click.option("--runs", default=RUNS, show_default=True, help="Where run directories are.")
@click.option("--model", help="Only runs of this model.")
@output_options
def command(names: tuple[str, ...], runs: str, model: str | None, **rest: Any) -> None:
    """List past runs, or compare the RUNS that are named.

    RUNS are run directories, or their names under --runs.
    """
    if names:
        found = [read_run(_directory(name, Path(runs))) for name in names]
    else:
        found = list(past_runs(Path(runs)))
    if model is not None:
        found = [run for run in found if run.results.get("model") == model]
    if rest["as_json"]:
        print_json([{"directory": str(run.path), **run.results} for run in found])
        return
    if not found:
        click.echo(f"no runs under {runs}")
        return
    first = _step_s(found[0])
    stdout_console().print(table(_COLUMNS, [_row(run, first) for run in found]))


def _directory(name: str, root: Path) -> Path:
    path = Path(name)
    return path if path.is_dir() else root / name


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
