"""The training loop as people write it: steps, evaluations and weights of one model.

    trainer = partita.parallelize(model, loss_fn, optimizer=lambda groups: AdamW(groups, lr=3e-4))
    for batch in trainer.loader(dataset, batch_size=64, seed=0):
        loss = trainer.step(batch)

A ``Trainer`` runs in one process, by plain torch (``LocalTrainer``), or as one rank of a plan
(``PlanTrainer``, in ``plan_trainer``); the script is the same.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from partita.capture.capture import loss_of
from partita.capture.setting import Example, LossFunction, with_metrics
from partita.capture.tree import leaves_of
from partita.core.precision import Precision, parse_precision
from partita.errors import InvalidInputError
from partita.ranks.failures import NotFiniteError
from partita.runtime.batches import samples_of, split_batch
from partita.runtime.numerics import ready_numerics
from partita.runtime.safetensors_file import write_weights
from partita.runtime.training.gradient_notice import GradientNotice
from partita.runtime.training.loader import Loader, LoaderPositions, has_items
from partita.runtime.training.optimizers import (
    Agreement,
    RankOptimizer,
    check_optimizer,
    make_optimizer,
)
from partita.runtime.training.recipe import LEARNING_RATES, NanPolicy, Recipe, ScriptRecipe
from partita.runtime.training.saving import (
    Saver,
    Saving,
    check_unstarted,
    random_state,
    saving_of,
    set_random_state,
)

logger = logging.getLogger(__name__)

Callback: TypeAlias = Callable[["Trainer", "Loss"], None]
"""Called after every step with the trainer and the loss of the step."""
GroupChoice: TypeAlias = Any
"""What says which parameters are stepped differently; see ``group_options``."""


class Loss(float):
    """The loss of a step or of an evaluation: a number, with what else was measured.

    Attributes:
        metrics: Other numbers that the model or the loss function returned, by name; means over
            the samples.
    """

    metrics: Mapping[str, float]

    def __new__(cls, value: float, metrics: Mapping[str, float] | None = None) -> "Loss":
        """Return a loss with its metrics."""
        made = super().__new__(cls, value)
        made.metrics = dict(metrics or {})
        return made

    def item(self) -> float:
        """Return the number, as of a tensor."""
        return float(self)

    def detach(self) -> "Loss":
        """Return the loss: nothing hangs on it."""
        return self

    def backward(self, *_: object, **__: object) -> NoReturn:
        """Say that a step has done this.

        Raises:
            InvalidInputError: Always.
        """
        raise InvalidInputError(
            "trainer.step(batch) has computed the gradients and stepped the optimizer and its "
            "scheduler; leave out loss.backward(), optimizer.step() and scheduler.step()"
        )


_INSTEAD = {
    "optimizer": "parallelize(..., optimizer=, scheduler=) makes it; learning_rates says the rates",
    "scheduler": "parallelize(..., scheduler=) makes it; learning_rates says the rates",
    "zero_grad": "step(batch) clears gradients",
    "backward": "step(batch) goes forward and backward and updates",
    "parameters": "trainer.model has them; parallelize(..., clip_norm=) clips their gradients",
    "train": "step(batch) trains",
    "eval": "evaluate(batches) is in eval mode",
    "load_state_dict": "resume(folder) reads a checkpoint; parallelize(..., weights=) weights",
}
"""What does the work of names that training loops have, and trainers not."""


class Trainer:
    """Trains a model: the part that does not depend on where it runs.

    Attributes:
        model: The model.
        steps: Steps that were made.
        recipe: What is trained with.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        recipe: Recipe,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.model, self.recipe = model, recipe
        self._loss, self._callbacks = loss, tuple(callbacks)
        self._positions = LoaderPositions(self._saved_values)
        self.steps = 0

    if not TYPE_CHECKING:  # else no name would be unknown to type checkers

        def __getattr__(self, name: str) -> NoReturn:
            """Say what takes the place of a name that loops of one process have.

            Raises:
                AttributeError: Always; asked only for what is not there.
            """
            known = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise AttributeError(f"a trainer has no attribute {name!r}{known}", name=name, obj=self)

    def __call__(self, batch: Any) -> Loss:  # noqa: ANN401  # the user's
        """Train on a batch; the same as ``step``."""
        return self.step(batch)

    def step(self, batch: Any) -> Loss:  # noqa: ANN401  # the user's
        """Train on a batch and return its loss, the mean over all samples.

        Args:
            batch: What the model is called with: a tensor, a tuple of arguments or a mapping of
                them by name. Where there is a loss function it is a pair of that and the labels, a
                longer tuple that ends with the labels, or a mapping that has them as ``labels``.
                Tensors are cut into microbatches along their first dimension.

        Raises:
            InvalidInputError: The batch is none, or the model is not the plan's.
            WorkerError: Ranks have different batches; names them.
        """
        loss = self._train(batch)
        self.steps += 1
        self._positions.reach()
        self._end_step()
        for callback in self._callbacks:
            callback(self, loss)
        return loss

    def evaluate(self, batches: Iterable[Any], most: int | None = None) -> dict[str, float]:
        """Return loss and metrics over batches, means over all samples, in eval mode.

        Args:
            batches: Batches as those of ``step``, of any sizes.
            most: Batches that are looked at; None = all.
        """
        sums: dict[str, float] = {}
        samples = 0
        self._positions.is_paused = True
        try:
            whole = itertools.islice(batches, most)
            for batch in itertools.chain.from_iterable(map(self._evaluated_at_once, whole)):
                size = samples_of(batch)
                found = self._evaluate(batch)
                for name, value in {"loss": float(found), **found.metrics}.items():
                    sums[name] = sums.get(name, 0.0) + value * size
                samples += size
        finally:
            self._positions.is_paused = False
        if not samples:
            raise InvalidInputError("there is nothing to evaluate on: no batch with samples")
        return {name: value / samples for name, value in sums.items()}

    def predict(self, batch: Any) -> Any:  # noqa: ANN401  # the model's
        """Return what the model returns for a batch, in eval mode and without gradients.

        Of a plan the outputs come to rank 0; the others get None.

        Args:
            batch: What the model is called with, as in ``step``, without labels.
        """
        return self._predict(batch)

    def at(self, *, every: int) -> bool:
        """Return whether so many steps have been made since it was last so; never before step 1."""
        if every < 1:
            raise InvalidInputError(f"every is {every}; expected 1 or more steps")
        return self.steps > 0 and self.steps % every == 0

    def loader(
        self,
        dataset: Any,  # noqa: ANN401  # the user's
        *,
        seed: int = 0,
        batch_size: int | None = None,
        shuffle: bool = True,
        epochs: int = 1,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """Return the batches of a data set, the same ones in every rank.

        How far it was read is saved: a script that goes on from a checkpoint gets the batches that
        come after the last step. Those of an iterable are read again and passed over, unless it has
        ``state_dict`` and ``load_state_dict``.

        Args:
            dataset: Anything with a length and items, or an iterable of batches.
            seed: Of the order; every epoch has another one.
            batch_size: Samples of a batch; those of the plan if not given.
            shuffle: Whether samples come in another order than theirs.
            epochs: How often all samples are seen.
            drop_last: Whether the samples that fill no batch are left out.
            collate_fn: Makes a batch of samples; torch's by default.
        """
        size = self._samples() if batch_size is None else batch_size
        if has_items(dataset) and (size is None or size < 1):
            raise InvalidInputError(
                f"batch_size is {size}; without a plan the loader needs the samples of a batch"
            )
        return iter(
            Loader(
                dataset=dataset,
                batch_size=size or 0,
                seed=seed,
                shuffle=shuffle,
                epochs=epochs,
                drop_last=drop_last,
                collate=collate_fn,
                positions=self._positions,
            )
        )

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each group of parameters, as of the next step."""
        optimizer = self._optimizer()
        return [] if optimizer is None else optimizer.rates()

    @property
    def gradient_norm(self) -> float:
        """The norm of all gradients of the last step; NaN where they are not clipped."""
        raise NotImplementedError

    def model_state(self, path: str | Path | None = None) -> dict[str, Tensor]:
        """Return all weights and buffers by name, gathered to rank 0; others get nothing.

        Args:
            path: File that rank 0 writes them to, tensor by tensor, as safetensors; nothing is
                returned then.
        """
        if path is None:
            return dict(self._gathered())
        like, gathered = self._all_tensors(), self._gathered()
        first = next(gathered, None)
        if first is not None:  # on rank 0
            described = {name: (value.shape, value.dtype) for name, value in like.items()}
            write_weights(Path(path), described, itertools.chain([first], gathered))
        return {}

    def save(self, folder: str | Path = "checkpoints", keep: int = 2) -> None:
        """Save weights, optimizer and schedule; ``partita checkpoint`` lists and converts them.

        Args:
            folder: Where checkpoints are, unless the run was started with a folder for them.
            keep: Number of checkpoints that stay.
        """
        raise NotImplementedError

    def resume(self, path: str | Path = "checkpoints", keep: int = 2) -> int:
        """Go on from a checkpoint, before the first step; all ranks call it.

        Args:
            path: A folder of checkpoints, of which the newest that is whole is taken, or one of
                them; unless the run was started with a folder for them.
            keep: Number of checkpoints that stay.

        Returns:
            Steps that were done before it was saved: 0 where the folder has none.

        Raises:
            InvalidInputError: Steps were made already, or it is of another model.
        """
        raise NotImplementedError

    def gather_into(self, model: nn.Module) -> None:
        """Copy the weights into a model, on every rank."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that this process holds whole, by their names."""
        raise NotImplementedError

    def _evaluated_at_once(self, batch: Any) -> list[Any]:  # noqa: ANN401  # the user's
        """Return the parts of a batch that can be evaluated at once."""
        return [batch]

    def _samples(self) -> int | None:
        """Return the samples of a batch, where something says so."""
        return None

    def _saved_values(self) -> Mapping[str, Any]:
        """Return the small values of the checkpoint that is gone on from; empty = of none."""
        raise NotImplementedError

    def _end_step(self) -> None:
        """Do what is due after a step, before callbacks are called."""

    def _optimizer(self) -> RankOptimizer | None:
        raise NotImplementedError

    def _train(self, batch: Any) -> Loss:  # noqa: ANN401  # the user's
        raise NotImplementedError

    def _evaluate(self, batch: Any) -> Loss:  # noqa: ANN401  # the user's
        raise NotImplementedError

    def _predict(self, batch: Any) -> Any:  # noqa: ANN401  # the user's
        raise NotImplementedError

    def _all_tensors(self) -> dict[str, Tensor]:
        """Return tensors of the shapes and types of all that ``_gathered`` yields, by name."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError


class LocalTrainer(Trainer):
    """Trains a model in this process, by plain torch."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        recipe: Recipe,
        callbacks: Sequence[Callback] = (),
        *,
        microbatches: int = 1,
    ) -> None:
        """Prepare a model.

        Args:
            model: The model; its own parameters are trained.
            loss: The loss function.
            recipe: What is trained with.
            callbacks: Called after every step.
            microbatches: Parts that a batch is computed in, one after the other.
        """
        super().__init__(model, loss, recipe, callbacks)
        first = next(model.parameters(), torch.zeros(0))
        self._device = first.device.type
        self._numerics = ready_numerics(recipe.precision, self._device)
        self._microbatches = microbatches
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._steps_by = make_optimizer(recipe, self._trained)
        self._agreement = Agreement(recipe)
        self._saver: Saver | None = None
        self._resumed: Mapping[str, Any] = {}
        self._has_warned = False
        self._leaves: dict[str, Tensor] = {}
        self._notice, self._is_watched = GradientNotice(logger.warning), False

    def _optimizer(self) -> RankOptimizer:
        return self._steps_by

    @property
    def gradient_norm(self) -> float:
        """The norm of all gradients of the last step; NaN where they are not clipped."""
        return self._agreement.norm

    def _examples(self, batch: Any) -> list[Example]:  # noqa: ANN401  # the user's
        size = samples_of(batch)
        count = max(1, min(self._microbatches, size))
        sizes = [size // count + (place < size % count) for place in range(count)]
        return split_batch(batch, sizes, has_labels=self._loss is not None)

    def _computed(self, example: Example) -> tuple[Any, Tensor | None, Mapping[str, Tensor]]:
        """Return output, loss and metrics of a microbatch."""
        with self._numerics.autocast(self._device):
            output = self._called(example)
            loss, metrics = loss_of(output), scalars_of(output)
            if loss is None and self._loss is not None:
                loss, more = with_metrics(self._loss(output, example.labels))
                metrics = {**metrics, **more}
        return output, loss, metrics

    def _called(self, example: Example) -> Any:  # noqa: ANN401  # the model's
        """Return what the model returns, with the weights that the precision has."""
        if self._numerics.weights is None:
            return self.model(*example.args, **example.kwargs)
        wide = {n: leaf.to(self._trained[n].dtype) for n, leaf in self._leaves.items()}
        return functional_call(self.model, wide, example.args, dict(example.kwargs))

    def _round(self, *, grad: bool) -> None:
        """Make the narrow copies of the weights anew."""
        if self._numerics.weights is not None:
            rounded = self._numerics.rounded
            self._leaves = {n: rounded(p).requires_grad_(grad) for n, p in self._trained.items()}

    def _loss_over(
        self, examples: Sequence[Example], each: Callable[[Tensor, float], None] | None
    ) -> Loss:
        samples = sum(example.batch_size for example in examples)
        total, sums = 0.0, dict[str, float]()
        for example in examples:
            share = example.batch_size / samples
            _, loss, metrics = self._computed(example)
            if loss is None:
                raise InvalidInputError(
                    f"{type(self.model).__name__} returns no loss; give a loss function"
                )
            if each is not None:
                each(loss, share)
            total += float(loss.detach()) * share
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach()) * share
        return Loss(total, sums)

    def _train(self, batch: Any) -> Loss:  # noqa: ANN401  # the user's
        if not self._is_watched:  # a checkpoint is loaded by a step of the optimizer before
            self._is_watched = True
            self._notice.watch(self._trained.values())
        with self._notice.open():
            return self._trained_on(batch)

    def _trained_on(self, batch: Any) -> Loss:  # noqa: ANN401  # the user's
        if not self.model.training:
            self.model.train()
        self._round(grad=True)
        agreement, numerics = self._agreement, self._numerics
        sums: dict[str, Tensor] = {}

        def backward(loss: Tensor, share: float) -> None:
            (loss * (share * agreement.scale)).backward()  # type: ignore[no-untyped-call]
            for name, leaf in (self._leaves or self._trained).items():
                if leaf.grad is not None:
                    gradient = numerics.summed(leaf.grad)
                    sums[name] = sums[name] + gradient if name in sums else gradient
                    leaf.grad = None

        found = self._loss_over(self._examples(batch), backward)
        gradients = {n: value.to(self._trained[n].dtype) for n, value in sums.items()}
        if agreement.is_needed:
            agreement.conclude(float(agreement.measure(list(gradients.values()))))
        self._look_at(found)
        if not agreement.skips:
            used = agreement.used(gradients)
            self._steps_by.step({n: (self._trained[n], value) for n, value in used.items()})
        self._steps_by.end_step()
        return found

    def _look_at(self, loss: Loss) -> None:
        """Do what the recipe says where a loss or gradient is no number, before the update.

        Raises:
            NotFiniteError: It says to stop; a single process has nothing to go back to, either.
        """
        policy, agreement = self.recipe.on_nan, self._agreement
        bad_gradient = policy.acts and agreement.skips and agreement.scale <= 1
        if math.isfinite(loss) and not bad_gradient:
            return
        text = f"loss or gradients of step {self.steps + 1} are no numbers: the loss is {loss}"
        if policy in (NanPolicy.STOP, NanPolicy.ROLLBACK):
            raise NotFiniteError(text)
        if policy is NanPolicy.SKIP:
            logger.warning("%s; its update is left out", text)
        elif policy is NanPolicy.WARN and not self._has_warned:
            self._has_warned = True
            logger.warning("%s; on_nan='stop' would end the training here", text)

    def _evaluate(self, batch: Any) -> Loss:  # noqa: ANN401  # the user's
        self._round(grad=False)
        with self._evaluating():
            return self._loss_over(self._examples(batch), None)

    def _predict(self, batch: Any) -> Any:  # noqa: ANN401  # the user's
        (example,) = split_batch(batch, [samples_of(batch)], has_labels=False)
        self._round(grad=False)
        with self._evaluating(), self._numerics.autocast(self._device):
            return self._called(example)

    def _evaluating(self) -> AbstractContextManager[Any]:
        return _Evaluating(self.model)

    def save(self, folder: str | Path = "checkpoints", keep: int = 2) -> None:
        """Save weights, optimizer and schedule."""
        if not self.steps:
            raise InvalidInputError("there is nothing to save before the first step")
        if self._saver is None:
            saving, name = Saving(folder=str(folder), keep=keep), type(self.model).__name__
            self._saver = Saver(saving, None, plan=None, model=name)
        extra = {
            "optimizer": self._steps_by.name,
            "schedule": self._steps_by.schedule_state(),
            "scaler": self._agreement.state(),
            "random": random_state(),
            **self._positions.state(),
        }
        self._saver.save(self.steps, self._holdings(), extra)
        self._saver.wait()

    def _holdings(self) -> dict[str, Tensor]:
        """Return weights and the optimizer's state, live, by the names that checkpoints have."""
        held = {f"model.{name}": value for name, value in self.state_dict().items()}
        for name, entries in self._steps_by.state().items():
            for entry, value in entries.items():
                if isinstance(value, Tensor):
                    held[f"optim.{name}.{entry}"] = value
        return held

    def resume(self, path: str | Path = "checkpoints", keep: int = 2) -> int:
        """Go on from a checkpoint, before the first step."""
        check_unstarted(self.steps)
        name = type(self.model).__name__
        self._saver = Saver(saving_of(Path(path), keep), None, plan=None, model=name)
        found = self._saver.found()
        if found is None:
            return 0
        self._steps_by.prepare()
        extra = self._saver.load(found, self._holdings())
        check_optimizer(extra.get("optimizer") or "", self._steps_by.name)
        if extra.get("schedule"):
            self._steps_by.load_schedule_state(extra["schedule"])
        self._agreement.load_state(extra.get("scaler") or {})
        if extra.get("random"):
            set_random_state(extra["random"])
        self.steps, self._resumed = int(extra["step"]), extra
        return self.steps

    def _saved_values(self) -> Mapping[str, Any]:
        return self._resumed

    def gather_into(self, model: nn.Module) -> None:
        """Copy the weights into a model."""
        if model is not self.model:
            model.load_state_dict(self.model.state_dict(), strict=False)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the parameters and buffers, by their names."""
        return {name: value.detach() for name, value in self._all_tensors().items()}

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, value.clone()) for name, value in self.state_dict().items())


class _Evaluating:
    """Puts a model into eval mode without gradients, and back as it was."""

    def __init__(self, model: nn.Module) -> None:
        self._flags = [(module, module.training) for module in model.modules()]
        self._model, self._no_grad = model, torch.no_grad()

    def __enter__(self) -> None:
        self._model.eval()
        self._no_grad.__enter__()

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401  # as Python has it
        self._no_grad.__exit__(*error)
        for module, flag in self._flags:
            module.training = flag


def scalars_of(output: object) -> dict[str, Tensor]:
    """Return the single numbers among what a model returns by name, but for its loss."""
    if isinstance(output, Tensor | tuple | list):
        return {}
    return {
        place.lstrip("."): leaf
        for place, leaf in leaves_of(output)
        if is_scalar(leaf) and place.lstrip(".") != "loss"
    }


def is_scalar(leaf: object) -> bool:
    """Return whether something is a tensor of one number that is a mean of some kind."""
    return isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.is_floating_point()


def group_options(groups: GroupChoice, model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return how parameters are stepped differently, by name.

    Args:
        groups: A function of name and parameter that returns options of torch (``{"lr": 1e-4}``),
            None for none, or whether the parameter is without weight decay; or rules, a mapping or
            a list of pairs: a pattern of names or such a predicate, and options. The first rule
            that holds counts.
        model: The model.

    Raises:
        InvalidInputError: They are something else, or a pattern has no parameter.
    """
    named = list(model.named_parameters())
    if groups is None:
        return {}
    if callable(groups):
        return {name: _as_options(groups(name, value)) for name, value in named}
    rules = list(groups.items() if isinstance(groups, Mapping) else groups)
    found: dict[str, dict[str, Any]] = {}
    for which, options in rules:
        if not isinstance(options, Mapping) or not (callable(which) or isinstance(which, str)):
            raise InvalidInputError(
                f"groups have {which!r}: {options!r}; expected a pattern of names or a function of "
                "name and parameter, and options such as {'weight_decay': 0.0}"
            )
        names = [name for name, value in named if _holds(which, name, value)]
        if not names:
            raise InvalidInputError(f"groups: no parameter of the model is {which!r}")
        for name in names:
            found.setdefault(name, dict(options))
    return found


