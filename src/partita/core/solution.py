"""A plan with what is known about how good it is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from partita.core.columns import Displayed, frozen_json
from partita.core.plan import Plan
from partita.core.problem import Metric, Problem
from partita.errors import InvalidInputError


class Proof(StrEnum):
    """Strength of the claim about a solution's value."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    TIME_LIMIT = "time_limit"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Solution(Displayed):
    """A plan for a problem, with its value and a bound.

    Attributes:
        problem: The whole problem, so that a solution needs no other file.
        plan: The plan.
        metric: Metric that was minimised.
        value: Value of the plan, as ``cost`` computes it.
        unit: Unit of the value.
        lower_bound: No plan of the problem is below; 0 = nothing is known.
        proof: Whether the value is known to be the best.
        planner: Name of the planner; empty for a plan from elsewhere.
        options: Options it was called with.
        stats: Figures about the search.
        alternatives: Other plans worth a look, best first.
    """

    problem: Problem
    plan: Plan
    metric: Metric
    value: float
    unit: str
    lower_bound: float = 0.0
    proof: Proof = Proof.FEASIBLE
    planner: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)
    alternatives: tuple[Plan, ...] = ()

    def __post_init__(self) -> None:
        self._set(
            options=frozen_json(self.options, "options"),
            stats=frozen_json(self.stats, "stats"),
            alternatives=tuple(self.alternatives),
        )
        if not (self.value >= 0 and math.isfinite(self.value)):
            raise InvalidInputError(f"value is {self.value}; expected a finite number >= 0")
        if not 0 <= self.lower_bound <= self.value * (1 + 1e-9) + 1e-12:
            raise InvalidInputError(
                f"lower_bound {self.lower_bound} is not within 0 and the value {self.value}"
            )
        for plan in (self.plan, *self.alternatives):
            plan.check_fits(self.problem)

    @property
    def gap(self) -> float:
        """Distance that the value may be above the best, relative; ``inf`` without a bound."""
        return self.value / self.lower_bound - 1 if self.lower_bound > 0 else math.inf
