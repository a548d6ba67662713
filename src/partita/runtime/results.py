"""What a run gave: the records of all devices, put together and compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.errors import InvalidInputError
from partita.runtime.device_parts import DeviceStatistics, StepRecord
from partita.runtime.parts import Part, joined
from partita.runtime.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step gave.

    Attributes:
        outputs: Outputs of the model by name, a tensor for each microbatch.
        losses: Loss of each microbatch; empty where the graph names no loss.
        loss: Loss of the step: the mean of ``losses`` weighted by samples; NaN without losses.
        gradients: Gradients of the trainable parameters by name, as they were used; with weight
            stashing those of the last update.
    """

    outputs: Mapping[str, tuple[Tensor, ...]]
    losses: tuple[float, ...]
    loss: float
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run gave.

    Attributes:
        steps: The steps.
        state: Parameters and buffers at the end, by name; buffers those of replica 0.
        statistics: What each device has done, by its name.
    """

    steps: tuple[StepResult, ...]
    state: Mapping[str, Tensor]
    statistics: Mapping[str, DeviceStatistics]


def step_result(task: Task, records: Sequence[StepRecord]) -> StepResult:
    """Return what a step gave, from the records of its devices."""
    graph, sizes = task.graph, task.plan.microbatch_sizes.tolist()
    seen = {cell: value for record in records for cell, value in record.outputs.items()}
    turns = range(len(sizes))
    losses: tuple[float, ...] = ()
    if (graph.loss, 0) in seen and seen[graph.loss, 0].numel() == 1:
        losses = tuple(float(seen[graph.loss, turn]) for turn in turns)
    weighted = sum(loss * size for loss, size in zip(losses, sizes, strict=False))
    return StepResult(
        outputs={
            graph.tensors.names[tensor]: tuple(seen[tensor, turn] for turn in turns)
            for tensor in graph.outputs.tolist()
            if (tensor, 0) in seen
        },
        losses=losses,
        loss=weighted / task.plan.samples if losses else float("nan"),
        gradients=merged([record.gradients for record in records], task),
    )


def merged(held: Sequence[Mapping[str, Tensor | Part]], task: Task) -> dict[str, Tensor]:
    """Return each tensor once, whole.

    Raises:
        InvalidInputError: Two devices hold different values of one parameter, or parts of it are
            missing.
    """
    table = task.graph.parameters
    merged: dict[str, Tensor] = {}
    for name, is_buffer in zip(table.names, table.buffer.tolist(), strict=True):
        found = {device: values[name] for device, values in enumerate(held) if name in values}
        parts = [value for value in found.values() if isinstance(value, Part)]
        if parts:
            merged[name] = joined(parts)
        for device, value in found.items():
            known = merged.setdefault(name, value) if isinstance(value, Tensor) else merged[name]
            if not is_buffer and not _agrees(known, value):
                raise InvalidInputError(
                    f"parameter {name!r} on {task.plan.devices[device]} differs from that of "
                    "another replica; the program misses a reduction"
                )
    return merged


def _agrees(whole: Tensor, value: Tensor | Part) -> bool:
    """Return whether a device holds what is known of a tensor."""
    places = [(whole, value)] if isinstance(value, Tensor) else value.compared_with(whole)
    return all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in places)
