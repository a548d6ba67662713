"""Panels of lines as one SVG file: what a study of a fleet found, a diagram below the other."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from partita.fleet.study.panels import Line, Panel
from partita.report.svg_parts import line, number, opening, plain, text_at

_WIDTH, _PANEL = 900, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 690.0, 56.0, 270.0
_HEAD = 34.0
COLOURS = (
    *("#3273c4", "#d0752f", "#2e8b57", "#d64545"),
    *("#7a5bb5", "#8a6d3b", "#3aa6a6", "#c2528b"),
)
_STYLE = """
text { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #747a83; }
.title { font-size: 15px; font-weight: 600; }
.panel { font-size: 13px; font-weight: 600; }
.right { text-anchor: end; }
.middle { text-anchor: middle; }
.grid { stroke: #8b9099; stroke-opacity: .3; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
"""


def fleet_svg(panels: Sequence[Panel], *, title: str) -> str:
    """Return panels as a standalone SVG file.

    Args:
        panels: The diagrams, from the top down.
        title: Stands above all of them.
    """
    parts = opening(_WIDTH, _HEAD + _PANEL * len(panels), title, _STYLE)
    parts.append(text_at(8, 20, title, "title"))
    names = dict.fromkeys(each.name for panel in panels for each in panel.lines)
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    for index, panel in enumerate(panels):
        parts.append(f'<g transform="translate(0 {number(_HEAD + index * _PANEL)})">')
        parts += _drawn(panel, colours)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _drawn(panel: Panel, colours: Mapping[str, str]) -> Iterator[str]:
    """Yield one diagram in a frame of its own."""
    low, high = _x_range(panel)
    top = 1.0 if panel.percent else _ticks(max(_highest(panel.lines), 1e-9))[-1]

    def across(value: float) -> float:
        if panel.logarithmic:
            share = math.log(max(value, low) / low) / math.log(high / low)
        else:
            share = (value - low) / (high - low)
        return _LEFT + share * (_RIGHT - _LEFT)

    def up(value: float) -> float:
        return _BOTTOM - value / top * (_BOTTOM - _TOP)

    yield text_at(8, 20, panel.title, "panel")
    ticks = (
        _powers(low, high) if panel.logarithmic else [t for t in _ticks(high) if low <= t <= high]
    )
    for tick in ticks:
        yield line(across(tick), _TOP, across(tick), _BOTTOM + 4, "grid")
        yield text_at(across(tick), _BOTTOM + 18, f"{tick:g}", "middle")
    for tick in _ticks(top):
        words = f"{100 * tick:g} %" if panel.percent else f"{tick:g}"
        yield line(_LEFT - 4, up(tick), _RIGHT, up(tick), "grid")
        yield text_at(_LEFT - 8, up(tick) + 4, words, "right")
    yield text_at((_LEFT + _RIGHT) / 2, _BOTTOM + 38, panel.x_label, "middle")
    yield text_at(8, _TOP - 14, panel.y_label)
    for index, each in enumerate(panel.lines):
        colour, y = colours[each.name], _TOP + 10 + 20 * index
        yield _path(each, colour, across, up)
        yield f'<path class="curve" stroke="{colour}" d="M{number(_RIGHT + 16)} {number(y)}h22"/>'
        yield text_at(_RIGHT + 44, y + 4, each.name)


def _path(
    each: Line, colour: str, across: Callable[[float], float], up: Callable[[float], float]
) -> str:
    places = [(across(x), up(y)) for x, y in zip(each.x.tolist(), each.y.tolist(), strict=True)]
    words = [f"M{number(places[0][0])} {number(places[0][1])}"]
    for x, y in places[1:]:
        words.append(f"H{number(x)}V{number(y)}" if each.stepped else f"L{number(x)} {number(y)}")
    tip = f"<title>{plain(each.name)}</title>"
    return f'<path class="curve" stroke="{colour}" d="{"".join(words)}">{tip}</path>'


def _highest(lines: Sequence[Line]) -> float:
    return max((float(each.y.max()) for each in lines if len(each.y)), default=0.0)


def _x_range(panel: Panel) -> tuple[float, float]:
    """Return where the x axis begins and ends; a logarithmic one at round values."""
    drawn = [each for each in panel.lines if len(each.x)]
    low = min((float(each.x.min()) for each in drawn), default=0.0)
    high = max((float(each.x.max()) for each in drawn), default=1.0)
    if panel.logarithmic:
        low = max(low, high * 1e-6, 1e-12)
        return 0.9 * low, 1.1 * high
    low = 0.0 if low < 0.5 * high else low
    return (low, high) if high > low else (low - 1, low + 1)


def _ticks(high: float) -> list[float]:
    """Return about six round values from 0 to one that is not below another."""
    raw = high / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * digit for digit in (1, 2, 2.5, 5, 10) if power * digit >= raw * 0.999)
    return [step * index for index in range(math.ceil(high / step - 1e-9) + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Return round values of a logarithmic axis."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits = (1, 2, 5) if last - first <= 4 else (1,)
    values = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
    return [value for value in values if low <= value <= high]
