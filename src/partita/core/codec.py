"""The one place that turns core types into JSON documents and back.

A document is an object with ``"format": "partita.graph"``, its ``"version"`` and the fields of the
type. A column is a list, or ``{"every": value, "rows": n}`` where all rows are equal; an unknown
number is ``null``, an unlimited one ``"inf"``. A long tuple of equal parts is ``{"distinct": [...],
"of": [...]}``; with thousands of parts that differ by their names or numbers alone, those stand
apart as lists, ``{"distinct": [...], "of": [...], "each": {"name": [...]}}``. Unknown keys are
errors; a document of a newer version is refused, and so is one whose short columns unfold to more
than ``MAX_UNFOLDED_ROWS``.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum, StrEnum
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from partita.errors import FormatError, InvalidInputError
from partita.plugins import load_target

FORMATS: Mapping[str, str] = {
    "partita.graph": "partita.core.graph:Graph",
    "partita.cluster": "partita.core.cluster:Cluster",
    "partita.objective": "partita.core.problem:Objective",
    "partita.problem": "partita.core.problem:Problem",
    "partita.plan": "partita.core.plan:Plan",
    "partita.solution": "partita.core.solution:Solution",
    "partita.program": "partita.core.program:Program",
    "partita.timeline": "partita.core.timeline:Timeline",
    "partita.energy-profile": "partita.core.energy:EnergyProfile",
    "partita.frontier": "partita.core.energy:Frontier",
    "partita.sensitivity": "partita.core.fleet:Sensitivity",
    "partita.trace": "partita.core.fleet:Trace",
    "partita.fleet-history": "partita.core.fleet:FleetHistory",
}
"""Where the type of each document is; a type is imported when a document of it is read."""
VERSIONS: Mapping[str, int] = {
    **dict.fromkeys(FORMATS, 1),
    **dict.fromkeys(("partita.sensitivity", "partita.trace", "partita.fleet-history"), 2),
}
"""The version of each document that is written; all before it are read."""
_OLD_UNITS: Mapping[str, tuple[str, float]] = {
    "dataset_gb": ("dataset_bytes", 1e9),
    "working_gb": ("working_bytes", 1e9),
    "memory_gb": ("memory_bytes", 1e9),
    "demand_memory_gb": ("demand_memory_bytes", 1e9),
    "storage_mb_per_s": ("storage_bytes_per_s", 1e6),
    "storage_bandwidth_mb_per_s": ("storage_bandwidth_bytes_per_s", 1e6),
    "memory_gib_per_s": ("memory_bytes_per_s", 2.0**30),
}
"""Keys of fleets' documents of version 1, with those of today and the factor between them."""
MAX_UNFOLDED_ROWS = 2**26
"""Rows that all ``every`` columns of a document may have together: 512 MiB of memory at most."""
_SHORT = 8
_LONG = 1000
"""Parts of a tuple from which those fields stand apart that nearly every part has of its own."""
_ALLOWED: Mapping[str, set[type]] = {"f": {int, float, type(None), str}, "b": {bool}}
_T = TypeVar("_T")


def format_of(kind: type) -> str:
    """Return the format name of a core type.

    Raises:
        InvalidInputError: It has none.
    """
    target = f"{kind.__module__}:{kind.__qualname__}"
    for name, known in FORMATS.items():
        if known == target:
            return name
    raise InvalidInputError(
        f"{kind.__name__} has no document of its own; there are {', '.join(FORMATS)}"
    )


def type_of(name: str) -> type:
    """Return the core type of a format."""
    kind: type = load_target(FORMATS[name])
    return kind


def encode(value: object) -> dict[str, Any]:
    """Return the document of a core object."""
    name = format_of(type(value))
    return {"format": name, "version": VERSIONS[name], **_encode(value)}


def decode(document: object) -> Any:  # noqa: ANN401 (any core type)
    """Return the core object of a document.

    Raises:
        FormatError: It is not a document, is of a newer version, or a field is wrong.
    """
    if not isinstance(document, Mapping):
        raise FormatError(f"expected a JSON object, got {_kind_of(document)}")
    name, version = document.get("format"), document.get("version")
    if not isinstance(name, str) or name not in FORMATS:
        raise FormatError(f"format is {_short(name)}; expected one of {', '.join(FORMATS)}")
    newest = VERSIONS[name]
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FormatError(f"version of this {name} is {_short(version)}; expected {newest}")
    if version > newest:
        raise FormatError(
            f"this {name} is of version {version}, newer than the {newest} that this Partita "
            "reads; upgrade Partita"
        )
    body = {key: value for key, value in document.items() if key not in ("format", "version")}
    if version < newest:
        body = _in_bytes(body)
    return _decode(body, type_of(name), name.removeprefix("partita."), _Budget())


