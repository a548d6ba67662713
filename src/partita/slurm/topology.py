"""The switches of a Slurm cluster, as its configuration or ``scontrol show topology`` has them.

``LinkSpeed`` is left out: by Slurm's manual it is a hint without a unit, never a bandwidth. A block
or a ring of nodes counts as a switch that they hang on; sizes of blocks, which say how nodes are
given out, are left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from partita.errors import InvalidInputError
from partita.slurm.hostlist import expand_hosts
from partita.slurm.nodes import fields_of, records_of
from partita.yaml_nodes import (
    Scalar,
    Table,
    check_present,
    parse_yaml,
    read_items,
    read_table,
    read_text,
)

_LEAVES = ("BlockName", "RingName")
_MOST_LEVELS = 16
_KINDS = (("tree", "switches", "switch"), ("block", "blocks", "block"), ("ring", "rings", "ring"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSwitch:
    """A switch as Slurm describes it.

    Attributes:
        name: Its name.
        level: 0 = nodes hang on it.
        nodes: All nodes below it.
        switches: Switches right below it.
    """

    name: str
    level: int
    nodes: tuple[str, ...]
    switches: tuple[str, ...] = ()


def read_topology(text: str) -> tuple[SlurmSwitch, ...]:
    """Return the switches of ``topology.conf`` or of ``scontrol show topology``; there may be none.

    Raises:
        InvalidInputError: They go in a circle, or lists of hosts cannot be read.
    """
    found = [
        SlurmSwitch(
            name=fields[key],
            level=_number(fields.get("Level", "0")),
            nodes=expand_hosts(fields.get("Nodes", "")),
            switches=expand_hosts(fields.get("Switches", "")),
        )
        for key in ("SwitchName", *_LEAVES)
        for fields in (fields_of(_uncommented(record)) for record in records_of(text, key))
    ]
    return _levelled(found)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= 2 else 0


def _uncommented(record: str) -> str:
    return record.partition("#")[0]


def is_topology_yaml(text: str) -> bool:
    """Return whether a text begins as ``topology.yaml`` does: a list of topologies."""
    for line in text.splitlines():
        words = line.replace(":", " : ").split()
        if words and not words[0].startswith(("#", "---")):
            return words[:3] == ["-", "topology", ":"]
    return False


def read_topology_yaml(text: str) -> tuple[SlurmSwitch, ...]:
    """Return the switches of ``topology.yaml``: of the default topology, else of the first.

    Raises:
        FormatError: It is no such text; knows the line.
        InvalidInputError: The topology is flat, or its switches go in a circle.
    """
    parts = [read_table(part, "a topology") for part in read_items(parse_yaml(text), "the file")]
    if not parts:
        raise InvalidInputError("the list of topologies is empty")
    usual = [part for part in parts if _text(part, "cluster_default").lower() in ("true", "yes")]
    chosen = (usual or parts)[0]
    for kind, listed, name in _KINDS:
        table = chosen.entries.get(kind)
        if isinstance(table, Table):
            return _levelled(_yaml_switches(table, listed, name))
    shown = _text(chosen, "topology") or "the first"
    raise InvalidInputError(f"topology {shown!r} has no tree, blocks or rings: all is one network")


def _yaml_switches(table: Table, listed: str, name: str) -> list[SlurmSwitch]:
    check_present(table, "a topology", (listed,))
    return [
        SlurmSwitch(
            name=_text(part, name) or f"{name}{index}",
            level=0,
            nodes=expand_hosts(_text(part, "nodes")),
            switches=expand_hosts(_text(part, "children")),
        )
        for index, part in enumerate(
            read_table(node, f"a {name}") for node in read_items(table.entries[listed], listed)
        )
    ]


def _text(table: Table, key: str) -> str:
    node = table.entries.get(key)
    return read_text(node, key) if isinstance(node, Scalar) else ""


def _levelled(switches: Iterable[SlurmSwitch]) -> tuple[SlurmSwitch, ...]:
    """Return switches with their level and all nodes below them.

    Raises:
        InvalidInputError: A switch is below itself, or there are more than 16 levels.
    """
    by_name: dict[str, SlurmSwitch] = {}
    for switch in switches:
        by_name.setdefault(switch.name, switch)
    done: dict[str, SlurmSwitch] = {}
    for _ in range(_MOST_LEVELS):
        if len(done) == len(by_name):
            break
        for switch in by_name.values():
            below = [done.get(name) for name in switch.switches if name in by_name]
            if switch.name in done or None in below:
                continue
            parts = [part for part in below if part is not None]
            nodes = dict.fromkeys([*switch.nodes, *(node for part in parts for node in part.nodes)])
            level = max(switch.level, *(part.level + 1 for part in parts), 0)
            done[switch.name] = replace(switch, level=level, nodes=tuple(nodes))
    if len(done) < len(by_name):
        name = next(name for name in by_name if name not in done)
        raise InvalidInputError(
            f"switch {name!r} is below itself, or below more than {_MOST_LEVELS} levels of switches"
        )
    return tuple(done[name] for name in by_name)


def switches_above(switches: Iterable[SlurmSwitch]) -> Mapping[str, tuple[str, ...]]:
    """Return the switches above each node, the nearest first, nodes in the order of the switches.

    A node that hangs on two switches of a level is counted to the first.
    """
    above: dict[str, dict[int, str]] = {}
    for switch in sorted(switches, key=lambda switch: switch.level):
        for node in switch.nodes:
            above.setdefault(node, {}).setdefault(switch.level, switch.name)
    return {node: tuple(names[level] for level in sorted(names)) for node, names in above.items()}
