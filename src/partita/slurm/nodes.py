"""The nodes of a Slurm cluster, from ``scontrol show node`` or from ``slurm.conf``."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from partita.errors import InvalidInputError
from partita.names import same_product
from partita.slurm.hostlist import expand_hosts

_MIB = 2**20
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=")
_GPUS = re.compile(r"\bgpu(?::(?P<type>[^:(),]+))??:(?P<count>\d{1,6})(?=[(,\s]|$)")
_RECORD = re.compile(r"\w+Name=|\s*(?:Node|Switch|Block|Ring|Partition|Reservation)Name=", re.I)
_KEYS = {
    key.lower(): key
    for key in (
        *("NodeName", "SwitchName", "BlockName", "RingName", "Nodes", "Switches", "CPUs", "Gres"),
        *("RealMemory", "MemSpecLimit", "Sockets", "CoresPerSocket", "ThreadsPerCore", "State"),
    )
}
"""Names that configuration files have, which Slurm reads in any case of letters."""
_MOST_NODES = 100_000
_AWAY = (
    "DOWN",
    "DRAIN",
    "FAIL",
    "MAINT",
    "POWERED_DOWN",
    "POWERING_DOWN",
    "POWER_DOWN",
    "REBOOT",
    "FUTURE",
    "INVAL",
)
_MARKS = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "%": "POWERING_DOWN", "$": "MAINT"}
_MARKS |= {"@": "REBOOT", "!": "POWERED_DOWN", "#": "POWERING_UP", "-": "PLANNED", "^": "REBOOT"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """A node as Slurm describes it.

    Attributes:
        name: Its name.
        states: Its states, such as ``("IDLE", "DRAIN")``.
        reason: Why it is down or drained, as its administrator wrote.
        cpus: CPUs that jobs may have.
        memory_bytes: Memory that jobs may have.
        gpus: GPUs by type, in Slurm's order; the type is empty where Slurm knows none.
        partitions: Partitions that it is in.
    """

    name: str
    states: tuple[str, ...]
    reason: str
    cpus: int
    memory_bytes: int
    gpus: tuple[tuple[str, int], ...]
    partitions: tuple[str, ...]

    @property
    def away(self) -> str:
        """Why nothing can be started on it, in a few words; empty = something can.

        One that does not respond, or of which nothing is known, is not away yet: all are like that
        for a moment after a restart of the controller, which calls those DOWN that stay so.
        """
        words = [state for state in self.states if state.startswith(_AWAY)]
        return " ".join(filter(None, ["+".join(words), self.reason])) if words else ""


def fields_of(line: str) -> dict[str, str]:
    """Return what a line of ``scontrol --oneliner`` says, by name; the first of equal names."""
    found = list(_FIELD.finditer(line))
    ends = [match.start() for match in found[1:]] + [len(line)]
    fields: dict[str, str] = {}
    for match, end in zip(found, ends, strict=True):
        name = _KEYS.get(match.group(1).lower(), match.group(1))
        fields.setdefault(name, line[match.end() : end].strip())
    return fields


def records_of(text: str, first: str) -> list[str]:
    """Return the records of what scontrol printed, in one line each, with ``--oneliner`` or not.

    Records of other names are left out, as are lines that are a comment; a backslash at the end of
    a line goes on in the next one.
    """
    records: list[list[str]] = []
    is_ours = False
    for line in text.replace("\\\n", " ").splitlines():
        if line.lstrip().lower().startswith(f"{first.lower()}="):
            records.append([])
            is_ours = True
        elif _RECORD.match(line):
            is_ours = False
        if is_ours and line.strip() and not line.startswith("#"):
            records[-1].append(line.strip())
    return [" ".join(lines) for lines in records]


def read_nodes(text: str) -> tuple[SlurmNode, ...]:
    """Return the nodes that ``scontrol show node`` printed, or that ``slurm.conf`` describes.

    Raises:
        InvalidInputError: There are no nodes, or what they have cannot be read.
    """
    nodes: list[SlurmNode] = []
    usual: dict[str, str] = {}
    for record in records_of(text, "NodeName"):
        fields = fields_of(record)
        if fields["NodeName"] == "DEFAULT":  # of slurm.conf, for what follows
            usual |= fields
            continue
        nodes += _nodes({**usual, **fields})
        if len(nodes) > _MOST_NODES:
            raise InvalidInputError(f"more than {_MOST_NODES} nodes")
    if not nodes:
        shown = text.strip().splitlines()[:1] or ["nothing"]
        raise InvalidInputError(f"scontrol show node printed no nodes: {shown[0][:100]}")
    return tuple(nodes)


def gres_type(wanted: str, nodes: Iterable[SlurmNode]) -> str:
    """Return the type that Slurm has for GPUs of some nodes, as it must be asked for.

    Args:
        wanted: The type as plans and clusters name it (``a100``); empty = any.
        nodes: The nodes that may be taken.

    Returns:
        Such as ``nvidia_a100_80gb``; empty where Slurm knows GPUs without types.

    Raises:
        InvalidInputError: Slurm has several types that may be meant, or none.
    """
    there = list(nodes)
    types = sorted({kind for node in there for kind, _ in node.gpus})
    if not wanted or not any(types):
        return ""
    found = same_product(wanted, types)
    if found is None:
        shown = ", ".join(kind or "GPUs without a type" for kind in types)
        where = f"node {there[0].name}" if len(there) == 1 else "Slurm"
        raise InvalidInputError(
            f"{where} has no one type of GPUs that {wanted!r} means; it has {shown}"
        )
    return found


def _nodes(fields: dict[str, str]) -> list[SlurmNode]:
    """Return the nodes of a record: one of scontrol's, or equal ones by their list of names."""
    try:
        cpus = _cpus(fields)
        memory = (int(fields["RealMemory"]) - int(fields.get("MemSpecLimit", "0"))) * _MIB
    except (KeyError, ValueError) as exc:
        raise InvalidInputError(
            f"node {fields.get('NodeName', '')!r}: CPUs or memory cannot be read: {exc}"
        ) from exc
    gres = fields.get("Gres", "")
    return [
        SlurmNode(
            name=name,
            states=_states(fields.get("State", "")),
            reason=fields.get("Reason", ""),
            cpus=cpus,
            memory_bytes=memory,
            gpus=tuple((m["type"] or "", int(m["count"])) for m in _GPUS.finditer(gres)),
            partitions=tuple(part for part in fields.get("Partitions", "").split(",") if part),
        )
        for name in expand_hosts(fields["NodeName"])
    ]


def _cpus(fields: dict[str, str]) -> int:
    for key in ("CPUEfctv", "CPUTot", "CPUs"):
        if fields.get(key):
            return int(fields[key])
    if "Sockets" in fields and "CPULoad" not in fields:  # of slurm.conf
        parts = ("Sockets", "CoresPerSocket", "ThreadsPerCore")
        return math.prod(int(fields.get(part, "1")) for part in parts)
    raise KeyError("CPUTot")


def _states(text: str) -> tuple[str, ...]:
    plain = text.rstrip("".join(_MARKS))
    marks = [_MARKS[mark] for mark in text[len(plain) :]]
    return tuple(dict.fromkeys([*filter(None, plain.split("+")), *marks]))


def auth_socket(text: str) -> str:
    """Return the socket of the munged that Slurm uses, from ``scontrol show config``.

    Empty where that is the machine's usual one.
    """
    found = re.search(r"^AuthInfo\s*=\s*(?:\S*,)?socket=([^,\s]+)", text, re.MULTILINE)
    return found[1] if found else ""
