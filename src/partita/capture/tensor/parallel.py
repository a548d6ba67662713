"""Which ops of a captured model a tensor-parallel group divides, found from the graph alone.

Every tensor is replicated or split (``Split``). A region of split tensors begins at a product with
a parameter, whose columns are split, and goes on through whatever can be computed part by part
(``rules``): element by element, by heads, by batches. It ends where a sum over the split
dimension makes whole tensors again: at a product whose rows are split, or at the loss. Tables of
embeddings are split by rows where the model's own inputs index them.

All products are tried. Where an op on the way needs a whole tensor, the products it depends on are
split in the blocks that the op asks for, or not at all, and everything is tried again until nothing
is in the way; what stays replicated and why is kept for people to read.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn

from partita.capture.op import CapturedOp, ModuleCall, ValueInfo, refs_in
from partita.capture.splits import Split
from partita.capture.stages import Code
from partita.capture.tensor.rules import (
    SEEDS,
    CannotSplitError,
    Layout,
    Local,
    Situation,
    kind_of_dimension,
    rule_of,
)
from partita.capture.tree import Const, Param, Ref, Value

_LEAST_ROWS = 16
"""Rows for each rank below which a table of embeddings is not worth a sum."""


class SplitCode(Code, Protocol):
    """The part of a captured model that is divided."""

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Parameters and buffers by name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOp:
    """A call as the ranks of a group run it.

    Attributes:
        op: The call.
        local: How a rank runs it; None = as it is, on whole tensors.
    """

    op: CapturedOp
    local: Local | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """A product at which a region of split tensors may begin.

    Attributes:
        op: Name of the op of the graph.
        parameter: The parameter that is split.
        kind: Function that is called.
        blocks: In which blocks; None = it is not split.
        tried: Blocks that did not do.
        reason: Why it is not split: the function that needs it whole, and what for.
    """

    op: str
    parameter: str
    kind: str
    blocks: tuple[int, ...] | None
    tried: frozenset[tuple[int, ...]] = frozenset()
    reason: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorSplits:
    """How a group of some size divides a captured model.

    Attributes:
        degree: Number of ranks.
        calls: The calls of each op of the graph, by op.
        layouts: How each tensor is held, by row; those that are not here are replicated.
        parameters: The parameters that are held split, by name.
        seeds: Products with parameters by op and call, split or not.
        sequences: Tensors that are split along the sequence, by row; none without sequence
            parallelism.
    """

    degree: int
    calls: tuple[tuple[SplitOp, ...], ...]
    layouts: Mapping[int, Split]
    parameters: Mapping[str, Split]
    seeds: Mapping[tuple[int, int], Seed]
    sequences: frozenset[int] = frozenset()

    def notes(self) -> list[str]:
        """Return what is split and what is not, for people."""
        where = {"columns": 0, "rows": 0, "tables": 0}
        why: dict[str, list[str]] = {}
        for (index, place), seed in self.seeds.items():
            local = self.calls[index][place].local
            if local is None:
                why.setdefault(seed.reason, []).append(seed.parameter)
            elif seed.kind == "embedding":
                where["tables"] += 1
            else:
                where["rows" if local.ends else "columns"] += 1
        lines = [
            f"tensor parallel over {self.degree}: {where['columns']} products split by columns, "
            f"{where['rows']} by rows, {where['tables']} tables of embeddings by rows; "
            f"{len(self.parameters)} parameters are held split"
        ]
        for reason, names in why.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"replicated: {names[0]}{more}: {reason}")
        return lines


def split_tensors(code: SplitCode, degree: int) -> TensorSplits:
    """Return how a group of some ranks divides a captured model."""
    return _Search(code, degree).run()


class _Search:
    """The seeds of a model, tried until nothing is in the way."""

    def __init__(self, code: SplitCode, degree: int) -> None:
        self._code, self._degree = code, degree
        table = code.graph.parameters
        self._trained = dict(zip(table.names, table.trainable.tolist(), strict=True))
        self.leaves = [list(_calls(op)) for op in code.ops]
        # Parameters that are written are buffers; their shapes are those of the live tensors.
        self._shapes = {name: tuple(t.shape) for name, t in code.parameters.items()}
        self._fed = self._from_inputs()
        self.seeds: dict[tuple[int, int], Seed] = {}
        for index, calls in enumerate(self.leaves):
            for place, op in enumerate(calls):
                seed = self._seed(index, op)
                if seed is not None:
                    self.seeds[index, place] = seed

    def _from_inputs(self) -> set[int]:
        """Return the tensors that are inputs of the model, or those moved about."""
        found = {row for row, info in enumerate(self._code.values) if info.op < 0}
        found &= set(range(len(self._code.graph.tensors)))
        for calls in self.leaves:
            for op in calls:
                if op.reads and found.issuperset(op.reads):
                    found.update(op.makes)
        return found

    def _seed(self, index: int, op: CapturedOp) -> Seed | None:
        op = as_function(op)
        parameter = SEEDS[op.kind](op) if op.kind in SEEDS else None
        if not isinstance(parameter, Param) or rule_of(op) is None:
            return None
        shape = self._shapes[parameter.name]
        if len(shape) != 2:
            return None
        size = shape[kind_of_dimension(op)]
        blocks: tuple[int, ...] | None = (size,)
        reason = ""
        if size < self._degree:
            blocks, reason = None, f"{size} cannot be divided by {self._degree}"
        elif op.kind == "embedding":
            indices = op.args[0] if op.args else op.kwargs.get("input")
            # The norm's own kind, a number in the middle, says nothing where there is no norm.
            given = op.args[3:4] + op.args[5:]
            options = [*given, *(op.kwargs.get(k) for k in _TABLE_OPTIONS)]
            if not isinstance(indices, Value) or indices.index not in self._fed:
                blocks, reason = None, "its table is not read by inputs of the model"
            elif size < _LEAST_ROWS * self._degree:
                blocks, reason = None, f"a table of {size} rows is too small"
            elif any(options):
                blocks, reason = None, "its table has options that need all rows"
        return Seed(
            op=self._code.graph.ops.names[index],
            parameter=parameter.name,
            kind=op.kind,
            blocks=blocks,
            reason=reason,
        )

    def run(self) -> TensorSplits:
        """Try until nothing is in the way."""
        while True:
            attempt = _Attempt(self, self._code, self._degree)
            attempt.run()
            if not attempt.blames:
                return attempt.result(self._stored(attempt))
            for key, error in attempt.blames.items():
                self.seeds[key] = self._changed(self.seeds[key], error)

    def _changed(self, seed: Seed, error: CannotSplitError) -> Seed:
        """Return a seed that avoids what was in the way."""
        assert seed.blocks is not None
        size, tried = sum(seed.blocks), seed.tried | {seed.blocks}
        wishes = [error.blocks] if sum(error.blocks) == size else []
        if error.count > 1 and size % error.count == 0:
            wishes.append((size // error.count,) * error.count)
        for blocks in wishes:
            if blocks not in tried and all(n % self._degree == 0 for n in blocks):
                return replace(seed, blocks=blocks, tried=tried)
        return replace(seed, blocks=None, tried=tried, reason=str(error))

    def _stored(self, attempt: "_Attempt") -> dict[str, Split]:
        """Return the parameters that all of their ops need split in the same way."""
        found: dict[str, set[Layout]] = {}
        for ref, layout in attempt.uses:
            found.setdefault(ref.name, set()).add(layout)
        return {
            name: split
            for name, layouts in found.items()
            if len(layouts) == 1 and (split := next(iter(layouts))) is not None
        }

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Return the whole shape of a tensor."""
        if isinstance(ref, Value):
            return tuple(self._code.values[ref.index].shape)
        if isinstance(ref, Param):
            return self._shapes[ref.name]
        assert isinstance(ref, Const)
        return tuple(self._code.constants[ref.index].shape)


