"""What the servers log: a line for each record, as text or as JSON.

Nothing that a client sends is in it but method, path, and the name of its user: no headers, no
query, no body. Both forms write control characters out.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from partita.names import escaped
from partita.service.auth import client_of

FORMATS = ("text", "json")
"""Forms of a log: warnings and errors as text, or every request and event as JSON."""
_LONGEST = 512
_access = logging.getLogger("partita.service.requests")


class LogRequests:
    """Middleware that logs each answer with its method, path, status, seconds, client and user."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and log its answer."""
        if scope["type"] != "http" or not _access.isEnabledFor(logging.INFO):
            await self.app(scope, receive, send)
            return
        began_s, status = time.monotonic(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            user = scope.get("user")
            fields = {
                "method": scope["method"][:_LONGEST],
                "path": scope["path"][:_LONGEST],
                "status": status,
                "seconds": round(time.monotonic() - began_s, 6),
                "client": client_of(scope),
                "user": user.name if user is not None else None,
            }
            _access.info("%s %s %s", status, fields["method"], fields["path"], extra=_extra(fields))


def _extra(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"fields": dict(fields)}


class TextFormatter(logging.Formatter):
    """A record as a line of text; a traceback has lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """Return the line of a record."""
        return escaped(super().formatMessage(record))


class JsonFormatter(logging.Formatter):
    """A record as one JSON object: time, level, logger, message, and the fields that it has."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        found: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found)


def log_to_stderr(form: str) -> None:
    """Let this process log to stderr: warnings as text, or everything from INFO on as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    for name in ("partita", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO if form == "json" else logging.WARNING)
    # uvicorn tells of connections and starts at INFO, which our own lines tell better.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
