"""What a planner answers: its plan, what the search spent, and what else it found.

The other plans of a solution are measured and set against the best one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partita.core.columns import thawed
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.cost.judge import judge
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.summary import Summary, describe_plan, summarise


@dataclass(frozen=True, kw_only=True, eq=False)
class Alternative:
    """Another plan that keeps all limits.

    Attributes:
        plan: The plan.
        words: The plan in a few words, and what sets it apart.
        value: Its value.
        ratio: Its value relative to the best plan's.
    """

    plan: Plan
    words: str
    value: float
    ratio: float

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {"plan": self.words, "value": self.value, "ratio": self.ratio}


def alternatives_of(solution: Solution) -> tuple[Alternative, ...]:
    """Return the alternatives of a solution that keep all limits, best first."""
    problem, best = solution.problem, solution.plan
    found = [
        Alternative(
            plan=plan,
            words=distinct_words(problem, plan, best),
            value=value,
            ratio=value / solution.value if solution.value > 0 else 1.0,
        )
        for plan in solution.alternatives
        if (value := value_within_limits(problem, plan)) is not None
    ]
    shown: dict[str, Alternative] = {}
    for each in sorted(found, key=lambda each: each.value):
        words = each.words if each.words not in shown else f"{each.words}, {_cuts(each.plan)}"
        # What reads the same even so differs in nothing that a person would choose by.
        shown.setdefault(words, replace(each, words=words))
    return tuple(shown.values())


def _cuts(plan: Plan) -> str:
    """Return how many ops each stage of a plan has."""
    counts = np.bincount(plan.stage_of, minlength=len(plan.stages))
    return f"{'-'.join(map(str, counts))} ops"


def value_within_limits(problem: Problem, plan: Plan) -> float | None:
    """Return the value of a plan by the problem's metric; None where it breaks a limit."""
    try:
        found = judge(problem, plan)
    except (InfeasibleError, InvalidInputError):
        return None
    return found.value.value if found.feasible else None


def distinct_words(problem: Problem, plan: Plan, best: Plan) -> str:
    """Return a plan in a few words that tell it from the best one."""
    words = [describe_plan(plan), *_differences(problem, plan, best)]
    return ", ".join(words)


def _differences(problem: Problem, plan: Plan, best: Plan) -> Iterator[str]:
    sizes = plan.microbatch_sizes
    if not np.array_equal(sizes, best.microbatch_sizes):
        each = f"{sizes.min()} to {sizes.max()}" if sizes.min() != sizes.max() else f"{sizes[0]}"
        yield f"{len(sizes)} microbatches of {each}"
    if bool(plan.recompute.any()) and not np.array_equal(plan.recompute, best.recompute):
        yield f"recomputes {int(plan.recompute.sum())} ops"
    homes, others = _homes(plan), _homes(best)
    used, of_best = ({name for home in part for name in home} for part in (homes, others))
    if len(used) != len(of_best):
        yield f"{len(used)} of {len(problem.cluster)} devices"
    if describe_plan(plan) == describe_plan(best):
        stages, best_stages = plan.stage_of.tolist(), best.stage_of.tolist()
        pairs = zip(stages, best_stages, strict=True)
        moved = sum(homes[stage] != others[other] for stage, other in pairs)
        if moved:
            yield f"{moved} ops elsewhere"


def _homes(plan: Plan) -> list[frozenset[str]]:
    """Return the devices of each stage."""
    return [
        frozenset(plan.devices[device] for group in stage.devices for device in group)
        for stage in plan.stages
    ]


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
