"""What a run trains with: optimizer, learning rate, schedule, clipping, precision, as one value.

A ``Recipe`` is named values alone, so that a job directory can hold it. A user's script may give
functions instead (``ScriptRecipe``): any optimizer and scheduler of torch, groups by predicate.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from partita.core.precision import Precision
from partita.errors import InvalidInputError

LEARNING_RATES: Mapping[str, float] = {"sgd": 0.1, "momentum": 0.1, "adam": 1e-3, "adamw": 1e-3}
"""The optimizers that are known by name, and their usual rates."""
WEIGHT_DECAYS: Mapping[str, float] = {"sgd": 0.0, "momentum": 0.0, "adam": 0.0, "adamw": 0.01}
SCHEDULES = ("constant", "linear", "cosine")

OptimizerFunction: TypeAlias = Callable[[Any], Any]
"""Makes an optimizer of torch, given a list of groups: ``params``, their ``param_names``, and what
the group says of learning rate, decay and such."""
SchedulerFunction: TypeAlias = Callable[[Any], Any]
"""Makes a scheduler of torch for an optimizer."""


class NanPolicy(StrEnum):
    """What a step does whose loss or gradients are no numbers."""

    IGNORE = "ignore"
    WARN = "warn"
    STOP = "stop"
    SKIP = "skip"
    ROLLBACK = "rollback"

    @property
    def acts(self) -> bool:
        """Whether all ranks look at the gradients of every step, and leave out a bad update."""
        return self not in (NanPolicy.IGNORE, NanPolicy.WARN)


def nan_policy(text: str) -> NanPolicy:
    """Return the policy of a name.

    Raises:
        InvalidInputError: There is none.
    """
    if text not in tuple(NanPolicy):
        raise InvalidInputError(f"on_nan {text!r} is not one of {', '.join(NanPolicy)}")
    return NanPolicy(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRule:
    """Parameters that are stepped differently.

    Attributes:
        names: Patterns of their names, such as ``*.bias``; empty = any name.
        most_dims: They have at most so many dimensions; None = any number.
        learning_rate: Their rate; None = the recipe's.
        weight_decay: Their decay; None = the recipe's.
    """

    names: tuple[str, ...] = ()
    most_dims: int | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None

    def holds(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether a parameter is one of them."""
        if self.most_dims is not None and len(shape) > self.most_dims:
            return False
        return not self.names or any(fnmatchcase(name, pattern) for pattern in self.names)

    def options(self) -> dict[str, float]:
        """Return what it says, by torch's names."""
        given = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How the learning rate changes from step to step.

    Attributes:
        name: One of ``SCHEDULES``.
        warmup: Steps in which the rate grows to its full value.
        steps: Steps after which it stays at its floor, warm-up included; 0 with ``constant``.
        floor: The share of the rate that is left then.
    """

    name: str = "constant"
    warmup: int = 0
    steps: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise InvalidInputError(f"schedule {self.name!r} is not one of {', '.join(SCHEDULES)}")
        if self.warmup < 0 or not 0 <= self.floor <= 1:
            raise InvalidInputError(
                f"schedule {self.name!r} has warm-up {self.warmup} and floor {self.floor}; "
                "expected 0 or more, and 0 to 1"
            )
        if self.name != "constant" and self.steps <= self.warmup:
            raise InvalidInputError(
                f"schedule {self.name!r} ends after {self.steps} steps, its warm-up after "
                f"{self.warmup}; expected more steps than warm-up"
            )

    def factor(self, step: int) -> float:
        """Return what the learning rate is multiplied with in a step, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.name == "constant":
            return 1.0
        past = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        left = 1 - past if self.name == "linear" else 0.5 * (1 + math.cos(math.pi * past))
        return self.floor + (1 - self.floor) * left


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a run trains with.

    Attributes:
        optimizer: A name of ``LEARNING_RATES``.
        learning_rate: Its rate; None = its usual one.
        weight_decay: Its decay; None = its usual one.
        groups: Parameters that are stepped differently; the first rule that holds counts.
        clip_norm: Largest norm of all gradients together; longer ones are scaled to it. None = any.
        schedule: How the rate changes.
        precision: Types of numbers; None = those of the model.
        on_nan: What a step does whose loss or gradients are no numbers.
    """

    optimizer: str = "sgd"
    learning_rate: float | None = None
    weight_decay: float | None = None
    groups: tuple[GroupRule, ...] = ()
    clip_norm: float | None = None
    schedule: Schedule = field(default_factory=Schedule)
    precision: Precision | None = None
    on_nan: NanPolicy = NanPolicy.WARN

    def __post_init__(self) -> None:
        if self.optimizer not in LEARNING_RATES:
            raise InvalidInputError(
                f"optimizer {self.optimizer!r} is not one of {', '.join(LEARNING_RATES)}"
            )
        for what in ("learning_rate", "clip_norm"):
            value = getattr(self, what)
            if value is not None and not 0 < value < math.inf:
                raise InvalidInputError(f"{what} of a recipe is {value}; expected a number above 0")
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise InvalidInputError(
                f"weight_decay of a recipe is {self.weight_decay}; expected 0 or more"
            )

    @property
    def rate(self) -> float:
        """The learning rate before the schedule."""
        usual = LEARNING_RATES[self.optimizer]
        return usual if self.learning_rate is None else self.learning_rate

    @property
    def decay(self) -> float:
        """The weight decay."""
        return WEIGHT_DECAYS[self.optimizer] if self.weight_decay is None else self.weight_decay

    def options_of(self, name: str, shape: Sequence[int]) -> dict[str, Any]:
        """Return how a parameter is stepped differently, by torch's names; empty = it is not."""
        return next((rule.options() for rule in self.groups if rule.holds(name, shape)), {})


@dataclass(frozen=True, kw_only=True, eq=False)
class ScriptRecipe(Recipe):
    """What a user's script trains with: functions in the place of names.

    Attributes:
        make_optimizer: Makes the optimizer; None = the one of the name.
        bare: Whether ``make_optimizer`` is given the parameters themselves and not groups of them.
        options: How single parameters are stepped differently, by name.
        make_scheduler: Makes the scheduler, called after every step; None = by the schedule.
    """

    make_optimizer: OptimizerFunction | None = None
    bare: bool = False
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    make_scheduler: SchedulerFunction | None = None

    def options_of(self, name: str, shape: Sequence[int]) -> dict[str, Any]:
        """Return how a parameter is stepped differently, by torch's names; empty = it is not."""
        return {**super().options_of(name, shape), **self.options.get(name, {})}
