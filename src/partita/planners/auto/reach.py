"""Fewer devices where a cluster has more than any plan of a step makes use of.

A stage has no more replicas than there are microbatches, and more stages than hold the model, a few
times over, add bubbles and transfers but no speed. So a step of 64 samples is as fast on the first
512 of 65,536 devices as on all of them, and a search that deals out all of them finds less in the
same time. Whole hosts are kept, the first of each kind: hosts are of one kind where their devices
and all links above them are alike. A plan names its devices, so it is one for the whole cluster.
"""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from partita.core.cluster import Cluster
from partita.core.problem import Problem
from partita.cost.tables import held_bytes, time_traits
from partita.planners.auto.frame import batch_choices

FEWEST_DEVICES = 512
"""Devices of each kind that are kept at least: a search over so many takes no time that matters."""
USEFUL_STAGES = 8
"""Stages of a pipeline that are worth searching where one device holds the model."""
ROOM = 4
"""Times the stages that weights, gradients and optimizer state alone need."""


def within_reach(problem: Problem, used: Collection[str] = ()) -> Problem:
    """Return the problem on as many devices of each kind as a plan makes use of.

    Rules may name any device, and a matrix of links knows no kinds of hosts: such problems stay as
    they are.

    Args:
        problem: The problem.
        used: Names of devices that are kept in any case.
    """
    cluster = problem.cluster
    wanted = useful_devices(problem)
    if problem.rules or cluster.matrix is not None or len(cluster) < 2 * wanted:
        return problem
    kept = set(used)
    taken: Counter[tuple[object, ...]] = Counter()
    for members in _hosts(cluster):
        kind = _kind(cluster, members)
        if taken[kind] < wanted:
            taken[kind] += len(members)
            kept.update(cluster.devices[member].name for member in members)
    if len(kept) == len(cluster):
        return problem
    return replace(problem, cluster=cluster.only(kept))


def useful_devices(problem: Problem) -> int:
    """Return how many devices of a kind a plan makes use of, a power of two."""
    replicas = max(batch.count for batch in batch_choices(problem))
    held = float(held_bytes(problem.graph.parameters, problem.objective).total.sum())
    needed = held / float(problem.limit_bytes.min())
    stages = min(len(problem.graph), max(USEFUL_STAGES, math.ceil(ROOM * needed)))
    return max(FEWEST_DEVICES, 1 << (replicas * stages - 1).bit_length())


def _hosts(cluster: Cluster) -> list[list[int]]:
    """Return the devices of each host that has any."""
    members: list[list[int]] = [[] for _ in cluster.hosts]
    for index, device in enumerate(cluster.devices):
        members[device.host].append(index)
    return [host for host in members if host]


def _kind(cluster: Cluster, members: list[int]) -> tuple[object, ...]:
    """Return all that tells a host from others but its place."""
    devices = Counter(
        (time_traits(d), d.kind, d.memory_bytes, d.price_per_hour, d.idle_w, d.max_w)
        for d in (cluster.devices[member] for member in members)
    )
    links = []
    for level in cluster.levels:
        group = int(level.group_of[members[0]])
        links.append(
            (
                float(level.bandwidth_bytes_per_s[group]),
                float(level.latency_s[group]),
                float(level.port_share[members[0]]),
                level.collectives_of(group),
            )
        )
    return (frozenset(devices.items()), *links)
