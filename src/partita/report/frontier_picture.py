"""A frontier as a curve of characters that fits the terminal."""

import numpy as np

from partita.core.energy import Frontier
from partita.units import format_joules, format_seconds

MIN_WIDTH = 40
_POINT, _ALL_MAX, _CHOSEN, _BOUND = "●", "▲", "◆", "·"
_PLAIN = {_POINT: "o", _ALL_MAX: "^", _CHOSEN: "#", _BOUND: ".", "│": "|", "└": "+", "─": "-"}


def frontier_picture(
    frontier: Frontier,
    width: int,
    *,
    height: int = 12,
    chosen: int | None = None,
    encoding: str = "utf-8",
) -> str:
    """Return energy against time as lines of text, with the bound and all-max.

    Args:
        frontier: What to draw.
        width: Columns.
        height: Lines of the curve.
        chosen: A point to be marked.
        encoding: Of the terminal; other signs are used where it lacks ours.
    """
    energies = (*frontier.energy_j, *frontier.bound_j, frontier.all_max_j)
    times = (*frontier.time_s, frontier.all_max_s)
    top, bottom = float(max(energies)), float(min(energies))
    first, last = float(min(times)), float(max(times))
    labels = [format_joules(top), format_joules(bottom)]
    left = max(map(len, labels)) + 1
    columns = max(MIN_WIDTH, width) - left - 2
    grid = np.full((height, columns), " ", dtype="<U1")

    def put(time_s: float, energy_j: float, sign: str) -> None:
        x = round((time_s - first) / max(last - first, 1e-300) * (columns - 1))
        y = round((top - energy_j) / max(top - bottom, 1e-300) * (height - 1))
        grid[min(max(y, 0), height - 1), min(max(x, 0), columns - 1)] = sign

    for column, sign in ((frontier.bound_j, _BOUND), (frontier.energy_j, _POINT)):
        for time_s, energy_j in zip(frontier.time_s.tolist(), column.tolist(), strict=True):
            put(time_s, energy_j, sign)
    put(frontier.all_max_s, frontier.all_max_j, _ALL_MAX)
    if chosen is not None:
        put(float(frontier.time_s[chosen]), float(frontier.energy_j[chosen]), _CHOSEN)
    lines = []
    for row in range(height):
        label = labels[0] if row == 0 else labels[1] if row == height - 1 else ""
        lines.append(f"{label:>{left - 1}} │{''.join(grid[row])}".rstrip())
    lines.append(f"{'':>{left - 1}} └{'─' * columns}")
    ends = format_seconds(first), format_seconds(last)
    between = columns - len(ends[0]) - len(ends[1])
    lines.append(f"{'':>{left + 1}}{ends[0]}{' ' * max(1, between)}{ends[1]}")
    keys = f"{_POINT} point  {_BOUND} bound  {_ALL_MAX} all-max"
    keys += f"  {_CHOSEN} chosen" if chosen is not None else ""
    lines.append(f"{'':>{left + 1}}{keys}")
    return _written("\n".join(lines) + "\n", encoding)


def _written(text: str, encoding: str) -> str:
    """Return the picture in signs that an encoding has."""
    try:
        text.encode(encoding)
    except (LookupError, UnicodeEncodeError):
        for sign, other in _PLAIN.items():
            text = text.replace(sign, other)
    return text
