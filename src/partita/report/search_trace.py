"""The best value of a search over time, as CSV and as one SVG file.

The picture is a curve of steps: a value holds until a better one is found. An axis is logarithmic
where what it shows spans more than a factor of 20, so that the end of a search is seen as well as
its beginning. Colours are those of the timelines: a middle tone and no background.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from partita.errors import InvalidInputError
from partita.report.svg_parts import line, number, opening, text_at

Points: TypeAlias = Sequence[tuple[float, float]]
"""Seconds and value of each new best, in their order."""

HEADER = "seconds,value"
_SPAN = 20.0
_WIDTH, _HEIGHT = 900, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 90.0, 870.0, 56.0, 372.0
_STYLE = """
text { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #747a83; }
.title { font-size: 15px; font-weight: 600; }
.right { text-anchor: end; }
.middle { text-anchor: middle; }
.grid { stroke: #8b9099; stroke-opacity: .3; }
.curve { fill: none; stroke: #3273c4; stroke-width: 2; }
.best { fill: #3273c4; }
"""


def search_csv(points: Points) -> str:
    """Return the points as CSV, a line each, digits enough to read them back exactly."""
    return "\n".join([HEADER, *(f"{seconds!r},{value!r}" for seconds, value in points), ""])


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where values lie on a line of pixels.

    Attributes:
        low: Value at ``begin``.
        high: Value at ``end``.
        begin: First pixel.
        end: Last pixel.
        is_log: Whether distances are ratios.
    """

    low: float
    high: float
    begin: float
    end: float
    is_log: bool

    def at(self, value: float) -> float:
        """Return where a value lies."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Return round values on the axis, about six or, logarithmic, 1, 2 and 5 of each power."""
        if not self.is_log:
            raw = (self.high - self.low) / 6
            power = 10.0 ** math.floor(math.log10(raw))
            step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= raw * 0.999)
            first, last = math.ceil(self.low / step), math.floor(self.high / step)
            return [k * step for k in range(first, last + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        digits = (1, 2, 5) if len(powers) <= 4 else (1,)
        every = max(1, len(powers) // 8)
        marks = [digit * 10.0**power for power in powers[::every] for digit in digits]
        return [mark for mark in marks if self.low <= mark <= self.high]


def search_svg(points: Points, *, title: str = "", unit: str = "") -> str:
    """Return the best value over time as a standalone SVG file.

    Args:
        points: Seconds and value of each new best.
        title: What was searched.
        unit: Unit of the values.

    Raises:
        InvalidInputError: There is no point.
    """
    if not points:
        raise InvalidInputError("the search recorded no value, so there is nothing to draw")
    time, value = _time_axis(points), _value_axis(points)
    heading = f"{title}: best value over time" if title else "Best value over time"
    return "\n".join(
        [
            *opening(_WIDTH, _HEIGHT, heading, _STYLE),
            text_at(8, 20, heading, "title"),
            text_at(8, 39, _summary(points, unit)),
            *_grid(time, value, unit),
            *_curve(points, time, value),
            "</svg>",
            "",
        ]
    )


def _time_axis(points: Points) -> _Axis:
    times = [seconds for seconds, _ in points]
    is_log = times[0] > 0 and times[-1] > _SPAN * times[0]
    low = times[0] if is_log else 0.0
    return _Axis(low, max(times[-1], 1e-9), _LEFT, _RIGHT, is_log)


def _value_axis(points: Points) -> _Axis:
    high, low = points[0][1], points[-1][1]
    is_log = low > 0 and high > _SPAN * low
    if is_log:
        return _Axis(low / 1.1, high * 1.1, _BOTTOM, _TOP, is_log)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return _Axis(low - margin, high + margin, _BOTTOM, _TOP, is_log)


def _summary(points: Points, unit: str) -> str:
    first, last = points[0], points[-1]
    shown = f" {unit}" if unit else ""
    found = f"{len(points)} values, from {first[1]:.6g} to {last[1]:.6g}{shown}"
    return f"{found}, the last after {last[0]:.3g} s"


def _grid(time: _Axis, value: _Axis, unit: str) -> Iterator[str]:
    for tick in time.ticks():
        x = time.at(tick)
        yield line(x, _TOP, x, _BOTTOM + 4, "grid")
        yield text_at(x, _BOTTOM + 18, f"{tick:.4g} s", "middle")
    for tick in value.ticks():
        y = value.at(tick)
        yield line(_LEFT - 4, y, _RIGHT, y, "grid")
        yield text_at(_LEFT - 8, y + 4, f"{tick:.6g}", "right")
    yield text_at((_LEFT + _RIGHT) / 2, _BOTTOM + 38, "seconds of search", "middle")
    if unit:
        yield text_at(_LEFT - 8, _TOP - 8, unit, "right")


def _curve(points: Points, time: _Axis, value: _Axis) -> Iterator[str]:
    places = [(time.at(seconds), value.at(best)) for seconds, best in points]
    steps = "".join(f"H{number(x)}V{number(y)}" for x, y in places[1:])
    x, y = places[0]
    yield f'<path class="curve" d="M{number(x)} {number(y)}{steps}H{number(_RIGHT)}"/>'
    for (x, y), (seconds, best) in zip(places, points, strict=True):
        tip = f"<title>{best:.9g} after {seconds:.4g} s</title>"
        yield f'<circle class="best" cx="{number(x)}" cy="{number(y)}" r="3">{tip}</circle>'
