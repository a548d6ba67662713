"""Hugging Face configurations: the text of a ``config.json``, tiny ones and classes by name."""

import json
from collections.abc import Mapping
from typing import Any

from partita.errors import FormatError, InvalidInputError, UnsupportedError
from partita.models.huggingface import TINY_CONFIGURATIONS, import_transformers
from partita.names import suggest

_CLASS_SUFFIX = "Config"
_TINY = "tiny-"


def read_configuration(text: str) -> dict[str, Any]:
    """Return the configuration in the text of a ``config.json``.

    Raises:
        FormatError: It is no JSON object, or names no model type.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        line = getattr(exc, "lineno", 0)
        raise FormatError("not valid JSON", line=line) from exc
    if isinstance(found, dict) and str(found.get("format", "")).startswith("partita."):
        raise FormatError(
            f"a {found['format']} document, not a Hugging Face configuration; "
            "'partita plan' reads such a file"
        )
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise FormatError("not a Hugging Face configuration: expected an object with model_type")
    return found


def named_configuration(name: str) -> dict[str, Any]:
    """Return a configuration by name.

    Args:
        name: A tiny one, with or without ``tiny-``, such as ``"tiny-llama"``; or a class of
            transformers with its own defaults, such as ``"LlamaConfig"``.

    Raises:
        InvalidInputError: There is none of this name.
        UnsupportedError: transformers is not installed.
    """
    for tiny in (name, f"{_TINY}{name}"):
        if tiny in TINY_CONFIGURATIONS:
            return dict(TINY_CONFIGURATIONS[tiny])
    if name.endswith(_CLASS_SUFFIX):
        transformers = import_transformers()
        kind = getattr(getattr(transformers, name, None), "model_type", "")
        if not kind:
            raise UnsupportedError(f"transformers {transformers.__version__} has no {name!r}")
        return {"model_type": kind}
    if "/" in name:
        raise InvalidInputError(
            f"{name!r} is no file or directory here, and nothing is downloaded from the Hugging "
            "Face hub; fetch its config.json and give the path"
        )
    raise InvalidInputError(
        f"no Hugging Face configuration {name!r}{suggest(name, TINY_CONFIGURATIONS)}, classes such "
        "as LlamaConfig, and paths of a config.json"
    )


def configured_dtype(configuration: Mapping[str, Any]) -> str:
    """Return the dtype of the weights that a configuration names; empty where it names none."""
    inner = configuration.get("text_config")
    for mapping in (configuration, inner if isinstance(inner, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            if isinstance(mapping.get(key), str):
                return str(mapping[key]).removeprefix("torch.")
    return ""


def changed_configuration(configuration: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a configuration with options of the form ``hidden_size=64,num_hidden_layers=2``.

    Values are JSON, or bare words: lists and objects too (``depths=[2,2]``).

    Raises:
        InvalidInputError: An option that this type of model does not have, or that says nothing.
    """
    if not text:
        return dict(configuration)
    transformers = import_transformers()
    kind = configuration["model_type"]
    known = transformers.CONFIG_MAPPING[kind]() if kind in transformers.CONFIG_MAPPING else None
    changes: dict[str, Any] = {}
    for option in _options(text):
        name, _, value = option.strip().partition("=")
        if not name or not value:
            raise InvalidInputError(
                f"option {option!r} of a Hugging Face configuration is not of the form name=value"
            )
        if known is not None and not hasattr(known, name):
            close = suggest(name, tuple(known.to_dict()))
            raise InvalidInputError(f"a {kind} configuration has no option {name!r}{close}")
        changes[name] = _value(value)
    return {**configuration, **changes}


def _options(text: str) -> list[str]:
    """Return the options of a text, cut at commas outside of brackets, braces and quotes."""
    parts, depth, quoted = [""], 0, False
    for place, sign in enumerate(text):
        if sign == '"' and text[place - 1 : place] != "\\":
            quoted = not quoted
        depth += 0 if quoted else (sign in "[{") - (sign in "]}")
        if sign == "," and depth <= 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _value(text: str) -> Any:  # noqa: ANN401 (any JSON value)
    try:
        return json.loads(text)
    except ValueError:
        return text


def configuration_with_defaults(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with what its class of transformers adds.

    Raises:
        InvalidInputError: The class does not take it.
        UnsupportedError: transformers is not installed, or has no such model type.
    """
    options = dict(configuration)
    transformers, kind = import_transformers(), options.pop("model_type", "")
    if kind not in transformers.CONFIG_MAPPING:
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no model type {kind!r}"
        )
    try:
        whole = transformers.AutoConfig.for_model(kind, **options).to_dict()
    except (TypeError, ValueError, AttributeError) as exc:
        raise InvalidInputError(f"configuration of {kind!r} is refused: {exc}") from exc
    return {str(key): value for key, value in whole.items()}
