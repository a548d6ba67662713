"""Programs: the work of each device, instruction by instruction.

For each device the instructions stand in the order of issue. Compute instructions run one at a
time in that order. Communication is issued when the compute before it has ended and does not occupy
the device: a RECV posts, and the compute that needs its tensor waits. ``docs/program.md`` has the
rules that all readers of a Program share.
"""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property

import numpy as np

from partita.core.columns import (
    Bytes8,
    Columns,
    Flags,
    Ints,
    Longs,
    column,
    frozen_array,
    names,
    start,
)
from partita.errors import InvalidInputError


class Kind(IntEnum):
    """Operation of an instruction."""

    LOAD = 0
    FORWARD = 1
    RECOMPUTE = 2
    BACKWARD = 3
    BACKWARD_INPUT = 4
    BACKWARD_WEIGHT = 5
    UPDATE = 6
    SEND = 7
    RECV = 8
    ALL_REDUCE = 9
    ALL_GATHER = 10
    REDUCE_SCATTER = 11
    ALL_TO_ALL = 12
    BROADCAST = 13


class TransferMode(StrEnum):
    """Effect of a SEND or RECV on its device: none beside compute, or it holds it to the end."""

    OVERLAPPED = "overlapped"
    BLOCKING = "blocking"


LAST_COMPUTE = Kind.UPDATE
FIRST_COLLECTIVE = Kind.ALL_REDUCE


@dataclass(frozen=True, kw_only=True, eq=False)
class Program(Columns):
    """Instructions of all devices, sorted by device.

    Attributes:
        devices: Names of the devices.
        num_stages: Number of stages.
        microbatch_sizes: Samples of each microbatch.
        ptr: Instructions of device d are rows ``ptr[d]`` to ``ptr[d + 1]``.
        kind: ``Kind`` of the instruction.
        stage: The stage; for RECV the first reader there, for SEND of a gradient the last
            contributor; -1 = none.
        microbatch: The microbatch; -1 = the whole step.
        tensor: The tensor that is loaded or travels; -1 = none.
        gradient: Whether it is the gradient of that tensor.
        peer: The other device of a SEND or RECV; -1 = none.
        group: Row of the group table, for collectives and tensor-parallel compute; -1 = none.
        bucket: Row of the bucket table, for collectives on parameters; -1 = none.
        bytes: Bytes that travel.
        version: The version of the weights that a forward or backward uses; -1 = no matter. In
            documents ``weight_version``, as ``version`` is that of the document.
        group_ptr: Devices of group g are ``group_devices[group_ptr[g]:group_ptr[g + 1]]``.
        group_devices: See ``group_ptr``.
        bucket_ptr: Parameters of bucket b are ``bucket_parameters[bucket_ptr[b]:...]``.
        bucket_parameters: See ``bucket_ptr``.
    """

    devices: tuple[str, ...]
    num_stages: int
    microbatch_sizes: Ints
    ptr: Longs
    kind: Bytes8
    stage: Ints
    microbatch: Ints
    tensor: Ints
    gradient: Flags
    peer: Ints
    group: Ints
    bucket: Ints
    bytes: Longs
    version: Ints = field(metadata={"key": "weight_version"})
    group_ptr: Ints = start([0], np.int32)
    group_devices: Ints = start([], np.int32)
    bucket_ptr: Ints = start([0], np.int32)
    bucket_parameters: Ints = start([], np.int32)

    def __post_init__(self) -> None:
        if self.num_stages < 0:
            raise InvalidInputError(f"num_stages is {self.num_stages}; expected 0 or more")
        rows = np.size(self.kind)
        top_device = len(self.devices) - 1
        top_microbatch = np.size(self.microbatch_sizes) - 1
        top_group = max(np.size(self.group_ptr) - 2, -1)
        top_bucket = max(np.size(self.bucket_ptr) - 2, -1)
        self._set(
            devices=names(self.devices, "devices of the program"),
            microbatch_sizes=column(
                self.microbatch_sizes, np.int32, top_microbatch + 1, "microbatch size", low=1
            ),
            kind=column(self.kind, np.int8, rows, "kind", high=max(Kind)),
            stage=column(self.stage, np.int32, rows, "stage", low=-1, high=self.num_stages - 1),
            microbatch=column(
                self.microbatch, np.int32, rows, "microbatch", low=-1, high=top_microbatch
            ),
            tensor=column(self.tensor, np.int32, rows, "tensor", low=-1),
            gradient=column(self.gradient, np.bool_, rows, "gradient"),
            peer=column(self.peer, np.int32, rows, "peer", low=-1, high=top_device),
            group=column(self.group, np.int32, rows, "group", low=-1, high=top_group),
            bucket=column(self.bucket, np.int32, rows, "bucket", low=-1, high=top_bucket),
            bytes=column(self.bytes, np.int64, rows, "bytes"),
            version=column(self.version, np.int32, rows, "version", low=-1),
        )
        self._check_pointers("ptr", np.int64, len(self.devices), rows)
        for table, values, limit in (
            ("group", "group_devices", top_device),
            ("bucket", "bucket_parameters", None),
        ):
            size = np.size(getattr(self, values))
            self._set(**{values: column(getattr(self, values), np.int32, size, values, high=limit)})
            self._check_pointers(
                f"{table}_ptr", np.int32, np.size(getattr(self, f"{table}_ptr")) - 1, size
            )

    def _check_pointers(self, what: str, dtype: type, rows: int, size: int) -> None:
        ptr = column(getattr(self, what), dtype, rows + 1, what, high=size)
        if not len(ptr) or ptr[0] != 0 or ptr[-1] != size or bool((np.diff(ptr) < 0).any()):
            raise InvalidInputError(f"{what} of the program does not cover its {size} rows")
        self._set(**{what: ptr})

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def num_microbatches(self) -> int:
        """Microbatches in a step."""
        return len(self.microbatch_sizes)

    @cached_property
    def device(self) -> Ints:
        """The device of each instruction."""
        sizes = np.diff(self.ptr)
        return frozen_array(np.repeat(np.arange(len(self.devices)), sizes), np.int32)

    @cached_property
    def is_compute(self) -> Flags:
        """Whether each instruction occupies its device."""
        return frozen_array(self.kind <= LAST_COMPUTE, np.bool_)

    def group_of(self, row: int) -> Ints:
        """Return the devices of the group of an instruction."""
        group = int(self.group[row])
        return self.group_devices[self.group_ptr[group] : self.group_ptr[group + 1]]

    def parameters_of(self, bucket: int) -> Ints:
        """Return the parameters of a bucket."""
        return self.bucket_parameters[self.bucket_ptr[bucket] : self.bucket_ptr[bucket + 1]]

    def describe(self, row: int) -> str:
        """Return one instruction for people, such as ``BACKWARD(stage 1, microbatch 3)``."""
        kind = Kind(int(self.kind[row]))
        parts = []
        if self.stage[row] >= 0:
            parts.append(f"stage {self.stage[row]}")
        if self.microbatch[row] >= 0:
            parts.append(f"microbatch {self.microbatch[row]}")
        if self.tensor[row] >= 0:
            parts.append(f"{'gradient of ' if self.gradient[row] else ''}tensor {self.tensor[row]}")
        if self.peer[row] >= 0:
            parts.append(f"{'from' if kind is Kind.RECV else 'to'} {self.devices[self.peer[row]]}")
        if self.bucket[row] >= 0:
            parts.append(f"bucket {self.bucket[row]}")
        place = self.devices[self.device[row]]
        position = row - self.ptr[self.device[row]]
        return f"{place}: {kind.name}({', '.join(parts)}) at position {position}"
