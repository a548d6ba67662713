"""Runs looked at while they go on, from their directories."""

import json
import os
from pathlib import Path

import pytest

import partita
from partita.documents import save
from partita.errors import InvalidInputError
from partita.flows.runs.live import SILENT_S, folder_of, look_at_run, runs_in
from partita.report.study_figures import rank_memory_figure
from partita.runtime.metric_rows import METRICS
from partita.runtime.run_state import EVENTS, RunEvents, read_events


def run_in(root: Path, name: str = "one") -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    events = RunEvents(folder, 20)
    events("rank 1 is a straggler after step 2")
    rows = [
        {
            "step": step,
            "time_s": 9.0 + step,
            "loss": 5.0 - step,
            "step_s": 0.1 * step,
            "memory_bytes": 300.0,
        }
        | {"rank_memory_bytes": {"0": 100.0, "1": 300.0}}
        for step in (1, 2, 3)
    ]
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_run_says_its_step_speed_memory_and_events(tmp_path: Path) -> None:
    folder = run_in(tmp_path)
    solution = partita.plan("gpt-small", cluster="2xa100", planner="uniform").solution
    save(solution, folder / "plan.json")
    found = look_at_run(folder, whole=True)
    assert (found.state, found.last["step"], found.steps) == ("running", 3, 20)
    assert found.step_s == pytest.approx(0.2)
    assert found.predicted_s == pytest.approx(solution.value)
    assert found.events[0].endswith("rank 1 is a straggler after step 2")
    titles = [figure["title"] for figure in found.figures()]
    assert titles == ["Loss", "Seconds of each step", "Memory by rank over time", "Memory by rank"]
    assert found.figures()[3]["table"]["rows"][1][:2] == ["1", 300.0]
    assert found.to_json()["change"] == pytest.approx(0.2 / solution.value - 1)
    assert json.dumps(found.to_json())


def test_memory_of_ranks_is_a_line_each_or_of_many_the_ends_and_the_middle() -> None:
    rows = [
        {"step": at, "time_s": 10.0 * at, "rank_memory_bytes": {"0": 5e8 + 1e6 * at, "1": 7e8}}
        for at in (1, 2)
    ]
    found = rank_memory_figure([{"step": 0}, *rows], [6e8, 8e8])
    assert found is not None
    lines = {curve["name"]: (curve["x"], curve["y"]) for curve in found["curves"]}
    assert lines["rank 0"] == ([10.0, 20.0], [5.01e8, 5.02e8])
    assert lines["predicted, the fullest device"][1] == [8e8, 8e8]
    many = {str(rank): 1e8 * ((7 * rank) % 16) for rank in range(16)}
    found = rank_memory_figure([{"step": 1, "time_s": 1.0, "rank_memory_bytes": many}])
    assert found is not None
    names = [curve["name"] for curve in found["curves"]]
    assert names == ["rank 9, the fullest", "rank 1, in the middle", "rank 0, the emptiest"]
    assert rank_memory_figure([{"step": 1, "time_s": 1.0}]) is None


def test_a_run_whose_process_is_gone_is_lost_and_one_with_results_has_ended(
    tmp_path: Path,
) -> None:
    folder = run_in(tmp_path)
    first, *rest = (folder / EVENTS).read_text().splitlines()
    gone = json.loads(first)
    gone["driver"]["born"] = "1"  # the process of that number began at another time
    (folder / EVENTS).write_text("\n".join([json.dumps(gone), *rest, '{"at_s": 3, "te']))
    assert look_at_run(folder).state == "lost"
    assert len(read_events(folder)[0]) == 2
    (folder / "results.json").write_text(json.dumps({"steps": 3, "predicted_step_s": 0.1}))
    found = look_at_run(folder)
    assert (found.state, found.predicted_s) == ("ended", 0.1)
    (folder / "results.json").write_text("{")
    assert look_at_run(folder).state == "unreadable"


def test_a_run_of_before_that_says_nothing_is_silent(tmp_path: Path) -> None:
    folder = run_in(tmp_path)
    (folder / EVENTS).unlink()
    old = folder.stat().st_mtime - 2 * SILENT_S
    os.utime(folder / METRICS, (old, old))
    assert look_at_run(folder).state == "silent"


def test_runs_are_found_by_name_and_not_by_path(tmp_path: Path) -> None:
    run_in(tmp_path / "runs", "one")
    run_in(tmp_path, "two")
    (tmp_path / "runs" / "no run").mkdir()
    assert [folder.name for folder in runs_in(tmp_path / "runs")] == ["one"]
    assert folder_of(tmp_path / "runs", "one").name == "one"
    for name in ("../two", "two", "", ".", "no run"):
        with pytest.raises(InvalidInputError):
            folder_of(tmp_path / "runs", name)
    assert runs_in(tmp_path / "nowhere") == []
