"""A Slurm cluster as devices: nodes that can be used, their GPUs by type, their switches.

Slurm knows no bandwidths (``LinkSpeed`` is a hint without a unit): every level of switches is taken
to carry what the hosts' ports do.
"""

from collections.abc import Sequence

from partita.catalogue.inventory import Completion, FoundHost, equal_gpus, inventory_cluster
from partita.core.cluster import Cluster
from partita.errors import InvalidInputError
from partita.slurm.nodes import SlurmNode
from partita.slurm.topology import SlurmSwitch, switches_above


def slurm_cluster(
    nodes: Sequence[SlurmNode],
    switches: Sequence[SlurmSwitch],
    known: Completion,
    *,
    name: str = "slurm",
) -> Cluster:
    """Return the GPUs of nodes that can be used, in Slurm's order; others are left out.

    Without nodes the cluster is what hangs on the switches, with GPUs as they are given.

    Raises:
        InvalidInputError: No node with GPUs can be used, or the catalogue does not know a type.
    """
    above = switches_above(switches)
    if not nodes:
        if known.usual()[1] == 0:
            raise InvalidInputError(
                "switches have no GPUs; --type 8xa100, for example, says which and how many each "
                "host has"
            )
        return inventory_cluster(
            name,
            [FoundHost(name=host, gpus=None, switches=path) for host, path in above.items()],
            known,
        )
    there = [node for node in nodes if node.gpus and not node.away]
    if not there:
        away = [f"{node.name}: {node.away}" for node in nodes if node.away]
        why = f" ({'; '.join(away[:3])})" if away else ""
        raise InvalidInputError(f"Slurm has no node with GPUs that can be used{why}")
    return inventory_cluster(
        name,
        [
            FoundHost(
                name=node.name,
                gpus=tuple(
                    gpu
                    for title, count in node.gpus
                    for gpu in equal_gpus(count, node.name, title=title)
                ),
                cpus=node.cpus,
                memory_bytes=float(node.memory_bytes),
                switches=above.get(node.name, ()),
            )
            for node in there
        ],
        known,
    )
