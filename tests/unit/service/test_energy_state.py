"""What a server knows after it has started again."""

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from partita.core.codec import encode, read_json, write_json
from partita.energy.policies.solving import Shape, SolveTask, solve_task
from partita.errors import InvalidInputError, UnsupportedError, WorkerError
from partita.service.energy.solver import EnergySolver, Solver, SolverProcess
from partita.service.energy.store import Database, EnergyStore
from partita.testing.builders import small_energy_profile


class InThread:
    """A solver in a thread of this process, which needs no time to start."""

    async def solve(self, task: SolveTask, limit_s: float) -> str:
        return await asyncio.to_thread(solve_task, task)

    def warm(self) -> None:
        """Do nothing: there is no process."""

    def close(self) -> None:
        """Do nothing: there is no process."""


class TooSlow(InThread):
    """A solver that never comes to an end in time."""

    async def solve(self, task: SolveTask, limit_s: float) -> str:
        raise TimeoutError


class Dying(InThread):
    """A solver whose process dies."""

    async def solve(self, task: SolveTask, limit_s: float) -> str:
        raise EOFError


class Wrong(InThread):
    """A solver with a mistake in it."""

    async def solve(self, task: SolveTask, limit_s: float) -> str:
        raise ZeroDivisionError


class Solving(InThread):
    """A solver that is busy until somebody ends it."""

    async def solve(self, task: SolveTask, limit_s: float) -> str:
        await asyncio.Event().wait()
        raise AssertionError


def solve_by(monkeypatch: pytest.MonkeyPatch, solver: Callable[[], Solver]) -> None:
    """Let servers that start from now on solve elsewhere."""
    monkeypatch.setattr(EnergySolver.__init__, "__defaults__", (solver,))


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    solve_by(monkeypatch, InThread)


def events(path: Path) -> list[tuple[str, str]]:
    with sqlite3.connect(path / "jobs.sqlite") as connection:
        rows = connection.execute("SELECT kind, body FROM energy_events ORDER BY job, seq")
        found = [(str(kind), str(body)) for kind, body in rows]
    connection.close()
    return found


async def version(client: Any, job: str) -> int:
    """Return the version once the job has been told everything."""
    while True:
        shown = (await client.get(f"/jobs/{job}")).json()
        if shown["state"] not in ("registering", "solving"):
            return int(shown["version"])
        await asyncio.sleep(0.01)


def test_a_job_goes_on_where_it_was(
    run: Any, serving: Any, registered: Any, bodies: Any, tmp_path: Path
) -> None:
    async def work() -> None:
        async with serving() as client:
            job = await registered(client)
            for _ in range(3):
                for rank in (0, 1):
                    await client.post(f"/result/{job}", json=bodies.result(rank))
                await client.get(f"/schedule/{job}", params={"rank": 0})
            await client.post(f"/result/{job}", json=bodies.result(1))
        assert [kind for kind, _ in events(tmp_path)] == ["rank", "rank", "settled", "result"]
        async with serving() as client:
            answer = await client.get(f"/schedule/{job}", params={"rank": 0})
            assert answer.json()["version"] == 4
            waits = await client.get(f"/schedule/{job}", params={"rank": 1, "wait": 0.05})
            assert waits.status_code == 504
            again = await client.post(f"/register_rank/{job}", json=bodies.rank(0))
            assert again.status_code == 200
            await client.post(f"/result/{job}", json=bodies.result(0))
            answer = await client.get(f"/schedule/{job}", params={"rank": 1})
            assert answer.json()["version"] == 5

    run(work())


def test_an_old_job_keeps_its_scheduler(run: Any, serving: Any, registered: Any) -> None:
    async def work() -> None:
        options = {"forward_freq": 1200, "backward_freq": 1400}
        async with serving(scheduler="two-frequencies", options=options) as client:
            job = await registered(client)
            before = (await client.get(f"/schedule/{job}", params={"rank": 0})).json()
        async with serving() as client:
            after = (await client.get(f"/schedule/{job}", params={"rank": 0})).json()
            assert after == before

    run(work())


