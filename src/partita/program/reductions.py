"""Which parameters are reduced together, over which devices, and who updates them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from partita.core.columns import Array
from partita.core.plan import Plan, Shard
from partita.core.problem import Mode, Problem
from partita.errors import InvalidInputError
from partita.program.layout import Layout, owners


@dataclass(frozen=True)
class Bucket:
    """Trainable parameters that the same stages own, reduced together.

    Attributes:
        index: Row of the Program's bucket table.
        stages: The owning stages, ascending.
        bytes_per_rank: Bytes that one tensor-parallel rank reduces.
        groups: For each tensor-parallel rank the devices, ascending, and for each of them the
            lowest owning stage there.
        shard: What the replicas divide.
    """

    index: int
    stages: tuple[int, ...]
    bytes_per_rank: int
    groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    shard: Shard

    @property
    def is_shared(self) -> bool:
        """Whether several devices hold the parameters, so that a reduction is needed."""
        return len(self.groups) > 0


@dataclass(frozen=True)
class Reductions:
    """All buckets of a plan.

    Attributes:
        buckets: The buckets.
        parameters: The parameters of each bucket.
        own: The bucket of parameters that a stage shares with no other.
        updating: The stages that update parameters, ascending.
        tied: For stages that own shared parameters only: the devices where they step them.
    """

    buckets: tuple[Bucket, ...]
    parameters: tuple[Array, ...]
    own: Mapping[int, Bucket]
    updating: tuple[int, ...]
    tied: Mapping[int, frozenset[int]]

    def steps(self, device: int, stage: int) -> bool:
        """Return whether a stage updates parameters on a device."""
        return stage in self.own or device in self.tied.get(stage, ())


def reductions(problem: Problem, plan: Plan, layout: Layout) -> Reductions:
    """Return the buckets of a plan.

    Raises:
        InvalidInputError: Tied parameters on stages of different tensor-parallel degree, or with
            weight stashing.
    """
    if problem.objective.mode is Mode.INFERENCE:
        return Reductions((), (), {}, (), {})
    table = problem.graph.parameters
    parameter, stage = owners(problem.graph, plan)
    trained = table.trainable[parameter]
    parameter, stage = parameter[trained], stage[trained]
    count = np.bincount(parameter, minlength=len(table))
    members: dict[tuple[int, ...], Array] = {}
    single = count[parameter] == 1
    by_stage = np.argsort(stage[single], kind="stable")
    alone, at = parameter[single][by_stage], stage[single][by_stage]
    for part in np.split(np.arange(len(at)), np.flatnonzero(np.diff(at)) + 1) if len(at) else []:
        members[(int(at[part[0]]),)] = alone[part]
    for shared in np.flatnonzero(count > 1).tolist():
        key = tuple(stage[parameter == shared].tolist())
        members[key] = np.append(members.get(key, np.array([], dtype=np.int64)), shared)
    return _assemble(problem, plan, layout, members)


def _assemble(
    problem: Problem, plan: Plan, layout: Layout, members: Mapping[tuple[int, ...], Array]
) -> Reductions:
    names = problem.graph.parameters.names
    buckets, own = [], {}
    tied: dict[int, frozenset[int]] = {}
    for index, (stages, rows) in enumerate(members.items()):
        if len(stages) > 1:
            _check_tied(plan, layout, stages, names[int(rows[0])])
            for device, lowest in _lowest_stage(plan, stages).items():
                tied[lowest] = tied.get(lowest, frozenset()) | {device}
        bucket = _bucket(problem, plan, index, stages, rows)
        buckets.append(bucket)
        if len(stages) == 1:
            own[stages[0]] = bucket
    updating = tuple(sorted(set(own) | set(tied)))
    return Reductions(tuple(buckets), tuple(members.values()), own, updating, tied)


def _check_tied(plan: Plan, layout: Layout, stages: tuple[int, ...], name: str) -> None:
    if plan.stashes_weights:
        raise InvalidInputError(
            f"parameter {name!r} is tied over stages {list(stages)}; schedule "
            f"{plan.schedule.value!r} keeps versions of each stage alone; use a schedule that "
            "flushes, or keep them in one stage"
        )
    degrees = sorted({int(layout.tp[stage]) for stage in stages})
    if len(degrees) > 1:
        raise InvalidInputError(
            f"parameter {name!r} is tied over stages {list(stages)} with tensor-parallel degrees "
            f"{degrees}; they must be equal"
        )


def _lowest_stage(plan: Plan, stages: tuple[int, ...]) -> dict[int, int]:
    lowest: dict[int, int] = {}
    for stage in stages:
        for group in plan.stages[stage].devices:
            for device in group:
                lowest.setdefault(device, stage)
    return lowest


def _bucket(
    problem: Problem, plan: Plan, index: int, stages: tuple[int, ...], rows: Array
) -> Bucket:
    first = plan.stages[stages[0]]
    size = float(problem.graph.parameters.bytes[rows].sum())
    groups = []
    if len(stages) > 1 or first.num_replicas > 1:
        lowest = _lowest_stage(plan, stages)
        for rank in range(first.tp):
            devices = sorted({group[rank] for s in stages for group in plan.stages[s].devices})
            groups.append((tuple(devices), tuple(lowest[device] for device in devices)))
    shared = len(groups) > 0 and len(groups[0][0]) > 1
    return Bucket(
        index=index,
        stages=stages,
        bytes_per_rank=int(np.ceil(size / first.tp)),
        groups=tuple(groups) if shared else (),
        shard=first.shard if len(stages) == 1 else Shard.NONE,
    )
