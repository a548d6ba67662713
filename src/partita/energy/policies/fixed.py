"""Schedulers that do not look at results: highest clocks, two clocks, plans from files."""

from collections.abc import Mapping, Sequence
from typing import Any

from partita.core.energy import Frontier
from partita.energy.frontier.clock_plan import NAMES, Entry
from partita.energy.policies.base import Deployment, Scheduler, State, positive
from partita.energy.policies.job import Job, Rank, Result
from partita.energy.policies.workload import CLOCKED
from partita.errors import InvalidInputError

NamedPlan = tuple[str, tuple[tuple[Entry, ...], ...]]
"""The name of a file and its clocks by stage or by rank; entries of bare clocks have no name."""

_COMPUTE = frozenset(NAMES[kind] for kind in CLOCKED)


class AllMax(Scheduler):
    """Every instruction at the highest clock of its device: the baseline."""

    def next(self, solved: Mapping[str, Frontier]) -> Deployment:
        """Return the one schedule there is."""
        del solved
        return self.uniform([rank.top_mhz for rank in self.ranks], state=State.DEPLOYED)


class TwoFrequencies(Scheduler):
    """One clock for forwards and one for everything else.

    Args:
        job: The job.
        ranks: Its ranks.
        forward_freq: Clock of forwards, in MHz.
        backward_freq: Clock of all other instructions.
    """

    def __init__(
        self, job: Job, ranks: Sequence[Rank], *, forward_freq: int, backward_freq: int
    ) -> None:
        super().__init__(job, ranks)
        self.forward, self.backward = forward_freq, backward_freq
        for rank in self.ranks:
            for clock in (forward_freq, backward_freq):
                if rank.clocks_mhz and clock not in rank.clocks_mhz:
                    raise InvalidInputError(
                        f"rank {rank.rank} cannot be set to {clock} MHz; it has "
                        f"{rank.clocks_mhz[0]} down to {rank.clocks_mhz[-1]}"
                    )

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuse values of options that no job can have."""
        for name, clock in options.items():
            positive(name, clock)

    def next(self, solved: Mapping[str, Frontier]) -> Deployment:
        """Return the one schedule there is."""
        del solved
        entries = tuple(
            tuple(
                (name, self.forward if name == "forward" else self.backward)
                for name in self.workload.names(rank.rank)
            )
            for rank in self.ranks
        )
        return Deployment(state=State.DEPLOYED, entries=entries)


class PointSolution(Scheduler):
    """Clocks from plan files, one after the other; the last stays.

    A plan has a list for each rank, or for each stage: then all ranks of a stage get it.

    Args:
        job: The job.
        ranks: Its ranks.
        plans: The plans, read as literals and never run.
    """

    def __init__(self, job: Job, ranks: Sequence[Rank], *, plans: Sequence[NamedPlan]) -> None:
        super().__init__(job, ranks)
        self.plans = plans
        self.place = 0
        for name, plan in plans:
            if len(plan) not in (job.world_size, job.pp):
                raise InvalidInputError(
                    f"{name} has {len(plan)} lists of clocks; the job has {job.world_size} ranks "
                    f"in {job.pp} stages"
                )

    def next(self, solved: Mapping[str, Frontier]) -> Deployment:
        """Return the schedule of the plan that is in turn."""
        del solved
        name, plan = self.plans[self.place]
        by_rank = len(plan) == self.job.world_size
        entries = tuple(
            self._named(rank, plan[rank.rank if by_rank else rank.pp_rank], name)
            for rank in self.ranks
        )
        last = self.place == len(self.plans) - 1
        return Deployment(state=State.DEPLOYED if last else State.PROFILING, entries=entries)

    def observe(self, results: Sequence[Result]) -> None:
        """Turn to the next plan."""
        del results
        self.place = min(self.place + 1, len(self.plans) - 1)

    def _named(self, rank: Rank, entries: tuple[Entry, ...], plan: str) -> tuple[Entry, ...]:
        """Return entries with the names of a rank's instructions where a plan has clocks alone.

        A plan has a clock for each instruction, or for those that compute: the others, such as
        transfers, then keep the clock of what came before them.
        """
        if all(name for name, _ in entries) and not rank.instructions:
            return entries
        names = self.workload.names(rank.rank)
        clocked = [name in _COMPUTE for name in names]
        if len(entries) == len(names):
            clocked = [True] * len(names)
        if len(entries) != sum(clocked):
            raise InvalidInputError(
                f"{plan} has {len(entries)} clocks for rank {rank.rank}, which runs {len(names)} "
                f"instructions in a step, {sum(clocked)} of them compute"
            )
        found: list[Entry] = []
        clocks = iter(entries)
        last = 0
        for at, (name, own) in enumerate(zip(names, clocked, strict=True)):
            if own:
                named, last = next(clocks)
                if named not in ("", name):
                    raise InvalidInputError(
                        f"{plan} has {named!r} for instruction {at} of rank {rank.rank}, which "
                        f"runs {name!r}"
                    )
            found.append((name, last))
        return tuple(found)
