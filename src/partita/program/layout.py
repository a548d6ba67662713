"""Layout of a plan, as columns: devices of stages, tensors that cross them, reductions.

Shared by lowering, checking and the memory model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.graph import Graph
from partita.core.plan import Plan, Shard
from partita.core.precision import wire_bytes
from partita.core.problem import Mode, Problem
from partita.errors import InvalidInputError


class Layout:
    """The devices of every stage, replica and rank.

    Attributes:
        plan: The plan.
        ranks: Devices of a replica of each stage.
        tensor_parts: Parts in which the ranks of each stage hold a tensor between stages.
        replicas: Number of replicas of each stage.
        round: Microbatches in a round of each stage.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        index = plan.stage_index
        distinct = list(index)
        of = np.fromiter((index[stage] for stage in plan.stages), np.int64, len(plan.stages))
        flat = [device for stage in distinct for group in stage.devices for device in group]
        sizes = [len(stage) for stage in distinct]
        self._flat = np.array(flat, dtype=np.int32)
        self._base = (np.cumsum([0, *sizes])[:-1])[of]
        self.ranks = np.array([stage.ranks for stage in distinct], dtype=np.int32)[of]
        self.tensor_parts = np.array([s.tensor_parts for s in distinct], dtype=np.int32)[of]
        self.replicas = np.array([stage.num_replicas for stage in distinct], dtype=np.int32)[of]
        self.round = np.array([stage.round for stage in distinct], dtype=np.int32)[of]
        self._of = of
        self._distinct = distinct

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.ranks)

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
        result: Array = self._flat[self._base[stage] + replica * self.ranks[stage] + rank]
        return result

    def members(self, stage: int, rank: int) -> list[int]:
        """Return the devices of one rank in all replicas of a stage."""
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


class Divisions(NamedTuple):
    """Division of the parameters of each stage; columns: dense ones, and those of experts.

    Attributes:
        parts: Parts that devices hold.
        group: Devices that divide the state of a part among themselves, where it is sharded.
    """

    parts: Array
    group: Array


def divisions(plan: Plan) -> Divisions:
    """Return how the stages of a plan divide their parameters."""
    index = plan.stage_index
    of = np.array([index[stage] for stage in plan.stages])
    parts = [(stage.parts(), stage.parts(experts=True)) for stage in index]
    group = [(stage.shard_size(), stage.shard_size(experts=True)) for stage in index]
    return Divisions(np.array(parts)[of], np.array(group)[of])


Members = tuple[tuple[int, ...], tuple[int, ...]]
"""Devices, and for each of them the lowest stage there that owns the parameters."""


@dataclass(frozen=True)
class Bucket:
    """Trainable parameters that the same stages own and divide alike, reduced together.

    Attributes:
        index: Row of the Program's bucket table.
        stages: The owning stages, ascending.
        reduced_bytes: Bytes of a part in a reduction.
        gathered_bytes: Bytes of a part's weights in a gather.
        teams: For each part of the parameters the devices that hold it, and for each of them the
            lowest owning stage there; empty where nobody shares them.
        sharding: For each group that divides the state of a part the same; as ``teams`` where
            whole teams do.
        shard: What such a group divides.
    """

    index: int
    stages: tuple[int, ...]
    reduced_bytes: int
    gathered_bytes: int
    teams: tuple[Members, ...]
    sharding: tuple[Members, ...]
    shard: Shard

    @property
    def is_shared(self) -> bool:
        """Whether several devices hold the parameters, so that a reduction is needed."""
        return len(self.teams) > 0


@dataclass(frozen=True)
class Reductions:
    """All buckets of a plan.

    Attributes:
        buckets: The buckets.
        parameters: The parameters of each bucket.
        own: The buckets of parameters that a stage shares with no other.
        updating: The stages that update parameters, ascending.
        tied: For stages that own shared parameters only: the devices where they step them.
    """

    buckets: tuple[Bucket, ...]
    parameters: tuple[Array, ...]
    own: Mapping[int, tuple[Bucket, ...]]
    updating: tuple[int, ...]
    tied: Mapping[int, frozenset[int]]

    def steps(self, device: int, stage: int) -> bool:
        """Return whether a stage updates parameters on a device."""
        return stage in self.own or device in self.tied.get(stage, ())


