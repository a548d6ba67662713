"""What a policy sees, and what it answers: columns over the jobs that are there."""

import math
from dataclasses import dataclass

import numpy as np

from partita.core.columns import Flags, Floats, Longs
from partita.fleet.policies.profiles import Profiles
from partita.fleet.policies.resources import Servers


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The cluster and its jobs at the start of a round; a row for each job that is not done.

    Attributes:
        now_s: The time.
        round_s: Length of a round.
        servers: The servers.
        up: Which servers work.
        profiles: What each job may be granted.
        job: Row of the job in its trace; rows ascend by arrival.
        profile: Row of its profile for the GPUs it asks for.
        may_run: Whether it may run on a class of servers, flat: ``job * classes + class``.
        arrival_s: When it came.
        gpus: GPUs that it asks for.
        least: The fewest it can run on.
        most: The most it can use.
        part: Index of its sensitivity.
        iteration_s: Seconds of an iteration at speed 1.
        total: Iterations in all.
        remaining: Iterations left.
        attained_s: Seconds that it ran.
        speed: Its speed in the last round; 0 = it waited.
        top_speed: Its highest speed anywhere.
        restart_s: Seconds that a resumption or move costs.
        lease_s: Seconds since it last started, or moved; 0 = it waits.
        rank: Priority.
        tenant: Index of its tenant, -1 = none.
        held_first: Pieces that it holds are ``held_first[i]`` to ``held_first[i + 1]``.
        held_server: Server of a piece.
        held_gpus: GPUs of a piece.
        quota: GPUs that each tenant may hold; -1 = any number.
    """

    now_s: float
    round_s: float
    servers: Servers
    up: Flags
    profiles: Profiles
    job: Longs
    profile: Longs
    may_run: Flags
    arrival_s: Floats
    gpus: Longs
    least: Longs
    most: Longs
    part: Longs
    iteration_s: Floats
    total: Floats
    remaining: Floats
    attained_s: Floats
    speed: Floats
    top_speed: Floats
    restart_s: Floats
    lease_s: Floats
    rank: Floats
    tenant: Longs
    held_first: Longs
    held_server: Longs
    held_gpus: Longs
    quota: Longs

    def __len__(self) -> int:
        return len(self.job)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Who runs where with what in a round; rows as those of the snapshot.

    Attributes:
        choice: Choice of each job, an index into the profiles; -1 = it waits.
        speed: Speed of each job; 0 = it waits.
        first: Pieces of job i are ``first[i]`` to ``first[i + 1]``.
        server: Server of a piece.
        gpus: GPUs of a piece.
        cpus: CPUs of a piece.
        memory_bytes: Memory of a piece.
        bound: No grants to these jobs give a higher sum of speeds; NaN = was not computed.
        solver_gap: Gap that the solver left, relative; NaN = there was no solver.
    """

    choice: Longs
    speed: Floats
    first: Longs
    server: Longs
    gpus: Longs
    cpus: Floats
    memory_bytes: Floats
    bound: float = math.nan
    solver_gap: float = math.nan

    @property
    def running(self) -> Flags:
        """Which jobs run."""
        result: Flags = self.choice >= 0
        return result

    @property
    def gap(self) -> float:
        """How far the sum of speeds is below the bound, relative; NaN = not known."""
        return 1 - float(self.speed.sum()) / self.bound if self.bound > 0 else math.nan


def piece_jobs(first: Longs) -> Longs:
    """Return the job of every piece."""
    return np.repeat(np.arange(len(first) - 1), np.diff(first))
