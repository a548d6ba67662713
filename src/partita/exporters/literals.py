"""Recorded arguments as Python source."""

import enum
import math
from collections.abc import Callable
from types import EllipsisType

import torch

from partita.capture.tree import Ref
from partita.errors import InvalidInputError

Namer = Callable[[Ref], str]
"""Returns the source of a tensor."""

_TORCH = (torch.dtype, torch.memory_format, torch.layout)


def expression(node: object, name_of: Namer, device: str = "") -> str:
    """Return the source of an argument.

    Args:
        node: The argument; a ``Ref`` stands for every tensor.
        name_of: Names tensors.
        device: Source of the device to compute on, for arguments that are devices.

    Raises:
        InvalidInputError: It is of a class that source cannot say.
    """
    if isinstance(node, Ref):
        return name_of(node)
    if isinstance(node, torch.device):
        return device or repr(node).replace("device(", "torch.device(", 1)
    if isinstance(node, tuple | list | dict | slice):
        return _container(node, lambda part: expression(part, name_of, device))
    return literal(node)


def _container(
    node: tuple[object, ...] | list[object] | dict[object, object] | slice,
    inner: Callable[[object], str],
) -> str:
    if isinstance(node, slice):
        return f"slice({', '.join(map(inner, (node.start, node.stop, node.step)))})"
    if isinstance(node, dict):
        return "{" + ", ".join(f"{literal(k)}: {inner(v)}" for k, v in node.items()) + "}"
    parts = ", ".join(map(inner, node))
    if isinstance(node, list):
        return f"[{parts}]"
    kind = type(node)
    if hasattr(node, "_fields") and kind.__module__ != "torch.return_types":
        if kind.__module__.partition(".")[0] != "torch":
            raise _unsayable(node)
        return f"{kind.__module__}.{kind.__qualname__}({parts})"
    return f"({parts},)" if len(node) == 1 else f"({parts})"


def literal(node: object) -> str:
    """Return the source of a value that is no container.

    Raises:
        InvalidInputError: It is of a class that source cannot say.
    """
    if isinstance(node, enum.Enum):
        return literal(node.value)
    if isinstance(node, float):
        return repr(node) if math.isfinite(node) else f'float("{node}")'
    if isinstance(node, EllipsisType):
        return "..."
    if isinstance(node, _TORCH):
        return str(node)
    if isinstance(node, str):
        return quoted(node)
    if node is None or isinstance(node, bool | int | bytes | complex):
        return repr(node)
    raise _unsayable(node)


def _unsayable(node: object) -> InvalidInputError:
    kind = f"{type(node).__module__}.{type(node).__qualname__}"
    return InvalidInputError(
        f"an argument is a {kind}, which source cannot say; expected numbers, texts, tensors and "
        "containers of them"
    )


def quoted(text: str) -> str:
    """Return a text in double quotes, where that needs no other marks."""
    return f'"{text}"' if text.isprintable() and not set(text) & set('"\\') else repr(text)


def subscript(node: object, name_of: Namer) -> str:
    """Return the source between the brackets of an index.

    >>> subscript((slice(None), slice(1, None), None), lambda ref: "")
    ':, 1:, None'
    """
    parts = node if isinstance(node, tuple) and node else (node,)
    text = ", ".join(_index(part, name_of) for part in parts)
    return f"{text}," if isinstance(node, tuple) and len(node) == 1 else text


def _index(node: object, name_of: Namer) -> str:
    if not isinstance(node, slice):
        return expression(node, name_of)
    ends = ["" if end is None else expression(end, name_of) for end in (node.start, node.stop)]
    step = "" if node.step is None else f":{expression(node.step, name_of)}"
    return f"{ends[0]}:{ends[1]}{step}"
