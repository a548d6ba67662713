"""Which CPU counts are measured, and what the others are filled in with.

Throughput over CPUs rises and bends down: it is monotone and concave, and 0 without CPUs. Such a
curve lies above the line between two known points, and below the lines of the neighbouring ones
carried on; beyond the last point it does not rise. Where both bounds meet, as on straight and flat
parts, nothing is left to measure, and the line is filled in. Else the middle of the interval with
the widest bounds is measured next. The first interval begins at the origin, which costs no run: a
script that is bound by its loaders throughout is known from two points.

A curve that is not of that shape has bounds the wrong way round. Their distance counts all the
same, so that it is measured point by point there. Synergy steps down from the top by halves or by
single CPUs instead, and fills in nothing.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from partita.errors import InvalidInputError


class PointOrigin(StrEnum):
    """How a point of a curve is known."""

    MEASURED = "measured"
    LINEAR = "linear"
    FLAT = "flat"


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point of a curve.

    Attributes:
        cpus: CPUs of the job on this machine.
        rate: Throughput, in what was measured.
        origin: How it is known.
    """

    cpus: float
    rate: float
    origin: PointOrigin


def cpu_grid(max_cpus: float, step: float) -> tuple[float, ...]:
    """Return the CPU counts of a sweep: multiples of a step, and the top.

    Raises:
        InvalidInputError: The step is not above 0, or makes more than 4096 points.
    """
    if not (step > 0 and max_cpus > 0 and max_cpus / step <= 4096):
        raise InvalidInputError(
            f"{max_cpus:g} CPUs in steps of {step:g} is no sweep; expected 1 to 4096 steps above 0"
        )
    grid = [step * index for index in range(1, int(max_cpus / step + 1e-9) + 1)]
    if not grid or grid[-1] < max_cpus * (1 - 1e-9):
        grid.append(max_cpus)
    return tuple(grid)


def usual_step(max_cpus: float, *, fractions: bool) -> float:
    """Return the step that gives a sweep eight points at least, where parts of CPUs are possible.

    Whole CPUs are kept where there are eight of them. No step is below a quarter.
    """
    step = 1.0
    while fractions and step > 0.25 and max_cpus / step < 8:
        step /= 2
    return step


def sweep(
    grid: Sequence[float], measure: Callable[[float], float], *, tolerance: float = 0.1
) -> tuple[CurvePoint, ...]:
    """Return the curve over a grid, measuring as few of its points as its shape allows.

    Args:
        grid: CPU counts, rising.
        measure: Returns the throughput at one of them; called at most once for each, the top first.
        tolerance: Relative error that a filled-in point may have.
    """
    known = {grid[-1]: measure(grid[-1])}
    while True:
        worst, middle = max(_open_intervals(grid, known), default=(0.0, 0.0))
        if worst <= tolerance:
            return fill(grid, known, tolerance=tolerance)
        known[middle] = measure(middle)


def _open_intervals(
    grid: Sequence[float], known: Mapping[float, float]
) -> Iterator[tuple[float, float]]:
    """Yield how far apart the bounds are in each interval, relative, and its middle."""
    points = [(0.0, 0.0), *sorted(known.items())]
    slopes = [(high - low) / (right - left) for (left, low), (right, high) in pairwise(points)]
    for index, ((left, low), (right, high)) in enumerate(pairwise(points)):
        inside = grid[bisect_right(grid, left) : bisect_left(grid, right)]
        if not inside:
            continue
        before = slopes[index - 1] if index else math.inf
        after = slopes[index + 1] if index + 1 < len(slopes) else 0.0
        widest = max(
            abs(min(low + before * (cpus - left), high - after * (right - cpus)) - line)
            / max(line, 1e-300)
            for cpus in inside
            for line in [low + slopes[index] * (cpus - left)]
        )
        half = (left + right) / 2
        yield widest, min(inside, key=lambda cpus: (abs(cpus - half), cpus))


def fill(
    grid: Sequence[float], known: Mapping[float, float], *, tolerance: float = 0.1
) -> tuple[CurvePoint, ...]:
    """Return the curve over a grid from measured points, on lines between them and the origin.

    Args:
        grid: CPU counts, rising; the last is known.
        known: Throughput at those that were measured.
        tolerance: Lines whose ends differ by less are called flat.
    """
    places = [0.0, *sorted(known)]
    points: list[CurvePoint] = []
    for cpus in grid:
        if cpus in known:
            points.append(CurvePoint(cpus, known[cpus], PointOrigin.MEASURED))
            continue
        at = bisect_left(places, cpus)
        left, right = places[at - 1], places[at]
        low, high = known.get(left, 0.0), known[right]
        rate = low + (high - low) * (cpus - left) / (right - left)
        is_flat = abs(high - low) <= tolerance * high
        points.append(CurvePoint(cpus, rate, PointOrigin.FLAT if is_flat else PointOrigin.LINEAR))
    return tuple(points)


def halvings(grid: Sequence[float]) -> tuple[float, ...]:
    """Return a fixed choice of points, from the top down by halves to the least.

    For sweeps in which several machines take part, so that none has to ask what comes next.
    """
    chosen = [grid[-1]]
    while chosen[-1] > grid[0]:
        half = chosen[-1] / 2
        chosen.append(grid[max(0, min(bisect_left(grid, half), grid.index(chosen[-1]) - 1))])
    return tuple(chosen)
