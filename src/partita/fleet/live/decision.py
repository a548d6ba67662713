"""From the jobs that are there to what each is granted: the one place where the policy is asked.

The policy is that of the simulator, over the snapshot that the simulator's own state makes. Nothing
here decides anything; it only writes how the jobs stand and reads the allocation.

What counts where one round ends and the next begins is what counts in the simulator. A job is there
if it was submitted by the boundary, and has ended if its last step was done by then, though its
process may still write a checkpoint and exit. What a job holds is counted from the start of the
round in which it started. So a decision depends on the boundary and not on how soon after it the
scheduler looks.

Words of jobs take a moment. Where a job expects to be done about the boundary and has not
reported it, the decision waits for it, by `SETTLING` of a round and `MOST_S` at most: otherwise
hundredths of a second would decide whether its GPUs are free in this round or in the next.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partita.core.columns import Floats, Longs
from partita.core.fleet import Job, trace_of
from partita.errors import PartitaError
from partita.fleet.engines.devices import Piece
from partita.fleet.live.files import figure
from partita.fleet.policies.resources import Servers
from partita.fleet.policies.snapshot import Snapshot
from partita.fleet.policies.table import Policy
from partita.fleet.simulate.options import Rules
from partita.fleet.simulate.state import State, first_state

SETTLING = 0.1
MOST_S = 2.0
_CLOSE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Rounds on the clock of the wall.

    Attributes:
        epoch_s: When the first began.
        round_s: Length of each.
    """

    epoch_s: float
    round_s: float

    @property
    def settling_s(self) -> float:
        """How long a decision waits for words of jobs at most."""
        return min(SETTLING * self.round_s, MOST_S)

    def number(self, at_s: float) -> int:
        """Return the number of the round that a time is in."""
        return math.floor((at_s - self.epoch_s) / self.round_s + _CLOSE)

    def start_s(self, number: int) -> float:
        """Return when a round begins."""
        return self.epoch_s + number * self.round_s

    def start_before_s(self, at_s: float) -> float:
        """Return when the round that a time is in began."""
        return self.start_s(self.number(at_s))


def has_ended(values: Mapping[str, Any], by_s: float) -> bool:
    """Return whether the last step of a job was done by some time, by the job's own word."""
    done_s = figure(values, "done_s")
    return done_s is not None and done_s <= by_s


def is_about_to_end(values: Mapping[str, Any], by_s: float) -> bool:
    """Return whether a job expects to be done by some time and has not reported that it is."""
    ends_s = figure(values, "ends_s")
    return figure(values, "done_s") is None and ends_s is not None and ends_s <= by_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveJob:
    """A job that is not done, as it stands.

    Attributes:
        job: What it is.
        remaining: Iterations left.
        attained_s: Seconds that it ran.
        lease_s: Seconds since it last started, or moved; 0 = it waits.
        speed: Its speed; 0 = it waits.
        held: What it holds.
    """

    job: Job
    remaining: int
    attained_s: float = 0.0
    lease_s: float = 0.0
    speed: float = 0.0
    held: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """What a job gets.

    Attributes:
        pieces: On which servers what.
        speed: The speed that this is for.
    """

    pieces: tuple[Piece, ...]
    speed: float


