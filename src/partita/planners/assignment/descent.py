"""Restarts of the annealing, from the starts of the dynamic programme and from the best so far.

Structure survives at low temperature and balance is found at high: the restarts go through both.
The temperature of a restart falls geometrically to a twentieth of a link's mean cost; the last
round accepts no loss.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from partita.core.columns import Array
from partita.planners.assignment.anneal import Annealer
from partita.planners.assignment.effort import Effort
from partita.planners.assignment.instance import Instance
from partita.planners.assignment.starts import starts

RESTARTS = 8
ITERATIONS = 100
HEATS = (0.6, 0.15, 0.3, 2.0)
"""First temperatures of the restarts, in mean costs of a link."""

_COLD = 0.05


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
    best, cost = begin, instance.cost(begin)
    if effort.tell(cost) or not np.isfinite(cost) or instance.num_devices == 1:
        return best, cost
    annealer = Annealer(instance)
    for restart in range(restarts):
        origin = begin if restart < len(heats) else best
        place, found = annealer.cool(
            origin,
            temperatures(annealer, heats[restart % len(heats)], iterations),
            seed + restart,
            tell=partial(_tell, effort, cost),
        )
        if found < cost:
            best, cost = place, found
        if effort.reached(cost) or effort.is_over():
            break
    return best, cost


def _tell(effort: Effort, known: float, found: float) -> bool:
    return effort.tell(min(known, found))


def temperatures(annealer: Annealer, heat: float, iterations: int) -> list[float]:
    """Return falling temperatures; from 2 on, heat also allows for a step in balance."""
    scale = annealer.temperature()
    first = heat * scale
    if heat >= 2:
        instance = annealer.instance
        first = max(first, 0.3 * float(instance.factor.max() * np.mean(instance.weight**2)))
    falling = np.geomspace(first, _COLD * min(scale, first), max(1, iterations - 1))
    return [*falling.tolist(), 1e-9 * scale][-iterations:]
