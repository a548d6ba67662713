"""The page docs/security.md, row by row, on the real app with both servers in it."""

import ast
import asyncio
import importlib
import importlib.util
import json
import logging
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from partita.errors import InvalidInputError
from partita.fleet.live.client import FleetClient
from partita.fleet.live.fleet import Fleet
from partita.fleet.live.scheduler import FleetSettings
from partita.http import ServerError, ServerLink
from partita.service.app import make_app
from partita.service.auth import MOST_WRONG, RequireToken
from partita.service.limits import SHARE
from partita.service.logs import JsonFormatter, LogRequests, TextFormatter
from partita.service.serve import Clients, bound_socket, make_server
from partita.service.settings import EnergySettings, Settings
from partita.service.users import Role, User, Users, load_users

ROOT = Path(__file__).resolve().parents[3]
TOKENS = {role: f"token-of-{role}-0123456789" for role in Role}
ANA = User(name="ana", role=Role.SUBMIT, tenants=("vision", "speech"))
USERS = Users(
    "token-of-the-server",
    {
        **{TOKENS[role]: User(name=f"user-{role}", role=role) for role in Role},
        "token-of-ana-0123456789": ANA,
    },
)
JSON = {"content-type": "application/json"}
LIMIT_S = 30.0
POLL = "GET /schedule/{job_id}"
"""A wait that is over is answered with 504, by design."""


