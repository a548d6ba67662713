"""Checked access to the values of a JSON document that others wrote.

A message names the place of a value as a path, ``nodes[3].size``, because a parsed document has no
line numbers any more.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from partita.core.codec import parse_json
from partita.core.columns import thawed
from partita.errors import FormatError, InvalidInputError

MAX_ID = 2**53
MAX_DEPTH = 32


@contextmanager
def format_errors() -> Iterator[None]:
    """Turn what the core types refuse into errors about the text they came from."""
    try:
        yield
    except FormatError:
        raise
    except InvalidInputError as exc:
        raise FormatError(str(exc)) from exc


def refuse(place: str, value: object, expected: str) -> NoReturn:
    """Raise a ``FormatError`` about a value of a document."""
    if isinstance(value, list | dict):
        shown = "a list" if isinstance(value, list) else "an object"
    else:
        text = repr(value)
        shown = text if len(text) <= 60 else f"{text[:57]}..."
    raise FormatError(f"{place} is {shown}; expected {expected}")


def as_number(value: object, place: str, *, low: float = 0.0, high: float = 1e18) -> float:
    """Return a JSON number within limits as a float.

    Raises:
        FormatError: It is not a number, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        refuse(place, value, f"a number from {low:g} to {high:g}")
    return float(value)


def as_integer(value: object, place: str, *, low: int = 0, high: int = MAX_ID) -> int:
    """Return a whole JSON number within limits; ``3.0`` is whole.

    Raises:
        FormatError: It is not a whole number, or out of range.
    """
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not low <= value <= high:  # type: ignore[operator]
        refuse(place, value, f"a whole number from {low} to {high}")
    return int(value)  # type: ignore[call-overload, no-any-return]  # int or float


def as_list(value: object, place: str) -> list[Any]:
    """Return a JSON list.

    Raises:
        FormatError: It is not a list.
    """
    if not isinstance(value, list):
        refuse(place, value, "a list")
    return value


