"""The catalogue: what is known of device types and of links between them.

The package's own figures stand in ``devices.yaml``, ``links.yaml`` and ``hosts.yaml``, each with
its source. A user may add a file of the same format (``devices:``, ``links:`` and ``hosts:`` in
one); its entries replace those of the same name as a whole.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from partita.core.cluster import Collectives, Device, Dvfs, MeasuredCollective
from partita.core.graph import DeviceKind
from partita.core.precision import PRECISIONS
from partita.errors import FormatError, InvalidInputError
from partita.names import short, suggest
from partita.units import parse_bandwidth, parse_bytes, parse_seconds
from partita.yaml_nodes import (
    Items,
    Node,
    Table,
    at_line,
    check_present,
    parse_yaml,
    read_count,
    read_items,
    read_number,
    read_quantity,
    read_table,
    read_text,
    refuse,
)

MAX_CLOCKS = 10_000
MAX_COUNT = 2**31
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789._-")
_DEVICE_FIGURES = (
    *("memory_bytes", "peak_flop_per_s", "memory_bytes_per_s", "clocks_mhz", "power_w", "dvfs"),
    *("price_per_hour", "link", "network", "host"),
)
_LINK_FIGURES = ("bandwidth_bytes_per_s", "latency_s", "collectives")
_HOST_FIGURES = (
    *("device", "num_devices", "num_hosts", "network", "num_ports", "cpus", "memory_bytes"),
    "price_per_hour",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkType:
    """A kind of link.

    Attributes:
        name: Such as ``"nvlink3"``.
        title: Name for people.
        bandwidth_bytes_per_s: Payload rate in one direction.
        latency_s: Seconds before the first byte arrives.
        collectives: Rates of collectives over it; None = not known.
        sources: Origin of each figure.
    """

    name: str
    title: str = ""
    bandwidth_bytes_per_s: float
    latency_s: float
    collectives: Collectives | None = None
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """A kind of device, and the host that usually holds it.

    Attributes:
        name: Such as ``"a100"``.
        kind: Accelerator or CPU.
        title: Name for people.
        memory_bytes: Memory of the device.
        peak_flop_per_s: Peak rate by dtype; a dtype that is absent has no unit of its own.
        memory_bytes_per_s: Memory bandwidth; 0 = not known.
        clocks_mhz: Clocks it can be set to, ascending; empty = not known.
        idle_w: Power while idle; 0 = not known.
        max_w: Power limit; 0 = not known.
        dvfs: Dependence of time and power on the clock.
        price_per_hour: Money for an hour; NaN = not known.
        link: Name of the link between two devices of one host.
        network: Name of the link between hosts of which each device usually has a port of its own;
            empty = it has none.
        host_cpus: Cores of a usual host; 0 = not known.
        host_memory_bytes: Main memory of a usual host; 0 = not known.
        host_max_devices: Devices that a usual host holds; 0 = not known.
        sources: Origin of each figure.
    """

    name: str
    kind: DeviceKind
    title: str = ""
    memory_bytes: float
    peak_flop_per_s: Mapping[str, float] = field(default_factory=dict)
    memory_bytes_per_s: float = 0.0
    clocks_mhz: tuple[float, ...] = ()
    idle_w: float = 0.0
    max_w: float = 0.0
    dvfs: Dvfs = field(default_factory=Dvfs)
    price_per_hour: float = math.nan
    link: str
    network: str = ""
    host_cpus: int = 0
    host_memory_bytes: float = 0.0
    host_max_devices: int = 0
    sources: Mapping[str, str] = field(default_factory=dict)


def check_rates(types: Sequence[DeviceType], dtype: str) -> None:
    """Check that every type of device computes in a dtype.

    Raises:
        InvalidInputError: One does not; says in which it does, and in which all do.
    """
    lacking = next((device for device in types if not device.peak_flop_per_s.get(dtype)), None)
    if lacking is None:
        return
    known = ", ".join(sorted(lacking.peak_flop_per_s)) or "none"
    words = f"device type {lacking.name!r} has no peak rate for {dtype}; there are {known}"
    common = set.intersection(*(set(device.peak_flop_per_s) for device in types))
    fitting = [name for name, policy in PRECISIONS.items() if policy.compute in common]
    if len(types) > 1:
        names = ", ".join(device.name for device in types)
        words += f"; all of {names} have {', '.join(sorted(common)) or 'none'}"
    if fitting:
        words += f"; what would do is --precision {' or '.join(fitting)}"
    raise InvalidInputError(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostType:
    """A machine as it is sold or rented, such as a DGX or an instance of a cloud.

    Attributes:
        name: Such as ``"dgx-h100"``.
        title: Name for people.
        device: Name of the type of its devices.
        num_devices: Devices of one host.
        num_hosts: Hosts whose devices the innermost links join (an NVLink domain): 1, or more in a
            rack such as NVL72, which is one unit.
        network: Name of the link between hosts.
        num_ports: Ports of that link that one host has; its devices share them evenly.
        cpus: Cores of one host; 0 = not known.
        memory_bytes: Main memory of one host; 0 = not known.
        price_per_hour: Money for an hour of one host; NaN = not known.
        sources: Origin of each figure.
    """

    name: str
    title: str = ""
    device: str
    num_devices: int
    num_hosts: int = 1
    network: str
    num_ports: int
    cpus: int = 0
    memory_bytes: float = 0.0
    price_per_hour: float = math.nan
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Device types, links and hosts by name.

    Attributes:
        devices: Device types by name, in lower case.
        links: Link types by name, in lower case.
        hosts: Host types by name, in lower case.
    """

    devices: Mapping[str, DeviceType] = field(default_factory=dict)
    links: Mapping[str, LinkType] = field(default_factory=dict)
    hosts: Mapping[str, HostType] = field(default_factory=dict)

    def device_type(self, name: str) -> DeviceType:
        """Return a device type by its name, upper or lower case.

        Raises:
            InvalidInputError: There is none of that name; says which are near.
        """
        found = self.devices.get(name.lower())
        if found is None:
            raise InvalidInputError(
                f"device type {short(name)} is not in the catalogue"
                f"{suggest(name, [*self.devices, *self.hosts])}"
            )
        return found

    def link_type(self, name: str) -> LinkType:
        """Return a link type by its name, upper or lower case.

        Raises:
            InvalidInputError: There is none of that name; says which are near.
        """
        found = self.links.get(name.lower())
        if found is None:
            raise InvalidInputError(
                f"link {short(name)} is not in the catalogue{suggest(name, self.links)}"
            )
        return found

    def link_of(self, device_type: DeviceType) -> LinkType:
        """Return the link between two devices of a type in one host."""
        return self.link_type(device_type.link)


