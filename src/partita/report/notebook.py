"""How documents look in a notebook: a line, a table, and the figures of a report in a frame.

The frame is a sandbox: its scripts reach nothing of the notebook, and its own policy lets it load
nothing. Below it lies a picture, an image of its own (a data address with SVG) whose colours are
readable on light and dark: wherever frames or scripts are taken out or do not run, it is what is
seen. The table takes the page's own colours. All of it stays under 200 kB, whatever is shown.
"""

import base64
import html
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, TypeAlias

import numpy as np

from partita.core.cluster import Cluster
from partita.core.columns import Array
from partita.core.energy import Frontier
from partita.core.fleet import FleetHistory
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.core.timeline import Timeline
from partita.fleet.study.panels import completion_times
from partita.fleet.study.study import run_of
from partita.report.figures import (
    Figure,
    Track,
    cluster_figure,
    graph_figure,
    memory_figure,
    timeline_figure,
)
from partita.report.page import render_frame
from partita.report.study_figures import fleet_figures, frontier_figure
from partita.report.svg import timeline_svg
from partita.report.svg_frame import STYLE, opening, plain, rect, text_at
from partita.report.svg_frame import line as line_between
from partita.units import format_bytes, format_joules, format_seconds, format_share, joule_unit

Row: TypeAlias = Mapping[str, object]
MAX_BYTES = 200_000
_MAX_PICTURE = 120_000
"""Bytes of a picture before it is packed as text, which makes them a third more."""
_MOST_BELOW = 40_000
"""Bytes of a picture that lies below a frame, or stands beside the HTML."""
_MARGIN = 1000
_MOST_FRAMED = 50_000
"""Instructions of a timeline in a frame."""
_MOST_HIGH = 640
"""Pixels of a frame; what is higher is scrolled."""
_MOST_ROWS = 24
_MOST_LETTERS = 80
_WIDTH = 760
_LANES = (24, 12, 6, 2)
_COLOURS = ("#2f74c0", "#cf7d22", "#3a9e88", "#a8456f", "#86690c", "#6f55bd", "#4ba3a0", "#d4504a")
_STYLE = (
    ".partita-shown table{border-collapse:collapse;margin:.4em 0;color:inherit}"
    ".partita-shown th,.partita-shown td{padding:.15em .7em;text-align:right;"
    "border-bottom:1px solid rgba(128,128,128,.35);background:transparent;color:inherit}"
    ".partita-shown th:first-child,.partita-shown td:first-child,.partita-shown .text"
    "{text-align:left}"
    ".partita-shown img{max-width:100%;height:auto}"
    "@media (prefers-color-scheme:dark){.partita-shown{color-scheme:dark}}"
)


@singledispatch
def line(value: object) -> str:
    """Return a document in one line."""
    raise TypeError(f"{type(value).__name__} has no line")


@singledispatch
def rows(value: object) -> list[Row]:
    """Return the table of a document."""
    raise TypeError(f"{type(value).__name__} has no table")


@singledispatch
def picture(value: object) -> str:
    """Return the picture of a document as SVG; empty = it has none."""
    raise TypeError(f"{type(value).__name__} has no picture")


@singledispatch
def figures(value: object) -> list[Figure]:
    """Return the figures of a document that a frame shows; none = only its picture is shown."""
    del value
    return []


def to_html(value: object) -> str:
    """Return a document as HTML for a notebook, under 200 kB."""
    return shown([line(value)], rows(value), value)


def to_bundle(value: object) -> dict[str, str]:
    """Return what a front end may choose from: HTML, a picture, a line."""
    return bundle([line(value)], rows(value), value)


def bundle(
    lines: Sequence[str], table: Sequence[Row], document: object | None = None
) -> dict[str, str]:
    """Return lines, a table and a document by their media types."""
    svg = "" if document is None else picture(document)
    kept = {"image/svg+xml": svg} if 0 < len(svg.encode()) <= _MOST_BELOW else {}
    text = _shown(lines, table, svg, document)
    return {"text/plain": "\n".join(lines), "text/html": text, **kept}


def shown(lines: Sequence[str], table: Sequence[Row], document: object | None = None) -> str:
    """Return lines, a table and a document as HTML; what is too long is left out, and said."""
    return _shown(lines, table, "" if document is None else picture(document), document)


