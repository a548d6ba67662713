"""``partita fleet doctor``: what an engine needs and lacks."""

import click

from partita.cli.console import print_json
from partita.cli.fleet.live import answer_options
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.errors import UnsupportedError
from partita.flows.fleet.doctor import FleetDoctorRequest, fleet_doctor_request


@click.command(cls=Documented, name="doctor", epilog="Example: partita fleet doctor --engine slurm")
@takes(FleetDoctorRequest)
@answer_options
def command(request: FleetDoctorRequest, *, as_json: bool, debug: bool) -> None:
    """Say what an engine needs, one line for each thing; exits 4 where something is missing."""
    del debug  # read by main
    found = fleet_doctor_request(request)
    if as_json:
        print_json(found.to_json())
    else:
        for line in found.lines():
            click.echo(line)
    if not found.ok:
        raise SystemExit(UnsupportedError.exit_code)
