"""``partita checkpoint convert``: a checkpoint in another form."""

import click

from partita.cli.console import print_json, progress
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.flows.checkpoint import CheckpointConvertRequest, checkpoint_convert_request


@click.command(
    cls=Documented,
    epilog="Example: partita checkpoint convert runs/latest/checkpoints --to safetensors "
    "-o weights",
)
@takes(CheckpointConvertRequest)
@output_options
def command(request: CheckpointConvertRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """Write the newest checkpoint in DIR, or the checkpoint DIR, in another form.

    Tensors are read and written one by one. A damaged checkpoint is refused.
    """
    del debug  # read by main
    with progress("checkpoint convert", quiet=quiet or as_json) as on_progress:
        found = checkpoint_convert_request(request, on_progress)
    if as_json:
        print_json(found.to_json())
    elif not quiet:
        click.echo(str(found))
