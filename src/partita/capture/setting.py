"""The subject of a capture: a model, an example, a loss function; and the model left as it was."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from partita.capture.captured import CaptureMode
from partita.capture.op import is_fake
from partita.capture.tree import leaves_of
from partita.errors import InvalidInputError

LossFunction: TypeAlias = Callable[[Any, Any], Any]
"""Returns the loss, given what the model returned and the labels; or a pair of the loss and other
single numbers by name."""

LABELS = ("labels", "label", "targets", "target")
"""Names under which a mapping has the labels of a loss function."""
CONTAINERS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One microbatch.

    Attributes:
        args: Positional arguments of the model: tensors, or any containers of them.
        kwargs: Arguments by name.
        labels: Arguments of a loss function besides the outputs.
        batch_size: Samples; 0 = the first dimension of the first tensor.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    labels: Any = None
    batch_size: int = 0


def split_labels(batch: Any) -> tuple[Any, Any]:  # noqa: ANN401  # the user's
    """Return the inputs of a batch and the labels of a loss function.

    Args:
        batch: A pair of them, a longer tuple that ends with the labels, or a mapping that has them
            under one of ``LABELS``.

    Raises:
        InvalidInputError: It is something else.
    """
    if isinstance(batch, Mapping):
        name = next((name for name in LABELS if name in batch), None)
        if name is None:
            raise InvalidInputError(
                f"the batch has {', '.join(map(str, batch))}; a loss function needs its labels as "
                f"one of {', '.join(LABELS)}"
            )
        return {key: value for key, value in batch.items() if key != name}, batch[name]
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise InvalidInputError(
            f"the batch is a {type(batch).__name__}; expected a pair of inputs and labels"
        )
    return (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]


def with_metrics(found: Any) -> tuple[Tensor, Mapping[str, Tensor]]:  # noqa: ANN401  # the user's
    """Return what a loss function returned as the loss and other numbers by name.

    Raises:
        InvalidInputError: It is something else.
    """
    if isinstance(found, Tensor):
        return found, {}
    if isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[0], Tensor):
        loss, metrics = found
        if isinstance(metrics, Mapping):
            return loss, metrics
    raise InvalidInputError(
        f"the loss function returned a {type(found).__name__}; expected a tensor, or a pair of it "
        "and a mapping of single numbers by name"
    )


@dataclass(slots=True)
class Setting:
    """A model to capture, and the way to do it.

    Attributes:
        model: The model.
        example: The example.
        loss: The loss function.
        mode: The mode.
        modules: The modules by path, the loss function's too.
        parameters: Parameters and buffers by canonical name.
        inputs: Tensors of the example by name.
    """

    model: nn.Module
    example: Example
    loss: LossFunction | None
    mode: CaptureMode
    modules: dict[str, nn.Module]
    parameters: dict[str, Tensor]
    inputs: dict[str, Tensor]

    @property
    def is_training(self) -> bool:
        """Whether it is captured in training mode."""
        return self.mode is CaptureMode.TRAINING


def example_inputs(model: nn.Module, example: Example) -> dict[str, Tensor]:
    """Return the tensors of an example by the names that the graph has for them.

    A tensor that stands in several places has the first name.
    """
    places: list[tuple[str, Any]] = []
    for name, value in _bound(model, example):
        places += leaves_of(value, name)
    places += leaves_of(example.labels, "labels")
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, leaf in places:
        if isinstance(leaf, Tensor) and id(leaf) not in seen:
            seen.add(id(leaf))
            free, turn = name, 0
            while free in found:
                turn += 1
                free = f"{name}_{turn}"
            found[free] = leaf
    return found


@dataclass(slots=True)
class _Call:
    """What a model is called by; finding it out takes longer than calling by it.

    Attributes:
        function: The function of ``forward`` that it is of.
        signature: Its signature.
        orders: By the number of positional arguments and the names of the others, the argument of
            each parameter in order: its name, and a place or a name.
    """

    function: object
    signature: inspect.Signature
    orders: dict[tuple[int, tuple[str, ...]], list[tuple[str, int | str]]] = field(
        default_factory=dict
    )


_CALLS: WeakKeyDictionary[nn.Module, _Call] = WeakKeyDictionary()


def _bound(model: nn.Module, example: Example) -> list[tuple[str, Any]]:
    """Return the arguments of a call with the names of their parameters, in their order.

    Raises:
        InvalidInputError: The model cannot be called so.
    """
    forward = model.forward
    function = getattr(forward, "__func__", forward)
    call = _CALLS.get(model)
    if call is None or call.function is not function:
        call = _CALLS[model] = _Call(function, inspect.signature(forward))
    args, kwargs = example.args, example.kwargs
    shape = (len(args), tuple(kwargs))
    known = call.orders.get(shape)
    if known is not None:
        return [(name, args[at] if isinstance(at, int) else kwargs[at]) for name, at in known]
    try:
        # Places and names stand for the arguments, so that it is seen where each of them goes.
        bound = call.signature.bind(*range(len(args)), **{name: name for name in kwargs})
    except TypeError as exc:
        raise InvalidInputError(f"{type(model).__name__} cannot be called: {exc}") from exc
    kinds = {name: call.signature.parameters[name].kind for name in bound.arguments}
    if inspect.Parameter.VAR_POSITIONAL in kinds.values():
        bound = call.signature.bind(*args, **kwargs)
        return [
            ("" if kinds[name] is inspect.Parameter.VAR_KEYWORD else name, value)
            for name, value in bound.arguments.items()
        ]
    order: list[tuple[str, int | str]] = []
    for name, at in bound.arguments.items():
        if kinds[name] is inspect.Parameter.VAR_KEYWORD:
            order += [(key, key) for key in at]
        else:
            order.append((name, at))
    call.orders[shape] = order
    return _bound(model, example)


def make_setting(
    model: nn.Module, example: Example, loss: LossFunction | None, mode: CaptureMode
) -> Setting:
    """Return what is captured, the loss function's modules and parameters included."""
    modules = dict(model.named_modules())
    parameters: dict[str, Tensor] = {**dict(model.named_parameters())}
    parameters.update(model.named_buffers())
    if isinstance(loss, nn.Module):
        modules.update((f"loss.{n}" if n else "loss", m) for n, m in loss.named_modules())
        parameters.update((f"loss.{n}", p) for n, p in loss.named_parameters())
        parameters.update((f"loss.{n}", b) for n, b in loss.named_buffers())
    return Setting(
        model=model,
        example=example,
        loss=loss,
        mode=mode,
        modules=modules,
        parameters=parameters,
        inputs=example_inputs(model, example),
    )


