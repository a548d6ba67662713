"""Values as JSON holds them: no NaN, no infinity, plain lists and dicts.

A document is encoded by ``core/codec.py``; every other thing that is printed with ``--json`` has a
method ``to_json``, which returns values that ``json.dumps`` takes.
"""

import math
from collections.abc import Mapping
from typing import Any


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
