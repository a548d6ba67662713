"""Values of Python that a model and its loss may read: a captured graph has them as they were.

Watched are attributes of modules, what they hold (lists, dicts, sets, dataclasses and other plain
objects, down to a depth), and of the functions that are written in Python for the model and the
loss what their code names: variables around them, of their modules, and of the object that they
belong to. Looking again is done by a few calls, whatever there is to see: in most steps
every value is the very object that it was.
"""

import dataclasses
import functools
import operator
import sys
from argparse import Namespace
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_BY_VALUE: tuple[type, ...] = (
    bool, int, float, complex, str, bytes, type(None), range, np.generic, torch.dtype, torch.device,
)  # fmt: skip
"""Kinds that are the same where they are equal."""
_BY_IDENTITY = (Tensor, FunctionType, BuiltinFunctionType, functools.partial, type, Enum)
"""Kinds that are the same where they are one object; what they hold is not looked at."""
_CONTAINERS = (dict, list, tuple, deque, set, frozenset, nn.Module)
_WATCHED = (*_BY_VALUE, *_BY_IDENTITY, *_CONTAINERS)
_MOST_DEPTH = 4
_MOST_VALUES = 20_000
_MOST_FUNCTIONS = 500
_CLOSED_HOMES = (sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "partita"}
"""Packages whose objects are not looked into, and whose functions are not read."""
_NAMESPACES = (SimpleNamespace, Namespace, UserDict, UserList)
"""Kinds of the standard library whose objects are looked into all the same."""
_OF_MODULES = frozenset(vars(nn.Module()))
"""What torch keeps in every module: parameters and hooks, and the mode, which follows the step."""
_IS_TRAINED = operator.attrgetter("requires_grad")


@dataclasses.dataclass(frozen=True, slots=True)
class _Holder:
    """Something that holds values.

    Attributes:
        name: Its own name, for people.
        container: What holds them.
        read: Returns the values that are watched, given the container.
        names: Their names.
        is_sized: Whether it must keep its length.
    """

    name: str
    container: Any
    read: Callable[[Any], Iterable[object]]
    names: tuple[str, ...]
    is_sized: bool


