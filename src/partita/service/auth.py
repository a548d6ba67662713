"""Who may speak to the app: a token, compared in constant time, and no web page of another site.

``Authorization: Bearer TOKEN``, or the password of ``Basic``: clients that only take a URL, as
Zeus's does, then reach the server as ``http://any:TOKEN@host:port``.

A browser on this machine reaches what listens on loopback, and so does the script of any page that
it shows. Such a request has an ``Origin`` that is not ours; or, if the page's name was made to
point here after it was loaded (DNS rebinding), a ``Host`` that is not ours. Both are refused before
anything else is looked at. Clients that are no browsers send no ``Origin``.
"""

import base64
import binascii
import hmac
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from partita.fleet.live.news import NEWS_PATH
from partita.http import is_loopback
from partita.service.errors import printable

OPEN_PATHS = ("/healthz",)
"""Paths that need no token."""


def is_open(path: str) -> bool:
    """Return whether a path needs not the server's token: none, or a job's own one."""
    return path in OPEN_PATHS or path.startswith(NEWS_PATH)


_SHOWN = 100


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
        if scope["type"] != "http" or is_open(scope["path"]) or self._shown(scope):
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


class RequireOwnHost:
    """Middleware that refuses requests which are meant for another host, or come from its pages.

    Args:
        app: What it guards.
        hosts: Names and addresses, besides those of loopback, that the server is called by.
        any_address: Whether every numeric address counts: a server that listens on all of them is
            reached by each, and no other site's name can be a number.
    """

    def __init__(
        self, app: ASGIApp, hosts: Sequence[str] = (), *, any_address: bool = False
    ) -> None:
        self.app = app
        self._hosts = {_plain(host) for host in hosts}
        self._any_address = any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 421 (wrong host) or 403 (a page of another site)."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            said = printable(", ".join(hosts))[:_SHOWN]
            detail = f"host {said!r} is not this server; start it with --allow-host NAME if it is"
            await JSONResponse({"detail": detail}, status_code=421)(scope, receive, send)
        elif any(_authority(origin) != hosts[0].lower() for origin in origins):
            said = printable(", ".join(origins))[:_SHOWN]
            detail = f"origin {said!r} is another site; only pages of this server may ask it"
            await JSONResponse({"detail": detail}, status_code=403)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _is_ours(self, header: str) -> bool:
        try:
            parts = urlsplit(f"//{header}")
            host, port = parts.hostname or "", parts.port
        except ValueError:
            return False
        if parts.netloc != header or "@" in header or (port is None and header.endswith(":")):
            return False
        return (
            is_loopback(host) or _plain(host) in self._hosts or (self._any_address and _is_ip(host))
        )


def own_hosts(host: str) -> tuple[tuple[str, ...], bool]:
    """Return what a server is called by that listens on an address: names, and whether any number.

    Beyond loopback that is the address, and this machine's name.
    """
    if is_loopback(host):
        return (host,), False
    every = _is_ip(host) and ipaddress.ip_address(host).is_unspecified
    return (host, socket.gethostname()), every


def _authority(origin: str) -> str:
    """Return host and port of an origin as a Host header has them; empty where it is none."""
    scheme, sign, authority = origin.lower().partition("://")
    return authority if sign and scheme in ("http", "https") else ""


def _plain(host: str) -> str:
    """Return one spelling of a host."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower().rstrip(".")


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
