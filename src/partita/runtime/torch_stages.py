"""Stages of a plan as modules that ``torch.distributed.pipelining`` can run.

Torch's schedules know stages in a row that hand a tuple of tensors to the next. So a tensor that
skips stages is handed through those in between, and inputs of the model are loaded by the stage
that reads them: a schedule deals the numbers of the microbatches (``turns``), not the data.
Gradients of weights that several stages use are summed by us, as torch leaves them unsummed. Shapes
are given, because torch would find them out by running the stages on uninitialised memory, which
spoils the statistics of batch norms.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.fx.graph_module import _assign_attr

from partita.errors import UnsupportedError
from partita.runtime.device_parts import StepRecord
from partita.runtime.stage_code import Call
from partita.runtime.task import Task
from partita.runtime.workload import Workload


def check_torch_runs(task: Task, who: str) -> None:
    """Check that torch's schedules can run the stages of a plan.

    Args:
        task: The plan.
        who: What asks, for the message.

    Raises:
        UnsupportedError: They cannot.
    """
    plan = task.plan
    if not task.is_training:
        raise UnsupportedError(f"{who} trains; this plan is one of inference")
    groups = [group for stage in plan.stages for group in stage.devices]
    if len(groups) > len(plan.stages) or any(len(group) > 1 for group in groups):
        raise UnsupportedError(
            f"{who} runs each stage on one rank; this plan has replicas or tensor-parallel "
            "stages: plan without"
        )
    if plan.stashes_weights or plan.recompute.any():
        what = "weight stashing" if plan.stashes_weights else "recomputation"
        raise UnsupportedError(f"{who} has no {what}; plan without it")
    sizes = plan.microbatch_sizes.tolist()
    if len(set(sizes)) > 1:
        raise UnsupportedError(
            f"{who} needs microbatches of one size; they have {min(sizes)} to {max(sizes)} samples"
        )
    for stage, tensors in enumerate(_handed_on(task)[1:], 1):
        if not any(task.graph.tensors.differentiable[t] for t in tensors):
            raise UnsupportedError(
                f"{who} hands a gradient from each stage to the one before; none flows from "
                f"stage {stage} to stage {stage - 1}: choose another partition"
            )


def _handed_on(task: Task) -> list[list[int]]:
    """Return the tensors that each stage gets from the one before, ascending."""
    producer = task.graph.tensors.producer
    made_by = {t: int(task.plan.stage_of[producer[t]]) for t in task.readers}
    return [
        sorted(t for t, readers in task.readers.items() if made_by[t] < stage <= max(readers))
        for stage in range(len(task.plan.stages))
    ]


class StageRun:
    """A stage of a plan under a schedule of torch: what it is handed to what it hands on.

    Attributes:
        step: The step that is run.
        record: Where losses and outputs go; None = nobody looks at them.
        entering: Tensors that it is handed.
        leaving: Tensors that it hands on.
        weights: Trainable parameters by name.
        frozen: Other parameters by name.
        buffers: Buffers by name, as the last forward left them.
    """

    def __init__(
        self, task: Task, workload: Workload, stage: int, state: Mapping[str, Tensor], seed: int = 0
    ) -> None:
        """Take a stage.

        Args:
            task: The plan.
            workload: What gives the inputs of the model.
            stage: Its number.
            state: Parameters, which are trained where they lie, and first buffers, by name.
            seed: Seed of random numbers.
        """
        self._task, self._stage, self._seed, self._load = task, stage, seed, workload.load
        border, handed = task.borders[stage], [*_handed_on(task), [task.graph.loss]]
        self.entering, self.leaving = handed[stage], handed[stage + 1]
        self.weights = {name: _parameter(state[name]) for name in border.trained}
        self.frozen = {name: state[name].detach() for name in border.frozen}
        self.buffers = {name: state[name] for name in border.buffers}
        self.step = 0
        self.record: StepRecord | None = None

    def forward(
        self, entering: Sequence[Tensor], microbatch: int, *, training: bool
    ) -> Tensor | tuple[Tensor, ...]:
        """Return what the next stage gets, or the loss, of a microbatch."""
        names, border = self._task.graph.tensors.names, self._task.borders[self._stage]
        handed = dict(zip(self.entering, entering, strict=True))
        inputs = {names[t]: handed[t] for t in border.inputs}
        for t in border.loaded:
            inputs[names[t]] = self._load(self.step, microbatch, names[t])
        # Each forward has its own copy, so that no later one changes what this one keeps.
        self.buffers = {name: value.clone() for name, value in self.buffers.items()}
        made = self._task.code.run(
            self._stage,
            inputs,
            {**self.weights, **self.frozen, **self.buffers},
            Call(seed=self._seed, step=self.step, microbatch=microbatch, training=training),
        )
        for t in border.outputs:
            if self.record is not None and t in self._task.results:
                self.record.outputs[t, microbatch] = made[names[t]].detach().clone()
        if self._stage == len(self._task.plan.stages) - 1:
            return made[names[self._task.graph.loss]]
        return tuple(
            made[names[t]].contiguous() if names[t] in made else handed[t] for t in self.leaving
        )


def _parameter(value: Tensor) -> nn.Parameter:
    return value if isinstance(value, nn.Parameter) else nn.Parameter(value)


class StageModule(nn.Module):
    """A stage as a module, whose parameters have the names of the model."""

    def __init__(self, run: StageRun) -> None:
        super().__init__()
        # The one attribute of ours: all other names belong to the parts of the model.
        self._partita_run = run
        for name, parameter in run.weights.items():
            _assign_attr(parameter, self, name)

    def forward(self, *entering: Tensor, turn: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return what the next stage gets, or the loss, of the microbatch of a number."""
        return self._partita_run.forward(entering, int(turn), training=self.training)


