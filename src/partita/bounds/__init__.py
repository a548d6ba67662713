"""Values that no plan of a problem can beat, and what gives them.

Each term is a theorem for all plans of the problem (``docs/bounds.md``): the samples of a step are
fixed, whatever the user did not give is free, and ops are tensor-parallel in the degrees for which
the graph has variants.
"""

from collections.abc import Callable, Iterator

from partita.bounds.figures import Bound, Effort
from partita.core.columns import derived
from partita.core.problem import Problem

NOTHING = Bound(0.0, "nothing is known")
CLEARLY = 1 + 1e-6
"""A later term is named only where it is above an earlier one by more than rounding."""


def lower_bound(problem: Problem) -> float:
    """Return a value that no plan can beat for the problem's metric; 0 = nothing is known."""
    return bound(problem).value


def bound(problem: Problem, *, effort: Effort = Effort.QUICK) -> Bound:
    """Return the best bound, and the term that gives it; it is found once and kept.

    Args:
        problem: The problem.
        effort: ``quick`` takes milliseconds; ``full`` solves linear programs where they may help.
    """
    return derived(problem, ("bound", effort), lambda: _best(bounds(problem, effort=effort)))


def bounds(problem: Problem, *, effort: Effort = Effort.QUICK) -> list[Bound]:
    """Return the bounds of all terms that apply, plain ones first."""
    terms: Callable[[Problem, Effort], Iterator[Bound]] | None
    terms = problem.objective.metric.row.load("bound")
    return list(terms(problem, effort)) if terms is not None else []


def _best(found: list[Bound]) -> Bound:
    best = NOTHING
    for one in found:
        if one.value > best.value * CLEARLY:
            best = one
    return best
