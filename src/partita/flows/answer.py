"""What a planner answers: its plan, what the search spent, and what else it found."""

from dataclasses import dataclass
from typing import Any

from partita.core.json_values import thawed
from partita.core.solution import Solution
from partita.flows.alternatives import Alternative, alternatives_of
from partita.flows.summary import Summary, summarise

ENERGY = "energy"
"""The statistic that holds the clocks' figures, which are a result and no effort."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """A plan with all that is known of it and of others.

    Attributes:
        summary: The plan and its figures.
        alternatives: Other plans that keep all limits, best first.
    """

    summary: Summary
    alternatives: tuple[Alternative, ...]

    @property
    def effort(self) -> dict[str, Any]:
        """The option that limited the search, iterations before time, and its own figures."""
        solution = self.summary.solution
        limits = [name for name in ("iterations", "time_limit") if solution.options.get(name)]
        figures: dict[str, Any] = thawed(solution.stats)
        figures.pop(ENERGY, None)
        return {**{name: solution.options[name] for name in limits[:1]}, **figures}

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values under stable keys."""
        return {
            **self.summary.to_json(),
            "effort": self.effort,
            "alternatives": [each.to_json() for each in self.alternatives],
        }


def answer_of(solution: Solution) -> Answer:
    """Return a solution with its evaluation, and its alternatives measured."""
    return Answer(summary=summarise(solution), alternatives=alternatives_of(solution))
