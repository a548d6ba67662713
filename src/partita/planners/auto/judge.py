"""The value of candidates by the cost model, within a budget; the best ones are kept.

A candidate is measured exactly as ``solution_of`` measures it: by the problem's metric, with the
rules and memory limits that hold for it. For ``throughput`` one simulation tells both.
"""

import math
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.cost.judge import judge
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.search_trace import SearchTrace


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
class Budget:
    """How much a search may do: seconds on the clock, or a number of candidates.

    Attributes:
        time_limit: Seconds; what counts where ``iterations`` is 0.
        iterations: Candidates to measure in the local search; with it no clock is looked at.
    """

    time_limit: float
    iterations: int
    _left: int = field(init=False)
    _begin: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._left = self.iterations

    @property
    def is_counted(self) -> bool:
        """Whether effort is counted instead of timed."""
        return self.iterations > 0

    @property
    def text(self) -> str:
        """What the effort was, for people."""
        if self.is_counted:
            return f"iterations {self.iterations}"
        return f"time_limit {self.time_limit:g} s"

    def used(self) -> float:
        """Return the share of the budget that is used up."""
        if self.is_counted:
            return 1 - self._left / self.iterations
        return (time.monotonic() - self._begin) / max(self.time_limit, 1e-9)

    def left_s(self) -> float:
        """Return the seconds that are left; ``inf`` where effort is counted."""
        if self.is_counted:
            return math.inf
        return max(0.0, self.time_limit - (time.monotonic() - self._begin))

    def spend(self) -> None:
        """Note that a candidate of the local search was measured."""
        self._left -= 1

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self.used() >= 1


@dataclass(slots=True)
class Judge:
    """Measures candidates once each.

    Attributes:
        problem: The problem.
        budget: The budget.
        trace: Told of each new best value.
        best: The least value so far.
        measured: Number of candidates that were measured.
        nearest: Of those that did not fit, the one that comes nearest: bytes over, reason, plan.
    """

    problem: Problem
    budget: Budget
    trace: SearchTrace | None = None
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
            if self.trace is not None:
                self.trace.record(value)

    def judge(self, plan: Plan, key: Hashable) -> Verdict:
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
