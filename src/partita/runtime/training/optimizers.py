"""Optimizers of one rank: they step what the rank owns, whole tensors, slices or flat parts.

Those of a name call torch's own kernels. Constructing a ``torch.optim.Optimizer`` imports a second
or more of modules, so that happens only where a script brings one of its own.

State is kept by the name of the parameter, as entries that torch's optimizers have: ``exp_avg``,
``exp_avg_sq``, ``momentum_buffer``, ``step``.
"""

import logging
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from partita.errors import InvalidInputError, UnsupportedError
from partita.runtime.numerics import numerics_of
from partita.runtime.training.recipe import Recipe, Schedule, ScriptRecipe

logger = logging.getLogger(__name__)

_SCRATCH_BYTES = 2**24
_SMALL_ELEMENTS = 2**16
_BETAS = (0.9, 0.999)
_EPSILON = 1e-8
_MOMENTUM = 0.9

_FIRST_SCALE = 2.0**16
_SCALE_GROWS_AFTER = 2000  # steps, as ``torch.amp.GradScaler`` has it
_CLIP_MARGIN = 1e-6  # as ``torch.nn.utils.clip_grad_norm_`` has it

_BY_TENSOR = (torch.optim.Adafactor, torch.optim.Muon)
"""Optimizers whose step of an element depends on others of its tensor."""
_BY_ELEMENT = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)

State: TypeAlias = dict[str, Any]
_GRADIENT_OF = operator.attrgetter("grad")


def check_optimizer(saved: str, here: str) -> None:
    """Check that a checkpoint was saved by the optimizer that goes on from it.

    Raises:
        InvalidInputError: It was another one, whose state means something else here.
    """
    if saved and here and saved != here:
        raise InvalidInputError(
            f"the checkpoint was saved by optimizer {saved}, this run steps with {here}; step with "
            f"{saved}, or take its weights alone: partita checkpoint convert"
        )


