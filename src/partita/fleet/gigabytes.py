"""Memory in GB, where others read or wrote it so; everything else counts bytes.

Jobs are told of their memory in GB by ``PARTITA_MEMORY_GB`` and their lease, clients of version 0.1
by a fleet's replies, and state files and replies of that version hold it in GB alone.
"""

from collections.abc import Mapping
from typing import Any

_GB = 1e9
_FORMER: Mapping[str, str] = {
    "memory_gb": "memory_bytes",
    "memory_gb_granted": "memory_bytes_granted",
}


def in_gb(size_bytes: float) -> float:
    """Return a size in GB."""
    return size_bytes / _GB


def in_bytes(value: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return JSON with memory in bytes alone, at any depth; what it has in bytes already stays.

    >>> in_bytes([{"server": "host0", "memory_gb": 62.5}])
    [{'server': 'host0', 'memory_bytes': 62500000000.0}]
    """
    if isinstance(value, list):
        return [in_bytes(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    found = {name: in_bytes(part) for name, part in value.items() if name not in _FORMER}
    for former, name in _FORMER.items():
        if former in value:
            found.setdefault(name, value[former] * _GB)
    return found
