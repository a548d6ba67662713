"""Learning curves as a picture of characters."""

import math
from collections.abc import Sequence
from typing import TypeAlias

Curve: TypeAlias = tuple[str, Sequence[tuple[float, float]]]
"""A name and its points: steps, tokens or seconds, and losses."""
_MARKS = "*o+x"
_HEIGHT = 8


def curve_picture(
    curves: Sequence[Curve], *, width: int = 80, height: int = _HEIGHT, encoding: str = "utf-8"
) -> str:
    """Return curves as lines of text that fit a width.

    A column shows the mean of the losses that fall into it.
    """
    drawn = [(name, finite(points)) for name, points in curves]
    drawn = [(name, points) for name, points in drawn if points]
    if not drawn:
        return ""
    marks = ("•" + _MARKS[1:]) if encoding.lower().startswith("utf") else _MARKS
    values = [y for _, points in drawn for _, y in points]
    low, high = min(values), max(values)
    first = min(points[0][0] for _, points in drawn)
    last = max(points[-1][0] for _, points in drawn)
    labels = [f"{low + (high - low) * row / (height - 1):.4g}" for row in range(height)][::-1]
    margin = max(map(len, labels))
    columns = max(8, width - margin - 3)
    cells = [[" "] * columns for _ in range(height)]
    for mark, (_, points) in zip(marks, drawn, strict=False):
        found: dict[int, list[float]] = {}
        for x, y in points:
            place = (x - first) / (last - first) if last > first else 0.0
            found.setdefault(round(place * (columns - 1)), []).append(y)
        for column, inside in found.items():
            place = (sum(inside) / len(inside) - low) / (high - low) if high > low else 0.5
            cells[round((1 - place) * (height - 1))][column] = mark
    lines = [
        f"{label if row % 2 == 0 or row == height - 1 else '':>{margin}} | {''.join(line).rstrip()}"
        for row, (label, line) in enumerate(zip(labels, cells, strict=True))
    ]
    ends = f"{first:g}{f'{last:g}':>{columns - len(f'{first:g}')}}"
    legend = "  ".join(f"{mark} {name}" for mark, (name, _) in zip(marks, drawn, strict=False))
    return "\n".join([*lines, f"{'':>{margin}}   {ends}", f"{'':>{margin}}   {legend}"])


def finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points whose loss is a number."""
    return [(x, y) for x, y in points if math.isfinite(y)]