@pytest.mark.usefixtures("in_threads")
def test_stragglers_and_frontiers_are_there_again(
    run: Any, serving: Any, registered: Any, tmp_path: Path
) -> None:
    async def work() -> None:
        settings = {"scheduler": "perseus", "options": {"points": 5}}
        profile = encode(small_energy_profile())
        async with serving(**settings) as client:
            job = await registered(client, 1, profile=profile)
            usual = (await client.get(f"/schedule/{job}", params={"rank": 0})).json()
            for after in range(1, 4):
                body = {"slowdown": 1 + after} if after != 3 else {"iteration_s": 100.0}
                await client.post(f"/straggler/{job}", json=body)
                query = {"rank": 0, "after": after}
                slow = (await client.get(f"/schedule/{job}", params=query)).json()
                assert slow["version"] == after + 1
            assert slow["energy_j"] < usual["energy_j"]
            frontier = (await client.get(f"/frontier/{job}")).json()
            assert frontier["energy_j"] == slow["energy_j"]
            assert frontier["frontier"]["format"] == "partita.frontier"
        assert [kind for kind, _ in events(tmp_path)] == ["rank", "settled"]
        async with serving(**settings) as client:
            again = (await client.get(f"/schedule/{job}", params={"rank": 0})).json()
            assert again == slow
            assert "partita_energy_solved_total 0" in (await client.get("/metrics")).text
            await client.delete(f"/straggler/{job}")
            query = {"rank": 0, "after": 4}
            healthy = (await client.get(f"/schedule/{job}", params=query)).json()
            assert healthy["frequencies"] == usual["frequencies"]

    run(work())


@pytest.mark.usefixtures("in_threads")
def test_a_straggler_can_be_announced(run: Any, serving: Any, registered: Any) -> None:
    async def work() -> None:
        settings = {"scheduler": "perseus", "options": {"points": 5}}
        profile = encode(small_energy_profile())
        async with serving(**settings) as client:
            job = await registered(client, 1, profile=profile)
            assert await version(client, job) == 1
            await client.post(f"/straggler/{job}", json={"slowdown": 2.0, "delay_s": 3600})
            await client.delete(f"/straggler/{job}")
            await client.post(f"/straggler/{job}", json={"slowdown": 2.0, "delay_s": 0.3})
        async with serving(**settings) as client:
            query = {"rank": 0, "after": 1}
            slow = (await client.get(f"/schedule/{job}", params=query)).json()
            assert slow["version"] == 2
            assert len((await client.get(f"/jobs/{job}")).json()["stragglers"]) == 1
        async with serving(**settings) as client:
            assert await version(client, job) == 2
            assert (await client.get(f"/schedule/{job}?rank=0")).json() == slow

    run(work())


@pytest.mark.usefixtures("in_threads")
def test_what_cannot_be_solved_is_said(run: Any, serving: Any, registered: Any) -> None:
    async def work() -> None:
        profile = encode(small_energy_profile())
        async with serving(scheduler="perseus") as client:
            profile["kind"] = [2, 2, 5, 5]
            job = await registered(client, 1, profile=profile)
            answer = await client.get(f"/schedule/{job}", params={"rank": 0})
            assert (answer.status_code, "knows no instruction" in answer.text) == (409, True)
            assert (await client.get(f"/jobs/{job}")).json()["state"] == "failed"
        async with serving(scheduler="perseus") as client:
            again = await client.get(f"/schedule/{job}", params={"rank": 0})
            assert (again.status_code, again.json()) == (409, answer.json())

    run(work())


def test_a_second_server_is_refused(run: Any, serving: Any, tmp_path: Path) -> None:
    async def work() -> None:
        async with serving():
            with pytest.raises(UnsupportedError, match="another server"):
                EnergyStore(tmp_path / "jobs.sqlite")

    run(work())


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a database" * 100)
    with pytest.raises(InvalidInputError, match=r"notes\.txt"):
        EnergyStore(tmp_path / "notes.txt")
    with pytest.raises(InvalidInputError, match="no such file"):
        EnergyStore(tmp_path / "none" / "jobs.sqlite")


def test_one_failure_does_not_undo_the_others(run: Any, tmp_path: Path) -> None:
    async def work() -> None:
        database = Database(tmp_path / "a.sqlite", [["CREATE TABLE t (x INTEGER PRIMARY KEY)"]])
        values = [1, 2, 2, 3]
        asked = [
            database.run(lambda c, x=x: c.execute("INSERT INTO t VALUES (?)", (x,)) and None)
            for x in values
        ]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(one) for one in outcomes].count(sqlite3.IntegrityError) == 1
        rows = await database.run(lambda c: c.execute("SELECT x FROM t").fetchall())
        assert rows == [(1,), (2,), (3,)]
        database.close()

    run(work())


