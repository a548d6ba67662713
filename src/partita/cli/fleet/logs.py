"""``partita fleet logs``: what a job of a live fleet printed."""

import time
from pathlib import Path

import click

from partita.cli.console import print_json
from partita.cli.fleet.live import client_of, server_options

_PAUSE_S = 0.5


@click.command(name="logs", epilog="Example: partita fleet logs -f 3")
@click.argument("job", type=click.IntRange(1))
@click.option("--follow", "-f", is_flag=True, help="Go on until the job has ended.")
@server_options
def command(
    job: int, follow: bool, server: str, token_file: Path | None, as_json: bool, debug: bool
) -> None:
    """Print what a job has printed, all its starts one after the other."""
    del debug
    if as_json and follow:
        raise click.UsageError("--json and --follow exclude each other")
    client, offset, parts = client_of(server, token_file), 0, []
    while True:
        text, end, ended = client.log(job, offset)
        more, offset = end > offset, end
        if as_json:
            parts.append(text)
        else:
            click.echo(text, nl=False)
        if ended or (not follow and not more):
            break
        if not more:
            time.sleep(_PAUSE_S)
    if as_json:
        print_json({"job": job, "text": "".join(parts)})