class WatchedValues:
    """What a model and its loss function may read in Python.

    Attributes:
        passed_over: The name of the first value that is not watched, as there are too many; empty
            = all are.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]], loss: object
    ) -> None:
        """Note what there is."""
        self.passed_over = ""
        self._holders: list[_Holder] = []
        self._num_values = 0
        # What is watched already: objects by identity, variables by that of their module and name.
        self._known: set[object] = set()
        # Functions that are read, each with the type whose methods it may call.
        self._functions: list[tuple[FunctionType, type]] = []
        self._watch_modules("", model)
        while isinstance(loss, functools.partial):
            self._watch_inside("loss.args", loss.args, 0)
            self._watch_inside("loss.keywords", loss.keywords, 0)
            loss = loss.func
        if isinstance(loss, nn.Module):
            self._watch_modules("loss.", loss)
        elif loss is not None:  # the model returns it
            self._watch_loss(loss)
        for function in _reached(self._functions):
            self._watch_variables(function)
        self._parameters = [parameter for _, parameter in parameters]
        self._parameter_names = [name for name, _ in parameters]
        self._trained = list(map(_IS_TRAINED, self._parameters))
        self._containers = [holder.container for holder in self._holders]
        self._reads = [holder.read for holder in self._holders]
        self._sized = [holder.container for holder in self._holders if holder.is_sized]
        self._sizes = list(map(len, self._sized))
        self._seen = self._now()

    def changed(self) -> str:
        """Return the name of a value that is another one now; empty = none is."""
        try:
            now = self._now()
        except (LookupError, AttributeError, ValueError):  # something has gone
            return self._first_gone()
        if list(map(len, self._sized)) != self._sizes:
            sized = (holder for holder in self._holders if holder.is_sized)
            pairs = zip(sized, self._sizes, strict=True)
            return next(held.name for held, size in pairs if len(held.container) != size)
        if all(map(operator.is_, now, self._seen)):
            return ""
        names = chain.from_iterable(holder.names for holder in self._holders)
        for name, value, before in zip(names, now, self._seen, strict=True):
            if value is not before and not _is_equal(value, before):
                return name
        self._seen = now  # equal, but other objects
        return ""

    def released(self) -> str:
        """Return the name of a parameter that was trained and is not now, or the other way."""
        trained = list(map(_IS_TRAINED, self._parameters))
        if trained == self._trained:
            return ""
        rows = zip(self._parameter_names, trained, self._trained, strict=True)
        return next(name for name, now, before in rows if now is not before)

    def _now(self) -> tuple[object, ...]:
        return tuple(chain.from_iterable(map(operator.call, self._reads, self._containers)))

    def _first_gone(self) -> str:
        for holder in self._holders:
            try:
                holder.read(holder.container)
            except (LookupError, AttributeError, ValueError):
                return holder.name
        return ""

    def _watch_modules(self, name: str, root: nn.Module) -> None:
        for path, module in root.named_modules():
            if id(module) in self._known:
                continue
            self._known.add(id(module))
            held = vars(module)
            keys = [key for key in held if key not in _OF_MODULES]
            self._hold(f"{name}{path}." if path else name, held, keys, 0)
            forward = type(module).forward
            if isinstance(forward, FunctionType):
                self._functions.append((forward, type(module)))

    def _watch_loss(self, loss: Any) -> None:  # noqa: ANN401  # what can be called
        """Watch the object that a loss belongs to: its plain values, and what the loss names."""
        owner = getattr(loss, "__self__", loss)
        if isinstance(owner, FunctionType):
            self._functions.append((owner, FunctionType))
            return
        called = getattr(loss, "__func__", None) or getattr(loss.__call__, "__func__", None)
        if isinstance(owner, nn.Module | type) or not isinstance(called, FunctionType):
            return
        self._functions.append((called, type(owner)))
        read = {name for function in _reached(self._functions[-1:]) for name in _named_in(function)}
        held = getattr(owner, "__dict__", {})
        keys = [key for key, value in held.items() if key in read or isinstance(value, _BY_VALUE)]
        self._hold("loss.", held, keys, 0)

    def _watch_variables(self, function: FunctionType) -> None:
        """Watch what a function names of the variables around it and of its module."""
        around = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, around, strict=True):
            self._watch_cell(name, cell)
        named = _named_in(function)
        self._watch_globals("", function.__globals__, named)
        for name in named:
            value = function.__globals__.get(name)
            if isinstance(value, ModuleType) and not _is_closed(value.__name__):
                self._watch_globals(f"{name}.", vars(value), named)

    def _watch_globals(self, name: str, held: dict[str, Any], named: Iterable[str]) -> None:
        keys = [key for key in named if key in held and (id(held), key) not in self._known]
        self._known.update((id(held), key) for key in keys)
        if keys:
            self._hold(name, held, keys, 0, is_sized=False)

    def _watch_cell(self, name: str, cell: CellType) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # it is empty
            return
        if id(cell) not in self._known and _is_watched(value):
            self._known.add(id(cell))
            self._add(_Holder(name, cell, _contents, (name,), is_sized=False))
            self._watch_inside(name, value, 1)

    def _watch_inside(self, name: str, value: Any, depth: int) -> None:  # noqa: ANN401  # anything
        """Watch what a value holds."""
        if isinstance(value, nn.Module):
            self._watch_modules(f"{name}.", value)
            return
        if id(value) in self._known or depth > _MOST_DEPTH or isinstance(value, _BY_IDENTITY):
            return
        if isinstance(value, dict):
            self._hold(f"{name}.", value, list(value), depth)
        elif isinstance(value, list | tuple | deque):
            self._hold(f"{name}.", value, range(len(value)), depth)
        elif isinstance(value, set | frozenset):
            read = functools.partial(_compared, frozenset(value))
            self._add(_Holder(name, value, read, (name,), is_sized=True))
        elif _is_open(value):
            if hasattr(value, "__dict__"):
                self._hold(f"{name}.", vars(value), list(vars(value)), depth)
            slots = {slot: getattr(value, slot) for slot in _slots(value)}
            if slots:
                found = [slot for slot, held in slots.items() if _is_watched(held)]
                self._add(
                    _Holder(
                        name,
                        value,
                        functools.partial(_attributes, found),
                        tuple(f"{name}.{slot}" for slot in found),
                        is_sized=False,
                    )
                )
                for slot in found:
                    self._watch_inside(f"{name}.{slot}", slots[slot], depth + 1)
        else:
            return
        self._known.add(id(value))

    def _hold(
        self,
        name: str,
        container: Any,  # noqa: ANN401  # a mapping or a sequence
        keys: Sequence[Any],
        depth: int,
        *,
        is_sized: bool = True,
    ) -> None:
        """Watch values of a mapping or a sequence, and what they hold."""
        if len(keys) > _MOST_VALUES - self._num_values:
            self.passed_over = self.passed_over or name.rstrip(".")
            keys = ()  # its length all the same
        keys = [key for key in keys if _is_watched(container[key])]
        # A getter of one key gives no tuple.
        picked = keys * 2 if len(keys) == 1 else keys
        read = operator.itemgetter(*picked) if picked else _nothing
        names = tuple(f"{name}{key}" for key in picked)
        self._add(
            _Holder(name.rstrip(".") or "the model", container, read, names, is_sized=is_sized)
        )
        for key in keys:
            self._watch_inside(f"{name}{key}", container[key], depth + 1)

    def _add(self, holder: _Holder) -> None:
        self._num_values += len(holder.names)
        self._holders.append(holder)


def _is_watched(value: object) -> bool:
    return isinstance(value, _WATCHED) or _is_open(value)


def _is_open(value: object) -> bool:
    """Return whether an object is looked into: one of a class that is no library's."""
    if isinstance(value, _NAMESPACES):
        return True
    return not (_is_closed(type(value).__module__) or isinstance(value, ModuleType))