def task() -> SolveTask:
    return SolveTask(
        shape=Shape(), profile=write_json(small_energy_profile()), device_types=("",), points=2
    )


def test_a_solver_that_dies_twice_is_given_up(run: Any, tmp_path: Path) -> None:
    async def work() -> None:
        store = EnergyStore(tmp_path / "a.sqlite")
        with pytest.raises(WorkerError, match="died"):
            await EnergySolver(store, 1.0, Dying).solve("job", task())
        # A job is told the same again; another one has better luck with another server.
        solver = EnergySolver(store, 1.0, InThread)
        with pytest.raises(WorkerError, match="died"):
            await solver.solve("job", task())
        assert len((await solver.solve("other", task())).time_s) == 2
        store.close()

    run(work())


def test_a_quick_task_does_not_wait_for_others(run: Any, tmp_path: Path) -> None:
    solvers: Iterator[Solver] = iter([Solving(), InThread()])

    async def work() -> None:
        store = EnergyStore(tmp_path / "a.sqlite")
        solver = EnergySolver(store, 1.0, lambda: next(solvers))
        busy = asyncio.create_task(solver.solve("one", task()))
        await asyncio.sleep(0)
        found = await solver.solve("two", replace(task(), quick=True))
        assert len(found.time_s) == 2
        assert not busy.done()
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        store.close()

    run(work())


