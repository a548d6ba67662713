"""Who may speak to the app: users by their tokens, and no web page of another site.

``Authorization: Bearer TOKEN``, or the password of ``Basic``: clients that only take a URL, as
Zeus's does, then reach the server as ``http://any:TOKEN@host:port``. Each user has a role
(`partita.service.users`). Whoever shows wrong tokens again and again has to wait. A job that sends
its news shows a token of its own, which counts on that one route (`partita.fleet.live.news`).

A browser on this machine reaches what listens on loopback, and so does the script of any page that
it shows. Such a request has an ``Origin`` or a ``Sec-Fetch-Site`` that is not ours; or, if the
page's name was made to point here after it was loaded (DNS rebinding), a ``Host`` that is not ours.
All are refused before anything else is looked at. Clients that are no browsers send neither.
"""

import base64
import binascii
import ipaddress
import json
import math
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from partita.fleet.live.news import NEWS_PATH
from partita.http import is_loopback
from partita.service.errors import printable
from partita.service.ui.keys import PageKeys, is_page
from partita.service.users import ANYBODY, Users, needed_role

ENTRY = "/"
"""Where the link of the page leads, which shows its token there."""
PAGE_ASKS = "the page's key is needed: open the link that 'partita ui' printed"
OPEN_PATHS = ("/healthz",)
"""Paths that need no token."""
OWN_PAGES = ("same-origin", "none")
"""What browsers send as ``Sec-Fetch-Site`` for pages of ours and for addresses that are typed."""
MOST_WRONG = 30
"""Wrong tokens of one client within a minute; more are not looked at."""
_WINDOW_S = 60.0
_MOST_CLIENTS = 4096
_SHOWN = 100


class RequireToken:
    """Middleware that finds out who asks, and refuses those who may not.

    Args:
        app: What it guards.
        users: Who may ask; none = everybody.
        keys: Who may see the page, which has addresses of its own; None = there is none.
        only_page: Whether the page is all that there is, so that its keys open everything.
        clock: Tells the time, in seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        users: Users,
        keys: PageKeys | None = None,
        *,
        only_page: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.app = app
        self._users, self._keys, self._only_page = users, keys, only_page
        self._wrong = _Attempts(clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401 (no token), 403 (not this role) or 429 (guesses)."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        if self._keys is not None and (
            self._only_page or is_page(scope["path"]) or scope["path"] == ENTRY
        ):
            await self._see_page(scope, receive, send, self._keys)
            return
        shown = _shown(scope)
        if shown and scope["path"].startswith(NEWS_PATH):
            await self.app(scope, receive, send)  # the token of a job, which its route knows
            return
        user = self._users.find(shown) if self._users and shown else None
        user = user if self._users else ANYBODY
        if user is None:
            await self._refuse(scope, shown)(scope, receive, send)
            return
        needed = needed_role(scope["method"], scope["path"])
        if not user.role.includes(needed):
            detail = f"user {user.name} has the role {user.role}; this needs {needed}"
            await JSONResponse({"detail": detail}, status_code=403)(scope, receive, send)
            return
        scope["user"] = user
        await self.app(scope, receive, send)

    async def _see_page(self, scope: Scope, receive: Receive, send: Send, keys: PageKeys) -> None:
        """Pass a request for the page on, or answer 401 (no cookie of ours) or 429 (guesses)."""
        if scope["path"] == ENTRY or keys.knows(scope):
            await self.app(scope, receive, send)
            return
        shown = b"a cookie" if "cookie" in Headers(scope=scope) else b""
        refusal: Response = self._refuse(scope, shown, PAGE_ASKS)
        if "text/html" in Headers(scope=scope).get("accept", ""):  # somebody reads it
            words = json.loads(bytes(refusal.body))["detail"]
            refusal = PlainTextResponse(f"{words}\n", refusal.status_code)
        await refusal(scope, receive, send)

    def _refuse(
        self,
        scope: Scope,
        shown: bytes,
        asks: str = "a token is needed: Authorization: Bearer TOKEN",
    ) -> JSONResponse:
        wait_s = self._wrong.note(client_of(scope)) if shown else 0.0
        if wait_s:
            return JSONResponse(
                {"detail": f"too many wrong tokens; ask again in {wait_s:.0f} s"},
                status_code=429,
                headers={"Retry-After": str(math.ceil(wait_s))},
            )
        return JSONResponse(
            {"detail": asks},
            status_code=401,
            headers={"WWW-Authenticate": "Bearer"},
        )


class _Attempts:
    """When clients showed wrong tokens; those of the last minute, of the latest clients."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def note(self, client: str) -> float:
        """Note a wrong token; return how long its client has to wait, 0 = it may try again."""
        now = self._clock()
        times = self._times.setdefault(client, deque(maxlen=MOST_WRONG))
        self._times.move_to_end(client)
        while len(self._times) > _MOST_CLIENTS:
            self._times.popitem(last=False)
        while times and times[0] <= now - _WINDOW_S:
            times.popleft()
        if len(times) == MOST_WRONG:
            return times[0] + _WINDOW_S - now
        times.append(now)
        return 0.0


def client_of(scope: Scope) -> str:
    """Return the address of whoever sent a request; empty where there is no network."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def _shown(scope: Scope) -> bytes:
    """Return the token that a request shows; empty = none."""
    scheme, _, value = Headers(scope=scope).get("authorization", "").partition(" ")
    shown = value.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(shown, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return shown if scheme.lower() == "bearer" else b""


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
        elif any(site.lower() not in OWN_PAGES for site in headers.getlist("sec-fetch-site")):
            detail = "a page of another site asks; only pages of this server may"
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
