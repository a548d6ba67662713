"""Published curves of collectives (``nccl-tests`` and the like) against the cost model.

``compare(tables)`` takes the ``collectives`` of the table of large models and returns a row for
each curve. Only sizes above 16 MiB count: below, launches and the choice of protocols decide, which
the model does not follow. Bus bandwidths that are published without a curve are compared too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.core.program import Kind
from partita.cost.links import PASSES, fabric_of, group_collective_s

FROM_BYTES = 2**24
LIMIT = 0.15
MACHINES = {
    "A100 SXM": "dgx-a100",
    "V100 SXM": "dgx-1-v100",
    "H100 SXM": "dgx-h100",
    "H200 SXM": "dgx-h200",
    "B200 SXM": "p6-b200",
}
"""The machine of each GPU; the curves of B200 are of AWS, whose network is another."""
PLOTTED_HOSTS = (4, 64, 512)
_MEBI = {"16MiB": 2**24, "64MiB": 2**26, "256MiB": 2**28, "1GiB": 2**30, "4GiB": 2**32}


@dataclass(frozen=True, kw_only=True)
class CurveErrors:
    """Errors of one curve, relative to what was measured.

    Attributes:
        name: Collective, GPU, ranks and hosts.
        source: Origin of the curve.
        sizes_bytes: The sizes above 16 MiB.
        errors: Error of each.
    """

    name: str
    source: str
    sizes_bytes: tuple[int, ...]
    errors: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean of the magnitudes."""
        return float(np.abs(self.errors).mean())

    @property
    def worst(self) -> float:
        """The error of largest magnitude."""
        return max(self.errors, key=abs)


def seconds_of(
    machine: str, hosts: int, kind: Kind, ranks: int, sizes_bytes: Sequence[float]
) -> np.ndarray:
    """Return modelled seconds of a collective over equal machines."""
    name = machine if hosts == 1 else f"{hosts}x{machine}"
    fabric = fabric_of(read_shorthand(name, load_catalogue()))
    return group_collective_s(fabric, kind, ranks, ranks // hosts, np.asarray(sizes_bytes))


def compare(collectives: Mapping[str, Any]) -> list[CurveErrors]:
    """Return the errors of every curve of ``collectives.curves``."""
    rows = []
    for curve in collectives["curves"]:
        points = np.array(curve["points"], dtype=np.float64)
        points = points[points[:, 0] > FROM_BYTES]
        kind, ranks, hosts = Kind[curve["collective"].upper()], curve["ranks"], curve["hosts"]
        modelled = seconds_of(MACHINES[curve["gpu"]], hosts, kind, ranks, points[:, 0])
        rows.append(
            CurveErrors(
                name=f"{curve['collective']} {curve['gpu']} x{ranks} on {hosts} hosts",
                source=curve["source"],
                sizes_bytes=tuple(points[:, 0].astype(int).tolist()),
                errors=tuple((modelled / (points[:, 1] * 1e-6) - 1).tolist()),
            )
        )
    return rows


def compare_plotted(collectives: Mapping[str, Any]) -> list[CurveErrors]:
    """Return the errors on all-reduces of 4, 64 and 512 hosts, which were read from a plot."""
    plot = collectives["peaks"]["h100_multi_node_all_reduce_read_from_plot"]
    rows = []
    for index, hosts in enumerate(PLOTTED_HOSTS):
        ranks = 8 * hosts
        sizes = [size for key, size in _MEBI.items() if key in plot and size > FROM_BYTES]
        keys = [key for key, size in _MEBI.items() if size in sizes]
        modelled = seconds_of("dgx-h100", hosts, Kind.ALL_REDUCE, ranks, sizes)
        traffic = PASSES[Kind.ALL_REDUCE] * (ranks - 1) / ranks * np.array(sizes)
        measured = traffic / (np.array([plot[key][index] for key in keys]) * 1e9)
        rows.append(
            CurveErrors(
                name=f"all_reduce H100 SXM x{ranks} on {hosts} hosts (plot)",
                source=f"arXiv {plot['arxiv']}",
                sizes_bytes=tuple(sizes),
                errors=tuple((modelled / measured - 1).tolist()),
            )
        )
    return rows
