"""SQLite files: versions of their tables, copies before they change, who may read them."""

import sqlite3
import stat
from pathlib import Path

import pytest

from partita.errors import InvalidInputError, UnsupportedError
from partita.store import Schema, SqliteFile

FIRST = ("CREATE TABLE IF NOT EXISTS t (x INTEGER)",)


def second(connection: sqlite3.Connection) -> None:
    for (x,) in connection.execute("SELECT x FROM t").fetchall():
        connection.execute("UPDATE t SET y = ? WHERE x = ?", (2 * x, x))


SECOND = ("ALTER TABLE t ADD COLUMN y INTEGER NOT NULL DEFAULT 0", second)


def opened(path: Path, schema: Schema) -> SqliteFile:
    return SqliteFile(path, schema, part="test", holder="server")


def rows(path: Path) -> list[tuple[int, ...]]:
    with sqlite3.connect(path) as connection:
        found = connection.execute("SELECT * FROM t ORDER BY x").fetchall()
    connection.close()
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Return a file of version 1 with two rows."""
    path = tmp_path / "state.sqlite"
    file = opened(path, [FIRST])
    with file.change() as connection:
        connection.executemany("INSERT INTO t VALUES (?)", [(1,), (2,)])
    file.close()
    return path


def test_an_older_file_is_brought_up_to_date_and_kept_as_it_was(old: Path) -> None:
    file = opened(old, [FIRST, SECOND])
    assert file.backup is not None
    file.close()
    assert rows(old) == [(1, 2), (2, 4)]
    assert file.backup.name == "state.sqlite.test-1-1.backup"
    assert rows(file.backup) == [(1,), (2,)]
    assert mode(file.backup) == 0o600
    again = opened(old, [FIRST, SECOND])
    assert again.backup is None
    again.close()
    assert len(list(old.parent.glob("*.backup"))) == 1


def test_a_file_of_before_there_were_versions_is_taken_up(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (x INTEGER)")
    connection.execute("INSERT INTO t VALUES (7)")
    connection.commit()
    connection.close()
    path.chmod(0o644)
    file = opened(path, [FIRST, SECOND])
    file.close()
    assert rows(path) == [(7, 14)]
    assert mode(path) == 0o600
    assert file.backup is not None
    assert rows(file.backup) == [(7,)]


def test_a_new_file_has_no_copy_and_is_private(tmp_path: Path) -> None:
    file = opened(tmp_path / "state.sqlite", [FIRST, SECOND])
    with file.change() as connection:
        connection.execute("INSERT INTO t VALUES (1, 2)")
    private = [path for path in tmp_path.iterdir() if "sqlite" in path.suffix]
    assert len(private) == 3  # the file, its log, and what readers share
    assert {mode(path) for path in private} == {0o600}
    assert file.backup is None
    file.close()


def test_a_step_that_fails_changes_nothing(old: Path) -> None:
    wrong = ("ALTER TABLE t ADD COLUMN y INTEGER", "INSERT INTO nowhere VALUES (1)")
    with pytest.raises(InvalidInputError, match=r"database:.*table"):
        opened(old, [FIRST, wrong])
    assert rows(old) == [(1,), (2,)]
    file = opened(old, [FIRST, SECOND])  # nobody holds it, and a second copy is made
    file.close()
    assert rows(old) == [(1, 2), (2, 4)]
    assert [path.name for path in sorted(old.parent.glob("*.backup"))] == [
        "state.sqlite.test-1-1.backup",
        "state.sqlite.test-1-2.backup",
    ]


def test_a_newer_file_is_refused_and_left_alone(old: Path) -> None:
    opened(old, [FIRST, SECOND]).close()
    with pytest.raises(InvalidInputError, match="written by a newer Partita"):
        opened(old, [FIRST])
    assert rows(old) == [(1, 2), (2, 4)]
    opened(old, [FIRST, SECOND]).close()


def test_two_parts_have_versions_of_their_own(old: Path) -> None:
    other = SqliteFile(old, [["CREATE TABLE u (x)"], []], part="other", holder="server")
    with pytest.raises(UnsupportedError):
        opened(old, [FIRST])
    other.close()
    file = opened(old, [FIRST])
    assert file.backup is None
    file.close()