@contextmanager
def undisturbed(setting: Setting) -> Iterator[None]:
    """Set the mode, and leave the model as it was."""
    flags = [(module, module.training) for module in setting.modules.values()]
    buffers = [
        (module, key, buffer, None if buffer is None or is_fake(buffer) else buffer.clone())
        for module in setting.modules.values()
        for key, buffer in module._buffers.items()  # noqa: SLF001  # objects, not copies
    ]
    try:
        if not setting.is_training:
            setting.model.eval()
        elif not setting.model.training:
            setting.model.train()
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(setting.is_training):
            yield
    finally:
        for module, flag in flags:
            module.training = flag
        _restore(buffers)


@contextmanager
def unchanged_inputs(setting: Setting) -> Iterator[None]:
    """Undo what a model writes into its inputs."""
    real = [tensor for tensor in setting.inputs.values() if not is_fake(tensor)]
    before = [tensor.detach().clone() for tensor in real]
    try:
        yield
    finally:
        for tensor, kept in zip(real, before, strict=True):
            if not torch.equal(tensor, kept):
                tensor.detach().copy_(kept)


def _restore(buffers: Sequence[tuple[nn.Module, str, Tensor | None, Tensor | None]]) -> None:
    for module, key, buffer, before in buffers:
        module._buffers[key] = buffer  # noqa: SLF001  # objects, not copies
        if buffer is not None and before is not None and not torch.equal(buffer, before):
            with torch.no_grad():
                buffer.copy_(before)
