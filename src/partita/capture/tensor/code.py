"""The stages of a plan as one rank of a tensor-parallel group runs them: a ``StageCode``.

The ops of the captured model are written anew: calls on parts of tensors, with the moves between
whole and split tensors among them (``ops``). A move is made once for all of its readers in a
stage. What crosses stages is whole.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from partita.capture.op import CapturedOp, ValueInfo
from partita.capture.splits import Split
from partita.capture.stages import CapturedStages, StageCall
from partita.capture.tensor.ops import TensorGroup, collect, gather, scatter, share
from partita.capture.tensor.parallel import (
    SplitCode,
    SplitOp,
    TensorSplits,
    refs_of_call,
)
from partita.capture.tensor.sequence import along_sequences
from partita.capture.tree import Param, Ref, Value, map_leaves
from partita.core.graph import Graph
from partita.core.plan import Plan, Stage
from partita.errors import UnsupportedError


class GroupCall(StageCall, Protocol):
    """The circumstances of one run of a stage, with the group that runs it."""

    @property
    def group(self) -> TensorGroup | None:
        """The ranks that divide its tensors; None = this one computes everything."""
        ...


class DividedCode(SplitCode, Protocol):
    """A captured model that knows how it is divided."""

    def splits(self, degree: int) -> TensorSplits:
        """Return how a group of some ranks divides the model."""
        ...


class SplitStages:
    """The stages of a plan, whole or as a rank of a group runs them."""

    def __init__(self, code: DividedCode, plan: Plan) -> None:
        """Prepare the stages; those of a group are made when it first runs one.

        Raises:
            InvalidInputError: The plan is for another graph.
        """
        self._code, self._plan = code, plan
        self._whole = CapturedStages(code, plan)
        self._check_sequences()
        self._of_group: dict[int, tuple[TensorGroup, CapturedStages]] = {}

    @cached_property
    def _along(self) -> Mapping[int, TensorSplits]:
        """How groups of each degree divide tensors along the sequence."""
        degrees = {stage.tp for stage in self._plan.stages if stage.sequence_parallel}
        return {degree: along_sequences(self._code, self.splits(degree)) for degree in degrees}

    @cached_property
    def _crossing(self) -> Mapping[int, Split]:
        """The tensors that cross stages in parts, by row."""
        stage_of, stages = self._plan.stage_of.tolist(), self._plan.stages
        readers = _readers(self._code, stage_of)
        found: dict[int, Split] = {}
        for index, op in enumerate(self._code.ops):
            here = stages[stage_of[index]]
            along = self._along.get(here.tp) if here.sequence_parallel else None
            if along is None:
                continue
            for row in op.makes:
                others = readers.get(row, set()) - {stage_of[index]}
                alike = -1 not in others and all(_alike(here, stages[n]) for n in others)
                if others and alike and row in along.sequences:
                    found[row] = along.layouts[row]
        return found

    def crossing_split(self, tensor: int) -> Split | None:
        """Return how a tensor is divided between stages; None = it crosses whole."""
        return self._crossing.get(tensor)

    def _check_sequences(self) -> None:
        """Check that stages which divide tensors along the sequence have some to divide.

        Raises:
            UnsupportedError: One has none.
        """
        asked = [(n, s) for n, s in enumerate(self._plan.stages) if s.sequence_parallel]
        along = self._along
        for number, stage in asked:
            found, members = along[stage.tp], np.flatnonzero(self._plan.stage_of == number)
            calls = (call for index in members.tolist() for call in found.calls[index])
            if not any(row in found.sequences for call in calls for _, row in call.op.outputs):
                raise UnsupportedError(
                    f"stage {number} is sequence-parallel, and none of its sums over {stage.tp} "
                    "ranks has a dimension besides the last that they divide evenly; plan "
                    "without sequence parallelism"
                )

    def run(
        self,
        stage: int,
        inputs: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        call: GroupCall,
    ) -> Mapping[str, Tensor]:
        """Return the tensors that leave a stage, by name; see ``CapturedStages.run``."""
        group = call.group
        if group is None:
            return self._whole.run(stage, inputs, parameters, call)
        known, stages = self._of_group.get(id(group), (None, self._whole))
        if known is None:
            code = GroupCode(self._code, self._plan, self.splits(group.size), group, self._crossing)
            stages = CapturedStages(code, self._plan)
            self._of_group[id(group)] = (group, stages)
        return stages.run(stage, inputs, parameters, call)

    def first_not_finite(
        self,
        stage: int,
        inputs: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        call: GroupCall,
    ) -> str:
        """Return the first op of a stage that makes what is no number; empty = not known.

        A stage that a group divides is not looked at: its ops wait for the other ranks.
        """
        if call.group is not None:
            return ""
        return self._whole.first_not_finite(stage, inputs, parameters, call)

    def splits(self, degree: int) -> TensorSplits:
        """Return how a group of some ranks divides the model."""
        return self._code.splits(degree)

    def parameter_splits(self, degree: int) -> Mapping[str, Split]:
        """Return how a group of some ranks divides the parameters; others are held whole."""
        return self.splits(degree).parameters if degree > 1 else {}

    def split_notes(self, degree: int) -> list[str]:
        """Return what a group of some ranks divides and what it does not, for people."""
        return self.splits(degree).notes()


@dataclass(frozen=True, eq=False)
class GroupCode:
    """A captured model as one rank of a group runs it.

    Attributes:
        source: The captured model.
        plan: The plan, whose stages cut it.
        splits: How it is divided.
        group: The group.
        crossing: Tensors that cross stages in parts, by row.
    """

    source: SplitCode
    plan: Plan
    splits: TensorSplits
    group: TensorGroup
    crossing: Mapping[int, Split] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.source.graph

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """The constants."""
        return self.source.constants

    def check_mode(self, *, training: bool) -> None:
        """Check that the ops can run in training or in eval mode."""
        self.source.check_mode(training=training)

    @property
    def is_training(self) -> bool:
        """Whether it was captured in training mode."""
        return self.source.is_training

    @property
    def ops(self) -> tuple[CapturedOp, ...]:
        """The ops, in the order of the graph."""
        return self._written[0]

    @property
    def values(self) -> tuple[ValueInfo, ...]:
        """The tensors: those of the captured model, then those that moves make."""
        return self._written[1]

    @cached_property
    def _written(self) -> tuple[tuple[CapturedOp, ...], tuple[ValueInfo, ...]]:
        values = list(self.source.values)
        rank, size = self.group.rank, self.group.size
        for row, split in self.crossing.items():
            values[row] = replace(values[row], shape=split.shape(values[row].shape, rank, size))
        ops: list[CapturedOp] = list(self.source.ops)
        members: list[list[int]] = [[] for _ in self.plan.stages]
        for index, stage in enumerate(self.plan.stage_of.tolist()):
            members[stage].append(index)
        for stage_ops in members:
            written = _Stage(self, values, stage_ops).write()
            for index, op in zip(stage_ops, written, strict=True):
                ops[index] = op
        return tuple(ops), tuple(values)

    def splits_of(self, stage: int) -> TensorSplits:
        """Return how a stage is divided: along the sequence, too, where the plan says so."""
        return self._along if self.plan.stages[stage].sequence_parallel else self.splits

    @cached_property
    def _along(self) -> TensorSplits:
        return along_sequences(self.source, self.splits)

    @cached_property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that have gradients."""
        table = self.graph.parameters
        return frozenset(n for n, t in zip(table.names, table.trainable, strict=True) if t)

    @cached_property
    def readers(self) -> Mapping[int, set[int]]:
        """The stages that read each tensor; -1 for who looks at the results of the model."""
        return _readers(self.source, self.plan.stage_of.tolist())


