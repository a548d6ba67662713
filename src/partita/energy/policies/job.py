"""What the ranks of a training job tell the energy server, as frozen data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from partita.core.energy import EnergyOrigin, EnergyProfile
from partita.core.schedules import DEFAULT_SCHEDULE, Schedule
from partita.core.solution import Solution
from partita.energy.frontier.choose import PointLimits

Samples = Mapping[str, tuple[tuple[float, ...], ...]]
"""Figures by name of instruction: for each iteration one for each such instruction, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job: data-parallel pipelines of stages of tensor-parallel ranks.

    Attributes:
        pp: Stages of a pipeline.
        dp: Pipelines.
        tp: Ranks that share a stage.
        schedule: Order of the microbatches, where no solution says.
        microbatches: Microbatches of a step in each pipeline; ``None`` = nobody has said.
        solution: The plan that runs; its Program then holds all ranks, replicas included.
        wish: What the deployed point has to keep.
        profile: Seconds and joules by clock, where they are known beforehand.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    schedule: Schedule = DEFAULT_SCHEDULE
    microbatches: int | None = None
    solution: Solution | None = None
    wish: PointLimits = field(default_factory=PointLimits)
    profile: EnergyProfile | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    @property
    def pipelines(self) -> int:
        """Programs that run side by side; a solution is one that holds all ranks."""
        return 1 if self.solution is not None else self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process of a job and the device it drives.

    Attributes:
        rank: Its number in the job.
        dp_rank: Its pipeline.
        pp_rank: Its stage.
        tp_rank: Its place among those that share the stage.
        clocks_mhz: Clocks that can be set, highest first; empty = none can.
        instructions: Names of the instructions of one step, in order; empty = as the schedule has
            them.
        device_type: Type of the device; ``""`` = unknown.
        device: Its name in the solution; ``""`` = the one at the place of the rank.
        origin: Where its joules come from.
        blocking_w: Its power while it waits; ``None`` = unknown.
    """

    rank: int
    dp_rank: int = 0
    pp_rank: int = 0
    tp_rank: int = 0
    clocks_mhz: tuple[int, ...] = ()
    instructions: tuple[str, ...] = ()
    device_type: str = ""
    device: str = ""
    origin: EnergyOrigin = EnergyOrigin.MEASURED
    blocking_w: float | None = None

    @property
    def top_mhz(self) -> int:
        """Its highest clock; 0 = leave the clock alone."""
        return self.clocks_mhz[0] if self.clocks_mhz else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a rank measured while a schedule was in force.

    Attributes:
        rank: Who.
        version: Of the schedule.
        iteration_s: Seconds of each iteration.
        iteration_j: Joules of each iteration; empty = unknown.
        seconds: Seconds of the instructions.
        joules: Joules of the instructions; a name that is absent is unknown.
    """

    rank: int
    version: int
    iteration_s: tuple[float, ...]
    iteration_j: tuple[float, ...] = ()
    seconds: Samples = field(default_factory=dict)
    joules: Samples = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Somebody who is slower than planned.

    With a rank it is a device of this job that takes ``slowdown`` times as long; with a pipeline
    that pipeline of the job; with neither a pipeline that the server does not know.

    Attributes:
        rank: The slow rank.
        dp_rank: The slow pipeline.
        slowdown: How many times as long it takes; 1 = not a straggler any more.
        iteration_s: How long its steps take, for a pipeline, where that is known instead.
    """

    rank: int | None = None
    dp_rank: int | None = None
    slowdown: float | None = None
    iteration_s: float | None = None

    @property
    def who(self) -> tuple[int | None, int | None]:
        """Whom it speaks of; a later word about the same replaces the earlier one."""
        return self.rank, None if self.rank is not None else self.dp_rank

    @property
    def clears(self) -> bool:
        """Whether it says that there is no straggler any more."""
        return self.iteration_s is None and (self.slowdown is None or self.slowdown <= 1)
