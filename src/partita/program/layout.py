"""Layout of a plan, as columns: devices of stages, tensors that cross them, reductions.

Shared by lowering, checking and the memory model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.graph import Graph
from partita.core.plan import Plan, Shard
from partita.core.problem import Mode, Problem
from partita.errors import InvalidInputError


class Layout:
    """The devices of every stage, replica and tensor-parallel rank.

    Attributes:
        plan: The plan.
        tp: Tensor-parallel degree of each stage.
        replicas: Number of replicas of each stage.
        round: Microbatches in a round of each stage.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        index = plan.stage_index
        distinct = list(index)
        of = np.fromiter((index[stage] for stage in plan.stages), np.int64, len(plan.stages))
        flat = [device for stage in distinct for group in stage.devices for device in group]
        sizes = [stage.num_replicas * stage.tp for stage in distinct]
        self._flat = np.array(flat, dtype=np.int32)
        self._base = (np.cumsum([0, *sizes])[:-1])[of]
        self.tp = np.array([stage.tp for stage in distinct], dtype=np.int32)[of]
        self.replicas = np.array([stage.num_replicas for stage in distinct], dtype=np.int32)[of]
        self.round = np.array([stage.round for stage in distinct], dtype=np.int32)[of]
        self._of = of
        self._distinct = distinct

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.tp)

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches."""
        return self.plan.num_microbatches

    @cached_property
    def replica_of(self) -> Array:
        """The replica of each (stage, microbatch)."""
        turns = np.arange(self.num_microbatches)
        routes = np.stack([np.array(s.route)[turns % s.round] for s in self._distinct])
        return routes.astype(np.int32)[self._of]

    def device(self, stage: Array, microbatch: Array, rank: Array | int = 0) -> Array:
        """Return the device of a rank of the replica that runs (stage, microbatch)."""
        replica = self.replica_of[stage, microbatch]
        result: Array = self._flat[self._base[stage] + replica * self.tp[stage] + rank]
        return result

    def members(self, stage: int, rank: int) -> list[int]:
        """Return the devices with one tensor-parallel rank in all replicas of a stage."""
        return [group[rank] for group in self.plan.stages[stage].devices]


class Crossings(NamedTuple):
    """Tensors that cross from a stage to a later one, a row for each reading stage.

    Attributes:
        tensor: The tensor.
        producer: Stage that makes it.
        reader: Stage that reads it. Rows are sorted by tensor and reader.
    """

    tensor: Array
    producer: Array
    reader: Array


def crossings(graph: Graph, plan: Plan) -> Crossings:
    """Return the tensors that cross stages in the forward pass."""
    source = graph.edge_source
    inner = np.flatnonzero(source >= 0)
    forward = graph.is_forward[source[inner]] & graph.is_forward[graph.edges.reader[inner]]
    inner = inner[forward]
    producer, reader = plan.stage_of[source[inner]], plan.stage_of[graph.edges.reader[inner]]
    cut = producer != reader
    tensor, reader = _unique_pairs(graph.edges.tensor[inner[cut]], reader[cut], len(plan.stages))
    return Crossings(tensor, plan.stage_of[graph.tensors.producer[tensor]], reader)


def input_readers(graph: Graph, plan: Plan) -> tuple[Array, Array]:
    """Return pairs of a model input and a stage whose forward ops read it."""
    edges = np.flatnonzero((graph.edge_source < 0) & graph.is_forward[graph.edges.reader])
    stage = plan.stage_of[graph.edges.reader[edges]]
    return _unique_pairs(graph.edges.tensor[edges], stage, len(plan.stages))


def owners(graph: Graph, plan: Plan) -> tuple[Array, Array]:
    """Return pairs of a parameter (or buffer) and a stage that uses it."""
    table = graph.parameters
    return _unique_pairs(table.use_parameter, plan.stage_of[table.use_op], len(plan.stages))


def _unique_pairs(first: Array, second: Array, size: int) -> tuple[Array, Array]:
    keys: Array = np.unique(first.astype(np.int64) * size + second)
    return (keys // size).astype(np.int32), (keys % size).astype(np.int32)


def tensor_bytes(graph: Graph, samples: Array, tensor: Array) -> Array:
    """Return the bytes of tensors for numbers of samples (broadcast together)."""
    table = graph.tensors
    fixed = table.fixed_bytes[tensor]
    return fixed + (table.bytes[tensor] - fixed) * samples / graph.batch_size


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
