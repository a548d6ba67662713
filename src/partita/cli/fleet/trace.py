"""``partita fleet trace``: draw, read, change, show and write the jobs of a fleet."""

from typing import Any

import click

from partita.cli.console import percent, print_json, stdout_console, table
from partita.cli.fleet.inputs import (
    GENERATED,
    parse_count,
    parse_shares,
    parse_span,
    profile_options,
    published_filter_option,
    read_fleet_trace,
    read_profiles,
)
from partita.cli.options import output_options
from partita.documents import write_text
from partita.errors import InvalidInputError
from partita.fleet.study.generated import CLASS_SPLIT, GPU_SHARES
from partita.fleet.study.traces import TraceSummary, TraceWish, summary_of
from partita.formats.detect import format_for, write_as

_MODEL_COLUMNS = (
    *(("model", "left"), ("class", "left"), ("jobs", "right"), ("share", "right")),
    *(("GPUs", "right"), ("median h", "right"), ("GPU hours", "right")),
    *(("top speed", "right"), ("speeds", "left")),
)


@click.command(
    name="trace",
    epilog="Example: partita fleet trace --jobs 200 --load 6 --multi-gpu --seed 1 -o trace.json\n\n"
    "partita fleet trace cluster_job_log.json --load 8 -o philly.csv",
)
@click.argument("source", required=False)
@click.option("--jobs", type=click.IntRange(1), help="Number of jobs. [100; of a source all]")
@click.option(
    "--load",
    type=click.FloatRange(0, 1e6, min_open=True),
    help="Jobs an hour, Poisson. [9; of a source its own arrivals]",
)
@click.option("--static", is_flag=True, help="All jobs are there from the start.")
@click.option(
    "--split", help="Shares of classes: image=20,language=70,speech=10, or 20,70,10 for these."
)
@click.option("--gpus", help="Shares of GPU demands of a drawn trace: 1=70,2=10,4=15,8=5.")
@click.option("--multi-gpu", is_flag=True, help="The published shares: 1=70,2=10,4=15,8=5.")
@click.option("--short", is_flag=True, help="Durations are drawn short: 0.5 to 8 hours.")
@click.option("--drawn-durations", is_flag=True, help="Of a log: draw durations, too.")
@click.option("--single-gpu", is_flag=True, help="Of a log: every job asks for one GPU.")
@published_filter_option
@click.option("--elastic", help="Jobs run on FIRST:LAST GPUs; needs points by number of GPUs.")
@click.option("--tenants", help="Shares of tenants, drawn: a=2,b=1.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Of all draws.")
@profile_options
@click.option("-o", "--output", help="Write it: FILE.json, or FILE.csv as Synergy's.")
@output_options
def command(source: str | None, **rest: Any) -> None:
    """Make a trace of jobs, or show and change the one in SOURCE.

    Without SOURCE the trace is drawn: durations as Gavel's and Synergy's generators draw them,
    Poisson arrivals or all at once, models dealt so that the classes keep their shares. SOURCE is
    a 'partita.trace' document, Synergy's CSV, or a log of submissions: Philly's JSON, or a CSV with
    columns such as timestamp, duration and num_gpus.
    """
    wish = _wish(rest, drawn=source is None)
    models = read_profiles(rest["profiles"], rest["profile_set"], rest["power_model"])
    trace = read_fleet_trace(source or GENERATED, models, wish, power_model=rest["power_model"])
    found = summary_of(trace)
    if rest["output"]:
        text = write_as(trace, format_for(rest["output"], trace))
        assert isinstance(text, str)
        write_text(rest["output"], text)
    if rest["as_json"]:
        print_json({**found.to_json(), "written": rest["output"]})
    elif rest["output"] != "-":
        _show(found, rest["output"])


def _wish(rest: dict[str, Any], *, drawn: bool) -> TraceWish:
    for name in ("drawn_durations", "single_gpu", "published_filter"):
        if drawn and rest[name]:
            raise InvalidInputError(f"--{name.replace('_', '-')} is for a log of submissions")
    for name in ("gpus", "multi_gpu"):
        if not drawn and rest[name]:
            raise InvalidInputError(f"--{name.replace('_', '-')} is for traces that are drawn")
    if rest["gpus"] and rest["multi_gpu"]:
        raise InvalidInputError("--gpus and --multi-gpu exclude each other")
    shares = parse_shares(rest["gpus"], "--gpus")
    demands = {parse_count(key, "--gpus"): share for key, share in shares.items()}
    return TraceWish(
        jobs=rest["jobs"],
        load=rest["load"],
        static=rest["static"],
        split=parse_shares(rest["split"], "--split", tuple(CLASS_SPLIT)),
        gpu_shares=GPU_SHARES if rest["multi_gpu"] else demands or {1: 1.0},
        short=rest["short"],
        real_durations=not rest["drawn_durations"],
        multi_gpu=not rest["single_gpu"],
        published_filter=rest["published_filter"],
        elastic=parse_span(rest["elastic"], "--elastic"),
        tenants=parse_shares(rest["tenants"], "--tenants"),
        seed=rest["seed"],
    )


def trace_line(found: TraceSummary) -> str:
    """Return what a trace holds, in a line."""
    arrivals = "all there at the start"
    if found.per_hour > 0:
        arrivals = (
            f"{found.per_hour:.3g} jobs an hour for {found.span_s / 3600:,.1f} h, which keep "
            f"{found.busy_gpus:,.0f} GPUs busy at speed 1"
        )
    return f"{found.name} · {found.jobs:,} jobs · {found.gpu_hours:,.0f} GPU hours · {arrivals}"


def _show(found: TraceSummary, output: str | None) -> None:
    console = stdout_console()
    console.print(trace_line(found))
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
