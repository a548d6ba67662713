"""``torch-1f1b``: the stages of a plan under ``torch.distributed.pipelining``'s Schedule1F1B.

Torch's schedules know stages in a row, one on each rank, that hand a tuple of tensors to the next.
So a tensor that skips stages is handed through those in between, and inputs of the model are loaded
by the stage that reads them. Gradients of weights that several stages use are summed by us, as
torch leaves them unsummed. Shapes are given, because torch would find them out by running the
stages on uninitialised memory, which spoils the statistics of batch norms.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from partita.errors import UnsupportedError
from partita.ranks.member import Member
from partita.runtime.baselines.torch_ways import Baseline, Subject
from partita.runtime.device_parts import StepRecord
from partita.runtime.optimizers import Agreement, make_optimizer
from partita.runtime.rank import RankOptions
from partita.runtime.stage_code import Call
from partita.runtime.task import Task
from partita.runtime.verify import verify


def _check(subject: Subject) -> None:
    task, plan = subject.task, subject.task.plan
    if not task.is_training:
        raise UnsupportedError("torch-1f1b trains; for inference use another baseline")
    devices = [group for stage in plan.stages for group in stage.devices]
    if len(devices) > len(plan.stages) or any(len(group) > 1 for group in devices):
        raise UnsupportedError(
            "torch-1f1b runs each stage on one rank; this plan has replicas or tensor-parallel "
            "stages: plan without"
        )
    if len(set(devices)) < len(devices):
        raise UnsupportedError(
            f"torch-1f1b runs one stage on each rank; this plan has {len(devices)} stages on "
            f"{len(set(devices))} devices: plan a stage for each device"
        )
    if plan.stashes_weights or plan.recompute.any():
        what = "weight stashing" if plan.stashes_weights else "recomputation"
        raise UnsupportedError(f"torch-1f1b has no {what}; plan without it")
    sizes = plan.microbatch_sizes.tolist()
    if len(set(sizes)) > 1:
        raise UnsupportedError(
            f"torch-1f1b needs microbatches of one size; they have {min(sizes)} to {max(sizes)} "
            "samples"
        )
    if len(sizes) < len(plan.stages):
        raise UnsupportedError(
            f"torch-1f1b needs as many microbatches as stages or more; there are {len(sizes)} for "
            f"{len(plan.stages)} stages"
        )
    for stage, tensors in enumerate(_handed_on(task)[1:], 1):
        if not any(task.graph.tensors.differentiable[t] for t in tensors):
            raise UnsupportedError(
                f"torch-1f1b hands a gradient from each stage to the one before; none flows from "
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


class StageModule(nn.Module):
    """A stage of a plan as a module: what it is handed to what it hands on.

    Attributes:
        step: The step that is run.
        record: Where losses and outputs go.
        entering: Tensors that it is handed.
        leaving: Tensors that it hands on.
        weights: Trainable parameters by name.
        frozen: Other parameters by name.
        buffers_held: Buffers by name.
    """

    def __init__(self, subject: Subject, stage: int, options: RankOptions) -> None:
        super().__init__()
        task, state = subject.task, subject.workload.state
        self._task, self._stage, self._seed = task, stage, options.seed
        self._load = subject.workload.load
        border, handed = task.borders[stage], [*_handed_on(task), [task.graph.loss]]
        self.entering, self.leaving = handed[stage], handed[stage + 1]
        self._held = nn.ParameterList(nn.Parameter(state[n].clone()) for n in border.trained)
        self.weights = dict(zip(border.trained, self._held, strict=True))
        self.frozen = {name: state[name] for name in border.frozen}
        self.buffers_held = {name: state[name].clone() for name in border.buffers}
        self.step, self.record = 0, StepRecord()

    def forward(self, *entering: Tensor, turn: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return what the next stage gets, or the loss, of a microbatch."""
        names, microbatch = self._task.graph.tensors.names, int(turn)
        border = self._task.borders[self._stage]
        handed = dict(zip(self.entering, entering, strict=True))
        inputs = {names[t]: handed[t] for t in border.inputs}
        for t in border.loaded:
            inputs[names[t]] = self._load(self.step, microbatch, names[t])
        # Each forward has its own copy, so that no later one changes what this one keeps.
        self.buffers_held = {name: value.clone() for name, value in self.buffers_held.items()}
        made = self._task.code.run(
            self._stage,
            inputs,
            {**self.weights, **self.frozen, **self.buffers_held},
            Call(seed=self._seed, step=self.step, microbatch=microbatch),
        )
        for t in border.outputs:
            if t in self._task.results:
                self.record.outputs[t, microbatch] = made[names[t]].detach().clone()
        if self._stage == len(self._task.plan.stages) - 1:
            return made[names[self._task.graph.loss]]
        return tuple(
            made[names[t]].contiguous() if names[t] in made else handed[t] for t in self.leaving
        )


