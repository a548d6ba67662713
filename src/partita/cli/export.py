"""``partita export``: a plan as code, or as the files of PipeDream."""

import click

from partita.cli.from_request import takes
from partita.cli.options import output_options
from partita.flows.export import ExportRequest, export_request


@click.command(
    epilog="Example: partita export gpt.plan.json --to python -o gpt_stages\n\n"
    "partita export gpus=4.txt --to python --model vgg16 -o vgg16_stages"
)
@takes(ExportRequest)
@output_options
def command(request: ExportRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """Write PLAN as code: one readable module per stage, or the files of PipeDream.

    python: a package that needs torch alone. pipedream: gpus=N.txt. pipedream-conf: the
    configurations of PipeDream's runtime for data, model and hybrid parallelism. PLAN is what
    'partita plan' has written, or a gpus=N.txt; of such a file the layers are made from their
    descriptions if no --model is named.
    """
    del debug  # read by main
    found = export_request(request)
    if as_json:
        from partita.cli.console import print_json  # noqa: PLC0415 (rich only where it prints)

        print_json(found.to_json())
    elif not quiet:
        for note in found.notes:
            click.echo(f"note: {note}", err=True)
        for path in found.written:
            click.echo(f"written {path}")
