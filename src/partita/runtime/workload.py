"""What a run computes: the code of the stages, the first weights and the data, for any transport.

Shapes are baked into a captured graph, so there is one capture for each size of microbatch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from partita.capture.captured import CapturedModel, CaptureMode
from partita.capture.origin import Captures
from partita.capture.setting import example_inputs
from partita.capture.sources import ModelSource
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.problem import Mode, Problem
from partita.errors import InvalidInputError
from partita.runtime.device_parts import Load
from partita.runtime.stage_code import Call, StageCode

Shape: TypeAlias = tuple[tuple[int, ...], torch.dtype]
ShapeOf: TypeAlias = Callable[[int, int], Shape]
"""Returns shape and type of a tensor that crosses stages, given the tensor and the microbatch."""

_SHOWN = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """What a run computes.

    Attributes:
        code: The code of the stages.
        state: First parameters and buffers by name. Not changed.
        load: Gives the inputs of the model.
        shape_of: What travels.
    """

    code: StageCode
    state: Mapping[str, Tensor]
    load: Load
    shape_of: ShapeOf


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


def use_repeatable_algorithms() -> None:
    """Let torch compute the same numbers in every run, where it can; it warns elsewhere."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)


def model_workload(
    captures: Captures,
    problem: Problem,
    plan: Plan,
    *,
    same_data: bool = False,
) -> Workload:
    """Return the workload of a plan for a model.

    Args:
        captures: The model; captured at the sizes of the plan where it is not yet.
        problem: The problem.
        plan: A plan for it.
        same_data: Whether every step sees the data of the first.

    Raises:
        InvalidInputError: The plan is for another model, or for another mode; shows the difference.
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
    examples = _Examples(source, sizes, same_data=same_data)

    def shape_of(tensor: int, microbatch: int) -> Shape:
        info = captured[sizes[microbatch]].values[tensor]
        return tuple(info.shape), info.dtype

    stages = {size: found.stages(plan) for size, found in captured.items()}
    return Workload(
        code=SizedStages(stages, sizes),
        state={name: first.parameters[name].detach() for name in first.graph.parameters.names},
        load=examples,
        shape_of=shape_of,
    )


class _Examples:
    """Gives the inputs of each microbatch; keeps the last one made."""

    def __init__(self, source: ModelSource, sizes: Sequence[int], *, same_data: bool) -> None:
        self._source, self._sizes, self._same_data = source, sizes, same_data
        self._turn, self._inputs = -1, dict[str, Tensor]()

    def __call__(self, step: int, microbatch: int, name: str) -> Tensor:
        turn = microbatch + (0 if self._same_data else step * len(self._sizes))
        if turn != self._turn:
            example = self._source.example(self._sizes[microbatch], turn)
            self._turn, self._inputs = turn, example_inputs(self._source.model, example)
        return self._inputs[name]


def _check_same(graph: Graph, captured: CapturedModel) -> None:
    """Check that a plan's graph is that of the model."""
    found = captured.graph
    if graph.fingerprint == found.fingerprint:
        return
    ours, theirs = set(graph.ops.names), set(found.ops.names)
    differences = [
        f"{what} {', '.join(sorted(names)[:_SHOWN])}{' ...' if len(names) > _SHOWN else ''}"
        for what, names in (
            ("the plan alone has ops", ours - theirs),
            ("the model alone has ops", theirs - ours),
        )
        if names
    ]
    raise InvalidInputError(
        f"the plan is for another model: its graph has {len(graph)} ops and fingerprint "
        f"{graph.fingerprint}, {found.name!r} has {len(found)} and {found.fingerprint}; "
        + ("; ".join(differences) or "the ops have the same names, but other tensors or edges")
    )
