"""``partita report``: plans, a run, a frontier or a fleet as one HTML file."""

import click

from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.flows.report import ReportRequest, report_request


@click.command(
    cls=Documented,
    epilog="Example: partita report gpt-small.plan.json -o report.html\n\n"
    "partita report one.plan.json two.plan.json -o compared.html\n\n"
    "partita report runs/2026-11-16_gpt3-small_2xcpu_1f1b_001",
)
@takes(ReportRequest)
@output_options
def command(request: ReportRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """Write THING as one HTML file that opens in any browser and needs no network.

    THING is a plan, several plans (side by side on one axis), a run directory (measured below
    predicted), a frontier (with a slider over its points), or one or several histories of 'partita
    fleet simulate -o'. The file is light and dark, can be printed and walked through by keyboard,
    and has every figure also as a table and as CSV.
    """
    from partita.cli.console import print_json, progress  # noqa: PLC0415 (rich only where it prints)

    del debug  # read by main
    with progress("report", quiet=quiet or as_json) as on_progress:
        found = report_request(request, on_progress)
    if as_json:
        print_json(found.to_json())
    elif request.output != "-":
        for line in found.lines():
            click.echo(line)
