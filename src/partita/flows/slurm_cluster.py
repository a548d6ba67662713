"""``--cluster slurm``: the cluster that Slurm's commands on this machine describe."""

from partita.catalogue.catalogue import Catalogue
from partita.catalogue.slurm_nodes import slurm_cluster
from partita.core.cluster import Cluster
from partita.errors import InvalidInputError, UnsupportedError
from partita.slurm.commands import SlurmCommands, SlurmError
from partita.slurm.nodes import SlurmNode, SlurmSwitch, read_nodes, read_topology


def read_slurm_cluster(spec: str, catalogue: Catalogue) -> Cluster:
    """Return the nodes of Slurm, or of one partition, that can be used.

    Raises:
        InvalidInputError: There are none, or the catalogue does not know their GPUs.
        UnsupportedError: Slurm's commands are not here, or its controller does not answer.
    """
    return slurm_cluster(slurm_nodes(spec), _switches(), catalogue)


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
