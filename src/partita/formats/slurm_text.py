"""Slurm's nodes and switches as a cluster: what ``scontrol`` prints, or configuration files.

Nodes are those of ``scontrol show node`` or ``slurm.conf``, switches those of ``scontrol show
topology``, ``topology.conf`` or ``topology.yaml``. A file may hold both, one after the other.
Switches alone have no GPUs: the caller gives their type and number (``8xa100``).
"""

import re

from partita.catalogue.inventory import Completion
from partita.catalogue.slurm_nodes import slurm_cluster
from partita.core.cluster import Cluster
from partita.errors import InvalidInputError
from partita.slurm.nodes import read_nodes, records_of
from partita.slurm.topology import is_topology_yaml, read_topology, read_topology_yaml

_RECORD = re.compile(r"^[ \t]*(Node|Switch|Block|Ring)Name=", re.MULTILINE | re.IGNORECASE)
_SINFO = re.compile(r"\s*(?:PARTITION|NODELIST)\b[^\n]*\b(?:STATE|NODES|AVAIL|GRES)\b")


def is_slurm_text(text: str) -> bool:
    """Return whether a text describes nodes or switches as Slurm does."""
    return (
        _RECORD.search(text) is not None or is_topology_yaml(text) or _SINFO.match(text) is not None
    )


def read_slurm_text(text: str, known: Completion, *, name: str = "slurm") -> Cluster:
    """Return the nodes that can be used, with their switches.

    Raises:
        InvalidInputError: There are none, or their GPUs are not known.
    """
    if _SINFO.match(text):
        raise InvalidInputError(
            "sinfo does not print what nodes hold and how they are joined; save what 'scontrol "
            "show node' and 'scontrol show topology' print"
        )
    if is_topology_yaml(text):
        return slurm_cluster((), read_topology_yaml(text), known, name=name)
    nodes = read_nodes(text) if records_of(text, "NodeName") else ()
    return slurm_cluster(nodes, read_topology(text), known, name=name)
