"""``partita advise``: one page that says what to do with a model on a cluster."""

import click
from rich.console import Console

from partita.cli.console import (
    picture_signs,
    print_command,
    print_json,
    print_point,
    progress,
    stdout_console,
    terminal_width,
)
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options, report_option, write_page
from partita.flows.advise import Advice, AdviseRequest, advise_request
from partita.flows.plan import NothingFitsError
from partita.report.picture import pipeline_picture

_MOST_ROWS = 16
"""Devices in the picture."""


@click.command(
    cls=Documented,
    epilog="Example: partita advise llama3-8b --cluster 2xdgx-h100 --tokens 1T -o start\n\n"
    "partita advise gpt-small --cluster 2x4xa100+1x2xv100 --microbatches 32 --report advice.html",
)
@takes(AdviseRequest)
@report_option
@output_options
def command(
    request: AdviseRequest, *, report_file: str | None, as_json: bool, quiet: bool, debug: bool
) -> None:
    """Say in one page what to do with MODEL on a cluster.

    MODEL is what 'partita plan' takes: a large transformer (llama3-8b, ...) or its config.json, a
    built-in example, a model of 'partita models', or a graph file. The page says what was assumed,
    whether it fits, the plan with its picture, how fast it is and how well that is known, what
    --tokens cost in time, money and energy, what bounds it, the changes that pay most, other plans,
    and how to start it: -o DIR writes the plan and the files of launchers and of a trainer.

    Where no plan fits it exits with 3, and says what would make it fit.
    """
    del debug  # read by main
    with progress("advising", quiet=quiet or as_json) as on_progress:
        try:
            advice = advise_request(request, on_progress)
        except NothingFitsError as exc:
            if as_json:
                print_json(exc.to_json())
            raise
    if report_file is not None:
        write_page(advice.page(), report_file, quiet=quiet or as_json)
    if as_json:
        print_json(advice.to_json())
    elif report_file != "-":
        _show(advice)


def _show(advice: Advice) -> None:
    console, problem = stdout_console(), advice.solution.problem
    console.print(f"{problem.graph.name} on {problem.cluster.name}", style="bold")
    _section(console, "assumed", [f"{what}: {value}" for what, value in advice.assumed.items()])
    _section(console, "does it fit", [advice.fit_line])
    _section(console, "the plan", [advice.words])
    timeline = advice.answer.summary.evaluation.timeline
    colour, encoding = picture_signs(console)
    picture = pipeline_picture(
        timeline, terminal_width(), colour=colour, encoding=encoding, max_rows=_MOST_ROWS
    )
    click.echo(picture, nl=False)
    _section(console, "how fast", [advice.speed_line, advice.error])
    _section(console, "what it costs", [advice.money_line])
    _section(console, "what bounds it", advice.bounds)
    _section(console, "what pays most", [] if advice.changes else advice.change_lines())
    if advice.changes:
        console.print("what pays most:", style="bold")
    for change in advice.changes:
        print_point(console, "  ", f"{change.gain}: {change.note}")
        print_command(console, change.command, mark="    ")
    _section(console, "what else there is", advice.alternative_lines())
    console.print("how to start it:", style="bold")
    for start in advice.starts:
        print_point(console, "  ", f"{start.what}:")
        print_command(console, start.command, mark="    ")
    for line in advice.start_notes():
        print_point(console, "  ", line)


def _section(console: Console, title: str, lines: list[str] | tuple[str, ...]) -> None:
    """Print a heading and its lines; nothing where there are none."""
    if lines:
        console.print(f"{title}:", style="bold")
    for line in lines:
        print_point(console, "  ", line)
