"""Clusters as YAML: groups of equal hosts, or single devices, and the links between them.

``docs/clusters.md`` describes the format. What stands in the text holds; what does not is taken
from the catalogue where the device type is in it. ``read_cluster_yaml`` is the way in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from partita.catalogue.catalogue import (
    MAX_COUNT,
    Catalogue,
    LinkType,
    make_device,
    read_clocks,
    read_dvfs,
    read_kind,
    read_memory,
    read_peaks,
    read_rate,
    read_size,
)
from partita.catalogue.cluster_yaml.links import Parts, read_levels, read_matrix
from partita.core.cluster import MAX_DEVICES, Cluster, Device, Host
from partita.errors import FormatError
from partita.names import short, suggest
from partita.yaml_nodes import (
    Node,
    Scalar,
    Table,
    at_line,
    check_present,
    parse_yaml,
    read_count,
    read_items,
    read_number,
    read_table,
    read_text,
)

UNKNOWN = "unknown"
_Figures: TypeAlias = dict[str, Any]


def _read_price(node: Node, what: str) -> float:
    if isinstance(node, Scalar) and node.text == UNKNOWN:
        return float("nan")
    return read_number(node, what)


FIGURES: Mapping[str, tuple[str, Callable[[Node, str], Any]]] = {
    "kind": ("kind", read_kind),
    "memory": ("memory_bytes", lambda node, what: read_memory(node, what, unlimited=True)),
    "speed": ("speed", lambda node, what: read_number(node, what, positive=True)),
    "price_per_hour": ("price_per_hour", _read_price),
    "peak_flop_per_s": ("peak_flop_per_s", read_peaks),
    "memory_bandwidth": ("memory_bytes_per_s", read_rate),
    "clocks_mhz": ("clocks_mhz", read_clocks),
    "idle_w": ("idle_w", read_number),
    "max_w": ("max_w", read_number),
    "dvfs": ("dvfs", read_dvfs),
}
"""Field of a device, and how it is read, by key."""

_SECTIONS = ("name", "types", "groups", "hosts", "devices", "levels", "matrix")
_TYPE_KEYS = (*FIGURES, "link")
_DEVICE_KEYS = ("type", "host", *_TYPE_KEYS)
_HOST_KEYS = ("cpus", "memory", "storage")
_GROUP_KEYS = ("type", "hosts", "count", *_TYPE_KEYS, "cpus", "host_memory", "storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Type:
    """Figures of a device that are known before its own keys are read."""

    device: Device
    host: Host = field(default_factory=lambda: Host(name="new"))
    link: LinkType | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Types:
    """The device types of a text, and those of the catalogue behind them."""

    own: Mapping[str, _Type]
    own_by_lower: Mapping[str, _Type]
    catalogue: Catalogue

    def find(self, name: str) -> _Type | None:
        """Return a type by its name: the text's own first, exact spelling before other cases."""
        own = self.own.get(name) or self.own_by_lower.get(name.lower())
        if own is not None:
            return own
        known = self.catalogue.devices.get(name.lower())
        if known is None:
            return None
        host = Host(name="new", cpus=known.host_cpus, memory_bytes=known.host_memory_bytes)
        link = self.catalogue.link_of(known)
        return _Type(device=make_device(known, "new"), host=host, link=link)


def read_cluster_yaml(text: str, catalogue: Catalogue) -> Cluster:
    """Return the cluster of a YAML text.

    Args:
        text: The text.
        catalogue: Has the figures of the device types and links that the text names.

    Raises:
        FormatError: The text is wrong; knows the line.
    """
    root = read_table(parse_yaml(text), "the cluster", _SECTIONS)
    found = root.entries
    types = _read_types(found.get("types"), catalogue)
    if ("groups" in found) == ("devices" in found):
        raise FormatError("expected either 'groups' or 'devices'", line=root.line)
    if "levels" in found and "matrix" in found:
        line = root.line_of["matrix"]
        raise FormatError("a cluster has 'levels' or a 'matrix' of links, not both", line=line)
    if "groups" in found:
        if "hosts" in found:
            raise FormatError(
                "'hosts' goes with 'devices'; in 'groups' write cpus, host_memory and storage",
                line=root.line_of["hosts"],
            )
        parts = _read_groups(found["groups"], types, _label_keys(found.get("levels")))
    else:
        hosts = _read_hosts(found["hosts"]) if "hosts" in found else None
        parts = _read_devices(found["devices"], types, hosts)
    matrix = read_matrix(found["matrix"], parts) if "matrix" in found else None
    levels = () if matrix else read_levels(found.get("levels"), parts, catalogue)
    line = root.line_of.get("matrix" if matrix else "levels", root.line)
    with at_line(line):
        return Cluster(
            name=read_text(found["name"], "name") if "name" in found else "cluster",
            hosts=tuple(parts.hosts),
            devices=tuple(parts.devices),
            levels=levels,
            matrix=matrix,
        )


def _read_types(node: Node | None, catalogue: Catalogue) -> _Types:
    """Return the types that a text describes; what it leaves out of one is not known."""
    own: dict[str, _Type] = {}
    for name, entry in read_table(node, "types").entries.items() if node else ():
        what = f"type {short(name)}"
        table = read_table(entry, what, _TYPE_KEYS)
        check_present(table, what, ("kind", "memory"))
        base = _Type(device=Device(name="new", type=name))
        own[name] = _with_figures(base, table, what, catalogue)
    by_lower = {name.lower(): own[name] for name in reversed(own)}
    return _Types(own=own, own_by_lower=by_lower, catalogue=catalogue)


