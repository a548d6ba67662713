"""The app in this process: requests without a network."""

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from partita.service.app import make_app
from partita.service.settings import EnergySettings, Settings
from partita.service.users import Users

for _name in ("whole_app", "page_app"):
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])

Open = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def serving(tmp_path: Path) -> Open:
    """Return what opens a client of an app over the same database every time."""

    @asynccontextmanager
    async def opened(
        *, token: str = "", max_body: int = 2**20, **energy: Any
    ) -> AsyncIterator[httpx.AsyncClient]:
        defaults = {"state": tmp_path / "jobs.sqlite", "scheduler": "all-max", "microbatches": 2}
        settings = EnergySettings(**{**defaults, **energy})
        app = make_app(Settings(users=Users(token), max_body_bytes=max_body, energy=settings))
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7787") as client,
        ):
            client.app = app  # type: ignore[attr-defined]
            yield client

    return opened


def job_body(ranks: int = 2, **rest: Any) -> dict[str, Any]:
    return {"pp_degree": ranks, "dp_degree": 1, "tp_degree": 1, "world_size": ranks, **rest}


def rank_body(rank: int, **rest: Any) -> dict[str, Any]:
    body = {"rank": rank, "dp_rank": 0, "pp_rank": rank, "tp_rank": 0}
    return {**body, "available_frequencies": [1200, 1400], **rest}


def result_body(rank: int, **rest: Any) -> dict[str, Any]:
    return {"rank": rank, "iter_time": [1.0], "iter_energy": [2.0], **rest}


@pytest.fixture
def bodies() -> Any:
    class Bodies:
        job = staticmethod(job_body)
        rank = staticmethod(rank_body)
        result = staticmethod(result_body)

    return Bodies


@pytest.fixture
def registered(bodies: Any) -> Callable[..., Awaitable[str]]:
    """Return what registers a job with all of its ranks and waits until it has been looked at."""

    async def register(client: httpx.AsyncClient, ranks: int = 2, **rest: Any) -> str:
        answer = await client.post("/register_job", json=bodies.job(ranks, **rest))
        assert answer.status_code == 200, answer.text
        job: str = answer.json()
        for rank in range(ranks):
            answer = await client.post(f"/register_rank/{job}", json=bodies.rank(rank))
            assert answer.status_code == 200, answer.text
        await client.get(f"/schedule/{job}", params={"rank": 0})
        return job

    return register


@pytest.fixture
def run() -> Callable[[Awaitable[Any]], Any]:
    """Return what runs a test's coroutine, with a limit."""

    def call(work: Awaitable[Any]) -> Any:
        async def limited() -> Any:
            return await asyncio.wait_for(work, 60)

        return asyncio.run(limited())

    return call


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("PARTITA_TOKEN", "ZEUS_PFO_", "PERSEUS_")):
            monkeypatch.delenv(name)
