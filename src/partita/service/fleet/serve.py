"""A live fleet, started and served: what ``partita.serve_fleet`` and ``fleet serve`` do."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partita.core.cluster import Cluster
from partita.errors import InvalidInputError
from partita.fleet.engines.protocol import Engine
from partita.fleet.engines.table import DEFAULT_ENGINE, ENGINES, PLUGINS, make_engine
from partita.fleet.live.client import DEFAULT_PORT
from partita.fleet.live.fleet import Fleet
from partita.fleet.live.scheduler import FleetSettings
from partita.fleet.live.token import TOKEN_FILE, make_token, note_fleet
from partita.flows.fields import SLURM
from partita.flows.fleet.inputs import RAY, declared_servers, parse_pairs, parse_quotas
from partita.http import read_token
from partita.requests import declare, make
from partita.service.listen import ServerFields, port_field, server_needed, token_field, url_of
from partita.service.settings import Settings
from partita.service.users import Users, load_users
from partita.units import parse_seconds


@dataclass(frozen=True, kw_only=True)
class ServeFleetRequest(ServerFields):
    """The servers to share among jobs, who runs these, and by which policy."""

    port: int = port_field(DEFAULT_PORT)
    engine: str = declare(
        DEFAULT_ENGINE,
        choices=list(ENGINES),
        added=PLUGINS.names,
        help="Engine that runs the jobs: "
        f"{'; '.join(f'{name}, {entry.title}' for name, entry in ENGINES.items())}.",
    )
    engine_option: tuple[str, ...] = declare(
        (), help="Option of the engine: NAME=VALUE, such as partition=gpu for slurm."
    )
    cluster: str | Cluster | None = declare(
        None,
        flags=("-c",),
        help="Declared servers: 2x4xa100, a cluster file, Synergy's INI file; slurm or "
        "slurm:PARTITION, ray: the nodes of that cluster.",
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
    state: str = declare(
        "partita-fleet.sqlite", path="file", help="SQLite file; jobs' directories are beside it."
    )
    groups: bool = declare(True, help="Use control groups where they are permitted.")
    news_url: str | None = declare(
        None,
        usual="this server's address",
        help="Address at which jobs on other machines reach this server.",
    )
    token_file: str | None = token_field("PARTITA_TOKEN, else one is made beside --state")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetServer:
    """A live fleet that listens.

    Attributes:
        url: Address of the server.
        fleet: The fleet.
        notes: What the engine cannot do or assumes here, a line each.
        token_file: File with the token that was made for it; None where one was given.
    """

    url: str
    fleet: Fleet
    notes: tuple[str, ...]
    token_file: Path | None

    def line(self) -> str:
        """Return where it listens and what it shares, in a line."""
        servers, settings = self.fleet.servers, self.fleet.settings
        return (
            f"{self.url} · {self.fleet.policy} · {len(servers)} servers, {servers.num_gpus} GPUs, "
            f"{float(servers.cpus.sum()):g} CPUs · rounds of {settings.round_s:g} s · "
            f"state in {settings.state}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return where it listens as JSON values."""
        return {
            "url": self.url,
            "policy": self.fleet.policy,
            "state": str(self.fleet.settings.state),
            "notes": list(self.notes),
            "token_file": None if self.token_file is None else str(self.token_file),
        }


def serve_fleet(
    *,
    on_listening: Callable[[FleetServer], None] = lambda _: None,
    **options: Any,  # noqa: ANN401 (fields of ServeFleetRequest)
) -> None:
    """Share servers among jobs in this process, round by round, until SIGTERM or Ctrl-C.

    Args:
        on_listening: Called once the server can be reached.
        **options: The fields of :class:`ServeFleetRequest`: the options of
            ``partita fleet serve``.

    Raises:
        InvalidInputError: There is no such option, or the address or the state cannot be had.
        UnsupportedError: The extra ``serve`` is not installed.
    """
    serve_fleet_request(make(ServeFleetRequest, **options), on_listening)


def serve_fleet_request(
    request: ServeFleetRequest, on_listening: Callable[[FleetServer], None]
) -> None:
    """Serve as a request asks for; see :func:`serve_fleet`."""
    with server_needed():
        from partita.service.app import make_app  # noqa: PLC0415 (an extra)
        from partita.service.auth import own_hosts  # noqa: PLC0415 (likewise)
        from partita.service.logs import log_to_stderr  # noqa: PLC0415 (likewise)
        from partita.service.serve import bound_socket, serve  # noqa: PLC0415 (likewise)
    token, known, tls = read_token(request.token_file), load_users(request.users), request.tls()
    # An address beyond loopback has to be given a token: who is to be shown the one made here?
    settings = Settings(
        host=request.host, allow_hosts=request.allow_host, users=Users(token, known)
    )
    log_to_stderr(request.log)
    fleet, engine = open_fleet(request)
    made = None
    try:
        if not token:
            settings = replace(settings, users=Users(make_token(fleet.settings.home), known))
            made = fleet.settings.home / TOKEN_FILE
        bound = bound_socket(request.host, request.port)
    except InvalidInputError:
        fleet.close()
        raise
    if made is not None:
        note_fleet(bound.getsockname()[1], made)
    names, any_address = own_hosts(request.host)
    reached = names[-1] if any_address else request.host
    fleet.scheduler.news_url = (
        request.news_url or url_of(reached, bound, is_tls=tls is not None)
    ).rstrip("/")
    notes = (*engine.notes(), *request.notes())
    on_listening(
        FleetServer(
            url=url_of(request.host, bound, is_tls=tls is not None),
            fleet=fleet,
            notes=notes,
            token_file=made,
        )
    )
    serve(make_app(settings, fleet), bound, tls=tls)


def open_fleet(request: ServeFleetRequest) -> tuple[Fleet, Engine]:
    """Return the fleet that a request asks for, with the jobs of its state, and its engine.

    Raises:
        InvalidInputError: The servers, the policy, the engine or a time are wrong.
    """
    options = parse_pairs(request.engine_option, "--engine-option")
    cluster = request.cluster
    if cluster is None and request.gpus is None and request.engine in (SLURM, RAY):
        cluster = request.engine
    servers = declared_servers(cluster, request.gpus, request.cpus, request.memory, options)
    round_s = parse_seconds(request.round, "--round")
    settings = FleetSettings(
        state=Path(request.state),
        round_s=round_s,
        poll_s=min(0.5, round_s / 20),
        restart_s=parse_seconds(request.restart, "--restart"),
        hold_s=parse_seconds(request.hold, "--hold"),
        backoff_s=parse_seconds(request.backoff, "--backoff"),
        quotas=parse_quotas(request.quota),
    )
    engine = make_engine(
        request.engine,
        servers,
        groups=request.groups,
        options=options,
    )
    return Fleet(settings, servers, request.policy, engine), engine
