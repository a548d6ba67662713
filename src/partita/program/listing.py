"""Collects instructions and sorts them into a Program."""

from itertools import chain, pairwise
from typing import Any

import numpy as np

from partita.core.columns import Array, frozen_array, ragged
from partita.core.plan import Plan
from partita.core.program import Kind, Program

_COLUMNS = (
    ("kind", np.int8),
    ("stage", np.int32),
    ("microbatch", np.int32),
    ("tensor", np.int32),
    ("gradient", np.bool_),
    ("peer", np.int32),
    ("group", np.int32),
    ("bucket", np.int32),
    ("bytes", np.int64),
    ("version", np.int32),
)
_DEFAULTS = {"gradient": False, "bytes": 0}
_COMPUTE, _MESSAGE, _COLLECTIVE = 0, 1, 2


class Listing:
    """Instructions in any order, each with the place where it belongs."""

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices
        self._blocks: list[dict[str, Any]] = []
        self._groups: dict[tuple[int, ...], int] = {}
        self._messages = 0
        self._collectives: list[tuple[Any, ...]] = []

    def group(self, devices: tuple[int, ...]) -> int:
        """Return the row of a group of devices, made when it is first asked for."""
        return self._groups.setdefault(tuple(devices), len(self._groups))

    def compute(
        self,
        kind: Kind,
        *,
        device: Array,
        level: Array,
        number: Array,
        **columns: Array,
    ) -> None:
        """Add compute instructions."""
        self._add(device, level, _COMPUTE, number, kind=kind, **columns)

    def messages(  # noqa: PLR0913 (the columns of a message)
        self,
        *,
        tensor: Array,
        microbatch: Array,
        source: Array,
        target: Array,
        level: Array,
        stages: tuple[Array, Array],
        size_bytes: Array,
        gradient: bool,
    ) -> None:
        """Add a SEND and a RECV for each message, at one level and with one number."""
        number = self._messages + np.arange(len(tensor))
        self._messages += len(tensor)
        common = {
            "microbatch": microbatch,
            "tensor": tensor,
            "gradient": gradient,
            "bytes": size_bytes,
        }
        self._add(
            source, level, _MESSAGE, number, kind=Kind.SEND, peer=target, stage=stages[0], **common
        )
        self._add(
            target, level, _MESSAGE, number, kind=Kind.RECV, peer=source, stage=stages[1], **common
        )

    def collective(
        self,
        kind: Kind,
        *,
        members: tuple[int, ...],
        stages: tuple[int, ...],
        level: int,
        bucket: int,
        size_bytes: int,
    ) -> None:
        """Add one collective on all of its members."""
        number = len(self._collectives)
        figures = (int(kind), int(level), number, self.group(members), bucket, size_bytes)
        self._collectives.append((members, stages, figures))

    def _add(
        self,
        device: Array,
        level: Array,
        rank: int,
        number: Array,
        **columns: object,
    ) -> None:
        if len(device):
            self._blocks.append(
                {"device": device, "level": level, "rank": rank, "number": number, **columns}
            )

    def _flush_collectives(self) -> None:
        if not self._collectives:
            return
        members, stages, figures = zip(*self._collectives, strict=True)
        counts = [len(devices) for devices in members]
        rows = np.repeat(np.array(figures, dtype=np.int64), counts, axis=0)
        kind, level, number, group, bucket, size = rows.T
        self._add(
            np.fromiter(chain.from_iterable(members), np.int64, len(rows)),
            level,
            _COLLECTIVE,
            number,
            kind=kind,
            stage=np.fromiter(chain.from_iterable(stages), np.int64, len(rows)),
            group=group,
            bucket=bucket,
            bytes=size,
        )

    def _column(self, name: str, dtype: type) -> Array:
        default = _DEFAULTS.get(name, -1)
        whole: Array = np.empty(sum(len(block["device"]) for block in self._blocks), dtype=dtype)
        begin = 0
        for block in self._blocks:
            end = begin + len(block["device"])
            # One value for all rows of a block, or one each.
            whole[begin:end] = block.get(name, default)
            begin = end
        return whole

    def _sorted(self, device: Array, pointers: Array) -> Array:
        """Return the order of all rows: by device first, then each device by itself."""
        level = self._column("level", np.int64)
        rank = self._column("rank", np.int8)
        number = self._column("number", np.int64)
        span = int(number.max()) + 1
        if float(level.max() + 1) * 3 * span >= 2.0**62:
            return np.lexsort((number, rank, level, device))
        key = (level * 3 + rank) * span + number
        narrow = device.astype(np.uint16) if self._num_devices < 2**16 else device
        order = np.argsort(narrow, kind="stable")
        key = key[order]
        for begin, end in pairwise(pointers.tolist()):
            order[begin:end] = order[begin:end][np.argsort(key[begin:end])]
        return order

    def program(self, plan: Plan, buckets: tuple[Array, ...]) -> Program:
        """Return everything that was added, sorted, as a Program."""
        self._flush_collectives()
        device = self._column("device", np.int32)
        pointers = np.zeros(self._num_devices + 1, dtype=np.int64)
        np.cumsum(np.bincount(device, minlength=self._num_devices), out=pointers[1:])
        order = self._sorted(device, pointers)
        columns = {}
        for name, dtype in _COLUMNS:
            columns[name] = frozen_array(self._column(name, dtype)[order], dtype)
        group_ptr, group_devices = ragged(list(self._groups))
        bucket_ptr, bucket_parameters = ragged([part.tolist() for part in buckets])
        return Program(
            devices=plan.devices,
            num_stages=len(plan.stages),
            microbatch_sizes=plan.microbatch_sizes,
            ptr=pointers,
            **columns,
            group_ptr=group_ptr,
            group_devices=group_devices,
            bucket_ptr=bucket_ptr,
            bucket_parameters=bucket_parameters,
        )
