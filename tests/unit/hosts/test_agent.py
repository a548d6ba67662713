"""The agent of a host: what it makes of what it is told, and what it sends back."""

import io
import json
import os
from pathlib import Path

import pytest

from partita.hosts.agent import _Ear, _job_directory, _Mirror, _Voice
from partita.hosts.messages import Chunk, Start, Stop, read_message, write_message


@pytest.fixture(autouse=True)
def same_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Come back to where the tests run, with their variables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARTITA_GIVEN", "")


def start(**settings: object) -> Start:
    files = {"plan.json": "{}", "job.json": json.dumps({"script": ["own.py", "3"]})}
    told = {"index": 0, "names": ("a",), "address": "", "port": 1, "files": files, **settings}
    return Start(**told)  # type: ignore[arg-type]


def test_a_script_that_is_not_there_stands_beside_the_job(tmp_path: Path) -> None:
    told = start(folder="/nowhere", script="print(1)", environment={"PARTITA_GIVEN": "yes"})
    with _job_directory(told) as root:
        assert Path.cwd() == root
        assert os.environ["PARTITA_GIVEN"] == "yes"
        script, argument = json.loads((root / "job.json").read_text())["script"]
        assert Path(script).read_text() == "print(1)"
        assert (Path(script).parent, argument) == (root, "3")
    assert not root.exists()


def test_a_script_that_is_there_is_taken_in_the_folder_of_the_driver(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("mine")
    with _job_directory(start(folder=str(tmp_path), script="sent")) as root:
        assert Path.cwd() == tmp_path
        assert json.loads((root / "job.json").read_text())["script"] == ["own.py", "3"]


def sent_by(root: Path, *, reports: bool) -> dict[str, bytes]:
    """Return what a mirror sends of a directory, by file."""
    stream = io.BytesIO()
    with _Mirror(root, _Voice(stream)) as mirror:
        (root / "ranks" / "rank1.news").write_text("[0, 1.0]\n")
        if reports:
            mirror.send_reports()
    found: dict[str, bytes] = {}
    for line in stream.getvalue().splitlines(keepends=True):
        message = read_message(line)
        if isinstance(message, Chunk):
            found[message.path] = found.get(message.path, b"") + message.content()
    return found


def test_all_that_ranks_leave_is_sent_once_and_reports_where_they_are_asked_for(
    tmp_path: Path,
) -> None:
    for name in ("logs/attempt1/rank1.log", "ranks/rank1.error", "ranks/rank1.pt", "host0.board"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 700_000)
    (tmp_path / "logs" / "rank2.log").touch()
    found = sent_by(tmp_path, reports=False)
    assert {name: len(data) for name, data in found.items()} == {
        "logs/attempt1/rank1.log": 700_000,
        "logs/rank2.log": 0,
        "ranks/rank1.error": 700_000,
        "ranks/rank1.news": 9,
    }
    assert len(sent_by(tmp_path, reports=True)["ranks/rank1.pt"]) == 700_000


def test_an_agent_hears_why_it_is_to_stop_and_ends_with_its_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("partita.hosts.agent._GRACE_S", 0.0)
    monkeypatch.setattr("os.kill", lambda pid, _: ended.append(pid))
    monkeypatch.setattr("os._exit", lambda _: None)
    said = b"a greeting\n" + write_message(start()) + write_message(Stop(why="SIGTERM"))
    ear = _Ear(io.BytesIO(said))
    ear._thread.join()
    assert isinstance(ear.started.get(), Start)
    assert ear.started.get() is None
    assert ear.reason() == "SIGTERM"
    assert ended == [os.getpid()]
