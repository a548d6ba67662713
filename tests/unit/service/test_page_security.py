"""Who may see the page, and what is refused: rows of docs/security.md."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from page_app import URL, page_client

from partita.errors import InvalidInputError
from partita.flows.compare import CompareRequest
from partita.flows.plan import PlanRequest
from partita.service.auth import MOST_WRONG
from partita.service.ui.headers import HEADERS
from partita.service.ui.held import DocumentStore, file_name
from partita.service.ui.work import HELD, JOBS, PLAN_FIELDS, Work, asked_of

HOSTILE = ("../../etc/passwd", "..\\..\\boot.ini", "\u202enosj.a", "n" * 10_000, "<img onerror=1>")


def routes(client: httpx.AsyncClient) -> list[tuple[str, str]]:
    """Return method and path of every route of the page but the link's."""
    found = [
        (method.upper(), re.sub(r"\{\w+\}", "7", path))
        for path, methods in client.app.openapi()["paths"].items()  # type: ignore[attr-defined]
        for method in methods
        if path.startswith("/ui")
    ]
    assert len(found) > 20
    return found


async def asked(client: httpx.AsyncClient, method: str, path: str, **rest: Any) -> httpx.Response:
    sent = {"json": {}} if method == "POST" else {}
    return await client.request(method, path, **{**sent, **rest})


def test_the_link_is_good_once(tmp_path: Path, run: Any) -> None:
    async def work() -> None:
        async with page_client(tmp_path, known=False) as client:
            token = client.app.state.page.keys.link()  # type: ignore[attr-defined]
            wrong = await client.get("/", params={"token": "x" * 43})
            assert wrong.status_code == 401
            first = await client.get("/", params={"token": token})
            assert (first.status_code, first.headers["location"]) == (303, "/ui")
            cookie = first.headers["set-cookie"]
            assert token not in cookie
            # Servers at other ports of this machine do not take each other's place.
            for part in ("partita-7789=", "HttpOnly", "SameSite=Strict", "Path=/"):
                assert part in cookie
            client.cookies.clear()
            again = await client.get("/", params={"token": token})
            assert again.status_code == 401
            # Who loads a page that is open since before a restart reads a sentence.
            page = await client.get("/ui/plan", headers={"Accept": "text/html,*/*"})
            assert (page.status_code, page.headers["content-type"][:10]) == (401, "text/plain")
            assert page.text.startswith("the page's key is needed: open the link")
            assert "set-cookie" not in again.headers

    run(work())


def test_the_cookie_of_a_page_over_tls_stays_there(tmp_path: Path, run: Any) -> None:
    async def work() -> None:
        async with page_client(tmp_path, known=False, tls=True) as client:
            token = client.app.state.page.keys.link()  # type: ignore[attr-defined]
            answer = await client.get("/", params={"token": token})
            assert "; Secure" in answer.headers["set-cookie"]

    run(work())


def test_every_route_of_the_page_asks_for_the_cookie(tmp_path: Path, run: Any) -> None:
    async def work() -> None:
        async with page_client(tmp_path, known=False) as client:
            for method, path in [*routes(client), ("GET", "/metrics"), ("GET", "/openapi.json")]:
                assert (await asked(client, method, path)).status_code == 401, path
                bearer = {"Authorization": "Bearer token-of-somebody"}
                assert (await asked(client, method, path, headers=bearer)).status_code == 401
            wrong = {"Cookie": "partita-7789=" + "x" * 43}
            codes = [
                (await client.get("/ui/api/choices", headers=wrong)).status_code
                for _ in range(MOST_WRONG + 1)
            ]
            assert codes == [401] * MOST_WRONG + [429]
        async with page_client(tmp_path) as client:
            for method, path in routes(client):
                if not path.endswith("events"):
                    answer = await asked(client, method, path)
                    assert answer.status_code in (200, 404, 422), (path, answer.text)

    run(work())


