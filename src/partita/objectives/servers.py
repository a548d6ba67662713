"""The cluster as PipeDream sees it: devices in servers, a bandwidth inside and one between them."""

from typing import NamedTuple

import numpy as np

from partita.core.columns import Floats, Ints
from partita.core.plan import Plan
from partita.core.problem import Problem


class Servers(NamedTuple):
    """Servers of a cluster.

    Attributes:
        server_of: The server of each device of the plan.
        inside_bytes_per_s: Bandwidth between devices of a server, by server.
        between_bytes_per_s: Bandwidth of a server's port; ``inf`` on a flat cluster.
        size: Devices in the largest server.
        num_servers: Number of servers.
    """

    server_of: Ints
    inside_bytes_per_s: Floats
    between_bytes_per_s: float
    size: int
    num_servers: int


def why_no_servers(problem: Problem) -> str | None:
    """Return why a cluster is not a set of servers, or ``None``."""
    if problem.cluster.matrix is not None:
        return "the cluster is a matrix of links; expected one or two levels"
    levels = problem.cluster.levels
    if len(levels) > 2:
        return f"the cluster has {len(levels)} levels; expected one or two"
    return None


def servers(problem: Problem, plan: Plan) -> Servers:
    """Return the servers; a cluster of one level is one server."""
    cluster = problem.cluster
    here = np.array([cluster.index_of[name] for name in plan.devices], dtype=np.int32)
    if not cluster.levels:
        return Servers(np.zeros(len(here), np.int32), np.array([np.inf]), np.inf, len(cluster), 1)
    inner = cluster.levels[0]
    between = np.inf
    if len(cluster.levels) == 2:
        between = float(cluster.levels[1].bandwidth_bytes_per_s.min())
    sizes = np.bincount(inner.group_of)
    return Servers(
        inner.group_of[here], inner.bandwidth_bytes_per_s, between, int(sizes.max()), len(sizes)
    )
