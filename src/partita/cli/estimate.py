"""``partita estimate``: does a model fit on a cluster, and what would make it fit."""

import click

from partita.cli.console import (
    basis_line,
    breakdown_cells,
    breakdown_titles,
    model_line,
    precision_line,
    print_json,
    print_remarks,
    progress,
    reserve_line,
    stdout_console,
    step_line,
    table,
)
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.documents import save
from partita.errors import InfeasibleError
from partita.flows.estimate import MAX_DEVICES, Estimate, EstimateRequest, estimate_request
from partita.flows.fit_plans import Trial
from partita.flows.profile import estimate_lines
from partita.units import format_bytes, format_rate, format_seconds


@click.command(
    cls=Documented,
    epilog="Example: partita estimate gpt3-xl --cluster 8xa100\n\n"
    "partita estimate gpt3-175b --cluster 8xa100 --dtype bfloat16 --recompute",
)
@takes(EstimateRequest)
@click.option("-o", "--output", help="Write the best plan to this file.")
@output_options
def command(
    request: EstimateRequest, *, output: str | None, as_json: bool, quiet: bool, debug: bool
) -> None:
    """Say whether MODEL fits on a cluster, what it needs, and what would make it fit.

    MODEL is a built-in name (see 'partita models'), package.module:callable or a Hugging Face
    configuration, all priced by shapes alone; or a graph: a document, a file that 'partita convert'
    reads, or a built-in example. A large transformer (llama3-70b, 'partita models large') or its
    config.json is planned in all degrees. Nothing is launched. Plans that are tried are pipelines
    of equal numbers of layers with replicas, data parallelism at each level of sharding, and what
    the search of 'partita plan' finds, which answers the same. Exits with 3 where none fits; the
    smallest changes that make it fit are printed as commands.
    """
    del debug  # read by main
    with progress("estimating", quiet=quiet or as_json) as on_progress:
        found = estimate_request(request, on_progress)
    if not isinstance(found, Estimate):
        from partita.cli.large import finish_large  # noqa: PLC0415 (where one is estimated)

        finish_large(found, output, as_json=as_json)
        return
    print_remarks(found.remarks)
    if output is not None and found.fits:
        save(found.solution, output)
    if as_json:
        print_json(found.to_json())
    elif output != "-":
        show(found)
        if output is not None and found.fits:
            click.echo(f"best plan written to {output}")
    if not found.fits:
        count = len(found.commands)
        words = (
            f"{count} change{'s' * (count != 1)} that would do" if count else "nothing found helps"
        )
        problem = found.problem
        raise InfeasibleError(
            f"{problem.graph.name} does not fit on {problem.cluster.name}; {words}"
        )


_COLUMNS = (
    ("plan", "left"),
    ("fits", "left"),
    ("peak", "right"),
    ("memory", "right"),
    ("step", "right"),
    ("samples/s", "right"),
)


def show(found: Estimate) -> None:
    """Print the answer, what was tried, where the memory goes, and what would help."""
    console, report, problem = stdout_console(), found.report, found.problem
    console.print(found.verdict, style="bold")
    console.print(model_line(problem.graph))
    if line := basis_line(problem.graph):
        console.print(line)
    if line := precision_line(problem):
        console.print(line)
    console.print(step_line(problem, report.best.plan))
    if line := reserve_line(problem):
        console.print(line)
    console.print(table(_COLUMNS, [_row(trial) for trial in report.trials]))
    titles = breakdown_titles(report.best.memory)
    columns = [("fullest device of", "left"), *((title, "right") for title in titles)]
    console.print(table(columns, [_parts_row(trial) for trial in report.trials]))
    for refusal in report.refusals:
        console.print(f"not tried: {refusal}", style="dim")
    if "estimate" in problem.graph.annotations:
        for line in estimate_lines(problem.graph):
            console.print(line, style="dim")
    if not report.fits:
        _show_changes(found)
    if found.plan_command:
        click.echo("the same search, with its plan shown and written:")
        click.echo(f"  {found.plan_command}")


def _show_changes(found: Estimate) -> None:
    if not found.commands:
        click.echo(f"nothing that was tried makes it fit (at most {MAX_DEVICES} devices are)")
        return
    click.echo("what makes it fit (each was tried):")
    for change, text in zip(found.report.changes, found.commands, strict=True):
        trial = change.trial
        peak, limit = trial.peaks.worst
        click.echo(
            f"  {' and '.join(change.words)}: {trial.shape.title}, {format_bytes(peak)} of "
            f"{format_bytes(limit)}, {format_seconds(trial.step_s)} per step of {change.samples}"
        )
        click.echo(f"    {text}")


def _row(trial: Trial) -> list[str]:
    return [
        trial.shape.title,
        "yes" if trial.fits else "no",
        *map(format_bytes, trial.peaks.worst),
        format_seconds(trial.step_s),
        format_rate(trial.samples_per_s),
    ]


def _parts_row(trial: Trial) -> list[str]:
    return [trial.shape.title, *breakdown_cells(trial.memory, trial.peaks.fullest)]
