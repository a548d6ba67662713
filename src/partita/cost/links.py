"""Seconds to move bytes between devices: point to point and in collectives.

A transfer takes ``latency + bytes / bandwidth`` of the innermost level that holds both devices, and
occupies its ports for that time. A collective takes the better of a ring over its members (the
slowest link on the way) and a hierarchical algorithm (a ring inside each group, then between
groups, level by level); among CPUs, where gloo has no other, the ring.
"""

import numpy as np

from partita.core.cluster import Cluster, ring_order
from partita.core.columns import Array
from partita.core.graph import DeviceKind
from partita.core.program import Kind

PASSES = {
    Kind.ALL_REDUCE: 2.0,
    Kind.ALL_GATHER: 1.0,
    Kind.REDUCE_SCATTER: 1.0,
    Kind.ALL_TO_ALL: 1.0,
    Kind.BROADCAST: 1.0,
}


def transfer_s(
    cluster: Cluster,
    source: Array,
    target: Array,
    size_bytes: Array,
    given_s: Array | None = None,
) -> Array:
    """Return seconds of transfers between pairs of devices; 0 on one device.

    Args:
        cluster: The cluster.
        source: Index of the sending device of each transfer.
        target: Index of the receiving device.
        size_bytes: Bytes of each transfer.
        given_s: Seconds as a file gives them; NaN = from bytes.
    """
    links = cluster.links(source, target)
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = links.latency_s + size_bytes / links.bandwidth_bytes_per_s
    if given_s is not None:
        seconds = np.where(np.isnan(given_s), seconds, given_s)
    return np.where(source == target, 0.0, seconds)


def collective_s(cluster: Cluster, kind: Kind, devices: Array, size_bytes: float) -> float:
    """Return seconds of a collective over a set of devices on ``size_bytes`` each.

    An all-reduce passes the bytes twice, the others once; each pass moves ``(n - 1) / n`` of them.
    """
    if len(devices) < 2:
        return 0.0
    passes = PASSES[kind]
    ring = _ring_s(cluster, devices, size_bytes, passes)
    is_flat = any(cluster.devices[device].kind is DeviceKind.CPU for device in devices.tolist())
    if is_flat or cluster.matrix is not None:
        return ring
    return min(ring, _tree_s(cluster, devices, size_bytes, passes))


def _ring_s(cluster: Cluster, devices: Array, size_bytes: float, passes: float) -> float:
    ring = ring_order(devices)
    links = cluster.links(ring, np.roll(ring, -1))
    size = len(devices)
    share = (size - 1) / size * size_bytes
    slowest = share / links.bandwidth_bytes_per_s.min()
    return passes * float(slowest + (size - 1) * links.latency_s.max())


def _tree_s(cluster: Cluster, devices: Array, size_bytes: float, passes: float) -> float:
    """Sum over levels of a ring between the children that hold members."""
    total = 0.0
    child: Array = np.arange(len(cluster))
    for level in cluster.levels:
        pairs = np.unique(np.stack([level.group_of[devices], child[devices]]), axis=1)
        groups, members = np.unique(pairs[0], return_counts=True)
        crossing = members > 1
        if crossing.any():
            here, size = groups[crossing], members[crossing]
            seconds = (size - 1) / size * size_bytes / level.bandwidth_bytes_per_s[here]
            total += float((seconds + (size - 1) * level.latency_s[here]).max())
        child = level.group_of
    return passes * total