class Fields:
    """A JSON object with its place in the document.

    Attributes:
        values: The object.
        place: Path to it, empty for the whole document.
    """

    __slots__ = ("place", "values")

    def __init__(self, value: object, place: str) -> None:
        if not isinstance(value, dict):
            refuse(place or "the document", value, "an object")
        self.values: dict[str, Any] = value
        self.place = place

    def at(self, key: str) -> str:
        """Return the path to a key."""
        return f"{self.place}.{key}" if self.place else key

    def need(self, key: str) -> Any:  # noqa: ANN401 (JSON is any value)
        """Return the value of a key that must be there."""
        if key not in self.values:
            raise FormatError(f"{self.place or 'the document'} has no key {key!r}")
        return self.values[key]

    def number(self, key: str, *, low: float = 0.0, high: float = 1e18) -> float:
        """Return a number that must be there."""
        return as_number(self.need(key), self.at(key), low=low, high=high)

    def number_or(self, key: str, default: float, *, high: float = 1e18) -> float:
        """Return a number of 0 or more, or a default where the key is missing."""
        return self.number(key, high=high) if key in self.values else default

    def integer(self, key: str, *, low: int = 0, high: int = MAX_ID) -> int:
        """Return a whole number that must be there."""
        return as_integer(self.need(key), self.at(key), low=low, high=high)

    def flag(self, key: str) -> bool:
        """Return true or false, which may be written 1 or 0."""
        value = self.need(key)
        if value not in (0, 1) or not isinstance(value, int):
            refuse(self.at(key), value, "true or false")
        return bool(value)

    def text_or(self, key: str, default: str) -> str:
        """Return a non-empty string, or a default where there is none."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            refuse(self.at(key), value, "a string")
        return value or default

    def items(self, key: str) -> list[Any]:
        """Return a list that must be there."""
        return as_list(self.need(key), self.at(key))

    def rows(self, key: str) -> list["Fields"]:
        """Return the objects of a list that must be there."""
        path = self.at(key)
        return [Fields(item, f"{path}[{row}]") for row, item in enumerate(self.items(key))]

    def object(self, key: str) -> "Fields":
        """Return an object that must be there."""
        return Fields(self.need(key), self.at(key))

    def rest(self, known: Sequence[str]) -> dict[str, Any]:
        """Return the keys that are not known, with their values.

        Raises:
            FormatError: A value is nested too deeply to be carried along.
        """
        found = {key: value for key, value in self.values.items() if key not in known}
        for key, value in found.items():
            level, depth = [value], 0
            while level:
                if depth > MAX_DEPTH:
                    raise FormatError(f"{self.at(key)} is nested more than {MAX_DEPTH} deep")
                level = [part for item in level for part in _parts(item)]
                depth += 1
        return found


def _parts(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def read_object(text: str) -> Fields:
    """Return the object that a JSON text holds.

    Raises:
        FormatError: It is not JSON, or not an object.
    """
    return Fields(parse_json(text), "")


def row_by_id(rows: Sequence[Fields], key: str = "id", *, low: int = -MAX_ID) -> dict[int, int]:
    """Return the row of each id.

    Raises:
        FormatError: An id is not a whole number, or stands twice.
    """
    found: dict[int, int] = {}
    for index, row in enumerate(rows):
        name = row.integer(key, low=low)
        if name in found:
            refuse(row.at(key), name, f"another id: it is that of {rows[found[name]].place} too")
        found[name] = index
    return found


def edge_ends(
    edges: Sequence[Fields], row_of: Mapping[int, int], ends: tuple[str, str], *, once: bool
) -> tuple[list[int], list[int]]:
    """Return the rows of both ends of each edge.

    Args:
        edges: The edges.
        row_of: Row of each node id.
        ends: Keys of source and target.
        once: Whether a pair may stand only once.

    Raises:
        FormatError: An edge names a node that is not there, or stands twice.
    """
    source, target = ([_row(edge, key, row_of) for edge in edges] for key in ends)
    if once:
        seen: dict[tuple[int, int], int] = {}
        for index, pair in enumerate(zip(source, target, strict=True)):
            if pair in seen:
                raise FormatError(
                    f"{edges[index].place} repeats {edges[seen[pair]].place}; "
                    "expected each pair of nodes once"
                )
            seen[pair] = index
    return source, target


def _row(edge: Fields, key: str, row_of: Mapping[int, int]) -> int:
    name = edge.integer(key, low=-MAX_ID)
    if name not in row_of:
        refuse(edge.at(key), name, "the id of a node")
    return row_of[name]


def extra_columns(rows: Sequence[Fields], known: Sequence[str]) -> dict[str, list[Any]]:
    """Return a list for each key of rows that no column holds, ``None`` where it is missing."""
    columns: dict[str, list[Any]] = {}
    for index, row in enumerate(rows):
        for key, value in row.rest(known).items():
            columns.setdefault(key, [None] * len(rows))[index] = value
    return columns


def extra_of(columns: Mapping[str, Sequence[Any]], row: int) -> dict[str, Any]:
    """Return one row of ``extra_columns`` again, without what is missing."""
    parts = {key: values[row] for key, values in columns.items()}
    return {key: value for key, value in parts.items() if value is not None}


def write_rows(document: Mapping[str, Any]) -> str:
    """Return a JSON text with a line for each key, and for each object in a list."""
    return (
        "{\n" + ",\n".join(f"{json.dumps(k)}: {_value(v)}" for k, v in document.items()) + "\n}\n"
    )


def _value(value: Any) -> str:  # noqa: ANN401 (JSON is any value)
    if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        return "[\n" + ",\n".join(json.dumps(thawed(row), allow_nan=False) for row in value) + "\n]"
    return json.dumps(thawed(value), allow_nan=False)


def plain(value: float) -> float | int:
    """Return a number as people write it in JSON: a whole one without ``.0``."""
    return int(value) if float(value).is_integer() and abs(value) < MAX_ID else float(value)
