"""``partita plan``: from a model and a cluster to a plan."""

from pathlib import Path
from typing import Any

import click

from partita.cli.console import (
    bound_line,
    model_line,
    overfull_line,
    print_json,
    progress,
    stdout_console,
    step_line,
    summary_row,
    summary_table,
)
from partita.cli.inputs import read_planner, read_problem, take_problem_options
from partita.cli.options import cluster_options, output_options, planner_options, problem_options
from partita.core.codec import encode
from partita.documents import save, unused_path
from partita.flows.summary import summarise
from partita.plan.table import get_planner


@click.command(
    epilog="Example: partita plan gpt-small --cluster 2x4xa100+1x2xv100 --microbatches 32"
)
@click.argument("model", required=False)
@cluster_options
@planner_options
@problem_options
@click.option("-o", "--output", help="Where to write the plan; - is stdout. [NAME.plan.json]")
@output_options
def command(model: str | None, output: str | None, as_json: bool, quiet: bool, **rest: Any) -> None:
    """Plan MODEL over a cluster and write the plan.

    MODEL is a built-in name (gpt-small, resnet50, chain201, ...), a Partita document, or any graph
    file that 'partita convert' reads; - is stdin. It may be left out where the cluster file names
    its profiles. With --json no file is written unless -o names one.
    """
    rest.pop("debug")
    name, options = read_planner(
        rest.pop("planner"), rest.pop("partition"), rest.pop("options"), rest.pop("seed")
    )
    problem = read_problem(model, take_problem_options(rest))
    planner = get_planner(name, **options)
    with progress("planning", quiet=quiet or as_json) as tell:
        tell(f"{problem.graph.name} with {name}")
        summary = summarise(planner(problem))
    target = output or (
        None if as_json else str(unused_path(Path(f"{problem.graph.name}.plan.json")))
    )
    if target is not None and target != "-":
        save(summary.solution, target)
    if as_json:
        print_json({**summary.figures(), "written": target, "solution": encode(summary.solution)})
        return
    if target == "-":
        save(summary.solution, "-")
        return
    console = stdout_console()
    console.print(model_line(problem.graph))
    console.print(step_line(problem))
    console.print(summary_table([summary_row(1, summary, name)]))
    console.print(f"bound by: {summary.evaluation.bottleneck}")
    if summary.overfull:
        console.print(overfull_line(summary), style="yellow")
    console.print(f"{bound_line(summary)} · written to {target}")
    for line in summary.evaluation.assumptions:
        console.print(f"assumed: {line}", style="dim")
    console.print(f"next: partita explain {target} · partita simulate {target}", style="dim")
