"""Spans of ops that leave nothing in the graph of a pass: they run again when backward needs it.

Autograd keeps tensors for backward by way of *hooks* while a span runs: what the span was given
(inputs, parameters) is kept as it is, of everything else only the place, the k-th tensor that the
span saves. The first time that backward asks for one of these, the span runs again from its inputs
and fills all places that are still wanted; it ends as soon as the last of them is filled. The graph
itself is that of a plain forward, so gradients are summed in the same order.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from partita.capture.op import storage_of
from partita.errors import InvalidInputError

RunAgain: TypeAlias = Callable[[Sequence[Tensor], Mapping[str, Tensor]], object]
"""Runs the ops of a span, given what enters it and the parameters."""


class Recomputation:
    """The spans of one pass of a stage."""

    def __init__(
        self,
        parameters: Callable[[], Mapping[str, Tensor]],
        circumstances: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Prepare a pass.

        Args:
            parameters: Returns the parameters as forward saw them. They are asked for again, so
                that copies of them in another type need not be kept.
            circumstances: Returns a context in which ops compute as they did in forward.
        """
        self._parameters, self._circumstances = parameters, circumstances
        # Whoever keeps a place keeps its span: spans go as backward comes by.
        self._spans: list[weakref.ref[_Span]] = []

    def span(
        self, run: RunAgain, inputs: Sequence[Tensor], held: Set[int]
    ) -> AbstractContextManager[object]:
        """Return a context in which what ops save is left out.

        Args:
            run: Runs the ops again.
            inputs: What enters them; kept, and not written by anyone from now on.
            held: Storages that others keep anyway.
        """
        span = _Span(self, run, inputs, held)
        self._spans.append(weakref.ref(span))
        return saved_tensors_hooks(span.leave, _fetched)

    def now(self) -> None:
        """Run all spans again that backward will need."""
        for found in self._spans:
            span = found()
            if span is not None:
                span.run_again()

    def run(self, run: RunAgain, inputs: Sequence[Tensor]) -> None:
        """Run the ops of a span in the circumstances of forward."""
        with torch.enable_grad(), self._circumstances():
            run(inputs, self._parameters())


class _Place:
    """One of the tensors that a span saves."""

    __slots__ = ("__weakref__", "span", "tensor")

    def __init__(self, span: "_Span") -> None:
        self.span = span
        self.tensor: Tensor | None = None


class _FilledError(Exception):
    """All that is wanted of a span has been made."""


class _Span:
    """Some ops of a pass, and the places of what they have saved."""

    def __init__(
        self, owner: Recomputation, run: RunAgain, inputs: Sequence[Tensor], held: Set[int]
    ) -> None:
        self._owner, self._run = owner, run
        self._inputs = [(tensor.detach(), tensor.requires_grad) for tensor in inputs]
        self._held = {*held, *map(storage_of, inputs)}
        self._places: list[weakref.ref[_Place] | None] = []

    def leave(self, tensor: Tensor) -> "Tensor | _Place":
        """Return what the graph keeps instead of a tensor."""
        if storage_of(tensor) in self._held:
            self._places.append(None)
            return tensor
        place = _Place(self)
        self._places.append(weakref.ref(place))
        return place

    def run_again(self) -> None:
        """Fill the places that are still wanted."""
        wanted = {
            number: place
            for number, found in enumerate(self._places)
            if found is not None and (place := found()) is not None and place.tensor is None
        }
        if not wanted:
            return
        last, count = max(wanted), 0

        def fill(tensor: Tensor) -> None:
            nonlocal count
            place = wanted.get(count)
            count += 1
            if place is not None:
                place.tensor = tensor.detach()
            if count > last:
                raise _FilledError

        inputs = [tensor.detach().requires_grad_(grad) for tensor, grad in self._inputs]
        try:
            with saved_tensors_hooks(fill, _fetched):
                self._owner.run(self._run, inputs)
        except _FilledError:
            return
        raise InvalidInputError(
            f"ops that recompute saved {len(self._places)} tensors for backward in forward, and "
            f"{count} when they ran again; a function of the model does not do the same twice"
        )


def _fetched(kept: "Tensor | _Place") -> Tensor:
    """Return the tensor that the graph wants back."""
    if isinstance(kept, Tensor):
        return kept
    if kept.tensor is None:
        kept.span.run_again()
    assert kept.tensor is not None
    return kept.tensor