def _readers(code: SplitCode, stage_of: Sequence[int]) -> dict[int, set[int]]:
    """Return the stages that read each tensor; -1 for who looks at the results of the model."""
    found: dict[int, set[int]] = {}
    for op, stage in zip(code.ops, stage_of, strict=True):
        for row in op.reads:
            found.setdefault(row, set()).add(stage)
    for row in (*code.graph.outputs.tolist(), code.graph.loss):
        found.setdefault(row, set()).add(-1)
    return found


def _alike(one: Stage, other: Stage) -> bool:
    """Return whether ranks of two stages have the same parts of what crosses between them."""
    return (
        other.sequence_parallel
        and one.tp == other.tp
        and all(a == b or not {*a} & {*b} for a in one.devices for b in other.devices)
    )


class _Stage:
    """The ops of one stage, written anew."""

    def __init__(self, code: GroupCode, values: list[ValueInfo], members: Sequence[int]) -> None:
        self._code, self._values, self._members = code, values, members
        self._stage = int(code.plan.stage_of[members[0]])
        self._splits = code.splits_of(self._stage)
        self._own = {row for index in members for row in code.source.ops[index].makes}
        self._inside = {
            row
            for index in members
            for call in self._splits.calls[index]
            for row in (*call.op.makes, *(row for _, row in call.op.outputs))
        }
        # Tensors that have left their place: the row of the part of a tensor that leaves whole.
        self._part_of: dict[int, int] = {}
        self._moved: dict[tuple[Ref, str, Split | None], Ref] = {}
        self._parts: list[CapturedOp] = []

    def write(self) -> list[CapturedOp]:
        """Return the ops, with moves in between."""
        written: list[list[CapturedOp]] = []
        for index in self._members:
            self._parts = []
            for call in self._splits.calls[index]:
                self._call(call)
            written.append(self._parts)
        sources = [self._code.source.ops[index] for index in self._members]
        reads = [_entering(parts) for parts in written]
        wanted: dict[int, int] = {}
        for found in reads:
            for row in found:
                wanted[row] = wanted.get(row, 0) + 1
        return [
            self._joined(op, parts, found, wanted)
            for op, parts, found in zip(sources, written, reads, strict=True)
        ]

    def _joined(
        self,
        op: CapturedOp,
        parts: Sequence[CapturedOp],
        reads: Iterable[int],
        wanted: Mapping[int, int],
    ) -> CapturedOp:
        """Return an op of the graph made of its calls and moves."""
        if len(parts) == 1 and parts[0] is op:
            return op
        new = {row for part in parts for row in part.makes if row >= len(self._code.source.values)}
        makes = [*op.makes, *sorted(row for row in new if row in wanted)]
        return replace(op, parts=tuple(parts), reads=tuple(reads), makes=tuple(makes), owned=())

    def _call(self, call: SplitOp) -> None:
        """Write a call and the moves that it needs."""
        op, local = call.op, call.local
        names: dict[Ref, Ref] = {}
        splits = local is not None and any(layout is not None for layout in local.made)
        for ref in refs_of_call(op):
            wanted = None if local is None else local.wanted.get(ref)
            names[ref] = self._needed(ref, wanted, splits=splits)
        changed = any(new != old for old, new in names.items())
        rows = {row: row for _, row in (*op.outputs, *op.writes)}
        leaves = []
        for row in rows:
            is_whole = row not in self._code.crossing and self._leaves(row)
            if row in self._splits.layouts and is_whole:
                rows[row] = self._part_of[row] = self._new_row(row)
                leaves.append(row)
        if not changed and not leaves and (local is None or local.make is None):
            self._parts.append(op)
            return
        self._parts.append(self._written(call, names, rows))
        for row in leaves:
            split = self._splits.layouts[row]
            whole = partial(gather, group=self._code.group, split=split)
            self._move("gather", whole, Value(rows[row]), row)
            self._moved[Value(row), "gather", None] = Value(row)

    def _leaves(self, row: int) -> bool:
        return bool(self._code.readers.get(row, set()) - {self._stage}) and row in self._own

    def _written(
        self, call: SplitOp, names: Mapping[Ref, Ref], rows: Mapping[int, int]
    ) -> CapturedOp:
        op, local = call.op, call.local
        if op.parts:
            return _renamed(op, names)
        args, kwargs, func = op.args, op.kwargs, op.func
        if local is not None:
            args = op.args if local.args is None else local.args
            kwargs = op.kwargs if local.kwargs is None else local.kwargs
            func = op.func if local.make is None else local.make(self._code.group)
        return replace(
            op,
            func=func,
            args=tuple(map_leaves(_replacing(names), arg) for arg in args),
            kwargs={key: map_leaves(_replacing(names), arg) for key, arg in kwargs.items()},
            outputs=tuple((place, rows[row]) for place, row in op.outputs),
            writes=tuple((names.get(ref, ref), rows[row]) for ref, row in op.writes),
            reads=tuple(dict.fromkeys(r.index for r in names.values() if isinstance(r, Value))),
            makes=tuple(rows.get(row, row) for row in op.makes),
        )

    def _layout(self, ref: Ref) -> Split | None:
        """Return how a tensor is held here: of other stages whole, but for some."""
        if isinstance(ref, Param):
            return self._splits.parameters.get(ref.name)
        if isinstance(ref, Value) and ref.index in self._inside:
            return self._splits.layouts.get(ref.index)
        return self._code.crossing.get(ref.index) if isinstance(ref, Value) else None

    def _needed(self, ref: Ref, wanted: Split | None, *, splits: bool) -> Ref:
        """Return a tensor in the layout that an op needs, with the moves to it."""
        held, group = self._layout(ref), self._code.group
        if held == wanted and held is not None:
            return Value(self._part_of[ref.index]) if self._is_moved(ref) else ref  # type: ignore[attr-defined]  # a Value
        whole = ref
        if held is not None:
            part = Value(self._part_of[ref.index]) if self._is_moved(ref) else ref  # type: ignore[attr-defined]  # a Value
            if wanted is None and splits and self._has_gradient(ref):
                function = partial(collect, group=group, split=held)
                return self._once(ref, "collect", None, function, part)
            whole = self._once(ref, "gather", None, partial(gather, group=group, split=held), part)
        if wanted is not None:
            cut = partial(scatter, group=group, split=wanted)
            return self._once(ref, "scatter", wanted, cut, whole)
        if splits and self._has_gradient(ref):
            return self._once(ref, "share", None, partial(share, group=group), whole)
        return whole

    def _is_moved(self, ref: Ref) -> bool:
        return isinstance(ref, Value) and ref.index in self._part_of

    def _has_gradient(self, ref: Ref) -> bool:
        if isinstance(ref, Param):
            return ref.name in self._code.trained
        return isinstance(ref, Value) and self._values[ref.index].requires_grad

    def _once(
        self, ref: Ref, kind: str, split: Split | None, function: Callable[..., Any], source: Ref
    ) -> Ref:
        """Return the result of a move, made where it is first needed."""
        key = (ref, kind, split)
        if key not in self._moved:
            row = self._new_row(ref.index if isinstance(ref, Value) else -1)
            self._move(kind, function, source, row)
            self._moved[key] = Value(row)
        return self._moved[key]

    def _move(self, kind: str, function: Callable[..., Any], source: Ref, row: int) -> None:
        self._parts.append(
            CapturedOp(
                name=f"{kind} {row}",
                kind=kind,
                func=function,
                args=(source,),
                kwargs={},
                outputs=((0, row),),
                reads=(source.index,) if isinstance(source, Value) else (),
                makes=(row,),
                parameters=(source.name,) if isinstance(source, Param) else (),
            )
        )

    def _new_row(self, like: int) -> int:
        """Return the row of a new tensor; its storage is its own."""
        row = len(self._values)
        info = self._values[max(like, 0)]
        self._values.append(replace(info, storage=-1 - row, flexible=(), op=-1))
        return row


