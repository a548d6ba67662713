"""Runs on other hosts looked at from another terminal, by what stands in their directories."""

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import partita
from partita.errors import FormatError, InvalidInputError, UnsupportedError, WorkerError
from partita.flows.runs.follow import (
    Follower,
    end_run,
    follow,
    newest_run,
    require_success,
    state_of,
)
from partita.runtime.run_state import Progress, RunState, driving, read_state, write_state

ELSEWHERE = RunState(progress=Progress.RUNNING, pid=os.getpid(), born="1", machine="another")


def test_a_run_is_followed_to_its_end_row_by_row(tmp_path: Path) -> None:
    rows: list[Mapping[str, Any]] = []
    lines: list[str] = []
    seen = threading.Event()
    found: list[RunState] = []

    def on_row(row: Mapping[str, Any]) -> None:
        rows.append(row)
        seen.set()

    def look() -> None:
        found.append(follow(tmp_path, Follower(on_row=on_row, on_line=lines.append), limit_s=20))

    with driving(tmp_path, "ssh:hosts"):
        (tmp_path / "driver.log").write_text("waiting\nhalf a li")
        follower = threading.Thread(target=look)
        follower.start()
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 1}\n{"step"')
            file.flush()
            assert seen.wait(20)
            file.write(": 2}\n")
    follower.join(20)
    assert rows == [{"step": 1}, {"step": 2}]
    assert lines == ["waiting"]
    assert found[0].progress is Progress.ENDED
    assert found[0].on == "ssh:hosts"


@pytest.mark.parametrize(
    ("error", "progress", "code"),
    [
        (UnsupportedError("no agent"), Progress.FAILED, 4),
        (KeyboardInterrupt(), Progress.CANCELLED, 1),
        (SystemExit(143), Progress.CANCELLED, 143),
        (ZeroDivisionError("oh"), Progress.FAILED, 1),
    ],
)
def test_how_a_run_ended_stands_in_its_directory(
    tmp_path: Path, error: BaseException, progress: Progress, code: int
) -> None:
    with pytest.raises(type(error)), driving(tmp_path, "slurm"):
        raise error
    state = state_of(tmp_path)
    assert (state.progress, state.exit_code) == (progress, code)
    assert state.error
    expected = UnsupportedError if code == 4 else WorkerError
    with pytest.raises(expected, match=progress.value):
        require_success(tmp_path, state)


def test_a_driver_that_is_gone_without_a_word_is_told(tmp_path: Path) -> None:
    with driving(tmp_path, "slurm"):
        mine = state_of(tmp_path)
        assert not mine.has_vanished
    before = RunState(
        progress=Progress.RUNNING, pid=os.getpid(), born="another process", machine=mine.machine
    )
    write_state(tmp_path, before)
    with pytest.raises(WorkerError, match="ended without"):
        follow(tmp_path, Follower())


def test_a_run_of_another_machine_is_not_cancelled_from_here(tmp_path: Path) -> None:
    write_state(tmp_path, ELSEWHERE)
    with pytest.raises(UnsupportedError, match=r"process.*machine"):
        end_run(tmp_path)
    with pytest.raises(WorkerError, match="within 0 s"):
        follow(tmp_path, Follower(), limit_s=0)


def test_a_run_that_differs_from_one_process_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"check": {"equal": False}}))
    with pytest.raises(WorkerError, match=r"differs.*process"):
        require_success(tmp_path, RunState(progress=Progress.ENDED))


def test_runs_of_this_machine_and_damaged_states_are_refused(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    with pytest.raises(InvalidInputError, match=r"no state\.json"):
        state_of(tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(FormatError, match=r"state\.json"):
        state_of(tmp_path)


def test_the_newest_run_on_other_hosts_is_followed_where_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"no.*other hosts"):
        newest_run(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    write_state(tmp_path / "a", RunState(progress=Progress.ENDED))
    (tmp_path / "a" / "results.json").write_text("{}")
    assert partita.results(runs=tmp_path, follow=True).runs[0].name == "a"
    with pytest.raises(InvalidInputError, match="for one run"):
        partita.results("a", "b", runs=tmp_path, follow=True)
