"""What the loop of a device works with: instructions, records, and who computes and who holds."""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from torch import Tensor

from partita.core.columns import Longs
from partita.core.program import Kind
from partita.runtime.parts import Part
from partita.runtime.stage_pass import StagePass, Visit
from partita.runtime.transport import Message

Load: TypeAlias = Callable[[int, int, str], Tensor]
"""Returns an input of the model, given step, microbatch and name of the tensor."""

_T = TypeVar("_T")
Cell: TypeAlias = tuple[int, int]
"""A tensor or a stage, and a microbatch."""


def _no_stamps() -> Longs:
    return np.zeros(0, np.int64)


class Wait(NamedTuple):
    """Why a device cannot go on yet.

    Attributes:
        row: The instruction at which it stands.
        reason: The instruction and what it waits for.
    """

    row: int
    reason: str


Waiting: TypeAlias = Generator[Wait, None, _T]


class Instruction(NamedTuple):
    """One row of the Program, as plain numbers.

    Attributes:
        row: The row.
        kind: What it does.
        visit: Stage, microbatch and version of the weights.
        tensor: The tensor, -1 = none.
        message: What travels, for SEND and RECV.
        joint: Whether several devices carry it out together.
    """

    row: int
    kind: Kind
    visit: Visit
    tensor: int
    message: Message | None
    joint: bool


class Runner(Protocol):
    """Computes what the stages of a device compute."""

    def forward(self, step: int, visit: Visit, inputs: dict[int, Tensor]) -> StagePass:
        """Run a stage on its inputs."""
        ...

    def recompute(self, step: int, visit: Visit, done: StagePass) -> None:
        """Run a stage again if its outputs have no graph yet."""
        ...

    def begin_backward(self, visit: Visit, done: StagePass, cotangents: dict[int, Tensor]) -> None:
        """Give a pass the gradients of its outputs."""
        ...

    def gradients(
        self, visit: Visit, done: StagePass
    ) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
        """Return the gradients of inputs and parameters."""
        ...

    def input_gradients(self, visit: Visit, done: StagePass) -> dict[int, Tensor]:
        """Return the gradients of the inputs alone."""
        ...

    def weight_gradients(self, visit: Visit, done: StagePass) -> dict[str, Tensor]:
        """Return the gradients of the parameters, after those of the inputs."""
        ...


class Store(Protocol):
    """Holds the parameters and gradients of a device."""

    @property
    def agrees(self) -> bool:
        """Whether all devices agree on what to do with the gradients before any is used."""
        ...

    @property
    def num_versions(self) -> int:
        """Versions of weights that are kept, over all stages."""
        ...

    def begin_step(self) -> None:
        """Number the versions of the weights from 0 again."""
        ...

    def drop_version(self, stage: int, version: int) -> None:
        """Forget a version that nobody needs any more."""
        ...

    def release(self, stage: int) -> None:
        """Drop the gathered copies of a stage's parameters."""
        ...

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of parameters, by name, over one microbatch of one stage."""
        ...

    def outgoing(self, kind: Kind, bucket: int) -> list[Tensor]:
        """Return what this device brings to a collective."""
        ...

    def incoming(self, kind: Kind, bucket: int, values: Sequence[Tensor]) -> None:
        """Take home the result of a collective."""
        ...

    def measure(self) -> Tensor:
        """Return what this device adds to what all agree on, once its gradients are reduced."""
        ...

    def agree(self, total: Tensor) -> None:
        """Take home the sum of what all devices have measured."""
        ...

    def update(self, stage: int, version: int) -> Mapping[str, Tensor | Part]:
        """Step the parameters of a stage; returns their gradients."""
        ...

    def left_over(self) -> list[str]:
        """Return the parameters whose gradients nobody used."""
        ...

    def end_step(self) -> None:
        """Let the learning rate go on to the next step."""
        ...


@dataclass(slots=True)
class StepRecord:
    """What one device has seen in one step.

    Attributes:
        outputs: Outputs of the model and the loss, by (tensor, microbatch).
        gradients: Gradients of the parameters that were stepped, as of their last UPDATE.
        begin_ns: When each instruction began, by a clock that does not jump; empty while the step
            is under way, and where stamps are not kept.
        end_ns: When it ended.
    """

    outputs: dict[Cell, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | Part] = field(default_factory=dict)
    begin_ns: Longs = field(default_factory=_no_stamps)
    end_ns: Longs = field(default_factory=_no_stamps)

    def forget_results(self, loss: int) -> None:
        """Let go of all tensors but the loss."""
        self.gradients.clear()
        self.outputs = {cell: value for cell, value in self.outputs.items() if cell[0] == loss}

    def forget_stamps(self) -> None:
        """Let go of when its instructions began and ended."""
        self.begin_ns, self.end_ns = _no_stamps(), _no_stamps()


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
