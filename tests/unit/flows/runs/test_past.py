"""Learning curves of past runs, side by side."""

import json
from pathlib import Path

import pytest

from partita.errors import InvalidInputError, WorkerError
from partita.flows.runs.follow import newest_run
from partita.flows.runs.past import results
from partita.runtime.metric_rows import METRICS
from partita.runtime.run_state import HERE, driving


def left(root: Path, name: str, losses: list[float], *, tokens: int = 0) -> None:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "results.json").write_text("{}")
    rows = [
        {"step": n, "loss": loss, "time_s": n / 2, **({"tokens": n * tokens} if tokens else {})}
        for n, loss in enumerate(losses, 1)
    ]
    rows[-1]["held_out_loss"] = losses[-1] + 1
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_are_compared_at_equal_steps(tmp_path: Path) -> None:
    left(tmp_path, "long", [4.0, 3.0, 2.0, 1.0])
    left(tmp_path, "short", [5.0, 4.0])
    curves = results("long", "short", runs=str(tmp_path), curves="steps", rows=4).curves
    assert curves is not None
    assert curves.rows == (
        (1.0, (4.0, 5.0)),
        (2.0, (3.0, 4.0)),
        (3.0, (2.0, None)),
        (4.0, (1.0, None)),
    )
    assert curves.held_out["long"] == [(4.0, 2.0)]
    seconds = results("long", "short", runs=str(tmp_path), curves="time", rows=2).curves
    assert seconds is not None
    assert seconds.rows == ((1.0, (3.0, 4.0)), (2.0, (1.0, None)))


def test_runs_without_tokens_are_not_compared_by_them(tmp_path: Path) -> None:
    left(tmp_path, "images", [1.0, 0.5])
    with pytest.raises(InvalidInputError, match="tokens; runs"):
        results("images", runs=str(tmp_path), curves="tokens")
    left(tmp_path, "texts", [1.0, 0.5], tokens=8)
    curves = results(runs=str(tmp_path), curves="tokens", rows=2).curves
    assert curves is not None
    assert curves.rows == ((8.0, (None, 1.0)), (16.0, (None, 0.5)))


def test_runs_without_results_say_what_they_are_at(tmp_path: Path) -> None:
    left(tmp_path, "done", [1.0])
    with pytest.raises(WorkerError), driving(made(tmp_path / "lost"), HERE):
        raise WorkerError("rank 1 died")
    with driving(made(tmp_path / "open"), HERE):
        found = results(runs=str(tmp_path))
        assert [run.name for run in found.runs] == ["done"]
        assert {run.name: (run.state, run.error) for run in found.unfinished} == {
            "lost": ("failed", "rank 1 died"),
            "open": ("running", ""),
        }
    assert [each.get("state") for each in found.to_json()] == [None, "failed", "running"]
    assert not results("done", runs=str(tmp_path)).unfinished  # only that one was asked for
    with pytest.raises(InvalidInputError):  # none of them is on other hosts
        newest_run(tmp_path)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_curves_are_written_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    left(tmp_path, "one", [2.0, 1.0])
    path = tmp_path / "curves.svg"
    results("one", runs=str(tmp_path), plot=str(path))
    assert path.read_text().startswith("<?xml")
