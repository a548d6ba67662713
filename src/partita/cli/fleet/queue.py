"""``partita fleet queue``: the jobs of a live fleet."""

from pathlib import Path

import click

from partita.cli.console import print_json, stdout_console
from partita.cli.fleet.live import client_of, job_table, server_line, server_options


@click.command(name="queue", epilog="Example: partita fleet queue --all")
@click.option("--all", "all_jobs", is_flag=True, help="List jobs that have ended, too.")
@server_options
def command(
    all_jobs: bool, server: str, token_file: Path | None, as_json: bool, debug: bool
) -> None:
    """List the jobs of a fleet, in the order in which they came."""
    del debug
    client = client_of(server, token_file)
    jobs = client.jobs(all_jobs=all_jobs)
    if as_json:
        print_json(jobs)
        return
    console = stdout_console()
    console.print(server_line(client.info()))
    if jobs:
        console.print(job_table(jobs))
    else:
        console.print(
            "no jobs" if all_jobs else "no jobs wait or run; --all shows those that ended"
        )