class RankOptimizer(Protocol):
    """Steps the parameters that a rank owns."""

    @property
    def name(self) -> str:
        """The kind of the optimizer, as checkpoints have it; empty where nothing is stepped."""
        ...

    def step(self, named: Mapping[str, tuple[Tensor, Tensor]], *, is_fixed: bool = False) -> None:
        """Change parameters in place.

        Args:
            named: Some of those that it was made for, by name: what this rank steps (whole, a
                slice, or a flat part) and its gradient, of the same shape.
            is_fixed: Whether these are all of them, and the same tensors in every step.
        """
        ...

    def end_step(self) -> None:
        """Let the learning rate go on to the next step."""
        ...

    def rates(self) -> list[float]:
        """Return the learning rate of each group, as of the next step."""
        ...

    def state(self) -> dict[str, State]:
        """Return the entries of each parameter; their tensors are live, of the shape stepped."""
        ...

    def prepare(self) -> None:
        """Make the entries that a first step would make, for a checkpoint to be loaded into."""
        ...

    def load_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over entries of parameters; those of a name that is not here are left out."""
        ...

    def schedule_state(self) -> State:
        """Return where the schedule stands, as small values."""
        ...

    def load_schedule_state(self, state: Mapping[str, Any]) -> None:
        """Go on where a schedule stood."""
        ...


def make_optimizer(
    recipe: Recipe,
    named: Mapping[str, Tensor],
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> RankOptimizer:
    """Return the optimizer of a rank, made once for all that it owns.

    Args:
        recipe: What is trained with.
        named: What the rank steps, by name.
        shapes: Shapes of the whole parameters, where ``named`` has parts of them.
    """
    shapes = {name: value.shape for name, value in named.items()} if shapes is None else shapes
    options = {name: recipe.options_of(name, shapes[name]) for name in named}
    if isinstance(recipe, ScriptRecipe) and recipe.make_optimizer is not None:
        return TorchOptimizer(recipe, named, options)
    return NamedOptimizer(recipe, named, options)


def check_steps_parts(optimizer: RankOptimizer, divided: Collection[str]) -> None:
    """Check that an optimizer gives the same numbers on parts of tensors as on the whole ones.

    Args:
        optimizer: The optimizer.
        divided: Names of the parameters of which this rank steps a part.

    Raises:
        UnsupportedError: It looks at whole tensors.
    """
    found = optimizer.optimizer if isinstance(optimizer, TorchOptimizer) else None
    if found is None or not divided:
        return
    what = f"{type(found).__name__} steps parts of {len(divided)} tensors, such as {min(divided)!r}"
    if isinstance(found, _BY_TENSOR):
        raise UnsupportedError(
            f"{what}, and needs whole ones; plan without shards and tensor parallelism, or use an "
            "optimizer that works element by element, such as AdamW"
        )
    if not isinstance(found, _BY_ELEMENT):
        logger.warning("%s: right only if it works element by element", what)


class Agreement:
    """What all ranks do with the gradients of a step, by the norm of all of them.

    Attributes:
        norm: The norm in the last step; NaN before the first.
        skips: Whether the step is left out, as a gradient is no number.
        scale: What the losses of the next step are multiplied with: grows while all gradients are
            numbers, is halved when one is not. All ranks see the same norm, so they agree.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._clip_norm, self._on_nan = recipe.clip_norm, recipe.on_nan
        self.norm, self.skips = math.nan, False
        self._factor = 1.0
        self._scales = numerics_of(recipe.precision).scales
        self.scale = _FIRST_SCALE if self._scales else 1.0
        self._good = 0

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to agree on."""
        clips = self._clip_norm is not None
        return clips or self._scales or self._on_nan.acts

    def measure(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares of some gradients."""
        if not gradients:
            return torch.zeros(1, dtype=torch.float64)
        # Squares of 16-bit numbers would overflow.
        wide = [g.float() if g.element_size() == 2 else g for g in gradients]
        norms = torch._foreach_norm(wide)  # noqa: SLF001 (one call for all)
        if all(norm.dtype is norms[0].dtype for norm in norms):
            return torch.stack(norms).double().square().sum().reshape(1)
        return torch.stack([norm.double() for norm in norms]).square().sum().reshape(1)

    def conclude(self, squares: float) -> None:
        """Take the sum of squares over all ranks."""
        scale = self.scale
        self.norm = math.sqrt(squares) / scale if squares >= 0 else math.nan
        is_known = math.isfinite(self.norm)
        self.skips = not is_known and (self._scales or self._on_nan.acts)
        self._factor = 1.0
        if self._scales:
            self._good = self._good + 1 if is_known else 0
            if not is_known:
                self.scale = scale / 2
            elif self._good == _SCALE_GROWS_AFTER:
                self.scale, self._good = scale * 2, 0
        if self._clip_norm is not None:
            # A norm that is no number spoils all gradients, as it does in torch.
            factor = self._clip_norm / (self.norm + _CLIP_MARGIN)
            self._factor = factor if math.isnan(factor) else min(1.0, factor)
        self._factor /= scale

    def state(self) -> State:
        """Return where the scale of losses stands, as small values; empty = there is none."""
        return {"scale": self.scale, "good": self._good} if self._scales else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where a scale stood; one of a run without a scale says nothing."""
        if self._scales and state:
            self.scale, self._good = float(state["scale"]), int(state["good"])

    @property
    def factor(self) -> float:
        """What gradients are multiplied with before they are used."""
        return self._factor

    def used(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients as the optimizer uses them; each takes the place of the one given."""
        if self._factor == 1.0:
            return gradients
        # One call for all small ones; large ones one by one, so that no two copies of all are held.
        small = [n for n, value in gradients.items() if value.numel() <= _SMALL_ELEMENTS]
        large = gradients.keys() - set(small)
        if small:
            scaled = torch._foreach_mul([gradients[n] for n in small], self._factor)  # noqa: SLF001
            gradients.update(zip(small, scaled, strict=True))
        for name in large:
            gradients[name] = gradients[name] * self._factor
        return gradients


@dataclass(frozen=True, slots=True)
class _Group:
    """Parameters that are stepped alike: their names, and options by torch's names."""

    names: list[str]
    options: dict[str, Any]


