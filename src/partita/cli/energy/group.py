"""``partita energy``: the time-energy frontier, clock plans, and the server that hands them out."""

from collections.abc import Mapping

import click

from partita.cli.lazy import LazyGroup

COMMANDS: Mapping[str, str] = {
    "profile": "Make an energy profile: seconds and joules of each stage by clock.",
    "frontier": "Find the least energy for every time of a step.",
    "choose": "Choose a point of a frontier and write its clocks.",
    "replay": "Play clocks from elsewhere, or a recorded log, and compare with what was claimed.",
    "compare": "Set profiles, plans and published frontiers side by side.",
    "serve": "Hand out clocks to training jobs; speaks Zeus's protocol.",
}


@click.command(
    cls=LazyGroup,
    table=COMMANDS,
    module_of="partita.cli.energy.{}".format,
    epilog="Example: partita energy frontier profile.csv --microbatches 32 --blocking-power 80\n\n"
    "Every command has --help with an example, and --json.",
)
def command() -> None:
    """Slow down what nobody waits for: less energy in the same time, or in a little more."""
