"""The one app: routers of the parts, what they have in common, how large a request may be."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from partita.errors import InvalidInputError
from partita.fleet.live.fleet import Fleet
from partita.service.auth import RequireOwnHost, RequireToken, own_hosts
from partita.service.energy.jobs import EnergyJobs
from partita.service.energy.router import energy_router, energy_samples
from partita.service.energy.store import EnergyStore
from partita.service.errors import add_error_bodies, answers
from partita.service.fleet.router import fleet_router, fleet_samples
from partita.service.metrics import CountRequests, Sample, exposition
from partita.service.settings import Settings


class LimitBody:
    """Middleware that answers 413 to bodies above a limit, before anybody reads them.

    The body is gathered here and handed on whole, so that one without a length is limited as well.

    Args:
        app: What it guards.
        max_bytes: The limit.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 413."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        body = None
        if not declared.isdigit() or int(declared) <= self.max_bytes:
            body = await self._gather(receive)
        if body is None:
            refusal = JSONResponse(
                {"detail": f"the body is larger than {self.max_bytes} bytes"}, status_code=413
            )
            await refusal(scope, receive, send)
            return
        await self.app(scope, _replay(body, receive), send)

    async def _gather(self, receive: Receive) -> bytes | None:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return b""
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.max_bytes:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives the body first and then what else there is."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


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
    if fleet is not None and not settings.token:
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

    @app.get("/healthz", tags=["service"], responses=answers(413))
    async def healthz() -> dict[str, str]:
        """Say that the server is there; needs no token."""
        return {"status": "ok"}

    @app.get(
        "/metrics",
        tags=["service"],
        response_class=PlainTextResponse,
        responses=answers(401, 413),
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
    app.add_middleware(LimitBody, max_bytes=settings.max_body_bytes)
    if settings.token:
        app.add_middleware(RequireToken, token=settings.token)
    hosts, any_address = own_hosts(settings.host)
    app.add_middleware(
        RequireOwnHost, hosts=(*hosts, *settings.allow_hosts), any_address=any_address
    )
    app.add_middleware(CountRequests, counts=counts)
