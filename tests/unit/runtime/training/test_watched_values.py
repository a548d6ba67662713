"""Values of Python that a model and its loss read: which changes are seen."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.runtime.training import watched_values
from partita.runtime.training.watched_values import WatchedValues

LEVEL = 1.0
TABLE = {"scale": [1.0, {"deep": 2}]}


class Kind(Enum):
    """Two ways."""

    ONE = 1
    TWO = 2


@dataclass
class Inner:
    """Values in an object."""

    rate: float = 0.5
    names: set[str] = field(default_factory=lambda: {"a"})


class Slotted:
    """Values without a ``__dict__``."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


class Model(nn.Module):
    """Holds values of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        self.flag, self.kind, self.act = True, Kind.ONE, torch.relu
        self.mask = torch.ones(2)
        self.sizes = [1, (2, [3])]
        self.config = SimpleNamespace(inner=Inner(), other={"slotted": Slotted()})
        self.heads = [nn.Linear(2, 2)]
        self.nan = float("nan")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self._factor()

    def _factor(self) -> float:
        return level()


def level() -> float:
    """Read variables of the module."""
    return LEVEL * TABLE["scale"][0]


class Losses:
    """A loss with an object around it, some of which it reads."""

    def __init__(self) -> None:
        self.weights, self.history, self.step = [1.0], [], 0

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return (output - labels).sum() * self._weight()

    def _weight(self) -> float:
        return self.weights[0]


def watch(model: nn.Module, loss: object = None) -> WatchedValues:
    return WatchedValues(model, list(model.named_parameters()), loss)


CHANGES: dict[str, tuple[Callable[[Model], object], str]] = {
    "attribute": (lambda m: setattr(m, "flag", False), "flag"),
    "type": (lambda m: setattr(m, "flag", 1), "flag"),
    "enum": (lambda m: setattr(m, "kind", Kind.TWO), "kind"),
    "function": (lambda m: setattr(m, "act", torch.tanh), "act"),
    "tensor": (lambda m: setattr(m, "mask", torch.ones(2)), "mask"),
    "submodule": (lambda m: setattr(m.layer[1], "p", 0.1), "layer.1.p"),
    "length": (lambda m: m.sizes.append(4), "sizes"),
    "within a tuple": (lambda m: m.sizes[1][1].__setitem__(0, 5), "sizes.1.1.0"),
    "shorter": (lambda m: m.sizes.pop(), "sizes"),
    "dataclass": (lambda m: setattr(m.config.inner, "rate", 0.1), "config.inner.rate"),
    "set": (lambda m: m.config.inner.names.add("b"), "config.inner.names"),
    "slots": (
        lambda m: setattr(m.config.other["slotted"], "value", 2), "config.other.slotted.value"
    ),
    "gone": (lambda m: delattr(m.config, "inner"), "config"),
    "module in a list": (lambda m: setattr(m.heads[0], "in_features", 3), "heads.0.in_features"),
    "new attribute": (lambda m: setattr(m, "more", 1), "the model"),
    "new attribute of a submodule": (lambda m: setattr(m.layer[1], "more", 1), "layer.1"),
    "global": (lambda _: globals().__setitem__("LEVEL", 2.0), "LEVEL"),
    "in a global": (lambda _: TABLE["scale"][1].__setitem__("deep", 3), "TABLE.scale.1.deep"),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(CHANGES))
def test_a_change_is_seen_and_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "LEVEL", 1.0)
    monkeypatch.setitem(globals(), "TABLE", {"scale": [1.0, {"deep": 2}]})
    model = Model()
    watched = watch(model)
    assert watched.changed() == ""
    change, name = CHANGES[kind]
    change(model)
    assert watched.changed() == name


def test_equal_values_that_are_other_objects_are_no_change() -> None:
    model = Model()
    model.config.inner.rate = float("1e300")
    watched = watch(model)
    model.config.inner.rate = float("1e300")
    model.nan = float("nan")
    assert watched.changed() == watched.changed() == ""


def test_of_the_object_of_a_loss_what_it_reads_is_watched_and_what_it_keeps_is_not() -> None:
    losses = Losses()
    watched = watch(nn.Linear(2, 2), losses.loss)
    losses.history.append(1.0)
    assert watched.changed() == ""
    losses.weights[0] = 2.0
    assert watched.changed() == "loss.weights.0"


def test_variables_around_a_loss_and_arguments_that_it_was_given_are_watched() -> None:
    around, given = {"share": 0.1}, [0.5]

    def loss(output: Tensor, labels: Tensor, shares: list[float]) -> Tensor:
        return (output - labels).sum() * around["share"] * shares[0]

    watched = watch(nn.Linear(2, 2), partial(loss, shares=given))
    given[0] = 0.6
    assert watched.changed() == "loss.keywords.shares.0"
    watched = watch(nn.Linear(2, 2), partial(loss, shares=given))
    around["share"] = 0.2
    assert watched.changed() == "around.share"


def test_circles_end_and_too_many_values_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    circle: list[Any] = [1]
    circle.append(circle)
    model.circle, model.many = circle, list(range(100))
    assert watch(model).passed_over == ""
    monkeypatch.setattr(watched_values, "_MOST_VALUES", 50)
    watched = watch(model)
    assert watched.passed_over == "many"
    model.many.append(1)
    assert watched.changed() == "many"


def test_parameters_that_are_frozen_are_named() -> None:
    model = nn.Linear(2, 2)
    watched = watch(model)
    assert watched.released() == ""
    model.bias.requires_grad_(False)
    assert watched.released() == "bias"
