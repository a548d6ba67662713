"""A user's own training script, run by a plan.

    trainer = partita.parallelize(model, loss_fn, plan, optimizer=optimizer_fn)
    for batch in loader:
        loss = trainer.step(batch)

The script runs in every rank (``partita run PLAN -- script.py``). All ranks build the model and
see the same batches; each computes its own part. First weights are those of rank 0.

Before the script begins, all ranks get the same random numbers, so that a loader that shuffles
gives the same batches everywhere. The first steps, and some later ones, compare a digest of the
batch between the ranks: one rank's inputs with another's labels would train, without an error, on
nonsense.
"""

import logging
import random
import runpy
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from partita.capture.partial import build_for_stages, materialise
from partita.capture.setting import LossFunction
from partita.core.codec import read_json
from partita.core.precision import Precision
from partita.core.solution import Solution
from partita.errors import InvalidInputError, UnsupportedError, WorkerError, reason_of
from partita.ranks.failures import PeerError, first_line
from partita.ranks.member import Member
from partita.ranks.status import Phase, StatusBoard
from partita.runtime.batches import CHECKED_STEPS, batch_digest
from partita.runtime.job import Job
from partita.runtime.ownership import held_names
from partita.runtime.process_transport import used_devices
from partita.runtime.rank import RankReport, Watchdog
from partita.runtime.training.plan_trainer import PlanTrainer, RankPlace
from partita.runtime.training.recipe import Recipe, nan_policy
from partita.runtime.training.trainer import Callback, LocalTrainer, Trainer, make_recipe
from partita.runtime.weights import LoadedWeights, load_weights

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class ScriptRank:
    """This process, while it runs a user's script as a rank.

    Attributes:
        member: The rank.
        board: Where it says what it is doing.
        solution: The plan that the script was started with.
        job: How it is run.
        trainers: The trainers that the script has made.
        watchdog: Watches the comparisons of batches; opened by the first.
    """

    member: Member
    board: StatusBoard
    solution: Solution
    job: Job
    trainers: list[PlanTrainer] = field(default_factory=list)
    watchdog: Watchdog | None = None


_current: list[ScriptRank] = []


def run_script(arguments: Sequence[str], rank: ScriptRank) -> RankReport:
    """Run a script in this rank, as ``python script.py`` would, and return what its steps saw.

    Raises:
        InvalidInputError: It made no step by the plan, or used several.
    """
    seed_alike(rank.member, rank.job.seed)
    before, sys.argv = sys.argv, list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    try:
        with being_rank(rank):
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as exc:
        if exc.code:
            raise
    finally:
        sys.argv = before
        sys.path.pop(0)
    made = [trainer for trainer in rank.trainers if trainer.steps]
    if len(made) != 1:
        raise InvalidInputError(
            f"{arguments[0]} trained {len(made)} models by partita.parallelize; expected one"
        )
    return made[0].report()


@contextmanager
def being_rank(rank: ScriptRank) -> Iterator[None]:
    """Let ``parallelize`` train as a rank of a plan."""
    _current.append(rank)
    try:
        yield
    finally:
        _current.pop()
        if rank.watchdog is not None:
            rank.watchdog.close()


def seed_alike(member: Member, seed: int) -> None:
    """Seed python's, numpy's and torch's random numbers by rank 0's seed; all ranks call it."""
    if member.rank == 0:
        member.store.set("script/seed", str(seed))
    agreed = int(member.store.get("script/seed"))
    random.seed(agreed)
    np.random.seed(agreed % 2**32)  # a script may draw from numpy's global generator
    torch.manual_seed(agreed)


