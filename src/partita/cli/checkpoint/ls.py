"""``partita checkpoint ls``: the checkpoints of a folder."""

import click

from partita.cli.console import print_json, progress, stdout_console, table
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.flows.checkpoint import CheckpointList, CheckpointsRequest, checkpoints_request


@click.command(
    cls=Documented, epilog="Example: partita checkpoint ls runs/latest/checkpoints --verify"
)
@takes(CheckpointsRequest)
@output_options
def command(request: CheckpointsRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """List the checkpoints in DIR: step, plan, size, date, and whether they are whole.

    Without --verify the sizes of the files are compared, not their bytes.
    """
    del debug  # read by main
    with progress("checkpoint ls", quiet=quiet or as_json) as on_progress:
        found = checkpoints_request(request, on_progress)
    show(found, as_json=as_json)


def show(found: CheckpointList, *, as_json: bool) -> None:
    """Print a list of checkpoints."""
    if as_json:
        print_json(found.to_json())
    elif not found.checkpoints:
        click.echo(str(found))
    else:
        rows = found.rows()
        columns = [(name, "right" if name in ("step", "size") else "left") for name in rows[0]]
        stdout_console().print(table(columns, [list(map(str, row.values())) for row in rows]))