def _is_closed(home: str) -> bool:
    return home.partition(".")[0] in _CLOSED_HOMES


def _slots(value: object) -> list[str]:
    """Return the attributes that an object has outside of its ``__dict__``."""
    found = [slot for kind in type(value).__mro__ for slot in vars(kind).get("__slots__", ())]
    return [slot for slot in found if not slot.startswith("__") and hasattr(value, slot)]


def _is_equal(value: object, before: object) -> bool:
    """Return whether two objects are the same value; NaN is itself."""
    if type(value) is not type(before) or not isinstance(before, _BY_VALUE):
        return False
    return bool(value == before or (value != value and before != before))  # noqa: PLR0124 (NaN)


def _contents(cell: CellType) -> tuple[object]:
    return (cell.cell_contents,)


def _compared(kept: frozenset[Any], value: Any) -> tuple[bool]:  # noqa: ANN401  # a set
    return (value == kept,)


def _attributes(names: Sequence[str], value: object) -> list[object]:
    return [getattr(value, name) for name in names]


def _nothing(_: object) -> tuple[object, ...]:
    return ()


def _named_in(function: FunctionType) -> list[str]:
    """Return what the code of a function names: variables of its module, attributes and methods."""
    found: dict[str, None] = {}
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        found.update(dict.fromkeys(code.co_names))
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return list(found)


def _reached(first: Iterable[tuple[FunctionType, type]]) -> Iterator[FunctionType]:
    """Yield functions, and those that they name, of their module or as methods of their type.

    Those of libraries are left out, and there are no more than ``_MOST_FUNCTIONS``.
    """
    waiting, seen = deque(first), set[FunctionType]()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        function, owner = waiting.popleft()
        if function in seen or _is_closed(function.__module__ or ""):
            continue
        seen.add(function)
        yield function
        for name in _named_in(function):
            for held in (function.__globals__.get(name), getattr(owner, name, None)):
                if isinstance(held, FunctionType):
                    waiting.append((held, owner))
