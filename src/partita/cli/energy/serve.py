"""``partita energy serve``: the server that tells the ranks of training jobs their clocks."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from partita import __version__
from partita.cli.options import SCHEDULE, FiniteRange
from partita.cli.token import read_token
from partita.errors import InvalidInputError, UnsupportedError

ANCESTORS: Mapping[str, str] = {
    "PointSolution": "point-solution",
    "PointSolution3D": "point-solution",
    "AllMax": "all-max",
    "AllMaxFrequency": "all-max",
    "AllMaxPowerLimit": "all-max",
    "AllMaxPowerLimit3D": "all-max",
    "TwoFrequencies": "two-frequencies",
    "InstructionProfiler": "instruction-profiler",
    "ZeusGlobalPowerLimit": "global-power-limit",
}
"""What Zeus's and the artifact's servers call their schedulers."""


@click.command(
    name="serve",
    epilog="Example: partita energy serve --scheduler perseus --microbatches 8 --profile-steps 5",
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
    default=7787,
    show_default=True,
    help="0 takes a free one.",
)
@click.option(
    "--scheduler",
    default="perseus",
    envvar=["ZEUS_PFO_SCHEDULER", "PERSEUS_SCHEDULER"],
    show_default=True,
    help="Who decides the clocks; see docs/energy-server.md.",
)
@click.option(
    "--scheduler-option", "-O", "options", multiple=True, help="Option of the scheduler, k=v."
)
@click.option(
    "--profile-steps",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Iterations that clients report on at each clock.",
)
@click.option(
    "--microbatches", type=click.IntRange(1, 65536), help="Of jobs that do not say how many."
)
@click.option(
    "--schedule",
    type=SCHEDULE,
    default="1f1b",
    show_default=True,
    help="Of jobs that do not say which.",
)
@click.option(
    "--state",
    type=click.Path(dir_okay=False, path_type=Path),
    default="partita-energy.sqlite",
    show_default=True,
    help="SQLite file; jobs go on after a restart.",
)
@click.option(
    "--dump",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=["ZEUS_PFO_DUMP_DIR", "PERSEUS_DUMP_DIR"],
    help="Folder for the artifact's files and the profile.csv of each job.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the token that clients show. [PARTITA_TOKEN]",
)
@click.option(
    "--poll-limit",
    type=FiniteRange(0, 1e7, min_open=True),
    default=1800.0,
    show_default=True,
    help="Seconds that a rank waits for a schedule before it is told to ask again.",
)
@click.option(
    "--max-idle",
    type=FiniteRange(1, 1e9),
    default=604800.0,
    envvar="ZEUS_PFO_MAX_JOB_IDLE_TIME",
    show_default=True,
    help="Seconds without a word after which a job is closed, and then until its rows go.",
)
@click.option(
    "--solve-limit",
    type=FiniteRange(0, 1e6, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds for one frontier; then the job goes on at the highest clocks.",
)
@click.option(
    "--max-body",
    type=click.IntRange(1024, 2**32),
    default=2**26,
    show_default=True,
    help="Largest body of a request, in bytes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print where it listens as one line of JSON.")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
def command(host: str, port: int, as_json: bool, **rest: Any) -> None:
    """Serve Zeus's pipeline-frequency protocol: jobs register, ask for clocks, report results.

    Ends with SIGTERM or Ctrl-C; jobs go on when it is started again with the same --state.
    """
    rest.pop("debug")
    try:
        from partita.service.app import make_app  # noqa: PLC0415 (an extra)
        from partita.service.serve import bound_socket, serve  # noqa: PLC0415
        from partita.service.settings import EnergySettings, Settings  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        if (exc.name or "").split(".")[0] not in ("fastapi", "uvicorn", "pydantic", "starlette"):
            raise
        raise UnsupportedError(
            f"the server needs {exc.name}; pip install 'partita[serve]'"
        ) from exc
    scheduler = ANCESTORS.get(rest["scheduler"], rest["scheduler"])
    settings = Settings(
        host=host,
        allow_hosts=rest["allow_hosts"],
        token=read_token(rest["token_file"]),
        max_body_bytes=rest["max_body"],
        version=__version__,
        energy=EnergySettings(
            state=rest["state"],
            scheduler=scheduler,
            options=_options(rest["options"]),
            profile_steps=rest["profile_steps"],
            microbatches=rest["microbatches"],
            schedule=rest["schedule"],
            dump=rest["dump"],
            poll_limit_s=rest["poll_limit"],
            max_idle_s=rest["max_idle"],
            solve_limit_s=rest["solve_limit"],
        ),
    )
    app = make_app(settings)
    bound = bound_socket(host, port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
    if as_json:
        click.echo(
            json.dumps({"url": address, "scheduler": scheduler, "state": str(rest["state"])})
        )
    else:
        click.echo(f"{address} · scheduler {scheduler} · state in {rest['state']}")
    serve(app, bound)


def _options(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of the scheduler: the ancestors' JSON first, then ``k=v``.

    Raises:
        InvalidInputError: One is not of that form.
    """
    found: dict[str, Any] = {}
    for name in ("ZEUS_PFO_SCHEDULER_ARGS", "PERSEUS_SCHEDULER_ARGS"):
        if text := os.environ.get(name, "").strip():
            try:
                found = dict(json.loads(text))
            except (TypeError, ValueError, RecursionError):
                raise InvalidInputError(f"{name} is {text!r}; expected a JSON object") from None
            break
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign:
            raise InvalidInputError(f"--scheduler-option {pair!r} is not of the form k=v")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    if "solution_path" in found:
        from partita.service.energy.plans import read_plans  # noqa: PLC0415 (an extra)

        found["plans"] = read_plans(str(found.pop("solution_path")))
    return found
