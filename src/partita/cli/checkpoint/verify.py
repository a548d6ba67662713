"""``partita checkpoint verify``: checkpoints read whole."""

from dataclasses import replace

import click

from partita.cli.checkpoint.ls import show
from partita.cli.console import progress
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.flows.checkpoint import CheckpointsRequest, checkpoints_request


@click.command(cls=Documented, epilog="Example: partita checkpoint verify runs/latest/checkpoints")
@takes(CheckpointsRequest, without=("verify",))
@output_options
def command(request: CheckpointsRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """Read the checkpoints in DIR and compare all digests; exit code 2 where one is damaged."""
    del debug  # read by main
    with progress("checkpoint verify", quiet=quiet or as_json) as on_progress:
        found = checkpoints_request(replace(request, verify=True), on_progress)
    show(found, as_json=as_json)
    found.require_whole()
