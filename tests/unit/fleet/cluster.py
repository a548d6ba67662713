"""Servers for the tests of the fleet."""

import numpy as np

from partita.fleet.policies.resources import Servers


def servers(count=2, *, gpus=4, cpus=12.0, memory_bytes=400e9, kinds=None):
    """Return servers with the same GPUs, CPUs and memory; ``kinds`` names the type of each."""
    names = list(dict.fromkeys(kinds)) if kinds else [""]
    return Servers(
        names=tuple(f"server{i}" for i in range(count)),
        gpu_types=tuple(names),
        gpu_type=np.array([names.index(kind) for kind in kinds] if kinds else [0] * count),
        gpus=np.full(count, gpus),
        cpus=np.full(count, cpus),
        memory_bytes=np.full(count, memory_bytes),
        storage_bytes_per_s=np.full(count, 1e9),
    )
