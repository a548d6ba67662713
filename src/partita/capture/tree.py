"""Containers around tensors: dicts, tuples, dataclasses and whatever else models pass about.

Only tensors are values of a graph; the containers vanish. They are rebuilt from their leaves
without calling a constructor, because the leaves may be placeholders.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

MAX_DEPTH = 12
"""Containers within containers that are looked into."""


class Ref:
    """Stands for a tensor in the recorded arguments of an op."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Value(Ref):
    """A tensor of the graph: an input of the model or what an op made.

    Attributes:
        index: Row of the tensor in the graph.
    """

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Param(Ref):
    """A parameter or buffer.

    Attributes:
        name: Its name; of tied ones the first.
    """

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Const(Ref):
    """A tensor that depends neither on the inputs nor on parameters, such as a mask.

    Attributes:
        index: Its place among the constants.
    """

    index: int


_PLAIN = (str, bytes, int, float, complex, bool, type(None), type)
_CLOSED = (nn.Module, FunctionType, BuiltinFunctionType, MethodType, ModuleType, Tensor, Ref)


class Children(NamedTuple):
    """Contents of a container.

    Attributes:
        names: A name for each child: a field, a key or a position.
        values: The children.
        rebuild: Makes such a container of other children.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]
    rebuild: Callable[[tuple[Any, ...]], Any]


def children_of(node: object) -> Children | None:
    """Return what a container holds; None for a leaf.

    Containers are tuples (named ones too), lists, dicts, slices, dataclasses, classes registered
    with torch's pytrees, and plain objects with tensors among their attributes.
    """
    if isinstance(node, _PLAIN + _CLOSED):
        return None
    for kinds, unpack in _UNPACK:
        if isinstance(node, kinds):
            return unpack(node)
    if type(node) in SUPPORTED_NODES:
        return _registered(node)
    is_open = dataclasses.is_dataclass(node) or hasattr(node, "__dict__")
    return _object(node) if is_open else None


def _slice(node: slice) -> Children:
    values = (node.start, node.stop, node.step)
    return Children(("start", "stop", "step"), values, lambda parts: slice(*parts))


def _sequence(node: tuple[Any, ...] | list[Any]) -> Children:
    kind: type[Any] = type(node)
    fields = getattr(node, "_fields", None)
    names = tuple(fields) if fields else tuple(map(str, range(len(node))))
    if isinstance(node, list):
        return Children(names, tuple(node), list)
    if kind is tuple:
        return Children(names, node, lambda parts: parts)
    if kind.__module__ == "torch.return_types":
        return Children(names[: len(node)], tuple(node), lambda parts: parts)
    return Children(names[: len(node)], tuple(node), lambda parts: tuple.__new__(kind, parts))


def _mapping(node: dict[Any, Any]) -> Children:
    keys = list(node)

    def rebuild(parts: tuple[Any, ...]) -> Any:  # noqa: ANN401  # whatever class it was
        if type(node) is dict:
            return dict(zip(keys, parts, strict=True))
        made = copy.copy(node)
        for key, part in zip(keys, parts, strict=True):
            made[key] = part
        return made

    return Children(tuple(map(str, keys)), tuple(node.values()), rebuild)


def _registered(node: object) -> Children:
    entry = SUPPORTED_NODES[type(node)]
    values, context = entry.flatten_fn(node)
    names = tuple(map(str, range(len(values))))
    if entry.flatten_with_keys_fn is not None:
        keyed, _ = entry.flatten_with_keys_fn(node)
        names = tuple(str(key).strip("[].'\"") for key, _ in keyed)
    return Children(names, tuple(values), lambda parts: entry.unflatten_fn(list(parts), context))


def _object(node: object) -> Children | None:
    if dataclasses.is_dataclass(node):
        names = tuple(f.name for f in dataclasses.fields(node) if hasattr(node, f.name))
    else:
        names = tuple(vars(node))
    held = tuple(getattr(node, name) for name in names)
    if not any(isinstance(value, Tensor | Ref | tuple | list | dict) for value in held):
        return None

    def rebuild(parts: tuple[Any, ...]) -> Any:  # noqa: ANN401  # whatever class it was
        made = copy.copy(node)
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(made, name, part)
        return made

    return Children(names, held, rebuild)


_UNPACK: tuple[tuple[Any, Callable[[Any], Children]], ...] = (
    ((tuple, list), _sequence),
    (dict, _mapping),
    (slice, _slice),
)


def map_leaves(function: Callable[[Any], Any], node: object, depth: int = 0) -> Any:  # noqa: ANN401
    """Return a container with a function applied to its leaves; the same one if nothing changed."""
    if type(node) is Tensor:  # most are
        return function(node)
    found = children_of(node) if depth < MAX_DEPTH else None
    if found is None:
        return function(node)
    values = tuple(map_leaves(function, value, depth + 1) for value in found.values)
    if all(new is old for new, old in zip(values, found.values, strict=True)):
        return node
    return found.rebuild(values)


def leaves_of(node: object, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a container with their paths, such as ``batch.coords``."""
    if type(node) is Tensor:  # most are
        yield name, node
        return
    found = children_of(node) if depth < MAX_DEPTH else None
    if found is None:
        yield name, node
        return
    for child, value in zip(found.names, found.values, strict=True):
        yield from leaves_of(value, f"{name}.{child}" if name else child, depth + 1)


def tensors_of(node: object) -> list[Tensor]:
    """Return the tensors in a container, in order."""
    if isinstance(node, Tensor):
        return [node]
    return [leaf for _, leaf in leaves_of(node) if isinstance(leaf, Tensor)]
