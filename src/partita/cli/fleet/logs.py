"""``partita fleet logs``: the output of a job of a live fleet."""

import click

from partita.cli.console import print_json
from partita.cli.fleet.live import answer_options
from partita.cli.from_request import takes
from partita.flows.fleet.live import JobLogRequest, job_log_request


@click.command(name="logs", epilog="Example: partita fleet logs -f 3")
@takes(JobLogRequest)
@answer_options
def command(request: JobLogRequest, *, as_json: bool, debug: bool) -> None:
    """Print what a job has printed, all its starts one after the other."""
    del debug  # read by main
    if as_json and request.follow:
        raise click.UsageError("--json and --follow exclude each other")
    texts = job_log_request(request)
    if as_json:
        print_json({"job": request.job, "text": "".join(texts)})
        return
    for text in texts:
        click.echo(text, nl=False)
