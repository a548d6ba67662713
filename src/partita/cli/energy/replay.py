"""``partita energy replay``: clocks from elsewhere, or a recorded log, in the simulator."""

from pathlib import Path

import click

from partita.cli.console import print_json, progress, stdout_console, table
from partita.cli.energy.frontier import clock_picture
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.errors import InvalidInputError
from partita.flows.energy.replay import ReplayRequest, replay_request

_COLUMNS = (("", "left"), ("step", "right"), ("", "right"), ("energy", "right"), (" ", "right"))


@click.command(
    cls=Documented,
    epilog="Example: partita energy replay profile.csv freqs_pipeline_00000.py --microbatches 12 "
    "--blocking-power 83.64\n\n"
    "partita energy replay gpt-small.plan.json logs",
)
@takes(ReplayRequest)
@click.option("--picture", help="Write the step coloured by clock, an SVG file.")
@output_options
def command(
    request: ReplayRequest, *, picture: str | None, as_json: bool, quiet: bool, debug: bool
) -> None:
    """Play CLOCKS on SOURCE and compare with what was claimed or measured.

    SOURCE is a plan, an energy profile or a frontier, as for 'partita energy frontier'. CLOCKS is a
    clock plan (ours, Zeus's or Perseus's; it is read as data and never run), or a folder with
    instructions-%d.csv, and time-energy-%d.csv if energy was read, of each rank of a run.
    """
    del debug  # read by main
    if picture and Path(request.clocks).is_dir():
        raise InvalidInputError("--picture is for a clock plan; a log says what was measured")
    with progress("replay", quiet=quiet or as_json) as on_progress:
        result = replay_request(request, on_progress)
    written = []
    if picture and result.step is not None:
        title = Path(request.clocks).name
        origin = result.source.profile.origin
        written.append(clock_picture(picture, result.step, origin, title))
    if as_json:
        files = {} if result.step is None else {"written": written}
        print_json({**result.to_json(), **files})
        return
    console, (headline, *remarks) = stdout_console(), result.lines()
    console.print(headline)
    console.print(table(_COLUMNS, [list(map(str, row.values())) for row in result.rows()]))
    for line in remarks:
        console.print(line)
    for line in result.source.assumed:
        console.print(f"assumed: {line}", style="dim")
    for path in written:
        console.print(f"written: {path}")
