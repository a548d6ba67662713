"""Read-only NumPy columns: how the core types hold many values at once.

A column is checked when its owner is made: right length, right type, finite, within its range. The
first bad value is named together with the row it belongs to. Single values as JSON holds them are
here, too: frozen in the types, and plain (no NaN, no infinity) where a ``to_json`` prints them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from partita.errors import InvalidInputError
from partita.plugins import load_target

Array: TypeAlias = NDArray[Any]
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int32]
Longs: TypeAlias = NDArray[np.int64]
Bytes8: TypeAlias = NDArray[np.int8]
Flags: TypeAlias = NDArray[np.bool_]

_T = TypeVar("_T")
MAX_SECONDS = 1e15
MAX_BYTES = float(2**60)
MAX_FLOPS = 1e27
MAX_NESTING = 100


def every(value: float) -> Any:  # noqa: ANN401 (stands for a column of any type)
    """Return a dataclass field whose default is one value for all rows."""
    return dataclasses.field(default=value)


def start(values: list[int], dtype: type) -> Any:  # noqa: ANN401 (stands for a column of any type)
    """Return a dataclass field whose default is a short column, empty or with a first pointer."""
    return dataclasses.field(default_factory=lambda: frozen_array(values, dtype))


class Columns:
    """Base of frozen dataclasses that hold columns: equality by value, NaN equal to NaN."""

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(
            same_value(getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]  # subclasses are dataclasses
        )

    __hash__ = None  # type: ignore[assignment]  # equality by value of arrays has no cheap hash

    def _set(self, **values: object) -> None:
        """Replace fields of a frozen instance while it is being made."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


class Displayed(Columns):
    """Columns that people look at: one line as text, a table and figures in a notebook."""

    def __repr__(self) -> str:
        return str(load_target("partita.report.notebook:line")(self))

    def _repr_html_(self) -> str:
        """Return a table and figures for notebooks."""
        return str(load_target("partita.report.notebook:to_html")(self))

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> Mapping[str, str]:
        """Return what front ends of notebooks choose from: HTML, a picture, a line."""
        del include, exclude  # what is left out is the front end's business
        found: Mapping[str, str] = load_target("partita.report.notebook:to_bundle")(self)
        return found


def derived(owner: Columns, key: object, make: Callable[[], _T]) -> _T:
    """Return what follows from an immutable object, made once and kept with it."""
    kept: dict[object, _T] = owner.__dict__.setdefault("_derived", {})
    if key not in kept:
        kept[key] = make()
    return kept[key]