def _shown(lines: Sequence[str], table: Sequence[Row], svg: str, document: object | None) -> str:
    text = "".join(f"<div>{html.escape(one[:2000])}</div>" for one in lines[:_MOST_ROWS])
    more = len(table) - _MOST_ROWS
    note = f"<div>... {more} more rows</div>" if more > 0 else ""
    parts = [f"<style>{_STYLE}</style>", text, html_table(table[:_MOST_ROWS]), note]
    label = html.escape(lines[0][:200] if lines else "picture")
    image = ""
    if 0 < len(svg.encode()) <= _MAX_PICTURE:
        packed = base64.b64encode(svg.encode()).decode()
        image = f'<img alt="{label}" src="data:image/svg+xml;base64,{packed}">'
    used = sum(len(part.encode()) for part in (*parts, image)) + _MARGIN
    parts.append(_framed(image, document, label, MAX_BYTES - used))
    return f'<div class="partita-shown">{"".join(parts)}</div>'


def _framed(image: str, document: object | None, label: str, room: int) -> str:
    """Return a picture below a frame with the figures of a document, if these fit into the room."""
    found = figures(document)
    if not found:
        return image
    text = render_frame(found, title=html.unescape(label))
    for letter, escape in (("&", "&amp;"), ("<", "&lt;"), ("'", "&#39;")):
        text = text.replace(letter, escape)
    if len(text.encode()) > room:
        return image
    high = min(_MOST_HIGH, sum(map(_height, found)))
    # The frame lies on the picture and is as high as it at least; without it nothing is left over.
    over = f"grid-area:1/1;width:100%;height:100%;min-height:{high}px;border:0;position:relative"
    return (
        f'<div style="display:grid"><div style="grid-area:1/1;min-width:0">{image}</div>'
        f'<iframe title="{label}" style="{over}" '
        f"sandbox=\"allow-scripts allow-downloads\" srcdoc='{text}'></iframe></div>"
    )


def _height(figure: Figure) -> int:
    """Return about how many pixels a figure is high in a notebook."""
    kind, lanes = figure["kind"], len(figure.get("devices", ()))
    if kind == "timeline":
        return 150 + 30 * lanes
    if kind == "memory":
        return 130 + 36 * lanes
    if kind == "cluster":
        return 100 + 52 * math.ceil(lanes / 6)
    return 330


class Progress:
    """Shows the steps of longer work in one place: ``on_progress=Progress()``.

    In a notebook each step takes the place of the one before; elsewhere it is a line on stderr.
    """

    def __init__(self) -> None:
        self._handle: Any = None

    def __call__(self, step: str) -> None:
        """Show a step."""
        # Where nobody has imported IPython there is no notebook.
        ipython = sys.modules.get("IPython")
        if ipython is None or ipython.get_ipython() is None:
            sys.stderr.write(f"{step}\n")
            return
        display = ipython.display
        text = display.Pretty(step)
        if self._handle is None:
            self._handle = display.display(text, display_id=True)
        else:
            self._handle.update(text)


def html_table(table: Sequence[Row]) -> str:
    """Return rows as an HTML table; empty where there are none.

    >>> html_table([{"device": "a<b", "busy": 0.5}])
    '<table><tr><th>device</th><th>busy</th></tr><tr><td>a&lt;b</td><td>0.5</td></tr></table>'
    """
    if not table:
        return ""
    columns = list(table[0])[:_MOST_ROWS]
    signs = {name: _sign(table, name) for name in columns}
    head = "".join(f"<th{signs[name]}>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td{signs[name]}>{html.escape(_cell(row.get(name)))}</td>" for name in columns)
        + "</tr>"
        for row in table
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _sign(table: Sequence[Row], name: str) -> str:
    """Return what marks a column of texts, which begins at the left as the first column does."""
    values = [row.get(name) for row in table]
    is_text = all(isinstance(value, str) and value[:1].isalpha() for value in values)
    return ' class="text"' if is_text and name != next(iter(table[0])) else ""


def _cell(value: object) -> str:
    if value is None:
        return ""
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


def _kinds(cluster: Cluster) -> Counter[str]:
    return Counter(device.type or device.kind.value for device in cluster.devices)


def _rate(value: float) -> str:
    return f"{format_bytes(value)}/s" if math.isfinite(value) else "only latency"


@line.register
def _(value: Cluster) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in _kinds(value).items())
    return f"Cluster {value.name}: {kinds} on {len({d.host for d in value.devices})} hosts"


@rows.register
def _(value: Cluster) -> list[Row]:
    table: list[Row] = [
        {
            "part": kind,
            "number": count,
            "figures": format_bytes(
                next(d.memory_bytes for d in value.devices if (d.type or d.kind.value) == kind)
            ),
        }
        for kind, count in _kinds(value).items()
    ]
    table += [
        {
            "part": f"links of level {level.name}",
            "number": len(level.latency_s),
            "figures": _rate(level.slowest_bytes_per_s),
        }
        for level in value.levels
    ]
    if value.matrix is not None:
        table.append({"part": "links", "number": len(value) ** 2 - len(value), "figures": "matrix"})
    return table


