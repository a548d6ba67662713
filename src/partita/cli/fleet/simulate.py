"""``partita fleet simulate``: policies on a trace, ranked."""

from dataclasses import replace

import click

from partita.cli.console import print_json, print_remarks, progress, stdout_console
from partita.cli.fleet.simulate_view import paced, show, write_study
from partita.cli.from_request import takes
from partita.cli.options import output_options
from partita.flows.fleet.simulate import SimulateFleetRequest, simulate_fleet_request


@click.command(
    name="simulate",
    epilog="Example: partita fleet simulate generated:jobs=200,load=6 --cluster 4x8xv100 "
    "--policy fifo:fair,fifo:tune,srtf:joint --picture study.svg\n\n"
    "partita fleet simulate trace.csv --profiles model_profiles.json --policy fifo:tune "
    "--loads 1:10 --csv sweep.csv",
)
@takes(SimulateFleetRequest, without=("record",))
@click.option("--picture", help="File for all diagrams (.svg, .png or .pdf), or a folder of them.")
@click.option("--csv", "table_file", help="File for the figures of every run, as a table.")
@click.option("--results", help="File for every job's end, in Synergy's columns: FILE.csv.")
@click.option(
    "-o", "--output", help="File for the history: FILE.json; with several runs one per run."
)
@output_options
def command(
    request: SimulateFleetRequest,
    *,
    picture: str | None,
    table_file: str | None,
    results: str | None,
    output: str | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Play the jobs of TRACE under several policies and rank them by mean completion time.

    TRACE is a 'partita.trace' document, Synergy's CSV (with --profiles), a log of submissions
    (Philly's JSON, or a CSV), or generated[:jobs=100,load=9,seed=1,static,short,multi-gpu]. Rounds
    in which nothing changes cost nothing.
    """
    del debug  # read by main
    with progress("fleet", quiet=quiet or as_json) as on_progress:
        result = simulate_fleet_request(replace(request, record=bool(output)), paced(on_progress))
    print_remarks(result.remarks)
    written = write_study(
        result.study, picture=picture, table_file=table_file, results=results, output=output
    )
    if as_json:
        print_json({**result.to_json(), "written": written})
    else:
        show(stdout_console(), result.study, written)
