"""Files of options (``--config``): YAML decoded through the fields of a request, with lines."""

from collections.abc import Collection, Mapping
from typing import Any

from partita.documents import read_text
from partita.errors import FormatError
from partita.names import suggest
from partita.requests import Field, Request, fields_of
from partita.yaml_nodes import (
    Items,
    Node,
    Scalar,
    Table,
    at_line,
    parse_yaml,
    read_table,
    read_value,
    refuse,
)
from partita.yaml_nodes import read_text as read_yaml_text


def read_options_file(
    path: str, request: type[Request], also: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the values that a file gives to the fields of a request.

    Args:
        path: The file; a key is the name of an option, with dashes or underscores, or its letter.
        request: The request.
        also: Flags of a command that are no fields of its request: names of values by key.

    Raises:
        FormatError: There is no such option, or a value that it does not take; knows the line.
    """
    try:
        root = parse_yaml(read_text(path), empty=Table(1, {}, {}))
        return read_options(read_table(root, "the file of options"), request, also)
    except FormatError as exc:
        raise (exc if exc.path else exc.at(path)) from exc


def read_options(
    table: Table,
    request: type[Request],
    also: Mapping[str, str] | None = None,
    own: Collection[str] = (),
) -> dict[str, Any]:
    """Return the values that a mapping in YAML gives to the fields of a request.

    Args:
        table: The mapping.
        request: The request.
        also: Flags of a command that are no fields of its request: names of values by key.
        own: Keys that are no options; they are left to the caller.

    Raises:
        FormatError: There is no such option, or a value that it does not take; knows the line.
    """
    flags = dict(also or {})
    by_key = {key: field for field in fields_of(request) for key in _keys(field)}
    values: dict[str, Any] = {}
    for key, node in table.entries.items():
        name = key.replace("_", "-")
        if name in own:
            continue
        if name not in by_key and name not in flags:
            known = sorted(key for key in (*by_key, *flags, *own) if len(key) > 1)
            problem = f"there is no option {key!r}{suggest(key, known)}"
            raise FormatError(problem, line=table.line_of[key])
        if isinstance(node, Scalar) and read_value(node, key) is None:
            continue  # nothing stands there: the default
        if name in flags:
            values[flags[name]] = _one(bool, node, f"option {key!r}")
        else:
            values[by_key[name].name] = _value(by_key[name], node, f"option {key!r}")
    return values


def _keys(field: Field) -> list[str]:
    return [field.name.replace("_", "-"), *(flag.lstrip("-") for flag in field.option.flags)]


def _value(field: Field, node: Node, what: str) -> Any:  # noqa: ANN401 (of the field's type)
    """Return the value of a field, checked as that of a request."""
    if field.is_multiple or field.option.joined_by:
        nodes = node.nodes if isinstance(node, Items) else (node,)
        values = tuple(_one(field.kind, one, what) for one in nodes)
        value: Any = values if field.is_multiple else field.join(tuple(map(str, values)))
    else:
        value = _one(field.kind, node, what)
    with at_line(node.line):
        field.check(value)
    return value


def _one(kind: type, node: Node, what: str) -> bool | int | float | str:
    """Return a single value of a type; a flag may be any of YAML's words for true and false."""
    if kind is bool:
        value = read_value(node, what)
        return value if isinstance(value, bool) else refuse(node, what, "true or false")
    text = read_yaml_text(node, what)
    if kind is str:
        return text
    try:
        return int(text) if kind is int else float(text)
    except ValueError:
        refuse(node, what, "a whole number" if kind is int else "a number")