_TABLE_OPTIONS = ("max_norm", "scale_grad_by_freq", "sparse")


def _calls(op: CapturedOp) -> Iterator[CapturedOp]:
    """Yield the calls of an op; one that keeps copies for its calls stays as it is."""
    if not op.parts or op.owned:
        yield op
        return
    for part in op.parts:
        yield from _calls(part)


def as_function(op: CapturedOp) -> CapturedOp:
    """Return the call of a plain module as a call of its function; others as they are."""
    if not isinstance(op.func, ModuleCall) or op.kwargs:
        return op
    held, args, kwargs = op.args
    module = op.func.module
    make = _FUNCTIONS.get(type(module))
    hooks = (module._forward_hooks, module._forward_pre_hooks)  # noqa: SLF001 (torch has no other)
    if make is None or kwargs or any(hooks) or len(args) != 1 or op.writes:
        return op
    kind, func, found = make(module, args[0], held)
    return replace(op, kind=kind, func=func, args=found, kwargs={})


_FUNCTIONS: Mapping[type, Callable[[Any, Ref, Mapping[str, Any]], tuple[str, Any, tuple[Any, ...]]]]
_FUNCTIONS = {
    nn.Linear: lambda m, x, held: ("linear", F.linear, (x, held["weight"], held.get("bias"))),
    nn.Embedding: lambda m, x, held: (
        "embedding",
        F.embedding,
        (x, held["weight"], m.padding_idx, m.max_norm, m.norm_type, m.scale_grad_by_freq, m.sparse),
    ),
    nn.LayerNorm: lambda m, x, held: (
        "layer_norm",
        F.layer_norm,
        (x, m.normalized_shape, held.get("weight"), held.get("bias"), m.eps),
    ),
    nn.Dropout: lambda m, x, held: ("dropout", F.dropout, (x, m.p, m.training)),
    nn.ReLU: lambda m, x, held: ("relu", F.relu, (x,)),
    nn.SiLU: lambda m, x, held: ("silu", F.silu, (x,)),
    nn.Tanh: lambda m, x, held: ("tanh", torch.tanh, (x,)),
    nn.GELU: lambda m, x, held: ("gelu", partial(F.gelu, approximate=m.approximate), (x,)),
}
"""Modules that do no more than call a function: its name, the function and its arguments."""


