"""Plans as the search changes them: stages over units, devices by their number in the cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapify, heapreplace
from itertools import pairwise

import numpy as np

from partita.core.columns import Array
from partita.core.plan import Plan, Shard, Stage, equal_microbatches
from partita.core.problem import Problem, Schedule
from partita.cost.condensed import Candidate
from partita.cost.durations import cluster_devices
from partita.planners.auto.frame import Batch, Frame
from partita.planners.lattice.quotient import Quotient


@dataclass(frozen=True, kw_only=True, eq=False)
class Sketch:
    """A plan over units.

    Attributes:
        stage_of: The stage of each unit; along every edge it does not fall.
        stages: The stages; their devices are numbers of the cluster's.
        recompute: Whether each unit recomputes its activations.
        schedule: The schedule.
        batch: The microbatches.
    """

    stage_of: Array
    stages: tuple[Stage, ...]
    recompute: Array
    schedule: Schedule
    batch: Batch

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for equal sketches."""
        cut = np.asarray(self.stage_of, dtype=np.int32).tobytes()
        again = np.asarray(self.recompute, dtype=bool).tobytes()
        return (cut, self.stages, again, self.schedule, self.batch)

    @cached_property
    def used(self) -> tuple[int, ...]:
        """The devices that it uses, in order of their first stage."""
        return tuple(
            dict.fromkeys(d for stage in self.stages for group in stage.devices for d in group)
        )

    @cached_property
    def is_divided(self) -> bool:
        """Whether every device runs one stage."""
        return sum(stage.num_replicas * stage.tp for stage in self.stages) == len(self.used)

    @property
    def candidate(self) -> Candidate:
        """The same for ``cost.condensed``."""
        return Candidate(
            stage_of=self.stage_of,
            stages=self.stages,
            recompute=self.recompute,
            schedule=self.schedule,
            microbatches=self.batch.count,
            size=self.batch.size,
        )

    def members(self, stage: int) -> Array:
        """Return the units of a stage, ascending."""
        return np.flatnonzero(self.stage_of == stage)

    def plan(self, problem: Problem, units: Quotient) -> Plan:
        """Return the plan that it stands for.

        Raises:
            InvalidInputError: Shares that do not divide the microbatches, or an empty stage.
        """
        number = {device: index for index, device in enumerate(self.used)}
        stages = tuple(
            Stage(
                devices=tuple(tuple(number[d] for d in group) for group in stage.devices),
                shares=stage.shares,
                shard=stage.shard,
            )
            for stage in self.stages
        )
        return Plan(
            fingerprint=problem.graph.fingerprint,
            devices=tuple(problem.cluster.device_names[d] for d in self.used),
            stage_of=self.stage_of[units.node_of],
            stages=stages,
            schedule=self.schedule,
            microbatch_sizes=equal_microbatches(self.batch.count, self.batch.size),
            recompute=self.recompute[units.node_of],
        )


def sketch_of(frame: Frame, plan: Plan) -> Sketch | None:
    """Return a plan as a sketch; ``None`` where its stages or its recomputation cut a unit."""
    node_of, count = frame.units.node_of, frame.num_units
    size = int(plan.microbatch_sizes[0])
    if bool((plan.microbatch_sizes != size).any()):
        return None
    stage_of = np.zeros(count, dtype=np.int64)
    stage_of[node_of] = plan.stage_of
    again = np.zeros(count, dtype=bool)
    again[node_of] = plan.recompute
    whole = np.array_equal(stage_of[node_of], plan.stage_of)
    if not whole or not np.array_equal(again[node_of], plan.recompute):
        return None
    number = cluster_devices(frame.problem, plan.devices).tolist()
    stages = tuple(
        Stage(
            devices=tuple(tuple(number[d] for d in group) for group in stage.devices),
            shares=stage.shares,
            shard=stage.shard,
        )
        for stage in plan.stages
    )
    return Sketch(
        stage_of=stage_of,
        stages=stages,
        recompute=again,
        schedule=plan.schedule,
        batch=Batch(count=plan.num_microbatches, size=size),
    )


def shape(sketch: Sketch) -> tuple[object, ...]:
    """Return what makes pipelines differ most: the replicas of their stages, and recomputation."""
    replicas = tuple(stage.num_replicas for stage in sketch.stages)
    return (replicas, sketch.is_divided, bool(sketch.recompute.any()))


def structure(sketch: Sketch) -> tuple[object, ...]:
    """Return what makes plans differ for people: their shape, and how several stages take turns."""
    alone = len(sketch.stages) == 1
    return (*shape(sketch), None if alone else sketch.schedule)


def replicated(
    devices: Sequence[int], shares: Sequence[int] = (), shard: Shard = Shard.NONE
) -> Stage:
    """Return a stage with one replica on each device; one alone has nothing to shard."""
    return Stage(
        devices=tuple((device,) for device in devices),
        shares=tuple(shares),
        shard=shard if len(devices) > 1 else Shard.NONE,
    )


def cut_order(order: Array, boundaries: Sequence[int]) -> Array:
    """Return the stage of each unit, stage k = places from boundary k up to boundary k + 1."""
    stage_of = np.empty(len(order), dtype=np.int64)
    for stage, (begin, end) in enumerate(pairwise(boundaries)):
        stage_of[order[begin:end]] = stage
    return stage_of


@lru_cache(maxsize=4096)
def fair_shares(speeds: tuple[float, ...], count: int) -> tuple[int, ...] | None:
    """Return how many microbatches of a round each replica takes, or ``None`` if none fits.

    The round divides ``count``; the replica that takes longest, share over speed, takes as short as
    possible. Ties go to the shorter round.

    >>> fair_shares((1.0, 1.0), 8), fair_shares((2.0, 1.0), 9), fair_shares((1.0,) * 3, 8)
    ((1, 1), (2, 1), (3, 3, 2))
    """
    best: tuple[float, tuple[int, ...]] | None = None
    for length in range(len(speeds), count + 1):
        if count % length:
            continue
        shares = _apportioned(speeds, length)
        slowest = max(share / speed for share, speed in zip(shares, speeds, strict=True)) / length
        if best is None or slowest < best[0] * (1 - 1e-9):
            best = (slowest, shares)
    return None if best is None else best[1]


def _apportioned(speeds: tuple[float, ...], length: int) -> tuple[int, ...]:
    """Return whole shares of at least one that sum to ``length``: each next to who has it soonest.

    >>> _apportioned((2.0, 1.0), 4)
    (3, 1)
    """
    shares = [1] * len(speeds)
    # When each would have its next one; ties go to the first.
    soonest = [(2 / speed, turn) for turn, speed in enumerate(speeds)]
    heapify(soonest)
    for _ in range(length - len(speeds)):
        _, turn = soonest[0]
        shares[turn] += 1
        heapreplace(soonest, ((shares[turn] + 1) / speeds[turn], turn))
    return tuple(shares)
