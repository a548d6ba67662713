"""A step with its clocks as one SVG file: a lane per device, cells coloured by clock.

Low clocks are blue, the highest red; a cell without a known clock is grey. Forward cells fill the
upper part of their lane and backward cells the lower, so that both are told apart without colour.
Where most cells are narrower than two pixels, columns show the mean clock of what runs there.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from partita.core.columns import Array
from partita.core.program import Kind
from partita.core.timeline import Timeline
from partita.report.lanes import Cell, cell_numbers, cell_of, compute_rows
from partita.report.svg_frame import (
    STYLE,
    Frame,
    axis,
    backgrounds,
    frame_of,
    number,
    opening,
    plain,
    rect,
    text_at,
)
from partita.report.trace import KIND_LABELS
from partita.units import format_joules, format_seconds

MAX_LANES = 48
_SCALE = ("#2b5fb4", "#3a93b5", "#56a36a", "#b79a2a", "#cf7a2e", "#c8443f")
"""From the lowest to the highest clock, tones between them mixed."""
_UNKNOWN = "#8b9099"
_NARROW = 2.0
_UPPER = (Cell.FORWARD, Cell.RECOMPUTE, Cell.LOAD)
_SHARE = 0.82
"""Share of a lane's height that a cell fills."""


def clock_svg(
    timeline: Timeline,
    *,
    title: str = "",
    facts: Sequence[str] = (),
    width: int = 1200,
    max_lanes: int = MAX_LANES,
) -> str:
    """Return a step coloured by clock as a standalone SVG file.

    Args:
        timeline: A step with the clock of its compute instructions.
        title: Such as the name of the plan, with where its joules come from.
        facts: What the line below the title says, after the length of the step.
        width: Of the picture in pixels, at least 400.
        max_lanes: Devices beyond so many are left out, and a line says how many.
    """
    frame = frame_of(timeline, max(400, width), max_lanes)
    known = timeline.clock_mhz[~np.isnan(timeline.clock_mhz)]
    ends = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    body = [*axis(frame), *backgrounds(timeline, frame)]
    for index, device in enumerate(frame.devices):
        body += _lane(timeline, frame, index, device, ends)
    heading = title or "Clocks of a step"
    words = [format_seconds(timeline.makespan_s), *facts]
    return "\n".join(
        [
            *opening(frame.width, frame.bottom + 26, heading, STYLE),
            text_at(8, 20, heading, "title"),
            text_at(8, 39, " · ".join(words)),
            *_legend(frame, ends, unknown=bool(np.isnan(_clocks(timeline)).any())),
            *body,
            "</svg>",
            "",
        ]
    )


def colour_of(clock: float, ends: tuple[float, float]) -> str:
    """Return the colour of a clock between the lowest and the highest; grey where not known."""
    if math.isnan(clock):
        return _UNKNOWN
    share = (clock - ends[0]) / (ends[1] - ends[0]) if ends[1] > ends[0] else 1.0
    place = min(max(share, 0.0), 1.0) * (len(_SCALE) - 1)
    below = min(int(place), len(_SCALE) - 2)
    mixed = (
        round(int(_SCALE[below][i : i + 2], 16) * (1 - place + below))
        + round(int(_SCALE[below + 1][i : i + 2], 16) * (place - below))
        for i in (1, 3, 5)
    )
    return "#" + "".join(f"{min(part, 255):02x}" for part in mixed)


def _clocks(timeline: Timeline) -> Array:
    """Return the clocks of all compute rows that take time."""
    rows = [compute_rows(timeline, device) for device in range(len(timeline.devices))]
    return timeline.clock_mhz[np.concatenate(rows)] if rows else np.zeros(0)


def _legend(frame: Frame, ends: tuple[float, float], *, unknown: bool) -> Iterator[str]:
    x = frame.left
    if ends[1] > 0:
        yield text_at(x, 58, f"{ends[0]:g} MHz")
        x += 12 + 7 * len(f"{ends[0]:g} MHz")
        steps = 24 if ends[1] > ends[0] else 1
        for step in range(steps):
            clock = ends[0] + (ends[1] - ends[0]) * (step + 0.5) / steps
            yield rect(x, 49, 6, 10, f'fill="{colour_of(clock, ends)}"/>')
            x += 6
        yield text_at(x + 6, 58, f"{ends[1]:g} MHz")
        x += 28 + 7 * len(f"{ends[1]:g} MHz")
    if unknown:
        yield rect(x, 49, 10, 10, f'rx="2" fill="{_UNKNOWN}"/>')
        yield text_at(x + 15, 58, "no clock of its own")
        x += 160
    yield text_at(x, 58, "forward above, backward below")
    yield text_at(frame.right + 2, 58, "mean MHz")


