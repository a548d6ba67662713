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
    status = client_of(server, token_file).status(job)
    if as_json:
        print_json(status)
        return
    for line in status_lines(status):
        click.echo(line)


def status_lines(status: Mapping[str, Any]) -> list[str]:
    """Return the lines about a job."""
    note = f": {status['note']}" if status["note"] else ""
    lines = [
        f"job {status['id']} {status['name']} · {status['state']}{note}",
        f"steps {status['step']} of {status['steps']} · asks for {gpus_words(status['gpus'])} "
        f"GPUs · {status['attempts']} starts, {status['preemptions']} preemptions, "
        f"{status['migrations']} moves, {status['faults']} faults in a row",
    ]
    lines += [
        f"holds {place['server']}: GPUs {gpu_list(place)}, {place['cpus']:g} CPUs, "
        f"{place['memory_gb']:.3g} GB"
        for place in status["places"]
    ]
    if status["read_back"]:
        lines.append(f"read back from its process: {status['read_back']}")
    lines.append(f"command {' '.join(status['command'])}")
    lines += [f"{_clock(event['at_s'])}  {event['what']}" for event in status["events"]]
    return lines


def _clock(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