def test_other_sites_and_hosts_are_refused_on_every_route_of_the_page(
    tmp_path: Path, run: Any
) -> None:
    async def work() -> None:
        async with page_client(tmp_path) as client:
            for method, path in [*routes(client), ("GET", "/")]:
                for headers, status in (
                    ({"Host": "attacker.example:7789"}, 421),
                    ({"Origin": "http://attacker.example"}, 403),
                    ({"Origin": "http://127.0.0.1:8000"}, 403),
                    ({"Origin": "null"}, 403),
                    ({"Sec-Fetch-Site": "cross-site"}, 403),
                    ({"Sec-Fetch-Site": "same-site"}, 403),
                ):
                    answer = await asked(client, method, path, headers=headers)
                    assert answer.status_code == status, (path, headers)
            own = {"Origin": URL, "Sec-Fetch-Site": "same-origin"}
            body = {"text": "2x4xa100"}
            answer = await client.post("/ui/api/cluster", json=body, headers=own)
            assert answer.json()["line"] == "8 devices in 2 hosts"

    run(work())


def test_every_answer_of_the_page_has_its_headers(tmp_path: Path, run: Any) -> None:
    async def work() -> None:
        async with page_client(tmp_path) as client:
            paths = ("/", "/ui", "/ui/static/ui.js", "/ui/static/report/gantt.js")
            for path in (*paths, "/ui/api/choices", "/ui/api/jobs/7", "/ui/nothing"):
                answer = await client.get(path)
                assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS, path
            policy = HEADERS["Content-Security-Policy"]
            assert "unsafe" not in policy
            assert "require-trusted-types-for 'script'" in policy
            client.cookies.clear()
            assert (await client.get("/ui")).headers["x-content-type-options"] == "nosniff"

    run(work())


def test_the_token_is_in_no_log(
    tmp_path: Path, run: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A test that served in this process may have left the logger as a server sets it.
    monkeypatch.setattr(logging.getLogger("partita"), "propagate", True)

    async def work() -> str:
        with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, logger="partita"):
            async with page_client(tmp_path, known=False) as client:
                token: str = client.app.state.page.keys.link()  # type: ignore[attr-defined]
                await client.get("/", params={"token": token})
                return token

    token = run(work())
    logged = [record for record in caplog.records if record.name.startswith("partita")]
    assert any("303 GET /" in record.getMessage() for record in logged)
    assert all(token not in str(vars(record)) for record in logged)


def test_no_name_leaves_its_folder(tmp_path: Path, run: Any) -> None:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "plan.json").write_text("{}")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "plan.json").write_text("{}")

    async def work() -> None:
        async with page_client(tmp_path) as client:
            for base in ("/ui/static/", "/ui/static/report/", "/ui/api/documents/"):
                for name in ("../jobs.py", "..%2fjobs.py", "%2e%2e%2fjobs.py", "ui.js%2f.."):
                    answer = await client.get(base + name)
                    assert answer.status_code in (404, 405), base + name
            for name in ("../secret", "..%2fsecret", "%2e%2e%2fsecret", "one%2f..%2fone"):
                answer = await client.get(f"/ui/api/live/runs/{name}")
                assert answer.status_code == 404, name
            assert (await client.get("/ui/api/live/runs/one")).status_code == 200

    run(work())


def test_uploads_are_documents_within_limits(tmp_path: Path, run: Any) -> None:
    async def work() -> None:
        async with page_client(tmp_path, upload_bytes=1000, max_body=5000) as client:

            async def upload(text: str) -> httpx.Response:
                body = {"name": "a.json", "text": text}
                return await client.post("/ui/api/documents", json=body)

            assert (await upload("x" * 1001)).status_code == 413
            assert (await upload("x" * 6000)).status_code == 413
            form = await client.post("/ui/api/documents", data={"name": "a", "text": "b"})
            assert form.status_code == 415
            answer = await client.post("/ui/api/edit", json={"plan": "x" * 65, "edits": []})
            assert answer.status_code == 422
            many = {"plan": "x", "edits": ["a=1"] * 501}
            assert (await client.post("/ui/api/edit", json=many)).status_code == 422

    run(work())


class Pipe:
    """A pipe that keeps what is said."""

    def __init__(self) -> None:
        self.frames: list[tuple[dict[str, Any], str]] = []

    def send_bytes(self, frame: bytes) -> None:
        head, _, body = frame.partition(b"\n")
        self.frames.append((json.loads(head), body.decode()))

    def poll(self, _: float) -> bool:
        return False


