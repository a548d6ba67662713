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
class Wish:
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


WISHES: Mapping[str, str] = {
    "slowdown": "slowdown",
    "deadline": "deadline_s",
    "energy": "energy_j",
    "power": "power_w",
    "straggler": "straggler_s",
}
"""Fields of a wish that are numbers, by the names that commands have for them."""
LEAST_ENERGY = "least-energy"


def parse_wish(text: str) -> Wish:
    """Return the wish of a text such as ``slowdown=0.02``, ``deadline=1.5,power=900``.

    Raises:
        InvalidInputError: It is none; says what there is.
    """
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        field = "least_energy" if part.strip() == LEAST_ENERGY else WISHES.get(name)
        if field is None or field in values:
            known = ", ".join(f"{wish}=NUMBER" for wish in WISHES)
            raise InvalidInputError(f"wish {part!r}; expected {known} or {LEAST_ENERGY}, each once")
        try:
            values[field] = True if field == "least_energy" else float(number)
        except ValueError:
            raise InvalidInputError(f"wish {part!r}: {number!r} is no number") from None
    return Wish(**values)


def choose_point(frontier: Frontier, wish: Wish) -> int:
    """Return the point that keeps a wish: limits on energy first, then as cheap as time allows.

    A straggler that takes T' makes waiting free: the cheapest point within T', and never one slower
    than T*, which has the least energy of all.

    Raises:
        InfeasibleError: No point keeps it; says what the frontier reaches.
    """
    allowed = np.ones(len(frontier), dtype=bool)
    power = frontier.energy_j / np.maximum(frontier.time_s, 1e-300)
    if wish.energy_j is not None:
        allowed &= _within(frontier.energy_j, wish.energy_j)
        _check(allowed, f"{wish.energy_j:g} J", f"{frontier.energy_j.min():g} J")
    if wish.power_w is not None:
        allowed &= _within(power, wish.power_w)
        _check(allowed, f"{wish.power_w:g} W", f"{power.min():g} W")
    limits = []
    if wish.deadline_s is not None:
        limits.append(wish.deadline_s)
    if wish.slowdown is not None:
        limits.append(frontier.all_max_s * (1 + wish.slowdown))
    if limits:
        fast = _within(frontier.time_s, min(limits))
        _check(fast, f"{min(limits):g} s", f"{frontier.time_s.min():g} s")
        allowed &= fast
        _check(allowed, "these limits together", "each alone")
    relaxed = bool(limits) or wish.least_energy
    if wish.straggler_s is not None:
        near = allowed & _within(frontier.time_s, wish.straggler_s)
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
