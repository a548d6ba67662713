"""Evaluation on the stages of a run: forward passes on held-out data, without gradients.

The plan is that of the training, its Program that of an inference: stages stand where their
weights are. Modules are in evaluation mode, and buffers stay as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from partita.capture.tensor.ops import TensorGroup
from partita.core.problem import Mode
from partita.core.schedules import Schedule
from partita.program.lower import lower
from partita.runtime.batches import Batches, BatchLoader
from partita.runtime.device_loop import DeviceLoop
from partita.runtime.device_parts import StepRecord
from partita.runtime.parameters import ParameterStore
from partita.runtime.stage_pass import StageRunner
from partita.runtime.task import Task
from partita.runtime.transport import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """When a run is evaluated.

    Attributes:
        every: Steps after which it is, and once more at the end; 0 = never.
        batches: Batches of held-out data that are read each time, always the same.
    """

    every: int = 0
    batches: int = 8

    def is_due(self, done: int, steps: int) -> bool:
        """Return whether it is time after some steps of all."""
        return bool(self.every) and (done % self.every == 0 or done == steps)


class Evaluator:
    """Evaluates what one device holds, together with all others."""

    def __init__(
        self,
        task: Task,
        device: int,
        transport: Transport,
        store: ParameterStore,
        batches: Batches,
        *,
        group: TensorGroup | None = None,
    ) -> None:
        """Lower the plan for forward passes.

        Args:
            task: The training.
            device: This device.
            transport: Its way to the others, which has opened what the training needs.
            store: Its parameters.
            batches: The held-out data.
            group: The ranks with which it divides tensors; None = it computes them whole.
        """
        self._task = forward_task(task)
        runner = StageRunner(self._task, store, seed=0, group=group)
        self._store = store
        with store.serving(self._task):
            self._loop = DeviceLoop(
                self._task, device, transport, store=store, runner=runner, load=BatchLoader(batches)
            )
        self._loop.seen = frozenset({task.graph.loss})
        self._most = batches.steps_per_epoch

    def loss_share(
        self, batches: int, on_batch: Callable[[], None] = lambda: None
    ) -> float:  # fmt: skip
        """Return this rank's part of the mean loss over some batches; all ranks call it.

        Args:
            batches: How many; no more than the data have.
            on_batch: Called before each, as a sign of life.
        """
        count = min(batches, self._most) if self._most else batches
        total = 0.0
        for number in range(count):
            on_batch()
            with self._store.serving(self._task):  # no schedule goes on, nothing is clipped
                for wait in self._loop.play(number):
                    raise AssertionError(f"a transport over processes waits itself: {wait.reason}")
            total += loss_share(self._task, self._loop.records.pop())
        return total / count


def loss_share(task: Task, record: StepRecord) -> float:
    """Return the part of a step's loss that a rank has computed."""
    found, loss = 0.0, task.graph.loss
    for (tensor, microbatch), value in record.outputs.items():
        if tensor == loss and value.numel() == 1:
            found += float(value) * task.shares[microbatch]
    return found


def forward_task(task: Task) -> Task:
    """Return the forward passes of a task."""
    objective = replace(task.problem.objective, mode=Mode.INFERENCE)
    problem = replace(task.problem, objective=objective)
    recompute = np.zeros_like(task.plan.recompute)
    plan = replace(task.plan, schedule=Schedule.INFERENCE, recompute=recompute)
    return Task(problem, plan, lower(problem, plan), task.code)
