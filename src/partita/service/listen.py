"""What all servers share: where they listen, the token that clients show, the extra they need.

Imports nothing of that extra, so that options are known where it is not installed.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from partita.errors import UnsupportedError
from partita.requests import Request, declare

_EXTRA = ("fastapi", "uvicorn", "pydantic", "starlette")


@dataclass(frozen=True, kw_only=True)
class ListenFields(Request):
    """Where a server listens, and by which names it is called."""

    host: str = declare("127.0.0.1", help="Address to listen on.")
    allow_host: tuple[str, ...] = declare(
        (), help="Further name that clients call this server by, such as that of a proxy."
    )


def port_field(default: int) -> Any:  # noqa: ANN401 (a dataclass field)
    """Return the field of the port; each server has its own default."""
    return declare(default, minimum=0, maximum=65535, help="Port to listen on; 0 takes a free one.")


def token_field(usual: str) -> Any:  # noqa: ANN401 (a dataclass field)
    """Return the field of the token; each server has its own default."""
    return declare(
        None, path="existing file", usual=usual, help="File with the token that clients show."
    )


def url_of(host: str, bound: socket.socket) -> str:
    """Return the address of a server whose socket is bound to a host."""
    return f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"


@contextmanager
def server_needed() -> Iterator[None]:
    """Name the extra to install where an import inside fails for want of it.

    Raises:
        UnsupportedError: A package of the extra is not there.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        if (exc.name or "").split(".")[0] not in _EXTRA:
            raise
        raise UnsupportedError(
            f"the server needs {exc.name}; pip install 'partita[serve]'"
        ) from exc