def test_a_mistake_in_the_solver_is_logged(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        store = EnergyStore(tmp_path / "a.sqlite")
        with pytest.raises(WorkerError, match="see its log"):
            await EnergySolver(store, 1.0, Wrong).solve("job", task())
        store.close()

    run(work())
    assert "ZeroDivisionError" in caplog.text


def test_a_process_solves_until_its_limit(run: Any) -> None:
    async def work() -> None:
        solver = SolverProcess()
        with pytest.raises(TimeoutError):
            await solver.solve(task(), 1e-6)
        found = read_json(await solver.solve(task(), 60.0))
        assert len(found.time_s) == 2
        wrong = json.dumps({**encode(small_energy_profile()), "kind": [2, 2, 5, 5]})
        with pytest.raises(InvalidInputError, match="knows no instruction"):
            await solver.solve(replace(task(), profile=wrong), 60.0)
        ended = asyncio.create_task(solver.solve(task(), 60.0))
        await asyncio.sleep(0)
        ended.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ended
        solver.close()

    run(work())


def test_a_job_goes_on_without_a_frontier_that_takes_too_long(
    run: Any, serving: Any, registered: Any, bodies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        settings = {"scheduler": "perseus", "solve_limit_s": 7.0}
        solve_by(monkeypatch, TooSlow)
        async with serving(**settings) as client:
            job = await registered(client, 1, profile=encode(small_energy_profile()))
            highest = (await client.get(f"/schedule/{job}?rank=0")).json()
            assert {clock for _, clock in highest["frequencies"]} == {1400}
            assert (highest["state"], highest["version"]) == ("deployed", 1)
            assert "not solved within 7 s" in highest["note"]
            await client.post(f"/straggler/{job}", json={"rank": 0, "slowdown": 2.0})
            await client.post(f"/result/{job}", json=bodies.result(0))
            assert (await client.get(f"/schedule/{job}?rank=0")).json()["version"] == 2
        solve_by(monkeypatch, InThread)
        async with serving(**settings) as client:
            late = await client.post(f"/result/{job}", json=bodies.result(0, version=2))
            assert late.status_code == 200
            again = (await client.get(f"/schedule/{job}?rank=0")).json()
            assert again == {**highest, "version": 3}

    run(work())


def test_a_solve_that_was_cut_short_is_begun_again(
    run: Any, serving: Any, bodies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        settings = {"scheduler": "perseus", "options": {"points": 3}}
        solve_by(monkeypatch, Solving)
        async with serving(**settings) as client:
            body = bodies.job(1, profile=encode(small_energy_profile()))
            job = (await client.post("/register_job", json=body)).json()
            await client.post(f"/register_rank/{job}", json=bodies.rank(0))
        async with serving(**settings) as client:  # it answers while it solves again
            while (await client.get(f"/jobs/{job}")).json()["state"] != "solving":
                await asyncio.sleep(0.01)
            await client.post(f"/straggler/{job}", json={"slowdown": 1.5})
            short = await client.get(f"/schedule/{job}?rank=0&wait=0.01")
            assert "version 1 is still being worked out" in short.json()["detail"]
        solve_by(monkeypatch, InThread)
        async with serving(**settings) as client:
            answer = (await client.get(f"/schedule/{job}?rank=0&after=1")).json()
            assert (answer["version"], answer["state"]) == (2, "deployed")

    run(work())


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.usefixtures("in_threads")
def test_a_report_right_after_a_start_counts(
    run: Any, serving: Any, registered: Any, bodies: Any, named: bool
) -> None:
    """A rank that was handed a version reports on it before anybody else asks for anything."""
    clocks, num_jobs = (1400, 1200), 8

    def result(rank: int, version: int) -> dict[str, Any]:
        figures = {name: [[1.0, 1.0]] for name in ("forward", "backward")}
        body = bodies.result(rank, time_breakdown=figures, energy_breakdown=figures)
        return {**body, "version": version} if named else body

    async def work() -> None:
        settings = {"scheduler": "perseus", "options": {"points": 3, "blocking_w": 80.0}}
        async with serving(**settings) as client:
            jobs = [await registered(client) for _ in range(num_jobs)]
        for version in range(1, len(clocks) + 2):
            async with serving(**settings) as client:
                asked = [client.post(f"/result/{job}", json=result(0, version)) for job in jobs]
                assert [one.status_code for one in await asyncio.gather(*asked)] == [200] * num_jobs
                for known in (await client.get("/jobs")).json():
                    assert (known["version"], known["silent"]) == (version, [1])
                for job in jobs:
                    await client.post(f"/result/{job}", json=result(1, version))
                    answer = await client.get(f"/schedule/{job}?rank=0&after={version}")
                    assert answer.json()["version"] == version + 1
        assert answer.json()["state"] == "deployed"

    run(work())


@pytest.mark.usefixtures("in_threads")
def test_what_nobody_needs_is_dropped(
    run: Any, serving: Any, registered: Any, tmp_path: Path
) -> None:
    async def rows(client: Any) -> list[int]:
        tables = ("jobs", "events", "answers", "documents")
        with sqlite3.connect(tmp_path / "jobs.sqlite") as connection:
            found = [
                connection.execute(f"SELECT COUNT(*) FROM energy_{name}").fetchone()[0]
                for name in tables
            ]
        connection.close()
        return found

    async def work() -> None:
        settings = {"scheduler": "perseus", "options": {"points": 3}}
        profile = encode(small_energy_profile())
        async with serving(**settings) as client:
            job = await registered(client, 1, profile=profile)
            for after in range(1, 4):  # each is solved; the last one and the healthy one stay
                body = {"rank": 0, "slowdown": 1.0 + after}
                await client.post(f"/straggler/{job}", json=body)
                slow = (await client.get(f"/schedule/{job}?rank=0&after={after}")).json()
            while (await rows(client))[2] != 2:
                await asyncio.sleep(0.01)
            assert (await rows(client)) == [1, 2, 2, 5]
        async with serving(**settings, max_idle_s=0.3) as client:
            assert (await client.get(f"/schedule/{job}?rank=0")).json() == slow
            poll = asyncio.create_task(client.get(f"/schedule/{job}?rank=0&after=4"))
            while (await rows(client)) != [1, 2, 2, 3]:  # one document is the configuration
                await asyncio.sleep(0.02)
            assert "partita_energy_solved_total 0" in (await client.get("/metrics")).text
            await client.delete(f"/jobs/{job}")
            assert (await poll).status_code == 404
            while (await rows(client)) != [0, 0, 0, 1]:
                await asyncio.sleep(0.02)
            assert (await client.get(f"/jobs/{job}")).json()["detail"] == f"no job '{job}'"

    run(work())


def test_a_closed_database_refuses(run: Any, tmp_path: Path) -> None:
    async def work() -> None:
        database = Database(tmp_path / "a.sqlite", [])
        database.close()
        database.close()
        with pytest.raises(sqlite3.ProgrammingError, match="is closed"):
            await database.run(lambda connection: None)

    run(work())