class PipelineTrainer:
    """One stage under torch's schedule."""

    def __init__(self, subject: Subject, member: Member, options: RankOptions) -> None:
        """Prepare the stage of this rank."""
        task = subject.task
        self._task, self._stage = task, member.rank
        self._module = StageModule(subject, member.rank, options)
        self._optimizer = make_optimizer(options.recipe, self._module.weights)
        self._agreement = Agreement(options.recipe)
        self._trained = [(stage, border.trained) for stage, border in enumerate(task.borders)]
        self._tied = _tied_groups(task)
        self._gradients: dict[str, Tensor] = {}
        self._turns = torch.arange(len(task.plan.microbatch_sizes))
        stage = PipelineStage(
            self._module,
            member.rank,
            len(task.plan.stages),
            member.device,
            input_args=_shapes(subject, self._module.entering),
            output_args=_shapes(subject, self._module.leaving),
        )
        self._schedule = Schedule1F1B(
            stage, len(self._turns), loss_fn=self._weighted, scale_grads=False
        )

    def _weighted(self, loss: Tensor, turn: Tensor) -> Tensor:
        return loss * self._task.loss_weight(int(turn))

    @property
    def device(self) -> int:
        """Its device of the plan."""
        return self._task.plan.stages[self._stage].devices[0][0]

    def step(self, step: int) -> StepRecord:
        """Do a step."""
        module, record = self._module, StepRecord()
        module.step, module.record = step, record
        self._schedule.step(turn=self._turns, target=self._turns, return_outputs=False)
        self._update()
        return record

    @torch.no_grad()
    def _update(self) -> None:
        weights = self._module.weights
        self._gradients = {
            name: torch.zeros_like(weight) if weight.grad is None else weight.grad
            for name, weight in weights.items()
        }
        for name, group in self._tied.items():
            if name in weights:
                dist.all_reduce(self._gradients[name], group=group)
        for weight in weights.values():
            weight.grad = None
        agreement = self._agreement
        if agreement.is_needed:
            first = {name: stage for stage, names in reversed(self._trained) for name in names}
            mine = [g for name, g in self._gradients.items() if first[name] == self._stage]
            total = agreement.measure(mine)
            dist.all_reduce(total)
            agreement.conclude(float(total))
            self._gradients = {n: agreement.used(value) for n, value in self._gradients.items()}
        if not agreement.skips:
            self._optimizer.step({n: (weight, self._gradients[n]) for n, weight in weights.items()})
        self._optimizer.end_step()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the stage's parameters in the last step."""
        return self._gradients

    def state(self) -> dict[str, Tensor]:
        """Return parameters and buffers of the stage."""
        module = self._module
        held = {**module.weights, **module.frozen, **module.buffers_held}
        return {name: value.detach().clone() for name, value in held.items()}


def _tied_groups(task: Task) -> dict[str, dist.ProcessGroup]:
    """Return a group for each parameter that several stages use; all ranks call it."""
    owners: dict[str, list[int]] = {}
    for stage, border in enumerate(task.borders):
        for name in border.trained:
            owners.setdefault(name, []).append(stage)
    tied = {name: tuple(stages) for name, stages in owners.items() if len(stages) > 1}
    groups = {ranks: dist.new_group(list(ranks)) for ranks in sorted(set(tied.values()))}
    return {name: groups[ranks] for name, ranks in sorted(tied.items())}


def _shapes(subject: Subject, tensors: Sequence[int]) -> tuple[Tensor, ...]:
    """Return tensors without values of the shapes that travel."""
    differentiable, made = subject.task.graph.tensors.differentiable, []
    for tensor in tensors:
        shape, dtype = subject.workload.shape_of(tensor, 0)
        flows = bool(differentiable[tensor]) and (dtype.is_floating_point or dtype.is_complex)
        made.append(torch.empty(shape, dtype=dtype, device="meta", requires_grad=flows))
    return tuple(made)


BASELINE = Baseline(
    check=_check,
    world=lambda task: len(task.plan.stages),
    make=PipelineTrainer,
    verify=lambda subject, found, options: verify(subject.task, subject.workload, found, options),
)
