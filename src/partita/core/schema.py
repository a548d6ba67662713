"""JSON Schemas of the documents, made from the types themselves."""

import dataclasses
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from partita.core.codec import VERSIONS, _dtype_of, _fields, _optional, type_of

_SCALAR_SCHEMAS: Mapping[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"anyOf": [{"type": "number"}, {"type": "null"}, {"const": "inf"}]},
    str: {"type": "string"},
    bool: {"type": "boolean"},
}


def json_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a format, such as ``"partita.plan"``."""
    definitions: dict[str, Any] = {}
    body = _object_schema(type_of(name), definitions)
    body["properties"] = {
        "format": {"const": name},
        "version": {"type": "integer", "minimum": VERSIONS[name], "maximum": VERSIONS[name]},
        **body["properties"],
    }
    body["required"] = ["format", "version", *body["required"]]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": name,
        **body,
        "$defs": dict(sorted(definitions.items())),
    }


def _object_schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    fields = _fields(kind)
    return {
        "type": "object",
        "description": (kind.__doc__ or "").split("\n")[0],
        "properties": {field.key: _schema(field.hint, definitions) for field in fields},
        "required": [field.key for field in fields if not field.optional],
        "additionalProperties": False,
    }


def _schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401, PLR0911
    inner = _optional(hint)
    if inner is not None:
        return {"anyOf": [_schema(inner, definitions), {"type": "null"}]}
    dtype = _dtype_of(hint)
    if dtype is not None:
        return _column_schema(dtype.kind, definitions)
    if dataclasses.is_dataclass(hint):
        name = hint.__name__  # type: ignore[union-attr]  # a class, not an instance
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _object_schema(hint, definitions)
        return {"$ref": f"#/$defs/{name}"}
    origin = typing.get_origin(hint)
    if origin is tuple:
        return _tuple_schema(typing.get_args(hint)[0], definitions)
    if origin is not None and issubclass(origin, Mapping):
        return {
            "type": "object",
            "additionalProperties": _schema(typing.get_args(hint)[1], definitions),
        }
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return {"enum": [choice.value for choice in hint]}
    return _SCALAR_SCHEMAS.get(hint, {})


def _column_schema(kind: str, definitions: dict[str, Any]) -> dict[str, Any]:
    name, scalar = {"f": ("numbers", float), "b": ("flags", bool)}.get(kind, ("integers", int))
    item = _SCALAR_SCHEMAS[scalar]
    repeated = {
        "type": "object",
        "properties": {"every": item, "rows": {"type": "integer", "minimum": 0}},
        "required": ["every", "rows"],
        "additionalProperties": False,
    }
    definitions[name] = {"anyOf": [{"type": "array", "items": item}, repeated]}
    return {"$ref": f"#/$defs/{name}"}


def _tuple_schema(part: Any, definitions: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    plain = {"type": "array", "items": _schema(part, definitions)}
    if not dataclasses.is_dataclass(part):
        return plain
    distinct = {
        "type": "object",
        "properties": {"distinct": plain, "of": {"type": "array", "items": {"type": "integer"}}},
        "required": ["distinct", "of"],
        "additionalProperties": False,
    }
    alike = {
        "type": "object",
        "properties": {
            "distinct": {"type": "array", "items": {"type": "object"}},
            "of": {"type": "array", "items": {"type": "integer"}},
            "each": {"type": "object", "additionalProperties": {"type": "array"}},
        },
        "required": ["distinct", "of", "each"],
        "additionalProperties": False,
    }
    return {"anyOf": [plain, distinct, alike]}
