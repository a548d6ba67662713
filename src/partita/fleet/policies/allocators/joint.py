"""The joint allocator: GPUs (number and type), CPUs and memory by what they speed up.

Who runs. Jobs are selected by GPUs, in their order but for this: a job that runs is not stopped for
one with as many GPUs or fewer whose work left, in GPU time, is not less (restart included). The two
would only take turns on the same GPUs: the one that waits ends no sooner for it, the other later.
Nobody starves: who waits goes before all behind it as soon as those GPUs are free. A job with a
range of GPUs shrinks where it could not run otherwise, and grows into GPUs nobody waits for.

Overtaking. Under FIFO, among the jobs next in line, twice as many as there are GPUs, who ends
soonest starts first; nobody is overtaken for longer than its own length and a day. In the table of
policies this is an option: ``fifo:joint`` overtakes, ``fifo:joint-in-order`` does not, and jobs
start in the order of arrival (those behind fill in where one does not fit). Other orderings have
their own idea of who is next, and keep it. Where it makes no difference, as LAS does among jobs
that have not run yet, who ends soonest of those with as many GPUs goes first, not the oldest.

What they get. On each server CPUs and memory go, step by step, to the job for which they are worth
most for their share of the server; jobs change servers where that gains more than the restarts cost
(`kernels/sharing.py`). A job never runs below its GPU-proportional speed: floors come first, and no
choice is slower. CPUs that speed nothing up are handed out too.

What speed is worth. A second that a job saves is one for itself, and one for everybody who waits
for its GPUs: jobs that wait over GPUs, times its GPUs. Those GPUs are handed on with rounds: for
them it counts to end within this round, and not how early in it. All is weighed by
m / (m + seconds left), m being the mean of all jobs: by Smith's rule who is nearly done goes first,
since its CPUs then help the others, but what one gets is taken from the throughput of all.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from partita.core.columns import Floats, Longs
from partita.fleet.policies.allocators.round_tables import (
    RoundTables,
    Worth,
    largest_first,
    lay_out,
    outcome,
    run,
)
from partita.fleet.policies.kernels.sharing import BY_GAIN, share
from partita.fleet.policies.snapshot import Allocation, Snapshot, piece_jobs

SWAPS = 16
"""Swaps of jobs between servers that are tried in a round, at least."""
WINDOW = 2.0
"""Jobs next in line that may overtake one another, for each GPU."""
PATIENCE_S = 86_400.0
"""Beyond its own length, how long a job may be overtaken."""
HALF_ROUND = 0.5
"""Rounds by which a job's end is rounded up on average, as its GPUs are handed on with rounds."""
_EFFORT = 100.0
"""What a job-round costs here against other allocators, which decides when to compile."""


def worth_of(snapshot: Snapshot) -> Worth:
    """Return what the speed of each job is worth."""
    seconds = snapshot.remaining * snapshot.iteration_s
    mean = max(float(seconds.mean()), 1e-9)
    smith = mean / (mean + seconds)
    waiting = np.count_nonzero(snapshot.speed == 0)
    short = int(snapshot.gpus.sum()) > snapshot.servers.num_gpus
    behind = waiting / snapshot.servers.num_gpus if short else 0.0
    usual = np.where(snapshot.speed > 0, snapshot.speed, 1.0)
    return Worth(
        own=smith,
        freed=smith * behind * snapshot.gpus,
        need=seconds / snapshot.round_s,
        bonus=HALF_ROUND * usual,
    )


def keep_running(snapshot: Snapshot, order: Longs) -> Longs:
    """Return an order in which nobody is stopped for a job that has as much to do.

    A job that runs goes before the first of those that wait that asks for no more GPUs, has no less
    work left and no higher priority.
    """
    gpus = snapshot.gpus[order]
    work = (_left_s(snapshot) * snapshot.gpus)[order]
    spared = work - (snapshot.restart_s * snapshot.gpus)[order]
    runs, rank = snapshot.speed[order] > 0, snapshot.rank[order]
    place = np.arange(len(order), dtype=np.float64)
    for size, priority in sorted(set(zip(gpus[runs].tolist(), rank[runs].tolist(), strict=True))):
        waiting = np.flatnonzero(~runs & (gpus <= size) & (rank <= priority))
        if not len(waiting):
            continue
        mine = np.flatnonzero(runs & (gpus == size) & (rank == priority))
        at = np.searchsorted(np.maximum.accumulate(work[waiting]), spared[mine])
        before = np.append(waiting, len(order))[at]
        place[mine] = np.minimum(place[mine], before - 0.5)
    return order[np.argsort(place, kind="stable")]


