"""Jobs of the energy server on disk: their events, in order.

``events`` is the truth: a job is rebuilt by telling its scheduler again. ``documents`` holds what
is slow to compute or shared by many jobs, under a digest of what it follows from; ``answers`` says
which of them a job was given, so that it is given the same again, and which nobody needs any more.

One SQLite file has one writer, and what was acknowledged is there after any end of the process. All
statements run in one thread, which takes what waits for it together in one transaction and
answers only when that is on disk (`partita.store`): a thousand requests at once share a few
commits.
"""

import asyncio
import json
import queue
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from partita.store import Schema, SqliteFile

_T = TypeVar("_T")
_Work = tuple[Callable[[sqlite3.Connection], Any], "Future[Any]"]
BATCH = 1024
"""Pieces of work in one transaction, at most."""


class Database:
    """A database of this process alone.

    Args:
        path: The file; made where it is not there.
        schema: Versions of its tables.

    Raises:
        InvalidInputError: The file cannot be opened, or is none.
        UnsupportedError: Another process has it.
    """

    def __init__(self, path: Path, schema: Schema) -> None:
        self.path = path
        self._file = SqliteFile(path, schema, part="energy", holder="server")
        self._connection = self._file.connection
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._open_or_not = threading.Lock()  # nothing enters the queue after its end
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="database", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Return what some work on the connection returns, once it is on disk.

        Raises:
            sqlite3.Error: The work failed, or the database is closed.
        """
        future: Future[_T] = Future()
        with self._open_or_not:
            if self._closed:
                raise sqlite3.ProgrammingError(f"{self.path} is closed")
            self._queue.put((work, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Finish what waits and give the file back."""
        with self._open_or_not:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        self._file.close()

    def _work(self) -> None:
        while (batch := self._take()) is not None:
            outcomes: list[tuple[Future[Any], Any, Exception | None]] = []
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                for work, future in batch:
                    outcomes.append((future, *self._one(work)))
                self._connection.execute("COMMIT")
            except sqlite3.Error as exc:
                outcomes = [(future, None, exc) for _, future in batch]
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            for future, value, failure in outcomes:
                if not future.set_running_or_notify_cancel():
                    continue
                if failure is None:
                    future.set_result(value)
                else:
                    future.set_exception(failure)

    def _one(self, work: Callable[[sqlite3.Connection], Any]) -> tuple[Any, Exception | None]:
        """Return the value of one piece of work, or its failure, which undoes it alone."""
        self._connection.execute("SAVEPOINT piece")
        try:
            value = work(self._connection)
        except Exception as exc:  # noqa: BLE001 (handed to whoever asked for the work)
            self._connection.execute("ROLLBACK TO piece")
            return None, exc
        self._connection.execute("RELEASE piece")
        return value, None

    def _take(self) -> list[_Work] | None:
        """Return all that waits; ``None`` at the end, after everything else."""
        first = self._queue.get()
        if first is None:
            return None
        batch = [first]
        while len(batch) < BATCH:
            try:
                more = self._queue.get_nowait()
            except queue.Empty:
                break
            if more is None:
                self._queue.put(None)
                break
            batch.append(more)
        return batch


_FIRST_TABLES = (
    """CREATE TABLE IF NOT EXISTS energy_jobs (
        id TEXT PRIMARY KEY, body TEXT NOT NULL, configuration TEXT NOT NULL,
        created REAL NOT NULL, closed REAL, reason TEXT NOT NULL DEFAULT '')""",
    """CREATE TABLE IF NOT EXISTS energy_events (
        job TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,
        PRIMARY KEY (job, seq)) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS energy_documents (key TEXT PRIMARY KEY, body TEXT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS energy_answers (
        job TEXT NOT NULL, key TEXT NOT NULL, failure TEXT NOT NULL, ours INTEGER NOT NULL,
        PRIMARY KEY (job, key)) WITHOUT ROWID""",
)
SCHEMA: Schema = (_FIRST_TABLES,)
"""Versions of the tables: as they were released first."""


class StoredEvent(NamedTuple):
    """One line of a job's history."""

    seq: int
    kind: str
    body: str


class StoredJob(NamedTuple):
    """A job that has not ended."""

    id: str
    body: str
    configuration: str
    events: tuple[StoredEvent, ...]


class Answer(NamedTuple):
    """What came of something that a job asked for.

    Attributes:
        body: The document.
        failure: Why there is none.
        ours: Whether that was for want of time or memory, and not by what was asked for.
    """

    body: str = ""
    failure: str = ""
    ours: bool = False


