"""What the routers have in common: the token, limits, plans, settings."""

import asyncio
import base64
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from partita.errors import FormatError, InvalidInputError
from partita.http import is_loopback
from partita.service.app import make_app
from partita.service.energy.plans import read_plans
from partita.service.errors import printable
from partita.service.serve import bound_socket
from partita.service.settings import EnergySettings, Settings
from partita.service.users import Users


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"any:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Basic !!!", 401),
        (basic("wrong"), 401),
        ("secret", 401),
        ("Bearer secret", 200),
        ("bearer secret", 200),
        (basic("secret"), 200),
    ],
)
def test_a_token_is_asked_for(run: Any, serving: Any, header: str | None, status: int) -> None:
    async def work() -> None:
        async with serving(token="secret") as client:
            headers = {"authorization": header} if header else {}
            answer = await client.get("/jobs", headers=headers)
            assert answer.status_code == status
            assert (await client.get("/healthz")).status_code == 200
            if status == 401:
                assert answer.headers["www-authenticate"] == "Bearer"

    run(work())


def test_large_bodies_are_413(run: Any, serving: Any) -> None:
    async def work() -> None:
        async with serving(max_body=100) as client:
            large, headers = b"x" * 101, {"content-type": "application/json"}
            declared = await client.post("/register_job", content=large, headers=headers)
            assert declared.status_code == 413

            async def parts() -> Any:
                for _ in range(20):
                    yield b"x" * 10

            streamed = await client.post("/register_job", content=parts(), headers=headers)
            assert streamed.status_code == 413
            small = await client.post("/register_job", json={})
            assert small.status_code == 422

    run(work())


def test_bodies_that_are_no_json_are_4xx(run: Any, serving: Any) -> None:
    async def work() -> None:
        async with serving() as client:
            headers = {"content-type": "application/json"}
            for body in (b"{", b"\xff", b"[" * 100_000, b"null", b"NaN", b'"\\ud800"'):
                answer = await client.post("/register_job", content=body, headers=headers)
                assert answer.status_code in (400, 422), (body[:10], answer.status_code)

    run(work())


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_other_machines_need_a_token(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    Settings(host=host, users=Users("secret"))
    if loopback:
        Settings(host=host)
    else:
        with pytest.raises(InvalidInputError, match="a token is needed"):
            Settings(host=host)


def test_the_token_is_not_shown() -> None:
    assert "secret" not in repr(Settings(users=Users("secret")))


def test_settings_know_the_schedulers(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"there.*scheduler"):
        EnergySettings(state=tmp_path / "a", scheduler="best")


def test_an_address_that_cannot_be_had(tmp_path: Path) -> None:
    bound = bound_socket("127.0.0.1", 0)
    port = bound.getsockname()[1]
    with pytest.raises(InvalidInputError, match=f"cannot listen on 127.0.0.1:{port}"):
        bound_socket("127.0.0.1", port)
    bound.close()


def test_answers_do_not_wait_for_more() -> None:
    async def accepted() -> int:
        """Return whether asyncio sends at once what is written to a connection that it accepts."""
        found = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            at_once = writer.get_extra_info("socket").getsockopt(
                socket.IPPROTO_TCP, socket.TCP_NODELAY
            )
            found.set_result(at_once)
            writer.close()

        bound = bound_socket("127.0.0.1", 0)
        async with await asyncio.start_server(connected, sock=bound):
            _, writer = await asyncio.open_connection(*bound.getsockname())
            at_once: int = await asyncio.wait_for(found, 30)
            writer.close()
        return at_once

    assert asyncio.run(accepted()) == 1


def test_plans_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("[[('forward', 2)]]  # slower")
    (tmp_path / "a.py").write_text("[[1, 3]]")
    assert read_plans(str(tmp_path)) == [
        ("a.py", ((("", 1), ("", 3)),)),
        ("b.py", ((("forward", 2),),)),
    ]
    assert read_plans(str(tmp_path / "b.py"))[0][0] == "b.py"


@pytest.mark.parametrize("text", ["__import__('os').abort()", "[[print(1)]]", "import os", "[[1"])
def test_a_plan_with_code_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.py").write_text(text)
    with pytest.raises(FormatError, match=r"plan\.py"):
        read_plans(str(tmp_path))


def test_a_folder_without_plans_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no plan"):
        read_plans(str(tmp_path))


def test_messages_are_one_line_of_utf8() -> None:
    assert printable("a\nb\ud800") == "a b?"


LOCAL = ["localhost", "LOCALHOST:80", "127.0.0.1", "127.8.9.10:7787", "[::1]", "[::1]:7787"]
FOREIGN = ["evil.example", "localhost.evil.example:7787", "127.0.0.1.evil.example", "10.0.0.9:7787"]
FOREIGN += ["evil@127.0.0.1", "127.0.0.1/", "localhost:x", "[::2]", "0.0.0.0", ""]


@pytest.mark.parametrize(
    ("settings", "good", "bad"),
    [
        (Settings(), LOCAL, FOREIGN),
        (Settings(allow_hosts=("Proxy.example",)), ["proxy.example:443"], ["a.proxy.example"]),
        (Settings(host="10.0.0.1", users=Users("t")), ["10.0.0.1:7787", *LOCAL], FOREIGN),
        (Settings(host="node7", users=Users("t")), ["node7:7787", socket.gethostname()], FOREIGN),
        (Settings(host="0.0.0.0", users=Users("t")), ["10.0.0.9:7787", "[fd00::2]"], FOREIGN[:3]),
    ],
)
def test_only_its_own_names_reach_it(
    run: Any, settings: Settings, good: list[str], bad: list[str]
) -> None:
    async def work() -> None:
        transport = httpx.ASGITransport(app=make_app(settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for host, status in [*((g, 200) for g in good), *((b, 421) for b in bad)]:
                answer = await client.get("/healthz", headers={"Host": host})
                assert answer.status_code == status, host
                if status == 421:
                    assert "--allow-host" in answer.json()["detail"]

    run(work())


def test_pages_of_other_sites_are_refused_on_every_route(run: Any, serving: Any) -> None:
    async def work() -> None:
        async with serving() as client:
            paths = client.app.openapi()["paths"]
            routes = [(m.upper(), path) for path, methods in paths.items() for m in methods]
            assert ("POST", "/register_job") in routes
            for method, path in [*routes, ("GET", "/docs"), ("GET", "/openapi.json")]:
                for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "file://"):
                    answer = await client.request(method, path, headers={"Origin": origin})
                    assert answer.status_code == 403, (method, path, origin)
                    assert "another site" in answer.json()["detail"]
                answer = await client.request(method, path, headers={"Host": "evil.example"})
                assert answer.status_code == 421, (method, path)
            own = {"Origin": "http://127.0.0.1:7787"}
            assert (await client.get("/healthz", headers=own)).status_code == 200

    run(work())