def make_device(
    device_type: DeviceType,
    name: str,
    *,
    host: int = 0,
    memory_bytes: float | None = None,
    speed: float = 1.0,
    price_per_hour: float | None = None,
) -> Device:
    """Return a device of a type, with all that the catalogue knows of it.

    Args:
        device_type: Its type.
        name: Its name within the cluster.
        host: Index of its host.
        memory_bytes: Memory, instead of the type's.
        speed: Factor by which it is faster than the profiled one.
        price_per_hour: Price, instead of the type's.
    """
    return Device(
        name=name,
        host=host,
        kind=device_type.kind,
        type=device_type.name,
        memory_bytes=device_type.memory_bytes if memory_bytes is None else memory_bytes,
        speed=speed,
        peak_flop_per_s=dict(device_type.peak_flop_per_s),
        memory_bytes_per_s=device_type.memory_bytes_per_s,
        clocks_mhz=device_type.clocks_mhz,
        idle_w=device_type.idle_w,
        max_w=device_type.max_w,
        dvfs=device_type.dvfs,
        price_per_hour=device_type.price_per_hour if price_per_hour is None else price_per_hour,
    )


def load_catalogue(extra_text: str | None = None) -> Catalogue:
    """Return the package's catalogue, with the entries of a user's file added to it.

    Args:
        extra_text: Text of that file; its entries replace those of the same name.

    Raises:
        FormatError: The file is wrong: an unknown key, a figure without its source, a link that is
            not there; knows the line.
    """
    catalogue = _package_catalogue()
    return catalogue if extra_text is None else _merge(catalogue, extra_text)


@cache
def _package_catalogue() -> Catalogue:
    """Return the figures that come with the package, read when first asked for."""
    catalogue = Catalogue()
    folder = resources.files("partita.catalogue")
    for file in ("links.yaml", "devices.yaml", "hosts.yaml"):
        catalogue = _merge(catalogue, folder.joinpath(file).read_text(encoding="utf-8"))
    return catalogue


