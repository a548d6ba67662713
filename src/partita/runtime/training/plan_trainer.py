"""A trainer that is one rank of a plan: every rank runs the script and computes its own part.

Shapes are part of a captured graph. So each division of a batch into microbatches, that of the plan
and those of smaller batches, has its own code and channels; parameters and optimizer are shared.
Evaluation runs the stages forwards alone, in eval mode, by the same code.

The weights that a rank holds whole are those of the user's model: its parameters are the tensors
that are stepped. What it does not hold must not be read from the model by mistake: it would be what
it was before the first step.
"""

import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from partita.capture.captured import CapturedModel
from partita.capture.origin import Captures, origin_in
from partita.capture.partial import is_stand_in, without_saved_tensors
from partita.capture.setting import Example, LossFunction, example_inputs
from partita.capture.sources import ModelSource
from partita.capture.tree import Value, leaves_of
from partita.core.solution import Solution
from partita.errors import InvalidInputError, UnsupportedError, WorkerError
from partita.ranks.device import has_ordered_groups
from partita.ranks.member import Member
from partita.ranks.status import StatusBoard
from partita.runtime.batches import (
    CHECKED_STEPS,
    BatchParts,
    batch_digest,
    cut_batch,
    kind_of_batch,
    samples_of,
    signature_of,
    taken_from,
)
from partita.runtime.checkpoint.files import read_manifest
from partita.runtime.device_parts import Cell
from partita.runtime.executor import make_task
from partita.runtime.job import Job
from partita.runtime.numerics import ready_numerics
from partita.runtime.ownership import held_names
from partita.runtime.parameters import ParameterStore
from partita.runtime.parts import Part, joined
from partita.runtime.process_transport import used_devices
from partita.runtime.rank import OtherSteps, RankPlayer, RankReport, StepNews
from partita.runtime.task import Task
from partita.runtime.tensor_parallel import is_divided, slices_of
from partita.runtime.training.evaluation import forward_task
from partita.runtime.training.gradient_notice import GradientNotice
from partita.runtime.training.optimizers import RankOptimizer
from partita.runtime.training.recipe import Recipe
from partita.runtime.training.saving import (
    Saver,
    Saving,
    check_unstarted,
    random_state,
    saving_of,
    set_random_state,
)
from partita.runtime.training.trainer import Callback, LocalTrainer, Loss, Trainer
from partita.runtime.training.watched_values import WatchedValues
from partita.runtime.weights import LoadedWeights, check_weights, load_weights
from partita.runtime.workload import Workload, model_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a trainer runs: a rank, and the plan that it was started with."""

    member: Member
    board: StatusBoard
    solution: Solution
    job: Job


@dataclass(frozen=True, slots=True)
class Deal:
    """How a batch is divided into microbatches.

    Attributes:
        sizes: Samples of each.
        real: Samples of each that count; 0 = it only fills the plan.
    """

    sizes: tuple[int, ...]
    real: tuple[int, ...]

    @property
    def weights(self) -> list[float]:
        """The weight of each microbatch's loss."""
        return [count / sum(self.real) for count in self.real]

    @property
    def rows(self) -> list[int]:
        """The samples of all microbatches, one after the other."""
        found: list[int] = []
        begin, samples = 0, sum(self.real)
        for size, real in zip(self.sizes, self.real, strict=True):
            found += [(begin + n % real if real else n % samples) for n in range(size)]
            begin += real
        return found


