"""Runs a captured model op by op, forward and backward, and times each op alone.

Every op gets detached leaves, so that its part of the autograd graph is its own. The walk backwards
hands the real gradients from op to op: what is timed is the backward of the op, with the sum where
several ops have read a tensor.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partita.capture.blocks import call_signature
from partita.capture.captured import CapturedModel
from partita.capture.coarsen import in_place_ops
from partita.capture.op import CapturedOp, ModuleCall, Replay, storage_of
from partita.capture.tree import Const, Param, Ref, Value
from partita.core.columns import Floats
from partita.errors import UnsupportedError
from partita.profiler.measure.clock import EngineStart, Stopwatch

_MANY = 9
_FILLINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """Seconds of the ops in one round.

    Attributes:
        forward_s: Forward time of each op.
        backward_s: Backward time of each op, 0 where no gradient flows.
        backward_input_s: Time of the gradients of its inputs alone, in rounds that split.
    """

    forward_s: Floats
    backward_s: Floats
    backward_input_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Cost of starting an op, which is none of its own work.

    Attributes:
        forward_s: To be taken off each forward.
        backward_s: To be taken off each backward.
        each_s: One mark in a backward, or one start of autograd's engine.
    """

    forward_s: Floats
    backward_s: Floats
    each_s: float


@dataclass(slots=True)
class _OpPass:
    """An op between its forward and its backward.

    Attributes:
        leaves: Its inputs that want a gradient, by row.
        made: Tensors that it made, with its autograd graph, by row.
    """

    leaves: dict[int, Tensor]
    made: dict[int, Tensor]


