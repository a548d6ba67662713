"""``partita fleet queue``: the jobs of a live fleet."""

import click

from partita.cli.console import print_json, stdout_console
from partita.cli.fleet.live import answer_options, job_table
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.flows.fleet.live import ListJobsRequest, list_jobs_request, server_line


@click.command(cls=Documented, name="queue", epilog="Example: partita fleet queue --all")
@takes(ListJobsRequest)
@answer_options
def command(request: ListJobsRequest, *, as_json: bool, debug: bool) -> None:
    """List the jobs of a fleet, in the order in which they came."""
    del debug  # read by main
    found = list_jobs_request(request)
    if as_json:
        print_json(found.to_json())
        return
    console = stdout_console()
    console.print(server_line(found.info))
    if found.jobs:
        console.print(job_table(found.jobs))
    else:
        console.print(
            "no jobs" if request.all else "no jobs wait or run; --all shows those that ended"
        )
