"""The model as a graph of ops, tensors and parameters, held in columns.

An op is a node. A tensor has one producer (an op, or the model's input) and any number of readers;
an edge says that an op reads a tensor, so five readers on one remote device are one transfer. A
parameter has a name and the ops that use it, so tied weights are one parameter.

Costs are seconds for one batch of ``batch_size`` samples on one type of device; a graph may hold
them for several types. Everything is checked when a graph is made; no check recurses over depth.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from partita.core.columns import (
    MAX_BYTES,
    MAX_FLOPS,
    MAX_SECONDS,
    Array,
    Bytes8,
    Columns,
    Flags,
    Floats,
    Ints,
    Longs,
    column,
    every,
    frozen_array,
    frozen_json,
    group_rows,
    names,
    start,
)
from partita.core.order import topological_order
from partita.errors import InvalidInputError

DTYPE_BYTES: Mapping[str, float] = {
    "float64": 8,
    "float32": 4,
    "tfloat32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


MAX_COUNT = 2**31
"""Samples and tokens stay below, so that they fit the columns of a plan."""
MODEL_ANNOTATION = "model"
"""Annotation that says how the model is built: plans of a graph that has it can be run."""


class Phase(IntEnum):
    """When an op runs: with the forward pass, or (imported graphs) as an explicit backward op."""

    FORWARD = 0
    BACKWARD = 1


class DeviceKind(StrEnum):
    """Kind of a device; an accelerator of any make is a ``gpu``."""

    GPU = "gpu"
    CPU = "cpu"


KIND_BIT: Mapping[DeviceKind, int] = {DeviceKind.GPU: 1, DeviceKind.CPU: 2}
ANY_KIND = 3


class CostOrigin(StrEnum):
    """Origin of the seconds of an op."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    PUBLISHED = "published"
    GENERATED = "generated"


class SampleUnit(StrEnum):
    """Unit of ``batch_size``: samples, or published minibatches of unknown size."""

    SAMPLE = "sample"
    MINIBATCH = "minibatch"


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels(Columns):
    """A name for each op out of a short list, such as its layer.

    Attributes:
        names: The distinct names, in order.
        of: Index into ``names`` for each op; -1 = none.
    """

    names: tuple[str, ...] = ()
    of: Ints = start([], np.int32)

    def __post_init__(self) -> None:
        self._set(names=names(self.names, "labels"))
        top = len(self.names) - 1
        self._set(of=column(self.of, np.int32, np.size(self.of), "label", low=-1, high=top))


