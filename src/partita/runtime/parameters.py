"""The parameters, buffers and gradients that one device holds.

A parameter is held whole, or divided: flat and padded to equal parts, one for each replica. What
else is divided depends on the stage's ``Shard``:

- optimizer, gradients: every replica has the whole parameter, and steps its part of it; a gather
  after the update makes it whole again.
- parameters: a replica has its part only; a gather before each forward and backward brings a
  whole copy, dropped afterwards.

A device has one optimizer for all that it steps: whole parameters and its parts of divided ones.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partita.core.plan import Shard
from partita.core.program import Kind, Program
from partita.errors import InvalidInputError, UnsupportedError
from partita.runtime.flat_gradients import Bucket, FlatGradients
from partita.runtime.numerics import numerics_of
from partita.runtime.parts import Part, Slice, Stretch
from partita.runtime.task import Task
from partita.runtime.tensor_parallel import slices_of
from partita.runtime.training.optimizers import (
    Agreement,
    RankOptimizer,
    check_optimizer,
    check_steps_parts,
    make_optimizer,
)
from partita.runtime.training.recipe import Recipe


class _Like(NamedTuple):
    """What a parameter looks like when it is whole."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class ParameterStore:
    """Parameters, buffers and gradients of one device.

    Attributes:
        optimizer: Steps what the device owns.
        numerics: Types of numbers that stages compute with.
        changes: How often parameters were stepped or filled from outside.
    """

    def __init__(
        self,
        task: Task,
        device: int,
        state: Mapping[str, Tensor],
        recipe: Recipe,
        *,
        slices: Mapping[str, Slice] | None = None,
        keeps_gradients: bool = True,
    ) -> None:
        """Copy the device's share of the initial state.

        Args:
            task: What is run.
            device: The device.
            state: First parameters and buffers by name, whole.
            recipe: How parameters are stepped.
            slices: What it holds of those that its tensor-parallel group divides. "Whole" then
                means this slice.
            keeps_gradients: Whether gradients that an update returns stay as they are; if not, the
                next step may overwrite them.

        Raises:
            InvalidInputError: The state lacks a parameter or buffer that a stage here uses.
        """
        self._task = task
        self._slices: Mapping[str, Slice] = slices or {}
        self._shapes: dict[str, torch.Size] = {}
        self._shardings = task.shardings(device)
        self._stages = task.stages_of(device)
        # The stage that steps each parameter here: the first of those that share it.
        self._stepped_by: dict[str, int] = {}
        # Whole tensors, and this device's flat, padded parts, by name; a parameter may have both.
        self._whole: dict[str, Tensor] = {}
        self._parts: dict[str, Tensor] = {}
        self._stretches: dict[str, Stretch] = {}
        self._like: dict[str, _Like] = {}
        # Whole copies of divided parameters by stage: filled by a gather, without memory after the
        # release; the stages that are filled; stashed weights by (stage, version).
        self._copies: dict[int, dict[str, Tensor]] = {}
        self._gathered: set[int] = set()
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
        # The parameters of a bucket, by Program and number; the Program keeps its identity.
        self._bucket_names: dict[tuple[int, int], tuple[Program, Bucket]] = {}
        self.changes = 0
        self._agreement = Agreement(recipe)
        self.numerics = numerics_of(recipe.precision)
        if self._agreement.is_needed and task.plan.stashes_weights:
            raise UnsupportedError(
                "with weight stashing, stages step at different times, and there is no moment at "
                "which all gradients of a step are known; leave out clipping, loss scaling and the "
                "policy for gradients that are no numbers, or plan another schedule"
            )
        self._counted: frozenset[str] = frozenset()
        if self._agreement.is_needed:
            self._counted = _counted(task, device, sliced=slices is not None)
        stepped = {name: self._stepped(name) for name in self._stepped_by}
        shapes = {name: self._like[name].shape for name in stepped}
        self.optimizer: RankOptimizer = make_optimizer(recipe, stepped, shapes)
        # By stage where gradients lie in flat memory, and by name of the parameter; what such a
        # stage steps.
        self._flat: dict[int, FlatGradients] = {}
        if not keeps_gradients and self._may_be_flat():
            self._flat = {stage: FlatGradients(buckets, self._whole)
                          for stage, buckets in self._flat_buckets(device).items()}  # fmt: skip
        self._flat_of = {name: flat for flat in self._flat.values() for name in flat.views}
        self._steps: dict[int, dict[str, tuple[Tensor, Tensor]]] = {
            stage: {name: (self._whole[name], view) for name, view in flat.views.items()}
            for stage, flat in self._flat.items()
        }
        check_steps_parts(
            self.optimizer, {n for n in stepped if n in self._slices or n in self._stretches}
        )

    def _may_be_flat(self) -> bool:
        numerics = self.numerics
        narrows = (numerics.weights, numerics.gradients, numerics.reduction) != (None, None, None)
        return not narrows and not self._task.plan.stashes_weights and self._task.is_training

    def _flat_buckets(self, device: int) -> dict[int, list[Bucket]]:
        """Return the buckets of each stage whose gradients can lie in flat memory.

        Those are summed over replicas as they are: whole parameters that no other stage here uses,
        those of a bucket all of one type.
        """
        program, found = self._task.program, dict[int, list[Bucket]]()
        rows = range(int(program.ptr[device]), int(program.ptr[device + 1]))
        reduced = [row for row in rows if program.kind[row] == Kind.ALL_REDUCE]
        names = self._task.graph.parameters.names
        buckets = {
            tuple(names[parameter] for parameter in program.parameters_of(bucket).tolist())
            for bucket in dict.fromkeys(program.bucket[reduced].tolist())
        }
        users: dict[str, list[int]] = {}
        for stage in self._stages:
            for name in self._task.borders[stage].trained:
                users.setdefault(name, []).append(stage)
        for stage in self._stages:
            trained = set(self._task.borders[stage].trained)
            own = sorted(bucket for bucket in buckets if trained.issuperset(bucket))
            held = [name for bucket in own for name in bucket]
            fits = all(
                users[name] == [stage] and name in self._whole and name not in self._parts
                and name not in self._slices for name in held
            )  # fmt: skip
            is_plain = all(len({self._like[name].dtype for name in bucket}) == 1 for bucket in own)
            if own and fits and is_plain and sorted(held) == sorted(trained):
                found[stage] = own
        return found

    def _stepped(self, name: str) -> Tensor:
        """Return what is stepped here: of a divided parameter the part; a gather makes it whole."""
        return (self._parts if name in self._parts else self._whole)[name]

    def _admit(self, name: str, device: int, state: Mapping[str, Tensor]) -> None:
        if name in self._like:
            return
        if name not in state:
            raise InvalidInputError(f"the initial state has no {name!r}; it has {sorted(state)}")
        value = state[name].detach()
        self._shapes[name] = value.shape
        if name in self._slices:
            value = self._slices[name].of(value).contiguous()
        self._like[name] = _Like(value.shape, value.dtype, value.device)
        sharding = self._shardings.get(name)
        if sharding is not None:
            stretch = Stretch(sharding.members.index(device), len(sharding.members))
            self._stretches[name] = stretch
            if sharding.shard is Shard.PARAMETERS:
                self._parts[name] = stretch.of(value)
            else:
                # The part lies within the whole: a step of it is seen there, and costs no copy.
                padded = _padded(value, stretch.count)
                padded = padded.clone() if padded.numel() == value.numel() else padded
                self._whole[name] = padded[: value.numel()].view(value.shape)
                self._parts[name] = padded.tensor_split(stretch.count)[stretch.index]
        else:
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
        gathered = self._copies[stage] if stage in self._gathered else {}
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
        """Give the memory of the gathered copies of a stage's parameters back.

        The tensors stay, as the graphs of forwards hold them: the next gather fills them again,
        before the backward that needs them.
        """
        if stage in self._gathered:
            self._gathered.discard(stage)
            for copy in self._copies[stage].values():
                copy.untyped_storage().resize_(0)

    def _fill(self, stage: int, name: str, whole: Tensor) -> None:
        """Take home a gathered parameter."""
        copies = self._copies.setdefault(stage, {})
        if name in copies:
            storage = copies[name].untyped_storage()
            storage.resize_(whole.numel() * whole.element_size())
            # By ``data``: for autograd it is the tensor that forward saw, and so are its values.
            copies[name].data.copy_(whole)
        else:
            copies[name] = whole.clone()
        self._gathered.add(stage)

    def is_gathered(self, stage: int) -> bool:
        """Return whether copies of a stage's parameters are there, until their release."""
        return stage in self._gathered

    def outside(self, stage: int, value: Tensor) -> Tensor:
        """Return what leaves a stage: a copy where it lies in memory that a release takes away."""
        copies = self._copies.get(stage, {}).values()
        if not copies:
            return value
        own = value.untyped_storage().data_ptr()
        within = any(copy.untyped_storage().data_ptr() == own for copy in copies)
        return value.clone() if within and own else value

    def buffers(self, stage: int) -> dict[str, Tensor]:
        """Return the buffers of a stage."""
        return {name: self._whole[name] for name in self._task.borders[stage].buffers}

    def set_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Replace buffers."""
        self._whole.update(values)

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of parameters, by name, over one microbatch of one stage.

        The first may be a tensor that others hold too; then the sum of two is our own to change.
        """
        flat = self._flat_of.get(next(iter(gradients), ""))
        if flat is not None:  # a stage is flat as a whole
            flat.add(gradients)
            return
        if gradients and self._own_sums.issuperset(gradients):  # from the third on
            torch._foreach_add_([self._gradients[n] for n in gradients], list(gradients.values()))
            return
        sums, parts = [], []
        for name, gradient in gradients.items():
            held = self._gradients.get(name)
            if held is None:
                self._gradients[name] = self.numerics.summed(gradient).detach()
            elif name in self._own_sums or _is_unshared(held):
                self._own_sums.add(name)
                sums.append(held)
                parts.append(gradient)
            else:
                self._gradients[name] = held + gradient
                self._own_sums.add(name)
        if sums:
            # One call for all of them: a stage has many small parameters.
            torch._foreach_add_(sums, parts)

    def flat_gradients(self, stage: int) -> FlatGradients | None:
        """Return where the gradients of a stage are added up, if that is the same in every step."""
        return self._flat.get(stage)

    def sums_in_place(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the sums of gradients, by name, to which more may be added as they come.

        They are none where one of them is not there yet, is held by others too, or has another type
        than its gradients.
        """
        if self.numerics.weights is not None or self.numerics.gradients is not None:
            return {}
        found: dict[str, Tensor] = {}
        for name in names:
            held = self._gradients.get(name)
            if held is None or not (name in self._own_sums or _is_unshared(held)):
                return {}
            found[name] = held
        self._own_sums.update(found)
        return found

    def outgoing(self, kind: Kind, bucket: int) -> list[Tensor]:
        """Return what this device brings to a collective, a tensor for each parameter.

        Gradients are handed over: what comes later is not part of this reduction.
        """
        names = self._names(bucket)
        if kind is Kind.ALL_GATHER:
            return [self._parts[name] for name in names]
        flat = self._flat_of.get(names[0])
        if flat is not None:
            return [flat.sent(names)]
        taken = [self.numerics.reduced(self._take_gradient(name)) for name in names]
        if kind is Kind.REDUCE_SCATTER:
            counts = [self._stretches[name].count for name in names]
            return [_padded(value, count) for value, count in zip(taken, counts, strict=True)]
        return taken

    def incoming(self, kind: Kind, bucket: int, values: Sequence[Tensor]) -> None:
        """Take home the result of a collective."""
        names = self._names(bucket)
        flat = None if kind is Kind.ALL_GATHER else self._flat_of.get(names[0])
        if flat is not None:
            (value,) = values
            flat.take_home(names, value)
            return
        for name, value in zip(names, values, strict=True):
            if kind is not Kind.ALL_GATHER:
                # Sharded gradients are reduced several times a step, a part of the sum each time;
                # the sum is a new tensor, as others may hold the old one.
                sums = self._reduced
                sums[name] = sums[name] + value if name in sums else value
                continue
            sharding = self._shardings[name]
            like = self._like[name]
            whole = value[: like.shape.numel()].view(like.shape)
            if sharding.shard is Shard.PARAMETERS:
                self._fill(sharding.stage, name, whole)
            else:
                self._whole[name].copy_(whole)

    def update(self, stage: int, version: int) -> Mapping[str, Tensor | Part]:
        """Step the parameters for which a stage is responsible here.

        Returns:
            The gradient of each, as used.

        Raises:
            InvalidInputError: A gradient is not reduced, or grew after it was reduced.
        """
        self.changes += 1
        flat = self._flat.get(stage)
        if flat is not None:
            views = flat.use(self._agreement.factor)
            if not self._agreement.skips:
                fixed = self._steps[stage]
                self.optimizer.step(fixed, is_fixed=len(fixed) == len(self._stepped_by))
            return views
        stashes = self._task.plan.stashes_weights
        gradients: dict[str, Tensor] = {}
        for name, owner in self._stepped_by.items():
            if owner == stage:
                gradient, dtype = self._reduced_gradient(name), self._like[name].dtype
                gradients[name] = gradient if gradient.dtype is dtype else gradient.to(dtype)
        stepped: dict[str, tuple[Tensor, Tensor]] = {}
        for name, used in self._agreement.used(gradients).items():
            gradient = used
            if stashes:
                # The mean over a round: its losses have weight 1 each.
                gradient = gradient / self._task.plan.stages[stage].round
                # Older versions hold the tensor that is replaced.
                self._whole[name] = self._whole[name].clone()
            stepped[name] = (self._stepped(name), gradient)
        if not self._agreement.skips:
            self.optimizer.step(stepped)
        if stashes:
            self._keep_version(stage, version)
        if not self._stretches and not self._slices:
            return {name: gradient for name, (_, gradient) in stepped.items()}
        return {name: self.as_part(name, gradient) for name, (_, gradient) in stepped.items()}

    @property
    def agrees(self) -> bool:
        """Whether all devices agree on what to do with the gradients before any is used."""
        return self._agreement.is_needed and self._task.is_training

    def measure(self) -> Tensor:
        """Return the sum of squares of the gradients here, each piece on one device alone."""
        sums = {**self._gradients, **self._reduced}
        for flat in self._flat.values():
            sums.update(flat.views)
        found = [sums.get(name) for name in self._stepped_by if name in self._counted]
        return self._agreement.measure([gradient for gradient in found if gradient is not None])

    def agree(self, total: Tensor) -> None:
        """Take home the sum over all devices."""
        self._agreement.conclude(float(total))

    @property
    def loss_scale(self) -> float:
        """What the losses are multiplied with, so that small gradients do not vanish."""
        return self._agreement.scale

    @property
    def gradient_norm(self) -> float:
        """The norm of all gradients of the last step; NaN where nobody asked for it."""
        return self._agreement.norm

    def end_step(self) -> None:
        """Let the optimizer's schedule go on: all stages of a step have been updated."""
        if self._task.is_training:
            self.optimizer.end_step()

    @contextmanager
    def serving(self, task: Task) -> Iterator[None]:
        """Serve another Program of the same stages: other microbatches, or forward alone."""
        before, self._task = self._task, task
        try:
            yield
        finally:
            self._task = before

    def whole_tensors(self) -> dict[str, Tensor]:
        """Return the live parameters and buffers that are held whole, by name."""
        return {name: value for name, value in self._whole.items() if name not in self._slices}

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
                held[name] = self._as_slice(name, self._whole[name].clone())
            else:
                held[name] = self.as_part(name, self._parts[name].clone())
        return held

    def holdings(self) -> dict[str, Tensor | Part]:
        """Return everything held, live, by the names that checkpoints have.

        Parameters and buffers are ``model.<name>``, the optimizer's entries
        ``optim.<name>.<entry>``.
        """
        found: dict[str, Tensor | Part] = {}
        for name in self._like:
            found[f"model.{name}"] = (
                self._as_slice(name, self._whole[name])
                if name in self._whole
                else self.as_part(name, self._parts[name])
            )
        for name, entries in self.optimizer.state().items():
            stepped = self._stepped(name)
            for entry, value in entries.items():
                if isinstance(value, Tensor):
                    # What is not of the parameter's shape is a count, or the same everywhere.
                    is_like = value.shape == stepped.shape
                    key = f"optim.{name}.{entry}"
                    found[key] = self.as_part(name, value) if is_like else value
        return found

    def small_state(self) -> dict[str, Any]:
        """Return where schedule and scale of losses stand, as values of JSON."""
        return {
            "optimizer": self.optimizer.name,
            "schedule": self.optimizer.schedule_state(),
            "scaler": self._agreement.state(),
        }

    def load_small_state(self, state: Mapping[str, Any]) -> None:
        """Go on where schedule and scale stood.

        Raises:
            InvalidInputError: They are those of another optimizer.
        """
        check_optimizer(state.get("optimizer") or "", self.optimizer.name)
        if state.get("schedule"):
            self.optimizer.load_schedule_state(state["schedule"])
        self._agreement.load_state(state.get("scaler") or {})

    def after_load(self) -> None:
        """Cut the parts anew from whole parameters that were filled from outside."""
        self.changes += 1
        with torch.no_grad():
            for name, part in self._parts.items():
                if name in self._whole:
                    part.copy_(self._stretches[name].of(self._whole[name]))

    def names(self) -> list[str]:
        """Return the names of the parameters and buffers that are held."""
        return list(self._like)

    def tensors(self) -> list[Tensor]:
        """Return the parameters and buffers that are held, whole or in parts."""
        parts = [part for name, part in self._parts.items() if name not in self._whole]
        return [*self._whole.values(), *parts]

    def as_part(self, name: str, values: Tensor) -> Tensor | Part:
        """Return what has the shape of what is stepped here, as what it is of the whole.

        Args:
            name: The parameter.
            values: Its gradient, or a state of the optimizer.
        """
        stretch = self._stretches.get(name)
        if stretch is None:
            return self._as_slice(name, values)
        return Part(self._shapes[name], values, stretch, self._slices.get(name))

    def _as_slice(self, name: str, values: Tensor) -> Tensor | Part:
        held = self._slices.get(name)
        return values if held is None else Part(self._shapes[name], values, slice=held)

    def left_over(self) -> list[str]:
        """Return the parameters whose gradients nobody used."""
        flat = [name for each in self._flat.values() for name in each.unused()]
        return sorted({*self._gradients, *self._reduced, *flat})

    def _names(self, bucket: int) -> Bucket:
        program = self._task.program
        known = self._bucket_names.get((id(program), bucket))
        if known is None or known[0] is not program:
            names = self._task.graph.parameters.names
            found = tuple(names[row] for row in program.parameters_of(bucket).tolist())
            known = self._bucket_names[id(program), bucket] = (program, found)
        return known[1]


def _is_unshared(tensor: Tensor) -> bool:
    """Return whether no other tensor has the storage of this one, of which it is all.

    Gradients may be one another's views, or what a stage hands on.
    """
    storage = tensor.untyped_storage()
    is_whole = tensor.numel() * tensor.element_size() == storage.nbytes()
    # The tensor and the storage in hand count.
    return is_whole and torch._C._storage_Use_Count(storage._cdata) == 2  # noqa: SLF001  # its only name


def _padded(value: Tensor, count: int) -> Tensor:
    """Return the values flat, with zeros up to a multiple of ``count``; a view without any."""
    flat = value.reshape(-1)
    missing = -flat.numel() % count
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


def _counted(task: Task, device: int, *, sliced: bool) -> frozenset[str]:
    """Return the parameters of which no device before this one holds the same piece.

    A norm over all devices counts replicas and tied weights once.
    """
    mine = _pieces(task, device, sliced=sliced)
    before = [_pieces(task, other, sliced=sliced) for other in range(device)]
    return frozenset(
        name for name, piece in mine.items() if all(held.get(name) != piece for held in before)
    )


def _pieces(task: Task, device: int, *, sliced: bool) -> dict[str, tuple[int, int, Slice | None]]:
    """Return which piece of each trained parameter a device steps: number, of how many, slice."""
    shardings = task.shardings(device)
    slices = slices_of(task, device) if sliced else {}
    found: dict[str, tuple[int, int, Slice | None]] = {}
    for stage in task.stages_of(device):
        for name in task.borders[stage].trained:
            members = shardings[name].members if name in shardings else (device,)
            found[name] = (members.index(device), len(members), slices.get(name))
    return found
