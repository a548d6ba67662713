"""``partita fleet serve``: the live scheduler with its HTTP API."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from partita.cli.console import print_json
from partita.cli.token import note_fleet, read_token
from partita.documents import read_text
from partita.errors import InvalidInputError, UnsupportedError
from partita.fleet.engines.table import DEFAULT_ENGINE, engine_names, make_engine
from partita.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from partita.fleet.policies.resources import Servers

_EXTRA = ("fastapi", "uvicorn", "pydantic", "starlette")


@click.command(
    name="serve",
    epilog="Example: partita fleet serve --engine local --gpus 8 --round 300 --policy fifo:tune",
)
@click.option(
    "--engine",
    type=click.Choice(engine_names()),
    default=DEFAULT_ENGINE,
    show_default=True,
    help="Who runs the jobs; local: processes of this machine.",
)
@click.option(
    "--cluster", "-c", help="Declared servers: 2x4xa100, a cluster file, or Synergy's INI file."
)
@click.option("--gpus", type=click.IntRange(1, 4096), help="One server with so many GPUs.")
@click.option(
    "--cpus", type=click.IntRange(1), help="Of each server. [the cluster's, this machine's]"
)
@click.option("--memory", help="Of each server, such as 64GB. [the cluster's, this machine's]")
@click.option("--policy", default="fifo:tune", show_default=True, help="ORDERING:ALLOCATOR.")
@click.option(
    "--round", "round_text", default="300", show_default=True, help="Length of a round: 300, 5min."
)
@click.option("--restart", "restart_text", default="30", help="Cost of a restart. [30 s]")
@click.option(
    "--hold",
    "hold_text",
    default="3600",
    show_default=True,
    help="How long jobs go on past a lease that nobody renews.",
)
@click.option("--backoff", "backoff_text", default="10", help="Before a retry; doubles. [10 s]")
@click.option("--quota", "quotas", multiple=True, help="GPUs that a tenant may hold: NAME=8.")
@click.option(
    "--state",
    type=click.Path(dir_okay=False, path_type=Path),
    default="partita-fleet.sqlite",
    show_default=True,
    help="SQLite file; jobs' directories are beside it.",
)
@click.option(
    "--groups/--no-groups", default=True, help="Use control groups where they are permitted."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--allow-host",
    "allow_hosts",
    multiple=True,
    help="Further name that clients call this server by, such as that of a proxy.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=7788,
    show_default=True,
    help="0 takes a free one.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the token that clients show. [PARTITA_TOKEN, else one is made beside --state]",
)
@click.option("--json", "as_json", is_flag=True, help="Print where it listens as JSON.")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
def command(host: str, port: int, as_json: bool, **rest: Any) -> None:
    """Share servers among jobs, round by round.

    Ends with SIGTERM or Ctrl-C; jobs that run go on, and are found again when it is started with
    the same --state. 'partita fleet drain' stops them first.
    """
    try:
        from partita.service.app import make_app  # noqa: PLC0415 (an extra)
        from partita.service.serve import bound_socket, serve  # noqa: PLC0415
        from partita.service.settings import Settings  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        if (exc.name or "").split(".")[0] not in _EXTRA:
            raise
        raise UnsupportedError(
            f"the server needs {exc.name}; pip install 'partita[serve]'"
        ) from exc
    from partita.fleet.live.fleet import Fleet  # noqa: PLC0415 (heavy)
    from partita.fleet.live.token import TOKEN_FILE, make_token  # noqa: PLC0415

    settings = Settings(
        host=host, allow_hosts=rest["allow_hosts"], token=read_token(rest["token_file"])
    )
    servers = declared_servers(rest["cluster"], rest["gpus"], rest["cpus"], rest["memory"])
    engine = make_engine(rest["engine"], servers, groups=rest["groups"])
    fleet = Fleet(_fleet_settings(rest), servers, rest["policy"], engine)
    made = None
    try:
        if not settings.token:
            settings = replace(settings, token=make_token(fleet.settings.home))
            made = fleet.settings.home / TOKEN_FILE
        bound = bound_socket(host, port)
    except InvalidInputError:
        fleet.close()
        raise
    number = bound.getsockname()[1]
    address = f"http://{f'[{host}]' if ':' in host else host}:{number}"
    if made is not None:
        note_fleet(number, made)
    _announce(fleet, engine.notes(), address, made, as_json=as_json)
    serve(make_app(settings, fleet), bound)


def _announce(
    fleet: Any, notes: tuple[str, ...], address: str, made: Path | None, *, as_json: bool
) -> None:
    servers = fleet.servers
    if as_json:
        state = str(fleet.settings.state)
        print_json(
            {
                "url": address,
                "policy": fleet.policy,
                "state": state,
                "notes": list(notes),
                "token_file": None if made is None else str(made),
            }
        )
        return
    click.echo(
        f"{address} · {fleet.policy} · {len(servers)} servers, {servers.num_gpus} GPUs, "
        f"{float(servers.cpus.sum()):g} CPUs · rounds of {fleet.settings.round_s:g} s · "
        f"state in {fleet.settings.state}"
    )
    if made is not None:
        click.echo(
            f"clients have to show the token in {made}; those of this user find it", err=True
        )
    for note in notes:
        click.echo(note, err=True)


def _fleet_settings(rest: dict[str, Any]) -> Any:
    from partita.fleet.live.settings import FleetSettings  # noqa: PLC0415

    round_s = parse_seconds(rest["round_text"], "--round")
    return FleetSettings(
        state=rest["state"],
        round_s=round_s,
        poll_s=min(0.5, round_s / 20),
        restart_s=parse_seconds(rest["restart_text"], "--restart"),
        hold_s=parse_seconds(rest["hold_text"], "--hold"),
        backoff_s=parse_seconds(rest["backoff_text"], "--backoff"),
        quotas=_quotas(rest["quotas"]),
    )


def _quotas(pairs: tuple[str, ...]) -> dict[str, int]:
    found = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not value.isdigit():
            raise InvalidInputError(f"--quota {pair!r} is not of the form TENANT=GPUS")
        found[name] = int(value)
    return found


def declared_servers(
    cluster: str | None, gpus: int | None, cpus: int | None, memory: str | None
) -> "Servers":
    """Return the servers that the options declare.

    Raises:
        InvalidInputError: They are not told, told twice, or wrong.
    """
    from partita.fleet.policies.resources import Servers, servers_of  # noqa: PLC0415

    if (cluster is None) == (gpus is None):
        raise InvalidInputError("give either --gpus N or --cluster")
    if cluster is not None:
        servers = servers_of(_read_cluster(cluster))
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        servers = Servers(
            names=("local",),
            gpu_type=np.zeros(1, dtype=np.int32),
            gpus=np.array([gpus], dtype=np.int32),
            cpus=np.array([float(len(os.sched_getaffinity(0)))]),
            memory_gb=np.array([math.floor(there / 1e8) / 10]),
            storage_mb_per_s=np.zeros(1),
        )
    if cpus is not None:
        servers = replace(servers, cpus=np.full(len(servers), float(cpus)))
    if memory is not None:
        size = parse_bytes(memory, "--memory") / 1e9
        servers = replace(servers, memory_gb=np.full(len(servers), size))
    return servers


def _read_cluster(spec: str) -> Any:
    from partita.catalogue.catalogue import load_catalogue  # noqa: PLC0415
    from partita.catalogue.parse import parse_cluster  # noqa: PLC0415
    from partita.formats.synergy import read_cluster  # noqa: PLC0415

    if spec.endswith(".ini"):
        return read_cluster(read_text(spec), name=Path(spec).stem)
    return parse_cluster(spec, read_text, load_catalogue())
