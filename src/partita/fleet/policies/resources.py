"""What servers have, and what a share of them is."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from partita.core.cluster import Cluster
from partita.core.columns import Columns, Floats, Ints, column, frozen_array, names
from partita.core.graph import DeviceKind
from partita.errors import InvalidInputError


@dataclass(frozen=True, kw_only=True, eq=False)
class Servers(Columns):
    """The servers of a cluster, a row each.

    Attributes:
        names: Their names.
        gpu_types: The types of GPU that there are; ``""`` = not known.
        gpu_type: Index into ``gpu_types``.
        gpus: GPUs of the server.
        cpus: CPUs.
        memory_bytes: Main memory.
        storage_bytes_per_s: Storage bandwidth.
    """

    names: tuple[str, ...]
    gpu_types: tuple[str, ...] = ("",)
    gpu_type: Ints
    gpus: Ints
    cpus: Floats
    memory_bytes: Floats
    storage_bytes_per_s: Floats

    def __post_init__(self) -> None:
        rows = len(self.names)
        self._set(
            names=names(self.names, "servers"),
            gpu_types=tuple(self.gpu_types),
            gpu_type=column(
                self.gpu_type, np.int32, rows, "GPU type", high=len(self.gpu_types) - 1
            ),
            gpus=column(self.gpus, np.int32, rows, "gpus of a server", low=1),
            cpus=column(self.cpus, np.float64, rows, "cpus of a server", low=1),
            memory_bytes=column(
                self.memory_bytes, np.float64, rows, "memory_bytes of a server", low=1e6
            ),
            storage_bytes_per_s=column(
                self.storage_bytes_per_s, np.float64, rows, "storage of a server", low=0
            ),
        )

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def num_gpus(self) -> int:
        """GPUs of all servers."""
        return int(self.gpus.sum())

    @cached_property
    def gpus_by_type(self) -> dict[str, int]:
        """GPUs of each type."""
        count = np.bincount(self.gpu_type, weights=self.gpus, minlength=len(self.gpu_types))
        return dict(zip(self.gpu_types, count.astype(int).tolist(), strict=True))

    @cached_property
    def classes(self) -> tuple[Ints, Ints]:
        """Servers that are alike: the class of each, and the first server of each class."""
        rows = np.stack(
            [self.gpu_type, self.gpus, self.cpus, self.memory_bytes, self.storage_bytes_per_s],
            axis=1,
        )
        _, first, of = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        rank = np.argsort(np.argsort(first))
        return (
            frozen_array(rank[of.ravel()], np.int32),
            frozen_array(np.sort(first), np.int32),
        )

    @property
    def alike(self) -> bool:
        """Whether all servers are the same."""
        return len(self.classes[1]) == 1


def servers_of(cluster: Cluster) -> Servers:
    """Return the servers of a cluster: its hosts that have GPUs.

    Raises:
        InvalidInputError: A host lacks CPUs or memory, or mixes types of GPU.
    """
    types = list(dict.fromkeys(device.type for device in cluster.devices))
    held: list[list[int]] = [[] for _ in cluster.hosts]
    for device in cluster.devices:
        if device.kind is not DeviceKind.CPU:
            held[device.host].append(types.index(device.type))
    rows = [row for row, kinds in enumerate(held) if kinds]
    if not rows:
        raise InvalidInputError(f"cluster {cluster.name!r} has no host with GPUs")
    for row in rows:
        host = cluster.hosts[row]
        if not (host.cpus > 0 and host.memory_bytes > 0):
            raise InvalidInputError(
                f"host {host.name!r}: cpus and memory are not known; a fleet needs both"
            )
        if len(set(held[row])) > 1:
            kinds = ", ".join(types[kind] for kind in dict.fromkeys(held[row]))
            raise InvalidInputError(
                f"host {host.name!r} has GPUs of several types ({kinds}); list it as several hosts"
            )
    hosts = [cluster.hosts[row] for row in rows]
    return Servers(
        names=tuple(host.name for host in hosts),
        gpu_types=tuple(types),
        gpu_type=np.array([held[row][0] for row in rows], dtype=np.int32),
        gpus=np.array([len(held[row]) for row in rows], dtype=np.int32),
        cpus=np.array([host.cpus for host in hosts], dtype=np.float64),
        memory_bytes=np.array([host.memory_bytes for host in hosts], dtype=np.float64),
        storage_bytes_per_s=np.array(
            [host.storage_bytes_per_s for host in hosts], dtype=np.float64
        ),
    )
