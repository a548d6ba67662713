"""The untouched model, one whole step: forward, loss, backward."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from partita.capture.captured import CapturedModel
from partita.capture.setting import Setting
from partita.capture.tree import Value, leaves_of, tensors_of
from partita.errors import InvalidInputError
from partita.profiler.measure.clock import Stopwatch


class WholeStep:
    """Runs a model as its user would."""

    def __init__(self, captured: CapturedModel, setting: Setting, clock: Stopwatch) -> None:
        """Prepare the step.

        Raises:
            InvalidInputError: The graph has a loss that the model does not return, and no loss
                function was given.
        """
        self._captured, self._setting, self._clock = captured, setting, clock
        loss = captured.graph.loss
        places = [leaf for _, leaf in leaves_of(captured.output)]
        self._place = places.index(Value(loss)) if Value(loss) in places else -1
        if captured.is_training and loss >= 0 and self._place < 0 and setting.loss is None:
            raise InvalidInputError(
                f"{captured.graph.name!r} was captured with a loss function; "
                "measure it with the same"
            )

    def forward(self) -> list[Tensor]:
        """Return what the backward starts from: the loss, or all outputs."""
        setting = self._setting
        output = setting.model(*setting.example.args, **setting.example.kwargs)
        if not self._captured.is_training:
            return []
        if self._place >= 0:
            leaf = list(leaves_of(output))[self._place][1]
            assert isinstance(leaf, Tensor)
            return [leaf]
        if setting.loss is not None:
            return [setting.loss(output, setting.example.labels)]
        return [tensor for tensor in tensors_of(output) if tensor.requires_grad]

    def backward(self, roots: list[Tensor]) -> None:
        """Add the gradients of all parameters."""
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

    def seconds(self) -> tuple[float, float]:
        """Return the time of forward and backward."""
        for parameter in self._setting.parameters.values():
            parameter.grad = None
        first = self._clock.mark()
        roots = self.forward()
        middle = self._clock.mark()
        self.backward(roots)
        last = self._clock.mark()
        self._clock.settle()
        return self._clock.between(first, middle), self._clock.between(middle, last)


@contextmanager
def gradients_kept(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Leave the gradients of parameters as they were."""
    before = [(tensor, tensor.grad) for tensor in parameters.values() if tensor.is_leaf]
    try:
        yield
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient
