"""What all servers share: where they listen, the token that clients show, the extra they need.

Imports nothing of that extra, so that options are known where it is not installed.
"""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from partita.errors import InvalidInputError, UnsupportedError
from partita.http import is_loopback
from partita.requests import Request, declare

_EXTRA = ("fastapi", "uvicorn", "pydantic", "starlette")


@dataclass(frozen=True, kw_only=True)
class ListenFields(Request):
    """Where a server listens, and by which names it is called."""

    host: str = declare("127.0.0.1", help="Address to listen on.")
    allow_host: tuple[str, ...] = declare(
        (), help="Further name that clients call this server by, such as that of a proxy."
    )
    tls_cert: str | None = declare(
        None, path="existing file", help="File with the TLS certificate (PEM, with its chain)."
    )
    tls_key: str | None = declare(
        None, path="existing file", usual="--tls-cert", help="File with its private key."
    )
    log: str = declare(
        "text",
        choices=("text", "json"),
        help="Log on stderr: warnings as text, or all requests and events as lines of JSON.",
    )

    def notes(self) -> tuple[str, ...]:
        """Return what whoever starts the server should know, a line each."""
        if self.tls_cert is None and not is_loopback(self.host):
            return ("without --tls-cert tokens travel in clear text: only over networks you trust",)
        return ()

    def tls(self) -> tuple[str, str] | None:
        """Return the files of certificate and key; None = no TLS.

        Raises:
            InvalidInputError: They are no certificate and its key.
        """
        if self.tls_cert is None:
            if self.tls_key is not None:
                raise InvalidInputError("--tls-key needs --tls-cert")
            return None
        key = self.tls_key or self.tls_cert
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self.tls_cert, key, password=_no_password
            )
        except (OSError, ValueError) as exc:
            raise InvalidInputError(
                f"--tls-cert {self.tls_cert} with key {key} cannot be used: {exc}"
            ) from exc
        return self.tls_cert, key


@dataclass(frozen=True, kw_only=True)
class ServerFields(ListenFields):
    """Where a server listens, and who may ask it."""

    users: str | None = declare(
        None,
        path="existing file",
        help="File of users with their tokens, roles and tenants; see docs/security.md.",
    )


def _no_password() -> str:
    """Refuse a key that would ask for a password on the terminal."""
    raise ValueError("the key has a password, which a server cannot type")


def port_field(default: int) -> Any:  # noqa: ANN401 (a dataclass field)
    """Return the field of the port; each server has its own default."""
    return declare(default, minimum=0, maximum=65535, help="Port to listen on; 0 takes a free one.")


def token_field(usual: str) -> Any:  # noqa: ANN401 (a dataclass field)
    """Return the field of the token; each server has its own default."""
    return declare(
        None, path="existing file", usual=usual, help="File with the token that clients show."
    )


def url_of(host: str, bound: socket.socket, *, is_tls: bool = False) -> str:
    """Return the address of a server whose socket is bound to a host."""
    scheme, name = "https" if is_tls else "http", f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}:{bound.getsockname()[1]}"


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
