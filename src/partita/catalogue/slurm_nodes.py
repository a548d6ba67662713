"""A Slurm cluster as devices: nodes that can be used, their GPUs by type, their leaf switches.

Slurm knows no bandwidths (``LinkSpeed`` is a hint without a unit): links are the usual ones of the
types of GPU, and every level of switches is taken to carry what the hosts' ports do.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from partita.catalogue.catalogue import Catalogue, DeviceType, make_device
from partita.catalogue.shorthand import usual_levels
from partita.core.cluster import Cluster, Device, Host, Level
from partita.errors import InvalidInputError
from partita.names import short
from partita.slurm.nodes import SlurmNode, SlurmSwitch


def slurm_cluster(
    nodes: Sequence[SlurmNode], switches: Sequence[SlurmSwitch], catalogue: Catalogue
) -> Cluster:
    """Return the GPUs of nodes that can be used, in Slurm's order; others are left out.

    Raises:
        InvalidInputError: No node with GPUs can be used, or the catalogue does not know a type.
    """
    there = [node for node in nodes if node.gpus and not node.away]
    if not there:
        away = [f"{node.name}: {node.away}" for node in nodes if node.away]
        why = f" ({'; '.join(away[:3])})" if away else ""
        raise InvalidInputError(f"Slurm has no node with GPUs that can be used{why}")
    devices: list[Device] = []
    for row, node in enumerate(there):
        kinds = [
            kind
            for name, count in node.gpus
            for kind in [gpu_type(name, node.name, catalogue)] * count
        ]
        devices += [
            make_device(kind, f"{node.name}/gpu{index}", host=row)
            for index, kind in enumerate(kinds)
        ]
    first = {device.host: catalogue.device_type(device.type) for device in reversed(devices)}
    links = [catalogue.link_of(first[row]) for row in range(len(there))]
    levels = usual_levels(devices, links, catalogue)
    leaf_of = _leaves(there, switches)
    if len(levels) > 1 and len(set(leaf_of)) > 1:
        levels = (*levels[:-1], *_racks(levels[-1], [leaf_of[d.host] for d in devices]))
    return Cluster(
        name="slurm",
        hosts=tuple(
            Host(name=node.name, cpus=node.cpus, memory_bytes=float(node.memory_bytes))
            for node in there
        ),
        devices=tuple(devices),
        levels=levels,
    )


def gpu_type(name: str, node: str, catalogue: Catalogue) -> DeviceType:
    """Return the type of the catalogue that a name in Slurm's configuration is of.

    Administrators write ``a100``, ``A100-80GB`` or ``nvidia_a100-sxm4-80gb``: the longest name of
    the catalogue all of whose words are in it.

    Raises:
        InvalidInputError: There is none, or Slurm knows no type.
    """
    if not name:
        raise InvalidInputError(
            f"Slurm knows no type of the GPUs of node {node!r} (Gres=gpu:COUNT); give them one in "
            "gres.conf, or write a cluster file"
        )
    words = set(re.split(r"[-_. ]", name.lower()))
    known = [kind for kind in catalogue.devices if set(re.split(r"[-_. ]", kind.lower())) <= words]
    if not known:
        raise InvalidInputError(
            f"node {node!r} has GPUs of type {short(name)}, which the catalogue does not know; add "
            "it to a catalogue file, or write a cluster file"
        )
    return catalogue.device_type(max(known, key=lambda kind: (len(kind), kind)))


def _leaves(nodes: Sequence[SlurmNode], switches: Sequence[SlurmSwitch]) -> list[int]:
    """Return the leaf switch of each node; those on none are together."""
    leaves = [switch for switch in switches if switch.level == 0]
    found = []
    for node in nodes:
        on = [row for row, switch in enumerate(leaves) if node.name in switch.nodes]
        found.append(on[0] if on else len(leaves))
    return found


def _racks(whole: Level, leaf_of: Sequence[int]) -> tuple[Level, Level]:
    """Return a level of the leaf switches and one that joins them, each like the whole one."""
    names = sorted(set(leaf_of))
    count = len(names)
    racks = replace(
        whole,
        group_of=np.array([names.index(leaf) for leaf in leaf_of], dtype=np.int32),
        bandwidth_bytes_per_s=np.repeat(whole.bandwidth_bytes_per_s, count),
        latency_s=np.repeat(whole.latency_s, count),
        collectives=whole.collectives * count,
    )
    return racks, replace(whole, name="spine")
