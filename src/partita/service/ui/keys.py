"""Who may see the page: the browser that followed the link which the server printed.

The link has a token that is good once. It is answered by a cookie that scripts cannot read and
that no other site's request carries, so that the token stands in no address afterwards.
"""

import hashlib
import hmac
import secrets
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.types import Scope

HOME = "/ui"
"""Every address of the page begins so; the link alone is ``/?token=...``."""
MOST_BROWSERS = 16


def is_page(path: str) -> bool:
    """Return whether a path is one of the page's, which asks for its cookie."""
    return path == HOME or path.startswith(f"{HOME}/")


class PageKeys:
    """The token of the page's link, and the cookies of the browsers that followed one.

    Args:
        secure: Whether the page is served over TLS, so that browsers keep the cookie to that.
    """

    def __init__(self, *, secure: bool = False) -> None:
        self._secure = secure
        self._links: dict[bytes, None] = {}
        self._cookies: list[bytes] = []

    def link(self) -> str:
        """Return a new token, good once."""
        token = secrets.token_urlsafe(32)
        self._links[_digest(token)] = None
        return token

    def redeem(self, token: str, host: str) -> str | None:
        """Return the header that sets the cookie for a token; None = it is wrong or used.

        Args:
            token: The token of a link.
            host: The address that the browser knows this server by.
        """
        shown = _digest(token)
        found = [known for known in self._links if hmac.compare_digest(known, shown)]
        if not found:
            return None
        del self._links[found[0]]
        value = secrets.token_urlsafe(32)
        self._cookies = [*self._cookies, _digest(value)][-MOST_BROWSERS:]
        secure = "; Secure" if self._secure else ""
        return f"{_cookie_name(host)}={value}; Path=/; HttpOnly; SameSite=Strict{secure}"

    def knows(self, scope: Scope) -> bool:
        """Return whether a request has the cookie of a browser that followed a link."""
        cookies: SimpleCookie = SimpleCookie()
        headers = Headers(scope=scope)
        name = _cookie_name(headers.get("host", ""))
        try:
            cookies.load("; ".join(headers.getlist("cookie")))
        except CookieError:
            return False
        shown = _digest(cookies[name].value) if name in cookies else b""
        # Each is looked at, so that the time tells nothing of which it is.
        return sum(hmac.compare_digest(known, shown) for known in self._cookies) > 0


def _cookie_name(host: str) -> str:
    """Return a name with the port: browsers send the cookies of an address to all of its ports."""
    port = host.rpartition(":")[2]
    return f"partita-{port}" if port.isdecimal() else "partita"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
