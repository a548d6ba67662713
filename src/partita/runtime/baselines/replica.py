"""The untouched model on every rank: what DDP and fully_shard have in common.

Random numbers of a microbatch are seeded by (seed, step, microbatch), so that they do not depend on
the rank; they are other numbers than those of a Program, which seeds op by op.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partita.capture.setting import Example, example_inputs, with_metrics
from partita.capture.tree import Value, leaves_of, map_leaves
from partita.core.plan import Plan
from partita.errors import UnsupportedError
from partita.ranks.member import Member
from partita.runtime.baselines.torch_ways import Subject
from partita.runtime.device_parts import StepRecord
from partita.runtime.rank import RankOptions
from partita.runtime.results import RunResult, step_result
from partita.runtime.stage_code import Call, op_seed
from partita.runtime.task import Task
from partita.runtime.training.optimizers import Agreement, RankOptimizer, make_optimizer
from partita.runtime.verify import UNTOUCHED_MODULE, Verdict, compare_runs, tolerance_of

_WHOLE_MODEL = -1
"""Stands for the op where random numbers are seeded once for a whole microbatch."""


def check_replicas(name: str, plan: Plan) -> None:
    """Check that a plan is the whole model on every device, each with something to do.

    Raises:
        UnsupportedError: It is not.
    """
    groups = plan.stages[0].devices
    if len(plan.stages) > 1 or len(groups[0]) > 1:
        raise UnsupportedError(
            f"{name} runs the whole model on every rank; this plan has {len(plan.stages)} stages, "
            f"tensor-parallel degree {len(groups[0])}: plan one stage with a replica for each rank"
        )
    if plan.stashes_weights or plan.recompute.any():
        what = "weight stashing" if plan.stashes_weights else "recomputation"
        raise UnsupportedError(f"{name} has no {what}; plan without it")
    if len(plan.microbatch_sizes) < len(groups):
        raise UnsupportedError(
            f"{name} gives every rank a microbatch; {len(plan.microbatch_sizes)} microbatches are "
            f"too few for {len(groups)} ranks: use as many or more"
        )


def num_replicas(task: Task) -> int:
    """Return the number of ranks."""
    return len(task.plan.stages[0].devices)


def microbatches_of(task: Task, rank: int) -> list[int]:
    """Return the microbatches of a rank, in order: those of the plan's replica."""
    device = task.plan.stages[0].devices[rank]
    turns = range(len(task.plan.microbatch_sizes))
    return [turn for turn in turns if task.group(0, turn) == device]


