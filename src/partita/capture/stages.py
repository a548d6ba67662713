"""Runs the stages of a plan over a captured model: a ``StageCode``.

Shapes and types of everything that enters a stage are compared with the capture before any op runs:
sizes are baked into the arguments, and some functions write past their memory otherwise.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from partita.capture.coarsen import in_place_ops
from partita.capture.compiled_stage import (
    EnterSpan,
    StageFunction,
    compile_stage,
    plain_span,
)
from partita.capture.op import CapturedOp, ValueInfo, eval_form, storage_of
from partita.capture.recomputation import Recomputation
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.errors import InvalidInputError
from partita.ranks.device import seed_device


class StageCall(Protocol):
    """The circumstances of one run of a stage."""

    @property
    def training(self) -> bool:
        """Whether modules are in training mode."""
        ...

    @property
    def recomputation(self) -> Recomputation | None:
        """What ops that recompute leave their tensors to; None = all ops keep them."""
        ...

    def op_seed(self, op: int) -> int:
        """Return the seed of an op's random numbers."""
        ...


class Code(Protocol):
    """The part of a captured model that stages need."""

    @property
    def graph(self) -> Graph:
        """The graph."""
        ...

    @property
    def ops(self) -> tuple[CapturedOp, ...]:
        """The ops, in the order of the graph."""
        ...

    @property
    def values(self) -> tuple[ValueInfo, ...]:
        """The tensors, those of the graph first."""
        ...

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """The constants."""
        ...

    def check_mode(self, *, training: bool) -> None:
        """Check that the ops can run in training or in eval mode."""
        ...

    @property
    def is_training(self) -> bool:
        """Whether it was captured in training mode."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Neighbouring ops of a stage that recompute.

    Attributes:
        places: Their places in the stage.
        inputs: Rows of the tensors that enter them.
        buffers: Buffers that they use and that an op of the stage writes.
        function: The ops, to run again; nothing leaves.
    """

    places: range
    inputs: tuple[int, ...]
    buffers: tuple[str, ...]
    function: StageFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """The work of a stage.

    Attributes:
        ops: Index, form in training and form in eval of each op, in order.
        in_place: Places of the ops that may write in place.
        inputs: Rows of the tensors that enter.
        leaving: Rows of the tensors that leave.
        branches: Rows of those that branch off before a place, see ``compile_stage``.
        drops: Rows that no op needs after each place.
        draws: Whether an op draws random numbers.
        writes: Whether an op writes in place.
        again: Places of the ops that recompute; none where all do, as the stage runs again then.
    """

    ops: tuple[tuple[int, CapturedOp, CapturedOp | None], ...]
    in_place: frozenset[int]
    inputs: tuple[int, ...]
    leaving: tuple[int, ...]
    branches: Mapping[int, Sequence[int]]
    drops: tuple[tuple[int, ...], ...]
    draws: bool
    writes: bool
    again: tuple[range, ...]


