"""Figures: documents as JSON values that a page draws, and that anybody can read as a table.

A figure is a mapping with a ``kind`` that a module under ``static`` draws, a ``title``, and a
``table``: titles and units of its columns, and its rows. What is large is packed
(`partita.report.columns`). Figures of one ``axis`` share their time axis and their cursor.
Everything that a figure says is computed here or before; the page lays it out and colours it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from partita.core.cluster import Cluster
from partita.core.columns import Array, number_or_none
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.program import LAST_COMPUTE, Kind
from partita.core.timeline import Timeline
from partita.report.columns import Scaled, pack, ticks
from partita.units import format_bytes

Figure: TypeAlias = dict[str, Any]

MOST_OPS = 300
"""Bars of a graph; more ops are drawn in groups of neighbours of one stage."""
MOST_LANES = 64
"""Devices that have a lane each; of more, those that do the same at the same time share one."""
MOST_HOSTS = 48
"""Hosts that are drawn one by one; of more, neighbours that do the same are drawn once."""
MOST_EXACT_ROWS = 250_000
"""Instructions of a timeline whose times are kept to a 2 ** 32nd of the step."""
_COARSE = 2**20
"""Steps of the grid on which the times of longer timelines lie."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of the table of a figure.

    Attributes:
        title: Its heading.
        unit: ``s``, ``bytes``, ``J``, ``share`` or ``change`` (relative); empty = as it stands.
    """

    title: str
    unit: str = ""

    def to_json(self) -> dict[str, str]:
        """Return it as JSON values."""
        return {"title": self.title, "unit": self.unit}


def table_of(columns: Sequence[TableColumn], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return a table as JSON values; numbers that are not known are null."""
    return {
        "columns": [column.to_json() for column in columns],
        "rows": [[_cell(value) for value in row] for row in rows],
    }


def _cell(value: Any) -> Any:  # noqa: ANN401 (a number or a text)
    return number_or_none(float(value)) if isinstance(value, float | np.floating) else value


