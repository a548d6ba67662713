"""``partita fleet trace``: draw, read, change, show and write the jobs of a fleet."""

import click

from partita.cli.console import percent, print_json, print_remarks, stdout_console, table
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.documents import write_text
from partita.fleet.study.traces import TraceSummary
from partita.flows.fleet.trace import FleetTraceRequest, fleet_trace_request
from partita.formats.detect import format_for, write_as

_MODEL_COLUMNS = (
    *(("model", "left"), ("class", "left"), ("jobs", "right"), ("share", "right")),
    *(("GPUs", "right"), ("median h", "right"), ("GPU hours", "right")),
    *(("top speed", "right"), ("speeds", "left")),
)


@click.command(
    cls=Documented,
    name="trace",
    epilog="Example: partita fleet trace --jobs 200 --load 6 --multi-gpu --seed 1 -o trace.json\n\n"
    "partita fleet trace cluster_job_log.json --load 8 -o philly.csv",
)
@takes(FleetTraceRequest)
@click.option("-o", "--output", help="File to write: FILE.json, or FILE.csv as Synergy's.")
@output_options
def command(
    request: FleetTraceRequest, *, output: str | None, as_json: bool, quiet: bool, debug: bool
) -> None:
    """Make a trace of jobs, or show and change the one in SOURCE.

    Without SOURCE the trace is drawn: durations as Gavel's and Synergy's generators draw them,
    Poisson arrivals or all at once, models dealt so that the classes keep their shares. SOURCE is
    a 'partita.trace' document, Synergy's CSV, or a log of submissions: Philly's JSON, a CSV with
    columns such as timestamp, duration and num_gpus, or what sacct --parsable2 prints.
    """
    del quiet, debug  # there is no progress; read by main
    result = fleet_trace_request(request)
    print_remarks(result.remarks)
    if output:
        text = write_as(result.trace, format_for(output, result.trace))
        assert isinstance(text, str)
        write_text(output, text)
    if as_json:
        print_json({**result.to_json(), "written": output})
    elif output != "-":
        _show(result.summary, output)


def _show(found: TraceSummary, output: str | None) -> None:
    console = stdout_console()
    console.print(found.line())
    rows = [
        [
            row.model,
            row.kind or "-",
            f"{row.jobs:,}",
            percent(row.jobs / found.jobs),
            f"{row.gpus:.2f}",
            f"{row.hours:.2f}",
            f"{row.gpu_hours:,.0f}",
            f"{row.top_speed:.2f}",
            row.origin,
        ]
        for row in sorted(found.models, key=lambda row: (row.kind, row.model))
        if row.jobs
    ]
    console.print(table(_MODEL_COLUMNS, rows))
    demands = ", ".join(f"{gpus}: {count:,}" for gpus, count in found.gpu_demands.items())
    console.print(f"jobs by GPUs: {demands}")
    if found.elastic:
        console.print(f"{found.elastic:,} jobs run on a range of GPUs")
    if found.tenants:
        shown = ", ".join(f"{name} {count:,}" for name, count in found.tenants.items())
        console.print(f"jobs by tenant: {shown}")
    if output:
        console.print(f"written to {output}")
