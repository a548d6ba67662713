"""Timelines: the simulator's prediction and the executor's measurement alike."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from partita.core.columns import (
    Bytes8,
    Displayed,
    Floats,
    Ints,
    Longs,
    column,
    every,
    frozen_array,
    names,
    start,
)
from partita.core.program import FIRST_COLLECTIVE, LAST_COMPUTE, Kind
from partita.errors import InvalidInputError


class TimelineOrigin(StrEnum):
    """Origin of a timeline."""

    SIMULATED = "simulated"
    EMULATED = "emulated"
    MEASURED = "measured"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Timeline(Displayed):
    """The instructions of a step with their times, and the memory of each device over time.

    Attributes:
        origin: Simulated, emulated or measured.
        devices: Names of the devices.
        device: The device of each row.
        instruction: Row of the Program.
        kind: ``Kind`` of the instruction.
        stage: Its stage; -1 = none.
        microbatch: Its microbatch; -1 = the whole step.
        peer: The other device of a transfer; -1 = none.
        start_s: When it began; for a RECV when it was posted.
        end_s: When it ended; for a RECV when it was posted and its tensor had arrived.
        bytes: Bytes that travelled.
        clock_mhz: Clock of the device; NaN = not known.
        energy_j: Energy it took; NaN = not known.
        cause: The row whose end let this one start; -1 = none, or not known.
        memory_device: With ``memory_s`` and ``memory_bytes``: the use of a device from a time on,
            sorted by device and time.
        memory_s: See ``memory_device``.
        memory_bytes: See ``memory_device``.
        limit_bytes: Memory that each device may use.
        period_s: Seconds from a step to the next in steady state; NaN = not known.
    """

    origin: TimelineOrigin = TimelineOrigin.SIMULATED
    devices: tuple[str, ...]
    device: Ints
    instruction: Ints
    kind: Bytes8
    stage: Ints
    microbatch: Ints
    peer: Ints
    start_s: Floats
    end_s: Floats
    bytes: Longs
    clock_mhz: Floats = every(np.nan)
    energy_j: Floats = every(np.nan)
    cause: Ints = every(-1)
    memory_device: Ints = start([], np.int32)
    memory_s: Floats = start([], np.float64)
    memory_bytes: Floats = start([], np.float64)
    limit_bytes: Floats = every(np.inf)
    period_s: float = float("nan")

    def __post_init__(self) -> None:
        rows = np.size(self.kind)
        top = len(self.devices) - 1
        points = np.size(self.memory_device)
        self._check_limits()
        self._set(
            devices=names(self.devices, "devices of the timeline"),
            device=column(self.device, np.int32, rows, "device", high=top),
            instruction=column(self.instruction, np.int32, rows, "instruction"),
            kind=column(self.kind, np.int8, rows, "kind", high=max(Kind)),
            stage=column(self.stage, np.int32, rows, "stage", low=-1),
            microbatch=column(self.microbatch, np.int32, rows, "microbatch", low=-1),
            peer=column(self.peer, np.int32, rows, "peer", low=-1, high=top),
            start_s=column(self.start_s, np.float64, rows, "start_s"),
            end_s=column(self.end_s, np.float64, rows, "end_s"),
            bytes=column(self.bytes, np.int64, rows, "bytes"),
            clock_mhz=column(self.clock_mhz, np.float64, rows, "clock_mhz", unknown=True),
            energy_j=column(self.energy_j, np.float64, rows, "energy_j", unknown=True),
            cause=column(self.cause, np.int32, rows, "cause", low=-1, high=rows - 1),
            memory_device=column(self.memory_device, np.int32, points, "memory_device", high=top),
            memory_s=column(self.memory_s, np.float64, points, "memory_s"),
            memory_bytes=column(self.memory_bytes, np.float64, points, "memory_bytes"),
        )
        backwards = self.end_s < self.start_s
        if bool(backwards.any()):
            row = int(np.argmax(backwards))
            raise InvalidInputError(f"row {row} of the timeline ends before it starts")

    def _check_limits(self) -> None:
        """Check what may be unlimited: the memory of the devices, and an unknown period."""
        limit = np.asarray(self.limit_bytes, np.float64)
        if limit.ndim and limit.shape != (len(self.devices),):
            raise InvalidInputError(
                f"limit_bytes has {limit.size} values for {len(self.devices)} devices"
            )
        if not bool((limit >= 0).all()):
            raise InvalidInputError(f"limit_bytes is {limit[~(limit >= 0)][0]}; expected 0 or more")
        if self.period_s < 0:
            raise InvalidInputError(f"period_s is {self.period_s}; expected 0 or more")
        limit = np.broadcast_to(limit, (len(self.devices),))
        self._set(limit_bytes=frozen_array(limit, np.float64))

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from idle to the end of the last instruction."""
        return float(self.end_s.max()) if len(self) else 0.0

    @cached_property
    def busy_s(self) -> Floats:
        """Seconds that each device computes."""
        compute = self.kind <= LAST_COMPUTE
        busy = np.bincount(
            self.device[compute],
            weights=(self.end_s - self.start_s)[compute],
            minlength=len(self.devices),
        )
        return frozen_array(busy, np.float64)

    @cached_property
    def utilisation(self) -> Floats:
        """Share of the makespan that each device computes."""
        return frozen_array(self.busy_s / max(self.makespan_s, 1e-300), np.float64)

    @property
    def bubble(self) -> Floats:
        """Share of the makespan that each device is idle."""
        return frozen_array(1.0 - self.utilisation, np.float64)

    @cached_property
    def exposed_s(self) -> Floats:
        """Seconds that each device does not compute while a message or collective is under way.

        Messages count that come to the device, collectives that it takes part in. What is left of
        the time without compute is the bubble of the schedule.
        """
        spans = ((self.kind == Kind.SEND) & (self.peer >= 0), self.kind >= FIRST_COLLECTIVE)
        joined = np.flatnonzero(spans[0] | spans[1])
        home = np.where(spans[0], self.peer, self.device)[joined]
        exposed = np.zeros(len(self.devices))
        for device in range(len(self.devices)):
            coming = joined[home == device]
            busy = np.flatnonzero((self.device == device) & (self.kind <= LAST_COMPUTE))
            both = np.concatenate([coming, busy])
            all_s = _covered_s(self.start_s[both], self.end_s[both])
            exposed[device] = all_s - _covered_s(self.start_s[busy], self.end_s[busy])
        return frozen_array(np.maximum(exposed, 0.0), np.float64)

    @cached_property
    def critical_path(self) -> Ints:
        """Rows of the chain that ends last, first row first; no row could start earlier.

        Raises:
            InvalidInputError: The causes of a timeline from elsewhere go in a circle.
        """
        if not len(self):
            return frozen_array([], np.int32)
        # A RECV only waits; what it waits for is a row of its own.
        row = int(np.argmax(np.where(self.kind == Kind.RECV, -1.0, self.end_s)))
        path: list[int] = []
        while row >= 0:
            if len(path) == len(self):
                raise InvalidInputError(f"row {row} of the timeline is its own cause, in a circle")
            path.append(row)
            row = int(self.cause[row])
        return frozen_array(path[::-1], np.int32)

    @property
    def has_memory(self) -> bool:
        """Whether the use of memory is known, which runs do not measure by the instruction."""
        return len(self.memory_device) > 0

    @cached_property
    def peak_bytes(self) -> Floats:
        """Largest use of memory on each device."""
        peak = np.zeros(len(self.devices))
        np.maximum.at(peak, self.memory_device, self.memory_bytes)
        return frozen_array(peak, np.float64)


def _covered_s(start_s: Floats, end_s: Floats) -> float:
    """Return the length of the union of intervals."""
    order = np.argsort(start_s, kind="stable")
    begin, end = start_s[order], np.maximum.accumulate(end_s[order])
    return float(np.maximum(0.0, end - np.maximum(begin, np.append(-np.inf, end[:-1]))).sum())