def reductions(problem: Problem, plan: Plan) -> Reductions:
    """Return the buckets of a plan; in inference those that are gathered, which nobody updates.

    Raises:
        InvalidInputError: Tied parameters on stages of different tensor-parallel degree, or with
            weight stashing.
    """
    infers = problem.objective.mode is Mode.INFERENCE
    table = problem.graph.parameters
    parameter, stage = owners(problem.graph, plan)
    used = table.trainable[parameter]
    if infers:
        used &= gathered_in_inference(problem.graph, plan)[parameter]
    parameter, stage = parameter[used], stage[used]
    count = np.bincount(parameter, minlength=len(table))
    members: dict[tuple[tuple[int, ...], bool], Array] = {}
    # Parameters of experts are reduced apart only where the stage divides them in another way.
    apart = np.array([part.ep > 1 for part in plan.stages])
    single = count[parameter] == 1
    alone, home = parameter[single], stage[single]
    at = 2 * home + (table.expert[alone] & apart[home])
    order = np.argsort(at, kind="stable")
    alone, at = alone[order], at[order]
    for part in np.split(np.arange(len(at)), np.flatnonzero(np.diff(at)) + 1) if len(at) else []:
        owner, experts = divmod(int(at[part[0]]), 2)
        members[(owner,), bool(experts)] = alone[part]
    for shared in np.flatnonzero(count > 1).tolist():
        key = (tuple(stage[parameter == shared].tolist()), False)
        members[key] = np.append(members.get(key, np.array([], dtype=np.int64)), shared)
    found = _assemble(problem, plan, members)
    return replace(found, updating=(), tied={}) if infers else found


def gathered_in_inference(graph: Graph, plan: Plan) -> Array:
    """Return which parameters the replicas of a stage hold in parts while nothing is trained."""
    table = graph.parameters
    parameter, stage = owners(graph, plan)
    divides = [part.shard is Shard.PARAMETERS and len(part.teams()[0]) > 1 for part in plan.stages]
    found = np.zeros(len(table), dtype=bool)
    found[parameter[np.array(divides)[stage]]] = True
    # Tied parameters are whole everywhere.
    found &= (np.bincount(parameter, minlength=len(table)) == 1) & table.trainable
    return found


def _assemble(
    problem: Problem, plan: Plan, members: Mapping[tuple[tuple[int, ...], bool], Array]
) -> Reductions:
    names = problem.graph.parameters.names
    buckets: list[Bucket] = []
    own: dict[int, tuple[Bucket, ...]] = {}
    tied: dict[int, frozenset[int]] = {}
    for index, (key, rows) in enumerate(members.items()):
        stages, _ = key
        if len(stages) > 1:
            _check_tied(plan, stages, names[int(rows[0])])
            for device, lowest in _lowest_stage(plan, stages).items():
                tied[lowest] = tied.get(lowest, frozenset()) | {device}
        bucket = _bucket(problem, plan, index, key, rows)
        buckets.append(bucket)
        if len(stages) == 1:
            own[stages[0]] = (*own.get(stages[0], ()), bucket)
    updating = tuple(sorted(set(own) | set(tied)))
    return Reductions(tuple(buckets), tuple(members.values()), own, updating, tied)


def _check_tied(plan: Plan, stages: tuple[int, ...], name: str) -> None:
    if plan.stashes_weights:
        raise InvalidInputError(
            f"parameter {name!r} is tied over stages {list(stages)}; schedule "
            f"{plan.schedule.value!r} keeps versions of each stage alone; use a schedule that "
            "flushes, or keep them in one stage"
        )
    degrees = sorted({plan.stages[stage].tp for stage in stages})
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
    problem: Problem, plan: Plan, index: int, key: tuple[tuple[int, ...], bool], rows: Array
) -> Bucket:
    stages, experts = key
    first = plan.stages[stages[0]]
    wire = wire_bytes(problem.graph.parameters, problem.objective.precision)
    lowest = _lowest_stage(plan, stages)
    # Team i of every stage holds part i, so that tied parameters are reduced over all of them.
    by_stage = [plan.stages[stage].teams(experts=experts) for stage in stages]
    teams = [sorted(set().union(*parts)) for parts in zip(*by_stage, strict=True)]

    def with_stages(devices: Sequence[int]) -> Members:
        return tuple(devices), tuple(lowest[device] for device in devices)

    def part(size_bytes: Array) -> int:
        return int(np.ceil(float(size_bytes[rows].sum()) / first.parts(experts=experts)))

    shared = len(teams[0]) > 1
    shard = first.shard if shared and len(stages) == 1 else Shard.NONE
    groups = [group for team in teams for group in first.divide(team, experts=experts)]
    return Bucket(
        index=index,
        stages=stages,
        reduced_bytes=part(wire.reduced),
        gathered_bytes=part(wire.gathered),
        teams=tuple(map(with_stages, teams)) if shared else (),
        sharding=tuple(map(with_stages, groups)) if shard is not Shard.NONE else (),
        shard=shard,
    )
