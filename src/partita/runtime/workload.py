"""What a run computes: the code of the stages, the first weights and the data, for any transport.

Shapes are baked into a captured graph, so there is one capture for each size of microbatch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

import torch
from torch import Tensor, nn

from partita.capture.captured import CapturedModel, CaptureMode
from partita.capture.origin import Captures
from partita.capture.partial import is_stand_in, stand_in
from partita.capture.splits import Split
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.problem import Mode, Problem
from partita.errors import InvalidInputError, UnsupportedError
from partita.runtime.batches import Batches, BatchLoader
from partita.runtime.data import DataSpec, open_data
from partita.runtime.device_parts import Load
from partita.runtime.stage_code import Call, StageCode

Shape: TypeAlias = tuple[tuple[int, ...], torch.dtype]
ShapeOf: TypeAlias = Callable[[int, int], Shape]
"""Returns shape and type of a tensor that crosses stages, given the tensor and the microbatch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """What a run computes.

    Attributes:
        code: The code of the stages.
        state: First parameters and buffers by name, which may come when they are asked for. Not
            changed.
        load: Gives the inputs of the model.
        shape_of: What travels.
        batches: The data that ``load`` gives; None where a script brings its own.
        held_out: Data to evaluate on; None = there are none.
    """

    code: StageCode
    state: Mapping[str, Tensor]
    load: Load
    shape_of: ShapeOf
    batches: Batches | None = None
    held_out: Batches | None = None


class SizedStages:
    """The code of a plan whose microbatches have several sizes."""

    def __init__(self, code_of: Mapping[int, StageCode], sizes: Sequence[int]) -> None:
        self._code = [code_of[size] for size in sizes]

    def run(
        self,
        stage: int,
        inputs: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        call: Call,
    ) -> Mapping[str, Tensor]:
        """Run a stage by the code for the size of the microbatch."""
        return self._code[call.microbatch].run(stage, inputs, parameters, call)

    def first_not_finite(
        self,
        stage: int,
        inputs: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        call: Call,
    ) -> str:
        """Return the first op of a stage that makes what is no number; empty = not known."""
        code = self._code[call.microbatch]
        find = getattr(code, "first_not_finite", None)  # hand-written code has no ops to look at
        return "" if find is None else str(find(stage, inputs, parameters, call))

    def crossing_split(self, tensor: int, microbatch: int) -> Split | None:
        """Return how a tensor is divided between stages; None = it crosses whole."""
        find = getattr(self._code[microbatch], "crossing_split", None)  # as above
        return None if find is None else find(tensor)

    def parameter_splits(self, degree: int) -> Mapping[str, Split]:
        """Return how a group divides parameters: alike for all sizes.

        Raises:
            UnsupportedError: It does not.
        """
        first, *others = [code.parameter_splits(degree) for code in dict.fromkeys(self._code)]
        if any(other != first for other in others):
            raise UnsupportedError(
                f"{degree} tensor-parallel ranks would divide the parameters in another way for "
                "other sizes of microbatch; use microbatches of one size"
            )
        return first

    def split_notes(self, degree: int) -> list[str]:
        """Return what a group of some ranks divides and what it does not, for people."""
        return self._code[0].split_notes(degree)