def _with_figures(base: _Type, table: Table, what: str, catalogue: Catalogue) -> _Type:
    """Return a type with what a table says of it."""
    figures: _Figures = {
        FIGURES[key][0]: FIGURES[key][1](node, f"{what}: {key}")
        for key, node in table.entries.items()
        if key in FIGURES
    }
    link, node = base.link, table.entries.get("link")
    if node is not None:
        with at_line(node.line):
            link = catalogue.link_type(read_text(node, f"{what}: link"))
    with at_line(table.line):
        return replace(base, device=replace(base.device, **figures), link=link)


def _read_type(table: Table, what: str, types: _Types) -> _Type:
    """Return the type that a group or device names, with the figures that it gives itself."""
    node = table.entries.get("type")
    name = read_text(node, f"{what}: type") if node else ""
    base = types.find(name) if name else None
    if base is None:
        if not {"kind", "memory"} <= set(table.entries):
            known = (*types.own, *types.catalogue.devices)
            problem = f"type {short(name)} is not in the catalogue" if name else "it has no type"
            raise FormatError(
                f"{what}: {problem}; give its kind and memory, or a known type"
                f"{suggest(name, known)}",
                line=node.line if node else table.line,
            )
        base = _Type(device=Device(name="new", type=name))
    return _with_figures(base, table, what, types.catalogue)


def _label_keys(levels: Node | None) -> tuple[str, ...]:
    """Return the levels that a group may say its place in: all above the host."""
    names = read_table(levels, "levels").entries if levels else ()
    return tuple(name for name in names if name != "host" and name not in _GROUP_KEYS)


def _read_groups(node: Node, types: _Types, label_keys: tuple[str, ...]) -> Parts:
    """Return hosts and devices of groups, named ``host0`` and ``host0/gpu0`` in their order."""
    parts = Parts(adds_host_level=True)
    for index, entry in enumerate(read_items(node, "groups")):
        what = f"group {index}"
        table = read_table(entry, what, (*_GROUP_KEYS, *label_keys))
        kind = _read_type(table, what, types)
        num_hosts, num_devices = (
            read_count(table.entries[key], f"{what}: {key}", low=1, high=MAX_DEVICES)
            if key in table.entries
            else 1
            for key in ("hosts", "count")
        )
        if len(parts.devices) + num_hosts * num_devices > MAX_DEVICES:
            raise FormatError(f"{what}: more than {MAX_DEVICES} devices", line=table.line)
        labels = {
            key: read_text(table.entries[key], f"{what}: {key}")
            for key in label_keys
            if key in table.entries
        }
        keys = {"cpus": "cpus", "memory": "host_memory", "storage": "storage"}
        host = _read_host(table, what, keys, kind.host)
        for _ in range(num_hosts):
            stem = f"host{len(parts.hosts)}"
            for number in range(num_devices):
                name = f"{stem}/{kind.device.kind}{number}"
                device = replace(kind.device, name=name, host=len(parts.hosts))
                parts.add(device, kind.link, labels, line=table.line)
            parts.hosts.append(replace(host, name=stem))
    if not parts.devices:
        raise FormatError("groups is empty; expected at least one group", line=node.line)
    return parts


def _read_host(table: Table, what: str, keys: Mapping[str, str], base: Host) -> Host:
    """Return a host with what a table says of it under the given keys."""
    cpus, memory, storage = (table.entries.get(keys[key]) for key in _HOST_KEYS)
    if cpus is not None:
        number = read_count(cpus, f"{what}: {keys['cpus']}", low=0, high=MAX_COUNT)
        base = replace(base, cpus=number)
    if memory is not None:
        base = replace(base, memory_bytes=read_size(memory, f"{what}: {keys['memory']}"))
    if storage is not None:
        with at_line(storage.line):
            rate = read_rate(storage, f"{what}: {keys['storage']}")
            base = replace(base, storage_bytes_per_s=rate)
    return base


def _read_hosts(node: Node) -> list[Host]:
    hosts = []
    keys = {key: key for key in _HOST_KEYS}
    for name, entry in read_table(node, "hosts").entries.items():
        what = f"host {short(name)}"
        table = read_table(entry, what, _HOST_KEYS)
        hosts.append(_read_host(table, what, keys, Host(name=name)))
    return hosts


def _read_devices(node: Node, types: _Types, hosts: list[Host] | None) -> Parts:
    """Return single devices; ``a/b`` is on host ``a`` unless it says another."""
    table = read_table(node, "devices")
    if not table.entries:
        raise FormatError("devices is empty; expected at least one device", line=node.line)
    parts = Parts(hosts=list(hosts or ()))
    usual_host = hosts[0].name if hosts and len(hosts) == 1 else "host0"
    host_index = {host.name: index for index, host in enumerate(parts.hosts)}
    for name, entry in table.entries.items():
        what = f"device {short(name)}"
        keys = read_table(entry, what, _DEVICE_KEYS)
        kind = _read_type(keys, what, types)
        said = keys.entries.get("host")
        host = read_text(said, f"{what}: host") if said else name.rpartition("/")[0] or usual_host
        if host not in host_index:
            if hosts is not None:
                raise FormatError(
                    f"{what}: host {short(host)} is not there{suggest(host, host_index)}",
                    line=said.line if said else table.line_of[name],
                )
            host_index[host] = len(parts.hosts)
            parts.hosts.append(replace(kind.host, name=host))
        device = replace(kind.device, name=name, host=host_index[host])
        parts.add(device, kind.link, {}, line=table.line_of[name])
    return parts
