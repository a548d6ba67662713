"""Small JSON files that two processes speak through: whole or not there at all."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.atomic_files import write_atomically

LEASE = "lease.json"
PROGRESS = "progress.json"


def write_json(path: Path, value: object) -> None:
    """Write a value; whoever reads meanwhile sees the old file or the new one."""
    write_atomically(path, json.dumps(value))


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def figure(values: Mapping[str, Any], name: str) -> float | None:
    """Return a number that a job reported; None where there is none, whatever else is there."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None