def _merge(base: Catalogue, text: str) -> Catalogue:
    root = read_table(parse_yaml(text), "the catalogue", ("devices", "links", "hosts"))
    links, devices, hosts = dict(base.links), dict(base.devices), dict(base.hosts)
    for name, table in _entries(root, "links"):
        links[name] = _read_link_type(name, table)
    for name, table in _entries(root, "devices"):
        devices[name] = _read_device_type(name, table)
        with at_line(table.entries["link"].line):
            Catalogue(links=links).link_type(devices[name].link)
        if "network" in table.entries:
            with at_line(table.entries["network"].line):
                Catalogue(links=links).link_type(devices[name].network)
    merged = Catalogue(
        devices=MappingProxyType(devices),
        links=MappingProxyType(links),
        hosts=MappingProxyType(hosts),
    )
    for name, table in _entries(root, "hosts"):
        hosts[name] = _read_host_type(name, table)
        with at_line(table.line):
            merged.device_type(hosts[name].device)
            merged.link_type(hosts[name].network)
    return merged


def _entries(root: Table, section: str) -> Iterable[tuple[str, Table]]:
    """Yield the name and the fields of each entry of a section."""
    if section not in root.entries:
        return
    section_table = read_table(root.entries[section], section)
    for name, node in section_table.entries.items():
        if not name[:1].isalpha() or not _NAME_CHARACTERS.issuperset(name):
            raise FormatError(
                f"name {short(name)} in {section}; expected a lower-case letter, then lower-case "
                "letters, digits, '.', '_' or '-'",
                line=section_table.line_of[name],
            )
        yield name, read_table(node, f"{section} {name}")


def _read_link_type(name: str, table: Table) -> LinkType:
    what = f"link {name}"
    read_table(table, what, ("title", *_LINK_FIGURES, "sources"))
    check_present(table, what, ("bandwidth_bytes_per_s", "latency_s"))
    entries = table.entries
    bandwidth = read_quantity(
        entries["bandwidth_bytes_per_s"], f"{what}: bandwidth", parse_bandwidth
    )
    if bandwidth == 0:
        refuse(entries["bandwidth_bytes_per_s"], f"{what}: bandwidth", "more than 0")
    return LinkType(
        name=name,
        title=read_text(entries["title"], f"{what}: title") if "title" in entries else "",
        bandwidth_bytes_per_s=bandwidth,
        latency_s=read_quantity(
            entries["latency_s"], f"{what}: latency", parse_seconds, limit=1e15
        ),
        collectives=read_collectives(entries["collectives"], f"{what}: collectives")
        if "collectives" in entries
        else None,
        sources=_read_sources(table, what, _LINK_FIGURES),
    )


def read_collectives(node: Node, what: str) -> Collectives:
    """Return the rates of collectives of a table; what is not given keeps its default."""
    names = tuple(part.name for part in fields(Collectives))
    table = read_table(node, what, names)
    given: dict[str, Any] = {}
    for key, value in table.entries.items():
        if key in ("ring", "switch"):
            given[key] = tuple(
                read_number(share, f"{what}.{key}", positive=True)
                for share in read_items(value, f"{what}.{key}")
            )
        elif key == "switch_ranks":
            given[key] = read_count(value, f"{what}.{key}", low=2, high=MAX_COUNT)
        elif key == "measured":
            rows = read_items(value, f"{what}.{key}")
            given[key] = tuple(_read_measured(row, f"{what}.{key}") for row in rows)
        elif key.endswith("_s"):
            given[key] = read_quantity(value, f"{what}.{key}", parse_seconds, limit=1e15)
        else:
            given[key] = read_number(value, f"{what}.{key}")
    with at_line(node.line):
        return Collectives(**given)


def _read_measured(node: Node, what: str) -> MeasuredCollective:
    names = tuple(part.name for part in fields(MeasuredCollective))
    table = read_table(node, what, names)
    check_present(table, what, [name for name in names if name != "ramp"])
    found = table.entries
    with at_line(node.line):
        return MeasuredCollective(
            kind=read_text(found["kind"], f"{what}.kind"),
            ranks=read_count(found["ranks"], f"{what}.ranks", low=2, high=MAX_COUNT),
            ranks_per_host=read_count(
                found["ranks_per_host"], f"{what}.ranks_per_host", low=1, high=MAX_COUNT
            ),
            start_s=read_quantity(found["start_s"], f"{what}.start_s", parse_seconds, limit=1e15),
            share=read_number(found["share"], f"{what}.share", positive=True),
            ramp=read_number(found["ramp"], f"{what}.ramp") if "ramp" in found else 0.0,
        )