@picture.register
def _(value: Cluster) -> str:
    kinds = list(_kinds(value))
    hosts: dict[int, list[int]] = {}
    for index, device in enumerate(value.devices):
        hosts.setdefault(device.host, []).append(index)
    kept = list(hosts.items())[:32]
    parts: list[str] = []
    y = 34.0
    for host, devices in kept:
        parts.append(text_at(8, y + 15, value.hosts[host].name[:18]))
        for place, index in enumerate(devices[:24]):
            one = value.devices[index]
            box = rect(
                140 + place * 25,
                y,
                22,
                20,
                f'rx="3" fill="{_colour(kinds.index(one.type or one.kind.value))}">',
            )
            parts.append(f"{box}<title>{plain(one.name)}</title></rect>")
        if len(devices) > 24:
            parts.append(text_at(140 + 24 * 25, y + 15, f"+{len(devices) - 24}"))
        y += 25
    legend = [text_at(8, 20, f"{len(value)} devices", "title")]
    for place, kind in enumerate(kinds[:5]):
        legend.append(rect(140 + 120 * place, 9, 12, 12, f'fill="{_colour(place)}"/>'))
        legend.append(text_at(156 + 120 * place, 20, kind[:14]))
    if len(hosts) > len(kept):
        parts.append(text_at(8, y + 12, f"... {len(hosts) - len(kept)} more hosts"))
        y += 20
    return _svg(y + 10, "cluster", [*legend, *parts])


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _svg(height: float, title: str, body: Sequence[str]) -> str:
    return "\n".join([*opening(_WIDTH, height, title, STYLE), *body, "</svg>"])


@figures.register
def _(value: Cluster) -> list[Figure]:
    return [cluster_figure(value)]


@line.register
def _(value: Problem) -> str:
    graph = value.graph
    return (
        f"Problem {graph.name}: {len(graph)} ops, {format_bytes(_parameter_bytes(value))} of "
        f"parameters, on {value.cluster.name}, {value.objective.mode} for {value.objective.metric}"
    )


def _parameter_bytes(value: Problem) -> float:
    return float(value.graph.parameters.bytes.sum())


@rows.register
def _(value: Problem) -> list[Row]:
    graph, objective = value.graph, value.objective
    return [
        {"": "model", "value": graph.name},
        {"": "ops", "value": len(graph)},
        {"": "parameters", "value": format_bytes(_parameter_bytes(value))},
        {"": "costs of", "value": ", ".join(c.device_type or "any device" for c in graph.costs)},
        {"": "devices", "value": len(value.cluster)},
        {"": "microbatches", "value": value.microbatches},
        {"": "objective", "value": f"{objective.metric}, {objective.mode}"},
        {"": "rules", "value": len(value.rules)},
    ]


@picture.register
def _(value: Problem) -> str:
    return picture(value.cluster)


@figures.register
def _(value: Problem) -> list[Figure]:
    return [cluster_figure(value.cluster), graph_figure(value.graph)]


@line.register
def _(value: Plan) -> str:
    used = {device for stage in value.stages for group in stage.devices for device in group}
    return (
        f"Plan: {len(value.stages)} stages on {len(used)} of {len(value.devices)} devices, "
        f"{value.schedule}, {len(value.microbatch_sizes)} microbatches"
    )


@rows.register
def _(value: Plan) -> list[Row]:
    counts = np.bincount(value.stage_of, minlength=len(value.stages))
    return [
        {
            "stage": index,
            "devices": ", ".join(value.devices[d] for group in stage.devices for d in group),
            "replicas": stage.num_replicas,
            "tp": stage.tp,
            "ops": int(counts[index]),
        }
        for index, stage in enumerate(value.stages)
    ]


@picture.register
def _(value: Plan) -> str:
    """A lane for each device with the stages that it has, as wide as their ops are many."""
    counts = np.bincount(value.stage_of, minlength=len(value.stages))
    ends = np.concatenate([[0], np.cumsum(counts)])
    whole = max(int(ends[-1]), 1)
    span = _WIDTH - 160
    parts = [text_at(8, 20, "ops of each stage, by device", "title")]
    lanes: dict[int, list[int]] = {}
    for index, stage in enumerate(value.stages[:2000]):
        for device in {d for group in stage.devices for d in group}:
            lanes.setdefault(device, []).append(index)
    for place, device in enumerate(sorted(lanes)[:32]):
        y = 34 + place * 24
        parts.append(text_at(8, y + 14, value.devices[device][:20]))
        for index in lanes[device]:
            left = 150 + span * int(ends[index]) / whole
            wide = max(span * int(counts[index]) / whole - 1, 1)
            box = rect(left, y, wide, 18, f'fill="{_colour(index)}">')
            parts.append(f"{box}<title>stage {index}: {int(counts[index])} ops</title></rect>")
            if wide > 14:
                parts.append(text_at(left + wide / 2, y + 13, str(index), "number"))
    return _svg(44 + min(len(lanes), 32) * 24, "plan", parts)


