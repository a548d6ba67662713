"""``partita fleet logs``: the output of a job of a live fleet."""

import sys

import click

from partita.cli.console import print_json
from partita.cli.fleet.live import answer_options
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.flows.fleet.live import JobLogRequest, job_log_request
from partita.names import escaped_lines


@click.command(cls=Documented, name="logs", epilog="Example: partita fleet logs -f 3")
@takes(JobLogRequest)
@answer_options
def command(request: JobLogRequest, *, as_json: bool, debug: bool) -> None:
    """Print what a job has printed, all its starts one after the other.

    On a terminal, characters that would move its cursor or clear it are written out; a file or
    another program gets the text without colours and otherwise as it is.
    """
    del debug  # read by main
    if as_json and request.follow:
        raise click.UsageError("--json and --follow exclude each other")
    texts = job_log_request(request, lambda words: click.echo(words, err=True))
    if as_json:
        print_json({"job": request.job, "text": "".join(texts)})
        return
    for text in texts:
        click.echo(escaped_lines(text) if sys.stdout.isatty() else text, nl=False)
