"""Daemons that tests start: ports for them, and waiting for them."""

import socket
import time
from collections.abc import Callable

from partita.errors import UnsupportedError

_LOOK_S = 0.05


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nobody listened on a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def wait_until(ready: Callable[[], bool], what: str, limit_s: float) -> None:
    """Wait until something is so.

    Raises:
        UnsupportedError: It was not so in time.
    """
    last_s = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > last_s:
            raise UnsupportedError(f"{what} was not ready after {limit_s:g} s")
        time.sleep(_LOOK_S)