def _builders() -> Any:
    """Return the builders of the fleet's tests, of another folder."""
    path = ROOT / "tests" / "unit" / "fleet" / "live" / "live_builders.py"
    spec = importlib.util.spec_from_file_location("live_builders", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault("live_builders", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


builders = _builders()


@dataclass
class Whole:
    """An app with both servers, and a way to it for each user."""

    app: Any
    fleet: Fleet
    client: httpx.AsyncClient

    async def ask(
        self, method: str, path: str, token: str = "token-of-the-server", **rest: Any
    ) -> httpx.Response:
        """Send a request with a token; empty = without."""
        headers = {**rest.pop("headers", {})}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return await self.client.request(method, path, headers=headers, **rest)


def whole_app(folder: Path, users: Users = USERS, **rest: Any) -> tuple[Any, Fleet]:
    settings = FleetSettings(state=folder / "fleet.sqlite", round_s=3600.0, poll_s=0.05)
    fleet = Fleet(settings, builders.servers(), "fifo:tune", builders.FakeEngine())
    energy = EnergySettings(
        state=folder / "energy.sqlite", scheduler="all-max", microbatches=2, poll_limit_s=0.05
    )
    return make_app(Settings(users=users, energy=energy, **rest), fleet), fleet


@asynccontextmanager
async def opened(folder: Path, users: Users = USERS, **rest: Any) -> AsyncIterator[Whole]:
    app, fleet = whole_app(folder, users, **rest)
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7788") as client,
    ):
        yield Whole(app, fleet, client)


def job(folder: Path, **rest: Any) -> dict[str, Any]:
    return {**builders.spec(folder).to_json(), **rest}


# The page.


@cache
def page() -> str:
    return (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def rows(title: str) -> list[list[str]]:
    """Return the cells of the table below a title."""
    part = page().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


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
                    answer = await whole.ask(method, path, token)
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


# Browsers.


def test_requests_of_other_sites_without_an_origin_are_refused(tmp_path: Path, run: Any) -> None:
    async def work() -> None:
        async with opened(tmp_path) as whole:
            for route, *_ in rows("Routes"):
                method, _, path = route.strip("`").partition(" ")
                for site, refused in (
                    ("cross-site", True),
                    ("same-site", True),  # another port of this machine is another site
                    ("Cross-Site", True),
                    ("nonsense", True),
                    ("same-origin", False),
                    ("none", False),
                ):
                    answer = await whole.ask(method, path, headers={"Sec-Fetch-Site": site})
                    assert (answer.status_code == 403) is refused, (route, site, answer.text)

    run(work())


def test_bodies_that_are_not_declared_as_json_are_refused(tmp_path: Path, run: Any) -> None:
    async def work() -> None:
        async with opened(tmp_path) as whole:
            energy = {"pp_degree": 1, "dp_degree": 1, "tp_degree": 1, "world_size": 1}
            for path, body in (("/fleet/jobs", job(tmp_path)), ("/register_job", energy)):
                text = json.dumps(body).encode()
                for kind in (
                    None,
                    "text/plain",
                    "application/x-www-form-urlencoded",
                    "multipart/form-data; boundary=x",
                    "application/jsonx",
                    "text/plain; application/json",
                ):
                    headers = {} if kind is None else {"content-type": kind}
                    answer = await whole.ask("POST", path, content=text, headers=headers)
                    assert answer.status_code == 415, (path, kind, answer.text)
                for kind in ("application/json", "Application/JSON; charset=utf-8"):
                    answer = await whole.ask(
                        "POST", path, content=text, headers={"content-type": kind}
                    )
                    assert answer.status_code == 200, (path, kind, answer.text)
            assert len(whole.fleet.jobs()) == 2

    run(work())


# Tokens, users, tenants.


def test_who_guesses_tokens_has_to_wait_and_others_do_not(run: Any) -> None:
    now = [0.0]
    reached: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del receive, send
        reached.append(scope["user"].name)

    guard = RequireToken(app, USERS, clock=lambda: now[0])

    async def ask(token: str, client: str = "10.0.0.1") -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        header = [(b"authorization", f"Bearer {token}".encode())] if token else []
        scope = {"type": "http", "method": "GET", "path": "/fleet", "headers": header}
        await guard({**scope, "client": (client, 1)}, None, send)  # type: ignore[arg-type]
        return sent[0]["status"] if sent else 200

    async def work() -> None:
        statuses = [await ask(f"wrong-{i}") for i in range(MOST_WRONG + 5)]
        assert statuses == [401] * MOST_WRONG + [429] * 5
        assert await ask("wrong", client="10.0.0.2") == 401
        assert await ask("") == 401  # who shows none does not guess
        assert await ask(TOKENS[Role.READ]) == 200  # nobody locks out others of its address
        now[0] = 61.0
        assert await ask("wrong") == 401
        for i in range(5000):  # addresses without end are not remembered
            await ask("wrong", client=f"client-{i}")
        assert len(guard._wrong._times) <= 4096
        assert reached == ["user-read"]

    run(work())


def test_users_of_a_tenant_know_its_jobs_alone(tmp_path: Path, run: Any) -> None:
    token = "token-of-ana-0123456789"

    async def work() -> None:
        async with opened(tmp_path) as whole:
            theirs = await whole.ask("POST", "/fleet/jobs", json=job(tmp_path, tenant="text"))
            nobodys = await whole.ask("POST", "/fleet/jobs", json=job(tmp_path))
            own = await whole.ask("POST", "/fleet/jobs", token, json=job(tmp_path))
            named = await whole.ask(
                "POST", "/fleet/jobs", token, json=job(tmp_path, tenant="speech")
            )
            assert [each.json()["id"] for each in (theirs, nobodys, own, named)] == [1, 2, 3, 4]
            wrong = await whole.ask("POST", "/fleet/jobs", token, json=job(tmp_path, tenant="text"))
            assert wrong.status_code == 403
            assert "submits for vision, speech" in wrong.json()["detail"]
            for path in ("/fleet/jobs", "/fleet/jobs?all=true"):
                seen = (await whole.ask("GET", path, token)).json()
                assert [(each["id"], each["tenant"], each["owner"]) for each in seen] == [
                    (3, "vision", "ana"),
                    (4, "speech", "ana"),
                ]
            for number in (1, 2, 99):
                for method, path in (
                    ("GET", f"/fleet/jobs/{number}"),
                    ("GET", f"/fleet/jobs/{number}/log"),
                    ("DELETE", f"/fleet/jobs/{number}"),
                ):
                    answer = await whole.ask(method, path, token)
                    assert answer.status_code == 404
                    assert answer.json() == {"detail": f"there is no job {number}"}
            assert (await whole.ask("GET", "/fleet/history", token)).status_code == 403
            assert (await whole.ask("GET", "/fleet/history")).status_code == 200
            assert (await whole.ask("DELETE", "/fleet/jobs/3", token)).status_code == 200
            events = (await whole.ask("GET", "/fleet/jobs/3", token)).json()["events"]
            assert "ana cancels it" in [each["what"] for each in events]
            assert len((await whole.ask("GET", "/fleet/jobs?all=true")).json()) == 4

    run(work())


def test_a_file_of_users_is_private_and_strict(tmp_path: Path) -> None:
    path = tmp_path / "users.yaml"
    shown = re.search(r"```yaml\n(.*?)```", page(), re.DOTALL)
    assert shown is not None
    path.write_text(shown.group(1))
    path.chmod(0o640)
    with pytest.raises(InvalidInputError, match="mode 0640, so others may read its tokens"):
        load_users(str(path))
    path.chmod(0o600)
    found = load_users(str(path))
    assert [(user.name, user.role, user.tenants) for user in found.values()] == [
        ("ana", Role.SUBMIT, ("vision",)),
        ("ops", Role.OPERATE, ()),
        ("grafana", Role.READ, ()),
    ]
    users = Users("", found)
    assert users.find(next(iter(found)).encode()) == next(iter(found.values()))
    assert users.find(b"") is None
    assert not Users()
    assert load_users(None) == {}
    with pytest.raises(InvalidInputError, match="cannot be read"):
        load_users(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ana: {role: submit}", "the key token is missing"),
        ("ana: {token: 0123456789abcdef}", "the key role is missing"),
        ("ana: {role: submit, token: short}", "16 ASCII characters or more"),
        ("ana: {role: sumbit, token: 0123456789abcdef}", "did you mean 'submit'"),
        ("ana: {role: read, token: 0123456789abcdef, tenants: []}", "one or more"),
        ("ana: {role: read, token: 0123456789abcdef, tennants: [a]}", "tennants"),
        ('"a\\eb": {role: read, token: 0123456789abcdef}', "terminals do not show"),
        (
            "ana: {role: read, token: 0123456789abcdef}\nbo: {role: read, token: 0123456789abcdef}",
            "ana and bo have one token",
        ),
    ],
)
def test_wrong_users_are_refused_with_their_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "users.yaml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(InvalidInputError) as wrong:
        load_users(str(path))
    assert why in str(wrong.value)
    assert re.match(rf"{re.escape(str(path))}:\d", str(wrong.value)), str(wrong.value)
    assert "0123456789abcdef" not in str(wrong.value)


# Limits.


def test_a_client_has_a_share_of_the_memory_for_bodies(tmp_path: Path, run: Any) -> None:
    most = 1000

    async def work() -> None:
        async with opened(tmp_path, max_body_bytes=most) as whole:
            held = asyncio.Event()

            async def slow(first: int, rest: int) -> AsyncIterator[bytes]:
                yield b" " * first
                await held.wait()
                yield b" " * rest

            def send(body: AsyncIterator[bytes]) -> asyncio.Task[httpx.Response]:
                sending = whole.ask("POST", "/fleet/drain", content=body, headers=JSON)
                return asyncio.create_task(sending)

            waiting = [send(slow(900, 50)) for _ in range(SHARE)]
            for _ in range(100):
                await asyncio.sleep(0)
            beyond = await send(slow(900, 0))
            assert beyond.status_code == 429
            held.set()
            answers = [(await each).status_code for each in waiting]
            assert answers == [422] * SHARE  # spaces are no JSON, but they were read
            assert (await send(slow(900, 200))).status_code == 413
            again = await whole.ask("POST", "/fleet/drain", json={"on": False})
            assert again.status_code == 200

    run(work())


def test_metrics_do_not_grow_with_what_clients_make_up(tmp_path: Path, run: Any) -> None:
    async def work() -> None:
        async with opened(tmp_path) as whole:

            async def series() -> set[str]:
                text = (await whole.ask("GET", "/metrics")).text
                return {line.rpartition(" ")[0] for line in text.splitlines() if line[0] != "#"}

            for method in ("GET", "POST", "BREW-0"):
                for path in ("/fleet", "/fleet/jobs/1", "/nothing"):
                    await whole.ask(method, path)
            await series()
            before = await series()
            for i in range(50):
                await whole.ask(f"BREW-{i}", "/fleet")
                await whole.ask(f"BREW-{i}", "/fleet/jobs/1")
                await whole.ask("GET", f"/nothing/{i}")
                await whole.ask("GET", f"/fleet/jobs/{i + 1}", "")
            after = await series()
            assert {line for line in after - before if "401" not in line} == set()
            assert len(after - before) <= 1
            assert not any("BREW" in line or "nothing" in line for line in after)
            name = 'partita_requests_total{method="GET",route="/fleet/jobs/{job}",status="404"}'
            assert name in after

    run(work())


def test_a_key_with_another_job_is_refused(tmp_path: Path, run: Any) -> None:
    async def work() -> None:
        async with opened(tmp_path) as whole:
            sent = job(tmp_path, key="once")
            for _ in range(2):
                assert (await whole.ask("POST", "/fleet/jobs", json=sent)).json() == {"id": 1}
            other = await whole.ask("POST", "/fleet/jobs", json={**sent, "steps": 11})
            assert other.status_code == 409
            assert "'once' was sent with another job" in other.json()["detail"]
            # Nor does another user learn of the job.
            token = TOKENS[Role.SUBMIT]
            theirs = await whole.ask("POST", "/fleet/jobs", token, json=sent)
            assert theirs.status_code == 409

    run(work())


@pytest.mark.parametrize("bad", ["\x1b[2J", "a\nb", "\N{RIGHT-TO-LEFT OVERRIDE}", "\x9b", "\x7f"])
def test_names_that_no_terminal_shows_are_refused_by_both_servers(
    tmp_path: Path, run: Any, bad: str
) -> None:
    async def work() -> None:
        async with opened(tmp_path) as whole:
            energy = {"pp_degree": 1, "dp_degree": 1, "tp_degree": 1, "world_size": 1}
            for path, body in (
                ("/fleet/jobs", job(tmp_path, name=bad)),
                ("/fleet/jobs", job(tmp_path, tenant=bad)),
                ("/fleet/jobs", job(tmp_path, gpus=[[1, 1, bad]])),
                ("/register_job", {**energy, "framework": bad}),
                ("/register_job", {**energy, "model_name": bad}),
            ):
                answer = await whole.ask("POST", path, json=body)
                assert answer.status_code == 422, body
                assert "terminals do not show" in answer.json()["detail"][0]["msg"]

    run(work())


# Logs.


def test_logs_have_one_line_per_record_and_no_secrets(
    tmp_path: Path, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="partita.service.requests")

    async def work() -> None:
        async with opened(tmp_path) as whole:
            await whole.ask("GET", "/fleet/jobs/9%0aforged%1b[2J?token=in-query", TOKENS[Role.READ])
            await whole.ask("POST", "/fleet/drain", json={"on": False})
            await whole.ask("GET", "/fleet", "")

    run(work())
    records = [each for each in caplog.records if each.name == "partita.service.requests"]
    assert len(records) == 3
    found = [json.loads(JsonFormatter().format(each)) for each in records]
    keys = ["time", "level", "logger", "message"]
    keys += ["method", "path", "status", "seconds", "client", "user"]
    assert list(found[0]) == keys
    assert [(each["method"], each["status"], each["user"]) for each in found] == [
        ("GET", 422, "user-read"),
        ("POST", 200, ""),
        ("GET", 401, None),
    ]
    assert found[0]["path"] == "/fleet/jobs/9\nforged\x1b[2J"
    for record in records:
        for line in (JsonFormatter().format(record), TextFormatter().format(record)):
            assert line.isprintable()
            assert not any(secret in line for secret in ("token-of", "in-query", "Bearer"))
    failure = logging.LogRecord("partita", logging.ERROR, "", 1, "it failed", None, None)
    try:
        raise ValueError("why")
    except ValueError:
        failure.exc_info = sys.exc_info()
    assert "ValueError: why" in json.loads(JsonFormatter().format(failure))["traceback"]
    assert LogRequests.__doc__ is not None


# Real connections.


@contextmanager
def listening(app: Any, clients: Clients, tls: tuple[str, str] | None = None) -> Iterator[int]:
    """Run the real server in a thread; yields its port."""
    bound = bound_socket("127.0.0.1", 0)
    server = make_server(app, clients=clients, tls=tls)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while not server.started:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(LIMIT_S)
        bound.close()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)