def deal(samples: int, planned: Sequence[int]) -> Deal:
    """Divide samples into as many microbatches as a plan has, as evenly as its own are.

    Where those have two samples or more none has a single one: a model may then compute something
    else (statistics of a batch), or in another way, and its graph is not that of the plan. Where
    there are too few samples, some microbatches have samples that do not count.
    """
    if samples == sum(planned):
        return Deal(tuple(planned), tuple(planned))
    if samples > sum(planned):
        raise InvalidInputError(
            f"the batch has {samples} samples; the plan is for {sum(planned)}: "
            f"{len(planned)} microbatches; give batches of at most {sum(planned)}, or plan for "
            f"more: --microbatches {-(-samples // max(planned))}"
        )
    least = min(2, *planned)
    if samples < least * len(planned):
        # The others are filled with samples that do not count, and a single sample is seen twice.
        count = max(1, samples // least)
        parts = [samples // count + (place < samples % count) for place in range(count)]
        sizes = [max(least, part) for part in parts]
        fill = len(planned) - count
        return Deal((*sizes, *[sizes[-1]] * fill), (*parts, *[0] * fill))
    whole = sum(planned) - least * len(planned)
    spare = [
        least + (samples - least * len(planned)) * (size - least) // max(1, whole)
        for size in planned
    ]
    for place in range(samples - sum(spare)):
        spare[place % len(spare)] += 1
    return Deal(tuple(spare), tuple(spare))


@dataclass(slots=True)
class _Way:
    """One way to play the plan: sizes of microbatches, and whether it trains."""

    task: Task
    player: RankPlayer | OtherSteps
    captured: CapturedModel
    metrics: dict[str, int]
    weights: list[float]
    samples: int


_CHECK_LIMITS = defaultdict(
    lambda: 5e-2, {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex128: 1e-9}
)
"""How far two ways to compute a loss may differ by rounding, relative to it, by the type."""


_MOST_WAYS = 64
"""Ways to play the plan that are kept: each has a captured graph."""
_Kind: TypeAlias = tuple[tuple[str, Hashable], ...]
"""What a captured graph has of a batch, beside its samples."""
_DIGEST_MASK = 2**20 - 1
"""Bits of a digest whose squares are still exact when they are summed over ranks as floats."""


class Stopped(SystemExit):
    """Ends a script whose ranks were asked to stop, as ``sys.exit()`` would."""


class PlanTrainer(Trainer):
    """Trains a model as one rank of a plan."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        recipe: Recipe,
        callbacks: Sequence[Callback],
        place: RankPlace,
        *,
        check_same: Callable[[Any, int], None],
        checked_steps: int = 0,
    ) -> None:
        """Prepare a rank; the model is captured when the first batch comes.

        Args:
            model: The model.
            loss: The loss function.
            recipe: What is trained with.
            callbacks: Called after every step.
            place: Where it runs.
            check_same: Checks that all ranks have a batch, given it and the step.
            checked_steps: First steps whose batch is compared with the untouched model.
        """
        super().__init__(model, loss, recipe, callbacks)
        self._place, self._plan = place, place.solution.plan
        self._check_same = check_same
        self._loaded = LoadedWeights()
        self._unread: Path | None = None
        self._is_partial = any(map(is_stand_in, model.parameters()))
        self._sizes = tuple(self._plan.microbatch_sizes.tolist())
        self._batch: Sequence[Example] = ()
        self._inputs: dict[int, dict[str, Tensor]] = {}
        self._input_names: dict[int, list[str]] = {}
        # How batches of a signature are dealt, and their kind.
        self._dealt: dict[Hashable, tuple[Deal, _Kind]] = {}
        self._captures: dict[_Kind, Captures] = {}
        self._num_ways, self._has_told = 0, False
        # What the script's Python had when the model was last captured.
        self._watched: WatchedValues | None = None
        self._has_told_of_values = False
        self._player: RankPlayer | None = None
        self._saving: Saving | None = None
        self._saver: Saver | None = None
        self._ways: dict[tuple[Deal, _Kind, bool], _Way] = {}
        self._guard = _ModelGuard(model, place.member.notify)
        self._has_stopped, self._was_asked = False, False
        self._left_to_check = checked_steps
        self._digest: int | None = None
        self._has_other_batch = False

    def load_weights(self, path: Path) -> LoadedWeights:
        """Read the first weights that this rank holds by the plan; before the first batch.

        How a group divides parameters is known when the model is captured: slices are read then.

        Raises:
            InvalidInputError: They are not those of the model.
            FormatError: They cannot be read.
        """
        solution, member = self._place.solution, self._place.member
        device = used_devices(self._place.job.program(solution))[member.rank]
        held = held_names(solution.problem.graph, self._plan, device)
        if is_divided(self._plan, device):
            self._unread, self._loaded = path, check_weights(self.model, path)
        else:
            self._loaded = load_weights(self.model, path, held)
        for remark in self._loaded.remarks if member.rank == 0 else ():
            member.notify(remark)
        return self._loaded

    def _samples(self) -> int:
        return sum(self._sizes)

    def _evaluated_at_once(self, batch: Any) -> list[Any]:  # noqa: ANN401  # the user's
        return cut_batch(batch, self._samples())

    def _optimizer(self) -> RankOptimizer | None:
        return None if self._player is None else self._player.store.optimizer

    @property
    def gradient_norm(self) -> float:
        """The norm of all gradients of the last step; NaN where they are not clipped."""
        return math.nan if self._player is None else self._player.store.gradient_norm

    def _train(self, batch: Any) -> Loss:  # noqa: ANN401  # the user's
        way = self._way(batch, training=True)
        member = self._place.member
        # By the number of the step over all ways, after the first way may have resumed.
        if self._place.board.stops_before(member.rank, self.steps):
            self._stop()
        if self._left_to_check > 0:
            self._left_to_check -= 1
            self._check_model(batch)
            way = self._way(batch, training=True)
        self._guard.whole = False
        found = self._measured(way)
        if self._has_other_batch:
            self._check_same(batch, self.steps)
        is_whole = way.task.plan.samples == self._plan.samples
        member.notify(
            StepNews(
                self.steps,
                0.0 if member.rank else float(found),
                compute_s=way.player.loop.compute_s if is_whole else 0.0,
            )
        )
        return found

    def _check_model(self, batch: Any) -> None:  # noqa: ANN401  # the user's
        """Compare the loss of a batch by the plan with that of the untouched model.

        Raises:
            WorkerError: They differ by more than the types of numbers explain.
        """
        by_plan = float(self._evaluate(batch))
        self.gather_into(self.model)
        # The model is the same on all ranks now, and so is what each of them finds.
        with self._guard.open():
            alone = LocalTrainer(self.model, self._loss, Recipe(), microbatches=len(self._sizes))
            by_model = float(alone.evaluate([batch])["loss"])
            dtype = next((p.dtype for p in self.model.parameters()), torch.float32)
        has_policy = self.recipe.precision is not None
        limit = _CHECK_LIMITS[torch.bfloat16 if has_policy else dtype]
        if not abs(by_plan - by_model) <= limit * max(1.0, abs(by_model)):
            raise WorkerError(
                f"step {self.steps + 1}: the loss by the plan is {by_plan:.9g}, that of the "
                f"untouched model {by_model:.9g}: it takes another way on these data than on those "
                "that it was captured on; torch.where in the place of a branch keeps both ways"
                + "".join(f"; {note}" for note in self._special_notes())
            )

    def _special_notes(self) -> list[str]:
        """Return what was noted of branches when the model was captured."""
        notes = [note for way in self._ways.values() for note in way.captured.notes]
        return [note for note in dict.fromkeys(notes) if note.startswith("specialised to")]

    def _stop(self) -> NoReturn:
        """Save, and end the script.

        Raises:
            Stopped: Always.
        """
        assert self._player is not None
        if self._player.saver is not None and not self._has_stopped:
            self.save()
            self._player.saver.wait()
        self._has_stopped = True
        raise Stopped

    def _end_step(self) -> None:
        assert self._player is not None
        if self._player.saver is not None and self._player.saver.is_due(self.steps):
            self.save()

    def _evaluate(self, batch: Any) -> Loss:  # noqa: ANN401  # the user's
        return self._measured(self._way(batch, training=False))

    def _predict(self, batch: Any) -> Any:  # noqa: ANN401  # the user's
        if self._loss is not None:
            raise UnsupportedError(
                "predict runs the captured graph, which ends with the loss function here and needs "
                "labels; use evaluate, or gather_into a model of your own"
            )
        way = self._way(batch, training=False, outputs=True)
        return self._outputs(way, self._played(way))

    def _played(self, way: _Way) -> dict[Cell, Tensor]:
        """Play a step, and return what was seen of loss, metrics and outputs here."""
        seen: dict[Cell, Tensor] = {}
        # Before the player lets go of what a long run need not keep.
        way.player.play_as(
            self.steps, lambda _: seen.update(way.player.loop.records[-1].outputs)
        )  # fmt: skip
        return seen

    def _measured(self, way: _Way) -> Loss:
        """Play a step, and return its loss and metrics, summed over all ranks."""
        loop, member = way.player.loop, self._place.member
        under_way: list[tuple[Tensor, Any]] = []

        def start() -> None:
            sums = self._sums(way, loop.records[-1].outputs)
            under_way.append((sums, dist.all_reduce(sums, async_op=True)))

        # With the gradients where all ranks sum some, else beside them. Backends whose groups take
        # turns on a device need one order of collectives on all ranks, which only the end of a
        # step has.
        early = not loop.carries and not has_ordered_groups(member.backend) and loop.has_passes
        loop.on_last_pass = start if early else lambda: None
        loop.beside_total, loop.beside = None, None
        if loop.carries:
            loop.beside = lambda: self._sums(way, loop.records[-1].outputs)
        seen = self._played(way)
        if loop.beside_total is not None:
            sums = loop.beside_total
        elif early:
            for _, work in under_way:  # a step without numbers is played twice
                work.wait()
            sums = under_way[0][0]
        else:
            sums = self._sums(way, seen)
            dist.all_reduce(sums)
        loss, *others = sums.tolist()
        if self._digest is not None:
            count, total, squares = map(int, others[len(way.metrics) :])
            # Equal in numbers that are all the same, and in no others.
            self._has_other_batch = total * total != count * squares
        return Loss(loss, dict(zip(way.metrics, others, strict=False)))

    def _sums(self, way: _Way, seen: Mapping[Cell, Tensor]) -> Tensor:
        """Return this rank's shares of loss and metrics."""
        tensors = [way.task.graph.loss, *way.metrics.values()]
        digest = self._digest
        compared = [] if digest is None else [1.0, float(digest), float(digest * digest)]
        device = self._place.member.device
        # Numbers of Python are quicker to add up; reading one would wait for a GPU.
        on_cpu = device.type == "cpu"
        sums: list[Any] = [0.0] * len(tensors)
        for (tensor, microbatch), value in seen.items():
            if tensor in tensors and value.numel() == 1 and way.weights[microbatch]:
                share = float(value) if on_cpu else value.double().reshape(())
                for place, wanted in enumerate(tensors):
                    if wanted == tensor:
                        sums[place] += share * way.weights[microbatch]
        if on_cpu:
            return torch.from_numpy(np.array(sums + compared, np.float64))
        return torch.stack(
            [torch.as_tensor(x, dtype=torch.float64, device=device) for x in sums + compared]
        )

    def _outputs(self, way: _Way, seen: Mapping[Cell, Tensor]) -> Any:  # noqa: ANN401  # the model's
        """Return what the model would return, on rank 0."""
        member, names = self._place.member, way.task.graph.tensors.names
        wanted = set(way.task.graph.outputs.tolist())
        mine = {cell: value.cpu() for cell, value in seen.items() if cell[0] in wanted}
        everyone: list[Any] = [None] * member.world
        dist.gather_object(mine, everyone if member.rank == 0 else None)
        if member.rank:
            return None
        found = {cell: value for part in everyone for cell, value in part.items()}
        real = [place for place, weight in enumerate(way.weights) if weight]
        whole: dict[str, Tensor] = {}
        for tensor in wanted:
            parts = [found[tensor, place] for place in real]
            weights = [way.weights[place] for place in real]
            made = _together(parts, weights, names[tensor])
            # A single sample was computed twice.
            is_double = way.samples == 1 and made.dim() and made.shape[0] == 2
            whole[names[tensor]] = made[:1] if is_double else made
        return way.captured.rebuild_output(whole)

    def _way(self, batch: Any, *, training: bool, outputs: bool = False) -> _Way:  # noqa: ANN401
        """Take a batch, and return how the plan is played on it."""
        # Later on what is compared goes with the loss, and costs no collective of its own.
        is_late = training and self.steps >= CHECKED_STEPS
        if not is_late:
            self._check_same(batch, self.steps)
        is_compared = is_late and self.steps % CHECKED_STEPS == 0
        self._digest = batch_digest(batch) & _DIGEST_MASK if is_compared else None
        signature = signature_of(batch)
        known = None if signature is None else self._dealt.get(signature)
        dealt, kind = self._deal(batch) if known is None else known
        self._inputs = {}
        whole = batch
        if dealt.real != dealt.sizes:
            whole = taken_from(batch, sum(dealt.real), dealt.rows)
        self._batch = BatchParts(
            whole, dealt.sizes, has_labels=self._loss is not None, is_known=known is not None
        )
        if signature is not None and known is None:
            self._dealt[signature] = dealt, kind
        self._look_at_python()
        key = (dealt, kind, training)
        if self._player is None and not training:
            # The first way decides what is held, so it is one of training.
            self._ways[dealt, kind, True] = self._prepare(dealt, kind, training=True)
        if key not in self._ways:
            self._ways[key] = self._prepare(dealt, kind, training=training)
        self._ways[key] = way = self._ways.pop(key)  # the last one used is forgotten last
        if len(self._ways) > _MOST_WAYS:
            self._forget(next(iter(self._ways)))
        measured = frozenset((way.task.graph.loss, *way.metrics.values()))
        way.player.loop.seen = way.task.results if outputs else measured
        return way

    def _deal(self, batch: Any) -> tuple[Deal, _Kind]:  # noqa: ANN401  # the user's
        """Return how a batch is divided, and of what kind it is."""
        samples = samples_of(batch)
        if not samples:
            raise InvalidInputError(
                "the batch has no samples; the plan is for "
                f"{self._samples()}: {len(self._sizes)} microbatches"
            )
        return deal(samples, self._sizes), kind_of_batch(batch, samples)

    def _look_at_python(self) -> None:
        """Capture the model anew where numbers of Python that it reads have changed.

        Raises:
            InvalidInputError: Other parameters are to be trained than in the first step.
        """
        watched = self._watched
        if watched is None:
            return
        name = watched.released()
        if name:
            raise InvalidInputError(
                f"requires_grad of {name!r} has changed since the first step; a plan is for the "
                "parameters that were trained then: profile and plan again, and go on from a "
                "checkpoint"
            )
        name = watched.changed()
        if not name:
            return
        self._ways.clear()
        self._captures.clear()
        if not self._has_told_of_values and self._place.member.rank == 0:
            self._has_told_of_values = True
            self._place.member.notify(
                f"{name} has changed, which the model or its loss may read: the model is captured "
                "anew whenever such a value changes; one that changes often is better a tensor in "
                "the batch"
            )

    def _forget(self, key: tuple[Deal, _Kind, bool]) -> None:
        """Forget a way, and say once why there are so many."""
        del self._ways[key]
        if key[1] not in {kind for _, kind, _ in self._ways}:
            self._captures.pop(key[1], None)
            self._dealt.clear()
        if not self._has_told and self._place.member.rank == 0:
            self._has_told = True
            self._place.member.notify(
                f"batches have come in more than {_MOST_WAYS} shapes, or with as many values that "
                "are no tensors: the model is captured anew for each; pad to a few lengths, and "
                "give numbers that change as tensors"
            )

    def _prepare(self, dealt: Deal, kind: _Kind, *, training: bool) -> _Way:
        """Capture the model on the microbatches at hand, and compare it with the plan."""
        place, solution = self._place, self._place.solution
        first_of = {size: turn for turn, size in reversed(list(enumerate(dealt.sizes)))}
        problem = solution.problem
        plan = replace(self._plan, microbatch_sizes=np.array(dealt.sizes))
        with self._guard.open():
            captures = self._captures_of(kind)
            captures.source.example.examples = {  # type: ignore[attr-defined]  # ours
                size: self._batch[turn] for size, turn in first_of.items()
            }
            if self._player is None:
                self.model.to(place.member.device)
            # A whole forward with a part of the weights: nothing of it needs to be kept.
            with without_saved_tensors() if self._is_partial else nullcontext():
                workload = model_workload(captures, problem, plan)
            captured = captures.at(dealt.sizes[0])
            parameters = list(self.model.named_parameters())
        if self._player is None and len(dealt.sizes) > 1 and place.member.rank == 0:
            self._tell_of_sums(captured)
        task = make_task(problem, plan, workload, order=place.job.order)
        if self._unread is not None:
            self._read_slices(task, self._unread)
        if self._player is None:
            self._share_first_values(workload.state)
        workload = replace(workload, load=self._load)
        if not training:
            task = forward_task(task)
        task.weights = None if dealt.sizes == dealt.real else dealt.weights
        player = self._open(task, workload)
        # After the capture, which runs the model's Python: what it counts is no change.
        is_first = self._watched is None
        self._watched = WatchedValues(self.model, parameters, self._loss)
        if is_first and self._watched.passed_over and place.member.rank == 0:
            place.member.notify(
                f"{self._watched.passed_over} holds more values of Python than are watched; a "
                "change of one that the model or its loss reads would not be seen: give a tensor"
            )
        metrics = metrics_of(captured)
        return _Way(task, player, captured, metrics, dealt.weights, sum(dealt.real))

    def _tell_of_sums(self, captured: CapturedModel) -> None:
        """Warn of a loss that adds up its samples: the mean over microbatches is none of it."""
        graph = captured.graph
        maker = captured.ops[int(graph.tensors.producer[graph.loss])].leaves[-1]
        if maker.kind == "sum" or "sum" in (*maker.args, maker.kwargs.get("reduction")):
            self._place.member.notify(
                f"the loss is a sum over samples ({maker.kind.strip('_')}); losses of microbatches "
                f"are averaged, so that it and its gradients are 1/{len(self._sizes)} of those of "
                "a batch computed at once: return a mean"
            )

    def _read_slices(self, task: Task, path: Path) -> None:
        """Read what this rank holds of the first weights, where groups divide tensors."""
        device = used_devices(task.program)[self._place.member.rank]
        held = held_names(task.graph, task.plan, device)
        self._loaded = load_weights(self.model, path, held, slices_of(task, device))
        self._unread = None

    def _share_first_values(self, state: Mapping[str, Tensor]) -> None:
        """Give all ranks the first weights of rank 0; what files have, each holder has read.

        Ranks with a part of the model each cannot be given what rank 0 has: those that hold a
        tensor compare it.

        Raises:
            InvalidInputError: They have other values.
        """
        rank, names = self._place.member.rank, sorted(set(state) - self._loaded.names)
        held = {name: state[name] for name in names if not is_stand_in(state[name])}
        everyone: list[Any] = [None] * self._place.member.world
        dist.all_gather_object(everyone, len(held) == len(names))
        if all(everyone):
            for name in names:
                dist.broadcast(state[name], 0)
            return
        dist.all_gather_object(everyone, {name: _digest(value) for name, value in held.items()})
        for other, theirs in enumerate(everyone):
            for name in names:
                if name in held and theirs.get(name, everyone[rank][name]) != everyone[rank][name]:
                    raise InvalidInputError(
                        f"{name!r} begins with other values on rank {rank} than on rank {other}: "
                        "the function that builds the model must draw the same numbers in all"
                    )

    def _captures_of(self, kind: _Kind) -> Captures:
        if kind not in self._captures:
            problem = self._place.solution.problem
            source = ModelSource(
                name=problem.graph.name, model=self.model, example=_Examples(), loss=self._loss
            )
            device = self._place.member.device.type
            numerics = ready_numerics(self.recipe.precision, device)
            self._captures[kind] = Captures(
                source, origin_in(problem.graph), lambda: numerics.autocast(device)
            )
        return self._captures[kind]

    def _open(self, task: Task, workload: Workload) -> RankPlayer | OtherSteps:
        place = self._place
        options = replace(place.job.rank_options(), steps=1, recipe=self.recipe)
        options = replace(options, keep_results=False)
        if self._player is None:
            self._player = RankPlayer(
                task, place.member, workload, options=options, board=place.board
            )
            if self._saving is None:
                self._open_saver(options.saving)
            if self._saving is not None:
                before = random_state() if self._positions.goes_on else None
                self._player.resume(self._saving, self._saver)
                self.steps = self._player.next_step
                if before is not None:  # the loader has gone on from those of the checkpoint
                    set_random_state(before)
                elif self.steps and not self._was_asked and place.member.rank == 0:
                    place.member.notify(
                        f"the script goes on after step {self.steps}, but it reads its batches "
                        "from their beginning: trainer.loader goes on by itself, and "
                        "trainer.resume() returns the steps to pass over"
                    )
            self._guard.bind(self._player.store)
            return self._player
        self._num_ways += 1
        name = f"way{self._num_ways}"
        return self._player.other(task, workload, job=name)

    def _load(self, _: int, microbatch: int, name: str) -> Tensor:
        if microbatch not in self._inputs:  # bound to the model's arguments once, not per input
            self._inputs[microbatch] = self._bound(self._batch[microbatch])
        return self._inputs[microbatch][name].to(self._place.member.device)

    def _bound(self, example: Example) -> dict[str, Tensor]:
        """Return the inputs of a microbatch by the names that the graph has for them."""
        plain = (*example.args, example.labels)
        is_plain = not example.kwargs and set(map(type, plain)) == {Tensor}
        if not is_plain or len(set(map(id, plain))) < len(plain):
            return example_inputs(self.model, example)
        # The names follow from how many there are.
        names = self._input_names.get(len(plain))
        if names is None:
            found = example_inputs(self.model, example)
            name_of = {id(value): name for name, value in found.items()}
            names = self._input_names[len(plain)] = [name_of[id(value)] for value in plain]
        return dict(zip(names, plain, strict=True))

    def save(self, folder: str | Path = "checkpoints", keep: int = 2) -> None:
        """Save weights, optimizer and schedule in the background; all ranks call it."""
        if self._player is None:
            raise InvalidInputError("there is nothing to save before the first step")
        if self._player.saver is None:
            self._player.resume(Saving(folder=str(folder), keep=keep))
        assert self._player.saver is not None
        extra = {
            **self._player.store.small_state(),
            "random": random_state(),
            "seed": self._place.job.seed,
            **self._positions.state(),
        }
        self._player.saver.save(self.steps, self._player.holdings(), extra)

    def resume(self, path: str | Path = "checkpoints", keep: int = 2) -> int:
        """Go on from a checkpoint, before the first step; all ranks call it."""
        check_unstarted(self.steps)
        self._was_asked = True
        self._open_saver(self._place.job.saving() or saving_of(Path(path), keep))
        assert self._saver is not None
        return self._saver.steps_of(self._saver.found())

    def _open_saver(self, saving: Saving | None) -> None:
        place = self._place
        plan, graph = place.solution.plan, place.solution.problem.graph
        self._saving = saving
        if saving is not None:
            self._saver = Saver(
                saving, place.member, plan=plan, model=graph.name, warn=place.member.notify
            )

    def _saved_values(self) -> Mapping[str, Any]:
        if self._saver is None and self._player is None:
            self._open_saver(self._place.job.saving())
        found = None if self._saver is None else self._saver.found()
        values = {} if found is None else dict(read_manifest(found).extra)
        done = int(values.get("step", 0))
        # Earlier data that were left out are part of the saved position.
        passes = sum(passed.count for passed in self._place.job.passed if passed.step == done)
        return {**values, "passes": passes}

    def report(self) -> RankReport:
        """Return what this rank saw in its steps on whole batches; saves where that is due."""
        assert self._player is not None
        if self._player.saver is not None:
            if self._saving is not None and self._saving.every:
                self.save()
            self._player.saver.wait()
        return replace(
            self._player.report(),
            has_stopped=self._has_stopped,
            weight_bytes=self._loaded.bytes_read,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that this rank holds whole, by their names."""
        held = {} if self._player is None else self._player.store.state()
        return {name: value for name, value in held.items() if not isinstance(value, Part)}

    def _all_tensors(self) -> dict[str, Tensor]:
        with self._guard.open():
            return super()._all_tensors()

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights on rank 0, one at a time; all ranks take part."""
        member = self._place.member
        held = {} if self._player is None else self._player.store.state()
        kinds = {name: isinstance(value, Part) for name, value in held.items()}
        everyone: list[Any] = [None] * member.world
        dist.all_gather_object(everyone, kinds)
        for name, like in self._all_tensors().items():
            holders = [rank for rank in range(member.world) if name in everyone[rank]]
            if not holders:  # no stage uses it: it is as it was
                if member.rank == 0:
                    yield name, like.detach().clone()
                continue
            whole = [rank for rank in holders if not everyone[rank][name]]
            senders = whole[:1] or holders
            found = [self._passed(name, held, sender) for sender in senders]
            if member.rank == 0:
                value = found[0] if whole else joined([part for part in found if part is not None])
                yield name, value

    def _passed(self, name: str, held: Mapping[str, Tensor | Part], sender: int) -> Any:  # noqa: ANN401
        """Bring a rank's piece of a tensor to rank 0."""
        rank = self._place.member.rank
        if sender == 0:
            return held[name] if rank == 0 else None
        box: list[Any] = [held[name] if rank == sender else None]
        if rank == sender:
            dist.send_object_list(box, 0)
        elif rank == 0:
            dist.recv_object_list(box, sender)
        return box[0]

    def gather_into(self, model: nn.Module) -> None:
        """Copy the weights of all ranks into a model, on every rank."""
        with self._guard.open():
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            for tensor in tensors.values():
                if is_stand_in(tensor):
                    tensor.data = torch.empty(
                        tensor.shape, dtype=tensor.dtype, device=tensor.device
                    )
        found = dict(self._gathered())
        for name, tensor in tensors.items():
            value = found.get(name)
            there = torch.tensor([value is not None], device=self._place.member.device)
            dist.broadcast(there, 0)
            if bool(there):
                value = torch.empty_like(tensor) if value is None else value.to(tensor.dtype)
                value = value.to(self._place.member.device).contiguous()
                dist.broadcast(value, 0)
                with torch.no_grad():
                    tensor.copy_(value)
        if model is self.model:
            self._guard.whole = True  # until the next step


def _digest(value: Tensor) -> str:
    flat = value.detach().reshape(-1).contiguous().cpu().view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).hexdigest()


def _together(parts: Sequence[Tensor], weights: Sequence[float], name: str) -> Tensor:
    """Return an output of a batch, given those of its microbatches and their shares of the samples.

    Raises:
        UnsupportedError: It is a single number that is no mean.
    """
    if parts[0].dim():
        return torch.cat(list(parts))
    if parts[0].is_floating_point() or parts[0].is_complex():
        pairs = zip(parts, weights, strict=True)
        return torch.stack([part * weight for part, weight in pairs]).sum(0)
    if any(not part.equal(parts[0]) for part in parts):
        raise UnsupportedError(
            f"predict: output {name!r} is a single {str(parts[0].dtype).removeprefix('torch.')} of "
            "the batch, and the plan computes one for each microbatch; return one for each sample"
        )
    return parts[0]


class _Examples:
    """Gives the microbatches of the batch at hand, by their size."""

    def __init__(self) -> None:
        self.examples: dict[int, Example] = {}

    def __call__(self, size: int, turn: int = 0) -> Example:
        del turn  # the data come with every batch
        return self.examples[size]


def metrics_of(captured: CapturedModel) -> dict[str, int]:
    """Return the tensors of single numbers that a model or its loss function returns, by name."""
    found: dict[str, int] = {}
    # Without names, as in a tuple, nobody could tell one number from another.
    named = not isinstance(captured.output, Value | tuple | list)
    places = list(leaves_of(captured.output)) if named else []
    for place, leaf in [*places, *captured.metrics.items()]:
        if isinstance(leaf, Value) and leaf.index != captured.graph.loss:
            info = captured.values[leaf.index]
            if not info.shape and info.dtype.is_floating_point:
                found[place.lstrip(".")] = leaf.index
    return found


class _ModelGuard:
    """Keeps the user's model true: its weights are those that are trained, or reading them fails.

    Attributes:
        whole: Whether all weights have been gathered into the model since the last step.
    """

    _TOUCHED = ("state_dict", "parameters", "named_parameters", "forward")

    def __init__(self, model: nn.Module, warn: Callable[[str], object]) -> None:
        self._model, self._notice = model, GradientNotice(warn)
        self._store: ParameterStore | None = None
        self._missing: list[str] = []
        self.whole = False

    def bind(self, store: ParameterStore) -> None:
        """Let the model's tensors be those of a store, from now on."""
        self._store = store
        tensors = dict(self._model.named_parameters())
        held = store.whole_tensors()
        for name, parameter in tensors.items():
            if name in held and held[name].dtype == parameter.dtype:
                parameter.data = held[name]
        self._missing = [name for name in tensors if name not in held]
        self._notice.watch(tensors.values())
        for name in self._TOUCHED:
            setattr(self._model, name, self._guarded(getattr(self._model, name), name))

    def open(self) -> AbstractContextManager[None]:
        """Let the model be touched."""
        return self._notice.open()

    def _guarded(self, method: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def touched(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the model's
            first = not self._notice.is_open
            with self.open():
                if first:
                    self._look(what)
                return method(*args, **kwargs)

        return touched

    def _look(self, what: str) -> None:
        """Bring the model up to date, or say that this rank cannot.

        Raises:
            InvalidInputError: This rank does not hold all of it.
        """
        assert self._store is not None
        if self.whole:
            return
        if self._missing:
            total = len(list(self._model.named_parameters()))
            raise InvalidInputError(
                f"model.{what}: this rank holds {total - len(self._missing)} of {total} parameters "
                f"(not {self._missing[0]!r}); use trainer.model_state() for weights, "
                "trainer.gather_into(model) for a whole model, clip_norm and groups of "
                "partita.parallelize for what an optimizer does"
            )
        held = self._store.whole_tensors()
        tensors = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        with torch.no_grad():
            for name, tensor in tensors.items():
                value = held.get(name)
                if value is not None and value.data_ptr() != tensor.data_ptr():
                    tensor.copy_(value)
