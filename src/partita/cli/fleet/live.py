"""What the commands on a live fleet share: where it is, and how jobs look in tables."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from partita.cli.console import table
from partita.cli.token import fleet_token
from partita.fleet.live.client import DEFAULT_URL, FleetClient
from partita.units import format_seconds

_F = TypeVar("_F", bound=Callable[..., Any])
_JOB_COLUMNS = (
    ("job", "right"),
    ("name", "left"),
    ("state", "left"),
    ("steps", "right"),
    ("GPUs", "left"),
    ("where", "left"),
    ("CPUs", "right"),
    ("age", "right"),
    ("tenant", "left"),
    ("note", "left"),
)


def server_options(function: _F) -> _F:
    """Add the options that say where the fleet is."""
    for option in (
        click.option("--debug", is_flag=True, help="Show a traceback when something fails."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout."),
        click.option(
            "--token-file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="File with the server's token. [PARTITA_TOKEN, else what a fleet here made]",
        ),
        click.option(
            "--server",
            default=DEFAULT_URL,
            envvar="PARTITA_FLEET_SERVER",
            show_default=True,
            help="Address of the fleet.",
        ),
    ):
        function = option(function)
    return function


def client_of(server: str, token_file: Path | None) -> FleetClient:
    """Return the way to the fleet that the options name."""
    return FleetClient(server, token=fleet_token(token_file, server))


def job_table(jobs: Sequence[Mapping[str, Any]]) -> Any:
    """Return the table of some jobs."""
    return table(_JOB_COLUMNS, [_job_row(job) for job in jobs])


def _job_row(job: Mapping[str, Any]) -> list[str]:
    end_s = job["finished_s"] or time.time()
    return [
        str(job["id"]),
        job["name"],
        job["state"],
        f"{job['step']}/{job['steps']}",
        gpus_words(job["gpus"]),
        "; ".join(f"{place['server']}:{gpu_list(place)}" for place in job["places"]) or "-",
        f"{sum(place['cpus'] for place in job['places']):g}" if job["places"] else "-",
        format_seconds(max(0.0, end_s - job["submitted_s"])),
        job["tenant"] or "-",
        job["note"] or "-",
    ]


def gpu_list(place: Mapping[str, Any]) -> str:
    """Return the numbers of a place's GPUs."""
    return ",".join(map(str, place["gpus"]))


def gpus_words(choices: Sequence[tuple[int, int, str]]) -> str:
    """Return what a job asks for, as its file says it."""
    words = []
    for least, most, kind in choices:
        count = f"{least}" if least == most else f"{least} to {most}"
        words.append(f"{count} {kind}".rstrip())
    return " or ".join(words)


def server_line(info: Mapping[str, Any]) -> str:
    """Return what is in use, in a line."""
    gpus = sum(server["gpus"] for server in info["servers"])
    used = sum(server["gpus_in_use"] for server in info["servers"])
    cpus = sum(server["cpus"] for server in info["servers"])
    granted = sum(server["cpus_granted"] for server in info["servers"])
    parts = [
        f"{info['policy']} on {info['engine']}",
        f"rounds of {format_seconds(info['round_s'])}",
        f"GPUs {used}/{gpus}",
        f"CPUs {granted:g}/{cpus:g}",
        f"{info['running']} running, {info['waiting']} waiting",
    ]
    if info["draining"]:
        parts.append("draining")
    if info["failure"]:
        parts.append(f"the scheduler fails: {info['failure']}")
    return " · ".join(parts)
