"""``partita fleet cancel``: end jobs of a live fleet."""

from pathlib import Path

import click

from partita.cli.console import print_json
from partita.cli.fleet.live import client_of, server_options


@click.command(name="cancel", epilog="Example: partita fleet cancel 3 4")
@click.argument("jobs", type=click.IntRange(1), nargs=-1, required=True)
@server_options
def command(
    jobs: tuple[int, ...], server: str, token_file: Path | None, as_json: bool, debug: bool
) -> None:
    """End jobs for good; those that run may checkpoint first."""
    del debug
    client = client_of(server, token_file)
    for job in jobs:
        client.cancel(job)
    if as_json:
        print_json({"cancelled": list(jobs)})
    else:
        click.echo(f"cancelled: {', '.join(map(str, jobs))}")