def _in_bytes(value: Any) -> Any:  # noqa: ANN401 (JSON is any value)
    """Return a fleet's document of version 1 in the units of version 2."""
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return [_in_bytes(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    found = {}
    for key, part in value.items():
        name, factor = _OLD_UNITS.get(key, (key, 1.0))
        found[name] = _in_bytes(part) if factor == 1 else _scaled(part, factor)
    return found


def _scaled(value: Any, factor: float) -> Any:  # noqa: ANN401 (JSON is any value)
    """Return a number or column in another unit; whatever else stays, and is refused later."""
    if isinstance(value, list):
        return [_scaled(part, factor) for part in value]
    if isinstance(value, Mapping) and "every" in value:
        return {**value, "every": _scaled(value["every"], factor)}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        return value * factor
    except OverflowError:
        return value


def decode_as(document: object, kind: type[_T]) -> _T:
    """Return the core object of a document that must be of one type.

    Raises:
        FormatError: It is of another type, or wrong.
    """
    result = decode(document)
    if not isinstance(result, kind):
        raise FormatError(f"expected a {format_of(kind)}, got a {format_of(type(result))}")
    return result


def encode_part(value: object) -> Any:  # noqa: ANN401 (JSON is any value)
    """Return an object that is no document of its own as JSON values."""
    return _encode(value)


def decode_part(values: object, kind: type[_T], name: str) -> _T:
    """Return the object of JSON values that ``encode_part`` made.

    Args:
        values: The values.
        kind: The type: a dataclass of fields as those of documents.
        name: Its name in errors.

    Raises:
        FormatError: A field is wrong, unknown or missing.
    """
    result: _T = _decode(values, kind, name, _Budget())
    return result


def write_json(value: object) -> str:
    """Return the document of a core object as text, with one line for each field."""
    lines = [
        f"{json.dumps(key)}: {json.dumps(part, separators=(',', ':'), allow_nan=False)}"
        for key, part in encode(value).items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def parse_json(text: str) -> Any:  # noqa: ANN401 (JSON is any value)
    """Return the value of a JSON text; NaN, infinities and repeated keys are refused.

    Raises:
        FormatError: The text is not JSON; knows the line.
    """
    try:
        return json.loads(
            text.removeprefix("\ufeff"),
            parse_float=_finite_float,
            parse_constant=_refuse_constant,
            object_pairs_hook=_unique_keys,
        )
    except json.JSONDecodeError as exc:
        raise FormatError(f"not valid JSON: {exc.msg}", line=exc.lineno) from exc
    except RecursionError as exc:
        raise FormatError("not valid JSON: nested too deeply") from exc
    except FormatError:
        raise
    except ValueError as exc:  # of int(), beyond 4300 digits
        raise FormatError("not valid JSON: a number has too many digits") from exc


def read_json(text: str) -> Any:  # noqa: ANN401 (any core type)
    """Return the core object of a text that ``write_json`` wrote."""
    return decode(parse_json(text))


def _finite_float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise FormatError(f"{_cut(digits)} is beyond the range of numbers; expected a finite one")
    return value


def _refuse_constant(name: str) -> None:
    raise FormatError(f"{name} is not a JSON number; expected a finite one")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise FormatError(f"key {_short(key)} stands twice in one object")
            seen.add(key)
    return result


def _kind_of(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return names.get(type(value), "null" if value is None else "a number")


def _short(value: object) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


class _Field(typing.NamedTuple):
    """A field of a dataclass: its key in documents, name, type, and whether it may be left out.

    A field that came later may be ``silent`` about its default value: documents that do not use it
    stay as they were, letter by letter, and what is known by their digest is found again.
    """

    key: str
    name: str
    hint: Any
    optional: bool
    silent: bool
    default: Any


@cache
def _fields(kind: type) -> tuple[_Field, ...]:
    """Return the fields of a dataclass; the metadata may give another ``key``, or ``silent``."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return tuple(
        _Field(
            key=f.metadata.get("key", f.name),
            name=f.name,
            hint=hints[f.name],
            optional=f.default is not missing or f.default_factory is not missing,
            silent=f.metadata.get("silent", False),
            default=f.default,
        )
        for f in dataclasses.fields(kind)
    )


def _dtype_of(hint: object) -> np.dtype[Any] | None:
    """Return the dtype of an ``NDArray`` annotation, None for any other."""
    if typing.get_origin(hint) is not np.ndarray:
        return None
    dtype: np.dtype[Any] = np.dtype(typing.get_args(typing.get_args(hint)[1])[0])
    return dtype


def _optional(hint: object) -> object | None:
    """Return X of ``X | None``, None for any other annotation."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return None
    inner: object = next(part for part in typing.get_args(hint) if part is not type(None))
    return inner


def _encode(value: Any) -> Any:  # noqa: ANN401, PLR0911 (any field; one return a kind)
    if isinstance(value, np.ndarray):
        return _encode_column(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.generic):
        return _encode(value.item())
    if isinstance(value, float):
        return _encode_number(value)
    if dataclasses.is_dataclass(value):
        kind: Any = type(value)
        held = ((field, getattr(value, field.name)) for field in _fields(kind))
        return {f.key: _encode(each) for f, each in held if not (f.silent and each == f.default)}
    if isinstance(value, tuple):
        if len(value) > _SHORT and dataclasses.is_dataclass(value[0]):
            return _encode_distinct(value)
        return [_encode(part) for part in value]
    if isinstance(value, Mapping):
        return {key: _encode(part) for key, part in value.items()}
    return value


def _encode_number(value: float) -> float | str | None:
    if math.isfinite(value):
        return value
    return None if math.isnan(value) else "inf"


def _encode_column(values: NDArray[Any]) -> Any:  # noqa: ANN401 (a list or an object)
    if len(values) > _SHORT:
        first = values[0]
        unknown = values.dtype.kind == "f" and np.isnan(first)
        same = np.isnan(values) if unknown else values == first
        if same.all():
            return {"every": _encode(first.item()), "rows": len(values)}
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        return [_encode_number(value) for value in values.tolist()]
    return values.tolist()


def _encode_distinct(parts: tuple[Any, ...]) -> Any:  # noqa: ANN401 (a list or an object)
    if getattr(type(parts[0]), "__hash__", None) is None:
        return [_encode(part) for part in parts]
    if len(parts) >= _LONG and (each := _own_fields(parts)):
        return _encode_alike(parts, each)
    index: dict[Any, int] = {}
    of = [index.setdefault(part, len(index)) for part in parts]
    if len(index) == len(parts):
        return [_encode(part) for part in parts]
    return {"distinct": [_encode(part) for part in index], "of": of}


def _own_fields(parts: tuple[Any, ...]) -> list[_Field]:
    """Return the names and whole numbers that differ from part to part."""
    kind: Any = type(parts[0])
    fields = _fields(kind)
    if any(_dtype_of(field.hint) is not None for field in fields):
        return []
    own = (field for field in fields if field.hint in (str, int))
    return [f for f in own if len({getattr(part, f.name) for part in parts}) > _LONG // 10]


def _encode_alike(parts: tuple[Any, ...], each: list[_Field]) -> Any:  # noqa: ANN401
    """Return parts that differ by some fields: what else they are, once, and those as lists."""
    kind: Any = type(parts[0])
    rest = [field.name for field in _fields(kind) if field not in each]
    index: dict[Any, int] = {}
    first: list[Any] = []
    of = []
    for part in parts:
        row = index.setdefault(tuple(_key(getattr(part, name)) for name in rest), len(index))
        if row == len(first):
            first.append(part)
        of.append(row)
    if 2 * len(first) > len(parts):
        return [_encode(part) for part in parts]
    apart = {field.key for field in each}
    distinct = [{k: v for k, v in _encode(part).items() if k not in apart} for part in first]
    own = {field.key: [getattr(part, field.name) for part in parts] for field in each}
    return {"distinct": distinct, "of": of, "each": own}


def _key(value: Any) -> Any:  # noqa: ANN401 (any field)
    """Return a value that can be hashed, the same for all numbers that are not known."""
    if isinstance(value, Mapping):
        return tuple(sorted(value.items()))
    return None if isinstance(value, float) and math.isnan(value) else value


class _Budget:
    """The rows that ``every`` columns may still unfold to, so that a short text stays small."""

    def __init__(self) -> None:
        self.rows = MAX_UNFOLDED_ROWS

    def spend(self, rows: int, path: str) -> None:
        """Take rows for a column, or refuse it."""
        if not 0 <= rows <= self.rows:
            _refuse(path, rows, f"0 to {self.rows} (a document unfolds to {MAX_UNFOLDED_ROWS})")
        self.rows -= rows


def _decode(  # noqa: PLR0911 (one return a kind)
    value: Any,  # noqa: ANN401 (JSON is any value)
    hint: Any,  # noqa: ANN401 (any annotation)
    path: str,
    budget: _Budget,
) -> Any:  # noqa: ANN401 (any field)
    inner = _optional(hint)
    if inner is not None:
        return None if value is None else _decode(value, inner, path, budget)
    dtype = _dtype_of(hint)
    if dtype is not None:
        return _decode_column(value, dtype, path, budget)
    if dataclasses.is_dataclass(hint):
        return _decode_object(value, hint, path, budget)
    origin = typing.get_origin(hint)
    if origin is tuple:
        return _decode_tuple(value, typing.get_args(hint)[0], path, budget)
    if origin is not None and issubclass(origin, Mapping):
        return _decode_mapping(value, typing.get_args(hint)[1], path, budget)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _decode_choice(value, hint, path)
    return _SCALARS[hint](value, path) if hint in _SCALARS else value


def _refuse(path: str, value: object, expected: str) -> typing.NoReturn:
    raise FormatError(f"{path} is {_short(value)}; expected {expected}")


def _decode_object(value: object, kind: Any, path: str, budget: _Budget) -> Any:  # noqa: ANN401
    if not isinstance(value, Mapping):
        _refuse(path, value, "an object")
    known = _fields(kind)
    unknown = set(value) - {field.key for field in known}
    if unknown:
        raise FormatError(
            f"{path}: unknown key {_short(min(unknown, key=str))}; known are "
            f"{', '.join(field.key for field in known)}"
        )
    absent = [field.key for field in known if field.key not in value and not field.optional]
    if absent:
        raise FormatError(f"{path}: key {absent[0]!r} is missing")
    parts = {
        field.name: _decode(value[field.key], field.hint, f"{path}.{field.key}", budget)
        for field in known
        if field.key in value
    }
    try:
        return kind(**parts)
    except FormatError:
        raise
    except InvalidInputError as exc:
        raise FormatError(f"{path}: {exc}") from exc


def _decode_column(value: object, dtype: np.dtype[Any], path: str, budget: _Budget) -> NDArray[Any]:
    if isinstance(value, Mapping):
        if set(value) != {"every", "rows"}:
            _refuse(path, value, 'a list, or an object with "every" and "rows"')
        rows = _decode_int(value["rows"], f"{path}.rows")
        budget.spend(rows, f"{path}.rows")
        one = _decode_list([value["every"]], dtype, f"{path}.every")
        return np.full(rows, one[0], dtype=dtype)
    return _decode_list(value, dtype, path)


def _decode_list(value: object, dtype: np.dtype[Any], path: str) -> NDArray[Any]:
    if not isinstance(value, list | tuple):
        _refuse(path, value, "a list")
    kinds = set(map(type, value))
    allowed: set[type] = _ALLOWED.get(dtype.kind, {int})
    if not kinds <= allowed or (str in kinds and {v for v in value if type(v) is str} != {"inf"}):
        row = next(
            i
            for i, v in enumerate(value)
            if type(v) not in allowed or (type(v) is str and v != "inf")
        )
        _refuse(
            f"{path}[{row}]",
            value[row],
            {"f": "a number", "b": "true or false"}.get(dtype.kind, "a whole number"),
        )
    try:
        return np.array(value, dtype=dtype)
    except (OverflowError, ValueError) as exc:
        raise FormatError(f"{path} holds a number beyond the range of {dtype.name}") from exc


def _decode_tuple(
    value: object,
    part: Any,  # noqa: ANN401 (any annotation)
    path: str,
    budget: _Budget,
) -> tuple[Any, ...]:
    if isinstance(value, Mapping) and {"distinct", "of"} <= set(value) <= {
        "distinct",
        "of",
        "each",
    }:
        return _decode_distinct(value, part, path, budget)
    if not isinstance(value, list | tuple):
        _refuse(path, value, "a list")
    if part is str and all(type(item) is str for item in value):
        return tuple(value)
    return tuple(_decode(item, part, f"{path}[{i}]", budget) for i, item in enumerate(value))


def _decode_distinct(
    value: Mapping[str, Any],
    part: Any,  # noqa: ANN401 (any annotation)
    path: str,
    budget: _Budget,
) -> tuple[Any, ...]:
    distinct = value["distinct"]
    if not isinstance(distinct, list | tuple):
        _refuse(f"{path}.distinct", distinct, "a list")
    of = _decode_list(value["of"], np.dtype(np.int64), f"{path}.of")
    if len(of) and not (of.min() >= 0 and of.max() < len(distinct)):
        _refuse(f"{path}.of", "an index out of range", f"0 to {len(distinct) - 1}")
    if "each" not in value or not dataclasses.is_dataclass(part):
        parts = _decode_tuple(distinct, part, f"{path}.distinct", budget)
        return tuple(parts[index] for index in of.tolist())
    kind_of: Any = part
    own = _own_values(value["each"], len(of), kind_of, f"{path}.each")
    # Whole parts of the first row of each kind check what they share, and the others copy it.
    shared: dict[int, Any] = {}
    found = []
    for row, kind in enumerate(of.tolist()):
        mine = {name: values[row] for name, values in own.items()}
        if kind not in shared:
            whole = distinct[kind]
            if isinstance(whole, Mapping):
                keys = {f.key: mine[f.name] for f in _fields(kind_of) if f.name in mine}
                whole = {**keys, **whole}
            shared[kind] = _decode(whole, part, f"{path}.distinct[{kind}]", budget)
        try:
            found.append(dataclasses.replace(shared[kind], **mine))
        except InvalidInputError as exc:
            raise FormatError(f"{path}[{row}]: {exc}") from exc
    return tuple(found)


def _own_values(
    value: object,
    size: int,
    part: Any,  # noqa: ANN401 (any annotation)
    path: str,
) -> dict[str, list[Any]]:
    """Return by name what each part has of its own."""
    known = {f.key: f for f in _fields(part)}
    if not isinstance(value, Mapping) or not set(value) <= set(known):
        _refuse(path, value, f"an object with keys of {', '.join(known)}")
    found = {}
    for key, column in value.items():
        if not isinstance(column, list | tuple) or len(column) != size:
            _refuse(f"{path}.{key}", column, f"a list of {size} values")
        decode_one = _SCALARS.get(known[key].hint)
        if decode_one is None:
            _refuse(f"{path}.{key}", "of parts", "names or numbers")
        found[known[key].name] = [decode_one(v, f"{path}.{key}[{i}]") for i, v in enumerate(column)]
    return found


def _decode_mapping(
    value: object,
    part: Any,  # noqa: ANN401 (any annotation)
    path: str,
    budget: _Budget,
) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        _refuse(path, value, "an object")
    return {key: _decode(item, part, f"{path}.{key}", budget) for key, item in value.items()}


def _decode_choice(value: object, kind: type[StrEnum], path: str) -> StrEnum:
    if isinstance(value, str):
        with suppress(ValueError):
            return kind(value)  # also names that a plug-in has added
    _refuse(path, value, f"one of {', '.join(choice.value for choice in kind)}")


def _decode_int(value: object, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(path, value, "a whole number")
    return value


def _decode_float(value: object, path: str) -> float:
    if value is None or value == "inf":
        return math.nan if value is None else math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(path, value, "a number")
    try:
        return float(value)
    except OverflowError:
        _refuse(path, value, "a number within the range of a double")


def _decode_str(value: object, path: str) -> str:
    if not isinstance(value, str):
        _refuse(path, value, "a string")
    return value


def _decode_bool(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        _refuse(path, value, "true or false")
    return value


_SCALARS: Mapping[Any, Callable[[object, str], Any]] = {
    int: _decode_int,
    float: _decode_float,
    str: _decode_str,
    bool: _decode_bool,
}
