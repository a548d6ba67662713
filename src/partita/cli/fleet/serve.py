"""``partita fleet serve``: the live scheduler with its HTTP API."""

import click

from partita.cli.console import print_json
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.service.fleet.serve import FleetServer, ServeFleetRequest, serve_fleet_request


@click.command(
    cls=Documented,
    name="serve",
    epilog="Example: partita fleet serve --engine local --gpus 8 --round 300 --policy fifo:tune",
)
@takes(ServeFleetRequest)
@click.option("--json", "as_json", is_flag=True, help="Print where it listens as JSON.")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
def command(request: ServeFleetRequest, *, as_json: bool, debug: bool) -> None:
    """Share servers among jobs, round by round.

    Ends with SIGTERM or Ctrl-C; jobs that run go on, and are found again when it is started with
    the same --state. 'partita fleet drain' stops them first.
    """
    del debug  # read by main

    def announce(server: FleetServer) -> None:
        if as_json:
            print_json(server.to_json())
            return
        click.echo(server.line())
        if server.token_file is not None:
            click.echo(
                f"clients have to show the token in {server.token_file}; those of this user find "
                "it",
                err=True,
            )
        for note in server.notes:
            click.echo(note, err=True)

    serve_fleet_request(request, announce)
