"""One stage, one microbatch: forward, forward again, and the two halves of backward, by autograd.

Every stage boundary cuts autograd. What enters a stage is a leaf, and so are its parameters;
backward differentiates what leaves it with respect to them, in one go or in two halves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from partita.errors import InvalidInputError
from partita.run.parameters import ParameterStore
from partita.run.stage_code import Call
from partita.run.task import Task


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
    """

    inputs: dict[int, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    has_graph: bool = False
    cotangents: dict[int, Tensor] | None = None


class StageRunner:
    """Runs the stages of one device on the parameters of that device."""

    def __init__(self, task: Task, store: ParameterStore, *, seed: int) -> None:
        self._task, self._store, self._seed = task, store, seed
        self._names = task.graph.tensors.names
        self._differentiable = task.graph.tensors.differentiable.tolist()
        self._leaves: dict[str, tuple[Tensor, Tensor]] = {}

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
        with torch.set_grad_enabled(done.has_graph):
            self._run(step, visit, done, after)
        if training:
            self._store.set_buffers(after)
        return done

    def recompute(self, step: int, visit: Visit, done: StagePass) -> None:
        """Run a stage again if it has no graph yet; what it does to buffers is forgotten.

        A graph keeps the weights that forward saw. That backward could have them all the same
        (gathered, and of its version) is checked, as a real device would let go of them.
        """
        self._store.weights(visit.stage, visit.version)
        if done.has_graph:
            return
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
        trained, frozen = self._store.weights(visit.stage, visit.version)
        grad = torch.is_grad_enabled()
        done.inputs = {
            t: value.detach().requires_grad_(grad and t in border.inputs and self._flows(t, value))
            for t, value in done.inputs.items()
        }
        done.weights = {n: self._leaf(n, w) for n, w in trained.items()} if grad else trained
        call = Call(
            seed=self._seed,
            step=step,
            microbatch=visit.microbatch,
            training=self._task.is_training,
            recomputing=recomputing,
        )
        made = self._task.code.run(
            visit.stage,
            {self._names[t]: value for t, value in done.inputs.items()},
            {**done.weights, **frozen, **buffers},
            call,
        )
        missing = [self._names[t] for t in border.outputs if self._names[t] not in made]
        if missing:
            raise InvalidInputError(f"the code of stage {visit.stage} does not make {missing[0]!r}")
        done.outputs = {t: made[self._names[t]] for t in border.outputs}

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
        seed = torch.full_like(loss.detach(), self._task.loss_weight(visit.microbatch))
        cotangents[index] = seed + cotangents[index] if index in cotangents else seed

    def input_gradients(self, _: Visit, done: StagePass) -> dict[int, Tensor]:
        """Return the gradients of what a stage read; keeps the graph for the parameters."""
        return self._gradients(done, {}, keep=True)[0]

    def weight_gradients(self, _: Visit, done: StagePass) -> dict[str, Tensor]:
        """Return the gradients of the parameters; frees the graph."""
        return self._gradients(replace(done, inputs={}), done.weights)[1]

    def gradients(self, _: Visit, done: StagePass) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
        """Return the gradients of inputs and parameters in one go; frees the graph."""
        return self._gradients(done, done.weights)

    def _gradients(
        self, done: StagePass, weights: Mapping[str, Tensor], *, keep: bool = False
    ) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
        """Return gradients: of inputs zeros where autograd has none, of parameters nothing."""
        wanted = {t: value for t, value in done.inputs.items() if value.requires_grad}
        found = _differentiate(done, [*wanted.values(), *weights.values()], keep=keep)
        of_inputs = dict(zip(wanted, found, strict=False))
        of_weights = zip(weights, found[len(wanted) :], strict=True)
        return (
            {t: _or_zeros(of_inputs.get(t), value) for t, value in done.inputs.items()},
            {name: gradient for name, gradient in of_weights if gradient is not None},
        )


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like, requires_grad=False) if gradient is None else gradient


def _differentiate(
    done: StagePass, leaves: Sequence[Tensor], *, keep: bool
) -> Sequence[Tensor | None]:
    """Return the gradient of each leaf, None where nothing depends on it."""
    assert done.cotangents is not None
    pairs = [
        (output, done.cotangents[t])
        for t, output in done.outputs.items()
        if output.requires_grad and t in done.cotangents
    ]
    if not pairs or not leaves:
        return [None] * len(leaves)
    outputs, cotangents = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, leaves, cotangents, retain_graph=keep, allow_unused=True)
