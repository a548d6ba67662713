"""``partita demo``: the whole flow, on a small GPT here and a large one on a mixed cluster."""

import click

from partita.cli.console import (
    basis_line,
    bound_line,
    check_line,
    model_line,
    picture_signs,
    print_json,
    progress,
    stdout_console,
    step_line,
    summary_row,
    summary_table,
    terminal_width,
)
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.flows.compare import Comparison
from partita.flows.demo import CLUSTER, LOCAL_DEVICES, Demo, DemoRequest, best_of, demo_request
from partita.flows.profile import estimate_lines
from partita.report.picture import pipeline_picture


@click.command(cls=Documented, epilog="Example: partita demo -o demo")
@takes(DemoRequest)
@output_options
def command(request: DemoRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """Measure a small GPT and train it by its plan; plan a large one over a mixed cluster.

    Op times of this machine are measured, those of the cluster's A100 and V100 estimated. The
    training is compared with one process, and with what was predicted.
    """
    del debug  # read by main
    with progress("demo", quiet=quiet or as_json) as on_progress:
        found = demo_request(request, on_progress)
    if as_json:
        print_json(found.to_json())
        return
    _show_here(found)
    _show_mixed(found)
    _show_files(found)


def _show_here(found: Demo) -> None:
    """Print what was measured here, the plans for this machine, and how the training went."""
    console, profiled = stdout_console(), found.profile
    console.print("1. a small GPT, measured on this machine", style="bold")
    console.print(model_line(profiled.graph))
    for line in profiled.lines()[1:]:
        console.print(line)
    console.print(
        f"\n2. planned over {LOCAL_DEVICES} processes of this machine (op times measured, links "
        "modelled)",
        style="bold",
    )
    _show_ranked(found.here)
    console.print(
        f"\n3. trained over {LOCAL_DEVICES} processes of this machine, by the best plan",
        style="bold",
    )
    for line in found.trained.lines():
        console.print(line)


def _show_mixed(found: Demo) -> None:
    """Print the plans for the mixed cluster, and the best of them as a picture."""
    console, best, graph = stdout_console(), best_of(found.mixed), found.mixed.problem.graph
    console.print(
        f"\n4. a large GPT, planned over {CLUSTER} (op times estimated, links modelled)",
        style="bold",
    )
    console.print(model_line(graph))
    if line := basis_line(graph):
        console.print(line)
    for line in estimate_lines(graph):
        console.print(line, style="dim")
    _show_ranked(found.mixed)
    console.print(f"\n5. the best of them, simulated ({best.title})", style="bold")
    width = terminal_width()
    colour, encoding = picture_signs(console)
    picture = pipeline_picture(found.simulation.timeline, width, colour=colour, encoding=encoding)
    click.echo(picture, nl=False)
    console.print(f"{found.simulation.step_words} · {check_line(found.simulation.report)}")
    console.print(f"bound by: {best.evaluation.bottleneck}")
    for line in best.evaluation.assumptions:
        console.print(f"assumed: {line}", style="dim")


def _show_ranked(found: Comparison) -> None:
    console = stdout_console()
    console.print(step_line(found.problem))
    rows = [
        summary_row(rank, each.summary, each.name)
        for rank, each in enumerate(found.candidates, 1)
        if each.summary is not None
    ]
    console.print(summary_table(rows))
    for each in found.candidates:
        if each.summary is None:
            console.print(f"{each.name}: {each.refusal}", style="yellow")
    console.print(bound_line(best_of(found), "the first"))


def _show_files(found: Demo) -> None:
    """Print what was written, and what to do with it."""
    console, files = stdout_console(), found.files
    console.print(f"\nthe picture, to send to a colleague: {files['picture']}")
    others = (path for name, path in files.items() if name not in ("picture", "report"))
    console.print(f"also written: {', '.join(others)}")
    console.print(
        f"open {files['trace']} in Perfetto (ui.perfetto.dev) or chrome://tracing", style="dim"
    )
    console.print(f"next: partita explain {files['plan']}", style="dim", soft_wrap=True)
    console.print(f"the report, for any browser: {files['report']}")
