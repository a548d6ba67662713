"""The parameters, buffers and gradients that one device holds.

A parameter is held whole, or divided: flat and padded to equal parts, one for each replica. What
else is divided depends on the stage's ``Shard``:

- optimizer, gradients: every replica has the whole parameter, and steps its part of it; a gather
  after the update makes it whole again.
- parameters: a replica has its part only; a gather before each forward and backward brings a
  whole copy, dropped afterwards.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from partita.core.plan import Shard
from partita.core.program import Kind
from partita.errors import InvalidInputError
from partita.runtime.task import Sharding, Task

Optimizer: TypeAlias = Callable[[str, Tensor, Tensor], None]
"""Changes a parameter in place, given its name and gradient.

It works element by element: of a divided parameter it sees one flat part, with the gradient of that
part. It may keep state by name; every device has its own.
"""


def sgd(learning_rate: float = 0.1) -> Optimizer:
    """Return plain gradient descent."""

    def step(_: str, parameter: Tensor, gradient: Tensor) -> None:
        parameter.sub_(gradient, alpha=learning_rate)

    return step


@dataclass(frozen=True, slots=True)
class Part:
    """A device's part of a divided tensor.

    Attributes:
        sharding: Among whom it is divided.
        shape: Shape of the whole.
        values: The part, flat, with padding.
    """

    sharding: Sharding
    shape: torch.Size
    values: Tensor


class _Like(NamedTuple):
    """What a parameter looks like when it is whole."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class ParameterStore:
    """Parameters, buffers and gradients of one device."""

    def __init__(
        self, task: Task, device: int, state: Mapping[str, Tensor], optimizer: Optimizer
    ) -> None:
        """Copy the device's share of the initial state.

        Raises:
            InvalidInputError: The state lacks a parameter or buffer that a stage here uses.
        """
        self._task, self._optimizer = task, optimizer
        self._shardings = task.shardings(device)
        self._stages = task.stages_of(device)
        # The stage that steps each parameter here: the first of those that share it.
        self._stepped_by: dict[str, int] = {}
        # Whole tensors, and this device's flat, padded parts, by name; a parameter may have both.
        self._whole: dict[str, Tensor] = {}
        self._parts: dict[str, Tensor] = {}
        self._like: dict[str, _Like] = {}
        # Whole copies of divided parameters by stage, between gather and release; stashed weights
        # by (stage, version).
        self._gathered: dict[int, dict[str, Tensor]] = {}
        self._versions: dict[tuple[int, int], dict[str, Tensor]] = {}
        # Sums of this device's gradients, the names of those that may be changed in place, and sums
        # over replicas that wait for their update.
        self._gradients: dict[str, Tensor] = {}
        self._own_sums: set[str] = set()
        self._reduced: dict[str, Tensor] = {}
        for stage in self._stages:
            border = task.borders[stage]
            for name in border.trained:
                self._stepped_by.setdefault(name, stage)
            for name in (*border.trained, *border.frozen, *border.buffers):
                self._admit(name, device, state)

    def _admit(self, name: str, device: int, state: Mapping[str, Tensor]) -> None:
        if name in self._like:
            return
        if name not in state:
            raise InvalidInputError(f"the initial state has no {name!r}; it has {sorted(state)}")
        value = state[name].detach()
        self._like[name] = _Like(value.shape, value.dtype, value.device)
        sharding = self._shardings.get(name)
        if sharding is not None:
            count = len(sharding.members)
            place = sharding.members.index(device)
            self._parts[name] = _padded(value, count).tensor_split(count)[place].clone()
        if sharding is None or sharding.shard is not Shard.PARAMETERS:
            self._whole[name] = value.clone()

    def begin_step(self) -> None:
        """Number the versions of the weights from 0 again."""
        self._versions.clear()
        if self._task.plan.stashes_weights:
            for stage in self._stages:
                self._keep_version(stage, 0)

    def _keep_version(self, stage: int, version: int) -> None:
        # No copies: ``update`` replaces a tensor before it steps it, so that old versions stay.
        names = self._task.borders[stage].trained
        self._versions[stage, version] = {name: self._whole[name] for name in names}

    def drop_version(self, stage: int, version: int) -> None:
        """Forget a version that nobody needs any more."""
        self._versions.pop((stage, version), None)

    @property
    def num_versions(self) -> int:
        """Versions of weights that are kept, over all stages."""
        return len(self._versions)

    def weights(self, stage: int, version: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the trainable and the frozen parameters of a stage.

        Raises:
            InvalidInputError: That version is not there, or the parts have not been gathered.
        """
        border = self._task.borders[stage]
        frozen = {name: self._whole[name] for name in border.frozen}
        if self._task.plan.stashes_weights and border.trained:
            if (stage, version) not in self._versions:
                kept = sorted(v for s, v in self._versions if s == stage)
                raise InvalidInputError(f"version {version} is not there; versions {kept} are")
            return dict(self._versions[stage, version]), frozen
        # Where a parameter is whole for good or gathered for now; a stage may have both kinds.
        gathered = self._gathered.get(stage, {})
        trained = {**{n: self._whole[n] for n in border.trained if n in self._whole}, **gathered}
        missing = [name for name in border.trained if name not in trained]
        if missing:
            raise InvalidInputError(f"parameter {missing[0]!r} is divided and was not gathered")
        return trained, frozen

    def keeps_tensors(self, stage: int) -> bool:
        """Return whether the parameters of a stage are the same tensors in every step."""
        border = self._task.borders[stage]
        whole = all(name in self._whole for name in border.trained)
        return whole and not self._task.plan.stashes_weights

    def release(self, stage: int) -> None:
        """Drop the gathered copies of a stage's parameters."""
        self._gathered.pop(stage, None)

    def buffers(self, stage: int) -> dict[str, Tensor]:
        """Return the buffers of a stage."""
        return {name: self._whole[name] for name in self._task.borders[stage].buffers}

    def set_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Replace buffers."""
        self._whole.update(values)

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of parameters, by name, over one microbatch of one stage.

        The first may be a tensor that others hold too; the sum of two is our own to change.
        """
        sums, parts = [], []
        for name, gradient in gradients.items():
            held = self._gradients.get(name)
            if held is None:
                self._gradients[name] = gradient
            elif name in self._own_sums:
                sums.append(held)
                parts.append(gradient)
            else:
                self._gradients[name] = held + gradient
                self._own_sums.add(name)
        if sums:
            # One call for all of them: a stage has many small parameters.
            torch._foreach_add_(sums, parts)

    def outgoing(self, kind: Kind, bucket: int) -> list[Tensor]:
        """Return what this device brings to a collective, a tensor for each parameter.

        Gradients are handed over: what comes later is not part of this reduction.
        """
        names = self._names(bucket)
        if kind is Kind.ALL_GATHER:
            return [self._parts[name] for name in names]
        taken = [self._take_gradient(name) for name in names]
        if kind is Kind.REDUCE_SCATTER:
            counts = [len(self._shardings[name].members) for name in names]
            return [_padded(value, count) for value, count in zip(taken, counts, strict=True)]
        return taken

    def incoming(self, kind: Kind, bucket: int, values: Sequence[Tensor]) -> None:
        """Take home the result of a collective."""
        for name, value in zip(self._names(bucket), values, strict=True):
            if kind is not Kind.ALL_GATHER:
                # Sharded gradients are reduced several times a step, a part of the sum each time.
                _accumulate(self._reduced, name, value)
                continue
            sharding = self._shardings[name]
            whole = joined([value], self._like[name].shape)
            if sharding.shard is Shard.PARAMETERS:
                self._gathered.setdefault(sharding.stage, {})[name] = whole
            else:
                self._whole[name].copy_(whole)

    def update(self, stage: int, version: int) -> dict[str, Tensor | Part]:
        """Step the parameters for which a stage is responsible here.

        Returns:
            The gradient of each, as used.

        Raises:
            InvalidInputError: A gradient is not reduced, or grew after it was reduced.
        """
        names = [name for name, owner in self._stepped_by.items() if owner == stage]
        stashes = self._task.plan.stashes_weights
        used: dict[str, Tensor | Part] = {}
        for name in names:
            gradient = self._reduced_gradient(name)
            if stashes:
                # The mean over a round: its losses have weight 1 each.
                gradient = gradient / self._task.plan.stages[stage].round
                # Older versions hold the tensor that is replaced.
                self._whole[name] = self._whole[name].clone()
            # Of a divided parameter only the part is stepped; a gather makes it whole.
            parts = self._parts if name in self._parts else self._whole
            self._optimizer(name, parts[name], gradient)
            used[name] = self._as_part(name, gradient)
        if stashes:
            self._keep_version(stage, version)
        return used

    def _reduced_gradient(self, name: str) -> Tensor:
        if name not in self._reduced:
            # A parameter of one replica needs no reduction; one in parts has the wrong shape
            # without.
            if name in self._parts:
                raise InvalidInputError(f"the gradient of {name!r} is not reduced")
            return self._take_gradient(name)
        if name in self._gradients:
            raise InvalidInputError(f"the gradient of {name!r} grew after its reduction")
        return self._reduced.pop(name)

    def _take_gradient(self, name: str) -> Tensor:
        found = self._gradients.pop(name, None)
        self._own_sums.discard(name)
        return self._like[name].zeros() if found is None else found

    def state(self) -> dict[str, Tensor | Part]:
        """Return copies of everything held: parameters and buffers, whole or in parts."""
        held: dict[str, Tensor | Part] = {}
        for name in self._like:
            if name in self._whole:
                held[name] = self._whole[name].clone()
            else:
                held[name] = self._as_part(name, self._parts[name].clone())
        return held

    def names(self) -> list[str]:
        """Return the names of the parameters and buffers that are held."""
        return list(self._like)

    def tensors(self) -> list[Tensor]:
        """Return the parameters and buffers that are held, whole or in parts."""
        return [*self._whole.values(), *self._parts.values()]

    def _as_part(self, name: str, value: Tensor) -> Tensor | Part:
        sharding = self._shardings.get(name)
        return value if sharding is None else Part(sharding, self._like[name].shape, value)

    def left_over(self) -> list[str]:
        """Return the parameters whose gradients nobody used."""
        return sorted({*self._gradients, *self._reduced})

    def _names(self, bucket: int) -> list[str]:
        names = self._task.graph.parameters.names
        return [names[row] for row in self._task.program.parameters_of(bucket).tolist()]


def joined(parts: Iterable[Tensor], shape: torch.Size) -> Tensor:
    """Return the whole tensor of all parts, in the order of the members."""
    return torch.cat(tuple(parts))[: shape.numel()].view(shape)


def _accumulate(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Add to a sum, without changing a tensor that others may hold."""
    sums[name] = sums[name] + value if name in sums else value


def _padded(value: Tensor, count: int) -> Tensor:
    """Return a flat copy, with zeros up to a multiple of ``count``."""
    flat = value.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % count))
