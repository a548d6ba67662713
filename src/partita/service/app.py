"""The one app: routers of the parts, and what every request passes through."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from partita.errors import InvalidInputError
from partita.fleet.live.fleet import Fleet
from partita.service.auth import RequireOwnHost, RequireToken, own_hosts
from partita.service.energy.jobs import EnergyJobs
from partita.service.energy.router import energy_router, energy_samples
from partita.service.energy.store import EnergyStore
from partita.service.errors import add_error_bodies, answers
from partita.service.fleet.router import fleet_router, fleet_samples
from partita.service.limits import LimitBody
from partita.service.logs import LogRequests
from partita.service.metrics import CountRequests, Sample, exposition
from partita.service.settings import Settings


def make_app(settings: Settings, fleet: Fleet | None = None) -> FastAPI:
    """Return the app.

    ``app.state.stop_waiting`` ends all long-polls, for a server that stops.

    Args:
        settings: Of the app and the energy server.
        fleet: The live fleet; ``None`` = its routes are not there.

    Raises:
        InvalidInputError: The state cannot be opened, or a fleet has no token.
        UnsupportedError: Another server has it.
    """
    if fleet is not None and not settings.users:
        raise InvalidInputError("a fleet runs the commands that it is sent: it needs a token")
    counts: Counter[tuple[str, str, int]] = Counter()
    jobs = None
    if settings.energy is not None:
        jobs = EnergyJobs(settings.energy, EnergyStore(settings.energy.state), settings.version)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        if jobs is not None:
            await jobs.open()
        if fleet is not None:
            fleet.open()
        yield
        if fleet is not None:
            fleet.close()
        if jobs is not None:
            await jobs.close()

    app = FastAPI(title="Partita", version=settings.version, lifespan=lifespan)
    app.state.stop_waiting = jobs.stop_waiting if jobs is not None else lambda: None
    add_error_bodies(app)
    if jobs is not None:
        app.include_router(energy_router(jobs))
    if fleet is not None:
        app.include_router(fleet_router(fleet))

    @app.get("/healthz", tags=["service"], responses=answers())
    async def healthz() -> dict[str, str]:
        """Say that the server is there; needs no token."""
        return {"status": "ok"}

    @app.get(
        "/metrics",
        tags=["service"],
        response_class=PlainTextResponse,
        responses=answers(401),
    )
    async def metrics() -> str:
        """Return counts in Prometheus's text format."""
        samples: list[Sample] = energy_samples(jobs) if jobs is not None else []
        samples += fleet_samples(fleet) if fleet is not None else []
        return exposition(counts, samples)

    _guard(app, settings, counts)
    return app


def _guard(app: FastAPI, settings: Settings, counts: Counter[tuple[str, str, int]]) -> None:
    """Add what every request passes through; the last that is added is the first that it meets."""
    app.add_middleware(LimitBody, max_bytes=settings.max_body_bytes, limit_s=settings.body_limit_s)
    app.add_middleware(RequireToken, users=settings.users)
    hosts, any_address = own_hosts(settings.host)
    app.add_middleware(
        RequireOwnHost, hosts=(*hosts, *settings.allow_hosts), any_address=any_address
    )
    app.add_middleware(CountRequests, counts=counts)
    app.add_middleware(LogRequests)
