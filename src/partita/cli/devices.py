"""``partita devices``: the device types and machines that a cluster may name."""

import click

from partita.cli.console import print_json, stdout_console, table
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.flows.devices import PEAKS, DeviceList, DevicesRequest, devices_request

_RIGHT = ("memory", "memory rate", "price/h", *PEAKS)


@click.command(cls=Documented, epilog="Example: partita devices h100")
@takes(DevicesRequest)
@output_options
def command(request: DevicesRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """List device types and machines that a cluster may name, or those whose name contains PART.

    Peaks are FLOP/s without sparsity, by width of the numbers. The name of one device type or
    machine gives all that is known of it, with sources. Prices are assumptions: list prices of
    clouds.
    """
    del quiet, debug  # there is no progress; main reads debug
    found = devices_request(request)
    if as_json:
        print_json(found.to_json())
    elif found.is_detailed:
        for line in found.lines():
            click.echo(line)
    else:
        _show(found)


def _show(found: DeviceList) -> None:
    console, rows = stdout_console(), found.rows()
    for key in ("type", "machine"):
        part = [row for row in rows if key in row]
        if part:
            columns = [(name, "right" if name in _RIGHT else "left") for name in part[0]]
            console.print(table(columns, [list(map(str, row.values())) for row in part]))
