"""Clusters as Synergy's INI files: told by their section, and written."""

import numpy as np

from partita.core.cluster import Cluster
from partita.errors import InvalidInputError

SECTION = "[CLUSTER]"


def is_synergy_cluster(text: str) -> bool:
    """Return whether a text looks like such a file."""
    return any(line.strip().upper() == SECTION for line in text.splitlines())


def write_cluster_ini(cluster: Cluster) -> str:
    """Return a cluster of equal servers as an INI file; types of GPU have no place in it.

    Raises:
        InvalidInputError: Servers differ, or CPUs and memory are not known.
    """
    gpus = np.bincount([device.host for device in cluster.devices], minlength=len(cluster.hosts))
    rows = {
        (int(count), host.cpus, host.memory_bytes, host.storage_bytes_per_s)
        for count, host in zip(gpus, cluster.hosts, strict=True)
    }
    if len(rows) != 1:
        raise InvalidInputError(f"servers of {cluster.name!r} differ; Synergy's are all alike")
    count, cpus, memory, storage = rows.pop()
    if not (count and cpus and memory):
        raise InvalidInputError(f"cluster {cluster.name!r}: GPUs, cpus and memory must be known")
    lines = [
        SECTION,
        "racks = 1",
        f"servers_per_rack = {len(cluster.hosts)}",
        f"gpus_per_server = {count}",
        f"cpus_per_server = {cpus}",
        f"dram_per_server = {memory / 1e9:g}",
    ]
    if storage:
        lines.append(f"sspeed_per_server = {storage / 1e6:g}")
    network = cluster.levels[-1].bandwidth_bytes_per_s if cluster.levels else np.zeros(0)
    if len(network) and np.isfinite(network).all():
        lines.append(f"net_per_server = {float(network.min()) * 8 / 1e9:g}")
    return "\n".join(lines) + "\n"
