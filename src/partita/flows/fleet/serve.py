"""A live fleet with its servers, policy and engine: what ``partita fleet serve`` starts."""

from dataclasses import dataclass
from pathlib import Path

from partita.core.cluster import Cluster
from partita.fleet.engines.protocol import Engine
from partita.fleet.engines.table import DEFAULT_ENGINE, ENGINES, PLUGINS, make_engine
from partita.fleet.live.fleet import Fleet
from partita.fleet.live.settings import FleetSettings
from partita.flows.fleet.inputs import declared_servers, parse_quotas
from partita.requests import Request, declare
from partita.units import parse_seconds


@dataclass(frozen=True, kw_only=True)
class ServeFleetRequest(Request):
    """The servers to share among jobs, who runs these, and by which policy."""

    engine: str = declare(
        DEFAULT_ENGINE,
        choices=list(ENGINES),
        added=PLUGINS.names,
        help="Engine that runs the jobs; local: "
        f"{ENGINES[DEFAULT_ENGINE].title}; plug-ins add others.",
    )
    cluster: str | Cluster | None = declare(
        None,
        flags=("-c",),
        help="Declared servers: 2x4xa100, a cluster file, or Synergy's INI file.",
    )
    gpus: int | None = declare(
        None, minimum=1, maximum=4096, help="Number of GPUs of one server, instead of --cluster."
    )
    cpus: int | None = declare(
        None, minimum=1, usual="the cluster's, this machine's", help="Number of CPUs per server."
    )
    memory: str | None = declare(
        None, usual="the cluster's, this machine's", help="Memory per server, such as 64GB."
    )
    policy: str = declare("fifo:tune", help="Policy, as ORDERING:ALLOCATOR.")
    round: str = declare("300", help="Length of a round: 300, 5min.")
    restart: str = declare("30", usual="30 s", help="Seconds that a restart costs a job.")
    hold: str = declare("3600", help="Seconds that jobs go on past a lease that nobody renews.")
    backoff: str = declare("10", usual="10 s", help="Seconds before a retry; they double.")
    quota: tuple[str, ...] = declare((), help="GPUs that a tenant may hold: NAME=8.")
    state: Path = declare(
        Path("partita-fleet.sqlite"), help="SQLite file; jobs' directories are beside it."
    )
    groups: bool = declare(True, help="Use control groups where they are permitted.")


def open_fleet(request: ServeFleetRequest) -> tuple[Fleet, Engine]:
    """Return the fleet that a request asks for, with the jobs of its state, and its engine.

    Raises:
        InvalidInputError: The servers, the policy, the engine or a time are wrong.
    """
    servers = declared_servers(request.cluster, request.gpus, request.cpus, request.memory)
    round_s = parse_seconds(request.round, "--round")
    settings = FleetSettings(
        state=request.state,
        round_s=round_s,
        poll_s=min(0.5, round_s / 20),
        restart_s=parse_seconds(request.restart, "--restart"),
        hold_s=parse_seconds(request.hold, "--hold"),
        backoff_s=parse_seconds(request.backoff, "--backoff"),
        quotas=parse_quotas(request.quota),
    )
    engine = make_engine(request.engine, servers, groups=request.groups)
    return Fleet(settings, servers, request.policy, engine), engine
