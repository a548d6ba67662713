"""How errors look: ``{"detail": "one line"}``, and for 422 a list that names each field."""

import logging
import sqlite3
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from partita.errors import PartitaError, UnsupportedError

logger = logging.getLogger(__name__)


class Problem(BaseModel):
    """What is wrong, in one line."""

    detail: str


class Refusal(Exception):  # noqa: N818 (an answer, not a failure of ours)
    """An answer other than 200.

    Attributes:
        status: The status code.
        detail: What is wrong, in one line.
    """

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class WrongFieldError(Exception):
    """A field of a request that cannot be right.

    Attributes:
        place: Where it is: ``("body", "pp_degree")``.
        reason: What is wrong.
    """

    def __init__(self, place: tuple[str | int, ...], reason: str) -> None:
        super().__init__(reason)
        self.place = place
        self.reason = reason


_MEANINGS: Mapping[int, str] = {
    400: "The body cannot be read.",
    401: "The token is missing or wrong.",
    403: "A web page of another site asks, or the user's role or tenants do not include this.",
    404: "There is no such job.",
    409: "It conflicts with what was sent before.",
    408: "The body takes too long to arrive.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    421: "The host that was asked for is not this server.",
    429: "Too many wrong tokens or large bodies; ask again later.",
    503: "The server is stopping, or cannot write its state; ask again.",
    504: "The wait is over; ask again.",
}


ANY_ROUTE = (403, 408, 413, 415, 421, 429)
"""Statuses that any route may answer with, whatever it does."""


def answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of the errors of a route, with those that any may answer."""
    return {
        status: {"model": Problem, "description": _MEANINGS[status]}
        for status in sorted({*statuses, *ANY_ROUTE})
    }


def printable(text: str) -> str:
    """Return one line that can be sent as UTF-8, whatever a request had in it."""
    return " ".join(text.encode("utf-8", "replace").decode("utf-8").split())


def add_error_bodies(app: FastAPI) -> None:
    """Let an app answer errors in our form."""

    @app.exception_handler(Refusal)
    async def refused(request: Request, exc: Refusal) -> JSONResponse:
        del request
        return JSONResponse({"detail": printable(exc.detail)}, status_code=exc.status)

    @app.exception_handler(WrongFieldError)
    async def wrong(request: Request, exc: WrongFieldError) -> JSONResponse:
        del request
        return _wrong_fields([{"loc": exc.place, "msg": exc.reason, "type": "value_error"}])

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, exc: RequestValidationError) -> JSONResponse:
        del request
        return _wrong_fields(exc.errors())

    @app.exception_handler(PartitaError)
    async def refused_by_us(request: Request, exc: PartitaError) -> JSONResponse:
        del request
        status = 503 if isinstance(exc, UnsupportedError) else 409
        return JSONResponse({"detail": printable(str(exc))}, status_code=status)

    @app.exception_handler(sqlite3.Error)
    async def not_written(request: Request, exc: sqlite3.Error) -> JSONResponse:
        del request
        logger.error("the state cannot be written: %s", exc)
        return JSONResponse(
            {"detail": printable(f"the state cannot be written: {exc}")}, status_code=503
        )


def _wrong_fields(errors: Any) -> JSONResponse:  # noqa: ANN401 (pydantic's errors)
    """Return 422 with the place and the reason of each field, without what was sent."""
    found = [
        {
            "loc": [
                part if isinstance(part, int) else printable(str(part)) for part in error["loc"]
            ],
            "msg": printable(str(error["msg"])),
            "type": printable(str(error["type"])),
        }
        for error in list(errors)[:32]
    ]
    return JSONResponse({"detail": found}, status_code=422)
