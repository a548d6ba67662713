"""Hosts and GPUs that somebody's tool has listed, as a cluster, completed by the catalogue.

The list is a driver's, a scheduler's, an orchestrator's or a hostfile. It says how many GPUs there
are and mostly what they are called, seldom how fast their links are: those are the usual ones of
the types, which ``partita calibrate`` replaces by measured ones.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from partita.catalogue.catalogue import Catalogue, DeviceType, make_device
from partita.catalogue.gpu_names import gpu_type, is_slice
from partita.catalogue.shorthand import parse_shorthand, usual_levels
from partita.core.cluster import MAX_DEVICES, Cluster, Device, Host, Level, LinkMatrix
from partita.errors import InvalidInputError
from partita.names import short

logger = logging.getLogger(__name__)

LinksOf: TypeAlias = Callable[[Sequence[DeviceType]], tuple[Level, ...] | LinkMatrix | None]
"""Returns the links of the GPUs of one host, whose types are known by now; None = the usual."""
_SWITCHES = ("rack", "spine", "core")
_FAR_BELOW = 0.85
MAX_PER_HOST = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGpu:
    """A GPU in a list.

    Attributes:
        title: Its name there; empty = the list has none.
        memory_bytes: Its memory there; 0 = the list does not say.
    """

    title: str = ""
    memory_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundHost:
    """A host in a list.

    Attributes:
        name: Its name.
        gpus: Its GPUs; None = the list does not say how many.
        cpus: Its cores; 0 = not known.
        memory_bytes: Its memory; 0 = not known.
        switches: Switches above it, the nearest first.
    """

    name: str
    gpus: tuple[FoundGpu, ...] | None
    cpus: int = 0
    memory_bytes: float = 0.0
    switches: tuple[str, ...] = ()


def equal_gpus(
    count: int, host: str, *, title: str = "", memory_bytes: float = 0.0
) -> tuple[FoundGpu, ...]:
    """Return GPUs of one host that are alike.

    Raises:
        InvalidInputError: There are more than 1024.
    """
    if count > MAX_PER_HOST:
        raise InvalidInputError(
            f"host {short(host)} has {count} GPUs; expected at most {MAX_PER_HOST}"
        )
    return (FoundGpu(title=title, memory_bytes=memory_bytes),) * count


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the reader of a list knows besides it.

    Attributes:
        catalogue: Has the device types and links.
        given: Type of GPUs that the list does not name, or whose name the catalogue does not know,
            such as ``a100``; ``8xa100`` says how many each host has, too. Empty = none is given.
    """

    catalogue: Catalogue
    given: str = ""

    def usual(self) -> tuple[DeviceType | None, int]:
        """Return the type that is given and its number per host; 0 = not given.

        Raises:
            InvalidInputError: It is no type of the catalogue, or more than one.
        """
        if not self.given:
            return None, 0
        group, *others = parse_shorthand(self.given)
        if others or group.num_hosts > 1:
            raise InvalidInputError(
                f"type {short(self.given)}; expected one such as a100, or 8xa100 for each host"
            )
        counted = self.given.lower().strip() != group.type
        return self.catalogue.device_type(group.type), group.num_devices if counted else 0


def inventory_cluster(
    name: str,
    hosts: Sequence[FoundHost],
    known: Completion,
    *,
    links_of: LinksOf | None = None,
) -> Cluster:
    """Return the cluster of listed hosts, those without GPUs left out.

    Args:
        name: Name of the cluster.
        hosts: The hosts, in their order.
        known: The catalogue, and the type of what has no name in the list.
        links_of: Links inside of the host, where the list says them and has one host; the usual
            ones if not given.

    Raises:
        InvalidInputError: There are no GPUs, their type is not known, or a type is given although
            all have names.
    """
    usual, count = known.usual()
    if usual is None and all(host.gpus is None for host in hosts):
        raise InvalidInputError(
            "GPUs are not in it; --type 8xa100 says which and how many each host has"
        )
    filled = [
        replace(host, gpus=equal_gpus(count or 1, host.name)) if host.gpus is None else host
        for host in hosts
    ]
    if count and all(host.gpus is not None for host in hosts):
        raise InvalidInputError(
            f"the hosts say how many GPUs they have; expected --type {usual.name if usual else ''}"
        )
    there = [host for host in filled if host.gpus]
    if not there:
        raise InvalidInputError(f"none of its {len(hosts)} hosts has a GPU")
    if sum(len(host.gpus or ()) for host in there) > MAX_DEVICES:
        raise InvalidInputError(f"more than {MAX_DEVICES} GPUs are in it")
    own = _own_types(there, known.catalogue)
    types = [
        [_type(name, gpu, host, known) for name, gpu in zip(names, host.gpus or (), strict=True)]
        for names, host in zip(own, there, strict=True)
    ]
    if usual is not None and all(all(names) for names in own) and all(host.gpus for host in hosts):
        raise InvalidInputError(
            f"all GPUs have names that the catalogue knows ({types[0][0].name}, ...); "
            f"--type {known.given} is for those without"
        )
    devices = [
        _device(kind, gpu, f"{host.name}/gpu{index}", row)
        for row, host in enumerate(there)
        for index, (kind, gpu) in enumerate(zip(types[row], host.gpus or (), strict=True))
    ]
    said = links_of(types[0]) if links_of is not None and len(devices) > 1 else None
    within = said if said is not None else _usual(devices, types, there, known)
    logger.warning("%s: link figures are the catalogue's; partita calibrate measures them", name)
    return Cluster(
        name=name,
        hosts=tuple(
            Host(name=host.name, cpus=host.cpus, memory_bytes=host.memory_bytes) for host in there
        ),
        devices=tuple(devices),
        levels=() if isinstance(within, LinkMatrix) else within,
        matrix=within if isinstance(within, LinkMatrix) else None,
    )