@dataclass(frozen=True, kw_only=True, eq=False)
class OpTable(Columns):
    """The ops, a row each; only ``names`` is needed.

    Attributes:
        names: Unique names, module paths where there are modules.
        fixed_share: Share of an op's time, 0 to 1, that does not grow with the samples.
        flops: Floating-point operations of the forward pass.
        saved_bytes: Bytes that forward keeps for backward, besides parameters.
        saved_fixed_bytes: The part of ``saved_bytes`` that does not grow with the samples.
        workspace_bytes: Scratch memory while the op runs.
        phase: ``Phase`` of the op.
        colocation: Ops with the same class >= 0 must share a device; -1 = free.
        device_kinds: Bits of ``KIND_BIT`` that may run the op.
        types: Name of what the op computes, such as ``Conv2d``.
        layers: The layer as published partitions count them.
        blocks: The repeated block, such as a transformer layer.
        modules: The path of the module that the op belongs to.
    """

    names: tuple[str, ...]
    fixed_share: Floats = every(0.0)
    flops: Floats = every(0.0)
    saved_bytes: Floats = every(0.0)
    saved_fixed_bytes: Floats = every(0.0)
    workspace_bytes: Floats = every(0.0)
    phase: Bytes8 = every(0)
    colocation: Ints = every(-1)
    device_kinds: Bytes8 = every(ANY_KIND)
    types: Labels = field(default_factory=Labels)
    layers: Labels = field(default_factory=Labels)
    blocks: Labels = field(default_factory=Labels)
    modules: Labels = field(default_factory=Labels)

    def __post_init__(self) -> None:
        rows = names(self.names, "ops")
        if not rows:
            raise InvalidInputError("a graph needs at least one op, got none")
        self._set(
            names=rows,
            fixed_share=column(self.fixed_share, np.float64, rows, "fixed_share", high=1),
            flops=column(self.flops, np.float64, rows, "flops", high=MAX_FLOPS),
            saved_bytes=column(self.saved_bytes, np.float64, rows, "saved_bytes", high=MAX_BYTES),
            saved_fixed_bytes=column(
                self.saved_fixed_bytes, np.float64, rows, "saved_fixed_bytes", high=MAX_BYTES
            ),
            workspace_bytes=column(
                self.workspace_bytes, np.float64, rows, "workspace_bytes", high=MAX_BYTES
            ),
            phase=column(self.phase, np.int8, rows, "phase", high=1),
            colocation=column(self.colocation, np.int32, rows, "colocation", low=-1),
            device_kinds=column(self.device_kinds, np.int8, rows, "device_kinds", low=1, high=3),
        )
        if bool((self.saved_fixed_bytes > self.saved_bytes).any()):
            row = int(np.argmax(self.saved_fixed_bytes > self.saved_bytes))
            raise InvalidInputError(f"op {rows[row]!r}: saved_fixed_bytes exceed saved_bytes")
        for what in ("types", "layers", "blocks", "modules"):
            labels: Labels = getattr(self, what)
            if len(labels.of) not in (0, len(rows)):
                raise InvalidInputError(f"{what} label {len(labels.of)} of {len(rows)} ops")

    def __len__(self) -> int:
        return len(self.names)

    def saved_at(self, share: float) -> Floats:
        """Return what forward keeps of a microbatch that is a share of the batch."""
        fixed = self.saved_fixed_bytes
        return fixed + (self.saved_bytes - fixed) * share

    def time_factor(self, share: float, microbatches: float = 1.0) -> Floats:
        """Return how many times its seconds each op takes for microbatches, a share in all."""
        return self.fixed_share * microbatches + (1 - self.fixed_share) * share

    def time_parts(self, seconds: Floats) -> tuple[Floats, Floats]:
        """Return the seconds of each op that every microbatch takes, and those that grow."""
        return seconds * self.fixed_share, seconds * (1 - self.fixed_share)


