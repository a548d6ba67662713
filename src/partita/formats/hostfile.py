"""Hostfiles: ``host slots=4`` (DeepSpeed, Open MPI) or ``host:4`` (MPICH), a line per host.

A host without a number has as many as the caller gives with the type (``4xa100``), else one. A
user before the name (``root@host``) is left out; a list in brackets (``n[1-4]``) is its hosts.
"""

import re

from partita.catalogue.inventory import Completion, FoundHost, equal_gpus, inventory_cluster
from partita.core.cluster import Cluster
from partita.errors import FormatError, InvalidInputError
from partita.names import short
from partita.slurm.hostlist import expand_hosts

_NAME = r"(?:[\w.-]+@)?[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9]|[\w.-]*(?:\[[0-9,-]+\][\w.-]*)+)?"
_SLOTS = re.compile(
    rf"({_NAME})(?:\s+(?:slots|cpu|count)\s*=\s*(\d{{1,5}})|:(\d{{1,5}}))?"
    r"(?:\s+max[_-]slots\s*=\s*\d+)?(?:\s+ifhn=\S+)?"
)
_LINE = re.compile(rf"{_NAME}(?::\d{{1,5}})?(?:\s+[a-z_-]+\s*=\s*\S+)*")
_COUNTED = re.compile(rf"{_NAME}(?:\s+slots\s*=|:\d{{1,5}}$)")
_MOST_HOSTS = 100_000
_LONGEST = 500
"""Characters of a line; patterns would take long for what is no host."""


def is_hostfile(text: str) -> bool:
    """Return whether all lines are hosts, with settings or not, and one has slots or a number."""
    lines = [line for line in _lines(text[:100_000]) if line]
    if len(text) > 100_000:
        lines = lines[:-1]
    if any(len(line) > _LONGEST for line in lines):
        return False
    has_slots = any(_COUNTED.match(line) for line in lines)
    return has_slots and all(_LINE.fullmatch(line) for line in lines)


def read_hostfile(text: str, known: Completion, *, name: str = "hostfile") -> Cluster:
    """Return the hosts, in their order; one that stands several times has the sum of its slots.

    Raises:
        FormatError: A line is not understood; knows it.
        InvalidInputError: No type of the GPUs is given.
    """
    slots: dict[str, int | None] = {}
    for number, line in enumerate(_lines(text), 1):
        if not line:
            continue
        match = _SLOTS.fullmatch(line) if len(line) <= _LONGEST else None
        if match is None:
            raise FormatError(f"{short(line)}; expected such as host slots=4", line=number)
        count = match[2] or match[3]
        for host in _hosts(match[1].rpartition("@")[2], number):
            before = slots.get(host)
            slots[host] = (before or 0) + int(count) if count else before
        if len(slots) > _MOST_HOSTS:
            raise FormatError(f"more than {_MOST_HOSTS} hosts", line=number)
    return inventory_cluster(
        name,
        [
            FoundHost(name=host, gpus=None if count is None else equal_gpus(count, host))
            for host, count in slots.items()
        ],
        known,
    )


def _hosts(names: str, line: int) -> tuple[str, ...]:
    try:
        return expand_hosts(names)
    except InvalidInputError as exc:
        raise FormatError(str(exc), line=line) from exc


def _lines(text: str) -> list[str]:
    """Return the lines without comments."""
    return [line.partition("#")[0].strip() for line in text.splitlines()]
