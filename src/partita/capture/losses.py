"""Loss functions by name, for models that return none."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from partita.capture.setting import LossFunction
from partita.capture.sources import find_callable
from partita.errors import InvalidInputError


def _cross_entropy(output: Any, labels: Any) -> Tensor:  # noqa: ANN401  # the model's
    logits = _tensor(output)
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def _mean_squares(output: Any, labels: Any) -> Tensor:  # noqa: ANN401  # the model's
    found = _tensor(output)
    return functional.mse_loss(found, labels.to(found.dtype).reshape(found.shape))


LOSSES: Mapping[str, LossFunction] = {"cross_entropy": _cross_entropy, "mse": _mean_squares}


def named_loss(text: str) -> LossFunction:
    """Return a loss function of (output, labels): a name of ``LOSSES`` or package.module:callable.

    Raises:
        InvalidInputError: There is no such loss.
    """
    if text in LOSSES:
        return LOSSES[text]
    if ":" not in text:
        raise InvalidInputError(
            f"loss {text!r} is not one of {', '.join(LOSSES)}; or write package.module:callable"
        )
    found: Callable[..., Tensor] = find_callable(text)
    return found


def _tensor(output: object) -> Tensor:
    """Return the first tensor of what a model returned."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name)  # type: ignore[no-any-return]  # just checked
    if isinstance(output, tuple | list) and output:
        return _tensor(output[0])
    raise InvalidInputError(
        f"the model returned a {type(output).__name__}; give --loss package.module:callable for it"
    )