def _grouped(options: Mapping[str, dict[str, Any]]) -> list[_Group]:
    """Return parameters by their options, in the order of their first parameter."""
    groups: list[_Group] = []
    for name, given in options.items():
        found = next((group for group in groups if group.options == given), None)
        if found is None:
            groups.append(_Group([name], given))
        else:
            found.names.append(name)
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """What a named optimizer does to some parameters at once.

    Attributes:
        entries: Names of the tensors of state, each of the parameter's shape, zeros at first.
        counts: Whether it counts steps.
        apply: Steps parameters, given them, their gradients, states, rate and decay.
    """

    entries: tuple[str, ...]
    counts: bool
    apply: Callable[[list[Tensor], list[Tensor], list[State], float, float], None]


def _descend(momentum: float) -> Callable[..., None]:
    def apply(
        tensors: list[Tensor],
        gradients: list[Tensor],
        states: list[State],
        rate: float,
        decay: float,
    ) -> None:
        sgd(
            tensors,
            gradients,
            [state.get("momentum_buffer") for state in states],
            weight_decay=decay,
            momentum=momentum,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            foreach=True,
        )

    return apply


def _adapt(kernel: Callable[..., None]) -> Callable[..., None]:
    def apply(
        tensors: list[Tensor],
        gradients: list[Tensor],
        states: list[State],
        rate: float,
        decay: float,
    ) -> None:
        for pieces in _pieces(tensors, gradients, states):
            kernel(
                [piece[0] for piece in pieces],
                [piece[1] for piece in pieces],
                [piece[2] for piece in pieces],
                [piece[3] for piece in pieces],
                [],
                [piece[4] for piece in pieces],
                amsgrad=False,
                beta1=_BETAS[0],
                beta2=_BETAS[1],
                lr=rate,
                weight_decay=decay,
                eps=_EPSILON,
                maximize=False,
                foreach=True,
            )

    return apply


_Piece: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Some rows of a parameter, of its gradient and of its two moments, and its count of steps."""


def _pieces(
    tensors: list[Tensor], gradients: list[Tensor], states: list[State]
) -> Iterator[list[_Piece]]:
    """Yield what is stepped in one call: the kernels make scratch of its size.

    Their arithmetic is by element, so pieces come to the same. (The fused ones, which make none,
    take gradients for contiguous that are not.)
    """
    batch: list[_Piece] = []
    room = _SCRATCH_BYTES
    for tensor, gradient, state in zip(tensors, gradients, states, strict=True):
        size = tensor.numel() * tensor.element_size()
        length = tensor.shape[0] if tensor.dim() else 1
        count = max(1, min(length, -(-size // _SCRATCH_BYTES)))
        whole = (tensor, gradient, state["exp_avg"], state["exp_avg_sq"])
        if count == 1:
            if batch and size > room:
                yield batch
                batch, room = [], _SCRATCH_BYTES
            batch.append((*whole, state["step"]))
            room -= size
            continue
        # Each call counts a step: on a copy in all pieces but the last.
        for piece in range(count):
            begin, end = piece * length // count, (piece + 1) * length // count
            step = state["step"] if piece == count - 1 else state["step"].clone()
            first, second, third, fourth = (part[begin:end] for part in whole)
            yield [(first, second, third, fourth, step)]
    if batch:
        yield batch


_MOMENTS = ("exp_avg", "exp_avg_sq")
_KERNELS: Mapping[str, _Kernel] = {
    "sgd": _Kernel(entries=(), counts=False, apply=_descend(0.0)),
    "momentum": _Kernel(entries=("momentum_buffer",), counts=False, apply=_descend(_MOMENTUM)),
    "adam": _Kernel(entries=_MOMENTS, counts=True, apply=_adapt(adam)),
    "adamw": _Kernel(entries=_MOMENTS, counts=True, apply=_adapt(adamw)),
}


class NamedOptimizer:
    """An optimizer of a name, by torch's kernels."""

    def __init__(
        self,
        recipe: Recipe,
        named: Mapping[str, Tensor],
        options: Mapping[str, dict[str, Any]],
    ) -> None:
        self._recipe, self._groups = recipe, _grouped(options)
        self._kernel, self._step = _KERNELS[recipe.optimizer], 0
        self._state = {name: self._first_state(value) for name, value in named.items()}

    @property
    def name(self) -> str:
        """The name of the recipe's optimizer."""
        return self._recipe.optimizer

    def _first_state(self, value: Tensor) -> State:
        state: State = {entry: torch.zeros_like(value) for entry in self._kernel.entries}
        if self._kernel.counts:
            state["step"] = torch.zeros((), dtype=torch.float32)
        return state

    @torch.no_grad()
    def step(self, named: Mapping[str, tuple[Tensor, Tensor]], *, is_fixed: bool = False) -> None:
        """Change parameters in place."""
        del is_fixed  # they are looked up in any case
        for group, rate in zip(self._groups, self.rates(), strict=True):
            names = [name for name in group.names if name in named]
            if names:
                self._kernel.apply(
                    [named[name][0] for name in names],
                    [named[name][1] for name in names],
                    [self._state[name] for name in names],
                    rate,
                    group.options.get("weight_decay", self._recipe.decay),
                )

    def end_step(self) -> None:
        """Let the learning rate go on to the next step."""
        self._step += 1

    def rates(self) -> list[float]:
        """Return the learning rate of each group."""
        factor = self._recipe.schedule.factor(self._step)
        return [group.options.get("lr", self._recipe.rate) * factor for group in self._groups]

    def state(self) -> dict[str, State]:
        """Return the entries of each parameter."""
        return self._state

    def prepare(self) -> None:
        """Do nothing: the entries are there from the beginning."""

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over entries of parameters."""
        for name, entries in state.items():
            for entry, value in entries.items():
                if entry in self._state.get(name, {}):
                    self._state[name][entry].copy_(torch.as_tensor(value))

    def schedule_state(self) -> State:
        """Return where the schedule stands."""
        return {"step": self._step}

    def load_schedule_state(self, state: Mapping[str, Any]) -> None:
        """Go on where a schedule stood."""
        self._step = int(state["step"])


def _step_at_once(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of torch step all parameters of a group by one call for each operation.

    On CPUs torch takes them one by one unless told otherwise. The arithmetic is the same, but the
    calls have scratch as large as the group, so large groups are left alone.
    """
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        size = sum(value.numel() * value.element_size() for value in group["params"])
        chosen = any(group.get(way) for way in ("fused", "differentiable", "capturable"))
        rates = [group["lr"], *group.get("betas", ())]
        if any(isinstance(rate, Tensor) for rate in rates):
            continue
        if group["foreach"] is None and not chosen and size <= _SCRATCH_BYTES:
            group["foreach"] = True


