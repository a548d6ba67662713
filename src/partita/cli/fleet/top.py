"""``partita fleet top``: a live fleet at a glance, again and again."""

import sys
import time
from dataclasses import dataclass
from typing import Any

import click

from partita.cli.console import print_json, stdout_console, table
from partita.cli.fleet.live import answer_options, job_table
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.errors import PartitaError
from partita.flows.fleet.live import FleetJobs, ListJobsRequest, list_jobs_request, server_line
from partita.names import escaped
from partita.requests import declare, part
from partita.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class TopRequest(ListJobsRequest):
    """A fleet to watch."""

    every: float = declare(2.0, minimum=0.2, maximum=3600, help="Seconds between two updates.")
    once: bool = declare(False, help="Show the fleet once; always so where stdout is no terminal.")


@click.command(cls=Documented, name="top", epilog="Example: partita fleet top --every 5")
@takes(TopRequest, without=("all",))
@answer_options
def command(request: TopRequest, *, as_json: bool, debug: bool) -> None:
    """Show servers, jobs and what they hold until Ctrl-C."""
    del debug  # read by main
    asked = part(ListJobsRequest, request)
    found = list_jobs_request(asked)
    if as_json:
        print_json({**found.info, "jobs": found.to_json()})
        return
    if request.once or not sys.stdout.isatty():
        stdout_console().print(_view(found))
        return
    from rich.live import Live  # noqa: PLC0415 (only for a terminal)

    view = _view(found)
    try:
        with Live(view, console=stdout_console(), screen=True) as live:
            while True:
                time.sleep(request.every)
                try:
                    view = _view(list_jobs_request(asked))
                except PartitaError as exc:
                    # A fleet that is started again is soon back; its last answer stays until then.
                    live.update(_group(escaped(str(exc)), view), refresh=True)
                else:
                    live.update(view, refresh=True)
    except KeyboardInterrupt:
        return


def _group(*parts: Any) -> Any:
    from rich.console import Group  # noqa: PLC0415 (heavy)

    return Group(*parts)


def _view(found: FleetJobs) -> Any:
    columns = (
        ("server", "left"),
        ("type", "left"),
        ("GPUs", "right"),
        ("CPUs", "right"),
        ("memory", "right"),
        ("note", "left"),
    )
    rows = [
        [
            server["name"],
            server["gpu_type"] or "-",
            f"{server['gpus_in_use']}/{server['gpus']}",
            f"{server['cpus_granted']:g}/{server['cpus']:g}",
            " of ".join(
                format_bytes(server[key]) for key in ("memory_bytes_granted", "memory_bytes")
            ),
            server["away"] or "-",
        ]
        for server in found.info["servers"]
    ]
    jobs = sorted(found.jobs, key=lambda job: (job["state"] == "waiting", job["id"]))
    return _group(server_line(found.info), table(columns, rows), job_table(jobs))
