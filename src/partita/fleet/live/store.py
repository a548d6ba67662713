"""The state of the live scheduler in one SQLite file: there after a kill at any instant.

A change is one transaction, on disk when it ends (`partita.store`). A start is written down before
it happens, so that after a kill either nothing was started or what was started is looked for. The
lock of the file keeps a second scheduler away; a process that is being started holds it until it
runs its own program, so that a new scheduler never looks too early.
"""

import json
import logging
import sqlite3
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from partita.errors import InfeasibleError
from partita.fleet.engines.protocol import Attempt, Place
from partita.fleet.gigabytes import in_bytes
from partita.names import escaped
from partita.store import Schema, SqliteFile

logger = logging.getLogger(__name__)

_FIRST_TABLES = (
    "CREATE TABLE IF NOT EXISTS fleet_facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS fleet_jobs (
        id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE NOT NULL, spec TEXT NOT NULL,
        submitted_s REAL NOT NULL, state TEXT NOT NULL, note TEXT NOT NULL DEFAULT '',
        step INTEGER NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0,
        started_s REAL, finished_s REAL, attained_s REAL NOT NULL DEFAULT 0,
        attained_gpu_s REAL NOT NULL DEFAULT 0, preemptions INTEGER NOT NULL DEFAULT 0,
        migrations INTEGER NOT NULL DEFAULT 0, faults INTEGER NOT NULL DEFAULT 0,
        fault_step INTEGER NOT NULL DEFAULT -1, retry_s REAL NOT NULL DEFAULT 0,
        cancelled INTEGER NOT NULL DEFAULT 0)""",
    """CREATE TABLE IF NOT EXISTS fleet_attempts (
        job INTEGER NOT NULL, number INTEGER NOT NULL, places TEXT NOT NULL, speed REAL NOT NULL,
        handle TEXT, started_s REAL NOT NULL, ended_s REAL, stop_s REAL, killed INTEGER NOT NULL
        DEFAULT 0, how TEXT NOT NULL DEFAULT '', PRIMARY KEY (job, number)) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS fleet_events (
        id INTEGER PRIMARY KEY, job INTEGER NOT NULL, at_s REAL NOT NULL, what TEXT NOT NULL)""",
)


def _escape_names(connection: sqlite3.Connection) -> None:
    """Rewrite names that were taken before they were checked, so that their jobs can be read."""
    for job, text in connection.execute("SELECT id, spec FROM fleet_jobs").fetchall():
        spec = json.loads(text)
        plain = {**spec, "name": escaped(spec["name"]), "tenant": escaped(spec["tenant"])}
        plain["gpus"] = [[least, most, escaped(kind)] for least, most, kind in spec["gpus"]]
        if plain != spec:
            connection.execute(
                "UPDATE fleet_jobs SET spec = ? WHERE id = ?", (json.dumps(plain), job)
            )


def _count_bytes(connection: sqlite3.Connection) -> None:
    """Rewrite what attempts hold, and handles that say it, from GB to bytes."""
    rows = connection.execute("SELECT job, number, places, handle FROM fleet_attempts").fetchall()
    for job, number, *texts in rows:
        places, handle = (
            None if text is None else json.dumps(in_bytes(json.loads(text))) for text in texts
        )
        connection.execute(
            "UPDATE fleet_attempts SET places = ?, handle = ? WHERE job = ? AND number = ?",
            (places, handle, job, number),
        )


SCHEMA: Schema = (
    _FIRST_TABLES,
    ("ALTER TABLE fleet_jobs ADD COLUMN owner TEXT NOT NULL DEFAULT ''", _escape_names),
    (_count_bytes,),
)
"""Versions of the tables: as they were released first; who submitted a job, and names checked;
memory in bytes."""


class JobState(StrEnum):
    """Where a job is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


