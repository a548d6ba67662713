"""A user's own training script, run by a plan.

    step = partita.parallelize(model, loss_fn, optimizer_fn, plan)
    for batch in loader:
        loss = step(batch)

The script runs in every rank (``partita run PLAN -- script.py``). All ranks build the model and
see the same batches; each computes its own part. First weights are those of rank 0.

Before the script begins, all ranks get the same random numbers, so that a loader that shuffles
gives the same batches everywhere. Every step compares a digest of the batch between the ranks:
one rank's inputs with another's labels would train, without an error, on nonsense.
"""

import hashlib
import random
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from partita.capture.origin import ANNOTATION, Captures, ModelOrigin, origin_of
from partita.capture.setting import Example, LossFunction, example_inputs
from partita.capture.sources import ModelSource
from partita.capture.tree import leaves_of, map_leaves
from partita.core.codec import read_json
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError, UnsupportedError, WorkerError
from partita.ranks.failures import PeerError, first_line
from partita.ranks.member import Member
from partita.ranks.status import Phase, StatusBoard
from partita.runtime.executor import make_task
from partita.runtime.job import Job
from partita.runtime.optimizers import from_torch
from partita.runtime.parameters import Part
from partita.runtime.rank import RankPlayer, RankReport, StepNews, Watchdog
from partita.runtime.workload import model_workload

OptimizerFunction: TypeAlias = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

_DIGEST_ELEMENTS = 16_384
"""Of a larger tensor, about so many elements, spread over all of it, make its digest: reading every
byte of a batch of images in every step would be seen in the time of a small model."""


@dataclass(slots=True, kw_only=True)
class ScriptRank:
    """This process, while it runs a user's script as a rank.

    Attributes:
        member: The rank.
        board: Where it says what it is doing.
        solution: The plan that the script was started with.
        job: How it is run.
        steps: The steps that the script has made.
    """

    member: Member
    board: StatusBoard
    solution: Solution
    job: Job
    steps: list["TrainingStep"] = field(default_factory=list)


_current: list[ScriptRank] = []


def run_script(arguments: Sequence[str], rank: ScriptRank) -> RankReport:
    """Run a script in this rank, as ``python script.py`` would, and return what its steps saw.

    Raises:
        InvalidInputError: It made no step by the plan, or used several.
    """
    seed_alike(rank.member, rank.job.seed)
    before, sys.argv = sys.argv, list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    _current.append(rank)
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as exc:
        if exc.code:
            raise
    finally:
        _current.pop()
        sys.argv = before
        sys.path.pop(0)
    made = [step for step in rank.steps if step.steps]
    if len(made) != 1:
        raise InvalidInputError(
            f"{arguments[0]} trained {len(made)} models by partita.parallelize; expected one"
        )
    return made[0].report()


def seed_alike(member: Member, seed: int) -> None:
    """Seed python's, numpy's and torch's random numbers by rank 0's seed; all ranks call it."""
    if member.rank == 0:
        member.store.set("script/seed", str(seed))
    agreed = int(member.store.get("script/seed"))
    random.seed(agreed)
    np.random.seed(agreed % 2**32)  # a script may draw from numpy's global generator
    torch.manual_seed(agreed)


def parallelize(
    model: nn.Module,
    loss_fn: LossFunction | None,
    optimizer_fn: OptimizerFunction,
    plan: Solution | str | Path | None = None,
) -> "TrainingStep":
    """Return a function that makes a training step by a plan, in every rank of it.

    Args:
        model: The model.
        loss_fn: The loss of (output, labels), a mean over the samples; None if the model returns
            its loss.
        optimizer_fn: Makes an optimizer for some parameters; it may not depend on others.
        plan: What ``partita plan`` wrote, or the path of it; the one that the script was started
            with if not given.

    Raises:
        InvalidInputError: The plan is another than the one that the script was started with.
        UnsupportedError: The script was not started by ``partita run PLAN -- script.py``.
    """
    if not _current:
        raise UnsupportedError(
            "partita.parallelize needs a process for each device of the plan; start the script by "
            "'partita run PLAN -- script.py'"
        )
    rank = _current[-1]
    if plan is not None:
        given = plan if isinstance(plan, Solution) else _read(Path(plan))
        if given.plan != rank.solution.plan:
            raise InvalidInputError(
                "the script names another plan than the one that it was started with; leave it out"
            )
    step = TrainingStep(model, loss_fn, optimizer_fn, rank)
    rank.steps.append(step)
    return step


