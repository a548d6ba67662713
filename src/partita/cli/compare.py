"""``partita compare``: several planners, one ranked table."""

from typing import Any

import click

from partita.cli.console import (
    bound_line,
    model_line,
    print_json,
    progress,
    stdout_console,
    step_line,
    summary_row,
    summary_table,
)
from partita.cli.inputs import read_planner, read_problem, take_problem_options
from partita.cli.options import cluster_options, output_options, problem_options
from partita.documents import save
from partita.errors import InfeasibleError
from partita.flows.compare import Candidate, compare

DEFAULTS = ("single", "uniform", "random")


@click.command(
    epilog="Example: partita compare resnet50 --cluster 4xa100 -p single -p uniform -p random:1"
)
@click.argument("model", required=False)
@cluster_options
@problem_options
@click.option(
    "--planner",
    "-p",
    "planners",
    multiple=True,
    help=f"A planner with its argument; several times. [{', '.join(DEFAULTS)}]",
)
@click.option("--option", "-O", "options", multiple=True, help="Option k=v of all planners.")
@click.option("-o", "--output", help="Where to write the best plan.")
@output_options
def command(
    model: str | None,
    planners: tuple[str, ...],
    options: tuple[str, ...],
    output: str | None,
    *,
    as_json: bool,
    quiet: bool,
    **rest: Any,
) -> None:
    """Run several planners on MODEL and rank what they find."""
    rest.pop("debug")
    problem = read_problem(model, take_problem_options(rest))
    chosen = [(spec, *read_planner(spec, None, options, None)) for spec in planners or DEFAULTS]
    with progress("comparing", quiet=quiet or as_json) as tell:
        found = compare(problem, chosen, progress=tell)
    best = next((candidate.summary for candidate in found if candidate.summary), None)
    if best is not None and output is not None:
        save(best.solution, output)
    if as_json:
        print_json(
            {"model": problem.graph.name, "cluster": problem.cluster.name, "plans": _rows(found)}
        )
    else:
        console = stdout_console()
        console.print(model_line(problem.graph))
        console.print(step_line(problem))
        ranked = [c for c in found if c.summary is not None]
        rows = [summary_row(r + 1, c.summary, c.name) for r, c in enumerate(ranked) if c.summary]
        if rows:
            console.print(summary_table(rows))
        for candidate in found:
            if candidate.summary is None:
                console.print(f"{candidate.name}: {candidate.refusal}", style="yellow")
        if best is not None:
            console.print(bound_line(best))
            if output is not None:
                console.print(f"best plan written to {output}")
    if best is None:
        raise InfeasibleError("no planner found a plan that fits")


def _rows(found: list[Candidate]) -> list[dict[str, Any]]:
    return [
        {"name": c.name, "refusal": c.refusal or None, **(c.summary.figures() if c.summary else {})}
        for c in found
    ]
