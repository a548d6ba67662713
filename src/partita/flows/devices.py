"""Device types, machines and links of the catalogue: what ``partita.list_devices`` says."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partita.catalogue.catalogue import Catalogue, DeviceType, HostType, LinkType
from partita.core.codec import encode_part
from partita.documents import open_catalogue
from partita.errors import InvalidInputError
from partita.flows.results import Result
from partita.names import suggest
from partita.requests import Request, declare, make
from partita.units import format_bytes, format_count

PEAKS = {"32 bit": "float32", "16 bit": "float16", "8 bit": "float8", "4 bit": "float4"}
"""Dtypes whose peaks a table shows, by the heads of their columns."""


@dataclass(frozen=True, kw_only=True)
class DevicesRequest(Request):
    """Which types of the catalogue to list."""

    part: str | None = declare(
        None, is_argument=True, help="Name, or text that names contain; a name gives all details."
    )
    catalogue: str | None = declare(None, help="Your own device types, a YAML file.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DeviceList(Result):
    """Device types and machines of the catalogue.

    Attributes:
        devices: Device types, in the order of the catalogue.
        hosts: Machines that a shorthand may name.
        catalogue: The catalogue that they are of.
        is_detailed: Whether one name was asked for, with all its figures and their sources.
    """

    devices: tuple[DeviceType, ...]
    hosts: tuple[HostType, ...]
    catalogue: Catalogue
    is_detailed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return device types and machines as JSON values; what is not known is null."""
        return {
            "devices": [self._device_values(kind) for kind in self.devices],
            "hosts": [self._host_values(host) for host in self.hosts],
        }

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each device type, then one for each machine."""
        return [*map(self._device_row, self.devices), *map(self.host_row, self.hosts)]

    def lines(self) -> list[str]:
        """Return the names, or all that is known of the one that was asked for."""
        if self.is_detailed:
            return [line for kind in self.devices for line in self._device_details(kind)] + [
                line for host in self.hosts for line in self._host_details(host)
            ]
        return [f"{len(self.devices)} device types, {len(self.hosts)} machines"]

    def _device_row(self, kind: DeviceType) -> dict[str, object]:
        peaks = {head: kind.peak_flop_per_s.get(dtype) for head, dtype in PEAKS.items()}
        return {
            "type": kind.name,
            "memory": format_bytes(kind.memory_bytes),
            "memory rate": f"{format_bytes(kind.memory_bytes_per_s)}/s",
            **{head: format_count(rate) if rate else "-" for head, rate in peaks.items()},
            "link": _link_text(self.catalogue.link_of(kind)),
            "price/h": "-" if math.isnan(kind.price_per_hour) else f"${kind.price_per_hour:.2f}",
        }

    def host_row(self, host: HostType) -> dict[str, object]:
        """Return the row of a machine."""
        count = f"{host.num_devices}x{host.device}"
        network = self.catalogue.link_type(host.network)
        return {
            "machine": host.name,
            "devices": f"{host.num_hosts} x {count}" if host.num_hosts > 1 else count,
            "ports of a host": f"{host.num_ports} x {_link_text(network)}",
            "price/h": "-" if math.isnan(host.price_per_hour) else f"${host.price_per_hour:.2f}",
        }

    def _device_values(self, kind: DeviceType) -> dict[str, Any]:
        link = self.catalogue.link_of(kind)
        network = self.catalogue.link_type(kind.network) if kind.network else None
        return {
            "name": kind.name,
            "title": kind.title,
            "kind": kind.kind.value,
            "memory_bytes": kind.memory_bytes,
            "peak_flop_per_s": dict(kind.peak_flop_per_s),
            "memory_bytes_per_s": kind.memory_bytes_per_s,
            "idle_w": kind.idle_w,
            "max_w": kind.max_w,
            "clocks_mhz": [kind.clocks_mhz[0], kind.clocks_mhz[-1]] if kind.clocks_mhz else None,
            "price_per_hour": None if math.isnan(kind.price_per_hour) else kind.price_per_hour,
            "link": _link_values(link),
            "network": _link_values(network) if network else None,
            "devices_per_host": kind.host_max_devices or None,
            "sources": dict(kind.sources),
        }

    def _host_values(self, host: HostType) -> dict[str, Any]:
        return {
            "name": host.name,
            "title": host.title,
            "device": host.device,
            "num_devices": host.num_devices,
            "num_hosts": host.num_hosts,
            "network": _link_values(self.catalogue.link_type(host.network)),
            "num_ports": host.num_ports,
            "cpus": host.cpus or None,
            "memory_bytes": host.memory_bytes or None,
            "price_per_hour": None if math.isnan(host.price_per_hour) else host.price_per_hour,
            "sources": dict(host.sources),
        }

    def _device_details(self, kind: DeviceType) -> list[str]:
        values = self._device_values(kind)
        peaks = kind.peak_flop_per_s.items()
        lines = [
            f"{kind.name}: {kind.title}",
            f"  memory {format_bytes(kind.memory_bytes)} at "
            f"{format_bytes(kind.memory_bytes_per_s)}/s, {kind.idle_w:g} to {kind.max_w:g} W",
            "  peaks " + ", ".join(f"{dtype} {format_count(rate)}" for dtype, rate in peaks),
            f"  link {_link_text(self.catalogue.link_of(kind))}",
        ]
        if kind.network:
            network = self.catalogue.link_type(kind.network)
            lines.append(f"  a port for each device between hosts: {_link_text(network)}")
        if values["price_per_hour"] is not None:
            lines.append(f"  ${kind.price_per_hour:.2f} per hour")
        return lines + _source_lines(kind.sources)

    def _host_details(self, host: HostType) -> list[str]:
        row = self.host_row(host)
        lines = [
            f"{host.name}: {host.title}",
            f"  {row['devices']}, {row['ports of a host']}",
            f"  {host.cpus} cores, {format_bytes(host.memory_bytes)} of main memory",
        ]
        if not math.isnan(host.price_per_hour):
            lines.append(f"  ${host.price_per_hour:.2f} per hour")
        return lines + _source_lines(host.sources)


def _source_lines(sources: Mapping[str, str]) -> list[str]:
    return [f"  source of {key}: {text}" for key, text in sources.items()]


def _link_text(link: LinkType) -> str:
    return f"{link.name} {format_bytes(link.bandwidth_bytes_per_s)}/s"


def _link_values(link: LinkType) -> dict[str, Any]:
    return {
        "name": link.name,
        "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
        "latency_s": link.latency_s,
        "collectives": encode_part(link.collectives) if link.collectives else None,
        "sources": dict(link.sources),
    }


def list_devices(part: str | None = None, /, *, catalogue: str | None = None) -> DeviceList:
    """List the device types and machines that a cluster may name.

    Args:
        part: A name, or a text that names contain; None = all.
        catalogue: A YAML file with types of your own.

    Raises:
        InvalidInputError: No name contains it.
    """
    return devices_request(make(DevicesRequest, part=part, catalogue=catalogue))


def devices_request(request: DevicesRequest) -> DeviceList:
    """List what a request asks for; see :func:`list_devices`."""
    known = open_catalogue(request.catalogue)
    part = (request.part or "").lower()
    exact = part in known.devices or part in known.hosts

    def is_asked(name: str) -> bool:
        return name == part if exact else part in name

    devices = tuple(kind for name, kind in known.devices.items() if is_asked(name))
    hosts = tuple(host for name, host in known.hosts.items() if is_asked(name))
    if not devices and not hosts:
        hint = suggest(part, [*known.devices, *known.hosts])
        raise InvalidInputError(f"no device type and no machine's name contains {part!r}{hint}")
    return DeviceList(devices=devices, hosts=hosts, catalogue=known, is_detailed=exact)
