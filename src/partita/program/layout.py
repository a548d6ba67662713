"""Who does what in a plan, as columns: shared by lowering, checking and the memory model."""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.graph import Graph
from partita.core.plan import Plan


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
