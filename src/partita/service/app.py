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
from partita.service.ui.headers import PageHeaders
from partita.service.ui.router import Page, page_router


def make_app(settings: Settings, fleet: Fleet | None = None) -> FastAPI:
    """Return the app.

    ``app.state.stop_waiting`` ends all long-polls, for a server that stops; ``app.state.page`` is
    the page, if there is one.

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
    page = None if settings.page is None else Page(settings.page)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        if jobs is not None:
            await jobs.open()
        if fleet is not None:
            fleet.open()
        yield
        if page is not None:
            page.close()
        if fleet is not None:
            fleet.close()
        if jobs is not None:
            await jobs.close()

    app = FastAPI(title="Partita", version=settings.version, lifespan=lifespan)
    waiting = [part.stop_waiting for part in (jobs, page) if part is not None]
    app.state.page = page
    app.state.stop_waiting = lambda: [stop() for stop in waiting]
    add_error_bodies(app)
    _add_parts(app, jobs, fleet, page)

    @app.get("/healthz", tags=["service"], responses=answers())
    async def healthz() -> dict[str, str]:
        """Say that the server is there; needs no token."""
        return {"status": "ok"}

    _add_metrics(app, counts, jobs, fleet)
    _guard(app, settings, counts, page)
    return app


def _add_parts(
    app: FastAPI, jobs: EnergyJobs | None, fleet: Fleet | None, page: Page | None
) -> None:
    if jobs is not None:
        app.include_router(energy_router(jobs))
    if fleet is not None:
        app.include_router(fleet_router(fleet))
    if page is not None:
        app.include_router(page_router(page))


def _add_metrics(
    app: FastAPI,
    counts: Counter[tuple[str, str, int]],
    jobs: EnergyJobs | None,
    fleet: Fleet | None,
) -> None:
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


def _guard(
    app: FastAPI,
    settings: Settings,
    counts: Counter[tuple[str, str, int]],
    page: Page | None,
) -> None:
    """Add what every request passes through; the last that is added is the first that it meets."""
    app.add_middleware(LimitBody, max_bytes=settings.max_body_bytes, limit_s=settings.body_limit_s)
    keys = None if page is None else page.keys
    app.add_middleware(
        RequireToken, users=settings.users, keys=keys, only_page=settings.is_page_alone
    )
    hosts, any_address = own_hosts(settings.host)
    app.add_middleware(
        RequireOwnHost, hosts=(*hosts, *settings.allow_hosts), any_address=any_address
    )
    if page is not None:
        app.add_middleware(PageHeaders)
    app.add_middleware(CountRequests, counts=counts)
    app.add_middleware(LogRequests)