@line.register
def _(value: Solution) -> str:
    gap = f", at most {format_share(value.gap)} above the best" if math.isfinite(value.gap) else ""
    planner = f" by {value.planner}" if value.planner else ""
    is_time = value.unit == "s"
    figure = format_seconds(value.value) if is_time else f"{value.value:.5g} {value.unit}"
    return (
        f"Solution {value.problem.graph.name} on {value.problem.cluster.name}{planner}: "
        f"{figure} ({value.metric}), {value.proof}{gap}"
    )


@rows.register
def _(value: Solution) -> list[Row]:
    return rows(value.plan)


@picture.register
def _(value: Solution) -> str:
    return picture(value.plan)


@figures.register
def _(value: Solution) -> list[Figure]:
    problem = value.problem
    return [cluster_figure(problem.cluster, value.plan), graph_figure(problem.graph, value.plan)]


@line.register
def _(value: Timeline) -> str:
    busy = float(value.utilisation.mean()) if len(value.devices) else 0.0
    return (
        f"Timeline ({value.origin}): {len(value)} instructions on {len(value.devices)} devices in "
        f"{format_seconds(value.makespan_s)}, busy {format_share(busy)}"
    )


@rows.register
def _(value: Timeline) -> list[Row]:
    return [
        {
            "device": name,
            "busy": format_seconds(float(value.busy_s[index])),
            "of the step": format_share(float(value.utilisation[index])),
            "peak memory": format_bytes(float(value.peak_bytes[index])),
        }
        for index, name in enumerate(value.devices)
    ]


@picture.register
def _(value: Timeline) -> str:
    # Many instructions are many rectangles; a frame has room above a small picture only.
    for limit, choices in ((_MOST_BELOW, _LANES[:-1]), (_MAX_PICTURE, _LANES)):
        for lanes in choices:
            svg = timeline_svg(value, width=_WIDTH, max_lanes=lanes)
            if len(svg.encode()) <= limit:
                return svg
    return ""


@figures.register
def _(value: Timeline) -> list[Figure]:
    if len(value) > _MOST_FRAMED:
        return []
    found = [timeline_figure([Track(name=value.origin.value, timeline=value)])]
    return [*found, memory_figure(value)] if len(value.memory_device) else found


@line.register
def _(value: Frontier) -> str:
    saved = 1 - float(value.energy_j.min()) / value.all_max_j if value.all_max_j > 0 else 0.0
    return (
        f"Frontier: {len(value.time_s)} points from {format_seconds(float(value.time_s[0]))} to "
        f"{format_seconds(float(value.time_s[-1]))}, up to {format_share(saved)} less energy than "
        "at full clocks"
    )


@rows.register
def _(value: Frontier) -> list[Row]:
    count = len(value.time_s)
    chosen = sorted({round(at) for at in np.linspace(0, count - 1, min(count, 8))})
    return [
        {
            "iteration": format_seconds(float(value.time_s[at])),
            "energy": format_joules(float(value.energy_j[at])),
            "against full clocks": format_share(
                float(value.energy_j[at]) / value.all_max_j - 1 if value.all_max_j > 0 else 0.0,
                sign=True,
            ),
        }
        for at in chosen
    ]


@picture.register
def _(value: Frontier) -> str:
    most, unit = joule_unit(float(value.energy_j.max()))
    low = min(float(value.bound_j.min()), 0.9 * float(value.energy_j.max()))
    return _curves(
        "energy of a step over its time",
        [("frontier", value.time_s, value.energy_j), ("bound", value.time_s, value.bound_j)],
        _seconds_axis(value.time_s),
        _Axis(most, f" {unit}", low, float(value.energy_j.max())),
    )


@figures.register
def _(value: Frontier) -> list[Figure]:
    return [frontier_figure(value)]


