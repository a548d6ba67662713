"""Restarts of the annealing, from the starts of the dynamic programme and from the best so far.

Structure survives at low temperature and balance is found at high: the restarts go through both.
The temperature of a restart falls geometrically to a twentieth of a link's mean cost; the last
round accepts no loss.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.planners.annealing import anneal_rounds
from partita.planners.assignment.anneal import Annealer
from partita.planners.assignment.instance import Instance
from partita.planners.assignment.starts import starts
from partita.planners.effort import Effort

RESTARTS = 8
ITERATIONS = 100
HEATS = (0.6, 0.15, 0.3, 2.0)
"""First temperatures of the restarts, in mean costs of a link."""

_COLD = 0.05


class _Placement(NamedTuple):
    """A placement and its cost."""

    place: Array
    value: float


def improved(
    instance: Instance,
    effort: Effort,
    *,
    start: Array | None = None,
    restarts: int = RESTARTS,
    iterations: int = ITERATIONS,
    seed: int = 0,
    heats: Sequence[float] = HEATS,
) -> tuple[Array, float]:
    """Return the best placement found, and its cost.

    Args:
        instance: What is placed.
        effort: Limits; a cost that reaches the goal ends the search.
        start: Where to start; ``None`` = the dynamic programme over linear orders.
        restarts: How often to start.
        iterations: Temperatures of a restart.
        seed: Of the random numbers.
        heats: First temperatures of the restarts; those after the first round of them start from
            the best so far.
    """
    begin = start if start is not None else starts(instance)[0]
    cost = instance.cost(begin)
    if effort.is_enough(cost) or not np.isfinite(cost) or instance.num_devices == 1:
        return begin, cost
    annealer = Annealer(instance)

    def run_restart(restart: int, best: _Placement) -> _Placement:
        place, found = annealer.cool(
            begin if restart < len(heats) else best.place,
            temperatures(annealer, heats[restart % len(heats)], iterations),
            seed + restart,
            is_enough=partial(_is_enough, effort, best.value),
        )
        return _Placement(place, found)

    found = anneal_rounds(_Placement(begin, cost), run_restart, effort, rounds=restarts, sure=1)
    return found.place, found.value


def _is_enough(effort: Effort, known: float, found: float) -> bool:
    return effort.is_enough(min(known, found))


def temperatures(annealer: Annealer, heat: float, iterations: int) -> list[float]:
    """Return falling temperatures; from 2 on, heat also allows for a step in balance."""
    scale = annealer.temperature()
    first = heat * scale
    if heat >= 2:
        instance = annealer.instance
        first = max(first, 0.3 * float(instance.factor.max() * np.mean(instance.weight**2)))
    falling = np.geomspace(first, _COLD * min(scale, first), max(1, iterations - 1))
    return [*falling.tolist(), 1e-9 * scale][-iterations:]
