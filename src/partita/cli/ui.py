"""``partita ui``: the page for the whole flow."""

import click

from partita.cli.console import print_json
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.service.ui.serve import PageRequest, PageServer, serve_page_request


@click.command(
    cls=Documented,
    name="ui",
    epilog="Example: partita ui --port 7789 --runs runs --server http://127.0.0.1:7788",
)
@takes(PageRequest)
@click.option("--json", "as_json", is_flag=True, help="Print where it is served as JSON.")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
def command(request: PageRequest, *, as_json: bool, debug: bool) -> None:
    """Serve a page for the whole flow: model, cluster, plan, edits, energy, fleet, what runs now.

    Open the link that it prints: it is good once, and the browser that followed it stays known
    until the server ends, by Ctrl-C or SIGTERM. Uploaded documents and results are held in memory
    and go with it; every view has an address that asks for the same again, and shows the command
    that gives the same.
    """
    del debug  # read by main

    def announce(server: PageServer) -> None:
        if as_json:
            print_json(server.to_json())
            return
        click.echo(f"open {server.line()}")
        for note in server.notes:
            click.echo(note, err=True)

    serve_page_request(request, announce)