class TorchOptimizer:
    """An optimizer of torch that a script makes, with its scheduler.

    Attributes:
        optimizer: The optimizer.
        scheduler: Its scheduler; None = there is none.
    """

    def __init__(
        self,
        recipe: ScriptRecipe,
        named: Mapping[str, Tensor],
        options: Mapping[str, dict[str, Any]],
    ) -> None:
        """Make it.

        Raises:
            InvalidInputError: The script's function makes something else.
            UnsupportedError: The optimizer asks for the loss again.
        """
        assert recipe.make_optimizer is not None
        self._parameters = {
            name: value if isinstance(value, nn.Parameter) else nn.Parameter(value.detach())
            for name, value in named.items()
            if value.is_floating_point() or value.is_complex()
        }
        # What is stepped in every step, where that is the same.
        self._fixed: Mapping[str, tuple[Tensor, Tensor]] | None = None
        self._fixed_parameters: list[nn.Parameter] = []
        self._fixed_gradients: list[Tensor] = []
        found: Any = None
        if not self._parameters:
            # A rank whose stages train nothing has nothing that an optimizer could be made for.
            self.optimizer: torch.optim.Optimizer | None = None
        else:
            found = recipe.make_optimizer(self._argument(recipe, options))
            if not isinstance(found, torch.optim.Optimizer):
                raise InvalidInputError(
                    f"the function for the optimizer returned a {type(found).__name__}; expected a "
                    "torch.optim.Optimizer"
                )
            if isinstance(found, torch.optim.LBFGS):
                raise UnsupportedError(
                    "LBFGS computes the loss several times a step, which a plan cannot; use "
                    "another optimizer"
                )
            self.optimizer = found
            _step_at_once(found)
        self.scheduler: Any = None
        if found is not None:
            if recipe.make_scheduler is not None:
                self.scheduler = recipe.make_scheduler(found)
                if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                    raise UnsupportedError(
                        "ReduceLROnPlateau waits for a number that is measured beside the steps, "
                        "which a scheduler is not given; use a schedule by steps"
                    )
            elif recipe.schedule != Schedule():
                self.scheduler = torch.optim.lr_scheduler.LambdaLR(found, recipe.schedule.factor)

    @property
    def name(self) -> str:
        """The class of the optimizer, or the name that a recipe has for it."""
        if self.optimizer is None:
            return ""
        name = type(self.optimizer).__name__.lower()
        groups = self.optimizer.param_groups
        has_momentum = name == "sgd" and any(group.get("momentum") for group in groups)
        return "momentum" if has_momentum else name

    def _argument(self, recipe: ScriptRecipe, options: Mapping[str, dict[str, Any]]) -> list[Any]:
        """Return what the script's function is called with."""
        if recipe.bare:
            return list(self._parameters.values())
        return [
            {
                "params": [self._parameters[name] for name in group.names],
                "param_names": list(group.names),
                **group.options,
            }
            for group in _grouped({name: options[name] for name in self._parameters})
        ]

    def step(self, named: Mapping[str, tuple[Tensor, Tensor]], *, is_fixed: bool = False) -> None:
        """Change parameters in place."""
        if self.optimizer is None:
            return
        if not (is_fixed and self._has(named)):
            for name, (value, gradient) in named.items():
                held = self._parameters[name]
                # A parameter may have become another tensor, as with weight stashing.
                if held is not value and held.data_ptr() != value.data_ptr():
                    held.data = value
                held.grad = gradient
        self.optimizer.step()
        if not is_fixed:
            for name in named:
                self._parameters[name].grad = None
        elif named is not self._fixed:
            self._fixed = named
            self._fixed_parameters = [self._parameters[name] for name in named]
            self._fixed_gradients = [gradient for _, gradient in named.values()]

    def _has(self, named: Mapping[str, tuple[Tensor, Tensor]]) -> bool:
        """Return whether the parameters have these gradients already, from the step before.

        The optimizer, or whoever holds it, may have cleared them.
        """
        if named is not self._fixed:
            return False
        return all(
            map(operator.is_, map(_GRADIENT_OF, self._fixed_parameters), self._fixed_gradients)
        )

    def end_step(self) -> None:
        """Let the learning rate go on to the next step."""
        if self.scheduler is not None:
            self.scheduler.step()

    def rates(self) -> list[float]:
        """Return the learning rate of each group."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [float(group["lr"]) for group in groups if "lr" in group]

    def state(self) -> dict[str, State]:
        """Return the entries of each parameter."""
        if self.optimizer is None:
            return {}
        held = self.optimizer.state
        return {name: held[value] for name, value in self._parameters.items() if value in held}

    def prepare(self) -> None:
        """Make the entries that a first step would make, by a step of rate 0."""
        if self.optimizer is None or self.optimizer.state:
            return
        rates = [group.get("lr") for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            if "lr" in group:
                is_tensor = isinstance(group["lr"], Tensor)
                group["lr"] = torch.zeros_like(group["lr"]) if is_tensor else 0.0
        for value in self._parameters.values():
            value.grad = torch.zeros_like(value)
        self.optimizer.step()
        for value in self._parameters.values():
            value.grad = None
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over entries of parameters."""
        self.prepare()
        held = self.state()
        for name, entries in state.items():
            for entry, value in entries.items():
                found = held.get(name, {}).get(entry)
                if isinstance(found, Tensor):
                    found.copy_(torch.as_tensor(value))
                elif name in held:
                    held[name][entry] = value

    def schedule_state(self) -> State:
        """Return where the schedule stands."""
        return {} if self.scheduler is None else dict(self.scheduler.state_dict())

    def load_schedule_state(self, state: Mapping[str, Any]) -> None:
        """Go on where a schedule stood."""
        if self.scheduler is not None and self.optimizer is not None:
            self.scheduler.load_state_dict(dict(state))
            rates = self.scheduler.get_last_lr()
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
