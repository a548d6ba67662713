"""``partita fleet status``: everything about a job of a live fleet."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from partita.cli.console import print_json
from partita.cli.fleet.live import client_of, gpu_list, gpus_words, server_options


@click.command(name="status", epilog="Example: partita fleet status 3")
@click.argument("job", type=click.IntRange(1))
@server_options
def command(job: int, server: str, token_file: Path | None, as_json: bool, debug: bool) -> None:
    """Say how a job is: what it holds, what its process says it holds, what became of it."""
    del debug
    said = client_of(server, token_file).status(job)
    if as_json:
        print_json(said)
        return
    for line in status_lines(said):
        click.echo(line)


def status_lines(said: Mapping[str, Any]) -> list[str]:
    """Return the lines about a job."""
    note = f": {said['note']}" if said["note"] else ""
    lines = [
        f"job {said['id']} {said['name']} · {said['state']}{note}",
        f"steps {said['step']} of {said['steps']} · asks for {gpus_words(said['gpus'])} GPUs · "
        f"{said['attempts']} starts, {said['preemptions']} preemptions, "
        f"{said['migrations']} moves, {said['faults']} faults in a row",
    ]
    lines += [
        f"holds {place['server']}: GPUs {gpu_list(place)}, {place['cpus']:g} CPUs, "
        f"{place['memory_gb']:.3g} GB"
        for place in said["places"]
    ]
    if said["read_back"]:
        lines.append(f"read back from its process: {said['read_back']}")
    lines.append(f"command {' '.join(said['command'])}")
    lines += [f"{_clock(event['at_s'])}  {event['what']}" for event in said["events"]]
    return lines


def _clock(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
