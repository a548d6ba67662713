"""One emulated device: sleeps where a real one computes, and sends for real.

A device has a clock of its own. An instruction ends its duration after what it waited for was there
and the one before had ended *by that clock*, so that a sleep that takes too long, or the loop's own
work, delays nothing but the message sent at that moment.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from partita.core.program import LAST_COMPUTE, Kind
from partita.energy.devices.protocol import WorkingDevice
from partita.ranks.member import Member
from partita.ranks.status import Phase
from partita.runtime.parts import Part
from partita.runtime.process_transport import ProcessTransport
from partita.runtime.stage_pass import StagePass, Visit
from partita.runtime.task import Task
from partita.runtime.transport import Meeting, Message, Pending
from partita.runtime.workload import ShapeOf

_T = TypeVar("_T")

_AT_ONCE_NS = 100_000
"""A wait shorter than this found what it waited for: gloo does not say when a message arrived."""


class Pacer:
    """The clock of an emulated device."""

    def __init__(self) -> None:
        self._free_ns = time.perf_counter_ns()

    @property
    def now_s(self) -> float:
        """Its time: when it was free last, in seconds."""
        return self._free_ns / 1e9

    def wait_until_now(self) -> None:
        """Say that the device could not go on before now."""
        self._free_ns = max(self._free_ns, time.perf_counter_ns())

    def compute(self, seconds: float) -> None:
        """Sleep until an instruction that takes so long has ended."""
        self._free_ns += round(seconds * 1e9)
        while (left_ns := self._free_ns - time.perf_counter_ns()) > 0:
            time.sleep(left_ns / 1e9)


@dataclass(frozen=True, slots=True)
class _Paced(Generic[_T]):
    """Something under way that holds the device if it is not there yet."""

    pending: Pending[_T]
    pacer: Pacer

    def poll(self) -> _T | None:
        begin = time.perf_counter_ns()
        value = self.pending.poll()
        if time.perf_counter_ns() - begin > _AT_ONCE_NS:
            self.pacer.wait_until_now()
        return value


@dataclass(frozen=True, slots=True)
class _Collected:
    """The result of a collective, which may be under way."""

    value: Sequence[Tensor] = ()
    work: Any = None

    def poll(self) -> Sequence[Tensor]:
        if self.work is not None:
            self.work.wait()
        return self.value


class EmulatedTransport(ProcessTransport):
    """Carries messages over processes, and tells the device's clock what it had to wait for.

    What they carry has no meaning.
    """

    def __init__(
        self,
        task: Task,
        member: Member,
        shape_of: ShapeOf,
        pacer: Pacer,
        *,
        job: str,
        entered: Callable[[Phase], None],
    ) -> None:
        super().__init__(task, member, shape_of, job=job, entered=entered)
        self._pacer = pacer

    def send(self, message: Message, value: Tensor) -> Pending[Tensor]:
        """Send a tensor."""
        return _Paced(super().send(message, value), self._pacer)

    def receive(self, message: Message) -> Pending[Tensor]:
        """Post a receive."""
        return _Paced(super().receive(message), self._pacer)

    def meet(self, meeting: Meeting, values: Sequence[Tensor] = ()) -> Pending[Sequence[Tensor]]:
        """Start a collective; compute meets when its inputs are there."""
        if meeting.kind <= LAST_COMPUTE:
            return _Collected()
        return _Paced(super().meet(meeting, values), self._pacer)

    def assemble(self, members: tuple[int, ...] | None = None) -> None:
        """Wait until all members of a group, or all ranks, have come here."""
        group = None if members is None else self._groups[members]
        byte = torch.zeros(1, dtype=torch.uint8)
        work = dist.all_reduce(byte, group=group, async_op=True)
        _Paced(_Collected((), work), self._pacer).poll()


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceFigures:
    """How long the instructions of a device last, and how much it sends.

    Attributes:
        compute_s: Seconds by kind, stage and microbatch.
        load_s: Seconds to load a model input, by its name and microbatch.
        update_s: Seconds of an update, by stage.
        collective_bytes: What it brings to a collective, by kind and bucket.
        group_of: The tensor-parallel group, by stage and microbatch.
        buffer: What is sent: as much of it as needed.
    """

    compute_s: Mapping[tuple[Kind, int, int], float]
    load_s: Mapping[tuple[str, int], float]
    update_s: Mapping[int, float]
    collective_bytes: Mapping[tuple[Kind, int], int]
    group_of: Mapping[tuple[int, int], tuple[int, ...]]
    buffer: Tensor


class EmulatedWork:
    """Sleeps as long as instructions take: as the cost model says, or a modelled device."""

    def __init__(self, pacer: Pacer, worker: WorkingDevice | None = None) -> None:
        self._pacer, self._worker = pacer, worker

    def compute(self, kind: Kind, seconds: float) -> None:
        """Sleep through an instruction that takes so long at the highest clock."""
        if self._worker is not None:
            seconds = self._worker.begin_work(seconds, kind, self._pacer.now_s)
        self._pacer.compute(seconds)


class EmulatedRunner:
    """Sleeps as long as the stages of a device compute."""

    def __init__(
        self,
        task: Task,
        figures: DeviceFigures,
        shape_of: ShapeOf,
        work: EmulatedWork,
        transport: EmulatedTransport,
    ) -> None:
        self._task, self._figures, self._shape_of = task, figures, shape_of
        self._work, self._transport = work, transport

    def load(self, step: int, microbatch: int, name: str) -> Tensor:
        """Take the time to load an input of the model."""
        del step
        self._work.compute(Kind.LOAD, self._figures.load_s[name, microbatch])
        return self._figures.buffer[:0]

    def _compute(self, kind: Kind, visit: Visit) -> None:
        members = self._figures.group_of.get((visit.stage, visit.microbatch))
        if members is not None:
            self._transport.assemble(members)
        self._work.compute(kind, self._figures.compute_s[kind, visit.stage, visit.microbatch])

    def _values(self, tensors: Sequence[int], microbatch: int) -> dict[int, Tensor]:
        sizes = {tensor: self._shape_of(tensor, microbatch)[0][0] for tensor in tensors}
        return {tensor: self._figures.buffer[:size] for tensor, size in sizes.items()}

    def forward(self, step: int, visit: Visit, inputs: dict[int, Tensor]) -> StagePass:
        """Take the time of a forward."""
        del step
        self._compute(Kind.FORWARD, visit)
        outputs = self._values(self._task.borders[visit.stage].outputs, visit.microbatch)
        return StagePass(inputs=inputs, outputs=outputs)

    def recompute(self, step: int, visit: Visit, done: StagePass) -> None:
        """Take the time of a RECOMPUTE; where backward contains it there is none."""
        del step
        if (Kind.RECOMPUTE, visit.stage, visit.microbatch) in self._figures.compute_s:
            if not done.has_graph:
                self._compute(Kind.RECOMPUTE, visit)
            done.has_graph = True

    def begin_backward(self, visit: Visit, done: StagePass, cotangents: dict[int, Tensor]) -> None:
        """Give a pass the gradients of its outputs."""
        del visit
        done.cotangents = cotangents

    def gradients(
        self, visit: Visit, done: StagePass
    ) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
        """Take the time of a backward."""
        del done
        self._compute(Kind.BACKWARD, visit)
        return self._input_gradients(visit), {}

    def input_gradients(self, visit: Visit, done: StagePass) -> dict[int, Tensor]:
        """Take the time of the first part of a backward."""
        del done
        self._compute(Kind.BACKWARD_INPUT, visit)
        return self._input_gradients(visit)

    def weight_gradients(self, visit: Visit, done: StagePass) -> dict[str, Tensor]:
        """Take the time of the second part of a backward."""
        del done
        self._compute(Kind.BACKWARD_WEIGHT, visit)
        return {}

    def _input_gradients(self, visit: Visit) -> dict[int, Tensor]:
        tensors = [tensor for tensor, _ in self._task.contributes[visit.stage]]
        return self._values(tensors, visit.microbatch)


class EmulatedStore:
    """Holds no parameters: takes the time of updates, and brings bytes to collectives.

    Attributes:
        began_ns: When each step began, after all ranks had ended the one before.
    """

    def __init__(
        self,
        figures: DeviceFigures,
        pacer: Pacer,
        work: EmulatedWork,
        transport: EmulatedTransport,
    ) -> None:
        self._figures, self._pacer, self._work = figures, pacer, work
        self._transport = transport
        self.began_ns: list[int] = []

    agrees = False

    @property
    def num_versions(self) -> int:
        """None are kept."""
        return 0

    def begin_step(self) -> None:
        """Wait for all ranks, so that a step begins from idle, as it is predicted."""
        self._transport.assemble()
        self.began_ns.append(time.perf_counter_ns())
        self._pacer.wait_until_now()

    def drop_version(self, stage: int, version: int) -> None:
        """Do nothing."""

    def release(self, stage: int) -> None:
        """Do nothing."""

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Do nothing."""

    def outgoing(self, kind: Kind, bucket: int) -> list[Tensor]:
        """Return as many bytes as this device brings to a collective."""
        size = self._figures.collective_bytes[kind, bucket]
        return [self._figures.buffer[:size].view(torch.float32)]

    def incoming(self, kind: Kind, bucket: int, values: Sequence[Tensor]) -> None:
        """Do nothing."""

    def update(self, stage: int, version: int) -> Mapping[str, Tensor | Part]:
        """Take the time of an update."""
        del version
        self._work.compute(Kind.UPDATE, self._figures.update_s[stage])
        return {}

    def measure(self) -> Tensor:
        """Return nothing: there is no gradient to agree on."""
        return torch.zeros(0)

    def agree(self, total: Tensor) -> None:
        """Do nothing."""

    def end_step(self) -> None:
        """Do nothing: there is no learning rate."""

    def left_over(self) -> list[str]:
        """Return nothing: no gradient is kept."""
        return []
