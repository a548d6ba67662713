"""Requests to a server of ours: one base address, a token, time limits, and errors in one line.

An error says whether the same request may succeed later (``is_passing``), and ``pause_s`` how long
to wait before it is tried again. A time limit is that of the whole answer: a server that sends a
byte now and then does not hold anybody up. A token may be part of the address
(``http://any:TOKEN@host:7788``); no message shows it. Requests to this machine never go through a
proxy, whatever the environment says: the proxy would learn the token.
"""

import importlib
import ipaddress
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from partita.errors import InvalidInputError, PartitaError, UnsupportedError
from partita.processes import TOKEN_VARIABLE, retry_pause_s

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
            url: Such as ``http://127.0.0.1:7787``, or ``http://any:TOKEN@127.0.0.1:7787``.
            noun: The word for the server in messages.
            token: The server's bearer token, unless the address has one; that of
                ``PARTITA_TOKEN`` if not given.
            timeout_s: How long a whole answer may take.
            keeps_open: Whether the connection is kept for the next request, until ``close``.
            transport: An ``httpx`` transport to use instead of the network.

        Raises:
            InvalidInputError: It is no such address.
            UnsupportedError: httpx is not installed.
        """
        check_address(url, noun=noun)
        self._httpx = _httpx(noun)
        url, own = split_address(url)
        token = own or (os.environ.get(TOKEN_VARIABLE) if token is None else token)
        self.url, self._noun = url.rstrip("/"), noun
        self._timeout_s = timeout_s
        self._deadline = _Deadline()
        if transport is None:
            transport = _TimedTransport(self.url, self._deadline, keeps_open=keeps_open)
        self._client = self._httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            trust_env=False,  # what it would take from there, proxies above all, is decided here
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
        self._deadline.begin(self._timeout_s + wait_s)
        try:
            answer = self._client.request(
                method,
                f"{self.url}{path}",
                json=None if body is None else dict(body),
                params=None if query is None else dict(query),
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


class _Deadline:
    """When an answer has to be whole."""

    def __init__(self) -> None:
        self._limit_s = self._until_s = 0.0

    def begin(self, limit_s: float) -> None:
        """Let a request begin now."""
        self._limit_s, self._until_s = limit_s, time.monotonic() + limit_s

    def remaining_s(self) -> float:
        """Return how long the request may still take.

        Raises:
            TimeoutError: It has taken too long.
        """
        left = self._until_s - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"its answer is not whole after {self._limit_s:g} s")
        return left


class _TimedStream:
    """A stream of httpcore whose reads and writes all end at one deadline."""

    def __init__(self, stream: Any, deadline: _Deadline) -> None:  # noqa: ANN401 (of httpcore)
        self._stream, self._deadline = stream, deadline
        self.close, self.get_extra_info = stream.close, stream.get_extra_info

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read what there is, within the time that is left."""
        del timeout
        found: bytes = self._stream.read(max_bytes, self._deadline.remaining_s())
        return found

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write all, within the time that is left."""
        del timeout
        self._stream.write(buffer, self._deadline.remaining_s())

    def start_tls(
        self,
        ssl_context: Any,  # noqa: ANN401 (of ssl, which is imported late)
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> "_TimedStream":
        """Return the stream with TLS on it."""
        del timeout
        found = self._stream.start_tls(ssl_context, server_hostname, self._deadline.remaining_s())
        return _TimedStream(found, self._deadline)


class _TimedBackend:
    """The network as httpcore asks for it, with streams that keep a deadline."""

    def __init__(self, backend: Any, deadline: _Deadline) -> None:  # noqa: ANN401 (of httpcore)
        self._backend, self._deadline = backend, deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,  # noqa: ANN401 (httpcore's)
    ) -> _TimedStream:
        """Connect, within the time that is left."""
        del timeout
        found = self._backend.connect_tcp(
            host, port, self._deadline.remaining_s(), local_address, socket_options
        )
        return _TimedStream(found, self._deadline)


class _TimedTransport:
    """A transport for httpx that keeps one deadline for a whole answer.

    httpx's own limits count anew with every read.

    Args:
        url: Address of the server that it speaks to; decides about a proxy.
        deadline: When an answer has to be whole.
        keeps_open: Whether connections are kept for the next request.
    """

    def __init__(self, url: str, deadline: _Deadline, *, keeps_open: bool) -> None:
        self._core, self._httpx = importlib.import_module("httpcore"), _httpx("server")
        options: dict[str, Any] = {
            "max_keepalive_connections": None if keeps_open else 0,
            "network_backend": _TimedBackend(self._core.SyncBackend(), deadline),
        }
        if url.startswith("https"):
            options["ssl_context"] = self._httpx.create_ssl_context()
        proxy = _proxy_for(url)
        if proxy:
            found = self._httpx.Proxy(proxy)
            options |= {"proxy_url": str(found.url), "proxy_auth": found.raw_auth}
        self._pool = (self._core.HTTPProxy if proxy else self._core.ConnectionPool)(**options)

    def handle_request(self, request: Any) -> Any:  # noqa: ANN401 (of httpx)
        """Return the whole answer to a request."""
        url = request.url
        asked = self._core.Request(
            method=request.method,
            url=self._core.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
            ),
            headers=request.headers.raw,
            content=request.stream,
        )
        failures = tuple(
            getattr(self._core, name)
            for name in ("NetworkError", "TimeoutException", "ProtocolError", "ProxyError")
        )
        try:
            answer = self._pool.handle_request(asked)
            try:
                content = answer.read()
            finally:
                answer.close()
        except (*failures, OSError) as exc:
            raise self._httpx.TransportError(str(exc) or type(exc).__name__) from exc
        return self._httpx.Response(answer.status, headers=answer.headers, content=content)

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()


def _proxy_for(url: str) -> str:
    """Return the proxy that the environment names for an address; empty = none."""
    environment = importlib.import_module("urllib.request")
    address = urlsplit(url)
    host = address.hostname or ""
    if is_loopback(host) or environment.proxy_bypass_environment(host):
        return ""
    known = environment.getproxies_environment()
    found = str(known.get(address.scheme) or known.get("all") or "")
    return found if "://" in found or not found else f"http://{found}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_address(url: str) -> tuple[str, str]:
    """Return an address as it may be shown, and the token that stood in it as a password."""
    scheme, sign, rest = url.partition("://") if "://" in url else ("", "", url)
    cut = min((rest.find(mark) for mark in "/?#" if mark in rest), default=len(rest))
    user, at, host = rest[:cut].rpartition("@")
    if not at:
        return url, ""
    return f"{scheme}{sign}{host}{rest[cut:]}", unquote(user.partition(":")[2])


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
    url, _ = split_address(url)  # no message shows a token
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
    longest_s = retry_pause_s(failures, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
    return longest_s * random.uniform(0.5, 1.0)
