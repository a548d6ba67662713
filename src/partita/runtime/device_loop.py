"""The loop of one device: carries out its instructions, one after the other.

``docs/program.md`` has the rules. In short: a list is the order of issue; a RECV or collective
starts something, and the compute that needs it waits. The gradient of a tensor is summed over the
reader stages of a device before it goes back, and over devices by the producer, always from the
last stage to the first, as autograd does, and never by arrival.

The loop is a generator. It yields a ``Wait`` where it cannot go on yet; over real processes the
transport waits itself and nothing is ever yielded. What can never come is an error at once.

Every instruction leaves two stamps: compute from when it had all it needs, communication from when
it was issued until it was seen to be done.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import numpy as np
from torch import Tensor

from partita.core.program import LAST_COMPUTE, Kind, Program
from partita.errors import InvalidInputError
from partita.ranks.status import Place
from partita.runtime.device_parts import (
    Cell,
    DeviceStatistics,
    Instruction,
    Load,
    Runner,
    StepRecord,
    Store,
    Wait,
    Waiting,
)
from partita.runtime.metering import Meter, NoMeter
from partita.runtime.stage_pass import StagePass, Visit
from partita.runtime.task import Task
from partita.runtime.transport import Meeting, Message, Pending, Transport

_T = TypeVar("_T")
_MOST_SENDS = 32
"""Sends under way beyond which the oldest is waited for, so that sent tensors are let go of."""


_MEMBERS = "the other members of its group"


@dataclass(slots=True)
class _Once:
    """A message that is waited for at its place and again by who needs it; asked only once."""

    pending: Pending[Tensor]
    value: Tensor | None = None

    def poll(self) -> Tensor | None:
        if self.value is None:
            self.value = self.pending.poll()
        return self.value


class _Named:
    """A context that names an instruction in whatever is wrong with it.

    A class, as it is entered several times per instruction: a generator takes twice as long.
    """

    __slots__ = ("_program", "_row")

    def __init__(self, program: Program, row: int) -> None:
        self._program, self._row = program, row

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, exc: object, trace: object) -> None:
        if isinstance(exc, InvalidInputError):
            raise InvalidInputError(f"{self._program.describe(self._row)}: {exc}") from exc


def _posted_ahead(instructions: Sequence[Instruction], ahead: int) -> list[Instruction]:
    """Return a list with each RECV moved forward past so many passes of stages.

    RECVs keep their order, and so do all others.
    """
    passes = [
        place
        for place, instruction in enumerate(instructions)
        if Kind.FORWARD <= instruction.kind < Kind.UPDATE
    ]
    # There are no tags: the k-th RECV from a peer must meet its k-th SEND. It still does, as only
    # RECVs move and the places they move to never go down. ``before`` counts the passes up to here.
    before = 0
    keys = []
    for place, instruction in enumerate(instructions):
        earliest = place
        if instruction.kind is Kind.RECV and ahead and before:
            earliest = passes[max(0, before - ahead)]
        keys.append((earliest, instruction.kind is not Kind.RECV, place))
        before += Kind.FORWARD <= instruction.kind < Kind.UPDATE
    return [instructions[place] for *_, place in sorted(keys)]


def _updates_last(
    instructions: Sequence[Instruction],
) -> tuple[list[Instruction], list[Instruction]]:
    """Return a list without its updates, and the updates with the gathers of what they changed.

    Both keep their order, on every device alike, so that members of a group still meet in one.
    """
    updated: set[int] = set()
    first: list[Instruction] = []
    last: list[Instruction] = []
    for instruction in instructions:
        stage = instruction.visit.stage
        is_update = instruction.kind is Kind.UPDATE
        if is_update:
            updated.add(stage)
        gathers = instruction.kind is Kind.ALL_GATHER and stage in updated
        (last if is_update or gathers else first).append(instruction)
    return first, last


class DeviceLoop:
    """The state of one device and the meaning of its instructions.

    Attributes:
        place: Where it stands.
        meter: Called with every instruction that computes.
        seen: The tensors whose values are kept; all results of the step unless said otherwise.
        on_last_pass: Called when the last forward or backward of a step is done, before the device
            waits for gradients and updates.
        beside: Returns numbers that are summed over all devices beside the gradients, where the
            loop ``carries`` some; called after the last forward or backward. None = nothing is.
        beside_total: The sum of the last step; None before it is there.
        compute_s: Seconds of forwards and backwards in the last step, without waits.
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
        store: Store,
        runner: Runner,
        load: Load,
        blocking: bool = False,
    ) -> None:
        """Prepare a device.

        Args:
            task: What is run.
            device: Which device of the plan this is.
            transport: The way to the others.
            store: Its parameters.
            runner: Its compute.
            load: Gives the inputs of the model.
            blocking: Whether SEND and RECV hold the device. Those that stand together in the list
                are one batch: all are posted, then all are waited for.
        """
        self._task, self._device, self._transport = task, device, transport
        self._store, self._runner, self._load, self._blocking = store, runner, load, blocking
        self._program = task.program
        self._first = int(self._program.ptr[device])
        self._instructions = self._read_instructions()
        ahead = 0 if blocking else transport.posted_ahead
        self._issued = _posted_ahead(self._instructions, ahead)
        # What comes after all devices have agreed on what to do with the gradients.
        self._after: list[Instruction] = []
        if store.agrees:
            self._issued, self._after = _updates_last(self._issued)
        self._step = 0
        # Inputs by (stage, microbatch, tensor).
        self._loaded: dict[tuple[int, int, int], Tensor] = {}
        # Activations by (tensor, microbatch), while ``_uses`` counts someone here who needs them.
        self._values: dict[Cell, Tensor] = {}
        # By (stage, microbatch), from forward until the parameters have their gradients.
        self._passes: dict[Cell, StagePass] = {}
        # Gradients by (tensor, microbatch) and then by the stage that read the tensor.
        self._contributions: dict[Cell, dict[int, Tensor]] = {}
        # Receives by (tensor, microbatch, is a gradient) and then by source: row and message.
        self._posted: dict[tuple[int, int, bool], dict[int, tuple[int, Pending[Tensor]]]] = {}
        # Started and not yet seen to be done, by order of issue: sends; with blocking transfers the
        # messages of the batch; collectives.
        self._sends: deque[tuple[int, Pending[Tensor]]] = deque()
        self._batch: list[tuple[int, Pending[Tensor], str]] = []
        self._collectives: list[tuple[Instruction, Pending[Sequence[Tensor]]]] = []
        # Uses in a whole step, and those left in the current one.
        self._all_uses = dict(self._count_uses())
        self._uses: dict[tuple[object, ...], int] = {}
        self._begin_ns = 0
        self._begun_ns: list[int] = []
        self._ended_ns: list[int] = []
        self.place = Place(-1, -1, 0)
        self.meter: Meter = NoMeter()
        self.seen = task.results
        self.on_last_pass: Callable[[], None] = lambda: None
        self.beside: Callable[[], Tensor] | None = None
        self.beside_total: Tensor | None = None
        self._passes_at = [
            row - self._first
            for row, kind, *_ in self._instructions
            if Kind.FORWARD <= kind < Kind.UPDATE
        ]
        self._last_pass = self._first + max(self._passes_at) if self._passes_at else -1
        self._meetings: dict[int, Meeting] = {}
        self.compute_s = 0.0
        self._carrier = -1 if store.agrees else self._find_carrier()
        self.executed = 0
        self.records: list[StepRecord] = []
        self.statistics = DeviceStatistics()
        handlers: Mapping[Kind, Callable[[Instruction], Iterable[Wait]]] = {
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
        # By number: to look a member of an enum up in a dict takes a call of its own.
        self._handlers = [handlers.get(kind) for kind in sorted(Kind)]

    @property
    def task(self) -> Task:
        """What is run."""
        return self._task

    @property
    def has_passes(self) -> bool:
        """Whether the device runs any stage forward or backward."""
        return self._last_pass >= 0

    @property
    def carries(self) -> bool:
        """Whether something that all devices do after their last pass can carry numbers along."""
        return self._carrier >= 0 or (self._store.agrees and self._task.is_training)

    def _find_carrier(self) -> int:
        """Return the row of a sum over all devices that each does after its last pass; -1 = none.

        It follows from the Program alone, so that all devices find the same one.
        """
        program, everyone = self._program, self._everyone()
        passes = (program.kind >= Kind.FORWARD) & (program.kind < Kind.UPDATE)
        found: dict[int, list[int]] = {}
        for row in np.flatnonzero(program.kind == Kind.ALL_REDUCE).tolist():
            end = int(program.ptr[program.device[row] + 1])
            if len(program.group_of(row)) == len(everyone) and not passes[row:end].any():
                found.setdefault(int(program.bucket[row]), []).append(row)
        for bucket in sorted(found):
            own = [row for row in found[bucket] if program.device[row] == self._device]
            if len(found[bucket]) == len(everyone) and len(own) == 1:
                return own[0]
        return -1

    def _everyone(self) -> tuple[int, ...]:
        """Return the devices that have something to do."""
        ptr = self._program.ptr
        return tuple(d for d in range(len(self._program.devices)) if ptr[d] < ptr[d + 1])

    def _read_instructions(self) -> list[Instruction]:
        program = self._program
        rows = slice(self._first, int(program.ptr[self._device + 1]))
        columns = [
            column[rows].tolist()
            for column in (program.kind, program.stage, program.microbatch, program.version)
        ]
        columns += [
            column[rows].tolist()
            for column in (program.tensor, program.gradient, program.peer, program.group)
        ]
        found = []
        for place, (kind, stage, microbatch, version, tensor, gradient, peer, group) in enumerate(
            zip(*columns, strict=True)
        ):
            message = None
            if kind in (Kind.SEND, Kind.RECV):
                source, target = (self._device, peer)[:: 1 if kind == Kind.SEND else -1]
                message = Message(source, target, tensor, microbatch, gradient)
            found.append(
                Instruction(
                    row=self._first + place,
                    kind=Kind(kind),
                    visit=Visit(stage, microbatch, version),
                    tensor=tensor,
                    message=message,
                    joint=kind <= LAST_COMPUTE and group >= 0,
                )
            )
        return found

    def _count_uses(self) -> Counter[tuple[object, ...]]:
        """Count who needs each activation, gradient and version, so that it can be dropped."""
        # Keys have three places for tensors, two (stage, version) for weights: they never meet.
        uses: Counter[tuple[object, ...]] = Counter()
        for _, kind, visit, _, message, _ in self._instructions:
            if kind is Kind.FORWARD:
                border = self._task.borders[visit.stage]
                uses.update((t, visit.microbatch, False) for t in border.inputs)
            elif kind is Kind.SEND:
                assert message is not None
                uses[message.tensor, message.microbatch, message.gradient] += 1
            if kind <= LAST_COMPUTE and kind not in (Kind.LOAD, Kind.UPDATE):
                uses[visit.stage, visit.version] += 1
        return uses

    def wrap_runner(self, wrap: Callable[[Runner], Runner]) -> Callable[[], None]:
        """Let another runner compute; returns what puts the old one back."""
        before = self._runner
        self._runner = wrap(before)

        def put_back() -> None:
            self._runner = before

        return put_back

    def play(self, step: int) -> Waiting[None]:
        """Carry out the whole list once, yielding where the device has to wait.

        Raises:
            InvalidInputError: The Program cannot be carried out; names the instruction.
        """
        self._step = step
        self._uses = self._all_uses.copy()
        self._store.begin_step()
        self.meter.begin_step()
        size = len(self._instructions)
        self._begun_ns, self._ended_ns = [0] * size, [0] * size
        record = StepRecord()
        self.records.append(record)
        yield from self._carry_out(self._issued)
        if self._store.agrees and self._task.is_training:
            yield from self._agree()
            yield from self._carry_out(self._after)
        yield from self._end_step()
        self.meter.end_step()
        begun, ended = self._begun_ns, self._ended_ns
        self.compute_s = sum([ended[at] - begun[at] for at in self._passes_at]) / 1e9
        record.begin_ns = np.array(begun, np.int64)
        record.end_ns = np.array(ended, np.int64)
        self.place = Place(-1, -1, time.perf_counter_ns())

    def _carry_out(self, instructions: Sequence[Instruction]) -> Waiting[None]:
        clock, handlers = time.perf_counter_ns, self._handlers
        for instruction in instructions:
            kind, position = instruction.kind, instruction.row - self._first
            handle = handlers[kind]
            if handle is None:
                self._refuse(instruction.row, "this kind has no meaning yet")
            self._begin_ns = clock()
            self.place = Place(instruction.row, -1, self._begin_ns)
            # A batch ends before whatever is no message, as in the simulator.
            if self._batch and instruction.message is None:
                yield from self._finish_batch()
            if instruction.joint:
                row = instruction.row
                # Tensor-parallel ranks meet first, then each runs its part.
                yield from self._until(row, row, self._meet(instruction), _MEMBERS)
            yield from handle(instruction)
            if kind <= LAST_COMPUTE:
                self.meter.end(kind)
            self._begun_ns[position] = self._begin_ns
            self._ended_ns[position] = clock()
            self.executed += 1
            self.statistics.instructions[kind] += 1
            if instruction.row == self._last_pass:
                self.on_last_pass()

    def _agree(self) -> Waiting[None]:
        """Sum over all devices what is known of the gradients when all of them are reduced."""
        yield from self._finish_batch()
        yield from self._finish_collectives(lambda other: other.kind is not Kind.ALL_GATHER)
        measured = self._store.measure()
        meeting = Meeting(
            kind=Kind.ALL_REDUCE,
            device=self._device,
            members=self._everyone(),
            bucket=-1,
            microbatch=-1,
        )
        beside = [] if self.beside is None else [self.beside()]
        pending = self._transport.meet(meeting, [measured, *beside])
        row = self._issued[-1].row
        total, *rest = yield from self._until(
            row, row, pending, "all devices to know their gradients"
        )
        self._take_beside(rest)
        self._store.agree(total)

    def _take_beside(self, values: Sequence[Tensor]) -> None:
        """Keep what was summed beside gradients; of a step that is played twice the first."""
        for value in values:
            self.beside_total = value if self.beside_total is None else self.beside_total

    def _end_step(self) -> Waiting[None]:
        if self._batch:
            yield from self._finish_batch()
        if self._sends:
            yield from self._finish_sends(0)
        if self._collectives:
            yield from self._finish_collectives(lambda _: True)
        if self._values or self._passes or self._contributions or self._posted:
            self._refuse_leftovers()
        if unused := self._store.left_over():
            name = self._program.devices[self._device]
            raise InvalidInputError(f"{name}: the gradient of parameter {unused[0]!r} is not used")
        if self._task.is_training:  # an evaluation must not move the schedule of the training on
            self._store.end_step()

    def _refuse_leftovers(self) -> NoReturn:
        """Say of what a step has left that nobody used it."""
        leftovers: tuple[tuple[Sequence[tuple[int, ...]], str], ...] = (
            (list(self._values), "tensor {} of microbatch {} was never used"),
            (list(self._passes), "stage {} has no whole backward for microbatch {}"),
            (list(self._contributions), "the gradient of tensor {} of microbatch {} was not used"),
            (list(self._posted), "tensor {} of microbatch {} was received in vain"),
        )
        name = self._program.devices[self._device]
        cells, what = next((cells, what) for cells, what in leftovers if cells)
        raise InvalidInputError(f"{name}: {what.format(*cells[0])}")

    def _refuse(self, row: int, why: str) -> NoReturn:
        raise InvalidInputError(f"{self._program.describe(row)}: {why}")

    def _at(self, row: int) -> "_Named":
        """Name the instruction in whatever is wrong with it."""
        return _Named(self._program, row)

    def _name(self, tensor: int, microbatch: int) -> str:
        return f"tensor {self._task.graph.tensors.names[tensor]!r} of microbatch {microbatch}"

    def _until(self, row: int, awaited: int, pending: Pending[_T], what: str) -> Waiting[_T]:
        """Wait until what a row has started is done, and return its result.

        Args:
            row: The instruction that is said to wait.
            awaited: The instruction that has started it.
            pending: What it has started.
            what: What it is.
        """
        at = self.place.row
        self.place = Place(at, awaited, time.perf_counter_ns())
        while (value := pending.poll()) is None:
            yield Wait(row, f"{self._program.describe(row)} waits for {what}")
        # Compute is stamped from when it had all it needs: each wait moves its begin on, and is the
        # end of what was waited for.
        self._begin_ns = now = time.perf_counter_ns()
        self.place = Place(at, -1, now)
        self._ended_ns[awaited - self._first] = now
        return value

    def _send(self, instruction: Instruction) -> Waiting[None]:
        row, message = instruction.row, instruction.message
        assert message is not None
        cell = (message.tensor, message.microbatch)
        if message.gradient:
            value = self._local_gradient(row, *cell)
        elif cell in self._values:
            value = self._values[cell]
        else:
            self._refuse(row, f"{self._name(*cell)} is not there to be sent")
        # Before the new one is posted: each holds its tensor until it is done.
        yield from self._finish_sends(_MOST_SENDS - 1)
        with self._at(row):
            sent = self._transport.send(message, value)
        self.statistics.sent_bytes += value.numel() * value.element_size()
        self._drop(cell, gradient=message.gradient)
        if self._blocking:
            self._batch.append((row, sent, "its receiver"))
        else:
            self._sends.append((row, sent))

    def _finish_sends(self, remaining: int) -> Waiting[None]:
        """Wait for the oldest sends until so many are under way."""
        while len(self._sends) > remaining:
            row, sent = self._sends[0]
            yield from self._until(row, row, sent, "its receiver")
            self._sends.popleft()

    def _finish_batch(self) -> Waiting[None]:
        """Wait for the messages of a batch, in the order of issue."""
        for row, pending, other in self._batch:
            yield from self._until(row, row, pending, other)
        self._batch.clear()

    def _receive(self, instruction: Instruction) -> Iterable[Wait]:
        row, message = instruction.row, instruction.message
        assert message is not None
        with self._at(row):
            posted = self._transport.receive(message)
        if self._blocking:
            posted = _Once(posted)
            self._batch.append((row, posted, "its sender"))
        key = (message.tensor, message.microbatch, message.gradient)
        self._posted.setdefault(key, {})[message.source] = (row, posted)
        return ()

    def _meet(
        self, instruction: Instruction, values: Sequence[Tensor] = ()
    ) -> Pending[Sequence[Tensor]]:
        with self._at(instruction.row):
            return self._transport.meet(self._meeting(instruction), values)

    def _meeting(self, instruction: Instruction) -> Meeting:
        row, program = instruction.row, self._program
        if row not in self._meetings:
            self._meetings[row] = Meeting(
                kind=instruction.kind,
                device=self._device,
                members=tuple(program.group_of(row).tolist()),
                bucket=int(program.bucket[row]),
                microbatch=instruction.visit.microbatch,
                parts=self._parts_of(instruction),
            )
        return self._meetings[row]

    def _parts_of(self, instruction: Instruction) -> int:
        """Return into how many parts a scatter divides; 0 = it is none."""
        if instruction.kind is not Kind.REDUCE_SCATTER:
            return 0
        return self._task.plan.stages[instruction.visit.stage].shard_size()

    def _start_collective(self, instruction: Instruction) -> Waiting[None]:
        bucket = self._meeting(instruction).bucket
        if instruction.kind is Kind.REDUCE_SCATTER:
            # Each holds the gradients of a whole stage until it is done: one at a time.
            yield from self._finish_collectives(
                lambda other: (
                    other.kind is Kind.REDUCE_SCATTER and self._meeting(other).bucket == bucket
                )
            )
        values = self._store.outgoing(instruction.kind, bucket)
        if instruction.row == self._carrier and self.beside is not None:
            values = [*values, self.beside()]
        self._collectives.append((instruction, self._meet(instruction, values)))

    def _finish_collectives(self, wanted: Callable[[Instruction], bool]) -> Waiting[None]:
        """Wait for the collectives that are wanted, in the order of issue."""
        # Over a copy, as entries leave the list on the way.
        for entry in [entry for entry in self._collectives if wanted(entry[0])]:
            (row, kind, *_), pending = entry
            values = yield from self._until(row, row, pending, _MEMBERS)
            if row == self._carrier and self.beside is not None:
                self._take_beside(values[-1:])
                values = values[:-1]
            self._store.incoming(kind, self._meeting(entry[0]).bucket, values)
            self._collectives.remove(entry)

    def _finish_gathers(self, stage: int) -> Waiting[None]:
        return self._finish_collectives(
            lambda other: other.kind is Kind.ALL_GATHER and other.visit.stage == stage
        )

    def _drop(self, cell: Cell, *, gradient: bool) -> None:
        """Count a use of an activation or gradient, and forget it after the last."""
        key = (*cell, gradient)
        self._uses[key] -= 1
        if self._uses[key] == 0:
            (self._contributions if gradient else self._values).pop(cell, None)

    def _load_input(self, instruction: Instruction) -> Iterable[Wait]:
        visit, tensor = instruction.visit, instruction.tensor
        name = self._task.graph.tensors.names[tensor]
        self.meter.begin(instruction.kind)
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
                ((awaited, pending),) = posted.values()
                self._values[cell] = yield from self._until(
                    row, awaited, pending, self._name(*cell)
                )
            found[tensor] = self._values[cell]
            self._drop(cell, gradient=False)
        for tensor in border.loaded:
            value = self._loaded.pop((visit.stage, visit.microbatch, tensor), None)
            if value is None:
                self._refuse(row, f"{self._name(tensor, visit.microbatch)} was not loaded")
            found[tensor] = value
        return found

    def _forward(self, instruction: Instruction) -> Waiting[None]:
        row, visit = instruction.row, instruction.visit
        group = self._task.group(visit.stage, visit.microbatch)
        if self._device not in group:
            self._refuse(row, "another replica runs this microbatch")
        inputs = yield from self._inputs(row, visit)
        # All waits come before the meter begins, so that it counts compute alone.
        if self._collectives:
            yield from self._finish_gathers(visit.stage)
        self.meter.begin(instruction.kind)
        with self._at(row):
            done = self._runner.forward(self._step, visit, inputs)
        # All ranks of a group make the same values; one of them reports.
        seen = self.seen if group[0] == self._device else ()
        for tensor, value in done.outputs.items():
            cell = (tensor, visit.microbatch)
            if self._uses.get((*cell, False)):
                # Detached: the graph belongs to the pass, and a reader on this device must not
                # extend it.
                self._values[cell] = value.detach()
            if tensor in seen:
                self.records[-1].outputs[cell] = value.detach().clone()
        if self._task.is_training:
            # Forward will be repeated before backward: keep the inputs alone.
            if not done.has_graph:
                done.outputs, done.weights = {}, {}
            self._passes[visit.stage, visit.microbatch] = done
            in_flight = max(self.statistics.peak_in_flight, len(self._passes))
            self.statistics.peak_in_flight = in_flight
        self._store.release(visit.stage)
        self._count_version(visit)

    def _recompute(self, instruction: Instruction) -> Waiting[None]:
        row, visit = instruction.row, instruction.visit
        done = self._pass(row, visit)
        yield from self._finish_gathers(visit.stage)
        self.meter.begin(instruction.kind)
        with self._at(row):
            self._runner.recompute(self._step, visit, done)
            if done.recomputation is not None:
                done.recomputation.now()
        self._count_version(visit)

    def _pass(self, row: int, visit: Visit) -> StagePass:
        done = self._passes.get((visit.stage, visit.microbatch))
        if done is None:
            self._refuse(row, "there was no forward")
        return done

    def _begin_backward(self, instruction: Instruction) -> Waiting[StagePass]:
        """Wait for all that a backward needs, and give the pass the gradients of its outputs."""
        row, visit = instruction.row, instruction.visit
        done = self._pass(row, visit)
        cotangents: dict[int, Tensor] = {}
        for tensor in self._task.returning[visit.stage]:
            cotangents[tensor] = yield from self._output_gradient(row, visit, tensor)
        if self._collectives:
            yield from self._finish_gathers(visit.stage)
        self.meter.begin(instruction.kind)
        with self._at(row):
            # Nothing to do where a graph is there already, from forward or from a RECOMPUTE. Where
            # some ops recompute they run when backward comes to them.
            self._runner.recompute(self._step, visit, done)
            self._runner.begin_backward(visit, done, cotangents)
        return done

    def _output_gradient(self, row: int, visit: Visit, tensor: int) -> Waiting[Tensor]:
        """Wait for the gradients of a tensor, and sum them over devices from the last stage on."""
        cell = (tensor, visit.microbatch)
        posted = self._posted.get((*cell, True), {})
        total: Tensor | None = None
        # In the order of the stages and not of arrival: sums of floats depend on their order.
        for source in self._gradient_sources(visit, tensor):
            if source == self._device:
                part = self._local_gradient(row, *cell)
                del self._contributions[cell]
            elif source in posted:
                what = f"the gradient of {self._name(*cell)}"
                part = yield from self._until(row, *posted.pop(source), what)
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
        """Return the devices that a gradient comes from, by their highest reading stage.

        Rank i of the producer gets it from rank i mod tp of the reader.
        """
        rank = self._task.group(visit.stage, visit.microbatch).index(self._device)
        sources: dict[int, None] = {}
        # A dict keeps the first place of each device, that of its highest reader.
        for reader in reversed(self._task.readers[tensor]):
            group = self._task.group(reader, visit.microbatch)
            sources[self._device if self._device in group else group[rank % len(group)]] = None
        return sources

    def _local_gradient(self, row: int, tensor: int, microbatch: int) -> Tensor:
        """Return the gradient of a tensor, summed over the stages of this device that read it."""
        parts = self._contributions.get((tensor, microbatch), {})
        total: Tensor | None = None
        for reader in reversed(self._task.readers.get(tensor, ())):
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
        for tensor, producer in self._task.contributes[visit.stage]:
            cell = (tensor, visit.microbatch)
            local = self._device in self._task.group(producer, visit.microbatch)
            if local or self._uses.get((*cell, True)):
                self._contributions.setdefault(cell, {})[visit.stage] = gradients[tensor]

    def _add_gradients(self, visit: Visit, gradients: Mapping[str, Tensor]) -> None:
        self._store.add_gradients(gradients)
        del self._passes[visit.stage, visit.microbatch]
        self._count_version(visit)

    def _backward(self, instruction: Instruction) -> Waiting[None]:
        visit = instruction.visit
        done = yield from self._begin_backward(instruction)
        of_inputs, of_weights = self._runner.gradients(visit, done)
        self._store.release(visit.stage)
        self._contribute(visit, of_inputs)
        self._add_gradients(visit, of_weights)

    def _backward_input(self, instruction: Instruction) -> Waiting[None]:
        visit = instruction.visit
        done = yield from self._begin_backward(instruction)
        of_inputs = self._runner.input_gradients(visit, done)
        self._store.release(visit.stage)
        self._contribute(visit, of_inputs)
        self._count_version(visit)

    def _backward_weight(self, instruction: Instruction) -> Iterable[Wait]:
        row, visit = instruction.row, instruction.visit
        done = self._pass(row, visit)
        if done.cotangents is None:
            self._refuse(row, "there was no BACKWARD_INPUT")
        self.meter.begin(instruction.kind)
        self._add_gradients(visit, self._runner.weight_gradients(visit, done))
        return ()

    def _count_version(self, visit: Visit) -> None:
        """Count a use of a version of the weights, and forget it after the last."""
        self._uses[visit.stage, visit.version] -= 1
        if self._uses[visit.stage, visit.version] == 0:
            self._store.drop_version(visit.stage, visit.version)

    def _update(self, instruction: Instruction) -> Waiting[None]:
        row, visit = instruction.row, instruction.visit
        # Reductions of this stage; gathers are for the next compute and may go on.
        yield from self._finish_collectives(
            lambda other: other.kind is not Kind.ALL_GATHER and other.visit.stage == visit.stage
        )
        self.meter.begin(instruction.kind)
        with self._at(row):
            self.records[-1].gradients.update(self._store.update(visit.stage, visit.version))
        versions = max(self.statistics.peak_versions, self._store.num_versions)
        self.statistics.peak_versions = versions
