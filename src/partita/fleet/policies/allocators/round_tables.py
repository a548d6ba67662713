"""From a snapshot to the columns that kernels work on, and back to an allocation."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from partita.core.columns import Floats, Longs, frozen_array
from partita.fleet.policies.kernels import JOB_ROUNDS
from partita.fleet.policies.kernels.placing import NUM_PIECES, Queue, Site, Table
from partita.fleet.policies.snapshot import Allocation, Snapshot
from partita.kernels import as_lists, compiled, pays


@dataclass(frozen=True, slots=True)
class Worth:
    """What the speed of each job is worth; see `kernels.dividing.worth`.

    Attributes:
        own: A unit of speed, to the job itself.
        freed: A unit of speed, to those who wait for its GPUs.
        need: Speed that ends the job within this round; more frees nothing.
        bonus: Speed that reaching ``need`` is worth besides.
    """

    own: Floats
    freed: Floats
    need: Floats
    bonus: Floats


def plain_worth(jobs: int) -> Worth:
    """Return the worth by which the sum of speeds counts."""
    return Worth(np.ones(jobs), np.zeros(jobs), np.full(jobs, math.inf), np.zeros(jobs))


@dataclass(frozen=True, slots=True)
class RoundTables:
    """The tables of one round.

    Attributes:
        queue: The jobs.
        site: The servers.
        table: The choices.
        class_free: GPUs of each class of servers.
        quota: GPUs that each tenant may still get; -1 = any number.
    """

    queue: Queue
    site: Site
    table: Table
    class_free: Longs
    quota: Longs


def lay_out(snapshot: Snapshot, *, worth: Worth | None = None) -> RoundTables:
    """Return the tables of a round in which nothing is granted yet.

    Args:
        snapshot: The round.
        worth: What the speed of each job is worth; ``None`` = that of all is worth the same.
    """
    servers, profiles, jobs = snapshot.servers, snapshot.profiles, len(snapshot)
    worth = plain_worth(jobs) if worth is None else worth
    gpus = np.where(snapshot.up, servers.gpus, -1).astype(np.int64)
    class_free = np.zeros(profiles.num_classes, dtype=np.int64)
    np.add.at(class_free, profiles.server_class[snapshot.up], gpus[snapshot.up])
    pieces = max(int(servers.gpus.sum()), 1)
    queue = Queue(
        profile=snapshot.profile.copy(),
        gpus=snapshot.gpus.copy(),
        may_run=snapshot.may_run,
        tenant=snapshot.tenant,
        weight=worth.own,
        freed=worth.freed,
        need=worth.need,
        bonus=worth.bonus,
        target=np.full(jobs, -1, dtype=np.int64),
        move_cost=(worth.own + worth.freed) * snapshot.speed * move_share(snapshot),
        held_first=snapshot.held_first,
        held_server=snapshot.held_server,
        held_gpus=snapshot.held_gpus,
        klass=np.full(jobs, -1, dtype=np.int64),
        choice=np.full(jobs, -1, dtype=np.int64),
        first=np.zeros(jobs, dtype=np.int64),
        pieces=np.zeros(jobs, dtype=np.int64),
        fresh=np.zeros(jobs, dtype=np.int64),
        piece_job=np.zeros(pieces, dtype=np.int64),
        piece_server=np.zeros(pieces, dtype=np.int64),
        piece_gpus=np.zeros(pieces, dtype=np.int64),
        piece_next=np.zeros(pieces, dtype=np.int64),
        count=np.zeros(1, dtype=np.int64),
    )
    count = len(servers)
    site = Site(
        klass=profiles.server_class,
        # Frozen also where they came from another process: Numba would compile again otherwise.
        cpus=frozen_array(servers.cpus, np.float64),
        memory=frozen_array(servers.memory_bytes, np.float64),
        free_gpus=gpus,
        free_cpus=servers.cpus.copy(),
        free_memory=servers.memory_bytes.copy(),
        claim_cpus=np.zeros(count),
        claim_memory=np.zeros(count),
        head=np.full(count, -1, dtype=np.int64),
        price=np.zeros(count),
        settled=np.zeros(count, dtype=np.int64),
    )
    table = Table(
        first=profiles.first,
        cpus=profiles.cpus,
        memory=profiles.memory_bytes,
        speed=profiles.speed,
        floor=profiles.floor,
        fair_speed=profiles.fair_speed,
        num_classes=np.array([profiles.num_classes]),
    )
    return RoundTables(queue, site, table, class_free, snapshot.quota.copy())


HORIZON_S = 3600.0
"""How long a better place is taken to pay at most: by then other jobs have come and gone."""


def move_share(snapshot: Snapshot) -> Floats:
    """Return the share of a job's progress, until its end or the horizon, that a move costs."""
    speed = np.maximum(snapshot.speed, 1e-9)
    left = np.where(snapshot.speed > 0, snapshot.remaining * snapshot.iteration_s / speed, 1.0)
    result: Floats = snapshot.restart_s / np.clip(left, 1.0, HORIZON_S)
    return result


