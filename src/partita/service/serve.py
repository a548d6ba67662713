"""Running the app in this process until a signal ends it.

A client that does not send what it began to say, or that opens connections without end, holds up
nobody else: the head of a request has to arrive in time, and an address has a share of all
connections. How bodies are limited is `partita.service.limits`.
"""

import asyncio
import resource
import signal
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from partita.errors import InvalidInputError, reason_of

GRACE_S = 5
"""Seconds that requests under way get when the server stops."""
KEEP_ALIVE_S = 600
"""Seconds that an idle connection stays: longer than clients keep theirs, so that they close it."""
BACKLOG = 4096
"""Connections that may wait to be accepted."""
CONNECTIONS = 65536
"""Connections (and files) that the server asks the system for."""
HEAD_LIMIT_S = 20.0
"""Seconds in which the head of a request has to arrive, from its first byte or the connection."""
_HEAD_BYTES = 2**16


@dataclass(slots=True)
class Clients:
    """Connections of each client, and how many it may have.

    Attributes:
        most: Connections of one address, at most.
        head_limit_s: Seconds in which the head of a request has to arrive.
        open: Connections by address.
    """

    most: int
    head_limit_s: float = HEAD_LIMIT_S
    open: Counter[str] = field(default_factory=Counter)


class _Connection(H11Protocol):
    """A connection whose requests have to begin in time, one of few of its client.

    Its base keeps idle connections for a while, and one that sent half a head for ever.
    """

    def __init__(self, *given: Any, clients: Clients, **rest: Any) -> None:  # noqa: ANN401
        super().__init__(*given, **rest)
        self._clients, self._address = clients, ""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or refuse it where its client has enough."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._clients.open[self._address] += 1
        if self._clients.open[self._address] > self._clients.most:
            self._hang_up("429 Too Many Requests")
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._clients.open[self._address] -= 1
        if not self._clients.open[self._address]:
            del self._clients.open[self._address]
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what a client sent."""
        super().data_received(data)
        self._look_for_head()

    def on_response_complete(self) -> None:
        """Get ready for the next request, which may have begun to arrive."""
        super().on_response_complete()
        if self.conn.trailing_data[0]:
            self._look_for_head()

    def _look_for_head(self) -> None:
        # h11 is idle until a head is whole, whatever part of it has arrived.
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._head_timer is None:
            self._await_head()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(
            self._clients.head_limit_s, self._hang_up, "408 Request Timeout"
        )

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _hang_up(self, status: str) -> None:
        if not self.transport.is_closing():
            self.transport.write(
                f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
            )
            self.transport.close()


class _Server(uvicorn.Server):
    """A server that lets go of long-polls when it has to end."""

    def __init__(self, config: uvicorn.Config, stop_waiting: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop_waiting = stop_waiting

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal."""
        super().handle_exit(sig, frame)
        self._stop_waiting()


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one.

    Raises:
        InvalidInputError: The address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without the protocol asyncio does not see that it is TCP and lets answers wait for more.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except (OSError, OverflowError) as exc:
        bound.close()
        reason = reason_of(exc)
        raise InvalidInputError(f"cannot listen on {host}:{port}: {reason}") from exc
    return bound


def _allow_connections() -> int:
    """Let this process have as many connections as it may, and return how many those are.

    A rank that waits has one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS if hard == resource.RLIM_INFINITY else min(CONNECTIONS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def make_server(
    app: FastAPI, *, clients: Clients, tls: tuple[str, str] | None = None
) -> uvicorn.Server:
    """Return a server of an app, to be run on a socket.

    Args:
        app: The app.
        clients: Limits of its clients.
        tls: Files of a certificate and its key; ``None`` = plain HTTP.
    """
    certificate, key = tls or (None, None)
    connection: Any = partial(_Connection, clients=clients)
    config = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        ssl_certfile=certificate,
        ssl_keyfile=key,
        h11_max_incomplete_event_size=_HEAD_BYTES,
        server_header=False,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=BACKLOG,
    )
    return _Server(config, app.state.stop_waiting)


def serve(app: FastAPI, bound: socket.socket, *, tls: tuple[str, str] | None = None) -> None:
    """Serve an app until SIGTERM or SIGINT.

    Args:
        app: The app.
        bound: The socket that it listens on.
        tls: Files of a certificate and its key; ``None`` = plain HTTP.
    """
    # An address gets half of all connections at most, so that it cannot take those of all others.
    server = make_server(app, clients=Clients(max(1, _allow_connections() // 2)), tls=tls)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        # uvicorn hands the signal on once it has stopped; there is nothing left to end then.
        signal.signal(number, lambda *_: None)
    try:
        server.run(sockets=[bound])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        bound.close()
