"""From the jobs that are there to what each is granted: the one place where the policy is asked.

The policy is that of the simulator, over the snapshot that the simulator's own state makes. Nothing
here decides anything; it only writes how the jobs stand and reads the allocation.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from partita.core.columns import Floats, Longs
from partita.core.fleet import Job, trace_of
from partita.fleet.engines.devices import Piece
from partita.fleet.policies.resources import Servers
from partita.fleet.policies.snapshot import Snapshot
from partita.fleet.policies.table import Policy
from partita.fleet.simulate.options import Rules
from partita.fleet.simulate.state import State, first_state


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
        restart_s: What a restart costs a job that does not say.
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

    def grants(self, now_s: float, jobs: Sequence[LiveJob]) -> dict[int, Granted]:
        """Return what each job gets in the round that starts now; who is not there waits."""
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
                        memory_gb=float(allocation.memory_gb[at]),
                    )
                    for at in pieces
                ),
            )
        return granted

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
