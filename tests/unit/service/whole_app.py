"""An app with both servers, the page and users of every role; and who may do what by the docs."""

import importlib.util
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from partita.fleet.live.fleet import Fleet
from partita.fleet.live.scheduler import FleetSettings
from partita.service.app import make_app
from partita.service.settings import EnergySettings, PageSettings, Settings
from partita.service.users import Role, User, Users

ROOT = Path(__file__).resolve().parents[3]
TOKENS = {role: f"token-of-{role}-0123456789" for role in Role}
ANA = User(name="ana", role=Role.SUBMIT, tenants=("vision", "speech"))
USERS = Users(
    "token-of-the-server",
    {
        **{TOKENS[role]: User(name=f"user-{role}", role=role) for role in Role},
        "token-of-ana-0123456789": ANA,
    },
)


def _builders() -> Any:
    """Return the builders of the fleet's tests, of another folder."""
    path = ROOT / "tests" / "unit" / "fleet" / "live" / "live_builders.py"
    spec = importlib.util.spec_from_file_location("live_builders", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault("live_builders", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


builders = _builders()


@dataclass
class Whole:
    """An app with both servers, and a way to it for each user."""

    app: Any
    fleet: Fleet
    client: httpx.AsyncClient

    async def ask(
        self, method: str, path: str, token: str = "token-of-the-server", **rest: Any
    ) -> httpx.Response:
        """Send a request with a token; empty = without."""
        headers = {**rest.pop("headers", {})}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return await self.client.request(method, path, headers=headers, **rest)


def whole_app(folder: Path, users: Users = USERS, **rest: Any) -> tuple[Any, Fleet]:
    settings = FleetSettings(state=folder / "fleet.sqlite", round_s=3600.0, poll_s=0.05)
    fleet = Fleet(settings, builders.servers(), "fifo:tune", builders.FakeEngine())
    energy = EnergySettings(
        state=folder / "energy.sqlite", scheduler="all-max", microbatches=2, poll_limit_s=0.05
    )
    page = PageSettings(runs=folder / "runs", fleet="http://127.0.0.1:9")
    return make_app(Settings(users=users, energy=energy, page=page, **rest), fleet), fleet


@asynccontextmanager
async def opened(folder: Path, users: Users = USERS, **rest: Any) -> AsyncIterator[Whole]:
    app, fleet = whole_app(folder, users, **rest)
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7788") as client,
    ):
        yield Whole(app, fleet, client)


def job(folder: Path, **rest: Any) -> dict[str, Any]:
    return {**builders.spec(folder).to_json(), **rest}


@cache
def page() -> str:
    return (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def rows(title: str) -> list[list[str]]:
    """Return the cells of the table below a title."""
    part = page().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
