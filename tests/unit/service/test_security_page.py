"""The page docs/security.md, row by row, on the real app with both servers in it."""

import ast
import asyncio
import importlib
import json
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from whole_app import ROOT, TOKENS, USERS, opened, rows, whole_app

from partita.service.app import make_app
from partita.service.settings import EnergySettings, Settings
from partita.service.users import Role

NEWS = "POST /fleet/news/{job}"
POLL = "GET /schedule/{job_id}"
"""A wait that is over is answered with 504, by design."""


def test_the_page_lists_every_route_and_no_other(tmp_path: Path, run: Any) -> None:
    async def work() -> None:
        async with opened(tmp_path) as whole:
            known = {
                f"{method.upper()} {path}"
                for path, methods in whole.app.openapi()["paths"].items()
                for method in methods
            }
            known |= {
                f"GET {route.path}"
                for route in whole.app.router.routes
                if hasattr(route, "path") and not getattr(route, "include_in_schema", True)
            }
        listed = [row[0].strip("`") for row in rows("Routes")]
        assert len(listed) == len(set(listed))
        assert set(listed) == known

    run(work())


def test_every_route_answers_each_role_as_the_page_says(tmp_path: Path, run: Any) -> None:
    asked = [("", ""), *((role, TOKENS[role]) for role in Role)]

    async def work() -> None:
        async with opened(tmp_path) as whole:
            for route, _, *answers in rows("Routes"):
                method, _, template = route.strip("`").partition(" ")
                path = re.sub(r"\{\w+\}", "7", template)
                for (role, token), wanted in zip(asked, answers, strict=True):
                    sent = {"json": {"attempt": 1}} if "/news/" in path else {}
                    answer = await whole.ask(method, path, token, **sent)
                    status = str(answer.status_code)
                    found = status if status in ("401", "403") else "yes"
                    assert found == wanted, (route, role, answer.text)
                    assert answer.status_code < 500

    run(work())


def test_every_attempt_on_the_page_has_its_test() -> None:
    named = [row[2].strip("`") for row in rows("What is tried, and what happens")]
    assert len(named) > 15
    for name in named:
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, name


def test_an_energy_server_without_a_token_answers_on_loopback(tmp_path: Path, run: Any) -> None:
    async def work() -> None:
        energy = EnergySettings(state=tmp_path / "energy.sqlite", microbatches=2)
        app = make_app(Settings(energy=energy))
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
        ):
            for route, server, *_ in rows("Routes"):
                method, _, template = route.strip("`").partition(" ")
                if server != "fleet" and "schedule" not in route:
                    answer = await client.request(method, re.sub(r"\{\w+\}", "7", template))
                    assert answer.status_code not in (401, 403), route

    run(work())


def test_the_dashboard_asks_for_series_that_there_are(tmp_path: Path, run: Any) -> None:
    board = json.loads((ROOT / "docs" / "grafana" / "partita.json").read_text(encoding="utf-8"))
    asked = set(re.findall(r"partita_\w+", json.dumps(board)))
    assert len(board["panels"]) > 8

    async def work() -> None:
        async with opened(tmp_path) as whole:
            body = {"pp_degree": 1, "dp_degree": 1, "tp_degree": 1, "world_size": 1}
            await whole.ask("POST", "/register_job", json=body)
            text = (await whole.ask("GET", "/metrics")).text
        there = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
        assert asked == there

    run(work())


class ForEachUser:
    """An app to which a request is sent once per token, whichever it came with."""

    def __init__(self, app: Any, tokens: Sequence[str]) -> None:
        self._app = app
        self._tokens = tokens
        self.route = ""
        """What requests are for."""
        self.seen: set[tuple[str, str, int]] = set()
        """Token, route and status of each answer."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer with what the user of the last token gets."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parts = [await receive()]
        while parts[-1].get("more_body"):
            parts.append(await receive())
        for token in self._tokens:
            answer = await self._answer(scope, parts, token)
            self.seen.add((token, self.route, answer[0]["status"]))
        for part in answer:
            await send(part)

    async def _answer(self, scope: Any, parts: Sequence[Any], token: str) -> list[Any]:
        left, answer = list(parts), []
        headers = [pair for pair in scope["headers"] if pair[0].lower() != b"authorization"]
        if token:
            headers.append((b"authorization", f"Bearer {token}".encode()))

        async def receive() -> Any:
            return left.pop(0) if left else await asyncio.get_running_loop().create_future()

        async def send(part: Any) -> None:
            answer.append(part)

        await self._app({**scope, "headers": headers}, receive, send)
        return answer


@pytest.mark.slow
def test_made_up_requests_fail_nobody_and_tell_nothing(tmp_path: Path) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="needs the package schemathesis")
    engine = importlib.import_module("schemathesis.engine")
    asgi = importlib.import_module("schemathesis.python.asgi")
    config = importlib.import_module("schemathesis.config").SchemathesisConfig
    tokens = ("", TOKENS[Role.READ], TOKENS[Role.SUBMIT], "token-of-the-server")
    app, fleet = whole_app(tmp_path, allow_hosts=(asgi.HOST,))
    users = ForEachUser(app, tokens)
    schema = schemathesis.openapi.from_dict(
        app.openapi(),
        config=config.from_dict(
            {
                "seed": 20240817,
                "cache": {"enabled": False},
                "suppress-health-check": ["too_slow"],
                "generation": {"max-examples": 4, "deterministic": True, "database": "none"},
                "phases": {"stateful": {"enabled": False}},
                "checks": {"enabled": False},
            }
        ),
    )
    schema.app = users

    def before_call(context: Any, case: Any, kwargs: Any) -> None:
        del context, kwargs
        users.route = case.operation.label

    schemathesis.hook(before_call)
    try:
        with asgi.ASGIClient(users):
            events = list(engine.from_schema(schema).execute())
    finally:
        schemathesis.hooks.unregister(before_call)
        asgi.shutdown_lifespans()
    assert not [event for event in events if isinstance(event, engine.events.FatalError)]
    routes = {
        f"{method.upper()} {path}"
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    assert {(token, route) for token, route, _ in users.seen} == set(product(tokens, routes))
    listed = {row[0].strip("`"): row[2:] for row in rows("Routes")}
    for token, label, status in users.seen:
        assert status < 500 or (label, status) == (POLL, 504), (label, status)
        wanted = listed[label][[*Role].index(_role_of(token)) + 1 if token else 0]
        if wanted != "yes":
            # A method that a path does not have is refused or not known, as the role has it.
            # News are looked at with any token, since that of a job is known by its route alone.
            others = (400, 405, 415, 422) if token and label == NEWS else (405,)
            assert status in (int(wanted), *others), (token, label, status)
    assert not fleet.failure


def _role_of(token: str) -> Role:
    user = USERS.find(token.encode())
    assert user is not None
    return user.role
