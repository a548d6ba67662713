"""Runs the stages of a plan over a captured model: a ``StageCode``.

Shapes and types of everything that enters a stage are compared with the capture before any op runs:
sizes are baked into the arguments, and some functions write past their memory otherwise.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.errors import InvalidInputError
from partita.profile.captured_modes import eval_form
from partita.profile.captured_op import CapturedOp, Replay, ValueInfo, storage_of
from partita.profile.coarsen import in_place_ops


class StageCall(Protocol):
    """The circumstances of one run of a stage."""

    @property
    def training(self) -> bool:
        """Whether modules are in training mode."""
        ...

    def op_seed(self, op: int) -> int:
        """Return the seed of an op's random numbers."""
        ...


class Code(Protocol):
    """What the stages need of a captured model."""

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
class _Stage:
    """What a stage does.

    Attributes:
        ops: Index, form in training and form in eval of each op, in order.
        in_place: Places of the ops that may write in place.
        inputs: Rows of the tensors that enter.
        leaving: Rows of the tensors that leave.
        drops: Rows that no op needs after each place.
        draws: Whether an op draws random numbers.
        writes: Whether an op writes in place.
    """

    ops: tuple[tuple[int, CapturedOp, CapturedOp | None], ...]
    in_place: frozenset[int]
    inputs: tuple[int, ...]
    leaving: tuple[int, ...]
    drops: tuple[tuple[int, ...], ...]
    draws: bool
    writes: bool


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
        members: list[list[int]] = [[] for _ in plan.stages]
        for op, stage in enumerate(plan.stage_of.tolist()):
            members[stage].append(op)
        wanted = {*graph.outputs.tolist(), graph.loss}
        readers: dict[int, set[int]] = {}
        for captured, stage in zip(code.ops, plan.stage_of.tolist(), strict=True):
            for value in captured.reads:
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
            drops=tuple(map(tuple, drops)),
            draws=any(op.draws for op in ops),
            writes=writes,
        )

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
        code, what = self._code, self._stages[stage]
        code.check_mode(training=call.training)
        replay = Replay(
            values={row: self._checked(stage, row, inputs) for row in what.inputs},
            parameters=parameters,
            constants=code.constants,
            protected=self._protected(what, inputs, parameters),
        )
        with torch.random.fork_rng(devices=[]) if what.draws else nullcontext():
            for place, (index, trained, evaluated) in enumerate(what.ops):
                op = trained if call.training else evaluated
                if op is not None:
                    if op.draws:
                        _seed(call.op_seed(index))
                    replay.run(op, in_place=place in what.in_place)
                for value in what.drops[place]:
                    replay.values.pop(value, None)
        return {self._names[row]: self._leaving(row, replay.values[row]) for row in what.leaving}

    def _leaving(self, row: int, value: Tensor) -> Tensor:
        """Return a tensor that leaves; both ends of a gradient must agree that there is none."""
        stays = value.requires_grad and not self._code.values[row].requires_grad
        return value.detach() if stays and self._code.is_training else value

    def _checked(self, stage: int, row: int, inputs: Mapping[str, Tensor]) -> Tensor:
        name, info = self._names[row], self._code.values[row]
        value = inputs.get(name)
        if value is None:
            raise InvalidInputError(f"stage {stage} reads {name!r}, which it was not given")
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
        self, what: _Stage, inputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
    ) -> frozenset[int]:
        """Return the storages that the ops of a stage may not write."""
        if not what.writes:
            return frozenset()
        table = self._code.graph.parameters
        buffers = {n for n, is_buffer in zip(table.names, table.buffer, strict=True) if is_buffer}
        held = [tensor for name, tensor in parameters.items() if name not in buffers]
        return frozenset(map(storage_of, [*inputs.values(), *held, *self._code.constants]))


def _seed(value: int) -> None:
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types for it
        torch.cuda.manual_seed(value)
