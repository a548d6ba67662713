"""``--cluster slurm``: the cluster that Slurm describes, by its commands and its variables."""

import os
from collections.abc import Mapping, Sequence

from partita.catalogue.inventory import Completion, FoundHost, equal_gpus, inventory_cluster
from partita.catalogue.slurm_nodes import slurm_cluster
from partita.core.cluster import Cluster
from partita.errors import InvalidInputError, UnsupportedError
from partita.flows.fields import SLURM
from partita.slurm.allocation import AllocatedNode, read_allocation
from partita.slurm.commands import SlurmCommands, SlurmError
from partita.slurm.nodes import SlurmNode, read_nodes
from partita.slurm.topology import SlurmSwitch, read_topology, switches_above


def read_slurm_cluster(
    spec: str, known: Completion, environment: Mapping[str, str] | None = None
) -> Cluster:
    """Return the nodes of the allocation that this process is in, else those that can be used.

    Args:
        spec: ``slurm``, or ``slurm:PARTITION``, which means the partition inside of an allocation,
            too.
        known: The catalogue, and the type of GPUs that Slurm does not name.
        environment: Variables; those of this process if not given.

    Raises:
        InvalidInputError: There are none, or the catalogue does not know their GPUs.
        UnsupportedError: Slurm's commands are not here, or its controller does not answer.
    """
    allocated = read_allocation(os.environ if environment is None else environment)
    if allocated and ":" not in spec:
        return _allocation(allocated, known)
    return slurm_cluster(slurm_nodes(spec), _switches(), known)


def _allocation(allocated: Sequence[AllocatedNode], known: Completion) -> Cluster:
    """Return the nodes of an allocation; by variables alone where Slurm's commands are not here."""
    try:
        nodes, switches = {node.name: node for node in slurm_nodes(SLURM)}, _switches()
    except UnsupportedError:
        nodes, switches = {}, ()
    above = switches_above(switches)
    return inventory_cluster(
        SLURM,
        [_allocated_host(node, nodes.get(node.name), above) for node in allocated],
        known,
    )


def _allocated_host(
    node: AllocatedNode, described: SlurmNode | None, above: Mapping[str, tuple[str, ...]]
) -> FoundHost:
    """Return a node with the GPUs that the job has there, named as Slurm's nodes are."""
    gpus = described.gpus if described is not None else ()
    count = node.gpus if node.gpus is not None else sum(number for _, number in gpus)
    # Of a node with several types nobody says which of them the job has.
    title = node.gpu_type or (gpus[0][0] if len(gpus) == 1 else "")
    is_known = node.gpus is not None or described is not None
    return FoundHost(
        name=node.name,
        gpus=equal_gpus(count, node.name, title=title) if is_known else None,
        cpus=described.cpus if described is not None else 0,
        memory_bytes=float(described.memory_bytes) if described is not None else 0.0,
        switches=above.get(node.name, ()),
    )


def slurm_nodes(spec: str) -> tuple[SlurmNode, ...]:
    """Return the nodes that are meant, whatever their state.

    Raises:
        InvalidInputError: No node is in the partition.
        UnsupportedError: Slurm's commands are not here, or its controller does not answer.
    """
    partition = spec.partition(":")[2]
    nodes = read_nodes(_call("scontrol", "show", "node", "--oneliner"))
    found = tuple(node for node in nodes if not partition or partition in node.partitions)
    if not found:
        known = sorted({name for node in nodes for name in node.partitions})
        raise InvalidInputError(
            f"Slurm has no node in partition {partition!r}; there are {', '.join(known)}"
        )
    return found


def _switches() -> tuple[SlurmSwitch, ...]:
    return read_topology(_call("scontrol", "show", "topology"))


def _call(*words: str) -> str:
    try:
        return SlurmCommands().call(*words)
    except SlurmError as exc:
        raise UnsupportedError(f"Slurm cannot be asked: {exc}") from exc
