"""A smaller cluster to search where there are more devices than a plan uses, or than differ.

A stage has no more replicas than there are microbatches, and more stages than hold the model, a few
times over, add bubbles and transfers but no speed. So a step of 64 samples is as fast on the first
512 of 65,536 devices as on all of them, and a search that deals out all of them finds less in the
same time.

A step that does use thousands of devices is searched as one of them with as much less to do: with
an eighth of the hosts of each kind and an eighth of the microbatches. Its plan is *repeated* on the
other hosts, replicas and all, and measured there, where only the reductions differ.

Whole hosts are kept, the first of each kind: hosts are of one kind where their devices and all
links above them are alike.
"""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from partita.core.cluster import Cluster
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.cost.tables import held_bytes, time_traits
from partita.planners.auto.frame import batch_choices

FEWEST_DEVICES = 512
"""Devices of each kind that are kept at least: a search over so many takes no time that matters."""
MOST_DEVICES = 1024
"""Devices above which a search takes so long that the step is searched as a part of itself."""
PART_DEVICES = 256
"""Devices of such a part, about."""
USEFUL_STAGES = 8
"""Stages of a pipeline that are worth searching where one device holds the model."""
ROOM = 4
"""Times the stages that weights, gradients and optimizer state alone need."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The problem to search instead of one on a large cluster.

    Attributes:
        asked: The problem that was asked.
        near: The problem on fewer devices; the same where all are searched.
        repeats: For each part of the other hosts, its device that stands for each of ``near``.
    """

    asked: Problem
    near: Problem
    repeats: tuple[dict[str, str], ...] = ()

    def whole(self, plan: Plan) -> Plan:
        """Return a plan for the problem that was asked, of one for ``near``."""
        if not self.repeats:
            return plan
        parts = [{}, *self.repeats]
        names = [part.get(name, name) for part in parts for name in plan.devices]
        size = len(plan.devices)
        stages = tuple(
            replace(
                stage,
                devices=tuple(
                    tuple(device + size * part for device in group)
                    for part in range(len(parts))
                    for group in stage.devices
                ),
                shares=stage.shares * len(parts),
            )
            for stage in plan.stages
        )
        sizes = np.tile(plan.microbatch_sizes, len(parts))
        return replace(plan, devices=tuple(names), stages=stages, microbatch_sizes=sizes)


def within_reach(problem: Problem, used: Collection[str] = ()) -> Reach:
    """Return the problem on as many devices of each kind as a plan uses, or as are searched.

    Rules may name any device, and a matrix of links knows no kinds of hosts: such problems stay as
    they are.

    Args:
        problem: The problem.
        used: Names of devices that are kept in any case.
    """
    cluster = problem.cluster
    wanted = useful_devices(problem)
    if problem.rules or cluster.matrix is not None:
        return Reach(problem, problem)
    if len(cluster) >= 2 * wanted:
        kept = set(used)
        for hosts in _hosts_by_kind(cluster):
            few = -(-wanted // len(hosts[0]))
            kept.update(cluster.devices[row].name for host in hosts[:few] for row in host)
        near = problem if len(kept) == len(cluster) else _on(problem, kept)
        return Reach(problem, near)
    return Reach(problem, problem) if used else _part(problem)


def _part(problem: Problem) -> Reach:
    """Return a problem as a part of itself, if it is of too many devices and can be divided."""
    kinds = _hosts_by_kind(problem.cluster)
    count, parts = problem.objective.microbatches, 1
    if count is None or len(problem.cluster) <= MOST_DEVICES:
        return Reach(problem, problem)
    while (
        len(problem.cluster) > PART_DEVICES * parts
        and count % (2 * parts) == 0
        and min(len(hosts) for hosts in kinds) >= 2 * parts
    ):
        parts *= 2
    if parts == 1:
        return Reach(problem, problem)
    names = problem.cluster.device_names
    repeats: list[dict[str, str]] = [{} for _ in range(parts)]
    for hosts in kinds:
        size = len(hosts) // parts  # hosts that are left over stay without work
        for number, host in enumerate(hosts[: size * parts]):
            part, first = divmod(number, size)
            repeats[part].update(
                (names[a], names[b]) for a, b in zip(hosts[first], host, strict=True)
            )
    objective = replace(problem.objective, microbatches=count // parts)
    near = _on(replace(problem, objective=objective), repeats[0].keys())
    return Reach(problem, near, tuple(repeats[1:]))


def _on(problem: Problem, names: Collection[str]) -> Problem:
    return replace(problem, cluster=problem.cluster.only(names))


def useful_devices(problem: Problem) -> int:
    """Return how many devices of a kind a plan makes use of, a power of two."""
    replicas = max(batch.count for batch in batch_choices(problem))
    held = float(held_bytes(problem.graph.parameters, problem.objective).total.sum())
    needed = held / float(problem.limit_bytes.min())
    stages = min(len(problem.graph), max(USEFUL_STAGES, math.ceil(ROOM * needed)))
    return max(FEWEST_DEVICES, 1 << (replicas * stages - 1).bit_length())


def _hosts_by_kind(cluster: Cluster) -> list[list[list[int]]]:
    """Return the devices of each host that has any, by kind of host."""
    members: list[list[int]] = [[] for _ in cluster.hosts]
    for index, device in enumerate(cluster.devices):
        members[device.host].append(index)
    kinds: dict[tuple[object, ...], list[list[int]]] = {}
    for host in filter(None, members):
        kinds.setdefault(_kind(cluster, host), []).append(host)
    return list(kinds.values())


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
