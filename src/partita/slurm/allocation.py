"""The nodes of the allocation that a process runs in, as Slurm's variables describe it.

``SLURM_GPUS_PER_NODE`` may carry a type (``a100:4``); where it is not set, ``SLURM_GPUS_ON_NODE``
is the number of this node, and ``SLURM_TASKS_PER_NODE`` (``4(x2),2``) that of tasks, of which each
usually has one GPU. The components of a heterogeneous job have variables of their own, which end in
``_HET_GROUP_n``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from partita.errors import InvalidInputError
from partita.slurm.hostlist import expand_hosts

_TASKS = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?")
_GPUS = re.compile(r"(?:([^:,]+):)?(\d{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedNode:
    """A node of an allocation.

    Attributes:
        name: Its name.
        gpu_type: Type of its GPUs as Slurm calls it; empty = not said.
        gpus: How many of its GPUs the job has; None = not said.
    """

    name: str
    gpu_type: str = ""
    gpus: int | None = None


def read_allocation(environment: Mapping[str, str]) -> tuple[AllocatedNode, ...]:
    """Return the nodes of the allocation in their order; none outside of one.

    Raises:
        InvalidInputError: A variable is not understood.
    """
    ends = [""]
    if "SLURM_JOB_NODELIST_HET_GROUP_0" in environment:
        count = len([key for key in environment if key.startswith("SLURM_JOB_NODELIST_HET_GROUP_")])
        ends = [f"_HET_GROUP_{index}" for index in range(count)]
    nodes: dict[str, AllocatedNode] = {}
    for end in ends:
        for node in _component(environment, end):
            nodes.setdefault(node.name, node)
    return tuple(nodes.values())


def _component(environment: Mapping[str, str], end: str) -> list[AllocatedNode]:
    listed = environment.get(f"SLURM_JOB_NODELIST{end}") or environment.get("SLURM_NODELIST", "")
    names = expand_hosts(listed)
    per_node = environment.get(f"SLURM_GPUS_PER_NODE{end}", "")
    if per_node:
        found = _GPUS.fullmatch(per_node.partition("(")[0])
        if found is None:
            raise InvalidInputError(
                f"SLURM_GPUS_PER_NODE{end} is {per_node[:60]!r}; expected a number, or TYPE:NUMBER"
            )
        kind, count = found.group(1) or "", int(found.group(2))
        return [AllocatedNode(name=name, gpu_type=kind, gpus=count) for name in names]
    here = environment.get("SLURM_GPUS_ON_NODE", "")
    if here.isdecimal() and not end:
        return [AllocatedNode(name=name, gpus=int(here[:6])) for name in names]
    tasks = environment.get(f"SLURM_TASKS_PER_NODE{end}", "")
    if not tasks:
        return [AllocatedNode(name=name) for name in names]
    counts = _tasks(tasks, f"SLURM_TASKS_PER_NODE{end}")
    if len(counts) != len(names):
        raise InvalidInputError(
            f"SLURM_TASKS_PER_NODE{end} is of {len(counts)} nodes, the list has {len(names)}"
        )
    return [AllocatedNode(name=name, gpus=n) for name, n in zip(names, counts, strict=True)]


def _tasks(text: str, variable: str) -> list[int]:
    counts: list[int] = []
    for part in text.split(","):
        found = _TASKS.fullmatch(part.strip())
        if found is None:
            raise InvalidInputError(f"{variable} is {text[:60]!r}; expected such as 4(x2),2")
        counts += [int(found.group(1))] * min(int(found.group(2) or 1), 100_000)
    return counts
