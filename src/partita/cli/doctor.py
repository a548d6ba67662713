"""``partita doctor``: what this machine has and lacks."""

import json

import click

from partita.cli.options import output_options
from partita.documents import write_text
from partita.flows.doctor import doctor


@click.command(epilog="Example: partita doctor --why")
@click.option(
    "--why", is_flag=True, help="Say for each missing part what it is for and how to get it."
)
@click.option("-o", "--output", help="Write the findings to a JSON file.")
@output_options
def command(why: bool, output: str | None, as_json: bool, quiet: bool, debug: bool) -> None:
    """Say what this machine has and lacks."""
    del quiet, debug  # there is no progress; main reads debug
    found = doctor()
    text = json.dumps(found.to_json(), indent=1) + "\n"
    if output is not None:
        write_text(output, text)
    if as_json:
        click.echo(text, nl=False)
        return
    lines = found.lines()
    if not why and lines[-1].startswith("not here"):
        lines[-1] += "  -> partita doctor --why"
    for line in [*lines, *(f"  {reason}" for reason in found.reasons() if why)]:
        click.echo(line)