def rest_of(talk: socket.socket) -> bytes:
    """Return what a server sends until it hangs up."""
    parts = []
    while part := talk.recv(65536):
        parts.append(part)
    talk.close()
    return b"".join(parts)


def is_served(port: int) -> bool:
    answer = httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=LIMIT_S, trust_env=False)
    return answer.status_code == 200


@pytest.mark.slow
def test_a_client_that_does_not_finish_its_head_is_hung_up_on(tmp_path: Path) -> None:
    app, _ = whole_app(tmp_path)
    with listening(app, Clients(most=100, head_limit_s=0.3)) as port:
        said = []
        for begun in (b"", b"GET /fle", b"GET /fleet HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "):
            talk = connected(port)
            talk.sendall(begun)
            said.append(rest_of(talk))
        # One that drips does not win time; nor one that was polite before.
        talk = connected(port)
        talk.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        while b"ok" not in talk.recv(65536):
            pass
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.05):
                try:
                    talk.sendall(b"G")
                except OSError:
                    return

        dripping = threading.Thread(target=drip, daemon=True)
        dripping.start()
        try:
            said.append(rest_of(talk))
        except ConnectionResetError:  # it had sent more before it heard
            said.append(b"HTTP/1.1 408 ")
        stop.set()
        dripping.join(LIMIT_S)
        assert [each[:13] for each in said] == [b"HTTP/1.1 408 "] * 4
        assert is_served(port)


