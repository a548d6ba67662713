"""Rows of metrics: put together from the news of ranks, written, read and drawn."""

import json
import math
from pathlib import Path

import pytest

from partita.errors import UnsupportedError
from partita.report.curves import curve_picture
from partita.runtime.metric_rows import METRICS, StepRow, read_metrics
from partita.runtime.metrics import RunFacts, Tracker, check_sinks, open_sinks
from partita.runtime.rank import StepNews
from partita.runtime.training.recipe import Recipe, Schedule

FACTS = RunFacts(
    ranks=2,
    samples=4,
    tokens=32,
    recipe=Recipe(optimizer="adam", learning_rate=0.1, schedule=Schedule(warmup=2)),
)


def test_a_row_has_the_shares_of_all_ranks(tmp_path: Path) -> None:
    rows: list[StepRow] = []
    with Tracker(FACTS, open_sinks((), tmp_path, {}), rows.append) as tracker:
        tracker(0, StepNews(0, 0.0, None, 100.0))
        assert not rows
        tracker(0, StepNews(1, 0.0, 0.5))  # a rank may be ahead of another
        tracker(1, StepNews(0, 2.0))
        tracker(1, StepNews(1, 1.5, 1.0, 300.0))
    first, second = rows
    assert (first.step, first.loss, first.learning_rate) == (1, 2.0, 0.05)
    assert (first.samples, first.tokens, first.memory_bytes) == (4, 32, 100.0)
    assert math.isnan(first.step_s)
    assert (second.held_out_loss, second.learning_rate, second.memory_bytes) == (1.5, 0.1, 300.0)
    assert math.isnan(second.step_s)  # an evaluation is no part of a step
    read = read_metrics(tmp_path)
    assert [row["loss"] for row in read] == [2.0, 1.5]
    assert "held_out_loss" not in read[0]
    assert read[1]["held_out_loss"] == 1.5
    assert read[1]["rank_memory_bytes"] == {"0": 100.0, "1": 300.0}
    assert second.numbers()["memory_bytes/rank1"] == 300.0
    assert all(isinstance(value, int | float) for value in second.numbers().values())


def test_a_step_done_again_counts_once_and_a_torn_line_not(tmp_path: Path) -> None:
    lines = [json.dumps({"step": s, "loss": v}) for s, v in ((1, 3.0), (2, 2.0), (2, 1.0))]
    (tmp_path / METRICS).write_text("\n".join(lines) + '\n{"step": 3, "lo')
    assert [row["loss"] for row in read_metrics(tmp_path)] == [3.0, 1.0]
    assert read_metrics(tmp_path / "nowhere") == []


def test_a_missing_package_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    check_sinks(["jsonl"])
    with pytest.raises(UnsupportedError, match=r"pip install 'partita\[wandb\]'"):
        check_sinks(["wandb"])


def test_curves_are_drawn_within_their_width() -> None:
    points = [(float(x), 5.0 / x) for x in range(1, 40)]
    text = curve_picture([("loss", points), ("none", [])], width=50, encoding="ascii")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 50
    assert lines[0].lstrip().startswith("5 | *")
    assert lines[-1].strip() == "* loss"
    assert curve_picture([("nothing", [(1.0, math.nan)])]) == ""
