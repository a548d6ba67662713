"""``partita doctor``: what this machine has and lacks."""

import json

import click

from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.documents import write_text
from partita.flows.doctor import Examination, doctor
from partita.flows.flight import read_flight


@click.command(cls=Documented, epilog="Example: partita doctor --why")
@click.option(
    "--why", is_flag=True, help="Say for each missing part what it is for and how to get it."
)
@click.option(
    "--flight-recorder",
    metavar="DIR",
    help="Say where a run hangs: the last call that all ranks agree on, from their dumps in DIR.",
)
@click.option("-o", "--output", help="Write the findings to a JSON file.")
@output_options
def command(
    why: bool,
    flight_recorder: str | None,
    output: str | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Say what this machine has and lacks, or where a run hangs."""
    del quiet, debug  # there is no progress; main reads debug
    if flight_recorder is not None and why:
        raise click.UsageError("--why is about this machine, --flight-recorder about a run")
    found = doctor() if flight_recorder is None else read_flight(flight_recorder)
    text = json.dumps(found.to_json(), indent=1) + "\n"
    if output is not None:
        write_text(output, text)
    if as_json:
        click.echo(text, nl=False)
        return
    lines = found.lines()
    if isinstance(found, Examination) and why:
        lines += [f"  {reason}" for reason in found.reasons()]
    elif lines[-1].startswith("not here"):
        lines[-1] += "  -> partita doctor --why"
    for line in lines:
        click.echo(line)