def device_labels(names: Sequence[str], cluster: Cluster | None) -> list[dict[str, str]]:
    """Return the devices of a figure: name, host and type, which may not be known."""
    known = {} if cluster is None else {device.name: device for device in cluster.devices}
    hosts = () if cluster is None else cluster.hosts
    return [
        {
            "name": name,
            "type": known[name].type if name in known else "",
            "host": hosts[known[name].host].name if name in known else "",
        }
        for name in names
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Track:
    """A timeline that is drawn with others on one axis.

    Attributes:
        name: What it is, such as ``predicted``.
        timeline: The timeline.
    """

    name: str
    timeline: Timeline


def timeline_figure(
    tracks: Sequence[Track],
    *,
    cluster: Cluster | None = None,
    title: str = "Timeline",
    axis: str = "step",
    length_s: float | None = None,
    colour: str = "kind",
    steers: bool = True,
) -> Figure:
    """Return what every device does when; of several tracks, one below the other per device.

    Args:
        tracks: Timelines of the same devices.
        cluster: Tells types and hosts of the devices.
        title: Of the figure.
        axis: Figures of one axis move together.
        length_s: Seconds of the whole axis; None = those of the longest track.
        colour: What colours the bars at first: ``kind``, ``stage`` or ``clock``.
        steers: Whether it has the buttons that move all figures of its axis.
    """
    first = tracks[0].timeline
    longest = max(track.timeline.makespan_s for track in tracks)
    groups = alike_devices(first) if len(tracks) == 1 else one_each(first)
    return {
        "kind": "timeline",
        "title": title,
        "note": _groups_note(groups),
        "axis": axis,
        "length_s": longest if length_s is None else length_s,
        "colour": colour,
        "steers": steers,
        "devices": _grouped_labels(first, cluster, groups),
        "peers": list(first.devices),
        "kinds": [kind.name.lower() for kind in Kind],
        "last_compute": int(LAST_COMPUTE),
        "tracks": [_track(track, groups) for track in tracks],
        "table": _use_table(tracks),
    }


def one_each(timeline: Timeline) -> list[list[int]]:
    """Return a group for each device."""
    return [[device] for device in range(len(timeline.devices))]


def alike_devices(timeline: Timeline) -> list[list[int]]:
    """Return devices that do the same at the same time, to 1e-5 of the step, in groups.

    Where there is room for a lane each, they are.
    """
    if len(timeline.devices) <= MOST_LANES:
        return one_each(timeline)
    order = np.lexsort((timeline.kind, timeline.start_s, timeline.device))
    scale = 1e5 / max(timeline.makespan_s, 1e-300)
    columns: list[Array] = [timeline.kind, timeline.stage]
    columns += [np.rint(at * scale) for at in (timeline.start_s, timeline.end_s)]
    rows = np.stack([column[order].astype(np.int32) for column in columns], axis=1)
    ends = np.searchsorted(timeline.device[order], np.arange(len(timeline.devices) + 1))
    found: dict[bytes, list[int]] = {}
    for device in range(len(timeline.devices)):
        found.setdefault(rows[ends[device] : ends[device + 1]].tobytes(), []).append(device)
    return list(found.values())


def _groups_note(groups: Sequence[Sequence[int]]) -> str:
    if all(len(group) == 1 for group in groups):
        return ""
    return "Devices that do the same at the same time share a lane, that of the first of them."


def _grouped_labels(
    timeline: Timeline, cluster: Cluster | None, groups: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    labels = device_labels([timeline.devices[group[0]] for group in groups], cluster)
    return [
        {**label, "count": len(group)} if len(group) > 1 else dict(label)
        for label, group in zip(labels, groups, strict=True)
    ]


def _track(track: Track, groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    timeline = track.timeline
    shown = [group[0] for group in groups]
    lane_of = np.full(len(timeline.devices), -1)
    lane_of[shown] = np.arange(len(shown))
    order = drawing_order(timeline)
    order = order[lane_of[timeline.device[order]] >= 0]
    sizes, size_of = np.unique(timeline.bytes[order], return_inverse=True)
    clocks, clock_of = np.unique(timeline.clock_mhz[order], return_inverse=True)
    start = grid(timeline.start_s[order], timeline)
    end = grid(timeline.end_s[order], timeline)
    columns: dict[str, Array | Scaled] = {
        "device": lane_of[timeline.device[order]],
        "row": order,
        "kind": timeline.kind[order],
        "stage": timeline.stage[order],
        "microbatch": timeline.microbatch[order],
        "peer": timeline.peer[order],
        "start": start.whole,
        "length": end.whole - start.whole,
        "size": size_of,
    }
    if bool(np.isfinite(clocks).any()):
        columns["clock"] = clock_of
    return {
        "name": track.name,
        "origin": timeline.origin.value,
        "makespan_s": timeline.makespan_s,
        "tick_s": start.scale,
        "sizes": sizes.tolist(),
        "clocks": [number_or_none(clock) for clock in clocks.tolist()],
        "idle": timeline.bubble[shown].tolist(),
        "data": pack(columns),
    }


def grid(values: Array, timeline: Timeline) -> Scaled:
    """Return times of a timeline on a grid, a coarser one where there are very many of them."""
    if len(values) <= MOST_EXACT_ROWS:
        return ticks(values, timeline.makespan_s)
    scale = max(timeline.makespan_s, 1e-300) / _COARSE
    return Scaled(whole=np.rint(values / scale).astype(np.int64), scale=scale)


def drawing_order(timeline: Timeline) -> Array:
    """Return the rows by device; of each its compute, what it sends, what it waits for; by start.

    A RECV covers the wait for its message, so that it is told and not drawn.
    """
    kind = timeline.kind
    sort = np.where(kind <= LAST_COMPUTE, 0, np.where(kind == Kind.RECV, 2, 1))
    return np.lexsort((timeline.start_s, sort, timeline.device))


_USE = (
    TableColumn("device"),
    TableColumn("timeline"),
    TableColumn("busy", "s"),
    TableColumn("waiting for data", "s"),
    TableColumn("idle", "share"),
    TableColumn("peak memory", "bytes"),
)


def _use_table(tracks: Sequence[Track]) -> dict[str, Any]:
    rows = []
    for device, name in enumerate(tracks[0].timeline.devices):
        for track in tracks:
            own = track.timeline
            peak = float(own.peak_bytes[device]) if len(own.memory_device) else float("nan")
            figures = (own.busy_s[device], own.exposed_s[device], own.bubble[device])
            rows.append([name, track.name, *map(float, figures), peak])
    return table_of(_USE, rows)


def memory_figure(
    timeline: Timeline, *, cluster: Cluster | None = None, axis: str = "step"
) -> Figure:
    """Return the memory of each device over a step, on the axis of its timeline."""
    peaks, limits = timeline.peak_bytes, timeline.limit_bytes
    scale = max(float(peaks.max(initial=0.0)), 1.0) / 0xFFFF
    rows = [
        [name, float(peaks[at]), float(limits[at]), float(limits[at] - peaks[at])]
        for at, name in enumerate(timeline.devices)
    ]
    columns = [TableColumn(title, "bytes") for title in ("peak", "limit", "left")]
    groups = alike_devices(timeline)
    shown = [group[0] for group in groups]
    lane_of = np.full(len(timeline.devices), -1)
    lane_of[shown] = np.arange(len(shown))
    points = np.flatnonzero(lane_of[timeline.memory_device] >= 0)
    return {
        "kind": "memory",
        "title": "Memory, on the same axis",
        "note": _memory_note(peaks, limits),
        "scale_bytes": float(peaks.max(initial=0.0)),
        "axis": axis,
        "length_s": timeline.makespan_s,
        "devices": _grouped_labels(timeline, cluster, groups),
        "peak_bytes": peaks[shown].tolist(),
        "limit_bytes": [number_or_none(limit) for limit in limits[shown].tolist()],
        "data": pack(
            {
                "device": lane_of[timeline.memory_device[points]],
                "time": grid(timeline.memory_s[points], timeline),
                "bytes": Scaled(
                    whole=np.rint(timeline.memory_bytes[points] / scale).astype(np.int64),
                    scale=scale,
                ),
            }
        ),
        "table": table_of([TableColumn("device"), *columns], rows),
    }


def _memory_note(peaks: Array, limits: Array) -> str:
    highest = format_bytes(float(peaks.max(initial=0.0)))
    known = bool(np.isfinite(limits).any())
    meter = "; the short line on the right is the share of the limit that it takes" if known else ""
    return f"A full lane is {highest}, the highest peak of all{meter}."


def stages_of(plan: Plan) -> dict[str, list[int]]:
    """Return the stages of each device of a plan, by name."""
    held: dict[str, list[int]] = {name: [] for name in plan.devices}
    for index, stage in enumerate(plan.stages):
        for device in {device for group in stage.devices for device in group}:
            held[plan.devices[device]].append(index)
    return held


def runs_of(numbers: Sequence[int]) -> str:
    """Return rising numbers in words, neighbours as from and to.

    >>> runs_of([0, 1, 2, 5])
    '0 to 2, 5'
    """
    runs: list[list[int]] = []
    for each in numbers:
        if runs and runs[-1][1] == each - 1:
            runs[-1][1] = each
        else:
            runs.append([each, each])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in runs)


def cluster_figure(cluster: Cluster, plan: Plan | None = None) -> Figure:
    """Return the hosts and devices of a cluster, and the stages of each; unused ones too."""
    held = {} if plan is None else stages_of(plan)
    # Of thousands of devices most hold the same stages: each list is there once.
    lists: dict[tuple[int, ...], int] = {}
    own = [tuple(held.get(device.name, ())) for device in cluster.devices]
    hosts, drawn_of = _host_groups(cluster, own)
    devices = [
        {
            "name": device.name,
            "host": drawn_of[device.host],
            "type": device.type,
            "memory_bytes": number_or_none(device.memory_bytes),
            "stages": lists.setdefault(stages, len(lists)),
        }
        for device, stages in zip(cluster.devices, own, strict=True)
        if device.host in drawn_of
    ]
    rows = [
        [
            device.name,
            cluster.hosts[device.host].name,
            device.type,
            device.memory_bytes,
            runs_of(stages) or "none",
        ]
        for device, stages in zip(cluster.devices, own, strict=True)
    ]
    columns = (
        *(TableColumn("device"), TableColumn("host"), TableColumn("type")),
        *(TableColumn("memory", "bytes"), TableColumn("stages")),
    )
    shown = len(columns) - (plan is None)
    return {
        "kind": "cluster",
        "title": "Cluster: who does which stage" if plan is not None else "Cluster",
        "note": "Hosts beside one another that do the same are drawn once."
        if len(hosts) < len(cluster.hosts)
        else "",
        "hosts": hosts,
        "stages": [list(stages) for stages in lists],
        "words": [runs_of(stages) for stages in lists],
        "devices": devices,
        "planned": plan is not None,
        "table": table_of(columns[:shown], [row[:shown] for row in rows]),
    }


def _host_groups(
    cluster: Cluster, own: Sequence[tuple[int, ...]]
) -> tuple[list[str], dict[int, int]]:
    """Return the names of the hosts that are drawn, and the place of each by its number.

    Args:
        cluster: The cluster.
        own: The stages of each device.
    """
    looks: list[list[tuple[str, float, tuple[int, ...]]]] = [[] for _ in cluster.hosts]
    for device, stages in zip(cluster.devices, own, strict=True):
        looks[device.host].append((device.type, device.memory_bytes, stages))
    few = len(cluster.hosts) <= MOST_HOSTS
    runs: list[list[int]] = []
    for host, look in enumerate(looks):
        if runs and not few and looks[runs[-1][0]] == look:
            runs[-1].append(host)
        else:
            runs.append([host])
    names = [host.name for host in cluster.hosts]
    titles = [
        names[run[0]]
        if len(run) == 1
        else f"{names[run[0]]} to {names[run[-1]]} ({len(run):,} hosts)"
        for run in runs
    ]
    return titles, {run[0]: at for at, run in enumerate(runs)}


def graph_figure(graph: Graph, plan: Plan | None = None) -> Figure:
    """Return the ops in the order of the data, coloured by stage; their height is their time.

    Neighbours of one stage and one block are one bar where there are too many ops for a bar each.
    """
    order = graph.topological_order[graph.is_forward[graph.topological_order]]
    stage = np.zeros(len(graph), np.int64) if plan is None else plan.stage_of.astype(np.int64)
    if plan is not None:
        order = order[np.argsort(stage[order], kind="stable")]
    seconds = graph.forward_s + graph.backward_s
    bar_of = _bars(graph, order, stage)
    count = int(bar_of[-1]) + 1 if len(bar_of) else 0
    first = np.searchsorted(bar_of, np.arange(count))
    sizes = np.bincount(bar_of, minlength=count)
    spent = np.bincount(bar_of, weights=seconds[order], minlength=count)
    rows = []
    for begin, size, total in zip(first.tolist(), sizes.tolist(), spent.tolist(), strict=True):
        name = graph.ops.names[order[begin]]
        words = name if size == 1 else f"{name} and {size - 1} more"
        rows.append([words, int(stage[order[begin]]), int(size), float(total)])
    columns = (
        *(TableColumn("op"), TableColumn("stage"), TableColumn("ops")),
        TableColumn("forward and backward", "s"),
    )
    return {
        "kind": "graph",
        "title": "Model: ops by stage" if plan is not None else "Model: ops",
        "note": "The higher an op, the longer it takes.",
        "num_ops": len(graph),
        "table": table_of(columns, rows),
    }


def _bars(graph: Graph, order: Array, stage: Array) -> Array:
    """Return the bar of each op in order: one each, or neighbours together where there are many."""
    place = np.arange(len(order))
    if len(order) <= MOST_OPS:
        return place
    block = graph.ops.blocks.of if len(graph.ops.blocks.of) else graph.ops.layers.of
    keys = [stage[order]] + ([block[order].astype(np.int64)] if len(block) else [])
    new = np.zeros(len(order), bool)
    for key in keys:
        new[1:] |= np.diff(key) != 0
    # Runs that are still too many are cut at equal distances instead.
    if int(new.sum()) >= MOST_OPS:
        new = np.diff(stage[order], prepend=stage[order][:1]) != 0
        new[1:] |= np.diff(place * MOST_OPS // len(order)) != 0
    elif int(new.sum()) < MOST_OPS // 4:
        new[1:] |= np.diff(place * (MOST_OPS // 2) // len(order)) != 0
    return np.cumsum(new)


def bars_figure(
    title: str,
    *,
    names: Sequence[str],
    parts: Mapping[str, Array],
    unit: str,
    whole: Sequence[float] = (),
    note: str = "",
    totals: bool = False,
) -> Figure:
    """Return one bar per name, divided into parts.

    Args:
        title: Of the figure.
        names: Of the bars.
        parts: Values of all bars by name of the part, from left to right.
        unit: Unit of the values.
        whole: Length of the axis of each bar; empty = of all bars that of the longest.
        note: What to know of it.
        totals: Whether the sum of the parts stands beside each bar.
    """
    used = {name: values for name, values in parts.items() if bool((np.abs(values) > 0).any())}
    longest = float(np.sum(list(used.values()), axis=0).max()) if used else 0.0
    rows = [
        [name, *(float(values[at]) for values in used.values())] for at, name in enumerate(names)
    ]
    lengths = list(whole) or [longest] * len(names)
    bars = _alike_bars(rows, lengths)
    columns = [TableColumn("device"), *(TableColumn(name, unit) for name in used)]
    return {
        "kind": "bars",
        "title": title,
        "note": note,
        "unit": unit,
        "parts": list(used),
        "totals": [float(sum(values[bar[0]] for values in used.values())) for bar in bars]
        if totals
        else None,
        "bars": [{"row": bar[0], "count": len(bar)} for bar in bars],
        "whole": [number_or_none(lengths[bar[0]]) for bar in bars],
        "table": table_of(columns, rows),
    }


def _alike_bars(rows: Sequence[Sequence[Any]], lengths: Sequence[float]) -> list[list[int]]:
    """Return rows that look the same in groups, where there are too many for a bar each."""
    if len(rows) <= MOST_LANES:
        return [[at] for at in range(len(rows))]
    found: dict[tuple[int, ...], list[int]] = {}
    for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        key = tuple(round(1000 * value / length) if length else 0 for value in row[1:])
        found.setdefault(key, []).append(at)
    return list(found.values())


def breakdown_figure(timeline: Timeline) -> Figure:
    """Return where the time of each device goes: compute, waiting for data, bubble."""
    spent = timeline.end_s - timeline.start_s

    def seconds(*kinds: Kind) -> Array:
        rows = np.isin(timeline.kind, kinds)
        return np.bincount(
            timeline.device[rows], weights=spent[rows], minlength=len(timeline.devices)
        )

    idle = timeline.makespan_s - timeline.busy_s - timeline.exposed_s
    return bars_figure(
        "Where the time goes",
        names=timeline.devices,
        parts={
            "forward": seconds(Kind.FORWARD),
            "backward": seconds(Kind.BACKWARD, Kind.BACKWARD_INPUT),
            "weight gradient": seconds(Kind.BACKWARD_WEIGHT),
            "recompute": seconds(Kind.RECOMPUTE),
            "load": seconds(Kind.LOAD),
            "update": seconds(Kind.UPDATE),
            "exposed communication": timeline.exposed_s,
            "bubble": np.maximum(idle, 0.0),
        },
        unit="s",
        whole=[timeline.makespan_s] * len(timeline.devices),
        note="Exposed communication is time without compute while a message comes or a collective "
        "runs; the bubble is the rest of the time without compute.",
    )


def memory_parts_figure(timeline: Timeline, parts: Mapping[str, Array]) -> Figure:
    """Return where the memory of each device goes at its peak.

    Args:
        timeline: Names the devices and their limits.
        parts: Bytes of all devices by what holds them.
    """
    limits = timeline.limit_bytes.tolist()
    known = all(map(np.isfinite, limits))
    total = np.sum(list(parts.values()), axis=0)
    return bars_figure(
        "Where the memory goes",
        names=timeline.devices,
        parts=parts,
        unit="bytes",
        whole=[max(limit, float(total[at])) for at, limit in enumerate(limits)] if known else (),
        note="At the peak of each device" + ("; a full bar is its limit." if known else "."),
        totals=True,
    )


def table_figure(
    title: str, columns: Sequence[TableColumn], rows: Sequence[Sequence[Any]], note: str = ""
) -> Figure:
    """Return a figure that is a table and nothing else."""
    return {"kind": "table", "title": title, "note": note, "table": table_of(columns, rows)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """A line of a chart.

    Attributes:
        name: For the legend.
        x: Where its points are.
        y: How high.
        style: ``line``, ``steps``, ``dashes`` or ``points``.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "line"


def chart_figure(
    title: str,
    curves: Sequence[Curve],
    *,
    x: TableColumn,
    y: TableColumn,
    logarithmic: bool = False,
    from_zero: bool = False,
    x_from_zero: bool = False,
) -> Figure:
    """Return lines over one axis.

    Args:
        title: Of the figure.
        curves: The lines.
        x: Title and unit of the horizontal axis.
        y: Title and unit of the vertical axis.
        logarithmic: Whether the horizontal axis is.
        from_zero: Whether the vertical axis begins at 0.
        x_from_zero: Whether the horizontal one does.
    """
    return {
        "kind": "chart",
        "title": title,
        "x": x.to_json(),
        "y": y.to_json(),
        "logarithmic": logarithmic,
        "from_zero": from_zero,
        "x_from_zero": x_from_zero,
        "curves": [
            {
                "name": curve.name,
                "style": curve.style,
                "x": [_short(each) for each in curve.x],
                "y": [_short(each) for each in curve.y],
            }
            for curve in curves
        ],
        # Its rows are the points of the curves, which are not written twice.
        "table": table_of([TableColumn("line"), x, y], ()),
    }


def _short(value: float) -> float | None:
    """Return a number with seven digits, more than any screen shows."""
    return number_or_none(float(f"{float(value):.7g}"))
