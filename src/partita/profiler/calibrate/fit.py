"""Latency and bandwidth of a link from times of messages: a robust fit of a line.

The line is ``t = latency + n / rate``. Noise of a busy machine only ever adds time, so a size
stands for its fastest message. Latency is the time of messages that fit into one packet. The rate
is the slope among larger ones, of which some may be spoiled: TCP's slow start delays a message of a
few round trips, a token bucket lets a burst through too fast. Such sizes lie off the line of the
others. Each pair of sizes, and each size with the latency, proposes a line; the one with the least
sum of cut-off relative residuals wins (the estimator MSAC, Torr and Zisserman 2000, over all pairs
instead of random ones), and the sizes near it are fitted by weighted least squares. O(k^3) for k
sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np

from partita.core.columns import Floats
from partita.errors import InvalidInputError

SMALL_BYTES = 1024
TOLERANCE = 0.1
_CUT = 3.0
_FREE_PENALTY = 2.0
_FASTEST_BYTES_PER_S = 1e15


class SizeUse(StrEnum):
    """Use of a size of messages, or the side of the line on which it lies."""

    LATENCY = "latency"
    RATE = "rate"
    SLOW = "slow"
    FAST = "fast"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """A link as a line through times of messages.

    Attributes:
        latency_s: Time of a message without content.
        bandwidth_bytes_per_s: Bytes per second of a long message.
        sizes_bytes: Sizes of the messages, ascending.
        best_s: Fastest message of each size.
        median_s: Median of each size.
        use: Use of each size, or that it is slower or faster than the line.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    sizes_bytes: tuple[int, ...]
    best_s: tuple[float, ...]
    median_s: tuple[float, ...]
    use: tuple[SizeUse, ...]

    def seconds(self, size_bytes: float) -> float:
        """Return the time that the line gives a message."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s

    @property
    def residuals(self) -> tuple[float, ...]:
        """Excess of each size over the line, relative to the line."""
        return tuple(
            best / max(self.seconds(size), 1e-12) - 1
            for size, best in zip(self.sizes_bytes, self.best_s, strict=True)
        )

    @property
    def worst_residual(self) -> float:
        """The residual of largest magnitude among the sizes on the line."""
        used = [
            residual
            for residual, use in zip(self.residuals, self.use, strict=True)
            if use is SizeUse.RATE
        ]
        return max(used, key=abs, default=0.0)

    @property
    def off_line(self) -> tuple[int, ...]:
        """The sizes that lie off the line."""
        pairs = zip(self.sizes_bytes, self.use, strict=True)
        return tuple(size for size, use in pairs if use in (SizeUse.SLOW, SizeUse.FAST))

    def to_json(self) -> dict[str, Any]:
        """Return the line and its points as JSON values."""
        return {
            "latency_s": self.latency_s,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "sizes_bytes": list(self.sizes_bytes),
            "best_s": list(self.best_s),
            "median_s": list(self.median_s),
            "residuals": list(self.residuals),
            "use": [use.value for use in self.use],
        }


def one_way_s(round_trips_s: Sequence[Sequence[float]], answer_s: float) -> list[list[float]]:
    """Return one-way times of messages that were answered by a short one.

    Args:
        round_trips_s: Times until the answer was there, by size.
        answer_s: One-way time of a short message.
    """
    return [[max(trip - answer_s, 1e-9) for trip in trips] for trips in round_trips_s]


def fit_link(
    sizes_bytes: Sequence[int],
    seconds: Sequence[Sequence[float]],
    *,
    tolerance: float = TOLERANCE,
) -> LinkFit:
    """Return the line through times of messages.

    Args:
        sizes_bytes: Sizes, ascending; at least one above ``SMALL_BYTES``.
        seconds: One-way times of each size.
        tolerance: Relative distance from the line up to which a size counts as on it.

    Raises:
        InvalidInputError: There are no times, one is not above 0, or sizes do not ascend.
    """
    _check(sizes_bytes, seconds)
    best = np.array([min(times) for times in seconds])
    sizes = np.array(sizes_bytes, dtype=np.float64)
    small = sizes <= SMALL_BYTES
    latency = float(best[small].min()) if small.any() else None
    large = np.flatnonzero(~small)
    intercept, slope = _best_line(sizes[large], best[large], latency, tolerance)
    near = _distance(sizes[large], best[large], intercept, slope) <= tolerance
    slope, intercept = _refit(
        sizes[large[near]], best[large[near]], (intercept, slope), latency, tolerance
    )
    rate = min(1 / slope, _FASTEST_BYTES_PER_S)
    if latency is None:
        latency = max(0.0, intercept)
    else:
        latency = max(0.0, float((best[small] - sizes[small] / rate).min()))
    use = [SizeUse.LATENCY] * len(sizes)
    off = best / (latency + sizes / rate) - 1
    for index, is_near in zip(large.tolist(), near.tolist(), strict=True):
        on_line = is_near and abs(off[index]) <= _CUT * tolerance
        use[index] = SizeUse.RATE if on_line else SizeUse.SLOW if off[index] > 0 else SizeUse.FAST
    return LinkFit(
        latency_s=latency,
        bandwidth_bytes_per_s=rate,
        sizes_bytes=tuple(int(size) for size in sizes_bytes),
        best_s=tuple(best.tolist()),
        median_s=tuple(float(np.median(times)) for times in seconds),
        use=tuple(use),
    )


class CollectiveFit(NamedTuple):
    """Times of a collective: ``start + t + 2 ramp sqrt(start t)`` with ``t = byte_s x bytes``.

    Attributes:
        start_s: Seconds besides those of the bytes.
        byte_s: Seconds of each byte.
        ramp: Slowness of messages of middle size, as pipelines over chunks have it.
        worst_error: Largest error relative to the times, with its sign.
    """

    start_s: float
    byte_s: float
    ramp: float
    worst_error: float


def fit_collective(sizes_bytes: Sequence[int], seconds: Sequence[Sequence[float]]) -> CollectiveFit:
    """Return the curve through the fastest times of a collective, by relative least squares.

    Of ``a + b sqrt(n) + c n`` the parts that would be negative are left out; there is always a part
    that grows with the bytes.

    Raises:
        InvalidInputError: There are no times, one is not above 0, or sizes do not ascend.
    """
    _check(sizes_bytes, seconds)
    times = np.array([min(row) for row in seconds])
    sizes = np.array(sizes_bytes, dtype=np.float64)
    parts = np.stack([np.ones_like(sizes), np.sqrt(sizes), sizes], axis=1) / times[:, None]
    best, least = np.array([0.0, 0.0, float((times / sizes).min())]), float("inf")
    for kept in ((0, 1, 2), (0, 2), (2,)):
        rows = parts[:, kept]
        found = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)[0]
        error = float(((rows @ found - 1) ** 2).sum())
        if (found >= 0).all() and found[-1] > 0 and error < least:
            best, least = np.zeros(3), error
            best[list(kept)] = found
    start, root, byte_s = best.tolist()
    ramp = root / (2 * (start * byte_s) ** 0.5) if start > 0 else 0.0
    off = parts @ best - 1
    return CollectiveFit(start, byte_s, ramp, float(off[np.abs(off).argmax()]))


def _check(sizes_bytes: Sequence[int], seconds: Sequence[Sequence[float]]) -> None:
    if len(sizes_bytes) != len(seconds):
        raise InvalidInputError(f"{len(sizes_bytes)} sizes and {len(seconds)} lists of times")
    if not any(size > SMALL_BYTES for size in sizes_bytes):
        raise InvalidInputError(f"no message is larger than {SMALL_BYTES} bytes")
    if any(after <= before for before, after in pairwise(sizes_bytes)):
        raise InvalidInputError(f"sizes are {tuple(sizes_bytes)}; expected ascending ones")
    for size, times in zip(sizes_bytes, seconds, strict=True):
        if not times or not all(0 < time < float("inf") for time in times):
            raise InvalidInputError(
                f"times of {size} bytes are {list(times)[:5]}; expected finite ones above 0"
            )


def _distance(sizes: Floats, times: Floats, intercept: float, slope: float) -> Floats:
    """Return how far each time is from a line, relative to the time."""
    result: Floats = np.abs(intercept + slope * sizes - times) / times
    return result


def _best_line(
    sizes: Floats, times: Floats, latency: float | None, tolerance: float
) -> tuple[float, float]:
    """Return intercept and slope of the proposed line that agrees best with most sizes.

    A size counts by the share of its time that is not latency, and for no more than a larger one
    does, since a delay would make a short message look important. A line that misses the latency
    must agree twice as well and be worth one more size. Ties go to the line of the larger sizes.
    """
    base = 0.0 if latency is None else latency
    weights = np.clip(1 - base / times, 0.02, 1.0)
    weights = np.minimum.accumulate(weights[::-1])[::-1]
    lines = [
        (base, (time - base) / size, 1.0)
        for size, time in zip(sizes.tolist(), times.tolist(), strict=True)
    ]
    free = 1.0 if latency is None else _FREE_PENALTY
    for first, second in combinations(range(len(sizes)), 2):
        slope = float((times[second] - times[first]) / (sizes[second] - sizes[first]))
        lines.append((float(times[first] - slope * sizes[first]), slope, free))
    best_cost, best = float("inf"), (base, max(float(times[-1]) - base, 1e-9) / float(sizes[-1]))
    for intercept, slope, penalty in lines:
        if slope <= 0:
            continue
        off = np.minimum(_distance(sizes, times, intercept, slope), _CUT * tolerance)
        cost = float(weights @ off) * penalty + (penalty - 1) * tolerance
        if cost <= best_cost + 1e-12:
            best_cost, best = cost, (intercept, slope)
    return best


def _refit(
    sizes: Floats,
    times: Floats,
    line: tuple[float, float],
    latency: float | None,
    tolerance: float,
) -> tuple[float, float]:
    """Return slope and intercept by least squares of relative errors over the sizes near a line.

    Where the line meets the latency anyway, it is held there: one number is found more surely than
    two.
    """
    intercept, slope = line
    if not len(sizes):
        return slope, intercept
    if latency is not None and abs(intercept - latency) <= tolerance * times[0]:
        x = sizes / times
        held = float(x @ (1 - latency / times) / (x @ x))
        return (held, latency) if held > 0 else (slope, intercept)
    if len(sizes) < 3:
        return slope, intercept
    rows = np.stack([1 / times, sizes / times], axis=1)
    found = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)[0]
    return (float(found[1]), float(found[0])) if found[1] > 0 else (slope, intercept)
