"""The links of a cluster's YAML: levels of a hierarchy, or a matrix between named devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from partita.catalogue.catalogue import Catalogue, LinkType, read_collectives
from partita.catalogue.shorthand import usual_levels
from partita.core.cluster import MAX_LATENCY_S, Collectives, Device, Host, Level, LinkMatrix
from partita.core.columns import Floats
from partita.errors import FormatError
from partita.names import short, suggest
from partita.units import parse_bandwidth, parse_seconds
from partita.yaml_nodes import (
    Node,
    Scalar,
    Table,
    at_line,
    check_present,
    read_flag,
    read_items,
    read_number,
    read_quantity,
    read_table,
    read_text,
    refuse,
)

HOST_LEVEL = "host"
_LINK_KEYS = ("link", "bandwidth", "latency", "collectives")
_LEVEL_KEYS = (*_LINK_KEYS, "port_per_device", "port_share", "groups")
NO_COLLECTIVES = "none"


@dataclass(slots=True, kw_only=True)
class Parts:
    """Hosts and devices while a text is read.

    Attributes:
        adds_host_level: Whether a level inside the hosts is added where the text has none.
        hosts: The hosts.
        devices: The devices.
        links: The usual link of each device within its host; None = not known.
        labels: Place of each device, by level; only levels that its group mentions.
        lines: Line of each device.
    """

    adds_host_level: bool = False
    hosts: list[Host] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    links: list[LinkType | None] = field(default_factory=list)
    labels: list[Mapping[str, str]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)

    def add(
        self, device: Device, link: LinkType | None, labels: Mapping[str, str], *, line: int
    ) -> None:
        """Take one more device."""
        self.devices.append(device)
        self.links.append(link)
        self.labels.append(labels)
        self.lines.append(line)

    def host_links(self) -> list[LinkType | None]:
        """Return the link inside each host, the slowest of its devices; None = not known.

        Ends with the last host that has a device; a host without one has an arbitrary link.
        """
        by_host: dict[int, list[LinkType | None]] = {}
        for device, link in zip(self.devices, self.links, strict=True):
            by_host.setdefault(device.host, []).append(link)
        result: list[LinkType | None] = []
        for host in range(max(by_host) + 1):
            links = by_host.get(host, [self.links[0]])
            known = [link for link in links if link is not None]
            slowest = min(known, key=lambda link: link.bandwidth_bytes_per_s, default=None)
            result.append(slowest if len(known) == len(links) else None)
        return result


class _Speed(NamedTuple):
    """Bandwidth, latency and collectives of a link, None where they are not given.

    Collectives that are given as not known are ``(None,)``.
    """

    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None
    collectives: tuple[Collectives | None] | None = None

    def over(self, usual: "_Speed") -> "_Speed":
        """Return this speed, with the usual one where it says nothing."""
        return _Speed(
            usual.bandwidth_bytes_per_s
            if self.bandwidth_bytes_per_s is None
            else self.bandwidth_bytes_per_s,
            usual.latency_s if self.latency_s is None else self.latency_s,
            usual.collectives if self.collectives is None else self.collectives,
        )


class _Grouping(NamedTuple):
    """Devices that a level joins: their groups, and the name of each group."""

    group_of: list[int]
    names: Sequence[str]


def read_levels(node: Node | None, parts: Parts, catalogue: Catalogue) -> tuple[Level, ...]:
    """Return the levels that a text gives, innermost first; the usual ones if it gives none.

    Raises:
        FormatError: A level is wrong, or the link of a device type is needed and not known.
    """
    table = read_table(node, "levels") if node is not None else None
    if table is None or (parts.adds_host_level and not table.entries):
        return usual_levels(parts.devices, _known_links(parts), catalogue)
    levels = []
    if parts.adds_host_level and HOST_LEVEL not in table.entries:
        empty = Table(table.line, {}, {})
        levels.append(_read_level(HOST_LEVEL, empty, parts, catalogue))
    for name, entry in table.entries.items():
        level = read_table(entry, f"level {short(name)}", _LEVEL_KEYS)
        levels.append(_read_level(name, level, parts, catalogue))
    return tuple(levels)


def _known_links(parts: Parts) -> list[LinkType]:
    links = parts.host_links()
    for host, link in enumerate(links):
        if link is None:
            index = next(i for i, device in enumerate(parts.devices) if device.host == host)
            raise FormatError(
                f"the link of {parts.devices[index].name!r} to others of its host is not known; "
                "give its group a 'link', or 'levels' with a 'host'",
                line=parts.lines[index],
            )
    return [link for link in links if link is not None]


def _read_level(name: str, table: Table, parts: Parts, catalogue: Catalogue) -> Level:
    what = f"level {short(name)}"
    overrides = _read_overrides(table, what)
    grouping = _grouping(name, overrides, parts)
    usual: list[_Speed] = [_Speed()] * len(grouping.names)
    is_host_level = name == HOST_LEVEL and not _has_members(overrides)
    if is_host_level and not {"link", "bandwidth"} & set(table.entries):
        usual = [
            _Speed(link.bandwidth_bytes_per_s, link.latency_s, (link.collectives,))
            if link
            else _Speed()
            for link in parts.host_links()
        ]
    known = set(grouping.names)
    for key, entry in overrides.items():
        if key not in known:
            hint = suggest(key, grouping.names)
            raise FormatError(f"{what}: no group {short(key)}{hint}", line=entry.line)
    own = _read_speed(table, what, catalogue)
    speeds = [
        _read_speed(overrides[key], f"{what}, group {short(key)}", catalogue).over(own).over(other)
        if key in overrides
        else own.over(other)
        for key, other in zip(grouping.names, usual, strict=True)
    ]
    port = table.entries.get("port_per_device")
    with at_line(table.line):
        return Level(
            name=name,
            group_of=np.array(grouping.group_of, dtype=np.int32),
            bandwidth_bytes_per_s=np.array(
                [
                    _bandwidth(speed, f"{what}, group {short(key)}", table.line)
                    for key, speed in zip(grouping.names, speeds, strict=True)
                ]
            ),
            latency_s=np.array([speed.latency_s or 0.0 for speed in speeds]),
            port_per_device=port is not None and read_flag(port, f"{what}: port_per_device"),
            port_share=_read_port_share(table, what, parts),
            collectives=tuple(
                speed.collectives[0] if speed.collectives else None for speed in speeds
            ),
        )


def _read_port_share(table: Table, what: str, parts: Parts) -> Floats:
    """Return the share of a full port that each device has, as given for hosts and devices."""
    shares = np.ones(len(parts.devices))
    node = table.entries.get("port_share")
    if node is None:
        return shares
    host_names = {host.name: index for index, host in enumerate(parts.hosts)}
    device_names = {device.name: index for index, device in enumerate(parts.devices)}
    given = read_table(node, f"{what}: port_share")
    for name, value in given.entries.items():
        share = read_number(value, f"{what}: port_share of {short(name)}", positive=True)
        if name in device_names:
            shares[device_names[name]] = share
        elif name in host_names:
            host = host_names[name]
            shares[[device.host == host for device in parts.devices]] = share
        else:
            hint = suggest(name, [*host_names, *device_names])
            raise FormatError(
                f"{what}: port_share of {short(name)}, which is no host and no device{hint}",
                line=given.line_of[name],
            )
    return shares


def _bandwidth(speed: _Speed, what: str, line: int) -> float:
    if speed.bandwidth_bytes_per_s is None:
        raise FormatError(f"{what}: no bandwidth; give 'bandwidth' or 'link'", line=line)
    return speed.bandwidth_bytes_per_s


def _read_overrides(table: Table, what: str) -> Mapping[str, Table]:
    """Return what a level says of single groups, by their names."""
    node = table.entries.get("groups")
    if node is None:
        return {}
    return {
        key: read_table(entry, f"{what}, group {short(key)}", ("members", *_LINK_KEYS))
        for key, entry in read_table(node, f"{what}: groups").entries.items()
    }


def _has_members(overrides: Mapping[str, Table]) -> bool:
    return any("members" in entry.entries for entry in overrides.values())


def _read_speed(table: Table, what: str, catalogue: Catalogue) -> _Speed:
    """Return the bandwidth and latency of a table; its ``link`` stands in for what it omits."""
    bandwidth = latency = None
    collectives: tuple[Collectives | None] | None = None
    found = table.entries
    if "link" in found:
        with at_line(found["link"].line):
            link = catalogue.link_type(read_text(found["link"], f"{what}: link"))
        bandwidth, latency = link.bandwidth_bytes_per_s, link.latency_s
        collectives = (link.collectives,)
    if "bandwidth" in found:
        bandwidth = read_bandwidth(found["bandwidth"], f"{what}: bandwidth")
    if "latency" in found:
        latency = read_latency(found["latency"], f"{what}: latency")
    node = found.get("collectives")
    if isinstance(node, Scalar) and node.text == NO_COLLECTIVES:
        collectives = (None,)
    elif node is not None:
        collectives = (read_collectives(node, f"{what}: collectives"),)
    return _Speed(bandwidth, latency, collectives)


def read_bandwidth(node: Node, what: str) -> float:
    """Return bytes per second, more than 0; ``inf`` = only latency counts."""
    value = read_quantity(node, what, parse_bandwidth, unlimited=True)
    if value == 0:
        refuse(node, what, "more than 0")
    return value


def read_latency(node: Node, what: str) -> float:
    """Return seconds, 0 or more."""
    return read_quantity(node, what, parse_seconds, limit=MAX_LATENCY_S)


def _grouping(name: str, overrides: Mapping[str, Table], parts: Parts) -> _Grouping:
    """Return the groups of a level: by members, by host, by what the groups say, or one."""
    labelled = [name in labels for labels in parts.labels]
    if _has_members(overrides):
        if any(labelled):
            raise FormatError(
                f"this group says its {name}, and level {short(name)} lists members; expected one "
                "of the two",
                line=parts.lines[labelled.index(True)],
            )
        return _member_grouping(name, overrides, parts)
    if name == HOST_LEVEL:
        group_of = [device.host for device in parts.devices]
        return _Grouping(group_of, [host.name for host in parts.hosts[: max(group_of) + 1]])
    if not any(labelled):
        return _Grouping([0] * len(parts.devices), ["all"])
    if not all(labelled):
        index = labelled.index(False)
        raise FormatError(
            f"this group does not say its {name}, others do; expected all or none",
            line=parts.lines[index],
        )
    index_of: dict[str, int] = {}
    group_of = [index_of.setdefault(labels[name], len(index_of)) for labels in parts.labels]
    return _Grouping(group_of, list(index_of))


def _member_grouping(name: str, overrides: Mapping[str, Table], parts: Parts) -> _Grouping:
    """Return groups given as lists of devices, or of hosts for all devices of each."""
    devices_of: dict[str, list[int]] = {host.name: [] for host in parts.hosts}
    for index, device in enumerate(parts.devices):
        devices_of[parts.hosts[device.host].name].append(index)
    devices_of |= {device.name: [index] for index, device in enumerate(parts.devices)}
    group_of = [-1] * len(parts.devices)
    for group, (key, entry) in enumerate(overrides.items()):
        what = f"level {short(name)}, group {short(key)}: member"
        if "members" not in entry.entries:
            raise FormatError(f"{what}s are missing, other groups have them", line=entry.line)
        for node in read_items(entry.entries["members"], f"{what}s"):
            member = read_text(node, what)
            if member not in devices_of:
                hint = suggest(member, [host.name for host in parts.hosts])
                raise FormatError(f"{what} {short(member)} is not there{hint}", line=node.line)
            for index in devices_of[member]:
                if group_of[index] >= 0:
                    twice = short(parts.devices[index].name)
                    raise FormatError(f"{what} {twice} is in two groups", line=node.line)
                group_of[index] = group
    if -1 in group_of:
        missing = short(parts.devices[group_of.index(-1)].name)
        line = min(entry.line for entry in overrides.values())
        raise FormatError(f"level {short(name)}: {missing} is in no group", line=line)
    return _Grouping(group_of, list(overrides))


def read_matrix(node: Node, parts: Parts) -> LinkMatrix:
    """Return a matrix of links: rows by the name of the sender, receivers in order of devices.

    Raises:
        FormatError: A row is missing, has the wrong length or a wrong value.
    """
    table = read_table(node, "matrix", ("bandwidth", "latency"))
    found = table.entries
    check_present(table, "matrix", ("bandwidth",))
    names = [device.name for device in parts.devices]
    with at_line(table.line):
        return LinkMatrix(
            bandwidth_bytes_per_s=_read_rows(found["bandwidth"], "bandwidth", names),
            latency_s=_read_rows(found["latency"], "latency", names)
            if "latency" in found
            else np.zeros(len(names) ** 2),
        )


def _read_rows(node: Node, what: str, names: Sequence[str]) -> Floats:
    """Return the values of a matrix, row by row; one number stands for all."""
    read = read_bandwidth if what == "bandwidth" else read_latency
    size = len(names)
    if isinstance(node, Scalar):
        return np.full(size * size, read(node, f"matrix: {what}"))
    table = read_table(node, f"matrix: {what}", names)
    values = np.zeros((size, size))
    for source, name in enumerate(names):
        if name not in table.entries:
            raise FormatError(f"matrix: {what}: row of {short(name)} is missing", line=table.line)
        row_name = f"matrix: {what} from {short(name)}"
        row = table.entries[name]
        cells = read_items(row, row_name)
        if len(cells) != size:
            raise FormatError(
                f"{row_name} has {len(cells)} values; expected {size}, one for each device",
                line=row.line,
            )
        for target, cell in enumerate(cells):
            if source == target:
                values[source, target] = _read_diagonal(cell, row_name, read)
            else:
                values[source, target] = read(cell, f"{row_name} to {short(names[target])}")
    return values.ravel()


def _read_diagonal(node: Node, what: str, read: Callable[[Node, str], float]) -> float:
    """Return the value of a device to itself, which nobody uses; ``-`` or ``0`` = 0."""
    if isinstance(node, Scalar) and node.text in ("-", "0"):
        return 0.0
    return read(node, f"{what} to itself")