@line.register
def _(value: FleetHistory) -> str:
    done = value.completion_s[np.isfinite(value.completion_s)]
    mean = f", mean completion {format_seconds(float(done.mean()))}" if len(done) else ""
    return (
        f"FleetHistory {value.trace} under {value.policy} ({value.origin}): {len(value)} jobs on "
        f"{value.num_gpus} GPUs{mean}"
    )


@rows.register
def _(value: FleetHistory) -> list[Row]:
    done = value.completion_s[np.isfinite(value.completion_s)]
    table: list[Row] = [
        {"": "jobs", "value": len(value)},
        {"": "not finished", "value": value.unfinished},
        {"": "preemptions", "value": int(value.preemptions.sum())},
        {"": "migrations", "value": int(value.migrations.sum())},
    ]
    if len(done):
        table += [
            {"": name, "value": format_seconds(float(np.quantile(done, share)))}
            for name, share in (("median completion", 0.5), ("99th percentile", 0.99))
        ]
    return table


@picture.register
def _(value: FleetHistory) -> str:
    done = np.sort(value.completion_s[np.isfinite(value.completion_s)])
    if not len(done):
        return ""
    share = np.arange(len(done) + 1) / len(value)  # jobs that did not end count
    done = np.concatenate([[0.0], done])
    return _done_curves([("jobs", done, share)])


def _done_curves(curves: Sequence[tuple[str, Array, Array]]) -> str:
    return _curves(
        "share of jobs done within a time of their arrival",
        curves,
        _seconds_axis(np.concatenate([[0.0], *(x for _, x, _ in curves)])),
        _Axis(0.01, " %", 0.0, 1.0),
    )


@figures.register
def _(value: FleetHistory) -> list[Figure]:
    return fleet_figures([run_of(value)])[1:]


@picture.register
def _(value: tuple) -> str:  # type: ignore[type-arg]  # singledispatch takes no parameters
    """Completion times of several runs of a fleet, over one another."""
    return _done_curves([(line.name, line.x * 3600, line.y) for line in completion_times(value)])


@figures.register
def _(value: tuple) -> list[Figure]:  # type: ignore[type-arg]  # likewise
    return fleet_figures(value)[1:]


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis of curves: its unit as a number and as what follows numbers, and its two ends."""

    factor: float
    unit: str
    low: float
    high: float

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield round values on the axis, each with its words."""
        low, high = self.low / self.factor, self.high / self.factor
        raw = max((high - low) / 5, 1e-12)
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * times for times in (1, 2, 5, 10) if power * times >= raw * (1 - 1e-9))
        for at in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
            yield at * step * self.factor, f"{float(f'{at * step:.9g}'):g}{self.unit}"

    def share(self, value: float) -> float:
        """Return where a value lies between the ends, from 0 to 1."""
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5


def _seconds_axis(values: Array) -> _Axis:
    factor, unit = (3600.0, " h") if float(values.max()) >= 7200 else (1.0, " s")
    return _Axis(factor, unit, float(values.min()), float(values.max()))


def _curves(
    title: str, curves: Sequence[tuple[str, Array, Array]], across: _Axis, up: _Axis
) -> str:
    """Return lines over two axes as SVG, with their names above."""
    left, top, right, bottom = 90.0, 62.0, _WIDTH - 20.0, 280.0

    def place(x: float, y: float) -> tuple[float, float]:
        return left + across.share(x) * (right - left), bottom - up.share(y) * (bottom - top)

    parts = [text_at(8, 20, title, "title")]
    for value, words in up.ticks():
        y = place(across.low, value)[1]
        parts += [line_between(left, y, right, y, "grid"), text_at(left - 6, y + 4, words, "right")]
    for value, words in across.ticks():
        x = place(value, up.low)[0]
        parts.append(line_between(x, bottom, x, bottom + 4, "grid"))
        parts.append(text_at(x, bottom + 18, words, "middle"))
    begin = left
    for index, (name, xs, ys) in enumerate(curves):
        step = max(1, len(xs) // 400)
        kept = [*range(0, len(xs), step), len(xs) - 1]
        points = " ".join(
            f"{a:.1f},{b:.1f}" for a, b in (place(float(xs[at]), float(ys[at])) for at in kept)
        )
        dashed = ' stroke-dasharray="6 4"' if index % 2 else ""
        stroke = f'stroke="{_colour(index)}" stroke-width="2"{dashed}/>'
        parts.append(f'<polyline points="{points}" fill="none" {stroke}')
        if begin + 30 + 7 * len(name) < right:
            parts.append(f'<path d="M{begin:.0f} 42h22" {stroke}')
            parts.append(text_at(begin + 28, 46, name))
        begin += 46 + 7 * len(name)
    return _svg(bottom + 34, title, parts)