def _replacing(names: Mapping[Ref, Ref]) -> Callable[[object], object]:
    return lambda leaf: names.get(leaf, leaf) if isinstance(leaf, Ref) else leaf


def _renamed(op: CapturedOp, names: Mapping[Ref, Ref]) -> CapturedOp:
    """Return an op, with all of its calls, that reads other tensors."""
    new = _replacing(names)

    def row(number: int) -> int:
        found = names.get(Value(number), Value(number))
        return found.index if isinstance(found, Value) else number

    return replace(
        op,
        args=tuple(map_leaves(new, arg) for arg in op.args),
        kwargs={key: map_leaves(new, arg) for key, arg in op.kwargs.items()},
        writes=tuple((names.get(ref, ref), made) for ref, made in op.writes),
        reads=tuple(dict.fromkeys(map(row, op.reads))),
        owned=tuple(names.get(ref, ref) for ref in op.owned),
        parts=tuple(_renamed(part, names) for part in op.parts),
    )


def _entering(parts: Sequence[CapturedOp]) -> list[int]:
    """Return the tensors that some calls read and do not make, in order."""
    made: set[int] = set()
    found: dict[int, None] = {}
    for part in parts:
        found.update(dict.fromkeys(row for row in part.reads if row not in made))
        made.update(part.makes)
        made.update(row for _, row in (*part.outputs, *part.writes))
    return list(found)
