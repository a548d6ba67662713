"""``partita fleet``: what jobs need, and sharing a cluster among them."""

from collections.abc import Mapping

import click

from partita.cli.lazy import LazyGroup

COMMANDS: Mapping[str, str] = {
    "profile": "Measure how the speed of a training script depends on CPUs and memory.",
    "trace": "Draw, read, change and show the jobs of a fleet.",
    "curve": "Compute a job's speed by number and type of GPUs with the planner.",
    "simulate": "Play a trace under several policies and rank them.",
    "serve": "Run the live scheduler: rounds, leases, an HTTP API.",
    "submit": "Hand job files to a live fleet.",
    "queue": "List the jobs of a live fleet.",
    "status": "Show everything about a job.",
    "logs": "Print what a job has printed.",
    "cancel": "End jobs for good.",
    "drain": "Stop all jobs with their checkpoints, and start none.",
    "top": "Watch a live fleet.",
    "doctor": "Say what an engine needs and lacks.",
}


@click.command(
    cls=LazyGroup,
    table=COMMANDS,
    module_of="partita.cli.fleet.{}".format,
    epilog="Example: partita fleet profile --json train.py --data images",
)
def command() -> None:
    """Share a cluster among many jobs, knowing what each really needs."""
