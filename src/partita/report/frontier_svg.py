"""A frontier as one SVG file: energy of a step against its time.

Shown are the realised points, the bound below which no clocks get, every clock at its highest, the
fastest step T_min, the step of least energy T*, and, where one was chosen, the chosen point. The
title says where the joules come from.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from partita.core.energy import EnergyOrigin, Frontier
from partita.report.lanes import axis_ticks
from partita.report.svg_parts import line, number, opening, plain, text_at
from partita.units import format_joules, format_seconds, joule_unit

_WIDTH, _HEIGHT = 900, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 92.0, 868.0, 100.0, 428.0
_STYLE = """
text { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #747a83; }
.title { font-size: 15px; font-weight: 600; }
.right { text-anchor: end; }
.middle { text-anchor: middle; }
.grid { stroke: #8b9099; stroke-opacity: .3; }
.mark { stroke: #8b9099; stroke-dasharray: 4 3; }
.curve { fill: none; stroke: #3273c4; stroke-width: 2; }
.bound { fill: none; stroke: #2e8b57; stroke-width: 1.5; stroke-dasharray: 5 3; }
.limit { stroke: #2e8b57; stroke-width: 1.5; stroke-dasharray: 5 3; }
.point { fill: #3273c4; }
.allmax { fill: #d64545; }
.chosen { fill: none; stroke: #d0752f; stroke-width: 3; }
"""

ORIGINS = {
    EnergyOrigin.MEASURED: "measured",
    EnergyOrigin.PUBLISHED: "from a profile file",
    EnergyOrigin.MODELLED: "modelled, not measured",
}
"""Where the joules come from, for people."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where values lie on a line of pixels.

    Attributes:
        low: Value at ``begin``.
        high: Value at ``end``.
        begin: First pixel.
        end: Last pixel.
        scale: How much one of ``unit`` is.
        unit: What the ticks are written in.
    """

    low: float
    high: float
    begin: float
    end: float
    scale: float
    unit: str

    def at(self, value: float) -> float:
        """Return where a value lies."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self) -> list[tuple[float, str]]:
        """Return about six round values, and how they are written."""
        raw = (self.high - self.low) / self.scale / 6
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= raw * 0.999)
        ends = (self.low / self.scale / step, self.high / self.scale / step)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return [
            (k * step * self.scale, f"{k * step:.{decimals}f} {self.unit}")
            for k in range(math.ceil(ends[0]), math.floor(ends[1]) + 1)
        ]


def frontier_svg(frontier: Frontier, *, title: str = "", chosen: int | None = None) -> str:
    """Return a frontier as a standalone SVG file.

    Args:
        frontier: What to draw.
        title: Stands before the origin of the joules, such as the name of the plan.
        chosen: A point to be marked.
    """
    times = (*frontier.time_s, frontier.all_max_s, frontier.fastest_s)
    time = _axis(times, (_LEFT, _RIGHT), axis_ticks(max(times), 5)[1:])
    joules = (*frontier.energy_j, *frontier.bound_j, frontier.all_max_j)
    energy = _axis(joules, (_BOTTOM, _TOP), joule_unit(max(joules)))
    heading = f"{title or 'Time and energy of a step'} ({ORIGINS[frontier.origin]})"
    return "\n".join(
        [
            *opening(_WIDTH, _HEIGHT, heading, _STYLE),
            text_at(8, 20, heading, "title"),
            text_at(8, 39, _summary(frontier)),
            *_legend(frontier, chosen),
            *_grid(time, energy),
            *_marks(frontier, time),
            *_curves(frontier, time, energy),
            *_chosen(frontier, chosen, time, energy),
            "</svg>",
            "",
        ]
    )


def _axis(values: Sequence[float], pixels: tuple[float, float], unit: tuple[float, str]) -> _Axis:
    low, high = float(min(values)), float(max(values))
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return _Axis(low - margin, high + margin, *pixels, *unit)


def _summary(frontier: Frontier) -> str:
    first, last = float(frontier.energy_j[0]), float(frontier.energy_j.min())
    top = frontier.all_max_j
    all_max = f"all clocks at their highest {format_joules(top)}"
    fastest = f"fastest {format_joules(first)} ({first / top - 1:+.1%})"
    least = f"least {format_joules(last)} ({last / top - 1:+.1%})"
    gap = f"gap to the bound at most {float(np.max(frontier.gap)):.2%}"
    return f"{all_max} · {fastest} · {least} · {gap}"


def _legend(frontier: Frontier, chosen: int | None) -> Iterator[str]:
    x = _LEFT
    entries = [
        ('<circle class="point" cx="{middle}" cy="58" r="4"/>', f"{len(frontier)} realised points"),
        ('<path class="bound" d="M{x} 58h18"/>', "no clocks need less"),
        ('<circle class="allmax" cx="{middle}" cy="58" r="5"/>', "all clocks at their highest"),
    ]
    if chosen is not None:
        entries.append(('<circle class="chosen" cx="{middle}" cy="58" r="6"/>', "chosen"))
    for shape, words in entries:
        yield shape.replace("{x}", number(x)).replace("{middle}", number(x + 12))
        yield text_at(x + 24, 62, words)
        x += 48 + 6.4 * len(words)


def _grid(time: _Axis, energy: _Axis) -> Iterator[str]:
    for tick, words in time.ticks():
        x = time.at(tick)
        yield line(x, _TOP, x, _BOTTOM + 4, "grid")
        yield text_at(x, _BOTTOM + 18, words, "middle")
    for tick, words in energy.ticks():
        y = energy.at(tick)
        yield line(_LEFT - 4, y, _RIGHT, y, "grid")
        yield text_at(_LEFT - 8, y + 4, words, "right")
    yield text_at((_LEFT + _RIGHT) / 2, _BOTTOM + 40, "time of a step", "middle")
    yield text_at(8, _TOP - 10, "energy of a step")


def _marks(frontier: Frontier, time: _Axis) -> Iterator[str]:
    for name, value in (("T_min", frontier.fastest_s), ("T*", frontier.best_s)):
        if time.low <= value <= time.high:
            x = time.at(value)
            yield line(x, _TOP, x, _BOTTOM, "mark")
            yield text_at(x + 4, _BOTTOM - 6, name)


def _curves(frontier: Frontier, time: _Axis, energy: _Axis) -> Iterator[str]:
    times = [time.at(value) for value in frontier.time_s.tolist()]
    for style, column in (("bound", frontier.bound_j), ("curve", frontier.energy_j)):
        places = zip(times, (energy.at(value) for value in column.tolist()), strict=True)
        drawn = "L".join(f"{number(x)} {number(y)}" for x, y in places)
        yield f'<path class="{style}" d="M{drawn}"/>'
    for index, x in enumerate(times):
        seconds, joules = float(frontier.time_s[index]), float(frontier.energy_j[index])
        tip = f"point {index}: {format_seconds(seconds)}, {format_joules(joules)}"
        yield _dot("point", x, energy.at(joules), 3, tip)
    tip = f"{format_seconds(frontier.all_max_s)}, {format_joules(frontier.all_max_j)}"
    yield _dot("allmax", time.at(frontier.all_max_s), energy.at(frontier.all_max_j), 5, tip)


def _chosen(frontier: Frontier, chosen: int | None, time: _Axis, energy: _Axis) -> Iterator[str]:
    if chosen is not None:
        x = time.at(float(frontier.time_s[chosen]))
        y = energy.at(float(frontier.energy_j[chosen]))
        yield _dot("chosen", x, y, 7, f"chosen: point {chosen}")


def _dot(style: str, x: float, y: float, radius: float, tip: str) -> str:
    place = f'cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"'
    return f'<circle class="{style}" {place}><title>{plain(tip)}</title></circle>'
