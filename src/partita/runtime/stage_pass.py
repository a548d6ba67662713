"""One stage, one microbatch: forward, forward again, and the two halves of backward, by autograd.

Every stage boundary cuts autograd. What enters a stage is a leaf, and so are its parameters;
backward differentiates what leaves it with respect to them, in one go or in two halves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from partita.capture.recomputation import Recomputation
from partita.capture.tensor.ops import TensorGroup
from partita.errors import InvalidInputError
from partita.runtime.parameters import ParameterStore
from partita.runtime.split_backward import SplitBackward
from partita.runtime.stage_code import Call
from partita.runtime.task import Task


class Visit(NamedTuple):
    """A stage at work on a microbatch.

    Attributes:
        stage: The stage.
        microbatch: The microbatch.
        version: The version of the weights.
    """

    stage: int
    microbatch: int
    version: int


@dataclass(slots=True)
class StagePass:
    """A stage between the forward and the end of the backward of a microbatch.

    Attributes:
        inputs: What enters, by tensor.
        buffers: Buffers as forward found them, where forward will be repeated.
        weights: Leaves of the trainable parameters.
        outputs: What leaves.
        has_graph: Whether the outputs can be differentiated, or forward has to be repeated first.
        cotangents: Gradients of the outputs; None before backward has begun.
        split: What the first half of backward has left for the second; None without one.
        of_weights: Gradients of the parameters that the first half has made already.
        recomputation: Ops that run again in backward, where they are not all; None without one.
    """

    inputs: dict[int, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    has_graph: bool = False
    cotangents: dict[int, Tensor] | None = None
    split: SplitBackward | None = None
    of_weights: dict[str, Tensor] | None = None
    recomputation: Recomputation | None = None


class StageRunner:
    """Runs the stages of one device on the parameters of that device."""

    def __init__(
        self,
        task: Task,
        store: ParameterStore,
        *,
        seed: int,
        group: TensorGroup | None = None,
    ) -> None:
        """Prepare a device.

        Args:
            task: What is run.
            store: Its parameters.
            seed: Seed of all random numbers.
            group: The ranks with which it divides the tensors of its stages; None = it computes
                them whole.
        """
        self._task, self._store, self._seed, self._group = task, store, seed, group
        self._names = task.graph.tensors.names
        self._differentiable = task.graph.tensors.differentiable.tolist()
        # By name: a parameter and its leaf. By stage: trained and frozen parameters that never
        # change their tensors.
        self._leaves: dict[str, tuple[Tensor, Tensor]] = {}
        # Where weights are narrow: parameter, counts of changes, and copy; and its own type.
        self._copies: dict[str, tuple[Tensor, tuple[int, int], Tensor]] = {}
        self._wide: dict[str, torch.dtype] = {}
        self._narrows = store.numerics.weights is not None
        self._device_type = next((t.device.type for t in store.tensors()), "cpu")
        self._fixed: dict[int, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}

    def forward(self, step: int, visit: Visit, inputs: dict[int, Tensor]) -> StagePass:
        """Run a stage; of one that recomputes the outputs have no graph.

        Buffers change in training. Each forward gets its own copy of them, so that no later one
        disturbs what this one keeps for backward.
        """
        training = self._task.is_training
        before = self._store.buffers(visit.stage)
        after = {name: value.clone() for name, value in before.items()}
        done = StagePass(inputs=inputs, buffers=before)
        done.has_graph = training and not self._task.borders[visit.stage].recomputes
        # A stage that recomputes must not hold the activations of its first forward.
        with torch.set_grad_enabled(done.has_graph):
            self._run(step, visit, done, after)
        if training:
            self._store.set_buffers(after)
        return done

    def first_not_finite(self, step: int, visit: Visit, inputs: Mapping[int, Tensor]) -> str:
        """Return the first op of a stage that makes what is no number; empty = not known.

        The op runs on what the stage was given, as it did before; buffers stay as they are.
        """
        find = getattr(self._task.code, "first_not_finite", None)
        if find is None:
            return ""
        trained, frozen = self._store.weights(visit.stage, visit.version)
        held = self._store.buffers(visit.stage)
        buffers = {name: value.clone() for name, value in held.items()}
        call = Call(
            seed=self._seed,
            step=step,
            microbatch=visit.microbatch,
            training=self._task.is_training,
            group=self._group,
        )
        numerics = self._store.numerics
        if numerics.weights is not None:
            trained = {name: value.to(self._wide[name]) for name, value in trained.items()}
        named = {self._names[t]: value.detach() for t, value in inputs.items()}
        with torch.no_grad(), numerics.autocast(self._device_type):
            return str(find(visit.stage, named, {**trained, **frozen, **buffers}, call))

    def recompute(self, step: int, visit: Visit, done: StagePass) -> None:
        """Run a stage again if it has no graph yet; what it does to buffers is forgotten.

        A graph keeps the weights that forward saw. That backward could have them all the same
        (gathered, and of its version) is checked, as a real device would let go of them.
        """
        if visit.stage not in self._fixed:
            self._store.weights(visit.stage, visit.version)
        if done.has_graph:
            return
        # From what forward found: later microbatches have changed the buffers since.
        buffers = {name: value.clone() for name, value in done.buffers.items()}
        done.has_graph = True
        with torch.enable_grad():
            self._run(step, visit, done, buffers, recomputing=True)

    def _run(
        self,
        step: int,
        visit: Visit,
        done: StagePass,
        buffers: Mapping[str, Tensor],
        *,
        recomputing: bool = False,
    ) -> None:
        border = self._task.borders[visit.stage]
        grad = torch.is_grad_enabled()
        # Leaves of our own: backward of this stage ends here, and the loop hands its gradients on.
        # Nobody wants the gradient of a model input, which is loaded here.
        done.inputs = {
            t: value.detach().requires_grad_(grad and t in border.inputs and self._flows(t, value))
            for t, value in done.inputs.items()
        }
        done.weights, frozen = self._weights(visit, grad=grad)
        numerics, leaves, held = self._store.numerics, done.weights, done.buffers

        def parameters() -> dict[str, Tensor]:
            # Ops were captured with wide weights; autocast narrows them again where it computes.
            wide = {n: w.to(self._wide[n]) for n, w in leaves.items()} if self._narrows else leaves
            return {**held, **wide, **frozen}

        if grad and border.recomputes_some:
            done.recomputation = Recomputation(
                parameters, lambda: numerics.autocast(self._device_type)
            )
        call = Call(
            seed=self._seed,
            step=step,
            microbatch=visit.microbatch,
            training=self._task.is_training,
            recomputing=recomputing,
            recomputation=done.recomputation,
            group=self._group,
        )
        with numerics.autocast(self._device_type):
            made = self._task.code.run(
                visit.stage,
                {self._names[t]: value for t, value in done.inputs.items()},
                {**parameters(), **buffers} if frozen or buffers or self._narrows else leaves,
                call,
            )
        missing = [self._names[t] for t in border.outputs if self._names[t] not in made]
        if missing:
            raise InvalidInputError(f"the code of stage {visit.stage} does not make {missing[0]!r}")
        outside = self._store.outside
        done.outputs = {t: outside(visit.stage, made[self._names[t]]) for t in border.outputs}

    def _weights(self, visit: Visit, *, grad: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the trained parameters of a stage, as leaves where they are differentiated.

        Those of a stage whose tensors stay the same are found once.
        """
        if grad and visit.stage in self._fixed:
            return self._fixed[visit.stage]
        trained, frozen = self._store.weights(visit.stage, visit.version)
        if self._store.numerics.weights is not None:
            return self._narrowed(trained, grad=grad), frozen
        if not grad:
            return trained, frozen
        found = ({name: self._leaf(name, weight) for name, weight in trained.items()}, frozen)
        if self._store.keeps_tensors(visit.stage):
            self._fixed[visit.stage] = found
            flat = self._store.flat_gradients(visit.stage)
            for name, view in flat.views.items() if flat is not None else ():
                found[0][name].grad = view
        return found

    def _narrowed(self, trained: Mapping[str, Tensor], *, grad: bool) -> dict[str, Tensor]:
        """Return 16-bit copies of parameters, made anew when a parameter has been stepped."""
        found = {}
        for name, weight in trained.items():
            held, known, leaf = self._copies.get(name, (None, (-1, -1), weight))
            # Gathers fill the same tensor again without counting that as a change of it.
            now = (weight._version, self._store.changes)  # noqa: SLF001 (counts changes)
            if held is not weight or known != now:
                leaf = self._store.numerics.rounded(weight)
                self._wide[name] = weight.dtype
                self._copies[name] = (weight, now, leaf)
            found[name] = leaf.requires_grad_(grad)
        return found

    def _leaf(self, name: str, weight: Tensor) -> Tensor:
        """Return the leaf of a parameter; the same one as long as the parameter is the same."""
        held, leaf = self._leaves.get(name, (None, weight))
        if held is not weight:
            leaf = weight.detach().requires_grad_()
            self._leaves[name] = (weight, leaf)
        return leaf

    def _flows(self, tensor: int, value: Tensor) -> bool:
        """Return whether a gradient flows back through a tensor."""
        return self._differentiable[tensor] and (value.is_floating_point() or value.is_complex())

    def begin_backward(self, visit: Visit, done: StagePass, cotangents: dict[int, Tensor]) -> None:
        """Give a pass the gradients of its outputs; the loss gets the microbatch's weight too."""
        done.cotangents = cotangents
        index = self._task.graph.loss
        loss = done.outputs.get(index)
        if loss is None:
            return
        if loss.numel() != 1:
            raise InvalidInputError(
                f"the loss {self._names[index]!r} has shape {tuple(loss.shape)}; "
                "expected one number, the mean over the samples of a microbatch"
            )
        weight = self._task.loss_weight(visit.microbatch) * self._store.loss_scale
        seed = torch.full_like(loss.detach(), weight)
        # A later stage may read the loss as well; its gradient is added.
        cotangents[index] = seed + cotangents[index] if index in cotangents else seed

    def input_gradients(self, visit: Visit, done: StagePass) -> dict[int, Tensor]:
        """Return the gradients of what a stage read; keeps the graph for the parameters.

        Gathered copies are there for the first half alone, which then does the whole backward.
        """
        if self._store.is_gathered(visit.stage):
            of_inputs, done.of_weights = self.separate_gradients(visit, done)
            return of_inputs
        wanted = _wanted_inputs(done)
        outputs, cotangents = _differentiated(done)
        # Nothing flows back, as in the first stage; the second half then does the whole backward.
        if not outputs or not wanted:
            return self._of_inputs(visit, done, {})
        done.split = SplitBackward(outputs, cotangents, list(wanted.values()), done.weights)
        found = done.split.input_gradients()
        return self._of_inputs(visit, done, dict(zip(wanted, found, strict=True)))

    def weight_gradients(self, _: Visit, done: StagePass) -> dict[str, Tensor]:
        """Return the gradients of the parameters; frees the graph."""
        if done.of_weights is not None:
            return done.of_weights
        if done.split is not None:
            return done.split.weight_gradients()
        return _of_weights(done, _differentiate(done, list(done.weights.values())))

    def gradients(
        self, visit: Visit, done: StagePass
    ) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
        """Return the gradients of inputs and parameters in one go; frees the graph.

        Those of parameters whose sums over microbatches may be changed are added to them as they
        come, and are not returned: a stage need not hold all of them beside the sums.
        """
        flat = self._store.flat_gradients(visit.stage)
        if flat is not None:
            flat.begin()
            return self._of_inputs(visit, done, _accumulate(done)), {}
        sums = self._store.sums_in_place(done.weights)
        if sums:
            return self._of_inputs(visit, done, _add_in_place(done, sums)), {}
        return self.separate_gradients(visit, done)

    def separate_gradients(
        self, visit: Visit, done: StagePass
    ) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
        """Return the gradients of inputs and parameters, those of this microbatch alone."""
        wanted = _wanted_inputs(done)
        found = _differentiate(done, [*wanted.values(), *done.weights.values()])
        # The gradients of inputs come first, those of parameters follow.
        of_inputs = dict(zip(wanted, found, strict=False))
        return self._of_inputs(visit, done, of_inputs), _of_weights(done, found[len(wanted) :])

    def _of_inputs(
        self, visit: Visit, done: StagePass, found: Mapping[int, Tensor | None]
    ) -> dict[int, Tensor]:
        """Return the gradients that go back to other stages: zeros where autograd has none."""
        wanted = [tensor for tensor, _ in self._task.contributes[visit.stage]]
        return {t: _or_zeros(found.get(t), done.inputs[t]) for t in wanted}