def use_repeatable_algorithms() -> None:
    """Let torch compute the same numbers in every run, where it can; it warns elsewhere."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)


def model_workload(
    captures: Captures,
    problem: Problem,
    plan: Plan,
    *,
    same_data: bool = False,
    data: DataSpec | None = None,
    hands_over: bool = False,
) -> Workload:
    """Return the workload of a plan for a model.

    Args:
        captures: The model; captured at the sizes of the plan where it is not yet.
        problem: The problem.
        plan: A plan for it.
        same_data: Whether every step sees the data of the first.
        data: The data; generated if not given.
        hands_over: Whether each parameter can be asked for once, and the model then lets go of it.

    Raises:
        InvalidInputError: The plan is for another model, or for another mode; shows the difference.
            Or the data are not there, or not what the model reads.
    """
    source, training = captures.source, problem.objective.mode is Mode.TRAINING
    if training and captures.origin.mode is not CaptureMode.TRAINING:
        raise InvalidInputError(
            f"{source.name!r} was captured in eval mode; profile it in training mode to train it"
        )
    sizes: list[int] = plan.microbatch_sizes.tolist()
    captured = {size: captures.at(size) for size in dict.fromkeys(sizes)}
    for found in captured.values():
        _check_same(problem.graph, found)
    first = captured[sizes[0]]
    batches, held_out = open_data(data or DataSpec(), source, sizes, same_data=same_data)

    def shape_of(tensor: int, microbatch: int) -> Shape:
        info = captured[sizes[microbatch]].values[tensor]
        return tuple(info.shape), info.dtype

    stages = {size: found.stages(plan) for size, found in captured.items()}
    return Workload(
        code=SizedStages(stages, sizes),
        state=_Handover(first) if hands_over else _state_of(first),
        load=BatchLoader(batches),
        shape_of=shape_of,
        batches=batches,
        held_out=held_out,
    )


def _state_of(captured: CapturedModel) -> dict[str, Tensor]:
    names = captured.graph.parameters.names
    return {name: captured.parameters[name].detach() for name in names}


class _Handover(Mapping[str, Tensor]):
    """Parameters that a model gives away: each is there once, so that no two copies ever are."""

    def __init__(self, captured: CapturedModel) -> None:
        self._held, self._names = captured.parameters, captured.graph.parameters.names

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._held[name]
        if is_stand_in(tensor):
            raise KeyError(name)
        value = tensor.detach()
        # What is left has the shape, and takes no memory.
        if isinstance(tensor, nn.Parameter) and tensor.numel() > 1:
            tensor.data = stand_in(value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def _check_same(graph: Graph, captured: CapturedModel) -> None:
    """Check that a plan's graph is that of the model."""
    found = captured.graph
    if graph.fingerprint == found.fingerprint:
        return
    special = [note for note in captured.notes if note.startswith("specialised to")]
    raise InvalidInputError(
        f"the plan is for another model: its graph has {len(graph)} ops and fingerprint "
        f"{graph.fingerprint}, {found.name!r} has {len(found)} and {found.fingerprint}; "
        f"{first_difference(graph, found)}" + "".join(f"; the model is {note}" for note in special)
    )


def first_difference(planned: Graph, found: Graph) -> str:
    """Return where the graph of a plan and that of a model differ first, for people."""
    for what in ("ops", "tensors", "parameters"):
        names = zip_longest(getattr(planned, what).names, getattr(found, what).names)
        for place, (ours, theirs) in enumerate(names):
            if ours != theirs:
                sides = [f"the plan has {_quoted(ours)}", f"the model {_quoted(theirs)}"]
                return f"the first {what[:-1]} that differs is number {place}: {', '.join(sides)}"
    before, after = planned.parameters, found.parameters
    kinds = [zip(table.dtypes, table.bytes.tolist(), strict=True) for table in (before, after)]
    for name, *pair in zip(before.names, *kinds, strict=True):
        if pair[0] != pair[1]:
            sides = [f"{kind} of {size:.0f} bytes" for kind, size in pair]
            return f"parameter {name!r} is {sides[0]} in the plan, {sides[1]} in the model"
    made = [_reads(graph) for graph in (planned, found)]
    for name, ours, theirs in zip(planned.ops.names, *made, strict=True):
        if ours != theirs:
            other = sorted(ours ^ theirs)[0]
            where = "in the plan" if other in ours else "in the model"
            return f"op {name!r} reads or makes {other!r} {where} alone"
    return "they have other outputs, or another loss"


def _quoted(name: str | None) -> str:
    return "none" if name is None else repr(name)


def _reads(graph: Graph) -> list[set[str]]:
    """Return the tensors and parameters that each op reads or makes, by name."""
    found: list[set[str]] = [set() for _ in range(len(graph))]
    tensors, parameters = graph.tensors.names, graph.parameters.names
    for tensor, op in zip(graph.edges.tensor.tolist(), graph.edges.reader.tolist(), strict=True):
        found[op].add(tensors[tensor])
    for tensor, op in enumerate(graph.tensors.producer.tolist()):
        if op >= 0:
            found[op].add(tensors[tensor])
    table = graph.parameters
    for row, op in zip(table.use_parameter.tolist(), table.use_op.tolist(), strict=True):
        found[op].add(parameters[row])
    return found
