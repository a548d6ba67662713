"""A model cut by a plan, for ``torch.distributed.pipelining``.

    pipeline = partita.split(model, "gpt.plan.json", batch, loss_fn)
    schedule = Schedule1F1B(*pipeline.stages, pipeline.num_microbatches, loss_fn=pipeline.loss)
    for batch in loader:
        losses = []
        schedule.step(**pipeline.begin_step(batch), losses=losses)
        pipeline.end_step()
        optimizer.step()

Every rank builds the model, sees the same batches, and gets the stages that are its own. Stages are
ranges of the captured graph, so models that torch's own front end cannot trace are cut, too.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from partita.capture.origin import Captures, origin_in
from partita.capture.setting import Example, LossFunction, example_inputs
from partita.capture.sources import ModelSource
from partita.core.plan import Plan
from partita.core.solution import Solution
from partita.errors import InvalidInputError, UnsupportedError
from partita.runtime.batches import split_batch
from partita.runtime.executor import make_task
from partita.runtime.task import Task
from partita.runtime.torch_stages import StageRun, TiedWeights, check_torch_runs, torch_stage
from partita.runtime.training.parallelize import solution_in
from partita.runtime.workload import model_workload


def split(
    model: nn.Module,
    plan: Any,  # noqa: ANN401  # see solution_in
    batch: Any,  # noqa: ANN401  # the user's
    loss_fn: LossFunction | None = None,
    *,
    seed: int = 0,
) -> "TorchPipeline":
    """Return the stages of this rank for ``torch.distributed.pipelining``, cut as a plan says.

    Rank r holds stage r, and of a plan with several stages per device those of the same device.
    All ranks call it, after ``init_process_group``. First weights are those of rank 0; what is
    trained are the parameters of the model itself.

    Args:
        model: The model, on the device of this rank.
        plan: What ``partita plan`` wrote, the path of it, or what ``partita.plan`` returned.
        batch: A batch of the size that the plan is for; the model is captured on a part of it.
        loss_fn: The loss of (output, labels), a mean over the samples; None if the model returns
            its loss.
        seed: Seed of random numbers, such as those of dropout.

    Raises:
        InvalidInputError: The plan is for another model, another batch or another number of ranks.
        UnsupportedError: There is no process group, or torch's schedules cannot run the plan.
    """
    if not dist.is_initialized():
        raise UnsupportedError(
            "partita.split gives the stages of a rank; start the script by torchrun, and call "
            "torch.distributed.init_process_group before"
        )
    return TorchPipeline(model, solution_in(plan), batch, loss_fn, seed)


def stage_ranks(plan: Plan) -> tuple[int, ...]:
    """Return the rank of each stage: devices are numbered as their first stages are."""
    devices = [stage.devices[0][0] for stage in plan.stages]
    rank_of = {device: rank for rank, device in enumerate(dict.fromkeys(devices))}
    return tuple(rank_of[device] for device in devices)


def _check_scaled_once(task: Task, rank_of: Sequence[int]) -> None:
    """Check that no two stages of a rank share a weight: torch would scale its gradient twice."""
    seen: set[tuple[int, str]] = set()
    for rank, border in zip(rank_of, task.borders, strict=True):
        for name in border.trained:
            if (rank, name) in seen:
                raise UnsupportedError(
                    f"partita.split: two stages of rank {rank} use {name!r}, and torch's schedules "
                    "would scale its gradient twice; plan a stage for each device"
                )
            seen.add((rank, name))


class TorchPipeline:
    """The stages of this rank, and what a step needs besides.

    Attributes:
        stages: The stages of this rank for a schedule of torch, by their numbers.
        num_microbatches: Microbatches of a step.
        rank_of: The rank of each stage of the plan.
    """

    def __init__(
        self,
        model: nn.Module,
        solution: Solution,
        batch: Any,  # noqa: ANN401  # the user's
        loss_fn: LossFunction | None,
        seed: int,
    ) -> None:
        """Capture a model on the first microbatch, and cut it; all ranks call it."""
        problem, plan = solution.problem, solution.plan
        self._model, self._has_labels = model, loss_fn is not None
        self._sizes = tuple(plan.microbatch_sizes.tolist())
        self.num_microbatches, self.rank_of = len(self._sizes), stage_ranks(plan)
        if dist.get_world_size() != len(set(self.rank_of)):
            raise InvalidInputError(
                f"there are {dist.get_world_size()} ranks; the plan has {len(self.rank_of)} stages "
                f"on {len(set(self.rank_of))} devices"
            )
        self._take(batch)
        source = ModelSource(
            name=problem.graph.name, model=model, example=self._example, loss=loss_fn
        )
        captures = Captures(source, origin_in(problem.graph))
        workload = replace(model_workload(captures, problem, plan), load=self._load)
        task = make_task(problem, plan, workload)
        check_torch_runs(task, "partita.split")
        _check_scaled_once(task, self.rank_of)
        for name in sorted(workload.state):  # models may be built with other random numbers
            dist.broadcast(workload.state[name], 0)
        self._live = captures.at(self._sizes[0]).parameters
        self._device = next(iter(self._live.values())).device
        mine = [s for s, rank in enumerate(self.rank_of) if rank == dist.get_rank()]
        self._runs = [StageRun(task, workload, stage, self._live, seed) for stage in mine]
        self.stages: list[PipelineStage] = [
            torch_stage(task, workload, stage, run, self._device)
            for stage, run in zip(mine, self._runs, strict=True)
        ]
        self._tied = TiedWeights(task, self.rank_of)
        self._steps = 0

    def begin_step(self, batch: Any) -> dict[str, Any]:  # noqa: ANN401  # the user's
        """Take the batch of a step, and return the arguments of a schedule's ``step`` for it.

        They are numbers of microbatches: each stage that reads inputs or labels takes its own.

        Raises:
            InvalidInputError: It has another number of samples than the plan.
        """
        self._take(batch)
        for run in self._runs:
            run.step = self._steps
        self._steps += 1
        turns = torch.arange(self.num_microbatches)
        return {"turn": turns, "target": turns, "return_outputs": False}

    @staticmethod
    def loss(output: Tensor, turn: Tensor) -> Tensor:
        """Return the loss of a microbatch, which the last stage has computed: a schedule's loss_fn.

        A schedule divides the gradients by the number of microbatches (``scale_grads``), as it does
        by itself.
        """
        del turn
        return output

    @torch.no_grad()
    def end_step(self) -> None:
        """Sum the gradients of weights that several stages use, and take over changed buffers.

        All ranks call it after each step of a schedule, before that of the optimizer.
        """
        weights = {name: value for run in self._runs for name, value in run.weights.items()}
        for weight in weights.values():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        self._tied.add_up({n: value.grad for n, value in weights.items() if value.grad is not None})
        for run in self._runs:
            for name, value in run.buffers.items():
                self._live[name].copy_(value)

    def _take(self, batch: Any) -> None:  # noqa: ANN401  # the user's
        self._parts = split_batch(batch, self._sizes, has_labels=self._has_labels)
        self._inputs: dict[int, dict[str, Tensor]] = {}

    def _example(self, size: int, turn: int = 0) -> Example:
        del size  # all microbatches have the same
        return self._parts[turn]

    def _load(self, _: int, microbatch: int, name: str) -> Tensor:
        if microbatch not in self._inputs:  # bound to the model's arguments once, not per input
            self._inputs[microbatch] = example_inputs(self._model, self._parts[microbatch])
        return self._inputs[microbatch][name].to(self._device)