def _read_host_type(name: str, table: Table) -> HostType:
    what = f"host {name}"
    read_table(table, what, ("title", *_HOST_FIGURES, "sources"))
    check_present(table, what, ("device", "num_devices", "network", "num_ports"))
    found = table.entries

    def count(key: str, default: int, low: int = 1) -> int:
        if key not in found:
            return default
        return read_count(found[key], f"{what}: {key}", low=low, high=MAX_COUNT)

    price, memory = found.get("price_per_hour"), found.get("memory_bytes")
    return HostType(
        name=name,
        title=read_text(found["title"], f"{what}: title") if "title" in found else "",
        device=read_text(found["device"], f"{what}: device").lower(),
        num_devices=count("num_devices", 1),
        num_hosts=count("num_hosts", 1),
        network=read_text(found["network"], f"{what}: network").lower(),
        num_ports=count("num_ports", 1),
        cpus=count("cpus", 0, low=0),
        memory_bytes=read_size(memory, f"{what}: memory_bytes") if memory else 0.0,
        price_per_hour=read_number(price, f"{what}: price_per_hour") if price else math.nan,
        sources=_read_host_sources(table, what),
    )


def _read_host_sources(table: Table, what: str) -> Mapping[str, str]:
    """Return the source of a machine and that of its price, both of which must be there."""
    needed = ("machine", *(("price_per_hour",) if "price_per_hour" in table.entries else ()))
    check_present(table, what, ("sources",))
    found = read_table(table.entries["sources"], f"{what}: sources", needed)
    check_present(found, f"{what}: sources", needed)
    return {key: read_text(text, f"{what}: {key}") for key, text in found.entries.items()}


def _read_device_type(name: str, table: Table) -> DeviceType:
    what = f"device {name}"
    read_table(table, what, ("kind", "title", *_DEVICE_FIGURES, "sources"))
    check_present(table, what, ("kind", "memory_bytes", "link"))
    found = table.entries
    idle_w, max_w = _read_power(found.get("power_w"), f"{what}: power_w")
    cpus, host_memory, max_devices = _read_host(found.get("host"), f"{what}: host")
    rate, price = found.get("memory_bytes_per_s"), found.get("price_per_hour")
    peaks, clocks = found.get("peak_flop_per_s"), found.get("clocks_mhz")
    return DeviceType(
        name=name,
        kind=read_kind(found["kind"], f"{what}: kind"),
        title=read_text(found["title"], f"{what}: title") if "title" in found else "",
        memory_bytes=read_memory(found["memory_bytes"], f"{what}: memory_bytes"),
        peak_flop_per_s=read_peaks(peaks, f"{what}: peak_flop_per_s") if peaks else {},
        memory_bytes_per_s=read_rate(rate, f"{what}: memory_bytes_per_s") if rate else 0.0,
        clocks_mhz=read_clocks(clocks, f"{what}: clocks_mhz") if clocks else (),
        idle_w=idle_w,
        max_w=max_w,
        dvfs=read_dvfs(found["dvfs"], f"{what}: dvfs") if "dvfs" in found else Dvfs(),
        price_per_hour=read_number(price, f"{what}: price_per_hour") if price else math.nan,
        link=read_text(found["link"], f"{what}: link").lower(),
        network=read_text(found["network"], f"{what}: network").lower()
        if "network" in found
        else "",
        host_cpus=cpus,
        host_memory_bytes=host_memory,
        host_max_devices=max_devices,
        sources=_read_sources(table, what, _DEVICE_FIGURES),
    )


def _read_power(node: Node | None, what: str) -> tuple[float, float]:
    if node is None:
        return 0.0, 0.0
    found = read_table(node, what, ("idle", "max")).entries
    idle, limit = (
        read_number(found[key], f"{what}.{key}") if key in found else 0.0 for key in ("idle", "max")
    )
    return idle, limit


def _read_host(node: Node | None, what: str) -> tuple[int, float, int]:
    if node is None:
        return 0, 0.0, 0
    found = read_table(node, what, ("cpus", "memory_bytes", "max_devices")).entries
    cpus, max_devices = (
        read_count(found[key], f"{what}.{key}", low=0, high=MAX_COUNT) if key in found else 0
        for key in ("cpus", "max_devices")
    )
    memory = found.get("memory_bytes")
    return cpus, read_size(memory, f"{what}.memory_bytes") if memory else 0.0, max_devices


