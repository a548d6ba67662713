"""Sequence parallelism: what is replicated between split regions, divided along the sequence.

A region of split tensors ends with a sum over the group, and the next one begins with a product
that needs all of it. Here a rank gets a part of that sum alone (a reduce-scatter instead of an
all-reduce), norms, dropout and residuals run on parts (``rules``), and the parts are gathered where
something needs the whole: the next region, another stage, the results of the model. Where an op in
between needs whole tensors it gets them, and runs as before.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from partita.capture.op import CapturedOp
from partita.capture.splits import Split
from partita.capture.tensor.ops import ScatteringGroup, TensorGroup
from partita.capture.tensor.parallel import (
    SplitCode,
    SplitOp,
    TensorSplits,
    as_function,
    refs_of_call,
)
from partita.capture.tensor.rules import CannotSplitError, Layout, Local, Situation, rule_of
from partita.capture.tree import Const, Param, Ref, Value

_ENDS = frozenset({"linear", "addmm", "matmul", "mm", "bmm", "einsum", "embedding"})
"""Functions whose sums over a group may be left in parts."""
_RESHAPES = frozenset({"view", "reshape", "unflatten"})


def along_sequences(code: SplitCode, splits: TensorSplits) -> TensorSplits:
    """Return how a group divides a model that divides tensors along the sequence, too."""
    return _Walk(code, splits).run()


class _Walk:
    """One walk through the calls, from the sums on."""

    def __init__(self, code: SplitCode, splits: TensorSplits) -> None:
        self._code, self._splits = code, splits
        self._layouts: dict[int, Split] = {}
        self._shapes_of_views: dict[int, tuple[int, ...]] = {}
        for calls in splits.calls:
            for call in calls:
                op = call.op
                if op.kind in _RESHAPES and len(op.outputs) == 1 and op.reads:
                    shape = tuple(code.values[op.outputs[0][1]].shape)
                    self._shapes_of_views.setdefault(op.reads[0], shape)

    def run(self) -> TensorSplits:
        """Return the calls with their new layouts."""
        calls = tuple(tuple(map(self._visit, found)) for found in self._splits.calls)
        return replace(
            self._splits,
            calls=calls,
            layouts={**self._splits.layouts, **self._layouts},
            sequences=frozenset(self._layouts),
        )

    def _visit(self, call: SplitOp) -> SplitOp:
        if call.local is not None:
            return self._summed(call, call.local)
        op = as_function(call.op)
        refs = refs_of_call(op)
        layouts: dict[Ref, Layout] = {
            ref: self._layouts.get(ref.index) if isinstance(ref, Value) else None for ref in refs
        }
        rule = rule_of(op)
        if rule is None or all(layout is None for layout in layouts.values()):
            return call
        if any(isinstance(r, Value) and self._code.values[r.index].flexible for r in refs):
            return call
        made = [row for _, row in (*op.outputs, *op.writes)]
        shapes = [tuple(self._code.values[row].shape) for _, row in op.outputs or op.writes]
        try:
            local = rule(
                Situation(
                    op=op,
                    layouts=layouts,
                    shapes={ref: self._shape(ref) for ref in refs},
                    results=tuple(shapes),
                    degree=self._splits.degree,
                )
            )
        except CannotSplitError:
            return call
        results = local.made * len(made) if len(local.made) == 1 else local.made
        self._layouts.update(
            (row, layout) for row, layout in zip(made, results, strict=True) if layout is not None
        )
        return SplitOp(op=op, local=local)

    def _summed(self, call: SplitOp, local: Local) -> SplitOp:
        """Return a call whose sum over the group is left in parts, where that can be."""
        op = call.op
        fits = local.ends and local.make is not None and op.kind.strip("_") in _ENDS
        if not fits or len(op.outputs) != 1 or op.writes:
            return call
        row = op.outputs[0][1]
        split = self._sequence(row)
        if split is None or not _is_added_by_rows(op, self._shape):
            return call
        self._layouts[row] = split
        return SplitOp(op=op, local=replace(local, made=(split,), make=_scattering(local, split)))

    def _sequence(self, row: int) -> Split | None:
        """Return how a sum is divided: its longest dimension but the last, in equal parts.

        Where samples and places are joined to one dimension, the places of each sample are.
        """
        info, degree = self._code.values[row], self._splits.degree
        shape = tuple(info.shape)
        if info.flexible:
            return None
        if len(shape) == 2:
            seen = self._shapes_of_views.get(row, ())
            if len(seen) != 3 or seen[-1] != shape[-1] or seen[0] * seen[1] != shape[0]:
                return None
            inner = seen[1] if seen[1] % degree == 0 else 0
            return Split(0, (inner,) * seen[0]) if inner else None
        fits = [dim for dim, size in enumerate(shape[:-1]) if size % degree == 0]
        if not fits:
            return None
        dim = max(fits, key=lambda dim: (shape[dim], dim))
        return Split(dim, (shape[dim],))

    def _shape(self, ref: Ref) -> tuple[int, ...]:
        if isinstance(ref, Value):
            return tuple(self._code.values[ref.index].shape)
        if isinstance(ref, Param):
            return tuple(self._code.parameters[ref.name].shape)
        assert isinstance(ref, Const)
        return tuple(self._code.constants[ref.index].shape)


def _scattering(local: Local, split: Split) -> Callable[[TensorGroup], Callable[..., Any]]:
    make = local.make
    assert make is not None
    # Whoever is in ``_ENDS`` asks the group for its ranks, and hands it to ``reduce``.
    return lambda group: make(ScatteringGroup(group, split))  # type: ignore[arg-type]


def _is_added_by_rows(op: CapturedOp, shape: Callable[[Ref], tuple[int, ...]]) -> bool:
    """Return whether what is added to a product is the same for all rows."""
    if op.kind.strip("_") != "addmm":
        return True
    added = op.args[0]
    sizes = shape(added) if isinstance(added, Ref) else ()
    return len(sizes) < 2 or sizes[0] == 1
