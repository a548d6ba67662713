"""An app with the page alone, and a browser that followed its link."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from partita.service.app import make_app
from partita.service.settings import PageSettings, Settings

URL = "http://127.0.0.1:7789"


@asynccontextmanager
async def page_client(
    folder: Path, *, known: bool = True, max_body: int = 2**20, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client of the page; ``known`` = it has followed the link."""
    page = PageSettings(
        **{"runs": folder / "runs", "fleet": "http://127.0.0.1:9", "jobs": 1, **settings}
    )
    app = make_app(Settings(page=page, max_body_bytes=max_body))
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url=URL) as client,
    ):
        client.app = app  # type: ignore[attr-defined]
        if known:
            answer = await client.get("/", params={"token": app.state.page.keys.link()})
            assert answer.status_code == 303
        yield client