def torch_stage(
    task: Task, workload: Workload, stage: int, run: StageRun, device: torch.device
) -> PipelineStage:
    """Return a stage for torch's schedules.

    Args:
        task: The plan.
        workload: What says the shapes that travel.
        stage: Its number.
        run: The stage.
        device: Where it computes.
    """
    return PipelineStage(
        StageModule(run),
        stage,
        len(task.plan.stages),
        device,
        input_args=_shapes(task, workload, run.entering),
        output_args=_shapes(task, workload, run.leaving),
    )


def _shapes(task: Task, workload: Workload, tensors: Sequence[int]) -> tuple[Tensor, ...]:
    """Return tensors without values of the shapes that travel."""
    differentiable, made = task.graph.tensors.differentiable, []
    for tensor in tensors:
        shape, dtype = workload.shape_of(tensor, 0)
        flows = bool(differentiable[tensor]) and (dtype.is_floating_point or dtype.is_complex)
        made.append(torch.empty(shape, dtype=dtype, device="meta", requires_grad=flows))
    return tuple(made)


class TiedWeights:
    """The weights that stages of several ranks use, each with the group of those ranks."""

    def __init__(self, task: Task, rank_of: Sequence[int]) -> None:
        """Make the groups; all ranks call it.

        Args:
            task: The plan.
            rank_of: The rank of each stage.
        """
        owners: dict[str, set[int]] = {}
        for stage, border in enumerate(task.borders):
            for name in border.trained:
                owners.setdefault(name, set()).add(rank_of[stage])
        tied = {name: tuple(sorted(ranks)) for name, ranks in owners.items() if len(ranks) > 1}
        groups = {ranks: dist.new_group(list(ranks)) for ranks in sorted(set(tied.values()))}
        self._groups = {name: groups[ranks] for name, ranks in sorted(tied.items())}

    def add_up(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum the gradients that this rank has, by name, with those of the other ranks."""
        for name, group in self._groups.items():
            if name in gradients:
                dist.all_reduce(gradients[name], group=group)