OPEN = (JobState.WAITING, JobState.RUNNING, JobState.STOPPING)
"""States that a job may still leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job as it stands.

    Attributes:
        id: Its number.
        spec: What was submitted, as the text of a JSON object.
        submitted_s: When; seconds since 1970, as all times here.
        state: Where it is in its life.
        note: The last thing worth knowing, in a line.
        step: Steps that it has done, as far as it reported.
        attempts: How often it was started.
        started_s: When it first ran.
        finished_s: When it ended for good.
        attained_s: Seconds that ended attempts held their GPUs, from boundary to boundary.
        attained_gpu_s: GPU seconds that they ran.
        preemptions: How often it was stopped for others.
        migrations: How often it went on elsewhere.
        faults: Faults in a row without progress.
        fault_step: Its step at the last fault.
        retry_s: It is not started before then.
        cancelled: Whether its user has cancelled it.
        owner: Name of the user whose token submitted it; empty = the server's own token.
    """

    id: int
    spec: str
    submitted_s: float
    state: JobState
    note: str
    step: int
    attempts: int
    started_s: float | None
    finished_s: float | None
    attained_s: float
    attained_gpu_s: float
    preemptions: int
    migrations: int
    faults: int
    fault_step: int
    retry_s: float
    cancelled: bool
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One start of a job.

    Attributes:
        id: Job and number.
        places: What it holds.
        speed: The speed it was promised.
        handle: What finds it; None = it was about to be started.
        started_s: When.
        ended_s: When it ended; None = it runs.
        stop_s: When it was asked to stop; None = it was not.
        killed: Whether it had to be killed for that.
        how: How it ended, in a line.
    """

    id: Attempt
    places: tuple[Place, ...]
    speed: float
    handle: Mapping[str, Any] | None
    started_s: float
    ended_s: float | None
    stop_s: float | None
    killed: bool
    how: str

    @property
    def gpus(self) -> int:
        """GPUs that it holds."""
        return sum(len(place.gpus) for place in self.places)


class FleetStore:
    """The state of one scheduler.

    Args:
        path: The file; made where it is not there.

    Raises:
        InvalidInputError: The file cannot be opened, or is no database.
        UnsupportedError: Another scheduler has it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = SqliteFile(path, SCHEMA, part="fleet", holder="scheduler")
        self._connection = self._file.connection
        self._connection.row_factory = sqlite3.Row
        self._guard = self._file.guard
        self.fleet = self.fact("fleet", uuid.uuid4().hex[:12])

    def close(self) -> None:
        """Give the file back."""
        with self._guard:
            self._file.close()

    def change(self) -> AbstractContextManager[sqlite3.Connection]:
        """Make all changes inside one transaction, on disk when this ends; may be nested."""
        return self._file.change()

    def fact(self, name: str, value: str) -> str:
        """Return a fact that was kept, or keep this value."""
        with self._guard:
            row = self._connection.execute("SELECT value FROM fleet_facts WHERE name = ?", (name,))
            found = row.fetchone()
            if found is None:
                self.set_fact(name, value)
            return value if found is None else str(found[0])

    def set_fact(self, name: str, value: str) -> None:
        """Keep a fact, in the place of what was kept."""
        with self.change() as connection:
            connection.execute("INSERT OR REPLACE INTO fleet_facts VALUES (?, ?)", (name, value))

    def add_job(
        self, spec: Mapping[str, Any], key: str, now_s: float, *, owner: str = ""
    ) -> tuple[int, bool]:
        """Keep a new job; return its number, and whether it is new.

        The same key again, as after an answer that was lost, is the same job.

        Raises:
            InfeasibleError: The key was that of another job.
        """
        text = json.dumps(spec)
        with self.change() as connection:
            found = connection.execute(
                "SELECT id, spec, owner FROM fleet_jobs WHERE key = ?", (key,)
            ).fetchone()
            if found is not None:
                if (json.loads(found[1]), found[2]) != (json.loads(text), owner):
                    raise InfeasibleError(
                        f"key {key!r} was sent with another job; a new job needs a new key"
                    )
                return int(found[0]), False
            done = connection.execute(
                "INSERT INTO fleet_jobs (key, spec, submitted_s, state, owner) "
                "VALUES (?, ?, ?, ?, ?)",
                (key, text, now_s, JobState.WAITING, owner),
            )
            number = int(done.lastrowid or 0)
            self.add_event(number, now_s, "submitted")
            return number, True

    def update_job(self, job: int, **values: float | str | None) -> None:
        """Change fields of a job."""
        self._update("fleet_jobs", values, "id = ?", (job,))

    def add_event(self, job: int, now_s: float, what: str) -> None:
        """Keep a line of a job's history, and log it."""
        with self.change() as connection:
            connection.execute(
                "INSERT INTO fleet_events (job, at_s, what) VALUES (?, ?, ?)", (job, now_s, what)
            )
        logger.info("job %s: %s", job, what, extra={"fields": {"job": job, "event": what}})

    def add_attempt(
        self, attempt: Attempt, places: Sequence[Place], speed: float, now_s: float
    ) -> None:
        """Keep that a job is about to be started."""
        values = json.dumps([place.to_json() for place in places])
        with self.change() as connection:
            connection.execute(
                "INSERT INTO fleet_attempts (job, number, places, speed, started_s) "
                "VALUES (?, ?, ?, ?, ?)",
                (*attempt, values, speed, now_s),
            )

    def update_attempt(self, attempt: Attempt, **values: float | str | None) -> None:
        """Change fields of an attempt."""
        self._update("fleet_attempts", values, "job = ? AND number = ?", attempt)

    def _update(
        self, table: str, values: Mapping[str, Any], where: str, keys: Sequence[object]
    ) -> None:
        fields = ", ".join(f"{name} = ?" for name in values)
        with self.change() as connection:
            # Names of tables and fields are ours; values are bound.
            connection.execute(
                f"UPDATE {table} SET {fields} WHERE {where}",
                (*values.values(), *keys),
            )

    def job(self, number: int) -> JobRow | None:
        """Return a job; None = there is none."""
        rows = self._jobs("WHERE id = ?", (number,))
        return rows[0] if rows else None

    def jobs(self) -> list[JobRow]:
        """Return all jobs, in the order in which they came."""
        return self._jobs("ORDER BY id", ())

    def job_counts(self) -> dict[str, int]:
        """Return how many jobs there are in each state, those without any included."""
        with self._guard:
            rows = self._connection.execute(
                "SELECT state, COUNT(*) FROM fleet_jobs GROUP BY state"
            ).fetchall()
        return {str(state): 0 for state in JobState} | {str(row[0]): int(row[1]) for row in rows}

    def open_jobs(self) -> list[JobRow]:
        """Return the jobs that are not done, in the order in which they came."""
        return self._jobs(f"WHERE state IN ({', '.join('?' * len(OPEN))}) ORDER BY id", OPEN)

    def _jobs(self, rest: str, values: Sequence[object]) -> list[JobRow]:
        with self._guard:
            rows = self._connection.execute(
                f"SELECT * FROM fleet_jobs {rest}",
                tuple(values),
            ).fetchall()
        return [_job_row(row) for row in rows]

    def attempts(self, job: int | None = None, *, open_only: bool = False) -> list[AttemptRow]:
        """Return the attempts of a job or of all, in their order."""
        where = ["ended_s IS NULL"] if open_only else []
        where += ["job = ?"] if job is not None else []
        rest = f"WHERE {' AND '.join(where)}" if where else ""
        with self._guard:
            rows = self._connection.execute(
                f"SELECT * FROM fleet_attempts {rest} ORDER BY job, number",
                (job,) if job is not None else (),
            ).fetchall()
        return [_attempt_row(row) for row in rows]

    def events(self, job: int) -> list[tuple[float, str]]:
        """Return the history of a job."""
        with self._guard:
            rows = self._connection.execute(
                "SELECT at_s, what FROM fleet_events WHERE job = ? ORDER BY id", (job,)
            ).fetchall()
        return [(float(row[0]), str(row[1])) for row in rows]


def _job_row(row: sqlite3.Row) -> JobRow:
    values = {name: row[name] for name in row.keys() if name != "key"}  # noqa: SIM118 (no mapping)
    return JobRow(
        **{
            **values,
            "state": JobState(row["state"]),
            "cancelled": bool(row["cancelled"]),
        }
    )


def _attempt_row(row: sqlite3.Row) -> AttemptRow:
    return AttemptRow(
        id=Attempt(int(row["job"]), int(row["number"])),
        places=tuple(Place.read(values) for values in json.loads(row["places"])),
        speed=float(row["speed"]),
        handle=None if row["handle"] is None else json.loads(row["handle"]),
        started_s=float(row["started_s"]),
        ended_s=row["ended_s"],
        stop_s=row["stop_s"],
        killed=bool(row["killed"]),
        how=str(row["how"]),
    )
