"""Synergy's OPT (OSDI 2022): the grants with the highest sum of speeds, by an integer program.

For the jobs that the order selects, on one machine with all CPUs and memory of a class of servers:

    max  sum_l,o  speed[o] x[l, o]
    s.t. sum_o x[l, o] = jobs of list l
         sum_l,o  gpus[l] cpus[o] x[l, o] <= CPUs of the class, and memory alike
         x whole

where o runs over the choices that are at least as fast as the fair share. Jobs with the same list
of choices and GPUs are one row with a count, so the program does not grow with the jobs; the
published one has a binary for every job and point. HiGHS solves it, with a time limit.

The published placement is not applied, so it ignores what whole servers lose. Here targets are
placed: each job takes its target where it fits on a server, the rest is divided by gain. The
program's bound stays a bound, and `Allocation.gap` says how far below it the placed grants are.
"""

import math
from typing import Any

import numpy as np

from partita.core.columns import Floats, Longs
from partita.fleet.policies.allocators.joint import SWAPS
from partita.fleet.policies.allocators.round_tables import (
    RoundTables,
    largest_first,
    lay_out,
    outcome,
    run,
)
from partita.fleet.policies.kernels.sharing import FLOORS, TO_TARGETS, share
from partita.fleet.policies.snapshot import Allocation, Snapshot

TIME_LIMIT_S = 2.0
_SCALE = np.array([1.0, 1e-9])
"""Factors of the rows of CPUs and bytes: tolerances of HiGHS are absolute, for rows alike."""


def opt(
    snapshot: Snapshot, order: Longs, *, effort: float = 0.0, time_limit_s: float = TIME_LIMIT_S
) -> Allocation:
    """Return grants close to the highest sum of speeds, with its bound.

    Args:
        snapshot: The round.
        order: Its jobs, first first.
        effort: Job-rounds of the whole simulation.
        time_limit_s: Seconds that the solver may take for a class of servers.
    """
    newest = largest_first(snapshot)
    selected = _run(FLOORS, snapshot, order, newest, lay_out(snapshot), effort)
    tables = lay_out(snapshot)
    klass = np.asarray(selected.queue.klass, dtype=np.int64)
    bound, gap = 0.0, 0.0
    for k in range(snapshot.profiles.num_classes):
        jobs = order[klass[order] == k]
        if len(jobs):
            best, left = _solve(snapshot, jobs, k, tables.queue.target, time_limit_s)
            bound, gap = bound + best, max(gap, left)
    placed = _run(TO_TARGETS, snapshot, order, newest, tables, effort)
    return outcome(snapshot, placed, bound=bound if bound > 0 else math.nan, solver_gap=gap)


def _run(
    mode: int, snapshot: Snapshot, order: Longs, newest: Longs, tables: RoundTables, effort: float
) -> RoundTables:
    def call(kernel: Any, at: RoundTables) -> None:  # noqa: ANN401 (compiled or not)
        limits = (at.class_free, at.quota, snapshot.gpus[:0], SWAPS)
        kernel(mode, order, newest, at.queue, at.site, at.table, limits)

    return run(share, tables, call, effort=effort * 100)


def _solve(
    snapshot: Snapshot, jobs: Longs, klass: int, target: Longs, time_limit_s: float
) -> tuple[float, float]:
    """Set the targets of the jobs of a class; return the bound and the gap of the solver."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 (slow to import)

    profiles, servers = snapshot.profiles, snapshot.servers
    rows, of = np.unique(snapshot.profile[jobs], return_inverse=True)
    count = np.bincount(of)
    gpus = np.array([snapshot.gpus[jobs[of == r][0]] for r in range(len(rows))])
    lists = rows * profiles.num_classes + klass
    sizes = profiles.first[lists + 1] - profiles.first[lists]
    row = np.repeat(np.arange(len(rows)), sizes)
    choice = np.concatenate([np.arange(profiles.first[at], profiles.first[at + 1]) for at in lists])
    here = snapshot.up & (profiles.server_class == klass)
    have = np.array([servers.cpus[here].sum(), servers.memory_bytes[here].sum()])
    use = np.stack([gpus[row] * profiles.cpus[choice], gpus[row] * profiles.memory_bytes[choice]])
    use, have = use * _SCALE[:, None], have * _SCALE
    each = (row[None, :] == np.arange(len(rows))[:, None]).astype(np.float64)
    found = milp(
        -profiles.speed[choice],
        constraints=[LinearConstraint(each, count, count), LinearConstraint(use, -np.inf, have)],
        bounds=Bounds(0, count[row]),
        integrality=np.ones(len(choice)),
        options={"time_limit": time_limit_s},
    )
    if found.x is None:  # within the time limit; floors remain, and what no choice can beat
        return float((count * profiles.speed[profiles.first[lists + 1] - 1]).sum()), math.inf
    _assign(np.rint(found.x), row, choice, jobs, of, target)
    bound = -float(found.mip_dual_bound) if found.mip_dual_bound is not None else -float(found.fun)
    return bound, float(found.mip_gap or 0.0)


def _assign(
    number: Floats, row: Longs, choice: Longs, jobs: Longs, of: Longs, target: Longs
) -> None:
    """Give the choices of a row to its jobs: the fastest to the first in order."""
    for r in range(int(row.max()) + 1):
        here = np.flatnonzero(row == r)[::-1]
        given = np.repeat(choice[here], number[here].astype(np.int64))
        waiting = jobs[of == r]
        target[waiting[: len(given)]] = given[: len(waiting)]
