"""Who may speak to the app: a token, compared in constant time.

``Authorization: Bearer TOKEN``, or the password of ``Basic``: clients that only take a URL, as
Zeus's does, then reach the server as ``http://any:TOKEN@host:port``.
"""

import base64
import binascii
import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = ("/healthz",)
"""Paths that need no token."""


class RequireToken:
    """Middleware that refuses requests without the token.

    Args:
        app: What it guards.
        token: The token.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._shown(scope):
            await self.app(scope, receive, send)
            return
        refusal = JSONResponse(
            {"detail": "a token is needed: Authorization: Bearer TOKEN"},
            status_code=401,
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)

    def _shown(self, scope: Scope) -> bool:
        scheme, _, value = Headers(scope=scope).get("authorization", "").partition(" ")
        shown = value.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() == "basic":
            try:
                shown = base64.b64decode(shown, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(shown, self._token)
