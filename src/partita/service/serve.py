"""Running the app in this process until a signal ends it."""

import resource
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from partita.errors import InvalidInputError

GRACE_S = 5
"""Seconds that requests under way get when the server stops."""
KEEP_ALIVE_S = 600
"""Seconds that an idle connection stays: longer than clients keep theirs, so that they close it."""
BACKLOG = 4096
"""Connections that may wait to be accepted."""
CONNECTIONS = 65536
"""Connections (and files) that the server asks the system for."""


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
        reason = (getattr(exc, "strerror", None) or str(exc)).lower()
        raise InvalidInputError(f"cannot listen on {host}:{port}: {reason}") from exc
    return bound


def _allow_connections() -> None:
    """Let this process have as many connections as it may: a rank that waits has one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS if hard == resource.RLIM_INFINITY else min(CONNECTIONS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def serve(app: FastAPI, bound: socket.socket) -> None:
    """Serve an app until SIGTERM or SIGINT."""
    _allow_connections()
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=BACKLOG,
    )
    server = _Server(config, app.state.stop_waiting)
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
