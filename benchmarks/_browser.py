"""A page in a real browser, which notices what a page must never do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
HOSTILE = (
    "<script>window.__xss=1</script>",
    "</script><img src=x onerror=window.__xss=1>",
    '"><svg onload=window.__xss=1>',
    "\u202egnirts tfel ot thgir",
    "n" * 10_000,
)
"""Names that must be shown as the text that they are."""


KEPT = frozenset(
    {"id", "kind", "state", "unit", "version", "axis", "colour", "style", "group", "follows"}
    | {"kinds", "key", "problem", "schedule", "schedules", "status"}
)
"""Keys of answers whose texts steer the page and are ours, whatever somebody called a thing."""


def made_hostile(value: Any, turn: Iterator[int], most: int = 10_000) -> Any:
    """Return an answer of the server in which every text that a person could choose is hostile."""
    if isinstance(value, dict):
        if {"version", "columns", "data"} <= set(value):  # packed numbers
            return value
        return {
            key: each if key in KEPT else made_hostile(each, turn, most)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [made_hostile(each, turn, most) for each in value]
    if isinstance(value, str) and value and not value.startswith("doc:"):
        at = next(turn)
        return f"{HOSTILE[at % len(HOSTILE)][:most]}{at}"
    return value


class Watched:
    """A page with all that went wrong on it.

    Attributes:
        page: Playwright's page.
        errors: Errors on the console and in scripts.
        requests: Addresses that it asked for, but for its own.
    """

    def __init__(self, page: Any, origin: str) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on(
            "console",
            lambda message: (
                self.errors.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith(origin) else self.requests.append(request.url)
            ),
        )

    def open(self, address: str) -> Any:
        self.page.goto(address)
        self.page.wait_for_selector("html[data-ready]", state="attached", timeout=60_000)
        return self.page

    def check(self) -> None:
        assert self.errors == [], self.errors
        assert self.requests == [], self.requests
        assert self.page.evaluate("window.__xss") is None


@contextmanager
def browser_or_skip() -> Iterator[Any]:
    if not CHROMIUM.exists():
        pytest.skip("needs Chromium (apt: chromium)")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox"]  # root, as in containers
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=arguments)
        yield browser
        browser.close()