def _wanted_inputs(done: StagePass) -> dict[int, Tensor]:
    return {t: value for t, value in done.inputs.items() if value.requires_grad}


def _of_weights(done: StagePass, found: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Return the gradients of the parameters, those that autograd has."""
    pairs = zip(done.weights, found, strict=True)
    return {name: gradient for name, gradient in pairs if gradient is not None}


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like, requires_grad=False) if gradient is None else gradient


def _differentiated(done: StagePass) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the outputs that backward starts from, and their gradients."""
    assert done.cotangents is not None
    # Outputs without a graph or that nobody reads take no part.
    tensors = [
        t for t, output in done.outputs.items() if output.requires_grad and t in done.cotangents
    ]
    return tuple(done.outputs[t] for t in tensors), tuple(done.cotangents[t] for t in tensors)


def _add_in_place(done: StagePass, sums: Mapping[str, Tensor]) -> dict[int, Tensor | None]:
    """Add the gradients of parameters to sums; returns those of the inputs, and frees the graph."""
    for name, leaf in done.weights.items():
        leaf.grad = sums[name]
    try:
        return _accumulate(done)
    finally:
        for leaf in done.weights.values():
            leaf.grad = None


def _accumulate(done: StagePass) -> dict[int, Tensor | None]:
    """Add the gradients of parameters to those that their leaves have; returns the inputs' ones."""
    outputs, cotangents = _differentiated(done)
    wanted = _wanted_inputs(done)
    if outputs:
        # The graph has no other leaves than these inputs and the parameters of the pass.
        torch.autograd.backward(outputs, cotangents)
    return {tensor: value.grad for tensor, value in wanted.items()}


def _differentiate(done: StagePass, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradient of each leaf, None where nothing depends on it; frees the graph."""
    outputs, cotangents = _differentiated(done)
    if not outputs or not leaves:
        return [None] * len(leaves)
    return torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
