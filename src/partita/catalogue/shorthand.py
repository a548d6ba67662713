"""Clusters in one word: ``2x4xa100+1x2xv100`` is two hosts of four A100 and one of two V100."""

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partita.catalogue.catalogue import Catalogue, LinkType, load_catalogue, make_device
from partita.core.cluster import MAX_DEVICES, Cluster, Device, Host, Level
from partita.core.graph import DeviceKind
from partita.errors import InvalidInputError
from partita.names import short

logger = logging.getLogger(__name__)

GRAMMAR = (
    'cluster = group { "+" group }',
    'group = [ [ hosts "x" ] devices-a-host "x" ] type',
    "type = a device type of the catalogue, such as a100, upper or lower case",
)
GPU_NETWORK = "infiniband-hdr"
CPU_NETWORK = "ethernet-10g"
MAX_LOCAL_DEVICES = 16
_GROUP = re.compile(r"(?:(?:([0-9]+)x)?([0-9]+)x)?([a-z][a-z0-9._-]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Equal hosts with equal devices.

    Attributes:
        type: Type of the devices, in lower case.
        num_hosts: Number of hosts.
        num_devices: Number of devices of each host.
    """

    type: str
    num_hosts: int = 1
    num_devices: int = 1


def parse_shorthand(text: str) -> tuple[HostGroup, ...]:
    """Return the groups of a shorthand.

    >>> parse_shorthand("2x4xA100")
    (HostGroup(type='a100', num_hosts=2, num_devices=4),)

    Raises:
        InvalidInputError: It does not follow the grammar, which the message gives, or counts no
            devices or too many.
    """
    groups = []
    for part in text.lower().split("+"):
        match = _GROUP.fullmatch(part.strip())
        if match is None:
            raise InvalidInputError(
                f"cluster {short(text)}: {short(part.strip())} is not understood; "
                f"{'; '.join(GRAMMAR)}"
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


def read_shorthand(text: str, catalogue: Catalogue) -> Cluster:
    """Return the cluster of a shorthand.

    Devices are ``host0/gpu0``, ``host0/gpu1``, ... Those of one host talk over the usual link of
    their type (level ``host``); several hosts are joined by level ``rack``: InfiniBand HDR, or
    10 Gb/s Ethernet where any of the hosts has CPUs only.

    Raises:
        InvalidInputError: The shorthand is wrong, or names a type that is not in the catalogue.
    """
    groups = parse_shorthand(text)
    hosts: list[Host] = []
    devices: list[Device] = []
    links: list[LinkType] = []
    for group in groups:
        kind = catalogue.device_type(group.type)
        for _ in range(group.num_hosts):
            host = Host(
                name=f"host{len(hosts)}", cpus=kind.host_cpus, memory_bytes=kind.host_memory_bytes
            )
            devices += [
                make_device(kind, f"{host.name}/{kind.kind}{index}", host=len(hosts))
                for index in range(group.num_devices)
            ]
            hosts.append(host)
            links.append(catalogue.link_of(kind))
    return Cluster(
        name=write_shorthand(groups),
        hosts=tuple(hosts),
        devices=tuple(devices),
        levels=usual_levels(devices, links, catalogue),
    )


def usual_levels(
    devices: Sequence[Device], link_of_host: Sequence[LinkType], catalogue: Catalogue
) -> tuple[Level, ...]:
    """Return the levels of hosts of which only the link inside each is known.

    Args:
        devices: All devices, with the indices of their hosts.
        link_of_host: The link inside each host, up to the last one with a device.
        catalogue: Has the link between hosts, which there is only where devices are on several.
    """
    host_of = [device.host for device in devices]
    inner = Level(
        name="host",
        group_of=np.array(host_of, dtype=np.int32),
        bandwidth_bytes_per_s=np.array([link.bandwidth_bytes_per_s for link in link_of_host]),
        latency_s=np.array([link.latency_s for link in link_of_host]),
    )
    if len(set(host_of)) == 1:
        return (inner,)
    return (inner, rack_level(devices, catalogue))


def rack_level(devices: Sequence[Device], catalogue: Catalogue) -> Level:
    """Return a level that joins all devices by the usual network between their hosts."""
    with_gpus = {device.host for device in devices if device.kind is DeviceKind.GPU}
    all_have_gpus = with_gpus == {device.host for device in devices}
    network = catalogue.link_type(GPU_NETWORK if all_have_gpus else CPU_NETWORK)
    return Level(
        name="rack",
        group_of=np.zeros(len(devices), dtype=np.int32),
        bandwidth_bytes_per_s=np.array([network.bandwidth_bytes_per_s]),
        latency_s=np.array([network.latency_s]),
    )


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
    cpus = _machine_cpus() if cpus is None else cpus
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


def _machine_cpus() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _machine_memory_bytes() -> float:
    """Return the memory of this machine."""
    return float(os.sysconf("SC_PAGE_SIZE")) * float(os.sysconf("SC_PHYS_PAGES"))
