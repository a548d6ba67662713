"""Orderings, who goes first: a key for every job, lower first, equal ones by arrival.

FIFO by arrival; SRTF by the time left at top speed; LAS by attained GPU time (Tiresias); FTF serves
the job whose finish-time ratio is worst (Themis: largest first; Synergy's released code has it the
other way round); DRF fills progressively: the tenant with the smallest dominant share next
(a job without tenant is its own); Tetris adds alignment (demand times what the cluster has) and
the shortest work, weighed as in the paper. All but FIFO put higher priorities first.
"""

import heapq
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from partita.core.columns import Floats, Longs
from partita.fleet.policies.snapshot import Snapshot

Ordering: TypeAlias = Callable[[Snapshot], Floats]


def fifo(snapshot: Snapshot) -> Floats:
    """Return the arrival of each job."""
    return snapshot.arrival_s


def srtf(snapshot: Snapshot) -> Floats:
    """Return the seconds each job needs at its top speed."""
    return _remaining_s(snapshot)


def las(snapshot: Snapshot) -> Floats:
    """Return the GPU seconds that each job has attained."""
    return snapshot.attained_s * snapshot.gpus


def ftf(snapshot: Snapshot) -> Floats:
    """Return minus the ratio of each job's time in the cluster to its time alone."""
    alone = snapshot.iteration_s * snapshot.total
    shared = snapshot.now_s - snapshot.arrival_s + snapshot.remaining * snapshot.iteration_s
    return -shared / alone


def priority(snapshot: Snapshot) -> Floats:
    """Return the arrival: among equal priorities the first comes first."""
    return snapshot.arrival_s


def drf(snapshot: Snapshot) -> Floats:
    """Return the place of each job when the tenant with the least dominant share goes next."""
    dominant = _shares(snapshot).max(axis=1)
    queues: dict[int, list[int]] = {}
    for job, tenant in enumerate(snapshot.tenant.tolist()):
        queues.setdefault(tenant if tenant >= 0 else -2 - job, []).append(job)
    heap = [(float(dominant[jobs[0]]), jobs[0], 0, tenant) for tenant, jobs in queues.items()]
    heapq.heapify(heap)
    place = np.empty(len(snapshot))
    for turn in range(len(snapshot)):
        share, job, at, tenant = heapq.heappop(heap)
        place[job] = turn
        if at + 1 < len(queues[tenant]):
            after = queues[tenant][at + 1]
            heapq.heappush(heap, (share + float(dominant[after]), after, at + 1, tenant))
    return place


def tetris(snapshot: Snapshot) -> Floats:
    """Return minus the alignment plus the work left, each scaled by its mean."""
    if not len(snapshot):
        return snapshot.arrival_s
    shares = _shares(snapshot).sum(axis=1)
    work = _remaining_s(snapshot) * shares
    result: Floats = work / max(float(work.mean()), 1e-300) - shares / float(shares.mean())
    return result


def order_of(snapshot: Snapshot, keys: Floats, *, ranked: bool) -> Longs:
    """Return the jobs in the order of their keys."""
    if not ranked:
        return np.argsort(keys, kind="stable")
    return np.lexsort((keys, -snapshot.rank))


def _remaining_s(snapshot: Snapshot) -> Floats:
    return snapshot.remaining * snapshot.iteration_s / snapshot.top_speed


def _shares(snapshot: Snapshot) -> Floats:
    """Return GPUs, CPUs and memory that each job asks for, as shares of the cluster's."""
    profiles, servers = snapshot.profiles, snapshot.servers
    # The best choice on the first class of servers that the job runs on.
    lists = snapshot.profile[:, None] * profiles.num_classes + np.arange(profiles.num_classes)
    runs = profiles.floor[lists] >= 0
    chosen = lists[np.arange(len(snapshot)), np.argmax(runs, axis=1)]
    best = profiles.first[chosen + 1] - 1
    demand = np.stack(
        [np.ones(len(best)), profiles.cpus[best], profiles.memory_bytes[best]], axis=1
    )
    have = np.array([servers.num_gpus, servers.cpus.sum(), servers.memory_bytes.sum()])
    result: Floats = demand * snapshot.gpus[:, None] / have
    return result
