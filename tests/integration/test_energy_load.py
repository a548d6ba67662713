"""Many jobs of eight ranks at once, and a server that is killed twice under them.

Every rank is a client of its own: it registers, fetches its clocks by long-poll, reports what it
measured and fetches the next clocks. It asks again when the connection breaks, and for no other
reason; none may break but by a kill. What the server acknowledged is written down and compared with
what it knows in the end.
"""

import asyncio
import contextlib
import json
import os
import resource
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs fastapi")

pytestmark = pytest.mark.slow

EnergyService = runpy.run_path(str(Path(__file__).with_name("energy_service.py")))["EnergyService"]

NUM_JOBS = 200 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 40
DEGREES = {"pp_degree": 4, "dp_degree": 2, "tp_degree": 1, "world_size": 8}
NUM_RANKS = DEGREES["world_size"]
MICROBATCHES = 2
CLOCKS_MHZ = [1410, 1200, 1005, 810]
ROUNDS = 1
LIMIT_S = 120.0
PAUSE_S = 0.5


@dataclass
class Ledger:
    """What the server has acknowledged, as its clients saw it, and what went wrong on the way.

    Attributes:
        kills: How often it was killed.
        down: Whether it is.
        torn: Connections that broke by a kill, and attempts to make one meanwhile.
        broken: Any others, which should not be there.
    """

    jobs: set[str] = field(default_factory=set)
    ranks: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    clocks: dict[tuple[str, int, int], list[list[Any]]] = field(default_factory=dict)
    results: set[tuple[str, int, int]] = field(default_factory=set)
    kills: int = 0
    down: bool = False
    torn: int = 0
    broken: list[str] = field(default_factory=list)

    async def reaches(self, count: Callable[["Ledger"], int], number: int) -> None:
        """Wait until so much is acknowledged."""
        while count(self) < number:
            await asyncio.sleep(0.005)


