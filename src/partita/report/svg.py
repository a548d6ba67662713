"""A Timeline as one SVG file: a lane per device, transfers between them, memory below.

Colours have a middle tone and there is no background, so that the picture reads on light and dark
pages alike. Cells narrower than a pixel are drawn as columns of what fills them best, so the file
stays small whatever the timeline.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np

from partita.core.columns import Array
from partita.core.program import FIRST_COLLECTIVE, Kind
from partita.core.timeline import Timeline
from partita.report.lanes import (
    MEANING,
    Cell,
    cell_numbers,
    cell_of,
    compute_rows,
    dominant_cells,
)
from partita.report.svg_frame import (
    STYLE,
    Frame,
    axis,
    backgrounds,
    frame_of,
    line,
    number,
    opening,
    plain,
    rect,
    text_at,
)
from partita.report.trace import KIND_LABELS, ORIGIN_LABELS
from partita.report.transfers import transfers
from partita.units import format_bytes, format_seconds

MAX_LANES = 48
MAX_LINES = 4000

_COLOURS: Mapping[Cell, str] = {
    Cell.FORWARD: "#2f74c0",
    Cell.BACKWARD: "#cf7d22",
    Cell.WEIGHT: "#3a9e88",
    Cell.RECOMPUTE: "#86690c",
    Cell.LOAD: "#8d95a5",
    Cell.UPDATE: "#a8456f",
    Cell.MIXED: "#8a7390",
    Cell.COLLECTIVE: "#d4504a",
    Cell.TRANSFER: "#8b9099",
}
"""As in reports (``static/colours.js``)."""
_LIGHT = frozenset((Cell.BACKWARD, Cell.WEIGHT, Cell.LOAD))
"""Cells on which numbers are dark."""


def timeline_svg(
    timeline: Timeline,
    *,
    title: str = "",
    width: int = 1200,
    max_lanes: int = MAX_LANES,
    memory: bool = True,
) -> str:
    """Return a timeline as a standalone SVG file.

    Args:
        timeline: What to draw.
        title: Stands before the origin of the timeline, such as the name of the plan.
        width: Of the picture in pixels, at least 400.
        max_lanes: Devices beyond so many are left out, and a line says how many.
        memory: Whether to draw the memory of each device against its limit, where it is known.
    """
    frame = frame_of(timeline, max(400, width), max_lanes)
    used: set[Cell] = set()
    body = [*axis(frame), *backgrounds(timeline, frame), *_transfer_lines(timeline, frame, used)]
    for index, device in enumerate(frame.devices):
        body += _lane(timeline, frame, index, device, used)
    height = frame.bottom + 26
    if memory and len(timeline.memory_device):
        curves = dataclasses.replace(
            frame, top=height + 34, step=frame.step + 4, lane=frame.lane + 4
        )
        body += [*backgrounds(timeline, curves), *_memory(timeline, curves)]
        height = curves.bottom + 10
    head = _head(timeline, frame, title, used)
    begin = opening(frame.width, height, _heading(timeline, title), STYLE)
    return "\n".join([*begin, *head, *body, "</svg>", ""])


def _heading(timeline: Timeline, title: str) -> str:
    origin = ORIGIN_LABELS[timeline.origin]
    return f"{title} ({origin})" if title else origin[:1].upper() + origin[1:]


def _head(timeline: Timeline, frame: Frame, title: str, used: set[Cell]) -> Iterator[str]:
    """Yield the title, the length of the step and the legend."""
    yield text_at(8, 20, _heading(timeline, title), "title")
    facts = [format_seconds(timeline.makespan_s), f"{len(timeline.devices):,} devices"]
    if not math.isnan(timeline.period_s):
        facts.insert(1, f"{format_seconds(timeline.period_s)} from step to step")
    sends = len(transfers(timeline).send)
    if sends > MAX_LINES:
        facts.append(f"{sends:,} transfers, not drawn")
    yield text_at(8, 39, ", ".join(facts))
    words = {cell: "transfer" if cell is Cell.TRANSFER else MEANING[cell] for cell in sorted(used)}
    room = sum(31 + 6.6 * len(meaning) for meaning in words.values())
    x = frame.left if frame.left + room < frame.right else 8.0
    for cell, meaning in words.items():
        if cell is Cell.TRANSFER:
            yield line(x, 58, x + 10, 50, "transfer")
        else:
            yield rect(x, 49, 10, 10, f'rx="2" fill="{_COLOURS[cell]}"/>')
        yield text_at(x + 15, 58, meaning)
        x += 31 + 6.6 * len(meaning)
    yield text_at(frame.right + 8, 58, "busy")


def _lane(
    timeline: Timeline, frame: Frame, index: int, device: int, used: set[Cell]
) -> Iterator[str]:
    """Yield what a device does: its cells, its collectives and how busy it is."""
    y = frame.y(index)
    busy = f"{timeline.utilisation[device]:.0%}"
    yield text_at(frame.right + 8, y + frame.lane / 2 + 4, busy)
    rows = compute_rows(timeline, device)
    x = frame.x(timeline.start_s[rows])
    size = frame.x(timeline.end_s[rows]) - x
    seen = size > 0
    rows, x, size = rows[seen], x[seen], size[seen]
    if len(size) and np.median(size) < 2:
        # Most cells are too narrow to be drawn one by one; the few wide ones go on top.
        yield from _columns(timeline, frame, index, device, used)
        rows, x, size = rows[size >= 3], x[size >= 3], size[size >= 3]
    yield from _cells(timeline, frame, y, (rows, x, np.maximum(size, 0.5)), used)
    joint = np.flatnonzero((timeline.device == device) & (timeline.kind >= FIRST_COLLECTIVE))
    x = frame.x(timeline.start_s[joint])
    size = frame.x(timeline.end_s[joint]) - x
    for begin, length in zip(x[size > 0].tolist(), size[size > 0].tolist(), strict=True):
        used.add(Cell.COLLECTIVE)
        fill = f'fill="{_COLOURS[Cell.COLLECTIVE]}"/>'
        yield rect(begin, y + frame.lane - 4, max(length, 0.5), 4, fill)


def _cells(
    timeline: Timeline,
    frame: Frame,
    y: float,
    places: tuple[Array, Array, Array],
    used: set[Cell],
) -> Iterator[str]:
    """Yield a rectangle for each row, with its number where it fits."""
    rows, x, size = places
    _, numbers = cell_numbers(timeline)
    columns = (rows, cell_of(timeline, rows), x, size)
    for row, sort, begin, length in zip(*(part.tolist() for part in columns), strict=True):
        cell, label = Cell(sort), str(numbers[row])
        used.add(cell)
        gap = min(0.8, length * 0.2)
        tip = f"<title>{plain(_described(timeline, row))}</title></rect>"
        fill = f'rx="1.5" fill="{_COLOURS[cell]}">{tip}'
        yield rect(begin, y, length - gap, frame.lane, fill)
        if numbers[row] >= 0 and cell is not Cell.UPDATE and length >= 6 + 6.2 * len(label):
            style = "dark number" if cell in _LIGHT else "number"
            yield text_at(begin + length / 2, y + frame.lane / 2 + 4, label, style)


def _described(timeline: Timeline, row: int) -> str:
    parts = [KIND_LABELS[Kind(int(timeline.kind[row]))]]
    if timeline.stage[row] >= 0:
        parts.append(f"stage {timeline.stage[row]}")
    if timeline.microbatch[row] >= 0:
        parts.append(f"microbatch {timeline.microbatch[row]}")
    begin, end = (format_seconds(float(time[row])) for time in (timeline.start_s, timeline.end_s))
    return f"{' '.join(parts)}: {begin} to {end}"


def _columns(
    timeline: Timeline, frame: Frame, index: int, device: int, used: set[Cell]
) -> Iterator[str]:
    """Yield what fills the columns of a lane best, in runs of one sort, a path for each sort.

    Cells a little narrower than a pixel would make stripes with columns of a pixel, so that a
    column holds about three cells at least.
    """
    rows = compute_rows(timeline, device)
    spent_s = timeline.end_s[rows] - timeline.start_s[rows]
    typical_s = float(np.median(spent_s[spent_s > 0]))
    count = int(min(frame.span, frame.makespan_s / (3 * typical_s) + 1))
    edges = np.linspace(0.0, frame.makespan_s, count + 1)
    sorts = dominant_cells(timeline, device, edges)
    begins = np.flatnonzero(np.r_[True, sorts[1:] != sorts[:-1]])
    ends = np.append(begins[1:], count)
    left = frame.left + begins * (frame.span / count)
    length = (ends - begins) * (frame.span / count)
    y, height = number(frame.y(index)), number(frame.lane)
    for sort in np.unique(sorts[sorts < Cell.COLLECTIVE]).tolist():
        used.add(Cell(sort))
        same = sorts[begins] == sort
        runs = (
            f"M{number(x)} {y}h{number(size)}v{height}h{number(-size)}z"
            for x, size in zip(left[same].tolist(), length[same].tolist(), strict=True)
        )
        yield f'<path d="{"".join(runs)}" fill="{_COLOURS[Cell(sort)]}"/>'


def _transfer_lines(timeline: Timeline, frame: Frame, used: set[Cell]) -> Iterator[str]:
    """Yield a line for each message between two lanes, unless they are too many to be seen."""
    send = transfers(timeline).send
    if len(send) > MAX_LINES:
        return
    lane_of = {device: index for index, device in enumerate(frame.devices)}
    source, target = timeline.device[send].tolist(), timeline.peer[send].tolist()
    begin = frame.x(timeline.start_s[send]).tolist()
    end = frame.x(timeline.end_s[send]).tolist()
    lines = [
        (lane_of[a], lane_of[b], x1, x2)
        for a, b, x1, x2 in zip(source, target, begin, end, strict=True)
        if a in lane_of and b in lane_of and a != b
    ]
    for a, b, x1, x2 in lines:
        used.add(Cell.TRANSFER)
        down = b > a
        y1 = frame.y(a) + (frame.lane if down else 0)
        y2 = frame.y(b) + (0 if down else frame.lane)
        yield line(x1, y1, x2, y2, "transfer")


def _memory(timeline: Timeline, frame: Frame) -> Iterator[str]:
    """Yield the curves of memory, each against its limit."""
    highest = float(timeline.peak_bytes.max()) or 1.0
    limited = bool(np.isfinite(timeline.limit_bytes).any())
    yield text_at(frame.left, frame.top - 10, "memory and its limit" if limited else "memory")
    yield text_at(frame.right + 8, frame.top - 10, "peak")
    for index, device in enumerate(frame.devices):
        limit, peak = float(timeline.limit_bytes[device]), float(timeline.peak_bytes[device])
        base = frame.y(index) + frame.lane
        full = 1.08 * max(peak, limit if np.isfinite(limit) else highest)
        yield _curve(timeline, frame, device, base, frame.lane / full)
        label = format_bytes(peak)
        if np.isfinite(limit):
            at = base - frame.lane * limit / full
            yield line(frame.left, at, frame.right, at, "limit")
            label += f" of {format_bytes(limit)}"
        style = "over" if peak > limit else ""
        yield text_at(frame.right + 8, base - frame.lane / 2 + 4, label, style)


def _curve(timeline: Timeline, frame: Frame, device: int, base: float, scale: float) -> str:
    """Return the memory of a device as steps; a pixel shows the largest value within it."""
    rows = timeline.memory_device == device
    time_s, level = timeline.memory_s[rows], timeline.memory_bytes[rows]
    count = int(frame.span)
    edges = np.linspace(0.0, frame.makespan_s, count + 1)
    before = np.searchsorted(time_s, edges[:-1], side="right") - 1
    top = (
        np.where(before >= 0, level[np.maximum(before, 0)], 0.0) if len(level) else np.zeros(count)
    )
    inside = np.clip(np.searchsorted(edges, time_s, side="right") - 1, 0, count - 1)
    np.maximum.at(top, inside, level)
    begins = np.flatnonzero(np.r_[True, top[1:] != top[:-1]])
    ends = np.append(begins[1:], count)
    pixel = frame.span / count
    steps = [
        f"V{number(base - value * scale)}H{number(frame.left + end * pixel)}"
        for value, end in zip(top[begins].tolist(), ends.tolist(), strict=True)
    ]
    ground = number(base)
    outline = f"M{number(frame.left)} {ground}{''.join(steps)}V{ground}z"
    return f'<path class="memory" d="{outline}"/>'
