"""The token of a fleet, and how this user's clients find it."""

import os
from pathlib import Path

import pytest

from partita.errors import InvalidInputError
from partita.fleet.live.token import TOKEN_FILE, fleet_token, make_token, note_fleet
from partita.processes import job_environment


def test_a_token_is_made_once_and_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        first = make_token(tmp_path / "fleet.d")
    finally:
        os.umask(before)
    path = tmp_path / "fleet.d" / TOKEN_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(first) >= 32
    assert make_token(tmp_path / "fleet.d") == first
    assert make_token(tmp_path / "other.d") != first
    assert [each.name for each in path.parent.iterdir()] == [TOKEN_FILE]


def test_a_token_that_others_may_read_or_that_is_empty_is_refused(tmp_path: Path) -> None:
    make_token(tmp_path)
    (tmp_path / TOKEN_FILE).chmod(0o644)
    with pytest.raises(InvalidInputError, match="mode 0644"):
        make_token(tmp_path)
    (tmp_path / TOKEN_FILE).write_text("")
    (tmp_path / TOKEN_FILE).chmod(0o600)
    with pytest.raises(InvalidInputError, match="is empty"):
        make_token(tmp_path)


def test_clients_find_the_token_by_the_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("PARTITA_TOKEN", raising=False)
    token = make_token(tmp_path / "fleet.d")
    note_fleet(7788, tmp_path / "fleet.d" / TOKEN_FILE)
    assert fleet_token(None, "http://127.0.0.1:7788") == token
    assert fleet_token(None, "http://127.0.0.1:7789") == ""
    # What was made here is not shown to other machines.
    assert fleet_token(None, "http://example.org:7788") == ""
    monkeypatch.setenv("PARTITA_TOKEN", "told")
    assert fleet_token(None, "http://127.0.0.1:7788") == "told"


def test_jobs_do_not_inherit_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_TOKEN", "secret")
    monkeypatch.setenv("PARTITA_OTHER", "kept")
    found = job_environment()
    assert "PARTITA_TOKEN" not in found
    assert found["PARTITA_OTHER"] == "kept"
