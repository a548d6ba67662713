"""Runs as they are now, from what they write to their directories while they go on."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partita.core.columns import number_or_none
from partita.core.solution import Solution
from partita.cost.predict import simulate
from partita.documents import load
from partita.errors import InvalidInputError, PartitaError
from partita.processes import last_lines
from partita.report.figures import Figure, TableColumn, table_figure
from partita.report.study_figures import losses_figure, rank_memory_figure, steps_figure
from partita.runtime.directory import RESULTS, has_results
from partita.runtime.metric_rows import METRICS, read_metrics
from partita.runtime.run_state import EVENTS, Progress, RunState, read_events, read_state

SILENT_S = 60.0
"""Seconds without a word after which a run that has not ended counts as silent."""
SETTLED = 4
"""The first of so many parts of the steps is left out of the speed."""
MOST_EVENTS = 50
_LAST_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run as it is now.

    Attributes:
        name: Of its directory.
        state: ``running``, ``silent``, ``ended``, ``failed``, ``cancelled``, or ``lost``: its
            driver has ended without a word.
        note: Why it is so; empty = nothing to say.
        rows: Its metrics, by step.
        steps: Steps that it is to make; 0 = not known.
        step_s: Median seconds of its later steps; NaN = not known yet.
        predicted_s: Predicted seconds of a step; NaN = not known.
        rank_bytes: Most memory of each rank so far, by rank.
        predicted_bytes: Predicted peaks by device.
        heard_s: When it last wrote something, in seconds since 1970.
        lines: Last lines of its log.
        events: Stragglers and clocks that it spoke of, as they happened.
    """

    name: str
    state: str
    note: str = ""
    rows: Sequence[Mapping[str, Any]] = ()
    steps: int = 0
    step_s: float = math.nan
    predicted_s: float = math.nan
    rank_bytes: Mapping[str, float] = field(default_factory=dict)
    predicted_bytes: Mapping[str, float] = field(default_factory=dict)
    heard_s: float = 0.0
    lines: Sequence[str] = ()
    events: Sequence[str] = ()

    @property
    def last(self) -> Mapping[str, Any]:
        """The row of the latest step; empty = there is none yet."""
        return self.rows[-1] if self.rows else {}

    @property
    def change(self) -> float:
        """How much longer a step takes than predicted, relative; NaN = not known."""
        return self.step_s / self.predicted_s - 1 if self.predicted_s else math.nan

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, without its figures."""
        return {
            "name": self.name,
            "state": self.state,
            "note": self.note,
            "step": self.last.get("step", 0),
            "steps": self.steps,
            "loss": self.last.get("loss"),
            "memory_bytes": self.last.get("memory_bytes"),
            "step_s": number_or_none(self.step_s),
            "predicted_s": number_or_none(self.predicted_s),
            "change": number_or_none(self.change),
            "heard_s": self.heard_s,
            "lines": list(self.lines),
            "events": list(self.events),
        }

    def figures(self) -> list[Figure]:
        """Return losses, seconds of each step beside the prediction, and memory by rank."""
        predicted = list(self.predicted_bytes.values())
        found = [
            losses_figure(self.rows),
            steps_figure(self.rows, self.predicted_s),
            rank_memory_figure(self.rows, predicted),
        ]
        if self.rank_bytes:
            columns = [
                *(TableColumn("rank"), TableColumn("most memory so far", "bytes")),
                TableColumn("predicted for its device", "bytes"),
            ]
            rows = [
                [rank, used, predicted[int(rank)] if int(rank) < len(predicted) else math.nan]
                for rank, used in self.rank_bytes.items()
            ]
            found.append(table_figure("Memory by rank", columns, rows))
        return [figure for figure in found if figure is not None]


def runs_in(root: Path) -> list[Path]:
    """Return the run directories in a folder, the one that was written to last first."""
    if not root.is_dir():
        return []
    marks = ("plan.json", RESULTS, METRICS, EVENTS, "state.json")
    found = [
        (max(path.stat().st_mtime for path in written), folder.name, folder)
        for folder in root.iterdir()
        if folder.is_dir()
        and (written := [folder / mark for mark in marks if (folder / mark).is_file()])
    ]
    return [folder for _, _, folder in sorted(found, reverse=True)]


def folder_of(root: Path, name: str) -> Path:
    """Return a run directory by its name, which is that of a folder there and no path.

    Raises:
        InvalidInputError: There is none.
    """
    for folder in runs_in(root):
        if folder.name == name:
            return folder
    raise InvalidInputError(f"there is no run {name[:200]!r} in {root}")


def look_at_run(folder: Path, *, whole: bool = False) -> RunView:
    """Return a run as it is now.

    Args:
        folder: Its directory.
        whole: Whether to predict its step and its memory where only its plan says them, and to read
            its log.
    """
    try:
        return _look(folder, whole=whole)
    except (PartitaError, OSError, ValueError) as exc:
        return RunView(name=folder.name, state="unreadable", note=" ".join(str(exc).split())[:300])


def _look(folder: Path, *, whole: bool) -> RunView:
    rows = read_metrics(folder)
    results = _results(folder)
    heard_s = max(
        (path.stat().st_mtime for path in folder.iterdir() if path.is_file()),
        default=folder.stat().st_mtime,
    )
    events, driver = read_events(folder)
    state, note = _state(folder, heard_s, driver)
    predicted_s, predicted_bytes, steps = math.nan, {}, 0
    if results:
        predicted_s = results.get("predicted_step_s") or math.nan
        steps = int(results.get("steps") or 0)
    steps = steps or next((int(event["steps"]) for event in events[::-1] if "steps" in event), 0)
    plan = folder / "plan.json"
    if whole and plan.is_file():
        solution = load(plan)
        if isinstance(solution, Solution):
            step = simulate(solution.problem, solution.plan, period=solution.plan.stashes_weights)
            predicted_bytes = dict(zip(step.devices, step.peak_bytes.tolist(), strict=True))
            own = step.period_s if math.isfinite(step.period_s) else step.makespan_s
            predicted_s = predicted_s if math.isfinite(predicted_s) else own
    return RunView(
        name=folder.name,
        state=state,
        note=note,
        rows=rows,
        steps=steps,
        step_s=_settled(rows),
        predicted_s=predicted_s,
        rank_bytes=rows[-1].get("rank_memory_bytes", {}) if rows else {},
        predicted_bytes=predicted_bytes,
        heard_s=heard_s,
        lines=_log(folder) if whole else (),
        events=[_event(event) for event in events if "text" in event][-MOST_EVENTS:],
    )


def _results(folder: Path) -> Mapping[str, Any]:
    if not has_results(folder):
        return {}
    found = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _event(event: Mapping[str, Any]) -> str:
    """Return an event with the time of day at which it happened."""
    clock = time.strftime("%H:%M:%S", time.localtime(float(event.get("at_s", 0.0))))
    return f"{clock} {str(event['text'])[:500]}"


def _state(folder: Path, heard_s: float, driver: RunState | None) -> tuple[str, str]:
    """Return what a run is at, and why."""
    driven = read_state(folder) or driver
    if driven is not None and driven is driver and has_results(folder):
        return "ended", ""
    if driven is not None and driven.has_vanished:
        return "lost", "its driver has ended without a word"
    if driven is not None and driven.progress is not Progress.RUNNING:
        return driven.progress.value, driven.error
    if has_results(folder):
        return "ended", ""
    if driven is None and time.time() - heard_s > SILENT_S:
        return "silent", f"no word for more than {SILENT_S:g} s, and no results"
    return "running", ""


def _settled(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the median seconds of later steps."""
    spent = sorted(
        float(row["step_s"])
        for row in rows[len(rows) // SETTLED :]
        if isinstance(row.get("step_s"), int | float)
    )
    return spent[len(spent) // 2] if spent else math.nan


def _log(folder: Path) -> Sequence[str]:
    for log in (folder / "driver.log", *sorted((folder / "logs").glob("rank*.log"))):
        if lines := last_lines(log, _LAST_LINES):
            return [line[:500] for line in lines]
    return ()
