"""Compiling a family of kernels that call one another, without importing Numba before it pays."""

import zlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

COMPILE_FROM = 20_000
"""Job-rounds from which loading compiled kernels pays."""
_loaded: set[Callable[..., Any]] = set()
"""Entries that are compiled already, which decides how they run and not what they return."""
Column: TypeAlias = Any
"""What a kernel indexes: a list, or compiled an array."""
Family: TypeAlias = tuple[Callable[..., Any], ...]
"""Kernels that call one another, callees first."""
_Table = TypeVar("_Table", bound=NamedTuple)


@cache
def compiled(family: Family) -> Callable[..., Any]:
    """Return the last kernel of a family, compiled with those before it that it calls."""
    from numba import njit  # noqa: PLC0415 (loaded only where it pays)

    namespace: dict[str, Any] = {}
    functions = [kernel for kernel in family if isinstance(kernel, FunctionType)]
    mark = _mark(functions)
    for plain in functions:
        namespace = {**plain.__globals__, **namespace}
    for plain in functions:
        copy = FunctionType(plain.__code__, namespace, plain.__name__, plain.__defaults__)
        copy.__module__, copy.__qualname__ = plain.__module__, plain.__qualname__ + mark
        namespace[plain.__name__] = njit(cache=True)(copy)
    _loaded.add(family[-1])
    result: Callable[..., Any] = namespace[family[-1].__name__]
    return result


def _mark(functions: Iterable[FunctionType]) -> str:
    """Return a suffix for names in the cache on disk that changes with the source of any kernel.

    Numba looks at the file of a function only, and would go on with callees that have changed.
    """
    files = sorted({function.__code__.co_filename for function in functions})
    digest = zlib.crc32(b"".join(Path(file).read_bytes() for file in files))
    return f"_{digest:08x}"


def pays(family: Family, work: float) -> bool:
    """Return whether to run a family compiled: much work, or it is loaded already."""
    return work >= COMPILE_FROM or family[-1] in _loaded


def as_lists(table: _Table) -> _Table:
    """Return a table of arrays as one of lists, which interpreted kernels index faster."""
    return type(table)(*(part.tolist() if isinstance(part, np.ndarray) else part for part in table))
