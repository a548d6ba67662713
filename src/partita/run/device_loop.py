"""The loop of one device: carries out its instructions, one after the other.

``docs/program.md`` has the rules. In short: a list is the order of issue; a RECV or collective
starts something, and the compute that needs it waits. The gradient of a tensor is summed over the
reader stages of a device before it goes back, and over devices by the producer, always in the
order of stages, never of arrival.

The loop is a generator. It yields a ``Wait`` where it cannot go on yet; over real processes the
transport waits itself and nothing is ever yielded. What can never come is an error at once.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, TypeAlias, TypeVar

from torch import Tensor

from partita.core.program import LAST_COMPUTE, Kind
from partita.errors import InvalidInputError
from partita.run.parameters import ParameterStore, Part
from partita.run.stage_pass import StagePass, StageRunner, Visit
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
        row: The instruction at which it stands.
        reason: The instruction and what it waits for.
    """

    row: int
    reason: str


Waiting: TypeAlias = Generator[Wait, None, _T]


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
        *,
        store: ParameterStore,
        load: Load,
        options: LoopOptions | None = None,
    ) -> None:
        options = options or LoopOptions()
        self._task, self._device, self._transport = task, device, transport
        self._store, self._load, self._blocking = store, load, options.blocking
        self._runner = StageRunner(task, store, seed=options.seed)
        self._program = task.program
        self._rows = range(int(self._program.ptr[device]), int(self._program.ptr[device + 1]))
        self._step = 0
        self._loaded: dict[tuple[int, int, int], Tensor] = {}
        self._values: dict[_Cell, Tensor] = {}
        self._passes: dict[_Cell, StagePass] = {}
        self._contributions: dict[_Cell, dict[int, Tensor]] = {}
        self._posted: dict[tuple[int, int, bool], dict[int, Pending[Tensor]]] = {}
        self._sends: list[tuple[int, Pending[Tensor]]] = []
        self._collectives: list[tuple[int, Pending[Sequence[Tensor]]]] = []
        self._all_uses = self._count_uses()
        self._uses: Counter[tuple[object, ...]] = Counter()
        self.executed = 0
        self.records: list[StepRecord] = []
        self.statistics = DeviceStatistics()
        self._handlers: Mapping[Kind, Callable[[int], Iterable[Wait]]] = {
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

    def _kind(self, row: int) -> Kind:
        return Kind(int(self._program.kind[row]))

    def _visit(self, row: int) -> Visit:
        program = self._program
        return Visit(
            int(program.stage[row]), int(program.microbatch[row]), int(program.version[row])
        )

    def _count_uses(self) -> Counter[tuple[object, ...]]:
        """Count who needs each activation, gradient and version, so that it can be dropped."""
        uses: Counter[tuple[object, ...]] = Counter()
        for row in self._rows:
            kind, visit = self._kind(row), self._visit(row)
            if kind is Kind.FORWARD:
                border = self._task.borders[visit.stage]
                uses.update((t, visit.microbatch, False) for t in border.inputs)
            elif kind is Kind.SEND:
                message = self._message(row)
                uses[message.tensor, message.microbatch, message.gradient] += 1
            if kind <= LAST_COMPUTE and kind not in (Kind.LOAD, Kind.UPDATE):
                uses[visit.stage, visit.version] += 1
        return uses

    def play(self, step: int) -> Waiting[None]:
        """Carry out the whole list once, yielding where the device has to wait.

        Raises:
            InvalidInputError: The Program cannot be carried out; names the instruction.
        """
        self._step = step
        self._uses = self._all_uses.copy()
        self._store.begin_step()
        self.records.append(StepRecord())
        for row in self._rows:
            kind = self._kind(row)
            if kind not in self._handlers:
                self._refuse(row, "this kind has no meaning yet")
            if kind <= LAST_COMPUTE and self._program.group[row] >= 0:
                yield from self._until(row, self._meet(row), "the other members of its group")
            yield from self._handlers[kind](row)
            self.executed += 1
            self.statistics.instructions[kind] += 1
        yield from self._end_step()

    def _end_step(self) -> Waiting[None]:
        for row, sent in self._sends:
            yield from self._until(row, sent, "its receiver")
        self._sends.clear()
        yield from self._finish_collectives(lambda _: True)
        name = self._program.devices[self._device]
        leftovers: tuple[tuple[Sequence[tuple[int, ...]], str], ...] = (
            (list(self._values), "tensor {} of microbatch {} was never used"),
            (list(self._passes), "stage {} has no whole backward for microbatch {}"),
            (list(self._contributions), "the gradient of tensor {} of microbatch {} was not used"),
            (list(self._posted), "tensor {} of microbatch {} was received in vain"),
        )
        for cells, what in leftovers:
            if cells:
                raise InvalidInputError(f"{name}: {what.format(*cells[0])}")
        if unused := self._store.left_over():
            raise InvalidInputError(f"{name}: the gradient of parameter {unused[0]!r} is not used")

    def _refuse(self, row: int, why: str) -> NoReturn:
        raise InvalidInputError(f"{self._program.describe(row)}: {why}")

    @contextmanager
    def _at(self, row: int) -> Iterator[None]:
        """Name the instruction in whatever is wrong with it."""
        try:
            yield
        except InvalidInputError as exc:
            raise InvalidInputError(f"{self._program.describe(row)}: {exc}") from exc

    def _name(self, tensor: int, microbatch: int) -> str:
        return f"tensor {self._task.graph.tensors.names[tensor]!r} of microbatch {microbatch}"

    def _until(self, row: int, pending: Pending[_T], what: str) -> Waiting[_T]:
        """Wait until something is there, and return it."""
        while (value := pending.poll()) is None:
            yield Wait(row, f"{self._program.describe(row)} waits for {what}")
        return value

    def _message(self, row: int) -> Message:
        program = self._program
        sends = program.kind[row] == Kind.SEND
        ends = (self._device, int(program.peer[row]))
        return Message(
            *(ends if sends else ends[::-1]),
            tensor=int(program.tensor[row]),
            microbatch=int(program.microbatch[row]),
            gradient=bool(program.gradient[row]),
        )

    def _send(self, row: int) -> Waiting[None]:
        message = self._message(row)
        cell = (message.tensor, message.microbatch)
        if message.gradient:
            value = self._local_gradient(row, *cell)
        elif cell in self._values:
            value = self._values[cell]
        else:
            self._refuse(row, f"{self._name(*cell)} is not there to be sent")
        with self._at(row):
            sent = self._transport.send(message, value)
        self.statistics.sent_bytes += value.numel() * value.element_size()
        self._drop(cell, gradient=message.gradient)
        if self._blocking:
            yield from self._until(row, sent, "its receiver")
        else:
            self._sends.append((row, sent))

    def _receive(self, row: int) -> Waiting[None]:
        message = self._message(row)
        with self._at(row):
            posted = self._transport.receive(message)
        key = (message.tensor, message.microbatch, message.gradient)
        self._posted.setdefault(key, {})[message.source] = posted
        if self._blocking:
            yield from self._until(row, posted, "its sender")

    def _meet(self, row: int, values: Sequence[Tensor] = ()) -> Pending[Sequence[Tensor]]:
        program = self._program
        meeting = Meeting(
            kind=self._kind(row),
            device=self._device,
            members=tuple(program.group_of(row).tolist()),
            bucket=int(program.bucket[row]),
            microbatch=int(program.microbatch[row]),
        )
        with self._at(row):
            return self._transport.meet(meeting, values)

    def _start_collective(self, row: int) -> Iterable[Wait]:
        values = self._store.outgoing(self._kind(row), int(self._program.bucket[row]))
        self._collectives.append((row, self._meet(row, values)))
        return ()

    def _finish_collectives(self, wanted: Callable[[int], bool]) -> Waiting[None]:
        """Wait for the collectives of the rows that are wanted, in the order of issue."""
        for entry in [entry for entry in self._collectives if wanted(entry[0])]:
            row, pending = entry
            values = yield from self._until(row, pending, "the other members of its group")
            self._store.incoming(self._kind(row), int(self._program.bucket[row]), values)
            self._collectives.remove(entry)

    def _finish_gathers(self, stage: int) -> Waiting[None]:
        program = self._program
        return self._finish_collectives(
            lambda row: program.kind[row] == Kind.ALL_GATHER and program.stage[row] == stage
        )

    def _drop(self, cell: _Cell, *, gradient: bool) -> None:
        """Count a use of an activation or gradient, and forget it after the last."""
        key = (*cell, gradient)
        self._uses[key] -= 1
        if self._uses[key] == 0:
            (self._contributions if gradient else self._values).pop(cell, None)

    def _load_input(self, row: int) -> Iterable[Wait]:
        visit, tensor = self._visit(row), int(self._program.tensor[row])
        name = self._task.graph.tensors.names[tensor]
        value = self._load(self._step, visit.microbatch, name)
        self._loaded[visit.stage, visit.microbatch, tensor] = value
        return ()

    def _inputs(self, row: int, visit: Visit) -> Waiting[dict[int, Tensor]]:
        """Wait for everything that a forward reads."""
        border = self._task.borders[visit.stage]
        found: dict[int, Tensor] = {}
        for tensor in border.inputs:
            cell = (tensor, visit.microbatch)
            if cell not in self._values:
                posted = self._posted.pop((*cell, False), None)
                if posted is None:
                    self._refuse(row, f"{self._name(*cell)} was neither made here nor received")
                (pending,) = posted.values()
                self._values[cell] = yield from self._until(row, pending, self._name(*cell))
            found[tensor] = self._values[cell]
            self._drop(cell, gradient=False)
        for tensor in border.loaded:
            value = self._loaded.pop((visit.stage, visit.microbatch, tensor), None)
            if value is None:
                self._refuse(row, f"{self._name(tensor, visit.microbatch)} was not loaded")
            found[tensor] = value
        return found

    def _forward(self, row: int) -> Waiting[None]:
        visit = self._visit(row)
        group = self._task.group(visit.stage, visit.microbatch)
        if self._device not in group:
            self._refuse(row, "another replica runs this microbatch")
        inputs = yield from self._inputs(row, visit)
        yield from self._finish_gathers(visit.stage)
        with self._at(row):
            done = self._runner.forward(self._step, visit, inputs)
        graph = self._task.graph
        seen = {*graph.outputs.tolist(), graph.loss} if group[0] == self._device else set()
        for tensor, value in done.outputs.items():
            cell = (tensor, visit.microbatch)
            if self._uses[(*cell, False)]:
                self._values[cell] = value.detach()
            if tensor in seen:
                self.records[-1].outputs[cell] = value.detach().clone()
        if self._task.is_training:
            if not done.has_graph:
                done.outputs, done.weights = {}, {}
            self._passes[visit.stage, visit.microbatch] = done
            in_flight = max(self.statistics.peak_in_flight, len(self._passes))
            self.statistics.peak_in_flight = in_flight
        self._store.release(visit.stage)
        self._count_version(visit)

    def _recompute(self, row: int) -> Waiting[None]:
        visit = self._visit(row)
        done = self._pass(row, visit)
        yield from self._finish_gathers(visit.stage)
        with self._at(row):
            self._runner.recompute(self._step, visit, done)
        self._count_version(visit)

    def _pass(self, row: int, visit: Visit) -> StagePass:
        done = self._passes.get((visit.stage, visit.microbatch))
        if done is None:
            self._refuse(row, "there was no forward")
        return done

    def _begin_backward(self, row: int, visit: Visit) -> Waiting[StagePass]:
        """Wait for all that a backward needs, and give the pass the gradients of its outputs."""
        done = self._pass(row, visit)
        cotangents: dict[int, Tensor] = {}
        for tensor in self._task.borders[visit.stage].outputs:
            if self._task.graph.tensors.differentiable[tensor] and tensor in self._task.readers:
                cotangents[tensor] = yield from self._output_gradient(row, visit, tensor)
        yield from self._finish_gathers(visit.stage)
        with self._at(row):
            self._runner.recompute(self._step, visit, done)
            self._runner.begin_backward(visit.microbatch, done, cotangents)
        self._store.release(visit.stage)
        return done

    def _output_gradient(self, row: int, visit: Visit, tensor: int) -> Waiting[Tensor]:
        """Wait for the gradients of a tensor, and sum them over devices in order of stages."""
        cell = (tensor, visit.microbatch)
        posted = self._posted.get((*cell, True), {})
        total: Tensor | None = None
        for source in self._gradient_sources(visit, tensor):
            if source == self._device:
                part = self._local_gradient(row, *cell)
                del self._contributions[cell]
            elif source in posted:
                what = f"the gradient of {self._name(*cell)}"
                part = yield from self._until(row, posted.pop(source), what)
            else:
                origin = self._program.devices[source]
                self._refuse(
                    row, f"the gradient of {self._name(*cell)} was not received from {origin}"
                )
            total = part if total is None else total + part
        if not posted:
            self._posted.pop((*cell, True), None)
        assert total is not None
        return total

    def _gradient_sources(self, visit: Visit, tensor: int) -> Iterable[int]:
        """Return the devices that a gradient comes from, by their lowest reading stage.

        Rank i of the producer gets it from rank i mod tp of the reader.
        """
        rank = self._task.group(visit.stage, visit.microbatch).index(self._device)
        sources: dict[int, None] = {}
        for reader in self._task.readers[tensor]:
            group = self._task.group(reader, visit.microbatch)
            sources[self._device if self._device in group else group[rank % len(group)]] = None
        return sources

    def _local_gradient(self, row: int, tensor: int, microbatch: int) -> Tensor:
        """Return the gradient of a tensor, summed over the stages of this device that read it."""
        parts = self._contributions.get((tensor, microbatch), {})
        total: Tensor | None = None
        for reader in self._task.readers.get(tensor, ()):
            if self._device not in self._task.group(reader, microbatch):
                continue
            if reader not in parts:
                self._refuse(
                    row,
                    f"the gradient of {self._name(tensor, microbatch)} lacks stage {reader}'s part",
                )
            total = parts[reader] if total is None else total + parts[reader]
        if total is None:
            self._refuse(row, f"no stage here reads {self._name(tensor, microbatch)}")
        return total

    def _contribute(self, visit: Visit, gradients: Mapping[int, Tensor]) -> None:
        """Keep the gradients of what a stage read, for its producer here or to be sent.

        Some tensor-parallel ranks need neither.
        """
        table = self._task.graph.tensors
        for tensor in self._task.borders[visit.stage].inputs:
            cell = (tensor, visit.microbatch)
            producer = int(self._task.plan.stage_of[table.producer[tensor]])
            local = self._device in self._task.group(producer, visit.microbatch)
            if table.differentiable[tensor] and (local or self._uses[(*cell, True)]):
                self._contributions.setdefault(cell, {})[visit.stage] = gradients[tensor]

    def _add_gradients(self, visit: Visit, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            self._store.add_gradient(name, gradient)
        del self._passes[visit.stage, visit.microbatch]
        self._count_version(visit)

    def _backward(self, row: int) -> Waiting[None]:
        visit = self._visit(row)
        done = yield from self._begin_backward(row, visit)
        of_inputs, of_weights = self._runner.gradients(done)
        self._contribute(visit, of_inputs)
        self._add_gradients(visit, of_weights)

    def _backward_input(self, row: int) -> Waiting[None]:
        visit = self._visit(row)
        done = yield from self._begin_backward(row, visit)
        self._contribute(visit, self._runner.input_gradients(done))
        self._count_version(visit)

    def _backward_weight(self, row: int) -> Iterable[Wait]:
        visit = self._visit(row)
        done = self._pass(row, visit)
        if done.cotangents is None:
            self._refuse(row, "there was no BACKWARD_INPUT")
        self._add_gradients(visit, self._runner.weight_gradients(done))
        return ()

    def _count_version(self, visit: Visit) -> None:
        """Count a use of a version of the weights, and forget it after the last."""
        self._uses[visit.stage, visit.version] -= 1
        if self._uses[visit.stage, visit.version] == 0:
            self._store.drop_version(visit.stage, visit.version)

    def _update(self, row: int) -> Waiting[None]:
        program, visit = self._program, self._visit(row)
        yield from self._finish_collectives(
            lambda other: (
                program.kind[other] != Kind.ALL_GATHER and program.stage[other] == visit.stage
            )
        )
        with self._at(row):
            self.records[-1].gradients.update(self._store.update(visit.stage, visit.version))
        versions = max(self.statistics.peak_versions, self._store.num_versions)
        self.statistics.peak_versions = versions
