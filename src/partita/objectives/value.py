"""The value of a plan by one published objective."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from partita.core.problem import Metric
from partita.errors import InvalidInputError


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