@pytest.mark.slow
def test_a_client_that_does_not_finish_its_body_is_hung_up_on(tmp_path: Path) -> None:
    app, _ = whole_app(tmp_path, body_limit_s=0.3)
    head = (
        "POST /fleet/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        "Authorization: Bearer token-of-the-server\r\n"
    )
    with listening(app, Clients(most=100)) as port:
        for how in ("Content-Length: 1000", "Transfer-Encoding: chunked"):
            talk = connected(port)
            talk.sendall(f"{head}{how}\r\n\r\n".encode())
            said = rest_of(talk)
            assert said.startswith(b"HTTP/1.1 408 ")
            assert b"the body is not whole after 0.3 s" in said
        assert is_served(port)


@pytest.mark.slow
def test_a_client_has_a_share_of_all_connections(tmp_path: Path) -> None:
    app, _ = whole_app(tmp_path)
    clients = Clients(most=5)
    with listening(app, clients) as port:
        talks = [connected(port) for _ in range(5)]
        assert rest_of(connected(port)).startswith(b"HTTP/1.1 429 ")
        assert clients.open == {"127.0.0.1": 5}
        # Another address is served meanwhile.
        other = socket.create_connection(
            ("127.0.0.1", port), timeout=LIMIT_S, source_address=("127.0.0.2", 0)
        )
        other.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"200 OK" in rest_of(other)
        for talk in talks:
            talk.close()
        deadline_s = time.monotonic() + LIMIT_S
        while clients.open:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert is_served(port)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