def parallelize(  # noqa: PLR0913 (what a training is made of)
    model: nn.Module | Callable[[], nn.Module],
    loss_fn: LossFunction | None = None,
    plan: Any = None,  # noqa: ANN401  # or the function for the optimizer, as before
    plan_of_before: Solution | str | Path | None = None,
    *,
    optimizer: Any = None,  # noqa: ANN401  # a name, or the user's
    optimizer_fn: Any = None,  # noqa: ANN401  # the name of before
    groups: Any = None,  # noqa: ANN401  # see group_options
    precision: str | Precision | None = None,
    clip_norm: float | None = None,
    scheduler: Any = None,  # noqa: ANN401  # the user's
    on_nan: str | None = None,
    callbacks: Sequence[Callback] = (),
    microbatches: int = 1,
    check: int = 0,
    weights: str | Path | None = None,
) -> Trainer:
    """Return a trainer of a model: in every rank of a plan, or in this process alone.

    Started by ``partita run PLAN -- script.py``, the trainer is one rank of the plan. Started by
    itself, the script trains in one process by plain torch.

    Args:
        model: The model, or a function that builds it: a rank of a plan then has memory for what
            its stages hold alone, with the values of a whole build. A model on the meta device
            does the same, given ``weights``. ``trainer.model`` is the model.
        loss_fn: The loss of (output, labels), a mean over the samples, or a pair of it and other
            numbers by name; None if the model returns its loss.
        plan: What ``partita plan`` wrote, or the path of it; the one that the script was started
            with if not given. In its place there may be ``optimizer_fn``, the plan after it.
        plan_of_before: The plan, after ``optimizer_fn``.
        optimizer: A name (sgd, momentum, adam, adamw), or a function that makes an optimizer of
            torch, given a list of groups of parameters.
        optimizer_fn: The same, given the parameters alone.
        groups: Which parameters are stepped differently: a function of name and parameter that
            returns options or whether there is no weight decay, or rules of pattern and options.
        precision: Types of numbers, such as ``bf16``.
        clip_norm: Largest norm of all gradients together.
        scheduler: A function that makes a scheduler of torch for an optimizer.
        on_nan: Answer to a loss or gradient that is no number: ``warn`` once and go on, ``ignore``,
            ``stop``, ``skip`` the update, or ``rollback`` to the newest checkpoint and leave out
            the data since; what ``partita run --on-nan`` says if not given.
        callbacks: Called after every step with the trainer and the loss.
        microbatches: Parts that a batch is computed in where there is no plan.
        check: Number of first steps before each of which the loss by the plan is compared with that
            of the untouched model on the whole batch, in eval mode; True = the first. A model that
            reads its data in Python may take another way than the captured one. All weights are
            gathered for it. In one process the untouched model is what trains.
        weights: First weights: a file of safetensors or ``torch.save``, an index, or a directory.
            A rank of a plan reads those that it holds, and the model keeps its own elsewhere.

    Raises:
        FormatError: The weights cannot be read.
        InvalidInputError: The plan is another than the one that the script was started with, or
            the weights are not those of the model.
        UnsupportedError: There is a plan, but the script was not started by ``partita run``.
    """
    if callable(plan) and not isinstance(plan, Solution):
        optimizer_fn, plan = plan, plan_of_before
    rank = _current[-1] if _current else None
    built, unfilled = _model_of(model, rank, has_weights=weights is not None)
    usual = Recipe() if rank is None else rank.job.recipe
    policy = usual.on_nan if on_nan is None else nan_policy(on_nan)
    made = make_recipe(
        built,
        optimizer=optimizer_fn if optimizer is None else optimizer,
        groups=groups,
        precision=precision,
        clip_norm=clip_norm,
        scheduler=scheduler,
        bare=optimizer is None and optimizer_fn is not None,
    )
    recipe = replace(made, on_nan=policy)
    if rank is None:
        if plan is not None:
            raise UnsupportedError(
                "partita.parallelize needs a process for each device of the plan; start the script "
                "by 'partita run PLAN -- script.py', or leave out the plan to train in one process"
            )
        if weights is not None:
            loaded = load_weights(built, Path(weights))
            _check_filled(unfilled, loaded)
            for remark in loaded.remarks:
                logger.warning("%s", remark)
        return LocalTrainer(built, loss_fn, recipe, callbacks, microbatches=microbatches)
    if plan is not None:
        given = solution_in(plan)
        if given.plan != rank.solution.plan:
            raise InvalidInputError(
                "the script names another plan than the one that it was started with; leave it out"
            )
    place = RankPlace(member=rank.member, board=rank.board, solution=rank.solution, job=rank.job)
    trainer = PlanTrainer(
        built,
        loss_fn,
        recipe,
        callbacks,
        place,
        check_same=lambda batch, step: check_same_batch(rank, batch, step),
        checked_steps=int(check),
    )
    if weights is not None:
        _check_filled(unfilled, trainer.load_weights(Path(weights)))
    rank.trainers.append(trainer)
    return trainer


