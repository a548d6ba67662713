"""``partita fleet status``: everything about a job of a live fleet."""

import click

from partita.cli.console import print_json
from partita.cli.fleet.live import answer_options
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.flows.fleet.live import JobRequest, job_status_request, status_lines


@click.command(cls=Documented, name="status", epilog="Example: partita fleet status 3")
@takes(JobRequest)
@answer_options
def command(request: JobRequest, *, as_json: bool, debug: bool) -> None:
    """Show a job: what it holds, what its process reports to hold, what became of it."""
    del debug  # read by main
    found = job_status_request(request)
    if as_json:
        print_json(found.to_json())
        return
    for line in status_lines(found.status):
        click.echo(line)
