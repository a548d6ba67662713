"""The instructions of a job's ranks, and where they stand in the Program of their pipeline."""

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from partita.core.codec import write_json
from partita.core.columns import Array
from partita.core.energy import EnergyProfile
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.program import Kind, Program
from partita.energy.frontier.clock_plan import NAMES, Entry
from partita.energy.policies.job import Job, Rank
from partita.energy.policies.solving import Shape, shaped
from partita.errors import InvalidInputError
from partita.program.lower import lower

CLOCKED = (
    Kind.FORWARD,
    Kind.RECOMPUTE,
    Kind.BACKWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
)
"""Kinds that schedules list for ranks that do not name their instructions, as Zeus's do."""

KIND_OF = {name: kind for kind, name in NAMES.items()}
"""The kind of an instruction by the name that ranks use."""

MAX_INSTRUCTIONS = 2**20
"""Forwards of one pipeline that the server lowers."""


class Workload:
    """The ranks of a job as devices of a Program; pipelines of one shape share it.

    Args:
        job: The job.
        ranks: All of its ranks, in order.
    """

    def __init__(self, job: Job, ranks: Sequence[Rank]) -> None:
        self.job = job
        self.ranks = tuple(ranks)

    @cached_property
    def microbatches(self) -> int:
        """Microbatches of a step: as the job says, or as many as a rank names forwards.

        Raises:
            InvalidInputError: Nobody says.
        """
        if self.job.microbatches is not None:
            return self.job.microbatches
        named = [rank.instructions.count("forward") for rank in self.ranks if rank.instructions]
        if not named or not max(named):
            raise InvalidInputError(
                "the number of microbatches is not known; register the job with num_microbatches "
                "or pipe_schedule, or start the server with --microbatches"
            )
        return max(named)

    @cached_property
    def shape(self) -> Shape:
        """The pipeline as text.

        Raises:
            InvalidInputError: It is too large, or the microbatches are not known.
        """
        job = self.job
        if job.solution is not None:
            return Shape(solution=write_json(job.solution))
        if job.pp * self.microbatches > MAX_INSTRUCTIONS:
            raise InvalidInputError(
                f"{job.pp} stages of {self.microbatches} microbatches are more than "
                f"{MAX_INSTRUCTIONS} instructions"
            )
        return Shape(
            stages=job.pp,
            tensor_parallel=job.tp,
            microbatches=self.microbatches,
            schedule=job.schedule,
        )

    @cached_property
    def _lowered(self) -> tuple[Problem, Plan, Program]:
        if self.job.solution is not None:
            problem, plan = self.job.solution.problem, self.job.solution.plan
            return problem, plan, lower(problem, plan)
        return _lowered_stages(self.shape)

    @property
    def program(self) -> Program:
        """The Program of one pipeline."""
        return self._lowered[2]

    def device(self, rank: int) -> int:
        """Return the device of a rank in the Program.

        Raises:
            InvalidInputError: The solution has no such device.
        """
        who = self.ranks[rank]
        if self.job.solution is None:
            return who.pp_rank * self.job.tp + who.tp_rank
        devices = self.program.devices
        if not who.device and rank < len(devices):
            return rank
        if who.device not in devices:
            raise InvalidInputError(
                f"rank {rank}: the solution has no device {who.device or rank!r}; it has "
                f"{', '.join(devices[:8])}"
            )
        return devices.index(who.device)

    def pipeline(self, rank: int) -> int:
        """Return the pipeline that a rank belongs to."""
        return 0 if self.job.solution is not None else self.ranks[rank].dp_rank

    def device_types(self, pipeline: int) -> tuple[str, ...]:
        """Return the type of each device of a pipeline: as its rank says, or as the plan does."""
        problem, _, program = self._lowered
        types = [problem.cluster.devices[problem.cluster.index_of[n]].type for n in program.devices]
        if self.job.solution is None:
            types = [""] * len(types)
        for who in self.ranks:
            if self.pipeline(who.rank) == pipeline and who.device_type:
                types[self.device(who.rank)] = who.device_type
        return tuple(types)

    def together(self, device: int) -> list[int]:
        """Return the devices that share every instruction of a device, itself included."""
        _, plan, program = self._lowered
        name = program.devices[device]
        for stage in plan.stages:
            for group in stage.devices:
                members = [plan.devices[member] for member in group]
                if name in members:
                    return [program.devices.index(member) for member in members]
        return [device]

    def stages(self, rank: int, name: str) -> list[int]:
        """Return the stage of each instruction of a name in a step of a rank, in order."""
        rows = self._rows(rank, name)
        found: list[int] = self.program.stage[rows].tolist()
        return found

    def names(self, rank: int) -> tuple[str, ...]:
        """Return the names of the instructions of a rank's step."""
        if self.ranks[rank].instructions:
            return self.ranks[rank].instructions
        return self._named[self.device(rank)]

    @cached_property
    def _named(self) -> list[tuple[str, ...]]:
        wanted = {int(kind): NAMES[kind] for kind in CLOCKED}
        program, kinds = self.program, self.program.kind.tolist()
        bounds = program.ptr.tolist()
        return [
            tuple(wanted[kind] for kind in kinds[start:end] if kind in wanted)
            for start, end in itertools.pairwise(bounds)
        ]

    def entries(self, rank: int, clocks: Array) -> tuple[Entry, ...]:
        """Return the clocks of a rank's instructions.

        The k-th instruction of a name gets the clock of the k-th such row of its device. Names
        without rows, such as transfers, keep the clock of what came before them.

        Args:
            rank: The rank.
            clocks: The clock of each row of the Program; 0 = none is set.

        Raises:
            InvalidInputError: The rank names more or fewer instructions than the Program has.
        """
        names = self.names(rank)
        rows = {name: self._rows(rank, name) for name in set(names)}
        for name, count in Counter(names).items():
            if len(rows[name]) not in (0, count):
                raise InvalidInputError(
                    f"rank {rank} names {count} x {name!r} in a step, its plan has "
                    f"{len(rows[name])}"
                )
        turn = dict.fromkeys(rows, 0)
        last, found = 0, []
        for name in names:
            if len(rows[name]):
                last = round(float(clocks[rows[name][turn[name]]])) or last
                turn[name] += 1
            found.append((name, last))
        return tuple(found)

    def _rows(self, rank: int, name: str) -> Array:
        """Return the rows of the Program that a rank calls by a name."""
        program, device = self.program, self.device(rank)
        start, end = int(program.ptr[device]), int(program.ptr[device + 1])
        kind = KIND_OF.get(name)
        if kind is None:
            return np.zeros(0, np.int64)
        rows: Array = start + np.flatnonzero(program.kind[start:end] == int(kind))
        return rows


@lru_cache(maxsize=64)
def _lowered_stages(shape: Shape) -> tuple[Problem, Plan, Program]:
    """Return the Program of bare stages; many jobs have the same."""
    problem, plan = shaped(shape, _any_profile(shape.stages))
    return problem, plan, lower(problem, plan)


def _any_profile(stages: int) -> EnergyProfile:
    """Return a profile of which only the number of stages matters."""
    kinds = [int(Kind.FORWARD), int(Kind.BACKWARD)]
    return EnergyProfile(
        stage=np.repeat(np.arange(stages), len(kinds)),
        kind=np.tile(kinds, stages),
        clock_mhz=np.ones(stages * len(kinds)),
        seconds=np.ones(stages * len(kinds)),
        joules=np.ones(stages * len(kinds)),
    )