@dataclass(frozen=True, kw_only=True, eq=False)
class OpCosts(Columns):
    """Seconds of every op on one type of device, for one batch.

    Attributes:
        device_type: The type, such as ``"a100"``; empty = any type, as the device's speed says.
        origin: Origin of the figures.
        forward_s: Forward time.
        backward_s: Backward time, both parts.
        backward_input_s: The part that computes the gradient of the inputs; NaN = not known.
        peak_flop_per_s: Peak rate of the device they hold for, 0 = not known. With
            ``memory_bytes_per_s`` it lets the cost model scale to a type without costs.
        memory_bytes_per_s: Memory bandwidth of that device, 0 = not known.
    """

    device_type: str = ""
    origin: CostOrigin = CostOrigin.PUBLISHED
    forward_s: Floats
    backward_s: Floats = every(0.0)
    backward_input_s: Floats = every(np.nan)
    peak_flop_per_s: float = 0.0
    memory_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        rows = np.size(self.forward_s)
        self._set(
            forward_s=column(self.forward_s, np.float64, rows, "forward_s", high=MAX_SECONDS),
            backward_s=column(self.backward_s, np.float64, rows, "backward_s", high=MAX_SECONDS),
            backward_input_s=column(
                self.backward_input_s,
                np.float64,
                rows,
                "backward_input_s",
                unknown=True,
                high=MAX_SECONDS,
            ),
        )
        for what in ("peak_flop_per_s", "memory_bytes_per_s"):
            value = getattr(self, what)
            if not 0 <= value < float("inf"):
                raise InvalidInputError(
                    f"{what} of costs for {self.device_type or 'any device'!r} is {value}; "
                    "expected 0 or more, finite"
                )
        with np.errstate(invalid="ignore"):
            wrong = self.backward_input_s > self.backward_s
        if bool(wrong.any()):
            raise InvalidInputError(
                f"backward_input_s of row {int(np.argmax(wrong))} exceeds backward_s"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorTable(Columns):
    """The tensors that ops and the model's inputs produce.

    Attributes:
        names: Unique names.
        producer: The op that makes it; -1 = an input of the model.
        bytes: Size for one batch.
        fixed_bytes: The part that does not grow with the samples (masks, position biases).
        transfer_s: Seconds to move it between devices, where a file gives times; NaN = from bytes.
        differentiable: Whether a gradient of it flows back.
        load_s: Seconds to load it, for inputs of the model.
    """

    names: tuple[str, ...] = ()
    producer: Ints = start([], np.int32)
    bytes: Floats = every(0.0)
    fixed_bytes: Floats = every(0.0)
    transfer_s: Floats = every(np.nan)
    differentiable: Flags = every(True)
    load_s: Floats = every(0.0)

    def __post_init__(self) -> None:
        rows = names(self.names, "tensors")
        self._set(
            names=rows,
            producer=column(self.producer, np.int32, rows, "tensor producer", low=-1),
            bytes=column(self.bytes, np.float64, rows, "tensor bytes", high=MAX_BYTES),
            fixed_bytes=column(
                self.fixed_bytes, np.float64, rows, "tensor fixed_bytes", high=MAX_BYTES
            ),
            transfer_s=column(
                self.transfer_s, np.float64, rows, "transfer_s", high=MAX_SECONDS, unknown=True
            ),
            differentiable=column(self.differentiable, np.bool_, rows, "differentiable"),
            load_s=column(self.load_s, np.float64, rows, "load_s", high=MAX_SECONDS),
        )
        if bool((self.fixed_bytes > self.bytes).any()):
            row = int(np.argmax(self.fixed_bytes > self.bytes))
            raise InvalidInputError(f"tensor {rows[row]!r}: fixed_bytes exceed bytes")

    def __len__(self) -> int:
        return len(self.names)

    def bytes_at(
        self,
        samples: float | Array,
        batch_size: float = 1.0,
        rows: Array | slice = slice(None),
    ) -> Floats:
        """Return the sizes of tensors for some samples of a batch.

        Args:
            samples: The samples, broadcast against the rows.
            batch_size: Samples of the batch; 1 = ``samples`` are a share of it already.
            rows: The tensors.
        """
        fixed = self.fixed_bytes[rows]
        # Divided last, so that whole bytes stay whole: messages are rounded up.
        result: Floats = fixed + (self.bytes[rows] - fixed) * samples / batch_size
        return result


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgeTable(Columns):
    """Readers of tensors. Edges into one op are in the order of its arguments.

    Attributes:
        tensor: The tensor read.
        reader: The op that reads it.
        keeper: Where the reader keeps the tensor for backward, the op whose ``saved_bytes`` have
            it: the first one that does; -1 = it does not keep it, or that is not known.
    """

    tensor: Ints = start([], np.int32)
    reader: Ints = start([], np.int32)
    keeper: Ints = every(-1)

    def __post_init__(self) -> None:
        rows = np.size(self.tensor)
        self._set(
            tensor=column(self.tensor, np.int32, rows, "edge tensor"),
            reader=column(self.reader, np.int32, rows, "edge reader"),
            keeper=column(self.keeper, np.int32, rows, "edge keeper", low=-1),
        )

    def __len__(self) -> int:
        return len(self.tensor)


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterTable(Columns):
    """Parameters and buffers, and the ops that use them.

    Attributes:
        names: Unique names.
        bytes: Size of each.
        dtypes: A key of ``DTYPE_BYTES`` for each.
        trainable: Whether it has a gradient and is updated; never for buffers.
        buffer: Whether it is a buffer (batch norm statistics), changed in forward only.
        copy_bytes: Copy in the type of the arithmetic that training keeps beside it, one for a
            step, whatever the microbatches in flight.
        expert: Whether it belongs to experts, which a stage may divide in another way.
        use_op: With ``use_parameter``: pairs of an op and a parameter that it uses.
        use_parameter: See ``use_op``.
    """

    names: tuple[str, ...] = ()
    bytes: Floats = every(0.0)
    dtypes: tuple[str, ...] = ()
    trainable: Flags = every(True)
    buffer: Flags = every(False)
    copy_bytes: Floats = every(0.0)
    expert: Flags = every(False)
    use_op: Ints = start([], np.int32)
    use_parameter: Ints = start([], np.int32)

    def __post_init__(self) -> None:
        rows = names(self.names, "parameters")
        dtypes = tuple(self.dtypes) or ("float32",) * len(rows)
        unknown = set(dtypes) - set(DTYPE_BYTES)
        if unknown or len(dtypes) != len(rows):
            raise InvalidInputError(
                f"parameter dtypes {sorted(unknown)} are not known; there are {sorted(DTYPE_BYTES)}"
                if unknown
                else f"{len(dtypes)} dtypes for {len(rows)} parameters"
            )
        uses = np.size(self.use_op)
        self._set(
            names=rows,
            dtypes=dtypes,
            bytes=column(self.bytes, np.float64, rows, "parameter bytes", high=MAX_BYTES),
            trainable=column(self.trainable, np.bool_, rows, "trainable"),
            buffer=column(self.buffer, np.bool_, rows, "buffer"),
            copy_bytes=column(self.copy_bytes, np.float64, rows, "copy_bytes", high=MAX_BYTES),
            expert=column(self.expert, np.bool_, rows, "expert"),
            use_op=column(self.use_op, np.int32, uses, "op of a parameter use"),
            use_parameter=column(
                self.use_parameter, np.int32, uses, "parameter of a use", high=len(rows) - 1
            ),
        )
        if bool((self.trainable & self.buffer).any()):
            row = int(np.argmax(self.trainable & self.buffer))
            raise InvalidInputError(f"buffer {rows[row]!r} cannot be trainable")

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def elements(self) -> Floats:
        """Number of elements of each parameter."""
        sizes = {name: DTYPE_BYTES[name] for name in set(self.dtypes)}
        return frozen_array(
            self.bytes / np.array([sizes[name] for name in self.dtypes] or 1.0), np.float64
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class VariantTable(Columns):
    """Other ways to run an op: split over several devices, or recomputing its activations.

    A row gives what one of ``tp`` devices does. Boundary synchronisation is given per edge: rows
    ``sync_in_ptr[v]`` to ``sync_in_ptr[v+1]`` of ``sync_in_bytes`` follow the in-edges of the op in
    their order, ``sync_out_*`` its out-edges.

    Attributes:
        op: The op.
        tp: Tensor-parallel degree.
        recompute: Whether activations are recomputed in backward.
        forward_s: Forward seconds of one batch.
        backward_s: Backward seconds, recomputation included.
        parameter_bytes: Parameters held by one device.
        saved_bytes: Kept for backward, for each batch in flight.
        fixed_memory_bytes: Memory that does not depend on the batches in flight.
    """

    op: Ints = start([], np.int32)
    tp: Ints = every(1)
    recompute: Flags = every(False)
    forward_s: Floats = every(0.0)
    backward_s: Floats = every(0.0)
    parameter_bytes: Floats = every(0.0)
    saved_bytes: Floats = every(0.0)
    fixed_memory_bytes: Floats = every(0.0)
    sync_in_ptr: Ints = start([0], np.int32)
    sync_in_bytes: Floats = start([], np.float64)
    sync_out_ptr: Ints = start([0], np.int32)
    sync_out_bytes: Floats = start([], np.float64)

    def __post_init__(self) -> None:
        rows = np.size(self.op)
        self._set(
            op=column(self.op, np.int32, rows, "variant op"),
            tp=column(self.tp, np.int32, rows, "variant tp", low=1),
            recompute=column(self.recompute, np.bool_, rows, "variant recompute"),
        )
        for what in ("forward_s", "backward_s"):
            self._set(
                **{what: column(getattr(self, what), np.float64, rows, what, high=MAX_SECONDS)}
            )
        for what in ("parameter_bytes", "saved_bytes", "fixed_memory_bytes"):
            self._set(**{what: column(getattr(self, what), np.float64, rows, what, high=MAX_BYTES)})
        for side in ("in", "out"):
            values = getattr(self, f"sync_{side}_bytes")
            ptr = np.asarray(getattr(self, f"sync_{side}_ptr"))
            if ptr.shape == (1,) and rows:
                ptr = np.zeros(rows + 1, dtype=np.int32)
            ptr = column(ptr, np.int32, rows + 1, f"sync_{side}_ptr", high=np.size(values))
            if bool((np.diff(ptr) < 0).any()) or ptr[0] != 0 or ptr[-1] != np.size(values):
                raise InvalidInputError(f"variant sync_{side}_ptr does not cover its values")
            size = np.size(values)
            self._set(
                **{
                    f"sync_{side}_ptr": ptr,
                    f"sync_{side}_bytes": column(
                        values, np.float64, size, f"sync_{side}_bytes", high=MAX_BYTES
                    ),
                }
            )
        keys = list(zip(self.op.tolist(), self.tp.tolist(), self.recompute.tolist(), strict=True))
        if len(set(keys)) != len(keys):
            raise InvalidInputError("two variants of one op have the same tp and recompute")

    def __len__(self) -> int:
        return len(self.op)

    @cached_property
    def row_of(self) -> Mapping[tuple[int, int, bool], int]:
        """Row of each (op, tp, recompute)."""
        keys = zip(self.op.tolist(), self.tp.tolist(), self.recompute.tolist(), strict=True)
        return {key: row for row, key in enumerate(keys)}


EMBEDDING, BLOCK, HEAD = range(3)
"""Kinds of ops of a transformer in :class:`DegreeTable`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DegreeTable(Columns):
    """Costs of ops that several devices divide: by tensor, context and expert parallelism.

    Ops of one kind cost the same, such as the equal blocks of a transformer. A row gives what one
    device does for one batch at one set of degrees, without communication; that is given as calls
    of a size, for the cost model to price on the links of the stage: all-gathers (or reduce-
    scatters, which take as long) among tensor- and context-parallel ranks, all-to-alls among the
    devices that divide the experts.

    Attributes:
        kind_of: The kind of each op; -1 = its costs are those of the graph, divided evenly.
        device_types: Types of devices that rows name.
        recompute_sets: Sets of activations that rows name, such as ``"none"`` and ``"full"``.
        kind: The kind of op.
        device_type: Index into ``device_types``.
        tp: Tensor-parallel degree.
        cp: Context-parallel degree.
        ep: Expert-parallel degree.
        recompute: Index into ``recompute_sets``.
        forward_s: Forward seconds.
        backward_s: Backward seconds, without recomputation.
        recompute_s: Seconds of recomputation.
        saved_bytes: Bytes that forward keeps for backward.
        workspace_bytes: Scratch memory while the op runs, with what recomputation brings back.
        tensor_bytes: Bytes of a call among tensor-parallel ranks.
        tensor_calls: Calls in forward that compute waits for; may be a fraction where a part hides.
        tensor_calls_back: Such calls in backward.
        context_bytes: Likewise among context-parallel ranks.
        context_calls: Likewise.
        context_calls_back: Likewise.
        expert_bytes: Likewise among the devices that divide the experts.
        expert_calls: Likewise.
        expert_calls_back: Likewise.
    """

    kind_of: Ints = start([], np.int32)
    device_types: tuple[str, ...] = ()
    recompute_sets: tuple[str, ...] = ()
    kind: Ints = start([], np.int32)
    device_type: Ints = every(0)
    tp: Ints = every(1)
    cp: Ints = every(1)
    ep: Ints = every(1)
    recompute: Ints = every(0)
    forward_s: Floats = every(0.0)
    backward_s: Floats = every(0.0)
    recompute_s: Floats = every(0.0)
    saved_bytes: Floats = every(0.0)
    workspace_bytes: Floats = every(0.0)
    tensor_bytes: Floats = every(0.0)
    tensor_calls: Floats = every(0.0)
    tensor_calls_back: Floats = every(0.0)
    context_bytes: Floats = every(0.0)
    context_calls: Floats = every(0.0)
    context_calls_back: Floats = every(0.0)
    expert_bytes: Floats = every(0.0)
    expert_calls: Floats = every(0.0)
    expert_calls_back: Floats = every(0.0)

    def __post_init__(self) -> None:
        rows, ops = np.size(self.kind), np.size(self.kind_of)
        top = max(len(self.device_types) - 1, 0), max(len(self.recompute_sets) - 1, 0)
        self._set(
            device_types=names(self.device_types, "device types of degrees"),
            recompute_sets=names(self.recompute_sets, "sets of recomputation"),
            kind=column(self.kind, np.int32, rows, "kind of op of degrees"),
            kind_of=column(self.kind_of, np.int32, ops, "kind of op", low=-1),
            device_type=column(self.device_type, np.int32, rows, "device type", high=top[0]),
            recompute=column(self.recompute, np.int32, rows, "set of recomputation", high=top[1]),
        )
        for what in ("tp", "cp", "ep"):
            self._set(**{what: column(getattr(self, what), np.int32, rows, what, low=1)})
        for what in ("forward_s", "backward_s", "recompute_s"):
            values = column(getattr(self, what), np.float64, rows, what, high=MAX_SECONDS)
            self._set(**{what: values})
        sizes = ("saved", "workspace", "tensor", "context", "expert")
        for what in (f"{part}_bytes" for part in sizes):
            values = column(getattr(self, what), np.float64, rows, what, high=MAX_BYTES)
            self._set(**{what: values})
        for part in ("tensor", "context", "expert"):
            for what in (f"{part}_calls", f"{part}_calls_back"):
                self._set(**{what: column(getattr(self, what), np.float64, rows, what, high=1e6)})
        if len(self.row_of) != rows:
            raise InvalidInputError(
                "two rows of degrees have the same kind, device type, degrees and recomputation"
            )

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def row_of(self) -> Mapping[tuple[int, str, int, int, int, str], int]:
        """Row of each (kind, device type, tp, cp, ep, set of recomputation)."""
        columns = (self.kind, self.device_type, self.tp, self.cp, self.ep, self.recompute)
        keys = zip(*(part.tolist() for part in columns), strict=True)
        return {
            (kind, self.device_types[of], tp, cp, ep, self.recompute_sets[again]): row
            for row, (kind, of, tp, cp, ep, again) in enumerate(keys)
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph(Columns):
    """A model, with its costs.

    Attributes:
        name: Its name in tables.
        ops: The ops.
        costs: Seconds by device type; the first is the reference.
        tensors: The tensors.
        edges: Readers of tensors.
        parameters: Parameters and buffers.
        variants: Tensor-parallel and recomputing variants of ops.
        degrees: Costs of ops at degrees of tensor, context and expert parallelism.
        outputs: Tensors that the model returns.
        loss: The tensor that training differentiates; -1 = none is known.
        batch_size: Samples that the costs and bytes stand for.
        sample_unit: Unit of a sample.
        tokens_per_sample: Tokens in a sample; 0 = not a token model.
        dtype: Type of the arithmetic, for peak rates.
        annotations: Fields of a foreign file that no column holds, by name of the format.
    """

    name: str = "graph"
    ops: OpTable
    costs: tuple[OpCosts, ...]
    tensors: TensorTable = field(default_factory=TensorTable)
    edges: EdgeTable = field(default_factory=EdgeTable)
    parameters: ParameterTable = field(default_factory=ParameterTable)
    variants: VariantTable = field(default_factory=VariantTable)
    degrees: DegreeTable = field(default_factory=DegreeTable)
    outputs: Ints = start([], np.int32)
    loss: int = -1
    batch_size: int = 1
    sample_unit: SampleUnit = SampleUnit.SAMPLE
    tokens_per_sample: int = 0
    dtype: str = "float32"
    annotations: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        top_tensor = len(self.tensors) - 1
        outputs = np.size(self.outputs)
        self._set(
            outputs=column(self.outputs, np.int32, outputs, "outputs", high=top_tensor),
            annotations=frozen_json(self.annotations, "annotations"),
            costs=tuple(self.costs),
        )
        self._check_scalars(top_tensor)
        self._check_references()
        self._check_costs()
        _ = self.topological_order

    def _check_scalars(self, top_tensor: int) -> None:
        if not self.name:
            raise InvalidInputError("a graph needs a name, got ''")
        if not -1 <= self.loss <= top_tensor:
            raise InvalidInputError(
                f"loss is tensor {self.loss}; there are {top_tensor + 1} tensors"
            )
        for what, value, least in (
            ("batch_size", self.batch_size, 1),
            ("tokens_per_sample", self.tokens_per_sample, 0),
        ):
            if not least <= value < MAX_COUNT:
                raise InvalidInputError(f"{what} is {value}; expected {least} to {MAX_COUNT - 1}")
        if self.dtype not in DTYPE_BYTES:
            raise InvalidInputError(f"dtype {self.dtype!r} is not one of {sorted(DTYPE_BYTES)}")

    def _check_references(self) -> None:
        num_ops = len(self.ops)
        for what, values, limit in (
            ("tensor producer", self.tensors.producer, num_ops),
            ("edge tensor", self.edges.tensor, len(self.tensors)),
            ("edge reader", self.edges.reader, num_ops),
            ("edge keeper", np.maximum(self.edges.keeper, 0), max(1, num_ops)),
            ("op of a parameter use", self.parameters.use_op, num_ops),
            ("variant op", self.variants.op, num_ops),
        ):
            if values.size and int(values.max()) >= limit:
                row = int(np.argmax(values))
                raise InvalidInputError(f"{what} of row {row} is {values[row]}; there are {limit}")
        if len(self.degrees.kind_of) not in (0, num_ops):
            raise InvalidInputError(
                f"degrees know the kinds of {len(self.degrees.kind_of)} ops; there are {num_ops}"
            )

    def _check_costs(self) -> None:
        if not self.costs:
            raise InvalidInputError("a graph needs costs for at least one type of device")
        types = [costs.device_type for costs in self.costs]
        if len(set(types)) != len(types):
            raise InvalidInputError(f"costs for one device type stand twice in {types}")
        for costs in self.costs:
            if len(costs.forward_s) != len(self.ops):
                raise InvalidInputError(
                    f"costs for {costs.device_type or 'any device'!r} have {len(costs.forward_s)} "
                    f"rows for {len(self.ops)} ops"
                )

    def __len__(self) -> int:
        return len(self.ops)

    @property
    def forward_s(self) -> Floats:
        """Forward seconds of the reference costs."""
        return self.costs[0].forward_s

    @property
    def backward_s(self) -> Floats:
        """Backward seconds of the reference costs."""
        return self.costs[0].backward_s

    @cached_property
    def edge_source(self) -> Ints:
        """The op that each edge comes from; -1 = an input of the model."""
        return frozen_array(self.tensors.producer[self.edges.tensor], np.int32)

    @cached_property
    def in_edges(self) -> tuple[Longs, Longs]:
        """Edges into each op: ``(ptr, edges)``, in the order of arguments."""
        return group_rows(self.edges.reader, len(self.ops))

    @cached_property
    def out_edges(self) -> tuple[Longs, Longs]:
        """Edges out of each op: ``(ptr, edges)``; edges from inputs of the model are left out."""
        inner = np.flatnonzero(self.edge_source >= 0)
        pointers, rows = group_rows(self.edge_source[inner], len(self.ops))
        return pointers, inner[rows]

    @cached_property
    def topological_order(self) -> Ints:
        """The ops, every producer before its readers; ties by index."""
        inner = self.edge_source >= 0
        order = topological_order(
            len(self.ops), self.edge_source[inner], self.edges.reader[inner], self.ops.names
        )
        return frozen_array(order, np.int32)

    @cached_property
    def is_forward(self) -> Flags:
        """Whether each op belongs to the forward pass."""
        return frozen_array(self.ops.phase == Phase.FORWARD, np.bool_)

    @cached_property
    def parameter_bytes(self) -> Floats:
        """Bytes of all parameters that each op uses, shared ones counted for each op."""
        uses = self.parameters
        total = np.bincount(
            uses.use_op, weights=uses.bytes[uses.use_parameter], minlength=len(self.ops)
        )
        return frozen_array(total, np.float64)

    @cached_property
    def size_bytes(self) -> Floats:
        """Bytes of the parameters of each op and of what it keeps for backward: how large it is."""
        return frozen_array(self.parameter_bytes + self.ops.saved_bytes, np.float64)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the structure: ops, tensors, edges, parameters; not of costs or batch size."""
        digest = hashlib.sha256()
        for values in (self.ops.names, self.tensors.names, self.parameters.names):
            digest.update("\0".join(values).encode("utf-8", "surrogatepass"))
            digest.update(b"\1")
        digest.update("\0".join(self.parameters.dtypes).encode())
        for array in (
            self.ops.phase,
            self.tensors.producer,
            self.edges.tensor,
            self.edges.reader,
            self.parameters.bytes + 0.0,  # -0.0 is no other graph
            self.parameters.use_op,
            self.parameters.use_parameter,
            self.outputs,
        ):
            digest.update(array.tobytes())
            digest.update(b"\1")
        digest.update(str(self.loss).encode())
        return digest.hexdigest()[:32]
