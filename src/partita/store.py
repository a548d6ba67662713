"""A small SQLite file with one writer: what was committed is there after a kill at any instant.

A transaction is on disk when it ends (WAL, ``synchronous=FULL``). A lock beside the file keeps a
second process away.
"""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from partita.errors import InvalidInputError
from partita.processes import lock_beside


class SqliteFile:
    """An SQLite file of this process alone.

    Threads that use the connection hold ``guard``, unless one thread alone does.

    Args:
        path: The file; made where it is not there.
        schema: Statements that make its tables where they are not there.
        holder: The word for the process in the message to a second one.
        mode: Permissions of a new file; ``None`` = the usual ones.

    Raises:
        InvalidInputError: The file cannot be opened, or is no database.
        UnsupportedError: Another process has it.
    """

    def __init__(
        self, path: Path, schema: Sequence[str], *, holder: str, mode: int | None = None
    ) -> None:
        self.path = path
        self.guard = threading.RLock()
        self._depth = 0
        self._lock = lock_beside(path, holder)
        try:
            if mode is not None:
                path.touch(mode=mode)
            self.connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self.connection.execute("PRAGMA journal_mode=WAL")
            self.connection.execute("PRAGMA synchronous=FULL")
            for statement in schema:
                self.connection.execute(statement)
        except (sqlite3.Error, OSError) as exc:
            self._lock.close()
            raise InvalidInputError(f"{path} cannot be used as a database: {exc}") from exc

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """Make all changes inside one transaction, on disk when this ends; may be nested."""
        with self.guard:
            if self._depth == 0:
                self.connection.execute("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield self.connection
            except BaseException:
                self._depth -= 1
                if self._depth == 0:
                    self.connection.execute("ROLLBACK")
                raise
            self._depth -= 1
            if self._depth == 0:
                self.connection.execute("COMMIT")

    def close(self) -> None:
        """Give the file back."""
        self.connection.close()
        self._lock.close()
