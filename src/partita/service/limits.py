"""How a request may look: JSON, of a limited size, within a limited time."""

import asyncio
from collections import Counter

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from partita.fleet.live.news import NEWS_PATH
from partita.service.auth import client_of

SHARE = 4
"""Largest bodies that a client may have under way at once."""
NEWS_BYTES = 2**16
"""Largest body of a job's news, whose token is looked at only when it is there."""


class LimitBody:
    """Middleware that takes bodies of JSON, up to a size and within a time, and refuses others.

    The body is gathered here and handed on whole, so that one without a length is limited as well,
    and nobody behind waits for a client. What form a body has is decided here and not by the
    framework: a page of another site may send a form or a plain text without asking first, and
    some versions take those for JSON.

    Args:
        app: What it guards.
        max_bytes: Largest body.
        limit_s: How long a body may take to arrive.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, limit_s: float) -> None:
        self.app = app
        self.max_bytes, self.limit_s = max_bytes, limit_s
        self._held: Counter[str] = Counter()  # bytes under way, by client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 408 (slow), 413 (large), 415 (no JSON) or 429 (too many)."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, client = Headers(scope=scope), client_of(scope)
        declared = headers.get("content-length", "0")
        has_body = declared != "0" or "transfer-encoding" in headers
        if has_body and not is_json(headers.get("content-type", "")):
            await _refusal(415, "a body has to be application/json")(scope, receive, send)
            return
        is_news = scope["path"].startswith(NEWS_PATH)
        most = min(self.max_bytes, NEWS_BYTES) if is_news else self.max_bytes
        if declared.isdigit() and int(declared) > most:
            await _too_large(most)(scope, receive, send)
            return
        gathered: list[bytes] = []
        try:
            refusal = await self._gather(receive, gathered, client, most)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
            await self.app(scope, _replay(b"".join(gathered), receive), send)
        finally:
            self._held[client] -= sum(map(len, gathered))
            if self._held[client] <= 0:
                del self._held[client]

    async def _gather(
        self, receive: Receive, parts: list[bytes], client: str, most: int
    ) -> JSONResponse | None:
        """Gather a body; returns how to refuse it where that has to be."""
        try:
            async with asyncio.timeout(self.limit_s):
                size, more = 0, True
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._held[client] += len(parts[-1])
                    if size > most:
                        return _too_large(most)
                    if self._held[client] > SHARE * self.max_bytes:
                        return _refusal(429, "too many large bodies at once; ask again later")
                    more = message.get("more_body", False)
        except TimeoutError:
            return _refusal(408, f"the body is not whole after {self.limit_s:g} s")
        return None


def is_json(content_type: str) -> bool:
    """Return whether a content type is that of JSON."""
    return content_type.partition(";")[0].strip().lower() == "application/json"


def _too_large(most: int) -> JSONResponse:
    return _refusal(413, f"the body is larger than {most} bytes")


def _refusal(status: int, detail: str) -> JSONResponse:
    """Return an answer after which the connection is closed: what is still to come is not read."""
    return JSONResponse({"detail": detail}, status_code=status, headers={"Connection": "close"})


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
