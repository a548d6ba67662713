"""Choosing a point of a frontier: by what matters now.

All choices are among realised points, which go from fast to slow while their energy falls; so "the
cheapest that is fast enough" is the slowest that is fast enough, and "the fastest that is cheap
enough" the first that is.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from partita.core.energy import Frontier
from partita.errors import InfeasibleError, InvalidInputError

TIE = 1e-9
"""Times and energies that differ by less, relatively, count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointLimits:
    """What a point has to keep; ``None`` = nothing. Without any the fastest point is taken.

    Attributes:
        least_energy: Whether to take the point of least energy, T*.
        slowdown: How much slower than all clocks at their highest a step may be, 0.02 = 2 %.
        deadline_s: A step may take that long.
        energy_j: A step may use that much.
        power_w: The mean power of all devices may be that much.
        straggler_s: Somebody else makes every step take that long.
    """

    least_energy: bool = False
    slowdown: float | None = None
    deadline_s: float | None = None
    energy_j: float | None = None
    power_w: float | None = None
    straggler_s: float | None = None

    def __post_init__(self) -> None:
        for what in ("slowdown", "deadline_s", "energy_j", "power_w", "straggler_s"):
            value = getattr(self, what)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise InvalidInputError(f"{what} is {value}; expected a number >= 0")


LIMIT_FIELDS: Mapping[str, str] = {
    "slowdown": "slowdown",
    "deadline": "deadline_s",
    "energy": "energy_j",
    "power": "power_w",
    "straggler": "straggler_s",
}
"""Limits that are numbers, by the names that commands have for them."""
LEAST_ENERGY = "least-energy"


def parse_limits(text: str) -> PointLimits:
    """Return the limits in a text such as ``slowdown=0.02``, ``deadline=1.5,power=900``.

    Raises:
        InvalidInputError: It is none; says what there is.
    """
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        field = "least_energy" if part.strip() == LEAST_ENERGY else LIMIT_FIELDS.get(name)
        if field is None or field in values:
            known = ", ".join(f"{limit}=NUMBER" for limit in LIMIT_FIELDS)
            raise InvalidInputError(
                f"limit {part!r}; expected {known} or {LEAST_ENERGY}, each once"
            )
        try:
            values[field] = True if field == "least_energy" else float(number)
        except ValueError:
            raise InvalidInputError(f"limit {part!r}: {number!r} is no number") from None
    return PointLimits(**values)


def choose_point(frontier: Frontier, limits: PointLimits) -> int:
    """Return the point that keeps limits: those on energy first, then as cheap as time allows.

    A straggler that takes T' makes waiting free: the cheapest point within T', and never one slower
    than T*, which has the least energy of all.

    Raises:
        InfeasibleError: No point keeps them; says what the frontier reaches.
    """
    allowed = np.ones(len(frontier), dtype=bool)
    power = frontier.energy_j / np.maximum(frontier.time_s, 1e-300)
    if limits.energy_j is not None:
        allowed &= _within(frontier.energy_j, limits.energy_j)
        _check(allowed, f"{limits.energy_j:g} J", f"{frontier.energy_j.min():g} J")
    if limits.power_w is not None:
        allowed &= _within(power, limits.power_w)
        _check(allowed, f"{limits.power_w:g} W", f"{power.min():g} W")
    times = []
    if limits.deadline_s is not None:
        times.append(limits.deadline_s)
    if limits.slowdown is not None:
        times.append(frontier.all_max_s * (1 + limits.slowdown))
    if times:
        fast = _within(frontier.time_s, min(times))
        _check(fast, f"{min(times):g} s", f"{frontier.time_s.min():g} s")
        allowed &= fast
        _check(allowed, "these limits together", "each alone")
    relaxed = bool(times) or limits.least_energy
    if limits.straggler_s is not None:
        near = allowed & _within(frontier.time_s, limits.straggler_s)
        if near.any():
            allowed, relaxed = near, True
    candidates = np.flatnonzero(allowed)
    if relaxed:
        return int(candidates[np.argmin(frontier.energy_j[candidates])])
    return int(candidates[0])


def _within(values: np.ndarray, limit: float) -> np.ndarray:
    kept: np.ndarray = values <= limit * (1 + TIE)
    return kept


def _check(allowed: np.ndarray, wanted: str, reached: str) -> None:
    if not allowed.any():
        raise InfeasibleError(f"no point of the frontier keeps {wanted}; it reaches {reached}")
