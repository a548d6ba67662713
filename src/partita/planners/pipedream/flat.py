"""Pipelines on devices that are all alike and all equally far from one another: solved exactly.

With C the work of a stage, P its trained bytes, r its replicas, B the bandwidth, g the factor of
the all-reduce and b the live bytes of a cut, the repaired period is

    max over stages (C + g (r - 1) P / (B r)) / r,  max over cuts 2 b / (B min(r, r'))

Given a period T, a cut asks ``r >= 2 b / (B T)`` of both stages beside it, each on its own; so the
least replicas of a stage depend on nothing but the stage, and the fewest devices that finish the
graph from an ideal on are one number. One test is a pass over all pairs of ideals, whatever the
number of devices; PipeDream's recurrence is a pass for each pair of device counts.

The same serves pipelines that stand on R servers in copies, each copy inside one server
(PipeDream's replicated outer stages): work and cuts are divided by R, and an all-reduce between
servers added.
"""

import math
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.kernels import run
from partita.planners.pipedream.family import Family
from partita.planners.pipedream.kernels import fewest_devices, least_replicas
from partita.planners.pipedream.search import SHORTEST_S

UNLIMITED = 2**40
PROBES = 16
"""Tests that a search is likely to make; what they cost together decides whether to compile."""


class Cut(NamedTuple):
    """A stage: the ops between two ideals, on so many devices."""

    low: int
    high: int
    replicas: int


class FlatCluster(NamedTuple):
    """Equal devices, and the rules of the pipeline.

    Attributes:
        rate: Bytes per second between two devices.
        sync: ``sync[r]`` = seconds that r replicas take to reduce a trained byte, from 0 up to the
            number of devices of one copy of the pipeline.
        memory_bytes: Memory of a device.
        straight: Whether stages have one replica each.
        allowed: ``allowed[r]`` = least permitted number of replicas from r on; one more than there
            are devices stands for none.
        copies: Copies of the pipeline, one per server.
        spare_rate: Bytes per second of a cut that no replica carries.
    """

    rate: float
    sync: Array
    memory_bytes: float
    straight: bool
    allowed: Array
    copies: int = 1
    spare_rate: float = 0.0


def ring(devices: int, rate: float, factor: float) -> Array:
    """Return the seconds of an all-reduce a byte, ``g (r - 1) / (r B)``, by number of replicas."""
    count = np.arange(1, devices + 1)
    return np.concatenate([[0.0], factor * (count - 1) / count / rate])


class FlatSearch:
    """Tests of periods for one family of ideals on one cluster."""

    def __init__(self, family: Family, cluster: FlatCluster, *, work_class: int = 0) -> None:
        self._family = family
        self._cluster = cluster
        self._work = family.seconds[work_class]
        self._versions = fitting_versions(family, cluster.memory_bytes)
        self._one, self._more = np.zeros((2, family.num_pairs), dtype=np.int64)

    def probe(self, period: float) -> tuple[float, list[Cut]] | None:
        """Return the pipeline with fewest devices within a period, and its own period."""
        period = max(period, SHORTEST_S)
        family, cluster = self._family, self._cluster
        most = len(cluster.sync) - 1
        size = (PROBES + 4 * most) * family.num_pairs
        ideals = len(family)
        run(
            least_replicas,
            size,
            (
                np.array([period, cluster.rate, cluster.spare_rate, cluster.copies]),
                *(family.pair_ptr, family.pair_to, self._work, family.trained, family.cut),
                cluster.sync,
            ),
            (np.zeros(ideals, dtype=np.int64), self._one, self._more),
        )
        need, via, replicas = np.zeros((3, ideals), dtype=np.int64)
        run(
            fewest_devices,
            size,
            (
                np.array([most, cluster.straight]),
                *(family.pair_ptr, family.pair_to, self._one, self._more, self._versions),
                cluster.allowed,
            ),
            (need, via, replicas),
        )
        if need[0] > most:
            return None
        cuts = []
        at = 0
        while at < ideals - 1:
            cuts.append(Cut(at, int(via[at]), int(replicas[at])))
            at = cuts[-1].high
        return self.value(cuts), cuts

    def value(self, cuts: list[Cut]) -> float:
        """Return the period of a pipeline."""
        family, cluster = self._family, self._cluster
        low, high, count = (np.array(column) for column in zip(*cuts, strict=True))
        work = self._work[high] - self._work[low]
        trained = family.trained[high] - family.trained[low]
        stages = (work + trained * cluster.sync[count]) / count
        rates = cluster.rate * np.minimum(count[:-1], count[1:]) + cluster.spare_rate
        transfers = 2 * family.cut[low[1:]] / rates
        return float(max(stages.max(), transfers.max(initial=0.0)) / cluster.copies)


def fitting_versions(family: Family, memory_bytes: float) -> Array:
    """Return for each pair of ideals how many minibatches fit in memory at once."""
    if math.isinf(memory_bytes):
        return np.full(family.num_pairs, UNLIMITED, dtype=np.int64)
    low = np.repeat(np.arange(len(family)), np.diff(family.pair_ptr))
    each = family.version[family.pair_to] - family.version[low] + family.entering[low]
    room = memory_bytes - (family.fixed[family.pair_to] - family.fixed[low])
    with np.errstate(divide="ignore", invalid="ignore"):
        count = np.where(each > 0, room / each, np.where(room >= 0, UNLIMITED, -1))
    return np.clip(np.floor(count * (1 + 1e-12)), -1, UNLIMITED).astype(np.int64)
