"""What a job finds in its environment: which attempt it is, and what it holds."""

from collections.abc import Sequence

from partita.fleet.engines.protocol import FLEET_VARIABLE, JOB_VARIABLE, Order, Place
from partita.fleet.gigabytes import in_gb
from partita.fleet.lease import (
    ATTEMPT_VARIABLE,
    GPUS_VARIABLE,
    SERVER_GPUS_VARIABLE,
    SERVERS_VARIABLE,
)
from partita.fleet.live.news import DIRECTORY_VARIABLE


def identity_variables(order: Order, *, shared: bool = True) -> dict[str, str]:
    """Return the variables by which an attempt is found, and finds its directory.

    Args:
        order: The start.
        shared: Whether the job sees the directory that the scheduler writes to.
    """
    variables = {
        FLEET_VARIABLE: order.fleet,
        JOB_VARIABLE: str(order.attempt.job),
        ATTEMPT_VARIABLE: str(order.attempt.number),
    }
    return variables | ({DIRECTORY_VARIABLE: str(order.directory)} if shared else {})


def grant_variables(places: Sequence[Place]) -> dict[str, str]:
    """Return the variables that tell what a job holds."""
    gpus = [len(place.gpus) for place in places]
    return {
        GPUS_VARIABLE: str(sum(gpus)),
        "PARTITA_CPUS": f"{sum(place.cpus for place in places):g}",
        "PARTITA_MEMORY_GB": f"{in_gb(sum(place.memory_bytes for place in places)):g}",
        SERVERS_VARIABLE: ",".join(place.server for place in places),
        SERVER_GPUS_VARIABLE: ",".join(map(str, gpus)),
    }