def _model_of(
    model: nn.Module | Callable[[], nn.Module], rank: ScriptRank | None, *, has_weights: bool
) -> tuple[nn.Module, list[str]]:
    """Return the model of a script, and the names of buffers that weights have to fill.

    Raises:
        InvalidInputError: It is none, or on the meta device and nothing fills it.
    """
    device = torch.device("cpu") if rank is None else rank.member.device
    held: Collection[str] = ()
    used: Collection[str] = ()
    if rank is not None:
        graph, plan = rank.solution.problem.graph, rank.solution.plan
        held = held_names(
            graph, plan, used_devices(rank.job.program(rank.solution))[rank.member.rank]
        )
        used = frozenset(graph.parameters.names)
    if not isinstance(model, nn.Module):
        built = model() if rank is None else build_for_stages(model, held, used, device)
        if not isinstance(built, nn.Module):
            raise InvalidInputError(
                f"the function for the model returned a {type(built).__name__}; expected a module"
            )
        return built, []
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return model, []
    if not has_weights:
        raise InvalidInputError(
            f"{type(model).__name__} is on the meta device and has no values: give weights, or a "
            "function that builds it in place of the model"
        )
    return model, materialise(model, device, held, used)


def _check_filled(buffers: Sequence[str], loaded: LoadedWeights) -> None:
    """Check that buffers which were on the meta device have values.

    Raises:
        InvalidInputError: One has not.
    """
    missing = [name for name in buffers if name not in loaded.names]
    if missing:
        raise InvalidInputError(
            f"buffer {missing[0]!r} is on the meta device, and the weights do not have it: give a "
            "function that builds the model in place of it"
        )


def solution_in(plan: Any) -> Solution:  # noqa: ANN401  # a solution, a result that has one, a path
    """Return a plan with its problem: as it is, of a result of ``partita.plan``, or of a file.

    Raises:
        InvalidInputError: There is none.
    """
    found = getattr(plan, "solution", plan)
    if isinstance(found, Solution):
        return found
    path = Path(plan)
    try:
        found = read_json(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise InvalidInputError(f"{path} cannot be read: {reason_of(exc)}") from exc
    if not isinstance(found, Solution):
        raise InvalidInputError(f"{path} holds no plan with its problem; 'partita plan' writes one")
    return found


def check_same_batch(rank: ScriptRank, batch: Any, step: int) -> None:  # noqa: ANN401
    """Check that all ranks have the same batch: in the first steps, and now and then.

    Loaders that differ do so from the beginning, or from the next epoch on.

    Raises:
        WorkerError: They have not; names them.
    """
    if step >= CHECKED_STEPS and step % CHECKED_STEPS:
        return
    member = rank.member
    mine = torch.tensor([batch_digest(batch)], device=member.device)
    found = [torch.empty_like(mine) for _ in range(member.world)]
    # Under a watchdog, as a rank that does not come for its step would be waited for here.
    # One for all steps: a thread takes longer to start than the batches to be compared.
    if rank.watchdog is None:
        rank.watchdog = Watchdog(member.rank, rank.board, rank.job.stall_limit_s)
    rank.watchdog.enter(Phase.AGREE)
    with rank.watchdog.awake():
        try:
            dist.all_gather(found, mine)
        except RuntimeError as exc:
            raise PeerError(f"rank {member.rank}: before step {step}: {first_line(exc)}") from exc
    digests = [int(digest) for digest in found]
    others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        ranks = f"rank {others[0]} has" if len(others) == 1 else f"ranks {', '.join(others)} have"
        raise WorkerError(
            f"step {step}: {ranks} another batch than rank 0; every rank must be given "
            "the same batches: seed the loader alike in all ranks, and do not shard it by rank"
        )