@dataclass
class _Attempt:
    """One walk through the graph, with the seeds as they are."""

    search: _Search
    code: SplitCode
    degree: int
    layouts: dict[int, Split] = field(default_factory=dict)
    origins: dict[int, frozenset[tuple[int, int]]] = field(default_factory=dict)
    uses: list[tuple[Param, Layout]] = field(default_factory=list)
    blames: dict[tuple[int, int], CannotSplitError] = field(default_factory=dict)
    calls: list[tuple[SplitOp, ...]] = field(default_factory=list)

    @cached_property
    def _infos(self) -> tuple[ValueInfo, ...]:
        return self.code.values

    def run(self) -> None:
        """Walk through all ops."""
        for index, leaves in enumerate(self.search.leaves):
            self.calls.append(
                tuple(self._visit((index, place), op) for place, op in enumerate(leaves))
            )

    def _visit(self, key: tuple[int, int], op: CapturedOp) -> SplitOp:
        original, op = op, as_function(op)
        refs = refs_of_call(op)
        layouts: dict[Ref, Layout] = {
            ref: self.layouts.get(ref.index) if isinstance(ref, Value) else None for ref in refs
        }
        seed = self.search.seeds.get(key)
        blocks = seed.blocks if seed is not None else None
        local = None
        if blocks is not None or any(split is not None for split in layouts.values()):
            local = self._local(key, op, layouts, blocks)
        made = [Value(row) for _, row in op.outputs] + [Value(row) for _, row in op.writes]
        if local is not None:
            origins = frozenset().union(
                *(self.origins.get(r.index, frozenset()) for r in refs if isinstance(r, Value))
            )
            if blocks is not None:
                origins |= {key}
            results = local.made * len(made) if len(local.made) == 1 else local.made
            for value, layout in zip(made, results, strict=True):
                if layout is not None:
                    self.layouts[value.index], self.origins[value.index] = layout, origins
        for ref in refs:
            if isinstance(ref, Param):
                self.uses.append((ref, None if local is None else local.wanted.get(ref)))
        return SplitOp(op=original if local is None else op, local=local)

    def _local(
        self,
        key: tuple[int, int],
        op: CapturedOp,
        layouts: Mapping[Ref, Layout],
        blocks: tuple[int, ...] | None,
    ) -> Local | None:
        """Return how a rank runs an op; None where it cannot, and those in the way are known."""
        at = Situation(
            op=op,
            layouts=layouts,
            shapes={ref: self.search.shape(ref) for ref in layouts},
            results=tuple(tuple(self._infos[row].shape) for _, row in op.outputs)
            or tuple(tuple(self._infos[row].shape) for _, row in op.writes),
            degree=self.degree,
            seed=blocks,
        )
        try:
            rule = rule_of(op)
            if rule is None:
                raise CannotSplitError("there is no rule for it")
            if any(isinstance(r, Value) and self._infos[r.index].flexible for r in layouts):
                raise CannotSplitError("shapes depend on data")
            return rule(at)
        except CannotSplitError as error:
            said = CannotSplitError(
                f"{op.kind.strip('_')} needs it whole, as {error}",
                blocks=error.blocks,
                count=error.count,
            )
            guilty = [
                origin
                for ref, layout in layouts.items()
                if layout is not None and isinstance(ref, Value)
                for origin in self.origins[ref.index]
            ]
            if not guilty and blocks is not None:
                guilty = [key]
            for origin in guilty:
                self.blames.setdefault(origin, said)
            return None

    def result(self, stored: Mapping[str, Split]) -> TensorSplits:
        """Return what was found."""
        return TensorSplits(
            degree=self.degree,
            calls=tuple(self.calls),
            layouts=self.layouts,
            parameters=stored,
            seeds=dict(self.search.seeds),
        )


def refs_of_call(op: CapturedOp) -> list[Ref]:
    """Return the tensors that a call reads, each once."""
    if not op.parts:
        return refs_in((op.args, dict(op.kwargs)))
    found: list[Ref] = [Value(row) for row in op.reads]
    found += [Param(name) for name in op.parameters]
    return found