class CapturedStages:
    """The stages of a plan for a captured model."""

    def __init__(self, code: Code, plan: Plan) -> None:
        """Prepare the stages.

        Raises:
            InvalidInputError: The plan is for another graph.
        """
        graph = code.graph
        if plan.fingerprint != graph.fingerprint or len(plan.stage_of) != len(graph):
            raise InvalidInputError(
                f"the plan is for a graph with fingerprint {plan.fingerprint}, the captured model "
                f"{graph.name!r} has {graph.fingerprint}; plan this graph"
            )
        self._code = code
        self._names = graph.tensors.names
        table = graph.parameters
        self._buffers = {name for name, held in zip(table.names, table.buffer, strict=True) if held}
        self._functions: dict[tuple[int, bool], StageFunction] = {}
        self._spans: dict[int, tuple[_Span, ...]] = {}
        self._again = plan.recompute.tolist()
        members: list[list[int]] = [[] for _ in plan.stages]
        for op, stage in enumerate(plan.stage_of.tolist()):
            members[stage].append(op)
        wanted = {*graph.outputs.tolist(), graph.loss}
        self._readers: dict[int, list[int]] = {}
        readers: dict[int, set[int]] = {}
        for op, stage in enumerate(plan.stage_of.tolist()):
            for value in code.ops[op].reads:
                self._readers.setdefault(value, []).append(op)
                readers.setdefault(value, set()).add(stage)
        self._stages = [
            self._stage(
                row,
                ops,
                {
                    v
                    for op in ops
                    for v in code.ops[op].makes
                    if v in wanted or readers.get(v, set()) - {row}
                },
            )
            for row, ops in enumerate(members)
        ]

    def _stage(self, row: int, members: Sequence[int], leaving: set[int]) -> _Stage:
        code = self._code
        ops = [code.ops[index] for index in members]
        inside = {value for op in ops for value in op.makes}
        inputs = dict.fromkeys(v for op in ops for v in op.reads if v not in inside)
        last: dict[int, int] = {}
        for place, op in enumerate(ops):
            last.update((value, place) for value in (*op.reads, *op.makes))
        drops: list[list[int]] = [[] for _ in ops]
        for value, place in last.items():
            if value not in leaving:
                drops[place].append(value)
        writes = any(leaf.writes for op in ops for leaf in op.leaves)
        return _Stage(
            ops=tuple(
                (index, op, eval_form(op) if code.is_training else op)
                for index, op in zip(members, ops, strict=True)
            ),
            in_place=in_place_ops(ops, leaving, code.values) if writes else frozenset(),
            inputs=tuple(inputs),
            leaving=tuple(sorted(leaving)),
            branches=self._branches(members, leaving),
            drops=tuple(map(tuple, drops)),
            draws=any(op.draws for op in ops),
            writes=writes,
            again=tuple(recomputed_places([self._again[index] for index in members])),
        )

    def _branches(self, members: Sequence[int], leaving: set[int]) -> dict[int, list[int]]:
        """Return the place before which each tensor branches off to the stages that read it.

        Autograd adds up the gradients of a tensor from its last reader to its first. One from
        outside comes before all others, unless readers in here come later than those outside.
        """
        inside = set(members)
        found: dict[int, list[int]] = {}
        for row in sorted(leaving):
            outside = [op for op in self._readers.get(row, ()) if op not in inside]
            if not outside or not self._code.values[row].requires_grad:
                continue
            later = [op for op in self._readers[row] if op in inside and op > outside[-1]]
            if later:
                found.setdefault(members.index(later[0]), []).append(row)
        return found

    def run(
        self,
        stage: int,
        inputs: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        call: StageCall,
    ) -> Mapping[str, Tensor]:
        """Return the tensors that leave a stage, by name.

        Raises:
            InvalidInputError: An input is missing or has another shape or type than in the capture.
        """
        what = self._stages[stage]
        function = self._function(stage, training=call.training)
        entering = [self._checked(stage, row, inputs) for row in what.inputs]
        protected = self._protected(what, inputs.values(), parameters)
        spans = call.training and what.again and call.recomputation is not None
        enter = self._enter_span(stage, parameters, protected, call) if spans else plain_span

        def run_ops(seed: Callable[[int], None]) -> tuple[Tensor, ...]:
            return function(entering, parameters, protected, seed, enter)

        made = _with_own_draws(run_ops, call) if what.draws else run_ops(_never_seeded)
        return {
            self._names[row]: self._leaving(row, value)
            for row, value in zip(what.leaving, made, strict=True)
        }

    def _enter_span(
        self,
        stage: int,
        parameters: Mapping[str, Tensor],
        protected: set[int],
        call: StageCall,
    ) -> EnterSpan:
        """Return what enters the spans of a pass."""
        what, spans, left = self._stages[stage], self._spans_of(stage), call.recomputation
        assert left is not None
        held = {storage_of(tensor) for tensor in parameters.values()}
        held.update(map(storage_of, self._code.constants))

        def enter(number: int, entering: Sequence[Tensor]) -> AbstractContextManager[object]:
            span = spans[number]
            # Ops after the span may not write what it will run again from.
            protected.update(map(storage_of, entering))
            found = {name: parameters[name].clone() for name in span.buffers}

            def again(inputs: Sequence[Tensor], weights: Mapping[str, Tensor]) -> object:
                own = {**weights, **{name: value.clone() for name, value in found.items()}}
                kept = self._protected(what, inputs, own)

                def run_ops(seed: Callable[[int], None]) -> tuple[Tensor, ...]:
                    return span.function(inputs, own, kept, seed, plain_span)

                return _with_own_draws(run_ops, call) if what.draws else run_ops(_never_seeded)

            return left.span(again, entering, held)

        return enter

    def _spans_of(self, stage: int) -> tuple[_Span, ...]:
        """Return the spans of a stage, compiled when they are first asked for."""
        found = self._spans.get(stage)
        if found is None:
            what = self._stages[stage]
            found = self._spans[stage] = tuple(self._span(what, places) for places in what.again)
        return found

    def _span(self, what: _Stage, places: range) -> _Span:
        ops = [what.ops[place][:2] for place in places]
        inside = {value for _, op in ops for value in op.makes}
        inputs = tuple(dict.fromkeys(v for _, op in ops for v in op.reads if v not in inside))
        last = {v: at for at, (_, op) in enumerate(ops) for v in (*op.reads, *op.makes)}
        changed = {name for _, op, _ in what.ops for leaf in op.leaves for name in leaf.changes}
        return _Span(
            places=places,
            inputs=inputs,
            buffers=tuple(sorted(changed & {name for _, op in ops for name in op.parameters})),
            function=compile_stage(
                ops,
                in_place=frozenset(at - places.start for at in what.in_place if at in places),
                inputs=inputs,
                leaving=(),
                branches={},
                drops=[[v for v, end in last.items() if end == at] for at in range(len(ops))],
                constants=self._code.constants,
            ),
        )

    def first_not_finite(
        self,
        stage: int,
        inputs: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        call: StageCall,
    ) -> str:
        """Return the first op of a stage that makes a NaN, run op by op; empty = none makes one.

        Where none does, the first that makes +Inf, then -Inf, is returned: masks are full of -Inf,
        and sound. Buffers may be changed.
        """
        what, code = self._stages[stage], self._code
        held = {row: self._checked(stage, row, inputs) for row in what.inputs}
        protected = self._protected(what, inputs.values(), parameters)
        infinite: dict[float, str] = {}
        for place, (index, trained, other) in enumerate(what.ops):
            op = trained if call.training or other is None else other
            function = compile_stage(
                [(index, op)],
                in_place=frozenset({0} if place in what.in_place else ()),
                inputs=tuple(op.reads),
                leaving=tuple(op.makes),
                branches={},
                drops=((),),
                constants=code.constants,
            )
            entering = [held[row] for row in op.reads]

            def run_op(
                seed: Callable[[int], None],
                function: StageFunction = function,
                entering: Sequence[Tensor] = entering,
            ) -> tuple[Tensor, ...]:
                return function(entering, parameters, protected, seed, plain_span)

            made = _with_own_draws(run_op, call) if op.draws else run_op(_never_seeded)
            held.update(zip(op.makes, made, strict=True))
            name = code.graph.ops.names[index]
            for value in made:
                if not value.is_floating_point() or bool(value.isfinite().all()):
                    continue
                if bool(value.isnan().any()):
                    return name
                sign = 1.0 if bool(value.isposinf().any()) else -1.0
                infinite.setdefault(sign, name)
        return infinite.get(1.0, infinite.get(-1.0, ""))

    def _function(self, stage: int, *, training: bool) -> StageFunction:
        """Return the ops of a stage as a function, compiled when it is first asked for."""
        function = self._functions.get((stage, training))
        if function is None:
            self._code.check_mode(training=training)
            what = self._stages[stage]
            function = self._functions[stage, training] = compile_stage(
                [(index, trained if training else other) for index, trained, other in what.ops],
                in_place=what.in_place,
                inputs=what.inputs,
                leaving=what.leaving,
                branches=what.branches if training else {},
                drops=what.drops,
                constants=self._code.constants,
                spans=[(span.places, span.inputs) for span in self._spans_of(stage)]
                if training
                else (),
            )
        return function

    def _leaving(self, row: int, value: Tensor) -> Tensor:
        """Return a tensor that leaves; both ends of a gradient must agree that there is none."""
        stays = value.requires_grad and not self._code.values[row].requires_grad
        return value.detach() if stays and self._code.is_training else value

    def _checked(self, stage: int, row: int, inputs: Mapping[str, Tensor]) -> Tensor:
        name, info = self._names[row], self._code.values[row]
        value = inputs.get(name)
        if value is None:
            raise InvalidInputError(f"stage {stage} reads {name!r}, which it was not given")
        if value.shape == info.shape and value.dtype is info.dtype:
            return value
        fits = len(info.shape) == value.dim() and all(
            d in info.flexible or length == value.shape[d] for d, length in enumerate(info.shape)
        )
        if not fits or value.dtype != info.dtype:
            raise InvalidInputError(
                f"tensor {name!r} of stage {stage} has shape {tuple(value.shape)} and type "
                f"{value.dtype}; the model was captured with {info.shape} and {info.dtype}: "
                "capture it again at this size"
            )
        return value

    def _protected(
        self, what: _Stage, inputs: Iterable[Tensor], parameters: Mapping[str, Tensor]
    ) -> set[int]:
        """Return the storages that the ops of a stage may not write."""
        if not what.writes:
            return set()
        held = [tensor for name, tensor in parameters.items() if name not in self._buffers]
        return set(map(storage_of, [*inputs, *held, *self._code.constants]))


def recomputed_places(flags: Sequence[bool]) -> Iterator[range]:
    """Yield the runs of neighbours that recompute; none where all do."""
    if all(flags):
        return
    begin = 0
    for place, flag in enumerate((*flags, False)):
        if not flag:
            if begin < place:
                yield range(begin, place)
            begin = place + 1


def _with_own_draws(
    run_ops: Callable[[Callable[[int], None]], tuple[Tensor, ...]], call: StageCall
) -> tuple[Tensor, ...]:
    """Run ops that draw, each with its own seed, and leave the random numbers as they were."""
    generator = torch.default_generator
    before = generator.get_state()
    try:
        return run_ops(lambda op: seed_device(call.op_seed(op)))
    finally:
        generator.set_state(before)


def _never_seeded(op: int) -> None:
    raise AssertionError(f"op {op} draws random numbers in a stage that does not")
