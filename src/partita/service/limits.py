"""How large a request may be."""

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
