"""A small SQLite file with one writer: what was committed is there after a kill at any instant.

A transaction is on disk when it ends (WAL, ``synchronous=FULL``). A lock beside the file keeps a
second process away. Only its user may read it: jobs may have secrets in their environment.

A file knows the version of its tables. An older one is brought up to date when it is opened, all
steps in one transaction, after a copy of it was put beside it; a newer one is refused.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from partita.errors import InvalidInputError
from partita.processes import lock_beside

PRIVATE = 0o600
"""Permissions of the file, of its copies, and of what SQLite puts beside it."""
Step: TypeAlias = str | Callable[[sqlite3.Connection], None]
"""A statement, or what makes several of what it finds."""
Schema: TypeAlias = Sequence[Sequence[Step]]
"""The steps that lead to each version of the tables, from nothing to version 1 on.

A step that was released never changes: what else is wanted is a further version. The steps to
version 1 must not mind tables that are there, since the first files knew no version.
"""
_VERSIONS = "CREATE TABLE IF NOT EXISTS versions (part TEXT PRIMARY KEY, version INTEGER NOT NULL)"


class SqliteFile:
    """An SQLite file of this process alone.

    Threads that use the connection hold ``guard``, unless one thread alone does.

    Args:
        path: The file; made where it is not there.
        schema: Versions of its tables.
        part: Whose tables they are; the version is kept under this name.
        holder: The word for the process in the message to a second one.

    Attributes:
        backup: Copy of the file as it was before its tables were brought up to date; None = they
            were.

    Raises:
        InvalidInputError: The file cannot be opened, is no database, or is of a newer version.
        UnsupportedError: Another process has it.
    """

    def __init__(self, path: Path, schema: Schema, *, part: str, holder: str) -> None:
        self.path = path
        self.guard = threading.RLock()
        self.backup: Path | None = None
        self._depth = 0
        self._lock = lock_beside(path, holder)
        try:
            path.touch(mode=PRIVATE)
            path.chmod(PRIVATE)
            self.connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            try:
                self.connection.execute("PRAGMA journal_mode=WAL")
                self.connection.execute("PRAGMA synchronous=FULL")
                self._bring_up_to_date(schema, part)
            except BaseException:
                self.connection.close()
                raise
        except (sqlite3.Error, OSError) as exc:
            self._lock.close()
            raise InvalidInputError(f"{path} cannot be used as a database: {exc}") from exc
        except BaseException:
            self._lock.close()
            raise

    def _bring_up_to_date(self, schema: Schema, part: str) -> None:
        version = self._version(part)
        if version == len(schema):
            return
        if version > len(schema):
            raise InvalidInputError(
                f"{self.path} has tables of version {version} ({part}), written by a newer "
                f"Partita; this one knows versions up to {len(schema)}"
            )
        if self.connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None:
            self.backup = self._copy(f"{part}-{version}")
        with self.change() as connection:
            for steps in schema[version:]:
                for step in steps:
                    if callable(step):
                        step(connection)
                    else:
                        connection.execute(step)
            connection.execute(_VERSIONS)
            connection.execute("INSERT OR REPLACE INTO versions VALUES (?, ?)", (part, len(schema)))

    def _version(self, part: str) -> int:
        """Return the version of a part's tables; 0 = there are none, or of a time without one."""
        known = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'versions'"
        if self.connection.execute(known).fetchone() is None:
            return 0
        found = self.connection.execute("SELECT version FROM versions WHERE part = ?", (part,))
        row = found.fetchone()
        return 0 if row is None else int(row[0])

    def _copy(self, mark: str) -> Path:
        """Put a whole copy of the file beside it, and return its name; none is replaced."""
        number = 1
        while (path := self.path.with_name(f"{self.path.name}.{mark}-{number}.backup")).exists():
            number += 1
        unfinished = path.with_name(f".{path.name}")
        unfinished.unlink(missing_ok=True)
        unfinished.touch(mode=PRIVATE)
        copy = sqlite3.connect(unfinished)
        try:
            self.connection.backup(copy)
        finally:
            copy.close()
        return unfinished.rename(path)

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