class WholeModel(nn.Module):
    """A model and its loss function as one module that returns the loss.

    Attributes:
        model: The model.
        criterion: The loss function, where the model returns no loss.
        captured: The model as it was captured.
        seen: Outputs of the last call, by tensor of the graph.
    """

    def __init__(self, subject: Subject, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.criterion = subject.source.loss
        size = int(subject.task.plan.microbatch_sizes[0])
        self.captured = subject.captures.at(size)
        leaves = leaves_of(self.captured.output)
        self._places = [leaf.index if isinstance(leaf, Value) else -1 for _, leaf in leaves]
        self._loss = subject.task.graph.loss
        self._kept = subject.task.results
        self.seen: dict[int, Tensor] = {}

    def forward(self, example: Example) -> Tensor | None:
        """Return the loss of a microbatch; None where there is none."""
        output = self.model(*example.args, **example.kwargs)
        places = zip(self._places, leaves_of(output), strict=True)
        found: dict[int, Tensor] = {place: leaf for place, (_, leaf) in places if place >= 0}
        loss = found.get(self._loss)
        if loss is None and self.criterion is not None:
            loss, _ = with_metrics(self.criterion(output, example.labels))
        if loss is not None:
            found[self._loss] = loss
        self.seen = {t: value.detach() for t, value in found.items() if t in self._kept}
        return loss

    def parameter_names(self) -> dict[str, str]:
        """Return the graph's name for each name of a parameter or buffer here."""
        held = [*dict(self.named_parameters()), *dict(self.named_buffers())]
        return {name: _graph_name(name) for name in held}


def _graph_name(name: str) -> str:
    part, _, rest = name.partition(".")
    return rest if part == "model" else f"loss.{rest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """How one of torch's ways wraps a model.

    Attributes:
        call: Returns the loss of a microbatch.
        pause: Entered for a microbatch that is not the last of a step, so that ranks reduce their
            gradients once.
        local: Returns the part of a parameter or gradient that is here.
        whole: Returns the whole of it; all ranks call it.
        drawing: Entered for a microbatch after random numbers are seeded.
        divides: Whether ranks hold different parts of the parameters.
    """

    call: Callable[[Example], Tensor | None]
    pause: Callable[[], AbstractContextManager[Any]] = nullcontext
    local: Callable[[Tensor], Tensor] = lambda tensor: tensor
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor
    drawing: Callable[[Call], AbstractContextManager[Any]] = lambda _: nullcontext()
    divides: bool = False


class ReplicaTrainer:
    """Trains the whole model on the microbatches of one rank."""

    def __init__(
        self,
        subject: Subject,
        whole: WholeModel,
        wrapping: Wrapping,
        *,
        options: RankOptions,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """Prepare a rank.

        Args:
            subject: What is trained.
            whole: The model with the first weights.
            wrapping: How it is wrapped.
            options: How it is trained.
            rank: This rank; rank 0 answers for weights and gradients.
            world: Number of ranks; 1 = all microbatches are its own.
        """
        task = subject.task
        self._subject, self._model, self._wrapping = subject, whole, wrapping
        self._options, self._rank, self._world = options, rank, world
        self._optimizer: RankOptimizer | None = None
        self._agreement = Agreement(options.recipe)
        self._turns = (
            microbatches_of(task, rank) if world > 1 else [*range(len(task.plan.microbatch_sizes))]
        )
        self._gradients: dict[str, Tensor] = {}
        sizes = {int(task.plan.microbatch_sizes[turn]) for turn in self._turns}
        self._templates = {size: _template(subject, size) for size in sorted(sizes)}

    @property
    def device(self) -> int:
        """Its device of the plan."""
        return self._subject.task.plan.stages[0].devices[self._rank][0]

    def step(self, step: int) -> StepRecord:
        """Do a step."""
        task, record = self._subject.task, StepRecord()
        for turn in self._turns:
            pauses = task.is_training and turn != self._turns[-1]
            with self._wrapping.pause() if pauses else nullcontext():
                self._microbatch(step, turn, record)
        if task.is_training:
            self._update()
        return record

    def _microbatch(self, step: int, turn: int, record: StepRecord) -> None:
        task = self._subject.task
        example = self._example(step, turn)
        call = Call(seed=self._options.seed, step=step, microbatch=turn)
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(task.is_training):
            torch.manual_seed(op_seed(call, _WHOLE_MODEL))
            with self._wrapping.drawing(call):
                loss = self._wrapping.call(example)
            if task.is_training:
                assert loss is not None  # a Task that trains has a loss
                weight = task.loss_weight(turn) * self._world * self._agreement.scale
                (loss * weight).backward()  # type: ignore[no-untyped-call]
        record.outputs.update({(t, turn): value for t, value in self._model.seen.items()})

    def _example(self, step: int, turn: int) -> Example:
        """Return a microbatch as the model takes it, with the tensors of the workload."""
        size = int(self._subject.task.plan.microbatch_sizes[turn])
        example, name_of = self._templates[size]

        def given(leaf: object) -> object:
            name = name_of.get(id(leaf))
            return leaf if name is None else self._subject.workload.load(step, turn, name)

        return replace(
            example,
            args=map_leaves(given, example.args),
            kwargs=map_leaves(given, dict(example.kwargs)),
            labels=map_leaves(given, example.labels),
        )

    @torch.no_grad()
    def _update(self) -> None:
        local = self._wrapping.local
        self._gradients, stepped = {}, {}
        for name, parameter in self._trained():
            gradient = parameter.grad
            self._gradients[name] = torch.zeros_like(parameter) if gradient is None else gradient
            parameter.grad = None
            stepped[name] = (local(parameter), local(self._gradients[name]))
        if self._optimizer is None:  # once the wrapping has made what is stepped
            held = {name: value for name, (value, _) in stepped.items()}
            shapes = {name: parameter.shape for name, parameter in self._trained()}
            self._optimizer = make_optimizer(self._options.recipe, held, shapes)
        self._agree_and_step(stepped)

    def _agree_and_step(self, stepped: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Step by the recipe; where ranks hold parts, they agree on the norm of all of them."""
        assert self._optimizer is not None
        agreement = self._agreement
        if agreement.is_needed:
            total = agreement.measure([gradient for _, gradient in stepped.values()])
            if self._world > 1 and self._wrapping.divides:
                dist.all_reduce(total)
            agreement.conclude(float(total))
            self._gradients = agreement.used(self._gradients)
            used = agreement.used({n: gradient for n, (_, gradient) in stepped.items()})
            stepped = {n: (value, used[n]) for n, (value, _) in stepped.items()}
        if not agreement.skips:
            self._optimizer.step(stepped)
        self._optimizer.end_step()

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        table = self._subject.task.graph.parameters
        used = {n for n, trains in zip(table.names, table.trainable, strict=True) if trains}
        names = self._model.parameter_names()
        found = [(names[name], parameter) for name, parameter in self._model.named_parameters()]
        return [(name, parameter) for name, parameter in found if name in used]

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the last step, on rank 0."""
        found = {name: self._wrapping.whole(value) for name, value in self._gradients.items()}
        return found if self._rank == 0 else {}

    def state(self) -> dict[str, Tensor]:
        """Return parameters and buffers, on rank 0."""
        held = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        used = set(self._subject.task.graph.parameters.names)
        names = self._model.parameter_names()
        found = {
            names[name]: self._wrapping.whole(value.detach()).clone()
            for name, value in held.items()
            if names[name] in used
        }
        return found if self._rank == 0 else {}


def _template(subject: Subject, size: int) -> tuple[Example, dict[int, str]]:
    """Return a microbatch of a size, and the name of each of its tensors by identity."""
    source = subject.source
    example = source.example(size)
    named = example_inputs(source.model, example)
    return example, {id(tensor): name for name, tensor in named.items()}


def prepared_model(subject: Subject, *, own: bool = False) -> WholeModel:
    """Return the model with the first weights, in its mode.

    Args:
        subject: What is trained.
        own: Whether the model itself must not change, as another process holds no copy of it.
    """
    model = copy.deepcopy(subject.source.model) if own else subject.source.model
    whole = WholeModel(subject, model)
    if not subject.task.is_training:
        whole.eval()
    elif not model.training:
        whole.train()
    held = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    with torch.no_grad():
        for name, known in whole.parameter_names().items():
            if known in subject.workload.state:
                held[name].copy_(subject.workload.state[known])
    return whole


def verify_replicas(subject: Subject, found: RunResult, options: RankOptions) -> Verdict:
    """Compare a run with the untouched model in this process, on all microbatches in order."""
    whole = prepared_model(subject, own=True)
    return verify_whole(subject, whole, Wrapping(call=whole), found, options)


def verify_whole(
    subject: Subject,
    whole: WholeModel,
    wrapping: Wrapping,
    found: RunResult,
    options: RankOptions,
) -> Verdict:
    """Compare a run with a prepared model in this process, on all microbatches in order."""
    trainer = ReplicaTrainer(subject, whole, wrapping, options=options)
    steps = []
    for step in range(len(found.steps)):
        record = trainer.step(step)
        record.gradients.update(trainer.gradients())
        steps.append(step_result(subject.task, [record]))
    wanted = RunResult(steps=tuple(steps), state=trainer.state(), statistics={})
    tolerance = tolerance_of(subject.workload.state.values(), options.recipe.precision)
    return compare_runs(found, wanted, tolerance, UNTOUCHED_MODULE)


def unused_parameters(subject: Subject, whole: WholeModel) -> list[str]:
    """Return the trainable parameters of the model that its graph does not use."""
    used, names = set(subject.task.graph.parameters.names), whole.parameter_names()
    return [
        names[name]
        for name, parameter in whole.named_parameters()
        if parameter.requires_grad and names[name] not in used
    ]


def rank_trainer(
    subject: Subject, whole: WholeModel, wrapping: Wrapping, member: Member, options: RankOptions
) -> ReplicaTrainer:
    """Return the trainer of one rank of several."""
    return ReplicaTrainer(
        subject, whole, wrapping, options=options, rank=member.rank, world=member.world
    )