@dataclass(slots=True)
class _Marks:
    """Pairs of marks by op.

    Attributes:
        split: Whether the gradients of inputs are computed once more, alone.
    """

    split: bool = False
    forward: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    backward: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    inputs: dict[int, tuple[Any, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class _Kept:
    """Inputs to run one op again: what it reads, and the gradients of what it makes."""

    reads: dict[int, Tensor]
    gradients: dict[int, Tensor] = field(default_factory=dict)


class OpRunner:
    """Runs the ops of a captured model one by one."""

    def __init__(self, captured: CapturedModel, inputs: Sequence[Tensor], clock: Stopwatch) -> None:
        """Prepare the ops.

        Args:
            captured: The model; ops in training mode are also run backwards.
            inputs: The tensors of the example, in the order of the graph.
            clock: Times the ops.
        """
        self.captured = captured
        self.where = "the forward of the first op"
        self._held_gradients: dict[str, Tensor] = {}
        self._sums: set[int] = set()
        self._clock = clock
        self.inputs = dict(enumerate(inputs))
        graph = captured.graph
        held = {
            name: t if isinstance(t, nn.Parameter) else t.detach().clone()
            for name, t in captured.parameters.items()
        }
        self.parameters = held
        guarded = [*inputs, *captured.constants]
        guarded += [t for t in held.values() if isinstance(t, nn.Parameter)]
        self.protected = frozenset(map(storage_of, guarded))
        wanted = {*graph.outputs.tolist(), graph.loss} - {-1}
        self.in_place = in_place_ops(captured.ops, wanted, captured.values)
        self.drops = _drops(captured.ops)
        self._trained = [
            [n for n in dict.fromkeys(op.parameters) if held[n].requires_grad]
            for op in captured.ops
        ]

    def forward(
        self, index: int, values: Mapping[int, Tensor], marks: _Marks | None = None
    ) -> _OpPass:
        """Run an op on what it reads."""
        op = self.captured.ops[index]
        self.where = f"the forward of op {op.name!r}"
        in_place = index in self.in_place
        local = {v: values[v] for v in op.reads}
        leaves: dict[int, Tensor] = {}
        if self.captured.is_training:
            for v in op.reads:
                if self.captured.values[v].requires_grad:
                    local[v] = leaves[v] = values[v].detach().requires_grad_()
        if in_place:
            for ref, _ in op.writes:
                assert isinstance(ref, Value)
                local[ref.index] = local[ref.index].clone()
        replay = Replay(
            values=local,
            parameters=self.parameters,
            constants=self.captured.constants,
            protected=self.protected,
        )
        first = self._clock.mark()
        replay.run(op, in_place=in_place)
        last = self._clock.mark()
        if marks is not None:
            marks.forward[index] = (first, last)
        return _OpPass(leaves, {v: replay.values[v] for v in op.makes})

    def backward(
        self,
        index: int,
        done: _OpPass,
        gradients: dict[int, Tensor],
        marks: _Marks | None = None,
    ) -> None:
        """Add the gradients of what an op reads, given those of what it made."""
        self.where = f"the backward of op {self.captured.ops[index].name!r}"
        roots = [
            (t, gradients[v]) for v, t in done.made.items() if t.requires_grad and v in gradients
        ]
        leaves = list(done.leaves.values())
        parameters = [self.parameters[name] for name in self._trained[index]]
        if not roots or not (leaves or parameters):
            return
        outs, ups = [t for t, _ in roots], [g for _, g in roots]
        split = marks is not None and marks.split and bool(leaves) and bool(parameters)
        first = self._clock.mark()
        found = torch.autograd.grad(
            outs, leaves + parameters, ups, retain_graph=split, allow_unused=True
        )
        for v, gradient in zip(done.leaves, found, strict=False):
            if gradient is not None:
                self._add(gradients, v, gradient)
        self._hold(self._trained[index], found[len(leaves) :])
        last = self._clock.mark()
        del found
        if marks is None:
            return
        marks.backward[index] = (first, last)
        if split:
            first = self._clock.mark()
            torch.autograd.grad(outs, leaves, ups, allow_unused=True)
            marks.inputs[index] = (first, self._clock.mark())
        elif not parameters:
            marks.inputs[index] = marks.backward[index]

    def _add(self, gradients: dict[int, Tensor], v: int, gradient: Tensor) -> None:
        """Sum gradients as the engine does: in place once the sum is a tensor of its own."""
        if v not in gradients:
            gradients[v] = gradient
        elif v in self._sums:
            gradients[v] += gradient
        else:
            gradients[v] = gradients[v] + gradient
            self._sums.add(v)

    def _hold(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradients of parameters for the rest of the step, as a real step does."""
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                held = self._held_gradients.setdefault(name, gradient)
                if held is not gradient:
                    self._held_gradients[name] = held + gradient

    def forwards(
        self,
        marks: _Marks | None = None,
        *,
        before: Callable[[int, Mapping[int, Tensor]], None] = lambda _, __: None,
    ) -> list[_OpPass]:
        """Run all ops forward; in training return what their backward needs.

        Args:
            marks: Takes the times.
            before: Called with each op and the tensors that there are, before it runs.
        """
        values, passes = dict(self.inputs), []
        for index in range(len(self.captured.ops)):
            before(index, values)
            done = self.forward(index, values, marks)
            values.update((v, t.detach()) for v, t in done.made.items())
            if self.captured.is_training:
                passes.append(done)
            for v in self.drops[index]:
                values.pop(v, None)
        return passes

    def step(
        self,
        marks: _Marks | None = None,
        *,
        keep: Iterable[int] = (),
        after: Callable[[], None] = lambda: None,
    ) -> dict[int, _Kept]:
        """Run all ops forward, and backward in training.

        Args:
            marks: Takes the times.
            keep: Ops whose inputs and gradients to return.
            after: Called after the backward of each op.
        """
        kept = {index: _Kept({}) for index in keep}

        def before(index: int, values: Mapping[int, Tensor]) -> None:
            if index in kept:
                kept[index].reads = {v: values[v] for v in self.captured.ops[index].reads}

        self._held_gradients = {}
        self._sums = set()
        passes = self.forwards(marks, before=before)
        gradients = self._first_gradients(passes)
        for index in reversed(range(len(passes))):
            done = passes.pop()
            if index in kept:
                kept[index].gradients = {v: gradients[v] for v in done.made if v in gradients}
            self.backward(index, done, gradients, marks)
            after()
            for v in done.made:
                gradients.pop(v, None)
        self._held_gradients = {}
        return kept

    def _first_gradients(self, passes: Sequence[_OpPass]) -> dict[int, Tensor]:
        """Return the gradient of the loss, or ones for outputs where there is no loss."""
        graph = self.captured.graph
        roots = [graph.loss] if graph.loss >= 0 else graph.outputs.tolist()
        made = {v: done.made[v] for done in passes for v in done.made if v in roots}
        return {v: torch.ones_like(t) for v, t in made.items() if t.requires_grad}

    def overheads(self, device: torch.device) -> Overheads:
        """Return what it costs to start each op alone, forward and backward.

        Forward: filling in the arguments. Backward: the engine's start, which grows with the number
        of gradients asked for; timed between the ops of a step, where caches are as cold as they
        are for the ops.
        """
        ops = self.captured.ops
        forward = self.filling_s()
        if not self._clock.counts_host or not self.captured.is_training:
            return Overheads(forward_s=forward, backward_s=np.zeros(len(ops)), each_s=0.0)
        one, many = EngineStart(self._clock, device), EngineStart(self._clock, device, _MANY)
        starts: list[tuple[float, float]] = []
        self.step(after=lambda: starts.append((one.seconds(), many.seconds())))
        few = statistics.median(start for start, _ in starts)
        more = statistics.median(max(0.0, last - first) for first, last in starts) / (_MANY - 1)
        targets = [
            sum(self.captured.values[v].requires_grad for v in set(op.reads)) + len(trained)
            for op, trained in zip(ops, self._trained, strict=True)
        ]
        extra = np.maximum(np.array(targets, dtype=np.float64) - 1, 0.0)
        return Overheads(forward_s=forward, backward_s=few + more * extra, each_s=few)

    def filling_s(self) -> Floats:
        """Return the time to fill in the arguments of each op that is one call."""
        ops = self.captured.ops
        seconds = np.zeros(len(ops))

        def before(index: int, values: Mapping[int, Tensor]) -> None:
            if not ops[index].parts and not ops[index].writes:
                seconds[index] = self._filling_s(ops[index], values)

        if self._clock.counts_host:
            self.forwards(before=before)
        return seconds

    def _filling_s(self, op: CapturedOp, values: Mapping[int, Tensor]) -> float:
        """Return the time of a call of an op whose function does nothing; the shortest of a few."""
        nothing = torch.zeros(())
        count = 1 + max((place for place, _ in op.outputs), default=0)
        result = nothing if count == 1 else (nothing,) * count
        empty = replace(op, func=lambda *_, **__: result)
        replay = Replay(
            values={v: values[v] for v in op.reads},
            parameters=self.parameters,
            constants=self.captured.constants,
        )
        seconds = []
        for _ in range(_FILLINGS):
            first = self._clock.mark()
            replay.run(empty)
            seconds.append(self._clock.between(first, self._clock.mark()))
        return min(seconds)

    def round(self, *, split: bool = False) -> RoundTimes:
        """Run all ops and return their times; on request those of gradients of inputs too."""
        marks = _Marks(split=split)
        self.step(marks)
        return self._times(marks)

    def round_of(self, kept: Mapping[int, _Kept], *, split: bool = False) -> RoundTimes:
        """Run some ops alone, on what ``step`` has kept for them, and return their times."""
        marks = _Marks(split=split)
        self._sums = set()
        for index, what in kept.items():
            done = self.forward(index, what.reads, marks)
            if self.captured.is_training:
                self.backward(index, done, dict(what.gradients), marks)
            self._held_gradients = {}
        return self._times(marks)

    def _times(self, marks: _Marks) -> RoundTimes:
        self._clock.settle()
        count = len(self.captured.ops)

        def column(pairs: Mapping[int, tuple[Any, Any]]) -> Floats:
            seconds = np.zeros(count)
            for index, (first, last) in pairs.items():
                seconds[index] = self._clock.between(first, last)
            return seconds

        return RoundTimes(
            forward_s=column(marks.forward),
            backward_s=column(marks.backward),
            backward_input_s=column(marks.inputs),
        )

    @contextmanager
    def naming_ops(self) -> Iterator[None]:
        """Translate running out of memory into an error that names the op.

        Raises:
            UnsupportedError: There was not enough memory.
        """
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as exc:
            raise self._too_little_memory(exc) from exc
        except RuntimeError as exc:
            if "allocate" not in str(exc) and "out of memory" not in str(exc):
                raise
            raise self._too_little_memory(exc) from exc

    def _too_little_memory(self, exc: BaseException) -> UnsupportedError:
        said = str(exc).strip().splitlines()
        reason = f" ({said[0][:160]})" if said else ""
        size = self.captured.graph.batch_size
        return UnsupportedError(
            f"out of memory in {self.where} at batch size {size}{reason}; "
            "try a smaller --batch-size"
        )


def _drops(ops: Sequence[CapturedOp]) -> list[list[int]]:
    """Return the tensors that no op reads after each op."""
    last: dict[int, int] = {}
    for index, op in enumerate(ops):
        last.update((value, index) for value in (*op.reads, *op.makes))
    drops: list[list[int]] = [[] for _ in ops]
    for value, index in last.items():
        drops[index].append(value)
    return drops


def equal_ops(captured: CapturedModel) -> list[int]:
    """Return for each op the first op that calls the same on the same shapes and types."""
    first: dict[str, int] = {}
    return [first.setdefault(_signature(captured, op), i) for i, op in enumerate(captured.ops)]


def _signature(captured: CapturedModel, op: CapturedOp) -> str:
    seen: dict[Ref, int] = {}

    def describe(ref: Ref) -> object:
        place = seen.setdefault(ref, len(seen))
        if isinstance(ref, Value):
            info = captured.values[ref.index]
            return (place, info.shape, info.dtype, info.requires_grad)
        if isinstance(ref, Param):
            held = captured.parameters[ref.name]
            return (place, held.shape, held.dtype, held.requires_grad)
        assert isinstance(ref, Const)
        constant = captured.constants[ref.index]
        return (place, constant.shape, constant.dtype)

    made = [(captured.values[v].shape, captured.values[v].dtype) for v in op.makes]
    modules = [repr(leaf.func.module) for leaf in op.leaves if isinstance(leaf.func, ModuleCall)]
    return f"{call_signature(op, describe)} -> {made} {modules}"
