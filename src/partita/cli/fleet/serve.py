"""``partita fleet serve``: the live scheduler with its HTTP API."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from partita.cli.console import print_json
from partita.cli.from_request import takes
from partita.cli.token import note_fleet, read_token
from partita.errors import InvalidInputError, UnsupportedError
from partita.flows.fleet.serve import ServeFleetRequest, open_fleet

if TYPE_CHECKING:
    from partita.fleet.live.fleet import Fleet

_EXTRA = ("fastapi", "uvicorn", "pydantic", "starlette")


@click.command(
    name="serve",
    epilog="Example: partita fleet serve --engine local --gpus 8 --round 300 --policy fifo:tune",
)
@takes(ServeFleetRequest, without=("state", "groups"))
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
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the token that clients show. [PARTITA_TOKEN, else one is made beside --state]",
)
@click.option("--json", "as_json", is_flag=True, help="Print where it listens as JSON.")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
def command(
    request: ServeFleetRequest,
    *,
    state: Path,
    groups: bool,
    host: str,
    allow_hosts: tuple[str, ...],
    port: int,
    token_file: Path | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Share servers among jobs, round by round.

    Ends with SIGTERM or Ctrl-C; jobs that run go on, and are found again when it is started with
    the same --state. 'partita fleet drain' stops them first.
    """
    del debug  # read by main
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
    from partita.fleet.live.token import TOKEN_FILE, make_token  # noqa: PLC0415 (with the server)

    settings = Settings(host=host, allow_hosts=allow_hosts, token=read_token(token_file))
    fleet, engine = open_fleet(replace(request, state=state, groups=groups))
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
    fleet: "Fleet", notes: tuple[str, ...], address: str, made: Path | None, *, as_json: bool
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