def _read_sources(table: Table, what: str, figures: Collection[str]) -> Mapping[str, str]:
    """Return the sources of an entry; each figure that it gives must have one.

    A source may name a figure (``power_w.idle``) or the group that it belongs to (``power_w``).
    """
    given = set()
    for key in figures:
        node = table.entries.get(key)
        parts = node.entries if isinstance(node, Table) else ()
        given |= {key, *(f"{key}.{part}" for part in parts)} if node else set()
    node = table.entries.get("sources")
    texts = read_table(node, f"{what}: sources", sorted(given)).entries if node else {}
    sources = {key: read_text(text, f"{what}: source of {key}") for key, text in texts.items()}
    for key in sorted(given):
        inner = [part for part in given if part.startswith(f"{key}.")]
        if not {key, key.split(".")[0]} & set(sources) and not inner:
            raise FormatError(
                f"{what}: {key} has no source; say under 'sources' where the figure comes from",
                line=table.line_of[key.split(".")[0]],
            )
    return sources


def read_kind(node: Node, what: str) -> DeviceKind:
    """Return the kind of a device."""
    text = read_text(node, what)
    if text not in tuple(DeviceKind):
        refuse(node, what, f"one of {', '.join(DeviceKind)}")
    return DeviceKind(text)


def read_size(node: Node, what: str) -> float:
    """Return bytes, 0 or more, finite."""
    return read_quantity(node, what, parse_bytes, limit=2.0**63)


def read_memory(node: Node, what: str, *, unlimited: bool = False) -> float:
    """Return the memory of a device, more than 0."""
    value = read_quantity(node, what, parse_bytes, limit=2.0**63, unlimited=unlimited)
    if value == 0:
        refuse(node, what, "more than 0 bytes")
    return value


def read_rate(node: Node, what: str) -> float:
    """Return bytes per second, 0 or more, finite."""
    return read_quantity(node, what, parse_bandwidth)


def read_peaks(node: Node, what: str) -> Mapping[str, float]:
    """Return peak rates by dtype."""
    return {
        dtype: read_number(rate, f"{what}.{dtype}", positive=True)
        for dtype, rate in read_table(node, what).entries.items()
    }


def read_clocks(node: Node, what: str) -> tuple[float, ...]:
    """Return ascending clocks from a list, or from ``{min, max, step}``."""
    if isinstance(node, Items):
        clocks = tuple(read_number(clock, what, positive=True) for clock in node.nodes)
        if any(a >= b for a, b in pairwise(clocks)):
            refuse(node, what, "ascending clocks")
        return clocks
    if not isinstance(node, Table):
        refuse(node, what, "a list of MHz, or {min, max, step}")
    found = read_table(node, what, ("min", "max", "step"))
    check_present(found, what, ("min", "max", "step"))
    low, high, step = (
        read_number(found.entries[key], f"{what}.{key}", positive=True)
        for key in ("min", "max", "step")
    )
    with at_line(node.line):
        return clock_range(low, high, step)


def read_dvfs(node: Node, what: str) -> Dvfs:
    """Return the constants of the DVFS model; those that are not given keep their defaults."""
    names = tuple(part.name for part in fields(Dvfs))
    found = read_table(node, what, names).entries
    given = {key: read_number(value, f"{what}.{key}") for key, value in found.items()}
    with at_line(node.line):
        return Dvfs(**given)


def clock_range(low_mhz: float, high_mhz: float, step_mhz: float) -> tuple[float, ...]:
    """Return the clocks from low to high, both included.

    The step may be rounded, as drivers' lists are: the last clock is the high one all the same.

    Raises:
        InvalidInputError: High is not a whole number of steps above low (within a twentieth of a
            step), there are more than 10,000 clocks, or the step is below 0.001.
    """
    steps = (high_mhz - low_mhz) / step_mhz
    whole = 0 <= steps < MAX_CLOCKS and abs(steps - round(steps)) <= 0.05
    if not whole or step_mhz < 0.001:
        raise InvalidInputError(
            f"clocks from {low_mhz:g} to {high_mhz:g} MHz in steps of {step_mhz:g}; expected a "
            f"whole number of steps of 0.001 or more, fewer than {MAX_CLOCKS}"
        )
    inner = (round(low_mhz + step_mhz * index, 6) for index in range(round(steps)))
    return (*inner, high_mhz)
