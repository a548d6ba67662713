"""A Sensitivity as one SVG file: samples per second over CPUs, a curve for each amount of memory.

Points that were measured are full, those that were filled in are hollow. The curves of less memory
are dashed: they are modelled.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from partita.core.columns import Array
from partita.core.fleet import Sensitivity
from partita.report.svg_parts import line, number, opening, plain, text_at
from partita.units import format_bytes

_WIDTH, _HEIGHT = 900, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 92.0, 700.0, 70.0, 384.0
_MAX_CURVES = 3
_COLOURS = ("#3273c4", "#2e8b57", "#d0752f")
_STYLE = """
text { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #747a83; }
.title { font-size: 15px; font-weight: 600; }
.right { text-anchor: end; }
.middle { text-anchor: middle; }
.grid { stroke: #8b9099; stroke-opacity: .3; }
.curve { fill: none; stroke-width: 2; }
"""


def sensitivity_svg(sensitivity: Sensitivity) -> str:
    """Return the speed of a job over CPUs and memory as a standalone SVG file."""
    samples = max(1, sensitivity.batch_size) * max(1, int(sensitivity.gpus[0]))
    rate = sensitivity.speed * (samples / sensitivity.iteration_s)
    top, widest = float(rate.max()) * 1.08, float(sensitivity.cpus.max())
    unit = "samples/s" if sensitivity.batch_size else "iterations/s"
    body = list(_grid(widest, top, unit))
    amounts = _amounts(sensitivity)
    for index, memory_bytes in enumerate(amounts):
        here = np.flatnonzero(sensitivity.memory_bytes == memory_bytes)
        here = here[np.argsort(sensitivity.cpus[here], kind="stable")]
        x = _LEFT + sensitivity.cpus[here] / widest * (_RIGHT - _LEFT)
        y = _BOTTOM - rate[here] / top * (_BOTTOM - _TOP)
        is_modelled = not sensitivity.measured[here].any()
        body += _curve(x, y, sensitivity.measured[here], _COLOURS[index], dashed=is_modelled)
        words = f"{format_bytes(memory_bytes)} a GPU" + (" (modelled)" if is_modelled else "")
        body.append(text_at(_RIGHT + 14, _TOP + 18 * index + 4, words))
        body.append(_dot(_RIGHT + 6, _TOP + 18 * index, _COLOURS[index], full=True))
    title = f"{sensitivity.name}: speed over CPUs"
    return "\n".join(
        [
            *opening(_WIDTH, _HEIGHT, title, _STYLE),
            text_at(8, 20, title, "title"),
            text_at(8, 39, f"{sensitivity.machine} · full: measured, hollow: filled in"),
            *body,
            "</svg>",
            "",
        ]
    )


def _amounts(sensitivity: Sensitivity) -> list[float]:
    """Return a few amounts of memory, the most first."""
    amounts = np.unique(sensitivity.memory_bytes)[::-1]
    chosen = np.linspace(0, len(amounts) - 1, min(_MAX_CURVES, len(amounts))).round()
    return [float(amounts[int(index)]) for index in chosen]


def _ticks(high: float) -> list[float]:
    """Return about six round values up to one."""
    raw = high / 6
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * digit for digit in (1, 2, 2.5, 5, 10) if power * digit >= raw * 0.999)
    return [step * index for index in range(int(high / step + 1e-9) + 1)]


def _grid(widest: float, top: float, unit: str) -> Iterator[str]:
    for tick in _ticks(widest):
        x = _LEFT + tick / widest * (_RIGHT - _LEFT)
        yield line(x, _TOP, x, _BOTTOM + 4, "grid")
        yield text_at(x, _BOTTOM + 18, f"{tick:g}", "middle")
    for tick in _ticks(top):
        y = _BOTTOM - tick / top * (_BOTTOM - _TOP)
        yield line(_LEFT - 4, y, _RIGHT, y, "grid")
        yield text_at(_LEFT - 8, y + 4, f"{tick:g}", "right")
    yield text_at((_LEFT + _RIGHT) / 2, _BOTTOM + 38, "CPUs a GPU", "middle")
    yield text_at(_LEFT - 8, _TOP - 8, unit, "right")


def _curve(
    x: Array, y: Array, measured: Sequence[bool] | Array, colour: str, *, dashed: bool
) -> Iterator[str]:
    places = list(zip(x.tolist(), y.tolist(), strict=True))
    path = "L".join(f"{number(px)} {number(py)}" for px, py in places)
    dashes = ' stroke-dasharray="5 3"' if dashed else ""
    yield f'<path class="curve" stroke="{plain(colour)}"{dashes} d="M{path}"/>'
    if not dashed:
        for (px, py), full in zip(places, measured, strict=True):
            yield _dot(px, py, colour, full=bool(full))


def _dot(x: float, y: float, colour: str, *, full: bool) -> str:
    look = f'fill="{colour}"' if full else f'fill="none" stroke="{colour}"'
    return f'<circle cx="{number(x)}" cy="{number(y)}" r="4" {look}/>'
