"""Counts for Prometheus, in its text format."""

from collections import Counter
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

Sample = tuple[str, str, str, float]
"""Name, type, help and value of a metric; the name may have labels."""


METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
"""Methods that are counted apart; clients may make up others without end."""


class CountRequests:
    """Middleware that counts answers by method, route and status, each one of a few.

    Args:
        app: What it counts for.
        counts: Where it counts.
    """

    def __init__(self, app: ASGIApp, counts: Counter[tuple[str, str, int]]) -> None:
        self.app = app
        self.counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and count its answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                known = route != "other" and scope["method"] in METHODS
                method = scope["method"] if known else "other"
                self.counts[method, route, message["status"]] += 1
            await send(message)

        await self.app(scope, receive, counting)


def label(text: str) -> str:
    r"""Return a text as the value of a label.

    >>> label('a "b"\\')
    '"a \\"b\\"\\\\"'
    """
    plain = text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{plain}"'


def exposition(counts: Counter[tuple[str, str, int]], samples: Iterable[Sample]) -> str:
    """Return all metrics as text."""
    name = "partita_requests_total"
    lines = [f"# HELP {name} Answers by method, route and status.", f"# TYPE {name} counter"]
    lines += [
        f'{name}{{method="{method}",route="{route}",status="{status}"}} {count}'
        for (method, route, status), count in sorted(counts.items())
    ]
    described: set[str] = set()
    for full, kind, text, value in samples:
        plain = full.partition("{")[0]
        if plain not in described:
            lines += [f"# HELP {plain} {text}", f"# TYPE {plain} {kind}"]
            described.add(plain)
        lines.append(f"{full} {value:g}")
    return "\n".join(lines) + "\n"
