"""Scratch memory of ops that nobody has run: what is live besides parameters and what is saved.

Forward of a call: activations that are not saved and still have a reader, and what its kernels
allocate on the way. Backward of a call: gradients of activations that are there when it begins, and
what it allocates, the gradients that it makes included. Gradients that an op only passes on (views,
sums of residual branches) are one tensor. Parameters' own gradients are counted by the cost model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from partita.core.columns import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMemory:
    """Memory of one call.

    Attributes:
        op: The op that it belongs to.
        reads: Rows of the tensors that it reads.
        makes: Rows of the tensors that it makes.
        forward_bytes: Bytes that its forward allocates and frees again.
        backward_bytes: Bytes that its backward allocates.
        passed: Pairs of a row that it reads and one that it makes, whose gradients are one tensor.
    """

    op: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    passed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMemory:
    """Memory of one tensor.

    Attributes:
        storage: The storage that it lives in; views share one.
        storage_bytes: Size of that storage.
        gradient_bytes: Size of its gradient.
        is_kept: Whether its storage is saved for backward, a parameter or an input.
        has_gradient: Whether a gradient of it flows back.
    """

    storage: int
    storage_bytes: float
    gradient_bytes: float
    is_kept: bool
    has_gradient: bool


def workspace_bytes(
    calls: Sequence[CallMemory],
    tensors: Mapping[int, TensorMemory],
    num_ops: int,
    returned: frozenset[int] = frozenset(),
) -> Array:
    """Return the scratch memory of each op.

    Args:
        calls: The calls in their order.
        tensors: The tensors that they read and make.
        num_ops: Number of ops.
        returned: Rows that the model returns: they live to the end, and in the backward of all
            ops from the one that makes them on.
    """
    span = _spans(calls)
    end = len(calls)
    activations: dict[int, _Span] = {}
    for row, tensor in tensors.items():
        if not tensor.is_kept and row in span:
            first, last = span[row]
            last = end if row in returned else last
            held = activations.setdefault(tensor.storage, _Span())
            held.add(first, last, tensor.storage_bytes)
    forward = _live(activations.values(), end)
    backward = _live(_gradients(calls, tensors, span).values(), end)
    alive = _live([span for span in activations.values() if span.last == end], end)
    result = np.zeros(num_ops)
    for index, call in enumerate(calls):
        above = [forward[index] + call.forward_bytes]
        if call.backward_bytes or backward[index]:
            above.append(backward[index] + call.backward_bytes + alive[index])
        result[call.op] = max(result[call.op], *above)
    return result


@dataclass(slots=True)
class _Span:
    """Calls during which something is live, the first and the last, and its size."""

    first: int = -1
    last: int = -1
    bytes: float = 0.0

    def add(self, first: int, last: int, size: float) -> None:
        """Let it hold another tensor of the same storage."""
        self.first = first if self.first < 0 else min(self.first, first)
        self.last = max(self.last, last)
        self.bytes = max(self.bytes, size)


def _spans(calls: Sequence[CallMemory]) -> dict[int, tuple[int, int]]:
    """Return the call that makes each row, and the last one that reads it."""
    made: dict[int, int] = {}
    read: dict[int, int] = {}
    for index, call in enumerate(calls):
        read.update(dict.fromkeys(call.reads, index))
        for row in call.makes:
            made.setdefault(row, index)
    return {row: (index, max(index, read.get(row, index))) for row, index in made.items()}


def _live(spans: Iterable[_Span], count: int) -> Array:
    """Return the bytes that are live during each call."""
    change = np.zeros(count + 2)
    for span in spans:
        change[span.first] += span.bytes
        change[span.last + 1] -= span.bytes
    return np.maximum(np.cumsum(change)[:count], 0.0)


def _gradients(
    calls: Sequence[CallMemory],
    tensors: Mapping[int, TensorMemory],
    span: Mapping[int, tuple[int, int]],
) -> dict[int, _Span]:
    """Return when gradients are there before the backward of a call begins, by leading row.

    The gradient of a row is made by the backward of its last reader and used by that of its maker.
    """
    leader: dict[int, int] = {}

    def find(row: int) -> int:
        while leader.get(row, row) != row:
            row = leader[row]
        return row

    for call in calls:
        for source, made in call.passed:
            leader[find(made)] = find(source)
    result: dict[int, _Span] = {}
    for row, (first, last) in span.items():
        if tensors[row].has_gradient and last > first:
            result.setdefault(find(row), _Span()).add(first, last - 1, tensors[row].gradient_bytes)
    return result
