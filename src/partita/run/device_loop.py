"""The loop of one device: carries out its instructions, one after the other.

``docs/program.md`` has the rules. In short: a list is the order of issue; a RECV or collective starts
something, and the compute that needs it waits. Every stage boundary cuts autograd: the tensors
that enter a stage are leaves, and their gradients are handed back by hand.

The loop is a generator. It yields a ``Wait`` where it cannot go on yet; over real processes the
transport waits itself and nothing is ever yielded. What can never come is an error at once.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor

from partita.core.program import FIRST_COLLECTIVE, LAST_COMPUTE, Kind
from partita.errors import InvalidInputError
from partita.run.parameters import ParameterStore, Part
from partita.run.stage_code import Call
from partita.run.task import Task
from partita.run.transport import Meeting, Message, Pending, Transport

Load: TypeAlias = Callable[[int, int, str], Tensor]
"""Returns an input of the model, given step, microbatch and name of the tensor."""

_T = TypeVar("_T")
_Cell: TypeAlias = tuple[int, int]
"""A tensor or a stage, and a microbatch."""


class Wait(NamedTuple):
    """Why a device cannot go on yet.

    Attributes:
        row: The instruction at which it stands; -1 = the end of the step.
        reason: The instruction and what it waits for.
    """

    row: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """How a device carries out its instructions.

    Attributes:
        seed: Seed of all random numbers.
        blocking: Whether SEND and RECV wait at their place until the other end has come.
    """

    seed: int = 0
    blocking: bool = False


@dataclass(slots=True)
class StepRecord:
    """What one device has seen in one step.

    Attributes:
        outputs: Outputs of the model and the loss, by (tensor, microbatch).
        gradients: Gradients of the parameters that were stepped, as of their last UPDATE.
    """

    outputs: dict[_Cell, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | Part] = field(default_factory=dict)


@dataclass(slots=True)
class DeviceStatistics:
    """What a device has done.

    Attributes:
        instructions: Number of instructions by kind.
        sent_bytes: Bytes of the tensors it sent.
        peak_in_flight: Most microbatches, over all stages, between forward and end of backward.
        peak_versions: Most versions of weights kept, over all stages.
    """

    instructions: Counter[Kind] = field(default_factory=Counter)
    sent_bytes: int = 0
    peak_in_flight: int = 0
    peak_versions: int = 0


@dataclass(slots=True)
class _Pass:
    """A stage between the forward and the end of the backward of a microbatch.

    Attributes:
        inputs: What enters, by tensor.
        buffers: Buffers as forward found them, where forward will be repeated.
        weights: Leaves of the trainable parameters; empty where forward will be repeated.
        outputs: What leaves, with its autograd graph; likewise.
        cotangents: Gradients of the outputs, between BACKWARD_INPUT and BACKWARD_WEIGHT.
    """

    inputs: dict[int, Tensor]
    buffers: dict[str, Tensor]
    weights: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    cotangents: dict[int, Tensor] = field(default_factory=dict)


class DeviceLoop:
    """The state of one device and the meaning of its instructions.

    Attributes:
        executed: Instructions carried out, over all steps.
        records: What was seen in each step.
        statistics: What was done, over all steps.
    """

    def __init__(
        self,
        task: Task,
        device: int,
        transport: Transport,
        store: ParameterStore,
        load: Load,
        *,
        options: LoopOptions | None = None,
    ) -> None:
        self._task, self._device, self._transport = task, device, transport
        self._store, self._load = store, load
        self._options = options or LoopOptions()
        self._program, self._table = task.program, task.graph.tensors
        self._rows = range(int(self._program.ptr[device]), int(self._program.ptr[device + 1]))
        self._kinds = [Kind(kind) for kind in self._program.kind[self._rows.start : self._rows.stop]]
        self._step = 0
        self._loaded: dict[tuple[int, int, int], Tensor] = {}
        self._values: dict[_Cell, Tensor] = {}
        self._passes: dict[_Cell, _Pass] = {}
        self._contributions: dict[_Cell, dict[int, Tensor]] = {}
        self._posted: dict[tuple[int, int, bool], dict[int, Pending[Tensor]]] = {}
        self._sends: list[tuple[int, Pending[Tensor]]] = []
        self._collectives: list[tuple[int, Pending[Sequence[Tensor]]]] = []
        self._all_uses = self._count_uses()
        self._uses: Counter[object] = Counter()
        self.executed = 0
        self.records: list[StepRecord] = []
        self.statistics = DeviceStatistics()
        self._handlers: Mapping[Kind, Callable[[int], Iterator[Wait]]] = {
            Kind.LOAD: self._load_input,
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.UPDATE: self._update,
            Kind.SEND: self._send,
            Kind.RECV: self._receive,
            Kind.ALL_REDUCE: self._start_collective,
            Kind.ALL_GATHER: self._start_collective,
            Kind.REDUCE_SCATTER: self._start_collective,
        }

    def _count_uses(self) -> Counter[object]:
        """Count who needs each activation, gradient and version, so that it can be dropped."""
        uses: Counter[object] = Counter()
        for row, kind in zip(self._rows, self._kinds, strict=True):
            stage, microbatch = self._place(row)
            if kind is Kind.FORWARD:
                uses.update((t, microbatch, False) for t in self._task.borders[stage].inputs)
            elif kind is Kind.SEND:
                tensor, gradient = int(self._program.tensor[row]), bool(self._program.gradient[row])
                uses[tensor, microbatch, gradient] += 1
            if kind <= LAST_COMPUTE and kind not in (Kind.LOAD, Kind.UPDATE):
                uses[stage, int(self._program.version[row])] += 1
        return uses

    def play(self, step: int) -> Iterator[Wait]:
        """Carry out the whole list once, yielding where the device has to wait.

        Raises:
            InvalidInputError: The Program cannot be carried out; names the instruction.
        """
        self._step = step
        self._uses = self._all_uses.copy()
        self._store.begin_step()
        self.records.append(StepRecord())
        for row, kind in zip(self._rows, self._kinds, strict=True):
            if kind <= LAST_COMPUTE and self._program.group[row] >= 0:
                yield from self._until(row, self._meet(row, ()), "the other members of its group")
            if kind not in self._handlers:
                self._refuse(row, "there is no meaning for this kind yet")
            yield from self._handlers[kind](row)
            self.executed += 1
            self.statistics.instructions[kind] += 1
        yield from self._end_step()

    def _end_step(self) -> Iterator[Wait]:
        for row, sent in self._sends:
            yield from self._until(row, sent, "its receiver")
        self._sends.clear()
        yield from self._finish_collectives(lambda _: True)
        name = self._program.devices[self._device]
        for cells, what in (
            (self._values, "tensor {} of microbatch {} was never used"),
            (self._passes, "stage {} has no backward for microbatch {}"),
            (self._contributions, "the gradient of tensor {} of microbatch {} was never used"),
            (self._posted, "tensor {} of microbatch {} was received in vain"),
        ):
            for cell in cells:
                raise InvalidInputError(f"{name}: {what.format(*cell[:2])}")
        if unused := self._store.left_over():
            raise InvalidInputError(f"{name}: the gradient of parameter {unused[0]!r} is not used")

    def _place(self, row: int) -> _Cell:
        return int(self._program.stage[row]), int(self._program.microbatch[row])

    def _refuse(self, row: int, why: str) -> NoReturn:
        raise InvalidInputError(f"{self._program.describe(row)}: {why}")

    def _until(self, row: int, pending: Pending[_T], what: str) -> Iterator[Wait]:
        """Wait until something is there; returns it."""
        while (value := pending.poll()) is None:
            yield Wait(row, f"{self._program.describe(row)} waits for {what}")
        return value  # type: ignore[return-value]  # the value of ``yield from``
