"""Figures of what is studied beside a plan: frontiers and clocks, fleets, runs, searches."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from partita.core.cluster import Cluster
from partita.core.columns import Array, number_or_none
from partita.core.energy import Frontier
from partita.core.timeline import Timeline
from partita.fleet.study.panels import Panel, panels_of
from partita.fleet.study.study import Run
from partita.report.columns import pack
from partita.report.figures import (
    Curve,
    Figure,
    TableColumn,
    Track,
    chart_figure,
    drawing_order,
    table_figure,
    timeline_figure,
)

_MOST_RANKS = 8
"""Ranks of a run that have a line each."""
_LEAST_GRID = 2**20
"""Steps of the grid on which the bars of a point of a frontier lie."""

_POINT_COLUMNS = (
    *(TableColumn("point"), TableColumn("step", "s"), TableColumn("energy", "J")),
    *(TableColumn("against all-max", "change"), TableColumn("bound", "J")),
    TableColumn("above the bound", "change"),
)


def frontier_figure(frontier: Frontier) -> Figure:
    """Return energy against time, with the bound and all clocks at their highest."""
    time_s, energy_j = frontier.time_s.tolist(), frontier.energy_j.tolist()
    bound_j = frontier.bound_j.tolist()
    figure = chart_figure(
        "Energy against time",
        [
            Curve(name="frontier", x=time_s, y=energy_j),
            Curve(name="no clocks need less", x=time_s, y=bound_j, style="dashes"),
            Curve(
                name="all clocks at their highest",
                x=[frontier.all_max_s],
                y=[frontier.all_max_j],
                style="points",
            ),
        ],
        x=TableColumn("time of a step", "s"),
        y=TableColumn("energy of a step", "J"),
    )
    rows = [
        [
            point,
            time_s[point],
            energy_j[point],
            energy_j[point] / frontier.all_max_j - 1,
            bound_j[point],
            float(frontier.gap[point]),
        ]
        for point in range(len(frontier))
    ]
    return figure | table_figure("", _POINT_COLUMNS, rows) | {"kind": "chart", "title": "Frontier"}


def clocks_figure(
    frontier: Frontier,
    steps: Mapping[int, Timeline],
    *,
    cluster: Cluster | None = None,
) -> Figure:
    """Return the steps of some points of a frontier, to be moved through by a slider.

    Args:
        frontier: The frontier.
        steps: The simulated steps by point, each with the clocks of its instructions.
        cluster: Tells types and hosts of the devices.
    """
    points = sorted(steps)
    shown = [steps[point] for point in points]
    longest = max(step.makespan_s for step in shown)
    order = drawing_order(shown[0])
    tick_s = longest / _LEAST_GRID
    clocks = np.unique(np.concatenate([step.clock_mhz for step in shown]))
    figure = timeline_figure(
        [Track(name="clocks", timeline=shown[0])],
        cluster=cluster,
        title="The pipeline by clock",
        axis="clocks",
        length_s=longest,
        colour="clock",
    )
    columns: dict[str, Array] = {}
    before = {name: np.zeros(len(order), np.int64) for name in ("start", "length", "clock")}
    for place, step in enumerate(shown):
        start = np.rint(step.start_s[order] / tick_s).astype(np.int64)
        now = {
            "start": start,
            "length": np.rint(step.end_s[order] / tick_s).astype(np.int64) - start,
            "clock": np.searchsorted(clocks, step.clock_mhz[order]),
        }
        # A point differs little from the one before.
        for name, values in now.items():
            columns[f"{name} {place}"] = values - before[name]
        before = now
    base = frontier.all_max_j
    facts = [
        {
            "point": point,
            "time_s": float(frontier.time_s[point]),
            "energy_j": float(frontier.energy_j[point]),
            "saving": 1 - float(frontier.energy_j[point]) / base,
            "idle": steps[point].bubble.tolist(),
        }
        for point in points
    ]
    return figure | {
        "kind": "clocks",
        "tick_s": tick_s,
        "clocks": [number_or_none(clock) for clock in clocks.tolist()],
        "points": facts,
        "steps": pack(columns),
    }


_POLICY_COLUMNS = (
    *(TableColumn("policy"), TableColumn("jobs/h"), TableColumn("mean", "h")),
    *(TableColumn("median", "h"), TableColumn("p99", "h"), TableColumn("makespan", "h")),
    *(TableColumn("worst against alone"), TableColumn("stops"), TableColumn("GPUs", "share")),
    TableColumn("energy", "kWh"),
)
_J_PER_KWH = 3.6e6
_S_PER_H = 3600.0


def fleet_figures(runs: Sequence[Run]) -> list[Figure]:
    """Return policies side by side, and what happened under each over time."""
    rows = [
        [
            run.title,
            run.load,
            run.metrics.mean_s / _S_PER_H,
            run.metrics.median_s / _S_PER_H,
            run.metrics.p99_s / _S_PER_H,
            run.metrics.makespan_s / _S_PER_H,
            run.metrics.worst_stretch,
            run.metrics.preemptions,
            run.use.gpus,
            run.metrics.energy_j / _J_PER_KWH,
        ]
        for run in runs
    ]
    known = [at for at in range(len(_POLICY_COLUMNS)) if any(_is_known(row[at]) for row in rows)]
    table = table_figure(
        "Policies, the best mean completion time first",
        [_POLICY_COLUMNS[at] for at in known],
        [[row[at] for at in known] for row in rows],
    )
    return [table, *(_panel_figure(panel) for panel in panels_of(runs))]


def _is_known(value: object) -> bool:
    return not (isinstance(value, float) and math.isnan(value))


def _panel_figure(panel: Panel) -> Figure:
    figure = chart_figure(
        panel.title,
        [
            Curve(
                name=line.name,
                x=line.x.tolist(),
                y=line.y.tolist(),
                style="steps" if line.stepped else "line",
            )
            for line in panel.lines
        ],
        x=TableColumn(panel.x_label),
        y=TableColumn(panel.y_label, "share" if panel.percent else ""),
        logarithmic=panel.logarithmic,
        from_zero=True,
    )
    return figure | {"group": "fleet"}


_PAIRS: Mapping[str, str] = {
    "forward_s": "s",
    "backward_s": "s",
    "compute_s": "s",
    "busy_s": "s",
    "bubble": "share",
    "transfer_s": "s",
    "peak_bytes": "bytes",
}


def comparison_figures(report: Mapping[str, Any], peak_bytes: Mapping[str, float]) -> list[Figure]:
    """Return a run beside its prediction, by stage and by device.

    Args:
        report: The comparison as ``results.json`` tells it.
        peak_bytes: Predicted peaks by device; results of older runs say 0.
    """
    result = []
    for what, key in (("stages", "stage"), ("devices", "device")):
        given: Sequence[Mapping[str, Any]] = report.get(what) or ()
        if not given:
            continue
        pairs = [name for name in _PAIRS if name in given[0]]
        columns = [TableColumn(key)]
        for name in pairs:
            words = name.rpartition("_")[0].replace("_", " ") or name
            columns += [
                TableColumn(f"{words}, {side}", _PAIRS[name]) for side in ("predicted", "measured")
            ]
        known = [
            {**row, "peak_bytes": {**row["peak_bytes"], "predicted": peak_bytes.get(row[key])}}
            if "peak_bytes" in row
            else row
            for row in given
        ]
        rows = [
            [row[key], *(row[name][side] for name in pairs for side in ("predicted", "measured"))]
            for row in known
        ]
        result.append(table_figure(f"Predicted and measured, by {key}", columns, rows))
    return result


def losses_figure(rows: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Return the losses of a run's steps, from the rows of its metrics; None = it has none."""
    curves = []
    for key, name, style in (("loss", "loss", "line"), ("held_out_loss", "held out", "points")):
        own = [row for row in rows if isinstance(row.get(key), int | float)]
        if own:
            steps = [float(row["step"]) for row in own]
            curves.append(Curve(name=name, x=steps, y=[row[key] for row in own], style=style))
    if not curves:
        return None
    return chart_figure("Loss", curves, x=TableColumn("step"), y=TableColumn("loss"))


