"""The state of one job: a function of what was told, in its order.

Versions count from 1. A version ends when every rank has reported on it, or when a straggler
changes the clocks; once clocks are deployed, reports only count rounds.
"""

from collections.abc import Callable, Mapping, Sequence

from partita.core.energy import Frontier
from partita.energy.policies.base import Deployment, Scheduler, State
from partita.energy.policies.job import Job, Rank, Result, Straggler
from partita.energy.policies.solving import SolveTask
from partita.errors import PartitaError

MakeScheduler = Callable[[Job, Sequence[Rank]], Scheduler]


class Session:
    """A job between its registration and its end.

    After each event, as long as ``due``, the owner calls ``needs``, solves, and calls ``advance``;
    only then the next event is told.

    Args:
        job: The job.
        make: Returns the scheduler once all ranks are known.

    Attributes:
        version: The version in force; 0 = none yet.
        deployment: The clocks in force.
        failure: Why there are none, where there cannot be any.
        ranks: The ranks that have registered.
        results: What ranks reported on the version in force.
        stragglers: Who is slow, by whom it is.
    """

    def __init__(self, job: Job, make: MakeScheduler) -> None:
        self.job = job
        self._make = make
        self.scheduler: Scheduler | None = None
        self.version = 0
        self.deployment: Deployment | None = None
        self.failure = ""
        self.ranks: dict[int, Rank] = {}
        self.results: dict[int, Result] = {}
        self.stragglers: dict[tuple[int | None, int | None], Straggler] = {}
        self.due = False

    @property
    def missing(self) -> list[int]:
        """Ranks that have not registered."""
        return [rank for rank in range(self.job.world_size) if rank not in self.ranks]

    @property
    def silent(self) -> list[int]:
        """Ranks that have not reported on the version in force."""
        return [rank for rank in range(self.job.world_size) if rank not in self.results]

    @property
    def settled(self) -> bool:
        """Whether reports change nothing any more."""
        return self.deployment is not None and self.deployment.state is State.DEPLOYED

    def add_rank(self, rank: Rank) -> None:
        """Take a rank; with the last one the first version is due."""
        self.ranks[rank.rank] = rank
        self.due = self.due or (not self.version and len(self.ranks) == self.job.world_size)

    def add_result(self, result: Result) -> None:
        """Take a report; the later one of a rank counts, one on an old version does not."""
        if result.version != self.version or self.scheduler is None:
            return
        self.results[result.rank] = result
        if len(self.results) < self.job.world_size:
            return
        if self.settled:
            self.version += 1
            self.results = {}
            return
        self.scheduler.observe([self.results[rank] for rank in sorted(self.results)])
        self.due = True

    def straggle(self, straggler: Straggler) -> None:
        """Take word of a straggler, or that there is none any more."""
        if straggler.clears:
            self.stragglers.pop(straggler.who, None)
        else:
            self.stragglers[straggler.who] = straggler
        self._tell_stragglers()

    def clear_stragglers(self, rank: int | None) -> None:
        """Forget the straggler that a rank is, or all of them."""
        for who in list(self.stragglers):
            if rank is None or who[0] == rank:
                del self.stragglers[who]
        self._tell_stragglers()

    def resume(self, version: int, stragglers: Sequence[Straggler]) -> None:
        """Take up where a job with deployed clocks was: its version and its stragglers."""
        self.stragglers = {one.who: one for one in stragglers}
        self._tell_stragglers()
        self.version = version - int(self.due)
        self.results = {}

    def _tell_stragglers(self) -> None:
        if self.scheduler is not None and self.scheduler.straggle(tuple(self.stragglers.values())):
            self.due = True

    def needs(self) -> tuple[SolveTask, ...]:
        """Return what has to be solved before ``advance``; makes the scheduler, which may fail."""
        try:
            if self.scheduler is None:
                ranks = [self.ranks[rank] for rank in sorted(self.ranks)]
                self.scheduler = self._make(self.job, ranks)
                self.scheduler.straggle(tuple(self.stragglers.values()))
            return self.scheduler.needs()
        except PartitaError as exc:
            self.fail(str(exc))
            return ()

    def next(self, solved: Mapping[str, Frontier]) -> Deployment | None:
        """Return the clocks of the next version; ``None`` where there cannot be any."""
        if not self.due or self.scheduler is None:
            return None
        try:
            return self.scheduler.next(solved)
        except PartitaError as exc:
            return self.instead(str(exc))

    def instead(self, reason: str) -> Deployment | None:
        """Return the clocks to set where what is due cannot be had.

        Training that has begun goes on; a job that cannot have clocks gets none.
        """
        if self.deployment is None:
            self.fail(reason)
            return None
        return self.at_highest(reason)

    def at_highest(self, reason: str) -> Deployment | None:
        """Return the highest clocks, for a job that goes on without what is due.

        ``None`` where clocks are deployed, which stay, and where there is no scheduler.
        """
        self.fail(reason)
        if self.scheduler is None or self.settled:
            return None
        top = [self.ranks[rank].top_mhz for rank in sorted(self.ranks)]
        return self.scheduler.uniform(top, state=State.DEPLOYED, note=reason)

    def install(self, deployment: Deployment | None) -> None:
        """Put clocks in force; with ``None`` those that are in force stay."""
        self.due = False
        if deployment is not None:
            self.failure = ""
            self.deployment = deployment
            self.version += 1
            self.results = {}

    def fail(self, reason: str) -> None:
        """Say why what is due cannot be had."""
        self.failure = reason
        self.due = False
