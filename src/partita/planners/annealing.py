"""Rounds of simulated annealing: where each begins, which is kept, and when it is enough.

What is annealed and how a round cools is the caller's (a kernel with a state of its own); this is
what all of them have in common. A round begins at a state that the caller chooses, knowing the best
so far: hot rounds from the start cross between shapes, cool ones from the best balance what was
found. All random numbers follow from the seed and the number of the round, so that with a number
of rounds or steps the result is the same every time.
"""

from collections.abc import Callable
from itertools import count
from typing import Protocol, TypeVar

from partita.planners.effort import Effort


class Annealed(Protocol):
    """A state with its value; smaller is better."""

    @property
    def value(self) -> float:
        """Its value; infinite where it breaks a limit."""
        ...


_State = TypeVar("_State", bound=Annealed)


def anneal_rounds(
    start: _State,
    run_round: Callable[[int, _State], _State],
    effort: Effort,
    *,
    rounds: int | None = None,
    sure: int = 0,
) -> _State:
    """Return the best state that rounds of annealing find.

    Args:
        start: The first state, and the best until a round finds a better one.
        run_round: Given the number of a round and the best state so far, returns what the round
            finds, wherever it began.
        effort: Limits and goal, looked at before each round; called with each better value.
        rounds: Rounds; ``None`` = until the limits or the goal end it.
        sure: Rounds that are made whatever the limits say.
    """
    best = start
    for number in count() if rounds is None else range(rounds):
        if number >= sure and (effort.reached(best.value) or effort.is_over()):
            break
        found = run_round(number, best)
        if found.value < best.value:
            best = found
            effort.record(best.value)
    return best
