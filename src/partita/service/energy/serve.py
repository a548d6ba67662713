"""The energy server, started and served: what ``partita.serve_energy`` and ``energy serve`` do."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from partita.core.schedules import Schedule, schedule_names
from partita.errors import InvalidInputError
from partita.http import read_token
from partita.requests import declare, make
from partita.service.energy.plans import read_plans
from partita.service.listen import ServerFields, port_field, server_needed, token_field, url_of
from partita.service.settings import (
    DEFAULT_MAX_BODY_BYTES,
    DEFAULT_MAX_IDLE_S,
    DEFAULT_POLL_LIMIT_S,
    DEFAULT_PORT,
    DEFAULT_SOLVE_LIMIT_S,
    EnergySettings,
    Settings,
)
from partita.service.users import Users, load_users

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
"""Names of Zeus's and the artifact's schedulers, and ours for them."""


@dataclass(frozen=True, kw_only=True)
class ServeEnergyRequest(ServerFields):
    """Where the energy server listens, who decides the clocks, and its limits."""

    port: int = port_field(DEFAULT_PORT)
    scheduler: str = declare(
        "perseus",
        environment=("ZEUS_PFO_SCHEDULER", "PERSEUS_SCHEDULER"),
        help="Scheduler that decides the clocks; see docs/energy-server.md.",
    )
    scheduler_option: tuple[str, ...] = declare(
        (), flags=("-O",), help="Option of the scheduler, k=v."
    )
    profile_steps: int = declare(
        5, minimum=1, help="Iterations that clients report on at each clock."
    )
    microbatches: int | None = declare(
        None, minimum=1, maximum=65536, help="Number of microbatches of jobs that give none."
    )
    schedule: str = declare(
        "1f1b",
        choices=schedule_names,
        added=Schedule.plugins().names,
        help="Schedule of jobs that give none.",
    )
    state: str = declare(
        "partita-energy.sqlite", path="file", help="SQLite file; jobs go on after a restart."
    )
    dump: str | None = declare(
        None,
        path="folder",
        environment=("ZEUS_PFO_DUMP_DIR", "PERSEUS_DUMP_DIR"),
        help="Folder for the artifact's files and the profile.csv of each job.",
    )
    token_file: str | None = token_field("PARTITA_TOKEN")
    poll_limit: float = declare(
        DEFAULT_POLL_LIMIT_S,
        above=0,
        maximum=1e7,
        help="Seconds that a rank waits for a schedule before it has to ask again.",
    )
    max_idle: float = declare(
        DEFAULT_MAX_IDLE_S,
        minimum=1,
        maximum=1e9,
        environment=("ZEUS_PFO_MAX_JOB_IDLE_TIME",),
        help="Seconds without a word after which a job is closed, and then until its rows go.",
    )
    solve_limit: float = declare(
        DEFAULT_SOLVE_LIMIT_S,
        above=0,
        maximum=1e6,
        help="Seconds for one frontier; then the job goes on at the highest clocks.",
    )
    max_body: int = declare(
        DEFAULT_MAX_BODY_BYTES,
        minimum=1024,
        maximum=2**32,
        help="Largest body of a request, in bytes.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyServer:
    """An energy server that listens.

    Attributes:
        notes: What whoever started it should know, a line each.
    """

    url: str
    scheduler: str
    state: str
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """Return where it listens, in a line."""
        return f"{self.url} · scheduler {self.scheduler} · state in {self.state}"

    def to_json(self) -> dict[str, Any]:
        """Return where it listens as JSON values."""
        return {
            "url": self.url,
            "scheduler": self.scheduler,
            "state": self.state,
            "notes": list(self.notes),
        }


def serve_energy(
    *,
    on_listening: Callable[[EnergyServer], None] = lambda _: None,
    **options: Any,  # noqa: ANN401 (fields of ServeEnergyRequest)
) -> None:
    """Serve Zeus's pipeline-frequency protocol in this process until SIGTERM or Ctrl-C.

    Args:
        on_listening: Called once the server can be reached.
        **options: The fields of :class:`ServeEnergyRequest`: the options of
            ``partita energy serve``.

    Raises:
        InvalidInputError: There is no such option, or the address or the state cannot be had.
        UnsupportedError: The extra ``serve`` is not installed.
    """
    serve_energy_request(make(ServeEnergyRequest, **options), on_listening)


def serve_energy_request(
    request: ServeEnergyRequest, on_listening: Callable[[EnergyServer], None]
) -> None:
    """Serve as a request asks for; see :func:`serve_energy`."""
    with server_needed():
        from partita.service.app import make_app  # noqa: PLC0415 (an extra)
        from partita.service.logs import log_to_stderr  # noqa: PLC0415 (likewise)
        from partita.service.serve import bound_socket, serve  # noqa: PLC0415 (likewise)
    settings = settings_of(request)
    assert settings.energy is not None
    tls = request.tls()
    log_to_stderr(request.log)
    app = make_app(settings)
    bound = bound_socket(request.host, request.port)
    on_listening(
        EnergyServer(
            url=url_of(request.host, bound, is_tls=tls is not None),
            scheduler=settings.energy.scheduler,
            state=request.state,
            notes=request.notes(),
        )
    )
    serve(app, bound, tls=tls)


def settings_of(request: ServeEnergyRequest) -> Settings:
    """Return the settings of the app.

    Raises:
        InvalidInputError: There is no such scheduler, or no token where one is needed.
    """
    return Settings(
        host=request.host,
        allow_hosts=request.allow_host,
        users=Users(read_token(request.token_file), load_users(request.users)),
        max_body_bytes=request.max_body,
        version=import_module("partita").__version__,
        energy=EnergySettings(
            state=Path(request.state),
            scheduler=ANCESTORS.get(request.scheduler, request.scheduler),
            options=_scheduler_options(request.scheduler_option),
            profile_steps=request.profile_steps,
            microbatches=request.microbatches,
            schedule=Schedule(request.schedule),
            dump=None if request.dump is None else Path(request.dump),
            poll_limit_s=request.poll_limit,
            max_idle_s=request.max_idle,
            solve_limit_s=request.solve_limit,
        ),
    )


def _scheduler_options(pairs: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the options of the scheduler; a value is JSON, or else a text.

    Raises:
        InvalidInputError: One is not of the form ``k=v``.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign:
            raise InvalidInputError(f"--scheduler-option {pair!r} is not of the form k=v")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    if "solution_path" in found:
        found["plans"] = read_plans(str(found.pop("solution_path")))
    return found