def work_of(values: dict[str, Any], **documents: tuple[str, str]) -> Work:
    held = {f"{HELD}{name}": pair for name, pair in documents.items()}
    return Work(values=values, documents=held, pipe=Pipe())


def test_what_is_no_document_is_refused_in_one_line() -> None:
    for text in ("", "#!/bin/sh\nrm -rf /", '{"format": "partita.graph"}', "\x00" * 50):
        work = Work(values={}, documents={HELD: ("a.bin", text)}, pipe=Pipe())
        with pytest.raises(InvalidInputError) as caught:
            JOBS["read"](work)
        assert "\n" not in str(caught.value)


def test_hostile_names_are_titles_and_no_paths() -> None:
    store = DocumentStore(10**6)
    for name in HOSTILE:
        held = store.add(name, "graph", name, f"text of {name}")
        assert re.fullmatch(r"[A-Za-z0-9._+-]{1,120}", held.name), held.name
        assert not held.name.startswith(".")
        assert len(held.title) <= 2000
        assert "\n" not in held.title
    assert file_name("../../etc/passwd") == "passwd"
    assert file_name("a b.plan.json") == "a-b.plan.json"


@pytest.mark.parametrize(
    "values",
    [
        {"model": "os:system", "cluster": "4xa100"},
        {"model": "/etc/passwd", "cluster": "4xa100"},
        {"model": "../graph.json", "cluster": "4xa100"},
        {"model": "hf:../../etc", "cluster": "4xa100"},
        {"model": "-", "cluster": "4xa100"},
        {"model": "doc:nothing", "cluster": "4xa100"},
        {"model": "gpt-small", "cluster": "lab.yaml"},
        {"model": "gpt-small", "cluster": "/etc/passwd"},
        {"model": "gpt-small", "cluster": "slurm:gpu"},
        {"model": "gpt-small", "cluster": "4xa100", "planner": "grid:/etc/passwd"},
        {"model": "gpt-small", "cluster": "4xa100", "planner": "manual"},
        {"model": "gpt-small", "cluster": "4xa100", "planner": "os:system"},
        {"model": "gpt-small", "cluster": "4xa100", "trace_search": "/tmp/x"},
        {"model": "gpt-small", "cluster": "4xa100", "catalogue": "/etc/passwd"},
        {"model": "gpt-small", "cluster": "4xa100", "from_plan": "/etc/passwd"},
        {"model": "gpt-small", "cluster": "4xa100", "microbatches": "many"},
    ],
)
def test_the_page_opens_no_path_and_loads_no_code(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **rest: object) -> None:
        raise AssertionError(f"a file is opened: {given} {rest}")

    monkeypatch.setattr("partita.documents.read_bytes", refuse)
    with pytest.raises(InvalidInputError) as caught:
        asked_of(work_of(values), PlanRequest, PLAN_FIELDS)
    assert "\n" not in str(caught.value)


def test_a_cluster_file_may_name_no_other_file() -> None:
    text = "Server0\n    TitanV 1 /etc/passwd\n"
    with pytest.raises(InvalidInputError):
        JOBS["read"](Work(values={}, documents={HELD: ("server_file", text)}, pipe=Pipe()))


def test_planners_are_those_of_the_table_in_lists_too() -> None:
    values = {"model": "gpt-small", "cluster": "4xa100", "planner": ["uniform", "grid:x.sh"]}
    with pytest.raises(InvalidInputError, match=r"grid:x\.sh"):
        asked_of(work_of(values), CompareRequest, PLAN_FIELDS)


def test_too_much_work_is_refused(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partita.service.ui.jobs.PageJobs._listen", lambda *_: None)

    async def work() -> None:
        async with page_client(tmp_path, waiting=1) as client:
            jobs = client.app.state.page.jobs  # type: ignore[attr-defined]
            jobs.ask("plan", {"model": "one"})
            body = {"kind": "plan", "values": {"model": "two"}}
            with pytest.raises(Exception, match="wait already"):
                jobs.ask("plan", {"model": "three"})
            answer = await client.post("/ui/api/jobs", json=body)
            assert answer.status_code in (200, 429)
            wrong = await client.post("/ui/api/jobs", json={"kind": "run", "values": {}})
            assert wrong.status_code == 400
            assert "\n" not in wrong.json()["detail"]

    run(work())