def overtake(snapshot: Snapshot, order: Longs) -> Longs:
    """Return an order of arrival in which, of those next in line, who ends soonest goes first.

    Who runs goes before all who wait, since otherwise whom it has overtaken would stop it; but who
    was overtaken for too long has its place by arrival again, before those who run and came later.
    Otherwise a job of many GPUs would wait for as long as smaller ones come.
    """
    left = _left_s(snapshot)
    patient = snapshot.now_s - snapshot.arrival_s <= left + PATIENCE_S
    yields = patient & (snapshot.speed == 0)
    waiting = order[yields[order]]
    window = max(int(WINDOW * snapshot.servers.num_gpus), 1)
    jobs = waiting[:window]
    waiting[:window] = jobs[np.argsort(left[jobs], kind="stable")]
    return np.concatenate([order[~yields[order]], waiting])


def shortest_of_equals(snapshot: Snapshot, order: Longs, keys: Floats) -> Longs:
    """Return an order in which, of jobs with equal keys and GPUs, who ends soonest goes first.

    Who runs goes before its equals that wait. Each job takes a place of one of its equals, so that
    jobs of other sizes stay where they are.
    """
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    waits = snapshot.speed == 0
    left = np.where(waits, _left_s(snapshot), 0.0)
    equal = (snapshot.gpus, keys, snapshot.rank)
    result = order.copy()
    result[place[np.lexsort((place, *equal))]] = np.lexsort((place, left, waits, *equal))
    return result


def _left_s(snapshot: Snapshot) -> Floats:
    """Return the seconds that each job needs at its top speed."""
    return snapshot.remaining * snapshot.iteration_s / snapshot.top_speed


def joint(snapshot: Snapshot, order: Longs, *, effort: float = 0.0) -> Allocation:
    """Return the grants of the joint allocator."""
    newest = largest_first(snapshot)
    order = keep_running(snapshot, order)
    ranged = bool((snapshot.least < snapshot.most).any())
    span = (
        np.stack([snapshot.least, snapshot.most], axis=1).ravel() if ranged else snapshot.gpus[:0]
    )
    swaps = SWAPS + min(len(snapshot.servers), SWAPS)

    def call(kernel: Any, at: RoundTables) -> None:  # noqa: ANN401 (compiled or not)
        limits = (at.class_free, at.quota, span, swaps)
        kernel(BY_GAIN, order, newest, at.queue, at.site, at.table, limits)

    tables = lay_out(snapshot, worth=worth_of(snapshot))
    if ranged:
        _keep_sizes(snapshot, tables)
    placed = outcome(snapshot, run(share, tables, call, effort=effort * _EFFORT))
    return hand_out(snapshot, placed)


def _keep_sizes(snapshot: Snapshot, tables: RoundTables) -> None:
    """Let jobs that grew keep their GPUs while nobody waits."""
    jobs = piece_jobs(snapshot.held_first)
    held = np.bincount(jobs, weights=snapshot.held_gpus, minlength=len(snapshot)).astype(np.int64)
    if (held == 0).any():
        return
    kept = np.clip(held, snapshot.least, snapshot.most)
    tables.queue.profile[:] += kept - snapshot.gpus
    tables.queue.gpus[:] = kept


def hand_out(snapshot: Snapshot, placed: Allocation) -> Allocation:
    """Return an allocation in which spare CPUs go, whole ones, to the jobs of their server by GPUs.

    No speed is promised for them: what speeds a job up was granted before.
    """
    servers = snapshot.servers
    count = len(servers)
    used = np.bincount(placed.server, weights=placed.cpus, minlength=count)
    gpus = np.bincount(placed.server, weights=placed.gpus, minlength=count)
    spare = np.floor(np.maximum(servers.cpus - used, 0.0) + 1e-9)
    share = np.floor(spare[placed.server] * placed.gpus / gpus[placed.server])
    left = spare - np.bincount(placed.server, weights=share, minlength=count)
    by_server = np.argsort(placed.server, kind="stable")
    first = np.searchsorted(placed.server[by_server], placed.server[by_server])
    turn = np.empty(len(by_server))
    turn[by_server] = np.arange(len(by_server)) - first
    return replace(placed, cpus=placed.cpus + share + (turn < left[placed.server]))
