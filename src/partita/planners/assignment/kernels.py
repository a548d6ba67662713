"""Search kernels made of several small functions, interpreted when little is to be done.

A kernel is a plain function of two named tuples of arrays: what is given, and the state it changes.
Interpreted it runs on lists; compiled by Numba, with an on-disk cache, on the arrays. The functions
of its module that a kernel calls are compiled along with it.
"""

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from partita.kernels import COMPILE_FROM

Arrays: TypeAlias = Any
"""What a kernel sees of a named tuple of arrays: lists, or compiled the arrays."""

Kernel: TypeAlias = Callable[[Arrays, Arrays], None]
_Record = TypeVar("_Record", bound=NamedTuple)


@cache
def _compiled(function: FunctionType, *, inner: bool = False) -> Callable[..., Any]:
    """Return a function compiled, inner ones into their callers: a call would copy all arrays.

    Kernels allocate nothing, so references to arrays are not counted (``_nrt``), which would cost
    most of the time.
    """
    from numba import njit  # noqa: PLC0415 (loaded only where it pays)

    known = function.__globals__
    called = {
        name: _compiled(known[name], inner=True)
        for name in function.__code__.co_names
        if inspect.isfunction(known.get(name)) and known[name].__module__ == function.__module__
    }
    bound = FunctionType(function.__code__, {**known, **called}, function.__name__)
    bound.__module__ = function.__module__
    bound.__qualname__ = function.__qualname__
    settings: dict[str, Any] = {"cache": True, "forceinline": inner, "_nrt": False}
    result: Callable[..., Any] = njit(**settings)(bound)
    return result


def run_search(kernel: Kernel, given: _Record, state: _Record, *, work: int) -> None:
    """Run a kernel, changing the arrays of its state.

    Args:
        kernel: The kernel.
        given: What it reads.
        state: What it changes.
        work: Inner steps that it may do; compiled from ``COMPILE_FROM`` on.
    """
    if work >= COMPILE_FROM and isinstance(kernel, FunctionType):
        _compiled(kernel)(given, state)
        return
    lists = type(state)(*(array.tolist() for array in state))
    kernel(type(given)(*(array.tolist() for array in given)), lists)
    for array, values in zip(state, lists, strict=True):
        array[:] = values
