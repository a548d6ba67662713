"""The value of candidates by the cost model, within limits; the best ones are kept.

A candidate is measured exactly as ``solution_of`` measures it: by the problem's metric, with the
rules and memory limits that hold for it. For ``throughput`` one simulation tells both.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.cost.judge import judge
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.effort import Effort


class Verdict(NamedTuple):
    """What becomes of a candidate.

    Attributes:
        value: By the problem's metric; ``inf`` where it does not fit or cannot run.
        over_bytes: By how much the fullest device exceeds its limit; ``inf`` where it cannot run.
        reason: Why it does not fit, in a line; empty if it does.
    """

    value: float
    over_bytes: float = 0.0
    reason: str = ""


@dataclass(slots=True)
class Evaluator:
    """Measures candidates once each.

    Attributes:
        problem: The problem.
        effort: Candidates to measure in the local search, or seconds.
        best: The least value so far.
        measured: Number of candidates that were measured.
        nearest: Of those that did not fit, the one that comes nearest: bytes over, reason, plan.
    """

    problem: Problem
    effort: Effort
    best: float = math.inf
    measured: int = 0
    nearest: tuple[float, str, Plan | None] = (math.inf, "", None)
    _known: dict[Hashable, Verdict] = field(default_factory=dict)

    def seen(self, key: Hashable) -> bool:
        """Return whether a candidate was measured before."""
        return key in self._known

    def note(self, value: float) -> None:
        """Note the value of a plan that fits."""
        if value < self.best:
            self.best = value
            self.effort.record(value)

    def evaluate(self, plan: Plan, key: Hashable) -> Verdict:
        """Return what becomes of a plan."""
        known = self._known.get(key)
        if known is not None:
            return known
        self.measured += 1
        found = verdict_of(self.problem, plan)
        self._known[key] = found
        self.note(found.value)
        if found.reason and found.over_bytes < self.nearest[0]:
            self.nearest = (found.over_bytes, found.reason, plan)
        return found


def verdict_of(problem: Problem, plan: Plan) -> Verdict:
    """Return the value of a plan, or why it does not fit."""
    try:
        found = judge(problem, plan, bottleneck=False)
    except (InfeasibleError, InvalidInputError) as exc:
        return Verdict(math.inf, math.inf, str(exc))
    if found.feasible:
        return Verdict(found.value.value)
    return Verdict(math.inf, found.over_bytes, found.reason)
