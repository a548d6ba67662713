"""``partita fleet cancel``: end jobs of a live fleet."""

import click

from partita.cli.console import print_json
from partita.cli.fleet.live import answer_options
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.flows.fleet.live import CancelRequest, cancel_request


@click.command(cls=Documented, name="cancel", epilog="Example: partita fleet cancel 3 4")
@takes(CancelRequest)
@answer_options
def command(request: CancelRequest, *, as_json: bool, debug: bool) -> None:
    """End jobs for good; those that run may checkpoint first."""
    del debug  # read by main
    found = cancel_request(request)
    if as_json:
        print_json(found.to_json())
    else:
        click.echo(repr(found))