class EnergyStore:
    """The jobs in a database.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.database = Database(path, SCHEMA)

    def close(self) -> None:
        """Give the file back."""
        self.database.close()

    async def add_job(self, job: str, body: str, configuration: str, now: float) -> None:
        """Keep a new job."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT INTO energy_jobs (id, body, configuration, created) VALUES (?, ?, ?, ?)",
                (job, body, configuration, now),
            )

        await self.database.run(work)

    async def append(self, job: str, event: StoredEvent) -> None:
        """Keep an event of a job."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO energy_events VALUES (?, ?, ?, ?)", (job, *event))

        await self.database.run(work)

    async def replace(
        self, job: str, gone: list[int], event: StoredEvent, answers: list[str]
    ) -> None:
        """Put one event in the place of several that it sums up.

        Args:
            job: The job.
            gone: The events that go.
            event: What takes their place.
            answers: Keys of the answers that the job will ask for again; others are let go.
        """

        def work(connection: sqlite3.Connection) -> None:
            connection.execute(
                "DELETE FROM energy_answers WHERE job = ? "
                "AND key NOT IN (SELECT value FROM json_each(?))",
                (job, json.dumps(answers)),
            )
            connection.executemany(
                "DELETE FROM energy_events WHERE job = ? AND seq = ?", [(job, seq) for seq in gone]
            )
            connection.execute(
                "INSERT OR REPLACE INTO energy_events VALUES (?, ?, ?, ?)", (job, *event)
            )

        await self.database.run(work)

    async def end_job(self, job: str, reason: str, now: float) -> None:
        """Keep that a job has ended; what it was stays until it is pruned."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE energy_jobs SET closed = ?, reason = ? WHERE id = ?", (now, reason, job)
            )

        await self.database.run(work)

    async def ended(self, job: str) -> str | None:
        """Return why a job has ended; ``None`` where there never was one."""

        def work(connection: sqlite3.Connection) -> str | None:
            row = connection.execute(
                "SELECT reason FROM energy_jobs WHERE id = ?", (job,)
            ).fetchone()
            return None if row is None else str(row[0])

        return await self.database.run(work)

    async def keep_document(self, key: str, body: str) -> None:
        """Keep a text under its digest."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR IGNORE INTO energy_documents VALUES (?, ?)", (key, body))

        await self.database.run(work)

    async def document(self, key: str) -> str | None:
        """Return the text under a digest."""

        def work(connection: sqlite3.Connection) -> str | None:
            row = connection.execute(
                "SELECT body FROM energy_documents WHERE key = ?", (key,)
            ).fetchone()
            return None if row is None else str(row[0])

        return await self.database.run(work)

    async def answer(self, job: str, key: str) -> Answer | None:
        """Return what a job was given under a key, or could be given; ``None`` = nothing yet."""

        def work(connection: sqlite3.Connection) -> Answer | None:
            given = connection.execute(
                "SELECT failure, ours FROM energy_answers WHERE job = ? AND key = ?", (job, key)
            ).fetchone()
            if given is not None and given[0]:
                return Answer(failure=str(given[0]), ours=bool(given[1]))
            row = connection.execute(
                "SELECT body FROM energy_documents WHERE key = ?", (key,)
            ).fetchone()
            if row is None:
                return None
            if given is None:
                connection.execute("INSERT INTO energy_answers VALUES (?, ?, '', 0)", (job, key))
            return Answer(str(row[0]))

        return await self.database.run(work)

    async def keep_answer(self, job: str, key: str, answer: Answer) -> None:
        """Keep what a job is given under a key."""

        def work(connection: sqlite3.Connection) -> None:
            if not answer.failure:
                connection.execute(
                    "INSERT OR IGNORE INTO energy_documents VALUES (?, ?)", (key, answer.body)
                )
            connection.execute(
                "INSERT OR REPLACE INTO energy_answers VALUES (?, ?, ?, ?)",
                (job, key, answer.failure, answer.ours),
            )

        await self.database.run(work)

    async def prune(self, closed_before: float, configuration: str) -> None:
        """Drop jobs that were closed before a time, and documents that no job needs.

        Args:
            closed_before: The time.
            configuration: A document that stays in any case: that of new jobs.
        """

        def work(connection: sqlite3.Connection) -> None:
            gone = "(SELECT id FROM energy_jobs WHERE closed < ?)"
            for table in ("energy_events", "energy_answers"):
                connection.execute(f"DELETE FROM {table} WHERE job IN {gone}", (closed_before,))
            connection.execute("DELETE FROM energy_jobs WHERE closed < ?", (closed_before,))
            connection.execute(
                """DELETE FROM energy_documents WHERE key NOT IN (
                    SELECT key FROM energy_answers
                    UNION SELECT configuration FROM energy_jobs UNION SELECT ?)""",
                (configuration,),
            )

        await self.database.run(work)

    async def open_jobs(self) -> list[StoredJob]:
        """Return the jobs that have not ended, in the order in which they came."""

        def work(connection: sqlite3.Connection) -> list[StoredJob]:
            events: dict[str, list[StoredEvent]] = defaultdict(list)
            for job, *event in connection.execute(
                """SELECT job, seq, kind, energy_events.body FROM energy_events
                JOIN energy_jobs ON id = job WHERE closed IS NULL ORDER BY job, seq"""
            ):
                events[job].append(StoredEvent(*event))
            jobs = connection.execute(
                "SELECT id, body, configuration FROM energy_jobs WHERE closed IS NULL "
                "ORDER BY created, id"
            )
            return [StoredJob(job, body, how, tuple(events[job])) for job, body, how in jobs]

        return await self.database.run(work)
