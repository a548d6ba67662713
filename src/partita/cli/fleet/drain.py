"""``partita fleet drain``: stop all jobs of a live fleet with their checkpoints."""

import time
from pathlib import Path

import click

from partita.cli.console import print_json
from partita.cli.fleet.live import client_of, server_options
from partita.errors import WorkerError

_PAUSE_S = 0.2


@click.command(name="drain", epilog="Example: partita fleet drain --wait 120")
@click.option("--resume", is_flag=True, help="Go on: jobs start again.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0, 1e7),
    default=0.0,
    help="Seconds to wait until nothing runs any more.",
)
@server_options
def command(
    resume: bool,
    wait_s: float,
    server: str,
    token_file: Path | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Stop all jobs with their checkpoints and start none; they stay in the queue."""
    del debug
    client = client_of(server, token_file)
    client.drain(on=not resume)
    last_s = time.monotonic() + wait_s
    info = client.info()
    while wait_s and not resume and info["running"]:
        if time.monotonic() > last_s:
            stuck = [job["id"] for job in client.jobs() if job["state"] != "waiting"]
            raise WorkerError(f"after {wait_s:g} s still run: {', '.join(map(str, stuck))}")
        time.sleep(_PAUSE_S)
        info = client.info()
    if as_json:
        print_json(info)
    else:
        what = "goes on" if resume else "drains"
        click.echo(f"the fleet {what}: {info['running']} running, {info['waiting']} waiting")