def test_a_certificate_hides_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    certificate, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *(
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=localhost",
                "-keyout",
                key,
                "-out",
                certificate,
            ),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    app, _ = whole_app(tmp_path)
    with listening(app, Clients(most=100), (certificate, key)) as port:
        url = f"https://localhost:{port}"
        link = ServerLink(url, noun="fleet server", token=TOKENS[Role.READ], timeout_s=LIMIT_S)
        with pytest.raises(ServerError, match=r"(?i)certificate verify failed"):
            link.get("/fleet")
        link.close()
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        client = FleetClient(url, token=TOKENS[Role.READ], timeout_s=LIMIT_S)
        assert client.info()["policy"] == "fifo:tune"
        # Who speaks plain HTTP to it is told nothing.
        talk = connected(port)
        talk.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" not in rest_of(talk)


def test_files_of_tls_are_checked_before_anything_starts(tmp_path: Path) -> None:
    serve = importlib.import_module("partita.service.fleet.serve")
    wrong = tmp_path / "cert.pem"
    wrong.write_text("no certificate")
    with pytest.raises(InvalidInputError, match="cannot be used"):
        serve.ServeFleetRequest(tls_cert=str(wrong)).tls()
    with pytest.raises(InvalidInputError, match="needs --tls-cert"):
        serve.ServeFleetRequest(tls_key=str(wrong)).tls()
    assert serve.ServeFleetRequest().tls() is None


