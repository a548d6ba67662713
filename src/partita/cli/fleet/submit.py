"""``partita fleet submit``: job files to a live fleet."""

import click

from partita.cli.console import print_json
from partita.cli.fleet.live import answer_options
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.flows.fleet.live import SubmitRequest, submit_request


@click.command(cls=Documented, name="submit", epilog="Example: partita fleet submit job.yaml")
@takes(SubmitRequest)
@answer_options
def command(request: SubmitRequest, *, as_json: bool, debug: bool) -> None:
    """Submit jobs; all files are read before the first is sent. See docs/fleet-live.md."""
    del debug  # read by main
    found = submit_request(request, lambda step: click.echo(step, err=True))
    if as_json:
        print_json(found.to_json())
        return
    for file, spec, number in zip(found.files, found.specs, found.numbers, strict=True):
        click.echo(
            f"{file}: {spec.name} is right" if number is None else f"job {number} {spec.name}"
        )