def same_value(a: object, b: object) -> bool:
    """Return whether two field values are equal, arrays by content and NaN equal to NaN."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        exact = a.dtype.kind != "f"
        return a.shape == b.shape and bool(np.array_equal(a, b, equal_nan=not exact))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def frozen_array(values: object, dtype: Any) -> NDArray[Any]:  # noqa: ANN401 (any NumPy dtype)
    """Return values as a read-only, contiguous array of a dtype, shared where it already is one."""
    array = np.ascontiguousarray(values, dtype=dtype)
    if array is values or array.base is not None:
        if not _can_change(array):
            return array
        array = array.copy()
    array.flags.writeable = False
    return array


def _can_change(array: NDArray[Any]) -> bool:
    """Return whether the memory of an array can be written to, through it or what it views."""
    part: object = array
    while isinstance(part, np.ndarray):
        if part.flags.writeable:
            return True
        part = part.base
    return part is not None and not isinstance(part, bytes)


def column(
    values: object,
    dtype: type,
    rows: int | Sequence[str],
    what: str,
    *,
    low: float = 0,
    high: float | None = None,
    unknown: bool = False,
) -> NDArray[Any]:
    """Return values as a checked, read-only column.

    Args:
        values: A sequence of one value a row, or one number for all rows.
        dtype: NumPy type of the column.
        rows: Number of rows, or their names (used in messages).
        what: Name of the column in messages.
        low: Smallest value allowed.
        high: Largest value allowed, if any.
        unknown: Whether NaN is allowed and means "not known".

    Raises:
        InvalidInputError: A wrong length, type or value; names the first bad row.
    """
    num_rows = rows if isinstance(rows, int) else len(rows)
    array = _converted(values, dtype, num_rows, what)
    if array.ndim != 1:
        raise InvalidInputError(f"{what} has {array.ndim} dimensions; expected a flat list")
    if len(array) != num_rows:
        raise InvalidInputError(f"{what} has {array.size} values for {num_rows} rows")
    # One number for all rows needs one look.
    seen = array[:1] if isinstance(values, bool | int | float) else array
    if dtype is np.bool_ or num_rows == 0 or _within(seen, low, high):
        return array
    bad = ~(seen >= low) if high is None else ~((seen >= low) & (seen <= high))
    if array.dtype.kind == "f":
        bad |= np.isinf(seen)
        if unknown:
            bad &= ~np.isnan(seen)
    if bad.any():
        row = int(np.argmax(bad))
        name = row if isinstance(rows, int) else f"{row} ({rows[row]!r})"
        limits = f"{low:g} to {high:g}" if high is not None else f"{low:g} or more"
        if high is None and array.dtype.kind == "f":
            limits += ", finite"
        raise InvalidInputError(f"{what} of row {name} is {array[row]}; expected {limits}")
    return array


def _within(array: NDArray[Any], low: float, high: float | None) -> bool:
    """Return whether all values are known, finite and within their range, by two quick passes."""
    top = array.max()
    return bool(array.min() >= low and top <= (np.finfo(np.float64).max if high is None else high))


def _converted(values: object, dtype: type, num_rows: int, what: str) -> NDArray[Any]:
    if isinstance(values, bool | int | float):
        if not _fits(np.array([values]), dtype):
            raise InvalidInputError(f"{what} is {values}, which is not a {dtype.__name__}")
        full: Array = np.full(num_rows, values, dtype=dtype)
        full.flags.writeable = False
        return full
    try:
        raw = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as exc:
        raise InvalidInputError(f"{what} is not a flat list of numbers") from exc
    if raw.size == 0:
        raw = raw.reshape(-1).astype(dtype)
    if not _fits(raw, dtype):
        kind = {"b": "true or false", "i": "whole numbers", "f": "numbers"}[np.dtype(dtype).kind]
        raise InvalidInputError(f"{what} must hold {kind} within the range of {dtype.__name__}")
    return frozen_array(raw, dtype)


def _fits(raw: NDArray[Any], dtype: type) -> bool:
    """Return whether every value of an array can become the dtype without loss of meaning."""
    kind = raw.dtype.kind
    if dtype is np.bool_:
        return kind == "b" or (kind in "iu" and bool(np.isin(raw, (0, 1)).all()))
    if dtype is np.float64:
        return kind in "iuf"
    if kind not in "iuf" or (kind == "f" and not np.array_equal(raw, np.trunc(raw))):
        return False
    if raw.dtype == dtype:
        return True
    limits = np.iinfo(dtype)
    return raw.size == 0 or bool(raw.max() <= limits.max and raw.min() >= limits.min)


def names(values: object, what: str) -> tuple[str, ...]:
    """Return a tuple of unique, non-empty names.

    Raises:
        InvalidInputError: An empty or repeated name.
    """
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InvalidInputError(f"{what} must be a list of names")
    result = tuple(values)
    if not all(type(name) is str and name for name in result):
        bad = next(name for name in result if type(name) is not str or not name)
        raise InvalidInputError(f"{what}: {bad!r} is not a name; expected a non-empty string")
    if len(set(result)) != len(result):
        seen: set[str] = set()
        twice = next(name for name in result if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise InvalidInputError(f"{what}: {twice!r} stands twice; names must be unique")
    return result


def frozen_json(value: object, what: str) -> Any:  # noqa: ANN401 (JSON is any value)
    """Return a JSON value with lists as tuples and objects as read-only mappings.

    Walks with an explicit stack; refuses what is nested too deeply for those that recurse.
    """
    done: list[Any] = []
    todo: list[tuple[str, Any, int]] = [("visit", value, 0)]
    while todo:
        action, item, depth = todo.pop()
        if depth > MAX_NESTING:
            raise InvalidInputError(f"{what} are nested more than {MAX_NESTING} deep")
        if action == "list":
            parts = [done.pop() for _ in range(item)]
            done.append(tuple(parts))
        elif action == "map":
            done.append(MappingProxyType({key: done.pop() for key in item}))
        elif isinstance(item, Mapping):
            if not all(isinstance(key, str) for key in item):
                raise InvalidInputError(f"{what}: keys must be strings")
            todo.append(("map", list(item), depth))
            todo.extend(("visit", part, depth + 1) for part in item.values())
        elif isinstance(item, list | tuple):
            todo.append(("list", len(item), depth))
            todo.extend(("visit", part, depth + 1) for part in item)
        elif item is None or isinstance(item, str | bool | int | float):
            if isinstance(item, float) and item - item != 0:
                raise InvalidInputError(f"{what}: {item} is not a JSON number")
            done.append(item)
        else:
            raise InvalidInputError(f"{what}: {type(item).__name__} is not a JSON value")
    return done[0]


def number_or_none(value: float) -> float | None:
    """Return a number, or None where it is not known or not limited.

    >>> number_or_none(2.5), number_or_none(float("nan")), number_or_none(float("inf"))
    (2.5, None, None)
    """
    return value if math.isfinite(value) else None


def thawed(value: Any) -> Any:  # noqa: ANN401 (JSON is any value)
    """Return a frozen JSON value with plain lists and dicts.

    >>> thawed({"a": (1, 2)})
    {'a': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {key: thawed(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [thawed(part) for part in value]
    return value


def ragged(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Return the pointer and value columns of a list of lists."""
    sizes = np.fromiter((len(part) for part in lists), dtype=np.int64, count=len(lists))
    pointers = np.zeros(len(lists) + 1, dtype=np.int32)
    np.cumsum(sizes, out=pointers[1:])
    flat = [value for part in lists for value in part]
    return frozen_array(pointers, np.int32), frozen_array(flat, np.int32)


def group_rows(keys: NDArray[Any], num_keys: int) -> tuple[Longs, Longs]:
    """Return ``(ptr, rows)``: rows of key k are ``rows[ptr[k]:ptr[k+1]]``, in their old order."""
    order = np.argsort(keys, kind="stable").astype(np.int64)
    pointers = np.zeros(num_keys + 1, dtype=np.int64)
    np.cumsum(np.bincount(keys, minlength=num_keys), out=pointers[1:])
    return pointers, order


def sum_by(keys: NDArray[Any], values: NDArray[Any], num_keys: int) -> Floats:
    """Return the sum of the values of each key, 0 to ``num_keys - 1``."""
    return np.asarray(np.bincount(keys, weights=values, minlength=num_keys), dtype=np.float64)
