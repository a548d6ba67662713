"""Says that a script looks for gradients where there are none: a trainer uses them up in a step."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_GRAD: Any = torch.Tensor.grad
"""Where torch keeps the gradient of a tensor."""


class _TrainedParameter(nn.Parameter):
    """A parameter that a trainer steps: its gradients are not there between two steps."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient that somebody else may have made; the trainer's is never here."""
        look = self.__dict__.get("on_grad")
        if look is not None:
            look()
        found: Tensor | None = _GRAD.__get__(self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401  # pickle's
        """Be written as any parameter is."""
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class GradientNotice:
    """Says once that gradients are used up, when somebody else than the trainer looks for them.

    Attributes:
        is_open: Whether it is the trainer that looks.
    """

    def __init__(self, warn: Callable[[str], object]) -> None:
        """Say it by a function."""
        self._warn, self._has_warned = warn, False
        self.is_open = False

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Watch the parameters of a model; those of a class of their own are left alone."""
        for parameter in parameters:
            if type(parameter) is nn.Parameter:
                parameter.__class__ = _TrainedParameter
                parameter.on_grad = self._look  # type: ignore[attr-defined]

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let the trainer look."""
        before, self.is_open = self.is_open, True
        try:
            yield
        finally:
            self.is_open = before

    def _look(self) -> None:
        if not self.is_open and not self._has_warned:
            self._has_warned = True
            self._warn(
                "the gradients of the model's parameters are used up within trainer.step: "
                "clip_grad_norm_(model.parameters()), zero_grad and an optimizer of the script's "
                "own do nothing there; use clip_norm, optimizer and groups of partita.parallelize"
            )
