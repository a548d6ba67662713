"""One SQLite file with one writer: what was acknowledged is there after any end of the process.

All statements run in one thread, which takes what waits for it together in one transaction and
answers only when that is on disk (`partita.store`): a thousand requests at once share a few
commits.
"""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from partita.store import SqliteFile

_T = TypeVar("_T")
_Work = tuple[Callable[[sqlite3.Connection], Any], "Future[Any]"]
BATCH = 1024
"""Pieces of work in one transaction, at most."""


class Database:
    """A database of this process alone.

    Args:
        path: The file; made where it is not there.
        schema: Statements that make its tables where they are not there.

    Raises:
        InvalidInputError: The file cannot be opened, or is none.
        UnsupportedError: Another process has it.
    """

    def __init__(self, path: Path, schema: Sequence[str]) -> None:
        self.path = path
        self._file = SqliteFile(path, schema, holder="server")
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