class Decider:
    """Asks a policy what jobs get.

    Args:
        servers: The servers.
        policy: The ordering and the allocator.
        round_s: Length of a round.
        restart_s: Cost of a restart of a job that gives none.
        quotas: GPUs that a tenant may hold, by name.
    """

    def __init__(
        self,
        servers: Servers,
        policy: Policy,
        *,
        round_s: float,
        restart_s: float,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        self.servers = servers
        self.policy = policy
        self._rules = Rules(round_s=round_s, restart_s=min(restart_s, round_s / 2))
        self._quotas = dict(quotas or {})

    def check(self, job: Job) -> None:
        """Raise where a job can never run here.

        Raises:
            InfeasibleError: It asks for what the servers do not have, or its tenant may not hold.
        """
        self._state([job])

    def grants(
        self, now_s: float, jobs: Sequence[LiveJob], away: Collection[str] = ()
    ) -> dict[int, Granted]:
        """Return what each job gets in the round that starts now; who is not there waits.

        Args:
            now_s: When the round starts.
            jobs: The jobs that are there.
            away: Names of servers on which nothing can be placed; who holds something there is
                placed anew.
        """
        rows = [row for row, name in enumerate(self.servers.names) if name not in away]
        if len(rows) < len(self.servers):
            return self._grants_on(rows, now_s, jobs)
        if not jobs:
            return {}
        ranked = sorted(jobs, key=lambda each: (each.job.arrival_s, each.job.job_id))
        snapshot = self.snapshot(now_s, ranked)
        allocation = self.policy.allocator.allocate(snapshot, self.policy.order(snapshot))
        granted: dict[int, Granted] = {}
        for row in np.flatnonzero(allocation.running).tolist():
            pieces = range(int(allocation.first[row]), int(allocation.first[row + 1]))
            granted[ranked[row].job.job_id] = Granted(
                speed=float(allocation.speed[row]),
                pieces=tuple(
                    Piece(
                        server=int(allocation.server[at]),
                        gpus=int(allocation.gpus[at]),
                        cpus=float(allocation.cpus[at]),
                        memory_bytes=float(allocation.memory_bytes[at]),
                    )
                    for at in pieces
                ),
            )
        return granted

    def _grants_on(
        self, rows: Sequence[int], now_s: float, jobs: Sequence[LiveJob]
    ) -> dict[int, Granted]:
        """Return what jobs get on some of the servers; who can never run on them waits."""
        if not rows:
            return {}
        there = Decider(
            _part_of(self.servers, rows),
            self.policy,
            round_s=self._rules.round_s,
            restart_s=self._rules.restart_s,
            quotas=self._quotas,
        )
        new_row = {row: new for new, row in enumerate(rows)}
        moved = []
        for each in jobs:
            try:
                there.check(each.job)
            except PartitaError:
                continue
            if all(piece.server in new_row for piece in each.held):
                held = tuple(replace(one, server=new_row[one.server]) for one in each.held)
                moved.append(replace(each, held=held))
            else:
                moved.append(replace(each, held=(), speed=0.0, lease_s=0.0))
        return {
            job: replace(
                granted,
                pieces=tuple(replace(piece, server=rows[piece.server]) for piece in granted.pieces),
            )
            for job, granted in there.grants(now_s, moved).items()
        }

    def snapshot(self, now_s: float, ranked: Sequence[LiveJob]) -> Snapshot:
        """Return what the policy sees of jobs that are sorted by arrival."""
        state = self._state([each.job for each in ranked])
        state.active = np.arange(len(ranked), dtype=np.int64)
        state.remaining = _floats(each.remaining for each in ranked)
        state.attained_s = _floats(each.attained_s for each in ranked)
        state.lease_s = _floats(each.lease_s for each in ranked)
        state.speed = _floats(each.speed for each in ranked)
        held = [(row, piece) for row, each in enumerate(ranked) for piece in each.held]
        state.held = (
            _longs(row for row, _ in held),
            _longs(piece.server for _, piece in held),
            _longs(piece.gpus for _, piece in held),
        )
        return state.snapshot(now_s)

    def _state(self, jobs: Sequence[Job]) -> State:
        """Return the state of jobs of which none has run; quotas of other tenants do not matter."""
        trace = trace_of(_distinctly_named(jobs))
        quotas = {name: gpus for name, gpus in self._quotas.items() if name in trace.tenants}
        return first_state(trace, self.servers, replace(self._rules, quotas=quotas))


def _part_of(servers: Servers, rows: Sequence[int]) -> Servers:
    keep = np.array(rows)
    return replace(
        servers,
        names=tuple(servers.names[row] for row in rows),
        gpu_type=servers.gpu_type[keep],
        gpus=servers.gpus[keep],
        cpus=servers.cpus[keep],
        memory_bytes=servers.memory_bytes[keep],
        storage_bytes_per_s=servers.storage_bytes_per_s[keep],
    )


def _distinctly_named(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs with names of sensitivities that are distinct, as a trace wants them."""
    parts = {id(job.sensitivity): job.sensitivity for job in jobs}
    if len({part.name for part in parts.values()}) == len(parts):
        return list(jobs)
    named = {
        key: replace(part, name=f"{number} {part.name}")
        for number, (key, part) in enumerate(parts.items())
    }
    return [replace(job, sensitivity=named[id(job.sensitivity)]) for job in jobs]


def _floats(values: Iterable[float]) -> Floats:
    return np.fromiter(values, dtype=np.float64)


def _longs(values: Iterable[int]) -> Longs:
    return np.fromiter(values, dtype=np.int64)
