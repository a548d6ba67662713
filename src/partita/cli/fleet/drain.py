"""``partita fleet drain``: stop all jobs of a live fleet with their checkpoints."""

import click

from partita.cli.console import print_json
from partita.cli.fleet.live import answer_options
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.flows.fleet.live import DrainRequest, drain_request


@click.command(cls=Documented, name="drain", epilog="Example: partita fleet drain --wait 120")
@takes(DrainRequest)
@answer_options
def command(request: DrainRequest, *, as_json: bool, debug: bool) -> None:
    """Stop all jobs with their checkpoints and start none; they stay in the queue."""
    del debug  # read by main
    found = drain_request(request, lambda words: click.echo(words, err=True))
    if as_json:
        print_json(found.to_json())
    else:
        click.echo(repr(found))
