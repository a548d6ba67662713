"""``partita energy compare``: frontiers, plans and clock plans side by side, by one accounting."""

import click

from partita.cli.console import print_json, progress, stdout_console, table
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.flows.energy.compare import CompareEnergyRequest, compare_energy_request

_COLUMNS = (
    *(("", "left"), ("what", "left"), ("T_min", "right"), ("energy", "right")),
    *(("saved", "right"), ("in all-max", "right"), ("T*", "right"), ("at T*", "right")),
    *(("straggler", "right"), ("gap", "right")),
)


@click.command(
    cls=Documented,
    epilog="Example: partita energy compare profile.csv published.csv.gz freqs_pipeline_00000.py "
    "--microbatches 12 --blocking-power 83.64",
)
@takes(CompareEnergyRequest)
@output_options
def command(request: CompareEnergyRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """Say what each of ITEMS saves against all clocks at their highest.

    An item is a plan, an energy profile or a frontier; or, after one of these, points that somebody
    claims (a CSV with time and energy, such as Perseus's iteration_time_energy.csv) or a clock plan
    (.py), which is played on the first. Savings with a straggler are those of all pipelines.
    """
    del debug  # read by main
    with progress("comparing", quiet=quiet or as_json) as on_progress:
        found = compare_energy_request(request, on_progress)
    if as_json:
        print_json(found.to_json())
        return
    console = stdout_console()
    console.print(table(_COLUMNS, [list(map(str, row.values())) for row in found.rows()]))
    for line in found.lines():
        console.print(line)
    for line in found.assumed:
        console.print(f"assumed: {line}", style="dim")
