"""``torch-1f1b``: the stages of a plan under ``torch.distributed.pipelining``'s Schedule1F1B."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B

from partita.errors import UnsupportedError
from partita.ranks.member import Member
from partita.runtime.baselines.torch_ways import Baseline, Subject
from partita.runtime.device_parts import StepRecord
from partita.runtime.rank import RankOptions
from partita.runtime.torch_stages import StageRun, TiedWeights, check_torch_runs, torch_stage
from partita.runtime.training.optimizers import Agreement, make_optimizer
from partita.runtime.verify import verify


def _check(subject: Subject) -> None:
    plan = subject.task.plan
    check_torch_runs(subject.task, "torch-1f1b")
    stages, devices = len(plan.stages), len({stage.devices for stage in plan.stages})
    if devices < stages:
        raise UnsupportedError(
            f"torch-1f1b runs one stage on each rank; this plan has {stages} stages on "
            f"{devices} devices: plan a stage for each device"
        )
    microbatches = len(plan.microbatch_sizes)
    if microbatches < stages:
        raise UnsupportedError(
            f"torch-1f1b needs as many microbatches as stages or more; there are {microbatches} "
            f"for {stages} stages"
        )


class PipelineTrainer:
    """One stage under torch's schedule."""

    def __init__(self, subject: Subject, member: Member, options: RankOptions) -> None:
        """Prepare the stage of this rank."""
        task = subject.task
        self._task, self._stage = task, member.rank
        workload, held = subject.workload, task.borders[member.rank]
        names = (*held.trained, *held.frozen, *held.buffers)
        state = {name: workload.state[name].clone() for name in names}
        self._run = StageRun(task, workload, member.rank, state, options.seed)
        self._optimizer = make_optimizer(options.recipe, self._run.weights)
        self._agreement = Agreement(options.recipe)
        self._trained = [(stage, border.trained) for stage, border in enumerate(task.borders)]
        self._tied = TiedWeights(task, range(len(task.borders)))
        self._gradients: dict[str, Tensor] = {}
        self._turns = torch.arange(len(task.plan.microbatch_sizes))
        stage = torch_stage(task, workload, member.rank, self._run, member.device)
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
        record = StepRecord()
        self._run.step, self._run.record = step, record
        self._schedule.step(turn=self._turns, target=self._turns, return_outputs=False)
        self._update()
        return record

    @torch.no_grad()
    def _update(self) -> None:
        weights = self._run.weights
        self._gradients = {
            name: torch.zeros_like(weight) if weight.grad is None else weight.grad
            for name, weight in weights.items()
        }
        self._tied.add_up(self._gradients)
        for weight in weights.values():
            weight.grad = None
        agreement = self._agreement
        if agreement.is_needed:
            first = {name: stage for stage, names in reversed(self._trained) for name in names}
            mine = [g for name, g in self._gradients.items() if first[name] == self._stage]
            total = agreement.measure(mine)
            dist.all_reduce(total)
            agreement.conclude(float(total))
            self._gradients = agreement.used(self._gradients)
        if not agreement.skips:
            self._optimizer.step({n: (weight, self._gradients[n]) for n, weight in weights.items()})
        self._optimizer.end_step()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the stage's parameters in the last step."""
        return self._gradients

    def state(self) -> dict[str, Tensor]:
        """Return parameters and buffers of the stage."""
        held = {**self._run.weights, **self._run.frozen, **self._run.buffers}
        return {name: value.detach().clone() for name, value in held.items()}


BASELINE = Baseline(
    check=_check,
    world=lambda task: len(task.plan.stages),
    make=PipelineTrainer,
    verify=lambda subject, found, options: verify(subject.task, subject.workload, found, options),
)