def _lane(
    timeline: Timeline, frame: Frame, index: int, device: int, ends: tuple[float, float]
) -> Iterator[str]:
    """Yield what a device does, and the mean of its clocks."""
    rows = compute_rows(timeline, device)
    spent = timeline.end_s[rows] - timeline.start_s[rows]
    clock = timeline.clock_mhz[rows]
    known = ~np.isnan(clock)
    if bool(known.any()):
        mean = float(np.average(clock[known], weights=spent[known]))
        yield text_at(frame.right + 8, frame.y(index) + frame.lane / 2 + 4, f"{mean:.0f}")
    x, size = frame.x(timeline.start_s[rows]), spent * (frame.span / frame.makespan_s)
    if len(size) and np.median(size) < _NARROW:
        yield from _columns(timeline, frame, index, rows, ends)
        return
    _, numbers = cell_numbers(timeline)
    columns = (rows, cell_of(timeline, rows), x, np.maximum(size, 0.5))
    for row, sort, begin, length in zip(*(part.tolist() for part in columns), strict=True):
        height = frame.lane * _SHARE
        top = frame.y(index) + (0 if Cell(sort) in _UPPER else frame.lane - height)
        fill = colour_of(float(timeline.clock_mhz[row]), ends)
        tip = f"<title>{plain(_described(timeline, row))}</title></rect>"
        gap = min(0.8, length * 0.2)
        yield rect(begin, top, length - gap, height, f'rx="1.5" fill="{fill}">{tip}')
        label = str(numbers[row])
        if numbers[row] >= 0 and length >= 6 + 6.2 * len(label):
            yield text_at(begin + length / 2, top + height / 2 + 4, label, "number")


def _described(timeline: Timeline, row: int) -> str:
    parts = [KIND_LABELS[Kind(int(timeline.kind[row]))]]
    if timeline.stage[row] >= 0:
        parts.append(f"stage {timeline.stage[row]}")
    if timeline.microbatch[row] >= 0:
        parts.append(f"microbatch {timeline.microbatch[row]}")
    begin, end = (format_seconds(float(time[row])) for time in (timeline.start_s, timeline.end_s))
    clock, energy = float(timeline.clock_mhz[row]), float(timeline.energy_j[row])
    facts = [f"{begin} to {end}"]
    facts += [] if math.isnan(clock) else [f"{clock:g} MHz"]
    facts += [] if math.isnan(energy) else [format_joules(energy)]
    return f"{' '.join(parts)}: {', '.join(facts)}"


def _columns(
    timeline: Timeline, frame: Frame, index: int, rows: Array, ends: tuple[float, float]
) -> Iterator[str]:
    """Yield the mean clock of columns of three pixels, runs of one colour together."""
    count = max(1, int(frame.span // 3))
    edges = np.linspace(0.0, frame.makespan_s, count + 1)
    clock = timeline.clock_mhz[rows]
    middle = (timeline.start_s[rows] + timeline.end_s[rows]) / 2
    place = np.clip(np.searchsorted(edges, middle, side="right") - 1, 0, count - 1)
    spent = np.where(np.isnan(clock), 0.0, timeline.end_s[rows] - timeline.start_s[rows])
    weight = np.bincount(place, weights=spent, minlength=count)
    total = np.bincount(place, weights=spent * np.nan_to_num(clock), minlength=count)
    width = frame.span / count
    filled = np.flatnonzero(np.bincount(place, minlength=count)).tolist()
    means = np.divide(total, weight, out=np.full(count, np.nan), where=weight > 0)
    colours = [colour_of(float(means[column]), ends) for column in filled]
    begin = 0
    for end in range(1, len(filled) + 1):
        if end < len(filled) and (
            filled[end] == filled[end - 1] + 1 and colours[end] == colours[begin]
        ):
            continue
        x = frame.left + filled[begin] * width
        size = (filled[end - 1] - filled[begin] + 1) * width
        shape = f"M{number(x)} {number(frame.y(index))}h{number(size)}v{number(frame.lane)}"
        yield f'<path d="{shape}h{number(-size)}z" fill="{colours[begin]}"/>'
        begin = end