def run(
    kernel: Callable[..., None],
    tables: RoundTables,
    call: Callable[[Any, RoundTables], None],
    *,
    effort: float,
) -> RoundTables:
    """Run a kernel on the tables, compiled or interpreted, and return them with its outcome.

    Args:
        kernel: The kernel.
        tables: The tables.
        call: Calls the kernel with the tables.
        effort: Job-rounds that it is worth.
    """
    if pays(kernel, effort, JOB_ROUNDS):
        call(compiled(kernel), tables)
        return tables
    lists = RoundTables(
        as_lists(tables.queue),
        as_lists(tables.site),
        as_lists(tables.table),
        tables.class_free,
        tables.quota,
    )
    call(kernel, lists)
    return lists


def outcome(
    snapshot: Snapshot,
    tables: RoundTables,
    *,
    proportional: bool = False,
    bound: float = math.nan,
    solver_gap: float = math.nan,
) -> Allocation:
    """Return what the tables hold as an allocation.

    Args:
        snapshot: The round.
        tables: The tables after a kernel ran.
        proportional: Whether grants are GPU-proportional shares, whatever the choice.
        bound: No grants give a higher sum of speeds.
        solver_gap: Gap that a solver left.
    """
    queue, profiles = tables.queue, snapshot.profiles
    pieces = int(queue.count[NUM_PIECES])
    job = np.asarray(queue.piece_job[:pieces], dtype=np.int64)
    order = np.argsort(job, kind="stable")
    job = job[order]
    server = np.asarray(queue.piece_server[:pieces], dtype=np.int64)[order]
    gpus = np.asarray(queue.piece_gpus[:pieces], dtype=np.int64)[order]
    choice = np.asarray(queue.choice, dtype=np.int64)
    first = np.zeros(len(snapshot) + 1, dtype=np.int64)
    np.cumsum(np.bincount(job, minlength=len(snapshot)), out=first[1:])
    if proportional:
        servers = snapshot.servers
        cpus = gpus * (servers.cpus / servers.gpus)[server]
        memory = gpus * (servers.memory_bytes / servers.gpus)[server]
    else:
        cpus = gpus * profiles.cpus[choice[job]]
        memory = gpus * profiles.memory_bytes[choice[job]]
    return Allocation(
        choice=choice,
        speed=np.where(choice >= 0, profiles.speed[choice], 0.0),
        first=first,
        server=server,
        gpus=gpus,
        cpus=cpus,
        memory_bytes=memory,
        bound=bound,
        solver_gap=solver_gap,
    )


def largest_first(snapshot: Snapshot) -> Longs:
    """Return the jobs by GPUs, CPUs and memory that they ask for, most first."""
    profiles = snapshot.profiles
    lists = snapshot.profile * profiles.num_classes
    top = np.maximum(profiles.first[lists + 1] - 1, 0)
    return np.lexsort((-profiles.memory_bytes[top], -profiles.cpus[top], -snapshot.gpus))
