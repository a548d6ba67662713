"""``partita fleet top``: a live fleet at a glance, again and again."""

import sys
import time
from pathlib import Path
from typing import Any

import click

from partita.cli.console import print_json, stdout_console, table
from partita.cli.fleet.live import client_of, job_table, server_line, server_options
from partita.fleet.live.client import FleetClient


@click.command(name="top", epilog="Example: partita fleet top --every 5")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(0.2, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between two updates.",
)
@click.option(
    "--once", is_flag=True, help="Show the fleet once; always so where stdout is no terminal."
)
@server_options
def command(
    every_s: float, once: bool, server: str, token_file: Path | None, as_json: bool, debug: bool
) -> None:
    """Show servers, jobs and what they hold until Ctrl-C."""
    del debug
    client = client_of(server, token_file)
    if as_json:
        print_json({**client.info(), "jobs": client.jobs()})
        return
    if once or not sys.stdout.isatty():
        stdout_console().print(_view(client))
        return
    from rich.live import Live  # noqa: PLC0415 (only for a terminal)

    try:
        with Live(_view(client), console=stdout_console(), screen=True) as live:
            while True:
                time.sleep(every_s)
                live.update(_view(client))
    except KeyboardInterrupt:
        return


def _view(client: FleetClient) -> Any:
    from rich.console import Group  # noqa: PLC0415 (heavy)

    info = client.info()
    columns = (
        ("server", "left"),
        ("type", "left"),
        ("GPUs", "right"),
        ("CPUs", "right"),
        ("memory", "right"),
    )
    rows = [
        [
            server["name"],
            server["gpu_type"] or "-",
            f"{server['gpus_in_use']}/{server['gpus']}",
            f"{server['cpus_granted']:g}/{server['cpus']:g}",
            f"{server['memory_gb_granted']:.0f}/{server['memory_gb']:.0f} GB",
        ]
        for server in info["servers"]
    ]
    jobs = sorted(client.jobs(), key=lambda job: (job["state"] == "waiting", job["id"]))
    return Group(server_line(info), table(columns, rows), job_table(jobs))