def steps_figure(rows: Sequence[Mapping[str, Any]], predicted_s: float) -> Figure | None:
    """Return the seconds of a run's steps beside the predicted ones; None = there are none."""
    own = [row for row in rows if isinstance(row.get("step_s"), int | float)]
    if not own:
        return None
    steps = [float(row["step"]) for row in own]
    curves = [Curve(name="measured", x=steps, y=[float(row["step_s"]) for row in own])]
    if math.isfinite(predicted_s):
        ends = [steps[0], steps[-1]]
        curves.append(Curve(name="predicted", x=ends, y=[predicted_s] * 2, style="dashes"))
    return chart_figure(
        "Seconds of each step",
        curves,
        x=TableColumn("step"),
        y=TableColumn("step", "s"),
        from_zero=True,
    )


def rank_memory_figure(
    rows: Sequence[Mapping[str, Any]], predicted_bytes: Sequence[float] = ()
) -> Figure | None:
    """Return the most memory of each rank so far over the seconds of a run; None = it says none.

    Of many ranks the fullest, the one in the middle and the emptiest have a line.

    Args:
        rows: The rows of its metrics.
        predicted_bytes: Predicted peaks of its devices; empty = not known.
    """
    own = [row for row in rows if row.get("rank_memory_bytes") and "time_s" in row]
    if not own:
        return None
    last = own[-1]["rank_memory_bytes"]
    names = {rank: f"rank {rank}" for rank in last}
    if len(last) > _MOST_RANKS:
        fullest = sorted(last, key=lambda rank: (-last[rank], int(rank)))
        chosen = (fullest[0], fullest[len(fullest) // 2], fullest[-1])
        words = ("the fullest", "in the middle", "the emptiest")
        names = {rank: f"rank {rank}, {word}" for rank, word in zip(chosen, words, strict=True)}
    curves = []
    for rank, name in names.items():
        said = [row for row in own if rank in row["rank_memory_bytes"]]
        times = [float(row["time_s"]) for row in said]
        used = [float(row["rank_memory_bytes"][rank]) for row in said]
        curves.append(Curve(name=name, x=times, y=used, style="steps"))
    if predicted_bytes:
        ends = [float(own[0]["time_s"]), float(own[-1]["time_s"])]
        words_of = "predicted, the fullest device"
        curves.append(Curve(name=words_of, x=ends, y=[max(predicted_bytes)] * 2, style="dashes"))
    figure = chart_figure(
        "Memory by rank over time",
        curves,
        x=TableColumn("time since the start", "s"),
        y=TableColumn("most memory so far", "bytes"),
        from_zero=True,
    )
    note = "On a GPU what was allocated, on a CPU the whole process; what is predicted are tensors."
    return figure | {"note": note}


def search_figure(points: Sequence[tuple[float, float]], unit: str, bound: float = 0.0) -> Figure:
    """Return the best value of a search over its time, with the bound that is proven.

    Args:
        points: Seconds and value of each new best.
        unit: Of the values.
        bound: No plan is below; 0 = not known.
    """
    times, values = ([float(point[side]) for point in points] for side in (0, 1))
    curves = [Curve(name="best plan so far", x=times, y=values, style="steps")]
    if bound > 0 and times:
        curves.append(
            Curve(name="no plan is below", x=[times[0], times[-1]], y=[bound] * 2, style="dashes")
        )
    return chart_figure(
        "What the search found, and when",
        curves,
        x=TableColumn("time of the search", "s"),
        y=TableColumn("value", unit),
        x_from_zero=True,
    )
