"""``partita energy serve``: the server that sends the ranks of training jobs their clocks."""

import json
import os
from dataclasses import replace

import click

from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.errors import InvalidInputError
from partita.service.energy.serve import EnergyServer, ServeEnergyRequest, serve_energy_request


@click.command(
    cls=Documented,
    name="serve",
    epilog="Example: partita energy serve --scheduler perseus --microbatches 8 --profile-steps 5",
)
@takes(ServeEnergyRequest)
@click.option("--json", "as_json", is_flag=True, help="Print where it listens as one line of JSON.")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
def command(request: ServeEnergyRequest, *, as_json: bool, debug: bool) -> None:
    """Serve Zeus's pipeline-frequency protocol: jobs register, ask for clocks, report results.

    Ends with SIGTERM or Ctrl-C; jobs go on when it is started again with the same --state.
    """
    del debug  # read by main

    def announce(server: EnergyServer) -> None:
        click.echo(json.dumps(server.to_json()) if as_json else server.line())
        for note in () if as_json else server.notes:
            click.echo(note, err=True)

    options = (*_ancestors_options(), *request.scheduler_option)
    serve_energy_request(replace(request, scheduler_option=options), announce)


def _ancestors_options() -> list[str]:
    """Return the options of the scheduler that Zeus's and the artifact's variables hold, as k=v.

    Raises:
        InvalidInputError: A variable does not hold a JSON object.
    """
    for name in ("ZEUS_PFO_SCHEDULER_ARGS", "PERSEUS_SCHEDULER_ARGS"):
        if text := os.environ.get(name, "").strip():
            try:
                found = dict(json.loads(text))
            except (TypeError, ValueError, RecursionError):
                raise InvalidInputError(f"{name} is {text!r}; expected a JSON object") from None
            return [f"{key}={json.dumps(value)}" for key, value in found.items()]
    return []
