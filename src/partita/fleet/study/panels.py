"""What the pictures of a study show, as lines: completion times, queue and use over time, loads."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from partita.core.columns import Floats
from partita.core.fleet import FleetHistory
from partita.fleet.study.study import Run

_Share: TypeAlias = tuple[str, str, Callable[[FleetHistory], Floats]]

MOST_LINES = 8
_POINTS = 1200
"""Steps over time that a line has at most."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Line:
    """One line of a panel.

    Attributes:
        name: For the legend.
        x: Where its points are.
        y: How high.
        stepped: Whether a value holds until the next point.
    """

    name: str
    x: Floats
    y: Floats
    stepped: bool = False


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Panel:
    """One diagram.

    Attributes:
        key: For the name of a file.
        title: What it shows.
        x_label: Of the axis.
        y_label: Of the axis.
        lines: Best first.
        percent: Whether heights are shares of 1.
        logarithmic: Whether the x axis is.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    percent: bool = False
    logarithmic: bool = False


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """Return the panels of runs: over loads where there are several, and of the highest load."""
    loads = sorted({run.load for run in runs})
    highest = [run for run in runs if run.load == loads[-1] or all(map(math.isnan, loads))][
        :MOST_LINES
    ]
    at = "" if math.isnan(highest[0].load) else f" at {highest[0].load:g} jobs an hour"
    result = [_loads_panel(runs)] if len(loads) > 1 else []
    result.append(
        Panel(
            key="cdf",
            title=f"Completion times{at}: share of jobs that took no longer",
            x_label="hours from arrival to end (logarithmic)",
            y_label="share of jobs",
            lines=completion_times(highest),
            percent=True,
            logarithmic=True,
        )
    )
    result.append(
        Panel(
            key="queue",
            title=f"Jobs that wait{at}",
            x_label="hours",
            y_label="jobs",
            lines=[
                _over_time(run, run.history.usage.waiting.astype(np.float64)) for run in highest
            ],
        )
    )
    result += [_share_panel(each, highest, at) for each in _SHARES]
    return result


def _share_panel(
    what: tuple[str, str, Callable[[FleetHistory], Floats]], runs: Sequence[Run], at: str
) -> Panel:
    key, title, share = what
    return Panel(
        key=key,
        title=f"{title}{at}",
        x_label="hours",
        y_label="share of all",
        lines=[_over_time(run, share(run.history)) for run in runs],
        percent=True,
    )


def _waiting(history: FleetHistory) -> Floats:
    return history.usage.waiting.astype(np.float64)


_SHARES: tuple[_Share, ...] = (
    ("gpus", "GPUs in use", lambda history: history.usage.gpus / history.num_gpus),
    ("cpus", "CPUs granted", lambda history: history.usage.cpus / history.num_cpus),
    ("memory", "Memory granted", lambda history: history.usage.memory_bytes / history.memory_bytes),
)


def _loads_panel(runs: Sequence[Run]) -> Panel:
    titles = list(dict.fromkeys(run.title for run in runs))[:MOST_LINES]
    lines = []
    for title in titles:
        own = [run for run in runs if run.title == title]
        lines.append(
            Line(
                name=title,
                x=np.array([run.load for run in own]),
                y=np.array([run.metrics.mean_s / 3600 for run in own]),
            )
        )
    return Panel(
        key="loads",
        title="Mean completion time by load",
        x_label="jobs an hour",
        y_label="hours",
        lines=lines,
    )


def completion_times(runs: Sequence[Run]) -> list[Line]:
    """Return the share of jobs that took no longer than so many hours, a line per run."""
    return [_cdf_line(run) for run in runs[:MOST_LINES]]


def _cdf_line(run: Run) -> Line:
    times = run.history.completion_s[run.counted]
    times = np.sort(times[~np.isnan(times)])
    share = np.arange(1, len(times) + 1) / max(len(times), 1)
    kept = _thinned(len(times))
    return Line(name=run.title, x=times[kept] / 3600, y=share[kept], stepped=True)


def _over_time(run: Run, values: Floats) -> Line:
    """Return a column of what was in use, with its end."""
    history = run.history
    usage = history.usage
    end = (float(usage.start_s[-1]) + float(usage.rounds[-1]) * history.round_s) / 3600
    x, y = np.append(usage.start_s / 3600, end), np.append(values, 0.0)
    kept = _thinned(len(x))
    return Line(name=run.title, x=x[kept], y=y[kept], stepped=True)


def _thinned(count: int) -> list[int]:
    """Return the points that are drawn: all, or as many at equal distances, with the last."""
    rows = np.arange(count) if count <= _POINTS else np.linspace(0, count - 1, _POINTS)
    return [int(row) for row in np.unique(rows.round())]
