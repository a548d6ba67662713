"""Clusters in one word: ``2x4xa100+1x2xv100`` is two hosts of four A100 and one of two V100.

``4xdgx-h100`` is four machines as they are sold or rented, each with its devices, links and ports.
"""

import logging
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from partita.catalogue.catalogue import (
    Catalogue,
    HostType,
    LinkType,
    load_catalogue,
    make_device,
)
from partita.core.cluster import MAX_DEVICES, Cluster, Device, Host, Level
from partita.core.graph import DeviceKind
from partita.errors import InvalidInputError
from partita.names import short

logger = logging.getLogger(__name__)

GRAMMAR = (
    'cluster = group { "+" group }',
    'group = [ [ hosts "x" ] devices-a-host "x" ] type',
    "type = a device type of the catalogue, such as a100, upper or lower case",
    'or group = [ count "x" ] machine, such as dgx-h100',
)
EXAMPLES = (
    "8xa100",
    "2x8xa100 (2 hosts of 8)",
    "2x4xa100+1x2xv100",
    "2xdgx-h100",
)
GPU_NETWORK = "infiniband-hdr"
CPU_NETWORK = "ethernet-10g"
MAX_LOCAL_DEVICES = 16
_GROUP = re.compile(r"(?:(?:([0-9]+)x)?([0-9]+)x)?([a-z][a-z0-9._-]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Equal hosts with equal devices.

    Attributes:
        type: Type of the devices, or of the machine, in lower case.
        num_hosts: Number of hosts.
        num_devices: Number of devices of each host; of a machine the number of machines.
    """

    type: str
    num_hosts: int = 1
    num_devices: int = 1


def parse_shorthand(text: str) -> tuple[HostGroup, ...]:
    """Return the groups of a shorthand.

    >>> parse_shorthand("2x4xA100")
    (HostGroup(type='a100', num_hosts=2, num_devices=4),)

    Raises:
        InvalidInputError: It does not follow the grammar, of which the message gives examples, or
            counts no devices or too many.
    """
    groups = []
    for part in text.lower().split("+"):
        match = _GROUP.fullmatch(part.strip())
        if match is None:
            raise InvalidInputError(
                f"cluster {short(text)}: {short(part.strip())} is not understood; "
                f"write it like {', '.join(EXAMPLES)}"
            )
        hosts, devices = (_count(digits, text) for digits in match.group(1, 2))
        groups.append(HostGroup(type=match.group(3), num_hosts=hosts, num_devices=devices))
    if sum(group.num_hosts * group.num_devices for group in groups) > MAX_DEVICES:
        _refuse_count(text)
    return tuple(groups)


def _count(digits: str | None, text: str) -> int:
    if digits is None:
        return 1
    value = int(digits) if len(digits) <= len(str(MAX_DEVICES)) else 0
    if value == 0:
        _refuse_count(text)
    return value


def _refuse_count(text: str) -> None:
    raise InvalidInputError(f"cluster {short(text)}: expected 1 to {MAX_DEVICES} devices")


def write_shorthand(groups: Sequence[HostGroup]) -> str:
    """Return the shortest shorthand of groups.

    >>> write_shorthand([HostGroup(type="a100", num_devices=4), HostGroup(type="cpu")])
    '4xa100+cpu'
    """
    return "+".join(
        f"{f'{g.num_hosts}x' if g.num_hosts > 1 else ''}"
        f"{f'{g.num_devices}x' if g.num_hosts * g.num_devices > 1 else ''}{g.type}"
        for g in groups
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPorts:
    """Ports of one host to other hosts.

    Attributes:
        link: The link that they are of.
        per_device: Ports of each device, which may be a part of one; 0 = the host has one port.
    """

    link: LinkType
    per_device: float = 0.0


def read_shorthand(text: str, catalogue: Catalogue) -> Cluster:
    """Return the cluster of a shorthand.

    Devices are ``host0/gpu0``, ``host0/gpu1``, ... Those of one host talk over the usual link of
    their type (level ``host``; level ``nvlink`` where machines of several hosts are one domain).
    Several hosts are joined by level ``rack``: each device of a datacentre type has a port of the
    rate that is usual for its generation, machines have what they are sold with, other hosts one
    port of InfiniBand HDR; 10 Gb/s Ethernet where any of the hosts has CPUs only.

    Raises:
        InvalidInputError: The shorthand is wrong, or names a type that is not in the catalogue.
    """
    groups = parse_shorthand(text)
    hosts: list[Host] = []
    devices: list[Device] = []
    domain_of_host: list[int] = []
    links: list[LinkType] = []
    ports: list[HostPorts] = []
    for group in groups:
        machine = _machine(group, text, catalogue)
        kind = catalogue.device_type(machine.device)
        units = group.num_hosts * (group.num_devices if group.type in catalogue.hosts else 1)
        if len(devices) + units * machine.num_hosts * machine.num_devices > MAX_DEVICES:
            _refuse_count(text)
        price = machine.price_per_hour / machine.num_devices
        for unit in range(units * machine.num_hosts):
            host = Host(
                name=f"host{len(hosts)}", cpus=machine.cpus, memory_bytes=machine.memory_bytes
            )
            devices += [
                make_device(
                    kind,
                    f"{host.name}/{kind.kind}{index}",
                    host=len(hosts),
                    price_per_hour=None if math.isnan(price) else price,
                )
                for index in range(machine.num_devices)
            ]
            hosts.append(host)
            if unit % machine.num_hosts == 0:
                links.append(catalogue.link_of(kind))
            domain_of_host.append(len(links) - 1)
            per_device = machine.num_ports / machine.num_devices if machine.network else 0.0
            network = catalogue.link_type(machine.network or GPU_NETWORK)
            ports.append(HostPorts(link=network, per_device=per_device))
    return Cluster(
        name=write_shorthand(groups),
        hosts=tuple(hosts),
        devices=tuple(devices),
        levels=usual_levels(
            devices, links, catalogue, domain_of_host=domain_of_host, ports_of_host=ports
        ),
    )


def _machine(group: HostGroup, text: str, catalogue: Catalogue) -> HostType:
    """Return the machine that a group is made of: one of the catalogue, or the type's usual."""
    found = catalogue.hosts.get(group.type)
    if found is None:
        kind = catalogue.device_type(group.type)
        return HostType(
            name=kind.name,
            device=kind.name,
            num_devices=group.num_devices,
            network=kind.network,
            num_ports=group.num_devices,
            cpus=kind.host_cpus,
            memory_bytes=kind.host_memory_bytes,
        )
    if group.num_hosts > 1:
        total = group.num_hosts * group.num_devices
        raise InvalidInputError(
            f"cluster {short(text)}: {group.type} is a machine with {found.num_devices} devices; "
            f"expected one count before it, such as {total}x{group.type}"
        )
    return found


def usual_levels(
    devices: Sequence[Device],
    link_of_domain: Sequence[LinkType],
    catalogue: Catalogue,
    *,
    domain_of_host: Sequence[int] | None = None,
    ports_of_host: Sequence[HostPorts] | None = None,
) -> tuple[Level, ...]:
    """Return the levels of hosts of which only the link inside each is known.

    Args:
        devices: All devices, with the indices of their hosts.
        link_of_domain: The link inside each domain (host), up to the last one with a device.
        catalogue: Has the link between hosts, which there is only where devices are on several.
        domain_of_host: Domain of each host, where several hosts may be one; each is one if not
            given.
        ports_of_host: Ports of each host, instead of those usual for its devices.
    """
    host_of = [device.host for device in devices]
    domain_of = host_of if domain_of_host is None else [domain_of_host[host] for host in host_of]
    inner = Level(
        name="host" if domain_of == host_of else "nvlink",
        group_of=np.array(domain_of, dtype=np.int32),
        bandwidth_bytes_per_s=np.array([link.bandwidth_bytes_per_s for link in link_of_domain]),
        latency_s=np.array([link.latency_s for link in link_of_domain]),
        collectives=tuple(link.collectives for link in link_of_domain),
    )
    if len(set(domain_of)) == 1:
        return (inner,)
    return (inner, rack_level(devices, catalogue, ports_of_host))


def rack_level(
    devices: Sequence[Device],
    catalogue: Catalogue,
    ports_of_host: Sequence[HostPorts] | None = None,
) -> Level:
    """Return a level that joins all devices by the usual network between their hosts."""
    host_of = [device.host for device in devices]
    with_gpus = {device.host for device in devices if device.kind is DeviceKind.GPU}
    if with_gpus != set(host_of):
        ports = dict.fromkeys(host_of, HostPorts(link=catalogue.link_type(CPU_NETWORK)))
    elif ports_of_host is not None:
        ports = {host: ports_of_host[host] for host in host_of}
    else:
        ports = _usual_ports(devices, catalogue)
    count = Counter(host_of)
    port_per_device = any(port.per_device for port in ports.values())

    def rate(host: int) -> float:
        port = ports[host]
        # A host with one port among hosts with many: its devices share it evenly.
        parts = port.per_device or (1 / count[host] if port_per_device else 1.0)
        return port.link.bandwidth_bytes_per_s * parts

    slowest = min(ports, key=rate)
    fastest = max(map(rate, ports))
    share_of = {host: rate(host) / fastest for host in ports}
    return Level(
        name="rack",
        group_of=np.zeros(len(devices), dtype=np.int32),
        bandwidth_bytes_per_s=np.array([fastest]),
        latency_s=np.array([max(port.link.latency_s for port in ports.values())]),
        port_per_device=port_per_device,
        port_share=np.array([share_of[host] for host in host_of]),
        collectives=(ports[slowest].link.collectives,),
    )


def _usual_ports(devices: Sequence[Device], catalogue: Catalogue) -> dict[int, HostPorts]:
    """Return the ports of each host: one for each device where that is usual for all its types."""
    types: dict[int, set[str]] = {}
    for device in devices:
        types.setdefault(device.host, set()).add(device.type)
    result = {}
    for host, names in types.items():
        known = [catalogue.devices.get(name) for name in names]
        networks = [kind.network if kind is not None else "" for kind in known]
        links = [catalogue.link_type(network or GPU_NETWORK) for network in networks]
        slowest = min(links, key=lambda link: link.bandwidth_bytes_per_s)
        result[host] = HostPorts(link=slowest, per_device=1.0 if all(networks) else 0.0)
    return result


def local_cluster(
    num_devices: int,
    catalogue: Catalogue | None = None,
    *,
    cpus: int | None = None,
    memory_bytes: float | None = None,
) -> Cluster:
    """Return CPU processes of this machine as a cluster: one host, memory split evenly.

    Logs a warning where there are more of them than cores.

    Args:
        num_devices: Number of processes, 1 to 16.
        catalogue: Has the figures of type ``cpu``; the package's own if not given.
        cpus: Cores of the machine; asked of the system if not given.
        memory_bytes: Its memory; asked of the system if not given.

    Raises:
        InvalidInputError: Fewer than 1 or more than 16 processes.
    """
    if not 1 <= num_devices <= MAX_LOCAL_DEVICES:
        raise InvalidInputError(
            f"{num_devices} devices of this machine; expected 1 to {MAX_LOCAL_DEVICES}"
        )
    catalogue = load_catalogue() if catalogue is None else catalogue
    kind = catalogue.device_type("cpu")
    cpus = _cores() if cpus is None else cpus
    memory = _machine_memory_bytes() if memory_bytes is None else memory_bytes
    if num_devices > cpus:
        logger.warning(
            "%d CPU processes share %d cores: times will not be typical", num_devices, cpus
        )
    devices = [
        make_device(kind, f"host0/cpu{index}", memory_bytes=memory / num_devices)
        for index in range(num_devices)
    ]
    return Cluster(
        name=f"{num_devices}xcpu",
        hosts=(Host(name="host0", cpus=cpus, memory_bytes=memory),),
        devices=tuple(devices),
        levels=usual_levels(devices, [catalogue.link_type("loopback")], catalogue),
    )


def cpu_hosts(processes: Mapping[str, int], catalogue: Catalogue | None = None) -> Cluster:
    """Return CPU processes of some hosts as a cluster, each host like this machine.

    Args:
        processes: Number of processes of each host, by its name.
        catalogue: Has the figures of type ``cpu``; the package's own if not given.
    """
    catalogue = load_catalogue() if catalogue is None else catalogue
    kind = catalogue.device_type("cpu")
    cpus, memory = _cores(), _machine_memory_bytes()
    devices = [
        make_device(kind, f"{name}/cpu{index}", host=host, memory_bytes=memory / count)
        for host, (name, count) in enumerate(processes.items())
        for index in range(count)
    ]
    links = [catalogue.link_type("loopback")] * len(processes)
    return Cluster(
        name="+".join(f"{count}xcpu" for count in processes.values()),
        hosts=tuple(Host(name=name, cpus=cpus, memory_bytes=memory) for name in processes),
        devices=tuple(devices),
        levels=usual_levels(devices, links, catalogue),
    )


def _cores() -> int:
    from partita.processes import machine_cores  # noqa: PLC0415 (clusters of CPUs alone need it)

    return machine_cores()


def _machine_memory_bytes() -> float:
    """Return the memory of this machine."""
    return float(os.sysconf("SC_PAGE_SIZE")) * float(os.sysconf("SC_PHYS_PAGES"))
