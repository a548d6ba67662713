"""``partita energy profile``: seconds and joules of each stage by clock, from whatever there is."""

from pathlib import Path

import click

from partita.cli.console import print_json, progress, stdout_console, table
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.documents import save, write_text
from partita.flows.energy.profile import EnergyProfileRequest, profile_energy_request
from partita.formats.perseus import write_energy_csv

_COLUMNS = (
    *(("stage", "right"), ("instruction", "left"), ("device", "left"), ("clocks", "right")),
    ("MHz", "right"),
    *(("fastest", "right"), ("slowest", "right"), ("most", "right"), ("least energy", "right")),
)


@click.command(
    cls=Documented,
    epilog="Example: partita energy profile gpt-small.plan.json --modelled -o profile.csv\n\n"
    "partita energy profile logs --ranks-per-stage 2 --blocking-power 83.64 -o profile.json",
)
@takes(EnergyProfileRequest)
@click.option("-o", "--output", help="Write it to FILE.json, or to FILE.csv as Perseus's.")
@output_options
def command(
    request: EnergyProfileRequest, *, output: str | None, as_json: bool, quiet: bool, debug: bool
) -> None:
    """Make an energy profile of SOURCE.

    SOURCE is a profile.csv or a profile of ours; a folder with instructions-%d.csv and
    time-energy-%d.csv of each rank (their clocks from a column 'clock', from %d.freqevents.csv, or
    from --clock); a folder with %d.sched.json and %d.prof.json (and ranks.json); or a plan, with
    --modelled, for devices that nobody has here.
    """
    del debug  # read by main
    with progress("profile", quiet=quiet or as_json) as on_progress:
        result = profile_energy_request(request, on_progress)
    profile = result.energy_profile
    is_csv = output is not None and Path(output).suffix.lower() == ".csv"
    if output and is_csv:
        write_text(output, write_energy_csv(profile))
    elif output:
        save(profile, output)
    if as_json:
        print_json({**result.to_json(), "written": output})
        return
    console = stdout_console()
    for line in result.lines():
        console.print(line)
    console.print(table(_COLUMNS, [list(map(str, row.values())) for row in result.rows()]))
    if output:
        console.print(f"written: {output}")
    if is_csv and profile.blocking_w:
        console.print("a profile.csv does not hold the blocking power; give it again", style="dim")
