"""Requests to a server of ours: one base address, a token, time limits, and errors in one line.

An error says whether the same request may succeed later (``is_passing``), and ``pause_s`` how long
to wait before it is tried again.
"""

import importlib
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.errors import InvalidInputError, PartitaError, UnsupportedError
from partita.processes import TOKEN_VARIABLE

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0
NO_SENSE = 502
"""Status of an answer that is not what was asked for, whatever its own status."""


class ServerError(PartitaError):
    """A server that does not answer, or not as asked.

    Attributes:
        status: Status of its answer; 0 = there was none.
        detail: Reason alone, as the server or the network gives it.
    """

    def __init__(self, text: str, status: int = 0, detail: Any = None) -> None:  # noqa: ANN401
        super().__init__(text)
        self.status, self.detail = status, text if detail is None else detail

    @property
    def is_passing(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status == 0 or self.status in (408, 429) or self.status >= 500


class ServerLink:
    """A connection to a server; each thread needs its own."""

    def __init__(
        self,
        url: str,
        *,
        noun: str,
        token: str | None = None,
        timeout_s: float = 10.0,
        keeps_open: bool = True,
        transport: Any = None,  # noqa: ANN401 (of httpx, which is imported late)
    ) -> None:
        """Prepare a connection; nothing is sent yet.

        Args:
            url: Such as ``http://127.0.0.1:7787``.
            noun: The word for the server in messages.
            token: The server's bearer token; that of ``PARTITA_TOKEN`` if not given.
            timeout_s: How long an answer may take.
            keeps_open: Whether the connection is kept for the next request, until ``close``.
            transport: An ``httpx`` transport to use instead of the network.

        Raises:
            InvalidInputError: It is no such address.
            UnsupportedError: httpx is not installed.
        """
        check_address(url, noun=noun)
        self._httpx = _httpx(noun)
        token = os.environ.get(TOKEN_VARIABLE) if token is None else token
        self.url, self._noun = url.rstrip("/"), noun
        self._timeout_s = timeout_s
        self._client = self._httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=timeout_s,
            limits=self._httpx.Limits(max_keepalive_connections=None if keeps_open else 0),
            transport=transport,
        )

    def post(self, path: str, body: Mapping[str, Any]) -> Any:  # noqa: ANN401 (JSON)
        """Send something, and return the answer."""
        return self._request("POST", path, body=body)

    def delete(self, path: str) -> Any:  # noqa: ANN401 (JSON)
        """Delete something, and return the answer."""
        return self._request("DELETE", path)

    def get(self, path: str, query: Mapping[str, Any] | None = None, wait_s: float = 0.0) -> Any:  # noqa: ANN401 (JSON)
        """Ask for something that the server may take a while for."""
        return self._request("GET", path, query=query or {}, wait_s=wait_s)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
        wait_s: float = 0.0,
    ) -> Any:  # noqa: ANN401 (JSON)
        where = f"{self._noun} {self.url}"
        try:
            answer = self._client.request(
                method,
                f"{self.url}{path}",
                json=None if body is None else dict(body),
                params=None if query is None else dict(query),
                timeout=self._timeout_s + wait_s,
            )
        except self._httpx.HTTPError as exc:
            why = str(exc) or type(exc).__name__
            raise ServerError(f"{where} does not answer: {why}", detail=why) from exc
        except (self._httpx.InvalidURL, ValueError) as exc:
            raise ServerError(f"{where} cannot be asked for {path}: {exc}", 400) from exc
        try:
            found = answer.json() if answer.content else None
        except ValueError as exc:
            why = answer.reason_phrase if answer.status_code != 200 else "it does not speak JSON"
            raise ServerError(f"{where} does not speak JSON", answer.status_code, why) from exc
        if answer.status_code != 200:
            detail = found.get("detail", found) if isinstance(found, dict) else found
            raise ServerError(
                f"{where} refuses {path}: {answer.status_code} {detail}", answer.status_code, detail
            )
        return found


def read_token(file: str | None) -> str:
    """Return the token that a server asks for: that of a file, else that of the environment.

    Raises:
        InvalidInputError: The file has none, or cannot be read.
    """
    if file is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    try:
        token = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidInputError(f"--token-file {file} cannot be read: {exc}") from exc
    if not token:
        raise InvalidInputError(f"--token-file {file} is empty")
    return token


def check_address(url: str, *, noun: str) -> None:
    """Refuse what is no address of a server.

    Args:
        url: The address.
        noun: The word for the server in messages.

    Raises:
        InvalidInputError: It has no scheme, host or port that can be.
        UnsupportedError: httpx is not installed.
    """
    expected = "expected an address like http://127.0.0.1:7787"
    if not url.startswith(("http://", "https://")):
        raise InvalidInputError(f"{noun} {url!r}; {expected}")
    httpx = _httpx(noun)
    try:
        found = httpx.URL(url)
    except httpx.InvalidURL as exc:
        raise InvalidInputError(f"{noun} {url!r}: {exc}; {expected}") from exc
    if not found.host or "%" in found.host:
        raise InvalidInputError(f"{noun} {url!r} names no host; {expected}")
    if found.port is not None and not 0 < found.port < 2**16:
        raise InvalidInputError(f"{noun} {url!r}: port {found.port}; {expected}")


def _httpx(noun: str) -> Any:  # noqa: ANN401 (a module)
    try:
        return importlib.import_module("httpx")
    except ImportError:
        extra = noun.partition(" ")[0].replace("fleet", "serve")
        raise UnsupportedError(
            f"{noun} needs the package httpx; install partita[{extra}]"
        ) from None


def pause_s(failures: int) -> float:
    """Return how long to wait after so many failures in a row; ranks do not all come at once."""
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 20))
    return longest * random.uniform(0.5, 1.0)
