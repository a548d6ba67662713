"""Clusters changed a little, to ask what one more device or a faster link would bring."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain, count, islice, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.catalogue.catalogue import Catalogue, LinkType, make_device
from partita.catalogue.shorthand import HostGroup, parse_shorthand, rack_level, usual_levels
from partita.core.cluster import MAX_DEVICES, Cluster, Device, Host, Level, LinkMatrix
from partita.errors import InvalidInputError
from partita.names import nearest, short

_FACTOR = re.compile(r"([a-z]+)\s*=\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)x?")

_WHOLE_HOSTS = re.compile(r"[0-9]+x[0-9]+x")


def what_if(cluster: Cluster, change: str, catalogue: Catalogue) -> Cluster:
    """Return the cluster with a change.

    Args:
        cluster: The cluster.
        change: ``bandwidth=2x`` (or ``latency``, ``memory``, ``speed``): all times a factor;
            ``+1xa100``: one more device, on a host that has such devices and room for more, else
            on a new one; ``+1x4xa100``: one more host with four; ``-host0/gpu3``: without the
            devices of that name, of that host, or whose names match a pattern such as ``host1/*``.
        catalogue: Has the types that the cluster has none of yet.

    Raises:
        InvalidInputError: The change is not understood or not possible.
    """
    text = change.strip().lower()
    match = _FACTOR.fullmatch(text)
    if text.startswith("+"):
        result = _add(cluster, text[1:], catalogue)
    elif text.startswith("-"):
        result = _without(cluster, change.strip()[1:])
    elif match is not None and match.group(1) in SCALES:
        result = SCALES[match.group(1)](cluster, float(match.group(2)))
    else:
        meant = nearest(text.partition("=")[0].strip(), SCALES) if "=" in text else None
        raise InvalidInputError(
            f"what if {short(change)} is not understood; "
            f"{f'did you mean {meant!r}? ' if meant else ''}expected +COUNTxTYPE, "
            f"+HOSTSxCOUNTxTYPE, -DEVICE, or {', '.join(f'{name}=2x' for name in SCALES)}"
        )
    return replace(result, name=f"{cluster.name} {text}")


def scale_bandwidth(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with the bandwidth of every link times a factor."""
    _check_factor(factor)
    return _scaled_links(cluster, bandwidth=factor)


def scale_latency(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with the latency of every link times a factor."""
    _check_factor(factor)
    return _scaled_links(cluster, latency=factor)


def scale_memory(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with the memory of every device times a factor."""
    _check_factor(factor)
    return _map_devices(cluster, lambda d: replace(d, memory_bytes=d.memory_bytes * factor))


def scale_speed(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with the speed of every device times a factor."""
    _check_factor(factor)
    return _map_devices(cluster, lambda d: replace(d, speed=d.speed * factor))


SCALES: Mapping[str, Callable[[Cluster, float], Cluster]] = {
    "bandwidth": scale_bandwidth,
    "latency": scale_latency,
    "memory": scale_memory,
    "speed": scale_speed,
}


def _check_factor(factor: float) -> None:
    if not 0 < factor < float("inf"):
        raise InvalidInputError(
            f"the factor of a what if is {factor:g}; expected more than 0, finite, such as 2x"
        )


def _map_devices(cluster: Cluster, change: Callable[[Device], Device]) -> Cluster:
    return replace(cluster, devices=tuple(map(change, cluster.devices)))


def _scaled_links(cluster: Cluster, *, bandwidth: float = 1.0, latency: float = 1.0) -> Cluster:
    levels = tuple(
        replace(
            level,
            bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * bandwidth,
            latency_s=level.latency_s * latency,
        )
        for level in cluster.levels
    )
    matrix = cluster.matrix
    if matrix is not None:
        matrix = replace(
            matrix,
            bandwidth_bytes_per_s=matrix.bandwidth_bytes_per_s * bandwidth,
            latency_s=matrix.latency_s * latency,
        )
    return replace(cluster, levels=levels, matrix=matrix)


def _without(cluster: Cluster, pattern: str) -> Cluster:
    """Return the cluster without the devices whose names match a pattern."""
    names = cluster.device_names
    # The name of a host stands for all its devices.
    patterns = (pattern, f"{pattern}/*")
    keep = [i for i, name in enumerate(names) if not any(fnmatchcase(name, p) for p in patterns)]
    if len(keep) in (0, len(names)):
        which = "no device" if keep else "every device"
        known = f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        raise InvalidInputError(
            f"what if {short('-' + pattern)}: {which} of the cluster has such a name; it has "
            f"{known}"
        )
    return part_of(cluster, keep)


def part_of(cluster: Cluster, keep: Sequence[int]) -> Cluster:
    """Return a cluster with some of its devices, the links between them as they were.

    Args:
        cluster: The whole.
        keep: Indices of the devices that stay, ascending.
    """
    rows = np.array(keep, dtype=np.int64)
    matrix = cluster.matrix
    if matrix is not None:
        pairs = (rows[:, None] * len(cluster) + rows[None, :]).ravel()
        matrix = LinkMatrix(
            bandwidth_bytes_per_s=matrix.bandwidth_bytes_per_s[pairs],
            latency_s=matrix.latency_s[pairs],
        )
    return replace(
        cluster,
        name=f"{len(keep)} devices of {cluster.name}",
        devices=tuple(cluster.devices[index] for index in keep),
        levels=tuple(level.taken(rows) for level in cluster.levels),
        matrix=matrix,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Addition:
    """Devices to add.

    Attributes:
        like: Index of the last device of their type; -1 = the cluster has none.
        device: A device such as they are.
        host: A host such as the new ones are.
        link: The usual link between them; None = not known.
        room: Devices that a host holds.
    """

    like: int
    device: Device
    host: Host
    link: LinkType | None
    room: int


def _add(cluster: Cluster, text: str, catalogue: Catalogue) -> Cluster:
    """Return the cluster with the devices of one group of a shorthand added."""
    groups = parse_shorthand(text)
    if len(groups) > 1:
        raise InvalidInputError(f"what if {short('+' + text)}: expected one type of device")
    group, on_new_hosts = groups[0], _WHOLE_HOSTS.match(text) is not None
    machine = catalogue.hosts.get(group.type)
    if machine is not None:
        count = group.num_hosts * group.num_devices * machine.num_hosts
        group = HostGroup(type=machine.device, num_hosts=count, num_devices=machine.num_devices)
        on_new_hosts = True
    if len(cluster) + group.num_hosts * group.num_devices > MAX_DEVICES:
        raise InvalidInputError(f"what if {short('+' + text)}: more than {MAX_DEVICES} devices")
    addition = _addition(cluster, group.type, catalogue)
    host_of = _placed(cluster, group, addition, on_new_hosts=on_new_hosts)
    hosts = _more_hosts(cluster, max(host_of) + 1, addition.host)
    devices = _more_devices(cluster, hosts, host_of, addition.device)
    if cluster.matrix is not None:
        matrix = _wider_matrix(cluster, cluster.matrix, addition, len(host_of))
        return replace(cluster, hosts=hosts, devices=devices, matrix=matrix)
    levels = _wider_levels(cluster, addition, devices, catalogue)
    return replace(cluster, hosts=hosts, devices=devices, levels=levels)


def _addition(cluster: Cluster, type_name: str, catalogue: Catalogue) -> _Addition:
    """Return what to add: like the last device of the type, else as the catalogue says."""
    same = [i for i, device in enumerate(cluster.devices) if device.type.lower() == type_name]
    if same:
        device, known = cluster.devices[same[-1]], catalogue.devices.get(type_name)
        room = known.host_max_devices if known else 0
        link = catalogue.link_of(known) if known else None
        host = cluster.hosts[device.host]
        return _Addition(
            like=same[-1], device=device, host=host, link=link, room=room or MAX_DEVICES
        )
    known = catalogue.device_type(type_name)
    return _Addition(
        like=-1,
        device=make_device(known, "new"),
        host=Host(name="new", cpus=known.host_cpus, memory_bytes=known.host_memory_bytes),
        link=catalogue.link_of(known),
        room=known.host_max_devices or MAX_DEVICES,
    )


def _placed(
    cluster: Cluster, group: HostGroup, addition: _Addition, *, on_new_hosts: bool
) -> list[int]:
    """Return the host of each device to add: old ones of the type with room first, in order."""
    first_new = len(cluster.hosts)
    if on_new_hosts:
        new_hosts = range(first_new, first_new + group.num_hosts)
        return [host for host in new_hosts for _ in range(group.num_devices)]
    used = Counter(device.host for device in cluster.devices)
    same = [d.host for d in cluster.devices if d.type.lower() == group.type]
    rooms = (repeat(host, max(0, addition.room - used[host])) for host in dict.fromkeys(same))
    old = list(islice(chain.from_iterable(rooms), group.num_devices))
    missing = group.num_devices - len(old)
    return old + [first_new + index // addition.room for index in range(missing)]


def _more_hosts(cluster: Cluster, num_hosts: int, like: Host) -> tuple[Host, ...]:
    """Return the hosts of a cluster, with new ones up to a number, under free names."""
    taken = {host.name for host in cluster.hosts}
    free = (name for index in count(len(taken)) if (name := f"host{index}") not in taken)
    num_new = max(0, num_hosts - len(cluster.hosts))
    return (*cluster.hosts, *(replace(like, name=name) for name in islice(free, num_new)))


def _more_devices(
    cluster: Cluster, hosts: Sequence[Host], host_of: Sequence[int], like: Device
) -> tuple[Device, ...]:
    """Return the devices of a cluster and new ones on the given hosts, under free names."""
    taken = set(cluster.device_names)
    next_of = Counter(device.host for device in cluster.devices if device.kind is like.kind)
    new = []
    for host in host_of:
        stem = f"{hosts[host].name}/{like.kind}"
        while f"{stem}{next_of[host]}" in taken:
            next_of[host] += 1
        new.append(replace(like, name=f"{stem}{next_of[host]}", host=host))
        next_of[host] += 1
    return (*cluster.devices, *new)


def _wider_matrix(
    cluster: Cluster, matrix: LinkMatrix, addition: _Addition, num_new: int
) -> LinkMatrix:
    """Return a matrix in which each new device has the links of the one that it is like.

    Two devices that are alike talk to each other as the first one does over its fastest link.
    """
    size = len(cluster)
    if addition.like < 0 or size == 1:
        raise InvalidInputError(
            f"cluster {cluster.name!r} has a matrix of links, which says nothing of another "
            f"{addition.device.type!r}; expected a type of which it has a device with links"
        )
    rows = np.append(np.arange(size), np.full(num_new, addition.like))
    bandwidth = matrix.bandwidth_bytes_per_s.reshape(size, size)
    latency = matrix.latency_s.reshape(size, size)
    others = np.delete(np.arange(size), addition.like)
    nearest = others[np.argmax(bandwidth[addition.like, others])]
    alike = (rows[:, None] == addition.like) & (rows == addition.like)
    alike[addition.like, addition.like] = False
    return LinkMatrix(
        bandwidth_bytes_per_s=np.where(
            alike, bandwidth[addition.like, nearest], bandwidth[rows][:, rows]
        ),
        latency_s=np.where(alike, latency[addition.like, nearest], latency[rows][:, rows]),
    )


def _wider_levels(
    cluster: Cluster, addition: _Addition, devices: Sequence[Device], catalogue: Catalogue
) -> tuple[Level, ...]:
    """Return levels that hold the new devices too, with one more level if hosts are apart."""
    if not cluster.levels:
        if addition.link is None:
            raise InvalidInputError(
                f"cluster {cluster.name!r} has no links, and that of device type "
                f"{addition.device.type!r} is not known; expected a type of the catalogue"
            )
        num_hosts = max(device.host for device in devices) + 1
        return usual_levels(devices, [addition.link] * num_hosts, catalogue)
    old_hosts = np.array([device.host for device in cluster.devices])
    inside = [i for i, level in enumerate(cluster.levels) if _is_inside_hosts(level, old_hosts)]
    last_inside = max(inside, default=-1)
    levels = [
        _wider_level(level, cluster, addition, devices, apart=index <= last_inside)
        for index, level in enumerate(cluster.levels)
    ]
    if len(set(levels[-1].group_of.tolist())) > 1:
        levels.append(rack_level(devices, catalogue))
    return tuple(levels)


def _is_inside_hosts(level: Level, host_of: NDArray[Any]) -> bool:
    """Return whether no group of a level reaches over several hosts, and that is its purpose."""
    pairs = np.unique(np.stack([level.group_of, host_of]), axis=1)
    within = len(np.unique(pairs[0])) == pairs.shape[1]
    return within and (level.name == "host" or len(np.unique(host_of)) > 1)


def _wider_level(
    level: Level,
    cluster: Cluster,
    addition: _Addition,
    devices: Sequence[Device],
    *,
    apart: bool,
) -> Level:
    """Return a level with the new devices, each in the group of its host.

    A new host lies in the group of the device that the new ones are like, or in one of its own.

    Args:
        level: The level.
        cluster: The cluster before.
        addition: Devices to add.
        devices: All devices, the new ones last.
        apart: Whether each new host gets a group of its own.
    """
    groups = level.group_of.tolist()
    group_of_host = {d.host: group for d, group in zip(cluster.devices, groups, strict=True)}
    if addition.like >= 0:
        group_of_host[addition.device.host] = groups[addition.like]
    bandwidth, latency = level.bandwidth_bytes_per_s.tolist(), level.latency_s.tolist()
    rates = list(level.collectives) or [None] * len(bandwidth)
    for device in devices[len(groups) :]:
        if device.host not in group_of_host:
            group = groups[addition.like]
            if apart:
                link = addition.link if addition.like < 0 else None
                bandwidth.append(link.bandwidth_bytes_per_s if link else bandwidth[group])
                latency.append(link.latency_s if link else latency[group])
                rates.append(link.collectives if link else rates[group])
                group = len(bandwidth) - 1
            group_of_host[device.host] = group
    new = [group_of_host[device.host] for device in devices[len(groups) :]]
    share = level.port_share[addition.like] if addition.like >= 0 else 1.0
    return replace(
        level,
        group_of=np.array([*groups, *new], dtype=np.int32),
        bandwidth_bytes_per_s=np.array(bandwidth),
        latency_s=np.array(latency),
        port_share=np.append(level.port_share, np.full(len(new), share)),
        collectives=tuple(rates),
    )