def _own_types(hosts: Sequence[FoundHost], catalogue: Catalogue) -> list[list[str]]:
    """Return the type that each GPU has by its name; empty = by that it has none."""
    found: dict[FoundGpu, str] = {}
    for host in hosts:
        for gpu in host.gpus or ():
            if gpu not in found:
                found[gpu] = gpu_type(gpu.title, catalogue, memory_bytes=gpu.memory_bytes)
    return [[found[gpu] for gpu in host.gpus or ()] for host in hosts]


def _type(own: str, gpu: FoundGpu, host: FoundHost, known: Completion) -> DeviceType:
    """Return the type of a GPU, by its own name or as given."""
    usual, _ = known.usual()
    if own:
        return known.catalogue.device_type(own)
    if usual is not None:
        return usual
    where = f"node {host.name!r}"
    if not gpu.title:
        raise InvalidInputError(
            f"there is no type of the GPUs of {where}; --type a100, for example, gives it, also to "
            "partita convert, which writes a cluster file"
        )
    what = "parts of GPUs (MIG), " if is_slice(gpu.title) else "GPUs of type "
    raise InvalidInputError(
        f"{where} has {what}{short(gpu.title)}, which the catalogue does not know; --type names "
        "one that it knows, --catalogue adds to it"
    )


def _device(kind: DeviceType, gpu: FoundGpu, name: str, host: int) -> Device:
    """Return a device; one with far less memory than its type has what the list says."""
    is_less = 0 < gpu.memory_bytes < _FAR_BELOW * kind.memory_bytes
    return make_device(kind, name, host=host, memory_bytes=gpu.memory_bytes if is_less else None)


def _usual(
    devices: Sequence[Device],
    types: Sequence[Sequence[DeviceType]],
    hosts: Sequence[FoundHost],
    known: Completion,
) -> tuple[Level, ...]:
    """Return the usual links of the types, and levels of switches, each like the network."""
    links = [known.catalogue.link_of(kinds[0]) for kinds in types]
    levels = usual_levels(devices, links, known.catalogue)
    if len(levels) == 1:
        return levels
    inner, network = levels
    numbers = _switch_groups([host.switches for host in hosts])
    racks = [
        _grouped(network, [groups[device.host] for device in devices], _switch_name(depth))
        for depth, groups in enumerate(numbers)
    ]
    return (inner, *racks, replace(network, name=_switch_name(len(numbers))))


def _switch_name(depth: int) -> str:
    """Return the name of the level of the switches that many above the hosts' own."""
    last = len(_SWITCHES) - 1
    return _SWITCHES[depth] if depth <= last else f"{_SWITCHES[last]}{depth - last + 1}"


def _switch_groups(paths: Sequence[tuple[str, ...]]) -> list[list[int]]:
    """Return for each level of switches that divides the hosts the group of each host."""
    depth = max(map(len, paths))
    padded = [(*path, *("",) * (depth - len(path))) for path in paths]
    found: list[list[int]] = []
    for level in range(depth):
        above = [path[level:] for path in padded]  # two switches of one name are two
        order = list(dict.fromkeys(above))
        groups = [order.index(each) for each in above]
        if len(order) > 1 and (not found or groups != found[-1]):
            found.append(groups)
    return found


def _grouped(whole: Level, group_of: Sequence[int], name: str) -> Level:
    """Return a level of switches that each carry what the whole network does."""
    count = max(group_of) + 1
    return replace(
        whole,
        name=name,
        group_of=np.array(group_of, dtype=np.int32),
        bandwidth_bytes_per_s=np.repeat(whole.bandwidth_bytes_per_s, count),
        latency_s=np.repeat(whole.latency_s, count),
        collectives=whole.collectives * count,
    )