def _holds(which: Any, name: str, value: Tensor) -> bool:  # noqa: ANN401  # the user's
    return fnmatchcase(name, which) if isinstance(which, str) else bool(which(name, value))


def _as_options(found: Any) -> dict[str, Any]:  # noqa: ANN401  # the user's
    if isinstance(found, bool):
        return {"weight_decay": 0.0} if found else {}
    if found is None or isinstance(found, Mapping):
        return dict(found or {})
    raise InvalidInputError(
        f"the function for groups returned a {type(found).__name__}; expected options such as "
        "{'weight_decay': 0.0}, None, or whether there is no weight decay"
    )


def make_recipe(
    model: nn.Module,
    *,
    optimizer: Any = None,  # noqa: ANN401  # a name, or the user's
    groups: GroupChoice = None,
    precision: str | Precision | None = None,
    clip_norm: float | None = None,
    scheduler: Any = None,  # noqa: ANN401  # the user's
    bare: bool = False,
) -> Recipe:
    """Return what a script trains with; the arguments are those of ``partita.parallelize``.

    Raises:
        InvalidInputError: One is something else.
    """
    policy = parse_precision(precision) if isinstance(precision, str) else precision
    base = ScriptRecipe(
        options=group_options(groups, model),
        clip_norm=clip_norm,
        precision=policy,
        make_scheduler=scheduler,
        bare=bare and groups is None,
    )
    if optimizer is None or isinstance(optimizer, str):
        if scheduler is not None:
            raise InvalidInputError(
                "a scheduler of torch needs an optimizer of torch: give a function that makes one"
            )
        name = optimizer or "adamw"
        if name not in LEARNING_RATES:
            raise InvalidInputError(f"optimizer {name!r} is not one of {', '.join(LEARNING_RATES)}")
        return replace(base, optimizer=name)
    if isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInputError(
            "the optimizer holds the parameters of the whole model already; give a function that "
            f"makes it: optimizer=lambda groups: {type(optimizer).__name__}(groups, ...)"
        )
    if not callable(optimizer):
        raise InvalidInputError(
            f"optimizer is a {type(optimizer).__name__}; expected a name or a function of groups"
        )
    if scheduler is not None and not callable(scheduler):
        raise InvalidInputError(
            f"scheduler is a {type(scheduler).__name__}; expected a function that makes one for an "
            "optimizer"
        )
    return replace(base, make_optimizer=optimizer)
