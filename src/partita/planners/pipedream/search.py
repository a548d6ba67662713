"""The least period that a feasibility test accepts: bisection between a bound and real values."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from partita.planners.effort import SearchTrace

_Found = TypeVar("_Found")

SHORTEST_S = 1e-300
"""Stands for no time at all where something is divided by a period."""
PRECISE = 1e-9
"""Relative difference below which two periods are the same."""

RISE = 2.5
"""How much longer a period is tried where none has a solution yet."""
SURE_RISES, MAX_RISES = 3, 60
"""Rises after which a period beyond them all is tried once, and after which none is."""


@dataclass(slots=True)
class Best(Generic[_Found]):
    """The best that a search has found.

    Attributes:
        value: Its value.
        found: What has that value; ``None`` = nothing yet.
        probes: Tests made.
        trace: Called with every new best.
    """

    value: float = math.inf
    found: _Found | None = None
    probes: int = 0
    trace: SearchTrace | None = None

    def offer(self, value: float, found: _Found) -> bool:
        """Note a solution; return whether it is the best so far."""
        if not value < self.value:
            return False
        self.value, self.found = value, found
        if self.trace is not None:
            self.trace.record(value)
        return True


Probe = Callable[[float], tuple[float, _Found] | None]
"""Return a solution within a period with its value, or ``None`` where there is none."""


def minimise(
    probe: Probe[_Found], best: Best[_Found], low: float, *, precision: float = PRECISE
) -> None:
    """Lower ``best`` to the least period that a probe accepts.

    Values of solutions lie in few places, so that the upper end soon sits on the answer; then one
    probe just below it ends the search. About 15 probes. Where a solution has no value but the
    period that was asked for, the upper end tells nothing, and bisection goes on: about 40. A
    solution that is no better than the best (a probe may be too hopeful) counts as none.

    Args:
        probe: The test.
        best: The best solution so far; its value is the upper end, if any.
        low: A period that nothing is below.
        precision: Relative difference at which to stop.
    """
    low = max(low, SHORTEST_S)
    if best.found is None:
        _climb(probe, best, low)
    sharp = True
    while best.found is not None and low < best.value * (1 - precision):
        near = best.value * (1 - precision)
        ratio = best.value / low
        target = math.sqrt(best.value * low) if ratio > 1.1 else (best.value + low) / 2
        target = near if sharp and ratio < 1.001 else min(target, near)
        best.probes += 1
        answer = probe(target)
        if answer is None or not best.offer(*answer):
            low = target
        else:
            sharp = best.value < target


def _climb(probe: Probe[_Found], best: Best[_Found], low: float) -> None:
    """Look for a first solution, from the bound upwards, unless no period at all has one."""
    target = low * 1.05
    for rise in range(MAX_RISES):
        if rise == SURE_RISES and probe(target * RISE**MAX_RISES) is None:
            return
        best.probes += 1
        answer = probe(target)
        if answer is not None:
            best.offer(*answer)
            return
        target *= RISE
