"""``partita convert``: between Partita's documents and foreign formats."""

import click

from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.documents import formats
from partita.flows.convert import ConvertRequest, convert_request


@click.command(
    cls=Documented,
    epilog="Example: partita convert gpt-small.plan.json gpus=4.txt\n\n"
    f"Formats: {', '.join(formats())}",
)
@takes(ConvertRequest)
@output_options
def command(request: ConvertRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """Translate IN to OUT; either may be - for stdin or stdout.

    The format of IN is found by its content, not by its name. A foreign plan needs the --graph it
    is for, and a --cluster unless that file holds one.
    """
    del debug  # read by main
    found = convert_request(request)
    if request.target == "-":
        return
    if as_json:
        from partita.cli.console import print_json  # noqa: PLC0415 (rich only where it prints)

        print_json(found.to_json())
    elif not quiet:
        click.echo(str(found))
