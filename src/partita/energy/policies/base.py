"""What every scheduler is: clocks for all ranks, one schedule after the other.

A scheduler is deterministic and knows no clock, file or network: the same ranks, results and
stragglers in the same order give the same schedules, so that a server that starts again gets where
it was by telling the scheduler again what it had been told.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from partita.core.energy import EnergyProfile, Frontier
from partita.energy.frontier.clock_plan import Entry
from partita.energy.policies.job import Job, Rank, Result, Straggler
from partita.energy.policies.solving import SolveTask
from partita.energy.policies.workload import Workload
from partita.errors import InvalidInputError


class State(StrEnum):
    """What a schedule is for."""

    PROFILING = "profiling"
    DEPLOYED = "deployed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The clocks of one step for all ranks.

    Attributes:
        state: What it is for.
        entries: By rank, in the order of its instructions.
        time_s: By rank, the predicted step of its pipeline; empty = nothing is predicted.
        energy_j: By rank, the predicted energy of that step, of all devices of the pipeline.
        note: What a person should know, such as why clocks stay at their highest.
        finished: Whether nothing is left to be profiled by a scheduler that only profiles.
    """

    state: State
    entries: tuple[tuple[Entry, ...], ...]
    time_s: tuple[float, ...] = ()
    energy_j: tuple[float, ...] = ()
    note: str = ""
    finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPoint:
    """Where a pipeline is on its frontier.

    Attributes:
        task: What was solved for it.
        frontier: The answer.
        point: The point that is deployed.
    """

    task: SolveTask
    frontier: Frontier
    point: int


class Scheduler(ABC):
    """Decides the clocks of all ranks of one job.

    The caller asks ``needs``, solves what it names, calls ``next`` with the answers, and then tells
    of results (all ranks of one schedule together) and stragglers.

    Attributes:
        solves: Whether ``needs`` will name frontiers once there is a profile.
    """

    solves: ClassVar[bool] = False

    def __init__(self, job: Job, ranks: Sequence[Rank]) -> None:
        self.job = job
        self.ranks = tuple(ranks)
        self.workload = Workload(job, self.ranks)

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuse values of options that no job can have.

        Raises:
            InvalidInputError: Names the option.
        """
        del options

    def needs(self) -> tuple[SolveTask, ...]:
        """Return the frontiers that ``next`` will ask for."""
        return ()

    @abstractmethod
    def next(self, solved: Mapping[str, Frontier]) -> Deployment:
        """Return the schedule that is in force from now on.

        Args:
            solved: The answers to ``needs``, by key.
        """

    def observe(self, results: Sequence[Result]) -> None:
        """Take what all ranks measured under the schedule in force, in the order of ranks."""
        del results

    def straggle(self, stragglers: Sequence[Straggler]) -> bool:
        """Take the stragglers that there are now; return whether that changes the schedule."""
        del stragglers
        return False

    @property
    def profile(self) -> EnergyProfile | None:
        """Seconds and joules by clock, as far as they are known."""
        return self.job.profile

    def chosen(self, pipeline: int) -> ChosenPoint | None:
        """Return where a pipeline is on its frontier; ``None`` = there is no frontier."""
        del pipeline
        return None

    def uniform(
        self, clocks: Sequence[int], *, state: State, note: str = "", finished: bool = False
    ) -> Deployment:
        """Return a deployment in which each rank has one clock."""
        entries = tuple(
            tuple((name, clock) for name in self.workload.names(rank.rank))
            for rank, clock in zip(self.ranks, clocks, strict=True)
        )
        return Deployment(state=state, entries=entries, note=note, finished=finished)


def positive(what: str, value: float) -> None:
    """Refuse an option that is not above 0.

    Raises:
        InvalidInputError: It is not.
    """
    if not 0 < value < math.inf:
        raise InvalidInputError(f"{what} is {value}; expected a number above 0")