def _read(path: Path) -> Solution:
    try:
        found = read_json(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise InvalidInputError(f"{path} cannot be read: {exc.strerror}") from exc
    if not isinstance(found, Solution):
        raise InvalidInputError(f"{path} holds no plan with its problem; 'partita plan' writes one")
    return found


class TrainingStep:
    """Carries out a step of a plan on a batch; every rank calls it with the same batch.

    Attributes:
        steps: Steps that were made.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        make_optimizer: OptimizerFunction,
        rank: ScriptRank,
    ) -> None:
        self._model, self._loss, self._make_optimizer = model, loss, make_optimizer
        self._rank, self._plan = rank, rank.solution.plan
        self._batch: list[Example] = []
        self._player: RankPlayer | None = None
        self.steps = 0

    def __call__(self, batch: Any) -> float:  # noqa: ANN401  # the user's
        """Train on a batch and return its loss, the mean over all samples.

        Args:
            batch: What the model is called with: a tensor, a tuple of arguments or a mapping of
                them by name. Where there is a loss function it is a pair of that and the labels.
                Tensors are cut into microbatches along their first dimension.

        Raises:
            InvalidInputError: The batch has not the samples that the plan is for, or the model is
                not the plan's.
            WorkerError: Ranks have different batches; names them.
        """
        sizes = self._plan.microbatch_sizes.tolist()
        self._check_same(batch)
        self._batch = split_batch(batch, sizes, has_labels=self._loss is not None)
        if self._player is None:
            self._player = self._prepare(sizes)
        shares: list[float] = []
        self._player.play(1, lambda news: shares.append(news.loss))
        self._rank.member.notify(StepNews(self.steps, shares[0]))
        self.steps += 1
        total = torch.tensor(shares, dtype=torch.float64, device=self._rank.member.device)
        dist.all_reduce(total)
        return float(total)

    def _check_same(self, batch: Any) -> None:  # noqa: ANN401  # the user's
        """Check that all ranks were called with the same batch."""
        member = self._rank.member
        mine = torch.tensor([batch_digest(batch)], device=member.device)
        found = [torch.empty_like(mine) for _ in range(member.world)]
        # Under a watchdog, as a rank that does not come for its step would be waited for here.
        limit_s = self._rank.job.stall_limit_s
        with Watchdog(member.rank, self._rank.board, limit_s, phase=Phase.AGREE):
            try:
                dist.all_gather(found, mine)
            except RuntimeError as exc:
                raise PeerError(
                    f"rank {member.rank}: before step {self.steps}: {first_line(exc)}"
                ) from exc
        digests = [int(digest) for digest in found]
        others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            ranks = (
                f"rank {others[0]} has" if len(others) == 1 else f"ranks {', '.join(others)} have"
            )
            raise WorkerError(
                f"step {self.steps}: {ranks} another batch than rank 0; every rank must be given "
                "the same batches: seed the loader alike in all ranks, and do not shard it by rank"
            )

    def _prepare(self, sizes: Sequence[int]) -> RankPlayer:
        """Capture the model on the first microbatch of each size, and compare it with the plan."""
        problem, member = self._rank.solution.problem, self._rank.member
        first_of = {size: place for place, size in reversed(list(enumerate(sizes)))}

        def example(size: int, turn: int = 0) -> Example:
            del turn  # the data come with every batch
            return self._batch[first_of[size]]

        self._model.to(member.device)
        source = ModelSource(
            name=problem.graph.name, model=self._model, example=example, loss=self._loss
        )
        workload = model_workload(Captures(source, _origin(problem)), problem, self._plan)
        for name in sorted(workload.state):  # models may be built with other random numbers
            dist.broadcast(workload.state[name], 0)
        workload = replace(workload, load=self._load)
        job = self._rank.job
        options = replace(
            job.rank_options(), steps=1, make_optimizer=lambda: from_torch(self._make_optimizer)
        )
        task = make_task(problem, self._plan, workload, order=job.order)
        return RankPlayer(task, member, workload, options=options, board=self._rank.board)

    def _load(self, _: int, microbatch: int, name: str) -> Tensor:
        found = example_inputs(self._model, self._batch[microbatch])[name]
        return found.to(self._rank.member.device)

    def report(self) -> RankReport:
        """Return what this rank saw in all steps."""
        assert self._player is not None
        return self._player.report()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that this rank holds, by their names in the model."""
        held = {} if self._player is None else self._player.store.state()
        return {name: value for name, value in held.items() if not isinstance(value, Part)}

    def gather_into(self, model: nn.Module) -> None:
        """Copy the weights of all ranks into a model, on every rank."""
        mine, member = self.state_dict(), self._rank.member
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, tensor in sorted(tensors.items()):
            mark = member.rank if name in mine else member.world
            holder = torch.tensor([mark], device=member.device)
            dist.all_reduce(holder, dist.ReduceOp.MIN)
            if int(holder) < member.world:  # some stage uses it
                value = mine[name].contiguous() if name in mine else torch.empty_like(tensor)
                dist.broadcast(value, int(holder))
                with torch.no_grad():
                    tensor.copy_(value)


def _origin(problem: Problem) -> ModelOrigin:
    """Return how the plan's graph was captured."""
    graph = problem.graph
    return origin_of(graph) if ANNOTATION in graph.annotations else ModelOrigin(text=graph.name)


def batch_digest(batch: Any) -> int:  # noqa: ANN401  # the user's
    """Return a 64-bit digest of a batch: places, types, shapes and bytes of its tensors.

    A large tensor counts by elements at equal distances, so two that differ in a few elements only
    may have the same digest; two different draws of samples have not.
    """
    digest = hashlib.blake2b(digest_size=8)
    for place, leaf in leaves_of(batch):
        digest.update(f"{place} {type(leaf).__name__}\n".encode())
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}\n".encode())
            digest.update(_some_bytes(leaf))
        elif isinstance(leaf, bool | int | float | str | bytes | None):
            digest.update(repr(leaf).encode())
    return int.from_bytes(digest.digest(), "little", signed=True)


