"""Attempts on the servers: by web pages, by guests, by users of other tenants, by words."""

import asyncio
import json
import logging
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from whole_app import TOKENS, USERS, job, opened, page, rows

from partita.errors import InvalidInputError
from partita.requests import make
from partita.service.auth import MOST_WRONG, RequireToken
from partita.service.energy.serve import ServeEnergyRequest
from partita.service.fleet.serve import ServeFleetRequest
from partita.service.limits import SHARE
from partita.service.logs import JsonFormatter, TextFormatter
from partita.service.users import Role, Users, load_users

JSON = {"content-type": "application/json"}


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


def test_users_of_a_tenant_know_its_energy_jobs_alone(
    tmp_path: Path, run: Any, bodies: Any
) -> None:
    token = "token-of-ana-0123456789"
    body = {"pp_degree": 2, "dp_degree": 1, "tp_degree": 1, "world_size": 2}

    def artifact_rank(name: str) -> dict[str, Any]:
        where = {"rank": 0, "dp_rank": 0, "pp_rank": 0, "tp_rank": 0}
        return {"job_id": name, "pipe_schedule": [], "power_state_range": [1200], **where}

    async def work() -> None:
        async with opened(tmp_path) as whole:
            register = "/register_job"
            theirs = (await whole.ask("POST", register, json={**body, "tenant": "text"})).json()
            own = (await whole.ask("POST", register, token, json=body)).json()
            refused = await whole.ask("POST", register, token, json={**body, "tenant": "text"})
            assert refused.status_code == 403
            seen = (await whole.ask("GET", "/jobs", token)).json()
            assert [(each["job_id"], each["tenant"]) for each in seen] == [(own, "vision")]
            assert len((await whole.ask("GET", "/jobs")).json()) == 2
            assert (await whole.ask("GET", f"/jobs/{own}", token)).status_code == 200
            for name in (theirs, "none"):
                for method, path, sent in (
                    ("GET", f"/jobs/{name}", None),
                    ("GET", f"/frontier/{name}", None),
                    ("GET", f"/profile/{name}", None),
                    ("GET", f"/schedule/{name}?rank=0", None),
                    ("DELETE", f"/straggler/{name}", None),
                    ("POST", f"/straggler/{name}", {"rank": 0, "slowdown": 2.0}),
                    ("POST", f"/register_rank/{name}", bodies.rank(0)),
                    ("POST", "/register_rank", artifact_rank(name)),
                    ("POST", f"/result/{name}", bodies.result(0)),
                ):
                    answer = await whole.ask(method, path, token, json=sent)
                    assert answer.status_code == 404, path
                    assert answer.json() == {"detail": f"no job {name!r}"}
            for rank in range(2):  # the same bodies are taken where the job is one's own
                answer = await whole.ask(
                    "POST", f"/register_rank/{own}", token, json=bodies.rank(rank)
                )
                assert answer.status_code == 200, answer.text
            seen = (await whole.ask("GET", f"/jobs/{theirs}")).json()
            assert seen["tenant"] == "text", seen

    run(work())


def test_both_servers_say_that_tokens_travel_in_clear_text_beyond_loopback() -> None:
    for request in (ServeEnergyRequest, ServeFleetRequest):
        assert not make(request, host="127.0.0.1").notes()
        assert "clear text" in make(request, host="0.0.0.0").notes()[0]


def test_a_file_of_users_is_private_and_strict(tmp_path: Path) -> None:
    path = tmp_path / "users.yaml"
    shown = re.search(r"```yaml\n(.*?)```", page(), re.DOTALL)
    assert shown is not None
    path.write_text(shown.group(1))
    path.chmod(0o640)
    with pytest.raises(InvalidInputError, match="0640, so"):
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


def test_a_client_has_a_share_of_the_memory_for_bodies(tmp_path: Path, run: Any) -> None:
    most = 1000

    async def work() -> None:
        async with opened(tmp_path, max_body_bytes=most) as whole:
            held = asyncio.Event()

            async def slow(first: int, rest: int) -> AsyncIterator[bytes]:
                yield b" " * first
                await held.wait()
                yield b" " * rest

            news = await whole.ask("POST", "/fleet/news/1", content=b" " * 2000, headers=JSON)
            assert news.status_code == 413

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


def test_logs_have_one_line_per_record_and_no_secrets(
    tmp_path: Path, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="partita")

    async def work() -> None:
        async with opened(tmp_path) as whole:
            energy = {"pp_degree": 1, "dp_degree": 1, "tp_degree": 1, "world_size": 1}
            for path, body in (("/fleet/jobs", job(tmp_path)), ("/register_job", energy)):
                assert (await whole.ask("POST", path, json=body)).status_code == 200
            await whole.ask("GET", "/fleet/jobs/9%0aforged%1b[2J?token=in-query", TOKENS[Role.READ])
            await whole.ask("POST", "/fleet/drain", json={"on": False})
            await whole.ask("GET", "/fleet", "")

    run(work())
    records = [each for each in caplog.records if each.name == "partita.service.requests"][2:]
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
    events = [
        json.loads(JsonFormatter().format(each))
        for each in caplog.records
        if "event" in getattr(each, "fields", {})
    ]
    assert [(each["job"], each["event"]) for each in events if each["job"] == 1][:1] == [
        (1, "submitted")
    ]
    assert "registered" in [each["event"] for each in events]
    failure = logging.LogRecord("partita", logging.ERROR, "", 1, "it failed", None, None)
    try:
        raise ValueError("why")
    except ValueError:
        failure.exc_info = sys.exc_info()
    assert "ValueError: why" in json.loads(JsonFormatter().format(failure))["traceback"]
