"""The nodes and switches of a Slurm cluster, from ``scontrol show node`` and ``show topology``."""

import re
from dataclasses import dataclass

from partita.errors import InvalidInputError
from partita.slurm.hostlist import expand_hosts

_MIB = 2**20
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=")
_GPUS = re.compile(r"\bgpu(?::(?P<type>[^:(),]+))??:(?P<count>\d+)")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSwitch:
    """A switch as Slurm describes it.

    Attributes:
        name: Its name.
        level: 0 = nodes hang on it.
        nodes: All nodes below it.
    """

    name: str
    level: int
    nodes: tuple[str, ...]


def fields_of(line: str) -> dict[str, str]:
    """Return what a line of ``scontrol --oneliner`` says, by name; the first of equal names."""
    found = list(_FIELD.finditer(line))
    ends = [match.start() for match in found[1:]] + [len(line)]
    fields: dict[str, str] = {}
    for match, end in zip(found, ends, strict=True):
        fields.setdefault(match.group(1), line[match.end() : end].strip())
    return fields


def records_of(text: str, first: str) -> list[str]:
    """Return the records of what scontrol printed, in one line each, with ``--oneliner`` or not."""
    records: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith(f"{first}="):
            records.append([])
        if records and line.strip():
            records[-1].append(line.strip())
    return [" ".join(lines) for lines in records]


def read_nodes(text: str) -> tuple[SlurmNode, ...]:
    """Return the nodes that ``scontrol show node`` printed.

    Raises:
        InvalidInputError: It printed no nodes.
    """
    nodes = tuple(_node(fields_of(record)) for record in records_of(text, "NodeName"))
    if not nodes:
        shown = text.strip().splitlines()[:1] or ["nothing"]
        raise InvalidInputError(f"scontrol show node printed no nodes: {shown[0][:100]}")
    return nodes


def _node(fields: dict[str, str]) -> SlurmNode:
    try:
        cpus = int(fields.get("CPUEfctv") or fields["CPUTot"])
        memory = (int(fields["RealMemory"]) - int(fields.get("MemSpecLimit", "0"))) * _MIB
    except (KeyError, ValueError) as exc:
        raise InvalidInputError(
            f"node {fields.get('NodeName', '')!r}: CPUs or memory cannot be read: {exc}"
        ) from exc
    gres = fields.get("Gres", "")
    return SlurmNode(
        name=fields["NodeName"],
        states=_states(fields.get("State", "")),
        reason=fields.get("Reason", ""),
        cpus=cpus,
        memory_bytes=memory,
        gpus=tuple((m["type"] or "", int(m["count"])) for m in _GPUS.finditer(gres)),
        partitions=tuple(name for name in fields.get("Partitions", "").split(",") if name),
    )


def _states(text: str) -> tuple[str, ...]:
    plain = text.rstrip("".join(_MARKS))
    marks = [_MARKS[mark] for mark in text[len(plain) :]]
    return tuple(dict.fromkeys([*filter(None, plain.split("+")), *marks]))


def read_topology(text: str) -> tuple[SlurmSwitch, ...]:
    """Return the switches that ``scontrol show topology`` printed; none where there is no tree.

    ``LinkSpeed`` is left out: by Slurm's manual it is a hint without a unit, never a bandwidth.
    """
    return tuple(
        SlurmSwitch(
            name=fields["SwitchName"],
            level=int(fields.get("Level", "0")),
            nodes=expand_hosts(fields.get("Nodes", "")),
        )
        for fields in map(fields_of, records_of(text, "SwitchName"))
    )
