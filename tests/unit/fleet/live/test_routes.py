"""The fleet's routes, in this process, on an engine that only remembers."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_builders import FakeEngine, curve, servers, spec

from partita.core.codec import decode_as
from partita.core.fleet import FleetHistory, HistoryOrigin
from partita.errors import InvalidInputError
from partita.fleet.engines.protocol import Traits
from partita.fleet.live.fleet import Fleet
from partita.fleet.live.scheduler import FleetSettings
from partita.service.app import make_app
from partita.service.settings import Settings
from partita.service.users import Users

TOKEN = "secret"
Open = Callable[..., AbstractAsyncContextManager[tuple[httpx.AsyncClient, FakeEngine]]]


@pytest.fixture
def serving(tmp_path: Path) -> Open:
    @asynccontextmanager
    async def opened(**more: str) -> AsyncIterator[tuple[httpx.AsyncClient, FakeEngine]]:
        settings = FleetSettings(state=tmp_path / "fleet.sqlite", round_s=0.05, poll_s=0.005)
        engine = FakeEngine()
        fleet = Fleet(settings, servers(), "fifo:tune", engine)
        app = make_app(Settings(users=Users(TOKEN)), fleet)
        shown = {"Authorization": f"Bearer {TOKEN}", **more}
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1", headers=shown
            ) as client,
        ):
            client.fleet = fleet
            yield client, engine

    return opened


def body(home: Path, **rest: Any) -> dict[str, Any]:
    return {**spec(home).to_json(), **rest}


async def until(client: httpx.AsyncClient, job: int, state: str) -> dict[str, Any]:
    for _ in range(2000):
        said = (await client.get(f"/fleet/jobs/{job}")).json()
        if said["state"] == state:
            return dict(said)
        await asyncio.sleep(0.01)
    raise AssertionError(f"job {job} is {said['state']}: {said['note']}")


async def until_started(client: httpx.AsyncClient, engine: FakeEngine) -> dict[str, Any]:
    """Wait for job 1: it is said to run from just before its start."""
    said = await until(client, 1, "running")
    while not engine.alive:
        await asyncio.sleep(0.01)
    return said


def test_a_job_from_submission_to_history(serving: Open, tmp_path: Path) -> None:
    async def talk() -> None:
        async with serving() as (client, engine):
            sent = body(tmp_path, key="once", deadline_s=0.0)
            first = await client.post("/fleet/jobs", json=sent)
            again = await client.post("/fleet/jobs", json=sent)
            assert first.json() == again.json() == {"id": 1}
            running = await until_started(client, engine)
            assert running["places"][0]["gpus"] == [0]
            assert "past its deadline by" in running["note"]
            info = (await client.get("/fleet")).json()
            assert (info["running"], info["servers"][0]["gpus_in_use"]) == (1, 1)
            place, server = running["places"][0], info["servers"][0]
            assert place["memory_bytes"] == server["memory_bytes_granted"] == 1e9
            # As clients of version 0.1 read them.
            assert place["memory_gb"] == server["memory_gb_granted"] == 1.0
            assert (server["memory_bytes"], server["memory_gb"]) == (64e9, 64.0)
            engine.work(10)
            done = await until(client, 1, "finished")
            assert done["events"][-1]["what"] == "finished: 10 steps done"
            assert (await client.get("/fleet/jobs")).json() == []
            assert len((await client.get("/fleet/jobs?all=true")).json()) == 1
            history = decode_as((await client.get("/fleet/history")).json(), FleetHistory)
            assert (history.origin, history.unfinished) == (HistoryOrigin.LIVE, 0)
            metrics = (await client.get("/metrics")).text
            assert 'partita_fleet_gpus{server="host0"} 4' in metrics
            assert 'partita_fleet_jobs{state="finished"} 1' in metrics

    asyncio.run(talk())


def test_a_job_that_waits_says_for_what(serving: Open, tmp_path: Path) -> None:
    async def talk() -> None:
        async with serving() as (client, engine):
            await client.post("/fleet/jobs", json=body(tmp_path))
            await until_started(client, engine)
            await client.post("/fleet/jobs", json=body(tmp_path, gpus=[[4, 4, ""]]))
            notes = [job["note"] for job in (await client.get("/fleet/jobs")).json()]
            assert notes == ["", "waits for 4 GPUs; 3 of 4 GPUs are free"]
            await client.post("/fleet/drain", json={"on": True})
            drained = (await client.get("/fleet/jobs/2")).json()
            assert drained["note"] == "waits until the fleet starts jobs again"

    asyncio.run(talk())


def test_logs_are_read_from_an_offset(serving: Open, tmp_path: Path) -> None:
    async def talk() -> None:
        async with serving() as (client, engine):
            await client.post("/fleet/jobs", json=body(tmp_path))
            await until_started(client, engine)
            order = next(iter(engine.alive.values()))
            (order.directory / "log.txt").write_bytes(b"hello\n\xff")
            said = (await client.get("/fleet/jobs/1/log?offset=4")).json()
            assert said == {"text": "o\n\N{REPLACEMENT CHARACTER}", "offset": 7, "ended": False}

    asyncio.run(talk())


def test_errors_have_their_codes(serving: Open, tmp_path: Path) -> None:
    async def talk() -> None:
        async with serving() as (client, _):

            async def submit(**rest: Any) -> httpx.Response:
                return await client.post("/fleet/jobs", json=body(tmp_path, **rest))

            for path in ("/fleet/jobs/9", "/fleet/jobs/9/log"):
                missing = await client.get(path)
                assert (missing.status_code, missing.json()["detail"]) == (404, "there is no job 9")
            assert (await client.delete("/fleet/jobs/9")).status_code == 404
            assert (await client.get("/fleet/history")).status_code == 409
            wide = await submit(gpus=[[9, 9, ""]])
            assert wide.status_code == 409
            assert "9 GPUs" in wide.json()["detail"]
            assert (await submit(gpus=[[1, 2**20, ""]], key="wide")).status_code == 200
            for wrong, where in (
                ({"gpus": [[2, 1, ""]]}, "body"),
                ({"gpus": [[1, 1, "h100"]]}, "body"),
                ({"steps": 0}, "steps"),
                ({"command": []}, "command"),
                ({"folder": "relative"}, "folder"),
                ({"sensitivity": {}}, "body"),
                ({"nonsense": 1}, "nonsense"),
            ):
                answer = await submit(**wrong)
                assert answer.status_code == 422, wrong
                assert where in answer.json()["detail"][0]["loc"]
            assert (await client.delete("/fleet/jobs/1")).status_code == 200
            await until(client, 1, "cancelled")
            assert (await client.delete("/fleet/jobs/1")).status_code == 409

    asyncio.run(talk())


def test_a_token_is_asked_for(serving: Open) -> None:
    async def talk() -> None:
        async with serving(Authorization="") as (client, engine):
            for method, path in (
                ("GET", "/fleet"),
                ("GET", "/fleet/jobs"),
                ("POST", "/fleet/jobs"),
                ("POST", "/fleet/drain"),
                ("DELETE", "/fleet/jobs/1"),
                ("GET", "/fleet/jobs/1/log"),
                ("GET", "/fleet/history"),
                ("GET", "/metrics"),
            ):
                assert (await client.request(method, path)).status_code == 401, path
            assert (await client.get("/healthz")).status_code == 200
            shown = {"Authorization": f"Bearer {TOKEN}"}
            assert (await client.get("/fleet", headers=shown)).status_code == 200
            assert not engine.alive

    asyncio.run(talk())


def test_a_fleet_without_a_token_is_not_served(tmp_path: Path) -> None:
    fleet = Fleet(
        FleetSettings(state=tmp_path / "fleet.sqlite"), servers(), "fifo:tune", FakeEngine()
    )
    with pytest.raises(InvalidInputError, match="needs a token"):
        make_app(Settings(), fleet)
    fleet.close()


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ({"Host": "evil.example:7788"}, 421),  # its name was made to point to this machine
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 421),
    ],
)
def test_a_web_page_cannot_submit_a_job(
    serving: Open, tmp_path: Path, header: dict[str, str], status: int
) -> None:
    async def talk() -> None:
        async with serving(**header) as (client, engine):
            answer = await client.post("/fleet/jobs", json=body(tmp_path))
            assert answer.status_code == status
            assert "is" in answer.json()["detail"]
            own = {"Host": "127.0.0.1", "Origin": "http://127.0.0.1"}
            assert (await client.get("/fleet/jobs?all=true", headers=own)).json() == []
            assert not engine.alive

    asyncio.run(talk())


def test_a_sensitivity_travels_whole(serving: Open, tmp_path: Path) -> None:
    async def talk() -> None:
        async with serving() as (client, engine):
            sent = spec(tmp_path, sensitivity=curve((1, 0.2), (3, 1.0), (6, 1.7))).to_json()
            sent = json.loads(json.dumps(sent))
            assert (await client.post("/fleet/jobs", json=sent)).json() == {"id": 1}
            said = await until_started(client, engine)
            assert said["places"][0]["cpus"] == pytest.approx(6.0)
            engine.work(10)
            await until(client, 1, "finished")

    asyncio.run(talk())


def test_a_job_elsewhere_reports_and_gets_its_lease_by_its_own_token(
    serving: Open, tmp_path: Path
) -> None:
    async def talk() -> None:
        async with serving() as (client, engine):
            engine.traits = Traits(is_remote=True)
            client.fleet.scheduler.news_url = "http://head:7788"
            await client.post("/fleet/jobs", json=body(tmp_path))
            await until_started(client, engine)
            (order,) = engine.alive.values()
            assert order.environment["PARTITA_NEWS"] == "http://head:7788/fleet/news/1"
            own = {"Authorization": f"Bearer {order.environment['PARTITA_NEWS_TOKEN']}"}
            asked = {"attempt": 1}
            answer = await client.post("/fleet/news/1", json=asked, headers=own)
            assert answer.json()["attempt"] == 1
            assert answer.json()["grant"]["gpus"] == 1
            words = {"state": "running", "step": 4, "saved_step": 3, "steps": 10}
            words |= {"attempt": 1, "pid": 5, "at_s": 1.5}
            told = await client.post(
                "/fleet/news/1", json={**asked, "progress": words}, headers=own
            )
            assert told.status_code == 200
            assert (await client.get("/fleet/jobs/1")).json()["step"] == 4
            for number, attempt, token in ((1, 2, own), (2, 1, own), (1, 1, {})):
                refused = await client.post(
                    f"/fleet/news/{number}", json={"attempt": attempt}, headers=token
                )
                assert refused.status_code == 401
            wrong = {**asked, "progress": {**words, "step": -1}}
            assert (await client.post("/fleet/news/1", json=wrong, headers=own)).status_code == 422
            assert (await client.get("/fleet/jobs", headers=own)).status_code == 401

    asyncio.run(talk())
