"""Texts of others on a terminal: none of them moves the cursor, clears it or turns the writing."""

import io
import re
import sys
from typing import Any

import pytest
from rich.console import Console

from partita.cli import main as cli
from partita.cli.console import picture_signs
from partita.cli.fleet import logs, queue, status, top
from partita.errors import UnsupportedError
from partita.flows.fleet.live import FleetJobs, JobStatus
from partita.names import escaped, escaped_lines

EVIL = (
    "\x1b[2J\x1b[1;1H\x9b3J\a\b\r\x7f\N{RIGHT-TO-LEFT OVERRIDE}[red]x[/nothing]\N{LINE SEPARATOR}"
)
SHOWN = "\\x1b[2J\\x1b[1;1H\\x9b3J\\x07\\x08"


def job() -> dict[str, Any]:
    place = {"server": EVIL, "gpus": [0], "cpus": 1.0, "memory_bytes": 1e9}
    return {
        "id": 1,
        "name": EVIL,
        "state": "running",
        "note": EVIL,
        "deadline_s": None,
        "tenant": EVIL,
        "priority": 0.0,
        "gpus": [[1, 1, EVIL]],
        "step": 1,
        "steps": 2,
        "submitted_s": 1.0,
        "started_s": 1.0,
        "finished_s": 2.0,
        "attempts": 1,
        "preemptions": 0,
        "migrations": 0,
        "faults": 0,
        "places": [place],
        "command": ["python", EVIL],
        "folder": EVIL,
        "checkpoint": EVIL,
        "read_back": EVIL,
        "attempt_list": [],
        "events": [{"at_s": 1.0, "what": EVIL}],
        "owner": EVIL,
        "engine": EVIL,
        "lease_end_s": 3.0,
        "curve_speed": 1.0,
        "measured_speed": 0.5,
    }


def info() -> dict[str, Any]:
    server = {"name": EVIL, "gpu_type": EVIL, "gpus": 4, "cpus": 8.0, "memory_bytes": 9e9}
    used = {"away": EVIL, "gpus_in_use": 1, "cpus_granted": 1.0, "memory_bytes_granted": 1e9}
    return {
        "policy": EVIL,
        "engine": EVIL,
        "round_s": 300.0,
        "draining": False,
        "failure": EVIL,
        "servers": [{**server, **used}],
        "waiting": 0,
        "running": 1,
    }


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def check(text: str) -> None:
    """Assert that a text has our own colours alone, and no command of somebody else."""
    plain = text.replace("\n", "").replace("\t", "")
    plain = re.sub("\x1b\\[[0-9;]*m", "", plain)  # rich's own, of headers
    assert plain.isprintable(), repr(plain)


@pytest.fixture
def _fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a fleet whose every text is evil behind the commands."""
    jobs = FleetJobs(info=info(), jobs=(job(),))
    monkeypatch.setattr(queue, "list_jobs_request", lambda _: jobs)
    monkeypatch.setattr(top, "list_jobs_request", lambda _: jobs)
    monkeypatch.setattr(status, "job_status_request", lambda _: JobStatus(status=job()))
    monkeypatch.setattr(logs, "job_log_request", lambda *_: iter([f"one\n{EVIL}\ttwo\n"]))


@pytest.mark.parametrize(
    "words", [["queue"], ["top", "--once"], ["status", "1"], ["logs", "1"]], ids=" ".join
)
@pytest.mark.usefixtures("_fleet")
def test_no_command_of_a_job_reaches_the_terminal(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    module = {"queue": queue, "top": top, "status": status, "logs": logs}[words[0]]
    module.command.main(words[1:], standalone_mode=False)
    text = terminal.getvalue()
    check(text)
    folded = "".join(text.split())
    assert SHOWN[:8] in folded
    assert "[red]x" in folded or "red]x[/noth" in folded  # no markup, but folded in a cell


@pytest.mark.usefixtures("_fleet")
def test_logs_reach_a_file_without_colours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    logs.command.main(["1"], standalone_mode=False)
    without_colours = EVIL.replace("\x1b[2J\x1b[1;1H", "")
    assert pipe.getvalue() == f"one\n{without_colours}\ttwo\n"


def test_who_watches_a_fleet_goes_on_while_it_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [FleetJobs(info=info(), jobs=()), UnsupportedError(f"away {EVIL}")]

    def ask(_: object) -> FleetJobs:
        found = answers.pop(0) if answers else KeyboardInterrupt()
        if isinstance(found, BaseException):
            raise found
        return found

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(top, "list_jobs_request", ask)
    monkeypatch.setattr(top.time, "sleep", lambda _: None)
    top.command.main([], standalone_mode=False)
    assert f"away {SHOWN[:8]}" in terminal.getvalue()
    assert not answers


def test_results_show_no_command_in_python() -> None:
    for found in (FleetJobs(info=info(), jobs=(job(),)), JobStatus(status=job())):
        check(repr(found))


def test_an_error_that_a_server_words_is_one_plain_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> None:
        raise UnsupportedError(f"the server refuses: {EVIL}")

    monkeypatch.setattr(queue, "list_jobs_request", refuse)
    with pytest.raises(SystemExit) as ended:
        cli.main(["fleet", "queue"])
    assert ended.value.code == 4
    check(capsys.readouterr().err)


def test_texts_are_escaped() -> None:
    assert escaped("grün ☃ [x]") == "grün ☃ [x]"
    assert escaped(EVIL).startswith(SHOWN)
    assert escaped(EVIL).isprintable()
    assert escaped_lines("a\r\nb\tc\rd\x1b") == "a\nb\tc\nd\\x1b"


def test_a_picture_has_no_colours_where_the_user_wants_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert picture_signs(Console(force_terminal=True))[0]
    assert not picture_signs(Console(force_terminal=False))[0]
    monkeypatch.setenv("NO_COLOR", "1")
    assert not picture_signs(Console(force_terminal=True))[0]
