"""``partita demo``: the whole flow on a built-in profile and a mixed cluster."""

import json
from pathlib import Path
from typing import Any

import click

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.examples import example
from partita.catalogue.shorthand import read_shorthand
from partita.cli.console import (
    bound_line,
    check_line,
    model_line,
    print_json,
    progress,
    stdout_console,
    step_line,
    summary_row,
    summary_table,
    terminal_width,
)
from partita.cli.options import output_options
from partita.core.problem import Objective, Problem
from partita.cost.check import check
from partita.cost.lower import lower
from partita.cost.simulate import simulate
from partita.documents import save, write_text
from partita.flows.compare import compare
from partita.report.picture import pipeline_picture
from partita.report.svg import timeline_svg
from partita.report.trace import check_trace, chrome_trace

MODEL, CLUSTER, MICROBATCHES = "gpt-small", "1x4xa100+1x2xv100", 16
PLANNERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("single", "single", {}),
    ("uniform", "uniform", {}),
    ("uniform x 2", "uniform", {"replicas": 2}),
    ("custom", "custom", {"boundaries": [0, 4, 7, 10, 13, 15]}),
    ("random", "random", {"seed": 1}),
)


@click.command(epilog="Example: partita demo -o demo")
@click.option("-o", "--output", default="demo", show_default=True, help="Folder for the files.")
@output_options
def command(output: str, as_json: bool, quiet: bool, **rest: Any) -> None:
    """Plan a built-in GPT over four A100 and two V100 with several planners; show the best."""
    del rest
    problem = Problem(
        graph=example(MODEL).graph,
        cluster=read_shorthand(CLUSTER, load_catalogue()),
        objective=Objective(microbatches=MICROBATCHES),
    )
    with progress("planning", quiet=quiet or as_json) as tell:
        found = compare(problem, PLANNERS, progress=tell)
        best = next(candidate.summary for candidate in found if candidate.summary is not None)
        tell("checking and simulating the best")
        report = check(problem, best.solution.plan)
        timeline = simulate(problem, best.solution.plan, period=True)
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "plan": folder / f"{MODEL}.plan.json",
        "timeline": folder / "timeline.json",
        "trace": folder / "trace.json",
        "picture": folder / "pipeline.svg",
    }
    save(best.solution, files["plan"])
    save(timeline, files["timeline"])
    program = lower(problem, best.solution.plan)
    names = problem.graph.tensors.names
    trace = chrome_trace(timeline, program=program, tensor_names=names)
    check_trace(json.loads(trace))
    write_text(files["trace"], trace)
    write_text(files["picture"], timeline_svg(timeline))
    if as_json:
        plans = [{"name": c.name, **(c.summary.figures() if c.summary else {})} for c in found]
        print_json({"plans": plans, "files": {name: str(path) for name, path in files.items()}})
        return
    console = stdout_console()
    console.print(model_line(problem.graph))
    console.print(step_line(problem))
    console.print()
    ranked = [c for c in found if c.summary is not None]
    rows = [summary_row(rank + 1, c.summary, c.name) for rank, c in enumerate(ranked) if c.summary]
    console.print(summary_table(rows))
    for candidate in found:
        if candidate.summary is None:
            console.print(f"{candidate.name}: {candidate.refusal}", style="yellow")
    console.print(bound_line(best))
    console.print(f"\nthe best, simulated ({best.title}):")
    picture = pipeline_picture(timeline, terminal_width(), colour=console.is_terminal)
    click.echo(picture, nl=False)
    console.print(f"\nbound by: {best.evaluation.bottleneck}")
    console.print(check_line(report))
    for line in best.evaluation.assumptions:
        console.print(f"assumed: {line}", style="dim")
    console.print("written: " + ", ".join(str(path) for path in files.values()))
    console.print(
        f"open {files['trace']} in Perfetto (ui.perfetto.dev) or chrome://tracing", style="dim"
    )
    console.print(f"next: partita explain {files['plan']}", style="dim")
