"""The value of a plan by an objective: what the functions return that the rows of metrics name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from partita.core.columns import Floats
from partita.core.metrics import METRICS, Metric
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.errors import InvalidInputError, UnsupportedError

PUBLISHED = tuple(metric for metric, row in METRICS.items() if row.published)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Value of a plan by an objective, and what is behind it.

    The value is the number that the objective's formula gives, also where a constraint is broken;
    it is ``inf`` only where the formula has none.

    Attributes:
        metric: The objective.
        value: Its value; smaller is better.
        unit: Unit of the value, ``"s"`` but for the sharding cost.
        bottleneck: The part of the plan that sets the value, for people.
        details: Figures behind the value: JSON values by name.
        errors: Constraints of the objective that the plan breaks, a message each.
    """

    metric: Metric
    value: float
    unit: str = "s"
    bottleneck: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    errors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.value >= 0:
            raise InvalidInputError(f"{self.metric.value} is {self.value}; expected 0 or more")
        object.__setattr__(self, "details", MappingProxyType(dict(self.details)))

    @property
    def feasible(self) -> bool:
        """Whether the plan keeps every constraint of the objective."""
        return not self.errors


def check_applies(metric: Metric, reason: str | None) -> None:
    """Refuse a problem and plan that an objective cannot measure.

    Raises:
        InvalidInputError: There is a reason.
    """
    if reason is not None:
        raise InvalidInputError(f"objective {metric.value!r} does not apply: {reason}")


def value_of(metric: Metric, problem: Problem, plan: Plan) -> Value:
    """Return the value of a plan by a metric, whatever the problem's own.

    Raises:
        InvalidInputError: The metric does not apply.
        UnsupportedError: The metric is a plug-in that fails, or returns no ``Value``.
    """
    function = metric.row.load("value")
    assert function is not None
    value = function(problem, plan)
    if not isinstance(value, Value):
        raise UnsupportedError(f"metric {metric.value!r} is a plug-in and returned no Value")
    return value


def why_not(metric: Metric, problem: Problem, plan: Plan) -> str | None:
    """Return why a published objective cannot measure a plan, or ``None`` where it can."""
    if not metric.row.published:
        return "it is not a published objective"
    reason = metric.row.load("why_not")
    found: str | None = None if reason is None else reason(problem, plan)
    return found


def evaluate_published(problem: Problem, plan: Plan) -> dict[Metric, Value]:
    """Return the value of a plan by every published objective that applies, in their order.

    Raises:
        InvalidInputError: The plan is not one for the problem.
    """
    plan.check_fits(problem)
    return {
        metric: value_of(metric, problem, plan)
        for metric in PUBLISHED
        if why_not(metric, problem, plan) is None
    }


def least_held_bytes(problem: Problem) -> Floats | None:
    """Return what each op holds at least by the rule of the problem's metric, if it has one."""
    function = problem.objective.metric.row.load("held")
    found: Floats | None = None if function is None else function(problem)
    return found