def _some_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's elements, or of some at an odd distance in a large one.

    An odd distance does not stay in one column, as widths are mostly even.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return b""
    flat = tensor.detach().resolve_conj().reshape(-1)
    distance = flat.numel() // _DIGEST_ELEMENTS
    if distance > 1:
        flat = flat[:: distance | 1]
    return flat.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def split_batch(batch: Any, sizes: Sequence[int], *, has_labels: bool) -> list[Example]:  # noqa: ANN401
    """Return the microbatches of a batch.

    Args:
        batch: Arguments of the model; with labels a pair of them and the labels.
        sizes: Samples of each microbatch.
        has_labels: Whether there are labels.

    Raises:
        InvalidInputError: It is something else, or has another number of samples.
    """
    labels = None
    if has_labels:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise InvalidInputError(
                f"the batch is a {type(batch).__name__}; expected a pair of inputs and labels"
            )
        batch, labels = batch
    samples = sum(sizes)
    found = {leaf.shape[0] for _, leaf in leaves_of(batch) if _is_cut(leaf)}
    if samples not in found:
        raise InvalidInputError(
            f"the batch has {', '.join(map(str, sorted(found))) or 'no'} samples; the plan is for "
            f"{samples}: {len(sizes)} microbatches"
        )
    parts, begin = [], 0
    for size in sizes:
        rows = slice(begin, begin + size)
        begin += size
        inputs, target = (_cut(part, rows, samples) for part in (batch, labels))
        made = _example(inputs)
        parts.append(replace(made, labels=target, batch_size=size))
    return parts


def _is_cut(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _cut(node: Any, rows: slice, samples: int) -> Any:  # noqa: ANN401  # the user's
    """Return a container with those rows of every tensor that has a row for each sample."""

    def take(leaf: Any) -> Any:  # noqa: ANN401  # the user's
        return leaf[rows] if _is_cut(leaf) and leaf.shape[0] == samples else leaf

    return map_leaves(take, node)


def _example(inputs: Any) -> Example:  # noqa: ANN401  # the user's
    if isinstance(inputs, Mapping):
        return Example(kwargs=dict(inputs))
    if isinstance(inputs, tuple | list):
        return Example(args=tuple(inputs))
    return Example(args=(inputs,))