class Client:
    """One connection that stays: as much of HTTP as the server needs to be asked at its speed."""

    def __init__(self, url: str, ledger: Ledger) -> None:
        self.ledger = ledger
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._kills = 0

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        """Return the answer; ask again where the connection broke before there was one."""
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        while True:
            down = self.ledger.down
            try:
                status, answer = await self._exchange(head.encode() + content)
            except (OSError, EOFError) as exc:
                self.close()
                if down or self.ledger.down or self._kills != self.ledger.kills:
                    self.ledger.torn += 1
                else:
                    self.ledger.broken.append(f"{method} {path}: {exc!r}")
                await asyncio.sleep(PAUSE_S)
                continue
            assert status == 200, (method, path, status, answer)
            return json.loads(answer)

    async def _exchange(self, request: bytes) -> tuple[int, bytes]:
        """Send a request; returns the status and the body of the answer."""
        if self._streams is None:
            self._kills = self.ledger.kills
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].partition("\r\n")[0])
        return int(head.split()[1]), await reader.readexactly(length)

    def close(self) -> None:
        """Hang up."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


@dataclass
class Job:
    """The clients of one job: eight ranks, a connection each."""

    url: str
    ledger: Ledger
    number: int

    async def run(self) -> None:
        """Register the job and let its ranks train."""
        with contextlib.closing(Client(self.url, self.ledger)) as client:
            body = {"job_id": "", **DEGREES, "job_metadata": f"job-{self.number}"}
            job = await client.ask("POST", "/register_job", body)
        self.ledger.jobs.add(job)
        async with asyncio.TaskGroup() as ranks:
            for rank in range(NUM_RANKS):
                ranks.create_task(self.train(job, rank))

    async def train(self, job: str, rank: int) -> None:
        """Be one rank: register, then fetch clocks and report on them."""
        body = {
            "rank": rank,
            "dp_rank": rank // DEGREES["pp_degree"],
            "pp_rank": rank % DEGREES["pp_degree"],
            "tp_rank": 0,
            "available_frequencies": CLOCKS_MHZ,
        }
        with contextlib.closing(Client(self.url, self.ledger)) as client:
            await client.ask("POST", f"/register_rank/{job}", body)
            self.ledger.ranks[job, rank] = body
            version = await self.fetch(client, job, rank, 0)
            for _ in range(ROUNDS):
                await client.ask("POST", f"/result/{job}", result(rank, version))
                self.ledger.results.add((job, rank, version))
                version = await self.fetch(client, job, rank, version)

    async def fetch(self, client: Client, job: str, rank: int, last: int) -> int:
        """Fetch clocks; returns their version."""
        # Half of them ask as our client does, half as Zeus's, which names no version.
        after = f"&after={last}" if rank % 2 and last else ""
        answer = await client.ask("GET", f"/schedule/{job}?rank={rank}{after}")
        assert answer["rank"] == rank
        assert answer["version"] > last
        self.ledger.clocks[job, rank, answer["version"]] = answer["frequencies"]
        return int(answer["version"])


def result(rank: int, version: int) -> dict[str, Any]:
    """Return what a rank measured in two steps; slower clocks take longer and need less energy."""
    steps = 2
    seconds, joules = 0.1 * (1 + version), 30.0 / (1 + version)
    return {
        "rank": rank,
        "version": version,
        "iter_time": [4 * seconds] * steps,
        "iter_energy": [4 * joules] * steps,
        "time_breakdown": {n: [[seconds] * MICROBATCHES] * steps for n in ("forward", "backward")},
        "energy_breakdown": {n: [[joules] * MICROBATCHES] * steps for n in ("forward", "backward")},
    }


async def disturb(service: EnergyService, ledger: Ledger) -> None:
    """Kill the server half-way through the registrations, and half-way through the results."""
    whole = NUM_JOBS * NUM_RANKS
    await ledger.reaches(lambda seen: len(seen.ranks), whole // 2)
    await restart(service, ledger)
    await ledger.reaches(lambda seen: len(seen.results), whole // 2)
    await restart(service, ledger)


async def restart(service: EnergyService, ledger: Ledger) -> None:
    ledger.kills, ledger.down = ledger.kills + 1, True
    service.kill()
    await asyncio.to_thread(service.start)
    ledger.down = False


async def train_all(service: EnergyService, ledger: Ledger) -> None:
    """Let all jobs train at once while the server is killed twice."""
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(disturb(service, ledger))
        for number in range(NUM_JOBS):
            tasks.create_task(Job(service.url, ledger, number).run())


async def state_of(service: EnergyService, ledger: Ledger) -> dict[str, Any]:
    """Return what the server knows: the jobs, but for how long they are idle, and clocks."""
    with contextlib.closing(Client(service.url, ledger)) as client:
        jobs = {job["job_id"]: job for job in await client.ask("GET", "/jobs")}
        clocks = {}
        for job in ledger.jobs:
            answer = await client.ask("GET", f"/schedule/{job}?rank=0&after={ROUNDS}")
            clocks[job] = answer["frequencies"]
    for job in jobs.values():
        del job["idle_s"]
    return {"jobs": jobs, "clocks": clocks}


@pytest.fixture
def _many_connections() -> Iterator[None]:
    """Let this process have a connection a rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("_many_connections")
def test_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    ledger = Ledger()
    options = ("--scheduler", "instruction-profiler", "--microbatches", str(MICROBATCHES))
    with EnergyService(tmp_path, *options) as service:
        asyncio.run(train_all(service, ledger))
        known = asyncio.run(state_of(service, ledger))
        service.kill()
        service.start()
        again = asyncio.run(state_of(service, ledger))

    assert not ledger.broken
    assert ledger.torn > 0, "the server was killed while nobody spoke to it"
    whole = NUM_JOBS * NUM_RANKS
    assert len(ledger.jobs) == NUM_JOBS
    assert len(ledger.ranks) == whole
    assert len(ledger.results) == ROUNDS * whole
    # A job whose registration was kept but not acknowledged may be there besides, without ranks.
    assert ledger.jobs <= known["jobs"].keys()
    assert not sum(known["jobs"][job]["registered"] for job in known["jobs"].keys() - ledger.jobs)
    for job in ledger.jobs:
        found = known["jobs"][job]
        assert (found["registered"], found["missing"]) == (NUM_RANKS, [])
        assert found["version"] == 1 + ROUNDS
        assert found["silent"] == list(range(NUM_RANKS))
        # What the last reports said, which only those who have them all can know.
        assert found["iteration_j"] == NUM_RANKS * result(0, ROUNDS)["iter_energy"][-1]
        assert found["scheduler"] == "instruction-profiler"
        assert known["clocks"][job] == ledger.clocks[job, 0, 1 + ROUNDS]
    assert again == known