# The dashboard.


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


# Whatever there is.


@pytest.mark.slow
@pytest.mark.parametrize("token", ["", TOKENS[Role.READ], TOKENS[Role.SUBMIT], "operate"])
def test_made_up_requests_fail_nobody_and_tell_nothing(tmp_path: Path, token: str) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="needs the package schemathesis")
    engine = importlib.import_module("schemathesis.engine")
    asgi = importlib.import_module("schemathesis.python.asgi")
    config = importlib.import_module("schemathesis.config").SchemathesisConfig
    token = "token-of-the-server" if token == "operate" else token
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    app, fleet = whole_app(tmp_path, allow_hosts=(asgi.HOST,))
    schema = schemathesis.openapi.from_dict(
        app.openapi(),
        config=config.from_dict(
            {
                "headers": headers,
                "seed": 20240817,
                "cache": {"enabled": False},
                "suppress-health-check": ["too_slow"],
                "generation": {"max-examples": 4, "deterministic": True, "database": "none"},
                "phases": {"stateful": {"enabled": False}},
                "checks": {"enabled": False},
            }
        ),
    )
    schema.app = app
    listed = {row[0].strip("`"): row[2:] for row in rows("Routes")}
    column = [*Role].index(_role_of(token)) + 1 if token else 0
    seen = set()
    with asgi.ASGIClient(app):
        for event in engine.from_schema(schema).execute():
            if isinstance(event, engine.events.ScenarioFinished):
                labels = {k: case.value.operation.label for k, case in event.recorder.cases.items()}
                found = event.recorder.interactions.items()
                seen |= {
                    (labels[k], each.response.status_code) for k, each in found if each.response
                }
    asgi.shutdown_lifespans()
    assert {label for label, _ in seen} == {
        f"{method.upper()} {path}"
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    for label, status in seen:
        assert status < 500 or (label, status) == (POLL, 504), (label, status)
        wanted = listed[label][column]
        if wanted != "yes":
            # A method that a path does not have is refused or not known, as the role has it.
            assert status in (int(wanted), 405), (label, status)
    assert not fleet.failure


def _role_of(token: str) -> Role:
    user = USERS.find(token.encode())
    assert user is not None
    return user.role
