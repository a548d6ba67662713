"""The devices of a cluster as a row through its servers."""

import math
from typing import NamedTuple

import numpy as np

from partita.core.cluster import Cluster
from partita.core.columns import Array, Longs
from partita.core.problem import Problem
from partita.planners.pipeline import main_devices


class Site(NamedTuple):
    """Devices that pipelines may use.

    Attributes:
        devices: Indices into the cluster, server by server.
        server: Server of each, numbered along the row.
        rate: Bytes per second inside each server.
        outer_rate: Bytes per second of a server's port; ``inf`` with one server.
        memory_bytes: Memory of each device that a plan may use.
    """

    devices: Longs
    server: Longs
    rate: Array
    outer_rate: float
    memory_bytes: Array

    @property
    def num_servers(self) -> int:
        """Number of servers."""
        return len(self.rate)

    def only(self, server: int) -> "Site":
        """Return one server by itself."""
        mine = self.server == server
        return Site(
            self.devices[mine],
            np.zeros(int(mine.sum()), dtype=np.int64),
            self.rate[server : server + 1],
            math.inf,
            self.memory_bytes[mine],
        )

    def reordered(self, order: Longs) -> "Site":
        """Return the site with its devices in another order, servers still one after the other."""
        server, first = np.unique(self.server[order], return_index=True)
        rank = np.empty(self.num_servers, dtype=np.int64)
        rank[server[np.argsort(first)]] = np.arange(len(server))
        return Site(
            self.devices[order],
            rank[self.server[order]],
            self.rate[server[np.argsort(first)]],
            self.outer_rate,
            self.memory_bytes[order],
        )


def site_of(problem: Problem) -> Site:
    """Return the accelerators of a problem's cluster, or all devices where ops need others.

    The innermost level makes the servers and the next one joins them; levels above it are as fast
    as the slowest, and so is a matrix of links.
    """
    cluster = problem.cluster
    row_of, matrix = problem.allowed
    main = main_devices(problem)
    used = main if bool(matrix[np.unique(row_of)][:, main].any(axis=1).all()) else None
    devices = np.arange(len(cluster)) if used is None else np.array(used)
    group, rate, outer = _servers(cluster)
    devices = devices[np.argsort(group[devices], kind="stable")]
    found, server = np.unique(group[devices], return_inverse=True)
    inside = np.asarray(rate[found], dtype=np.float64)
    if len(found) == len(devices) and len(found) > 1:
        # Servers of one device: their ports are the links.
        server, inside = np.zeros_like(server), np.array([outer])
    between = outer if len(inside) > 1 else math.inf
    return Site(devices, server, inside, between, problem.limit_bytes[devices])


def _servers(cluster: Cluster) -> tuple[Longs, Array, float]:
    """Return the server of each device, the rate inside each, and the rate between them."""
    one = np.zeros(len(cluster), dtype=np.int64)
    if cluster.matrix is not None:
        rates = cluster.matrix.bandwidth_bytes_per_s.reshape(len(cluster), -1)
        others = rates[~np.eye(len(cluster), dtype=bool)]
        return one, np.array([others.min(initial=math.inf)]), math.inf
    if not cluster.levels:
        return one, np.array([math.inf]), math.inf
    inner = cluster.levels[0]
    upper = [level.slowest_bytes_per_s for level in cluster.levels[1:]]
    return (
        inner.group_of.astype(np.int64),
        inner.bandwidth_bytes_per_s,
        min(upper, default=math.inf),
    )
