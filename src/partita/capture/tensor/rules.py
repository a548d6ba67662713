"""How one op runs when some of the tensors that it reads are split: a rule for each function.

A rule says which layout the op needs of every tensor, which layout its results have, and what a
rank calls. It raises ``CannotSplitError`` where the op needs the whole tensor; then what was split
is not split, or split in other blocks, if the rule knows which would do.

Sizes that were baked into arguments (views, expansions, sections) are written anew from the shapes
of the capture.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from partita.capture.op import CapturedOp, refs_in
from partita.capture.splits import Split
from partita.capture.tensor.ops import (
    TensorGroup,
    mean_of,
    reduced,
    row_addmm,
    row_linear,
    split_attention,
    split_cross_entropy,
    split_dropout,
    split_embedding,
)
from partita.capture.tree import Param, Ref

Layout: TypeAlias = Split | None
"""How a tensor is held by the ranks of a group; None = each has all of it."""
MakeFunction: TypeAlias = Callable[[TensorGroup], Callable[..., Any]]


class CannotSplitError(Exception):
    """An op needs a tensor whole, or split in other blocks.

    Attributes:
        blocks: Sizes of blocks of the same dimension that would do; empty = not known.
        count: Number of equal blocks of the projection that would do; 0 = not known.
    """

    def __init__(self, reason: str, *, blocks: Sequence[int] = (), count: int = 0) -> None:
        super().__init__(reason)
        self.blocks, self.count = tuple(blocks), count


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """How a rank runs an op.

    Attributes:
        made: Layout of each of its results, in the order of ``CapturedOp.outputs``; one for all of
            them where there is one.
        wanted: Layouts that it needs; tensors that are not here are needed whole.
        make: Makes the function that is called instead; None = the op's own.
        args: Arguments that are given instead; None = the op's own.
        kwargs: Likewise by name.
        ends: Whether a region of split tensors ends here with a sum.
    """

    made: tuple[Layout, ...] = (None,)
    wanted: Mapping[Ref, Layout] = field(default_factory=dict)
    make: MakeFunction | None = None
    args: tuple[Any, ...] | None = None
    kwargs: Mapping[str, Any] | None = None
    ends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """An op and the tensors around it.

    Attributes:
        op: The op.
        layouts: Layouts of the tensors that it reads.
        shapes: Whole shapes of the tensors that it reads.
        results: Whole shapes of what it makes, in the order of ``CapturedOp.outputs``.
        degree: Number of ranks.
        seed: Blocks by which a product with a parameter is split; None = it is not.
    """

    op: CapturedOp
    layouts: Mapping[Ref, Layout]
    shapes: Mapping[Ref, tuple[int, ...]]
    results: tuple[tuple[int, ...], ...]
    degree: int
    seed: tuple[int, ...] | None = None

    def argument(self, place: int, name: str, default: Any = None) -> Any:  # noqa: ANN401  # any
        """Return an argument by place or name."""
        if place < len(self.op.args):
            return self.op.args[place]
        return self.op.kwargs.get(name, default)

    def layout(self, value: object) -> Layout:
        """Return the layout of an argument."""
        return self.layouts.get(value) if isinstance(value, Ref) else None

    @property
    def first(self) -> Ref:
        """The tensor that stands first among the arguments."""
        found = self.argument(0, "input")
        if not isinstance(found, Ref):
            raise CannotSplitError("its first argument is no tensor")
        return found

    @property
    def first_split(self) -> Split:
        """Layout of the first tensor, which alone may be split."""
        first = self.first
        if any(s is not None for ref, s in self.layouts.items() if ref != first):
            raise CannotSplitError("another argument is split")
        split = self.layouts[first]
        assert split is not None
        return split


Rule: TypeAlias = Callable[[Situation], Local]

_POINTWISE = frozenset(
    [
        "add",
        "sub",
        "rsub",
        "subtract",
        "mul",
        "rmul",
        "multiply",
        "div",
        "rdiv",
        "truediv",
        "rtruediv",
        "divide",
        "true_divide",
        "neg",
        "negative",
        "pow",
        "rpow",
        "exp",
        "expm1",
        "log",
        "log1p",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "abs",
        "tanh",
        "sigmoid",
        "relu",
        "relu6",
        "gelu",
        "silu",
        "mish",
        "elu",
        "leaky_relu",
        "softplus",
        "hardtanh",
        "hardswish",
        "hardsigmoid",
        "logsigmoid",
        "sin",
        "cos",
        "erf",
        "clamp",
        "clamp_min",
        "clamp_max",
        "clip",
        "where",
        "masked_fill",
        "maximum",
        "minimum",
        "contiguous",
        "clone",
        "detach",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_not",
        "bitwise_and",
        "bitwise_or",
        "and",
        "or",
        "invert",
        "bitwise_not",
        "floor",
        "ceil",
        "round",
        "sign",
        "square",
        "lerp",
        "addcmul",
        "addcdiv",
        "nan_to_num",
        "positive",
        "isnan",
        "isinf",
        "iadd",
        "imul",
        "isub",
        "itruediv",
        "identity",
        "alias",
        "zeros_like",
        "ones_like",
        "full_like",
    ]
)
_CASTS = frozenset(["to", "float", "half", "bfloat16", "double", "type", "type_as"])
_MOVES = frozenset(
    [
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "swapaxes",
        "swapdims",
        "movedim",
        "moveaxis",
        "t",
    ]
)
_RESHAPES = frozenset(["view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel"])


def _pointwise(at: Situation) -> Local:
    """Element by element: all operands are split alike; those that are repeated stay whole."""
    (out,) = at.results
    target: Split | None = None
    for ref, split in at.layouts.items():
        if split is not None:
            here = split.at(split.dim + len(out) - len(at.shapes[ref]))
            if target is not None and here != target:
                raise CannotSplitError("its operands are split in different ways")
            target = here
    assert target is not None
    wanted: dict[Ref, Layout] = {}
    for ref, shape in at.shapes.items():
        dim = target.dim - (len(out) - len(shape))
        wanted[ref] = target.at(dim) if dim >= 0 and shape[dim] == out[target.dim] else None
        if wanted[ref] is None and at.layouts[ref] is not None:
            raise CannotSplitError("an operand is repeated along what is split")
    if any(wanted.get(ref) != at.layouts.get(ref) for ref, _ in at.op.writes):
        raise CannotSplitError("it writes a tensor in place that is not split")
    return Local(made=(target,), wanted=wanted)


def _cast(at: Situation) -> Local:
    split = at.layouts[at.first]
    if split is None:
        raise CannotSplitError("the tensor whose type it takes is split")
    # Of a second tensor it takes the type only: that may stay as it is.
    return Local(made=(split,), wanted=dict(at.layouts))


def _dropout(at: Situation) -> Local:
    split = at.first_split
    p = at.argument(1, "p", 0.5)
    training = at.argument(2, "training", at.op.kwargs.get("train", True))
    return Local(
        made=(split,),
        wanted={at.first: split},
        make=split_dropout(at.shapes[at.first], split),
        args=(at.first, p, training),
        kwargs={},
    )


def _move(at: Situation) -> Local:
    """Dimensions change places: where the split one goes is seen on a tensor without memory."""
    split = at.first_split
    shape = split.shape(at.shapes[at.first], 0, at.degree)
    args = [torch.empty(shape, device="meta") if a == at.first else a for a in at.op.args]
    kwargs = {
        name: torch.empty(shape, device="meta") if a == at.first else a
        for name, a in at.op.kwargs.items()
    }
    made, (out,) = tuple(at.op.func(*args, **kwargs).shape), at.results
    changed = [d for d, (a, b) in enumerate(zip(made, out, strict=False)) if a != b]
    if len(made) != len(out) or len(changed) != 1:
        raise CannotSplitError("the place of what is split is not clear")
    return Local(made=(split.at(changed[0]),), wanted={at.first: split})


def _reshape(at: Situation) -> Local:
    split, (out,) = at.first_split, at.results
    made = reshaped(split, at.shapes[at.first], out, at.degree)
    return Local(
        made=(made,),
        wanted={at.first: split},
        make=lambda group: lambda x: x.reshape(made.shape(out, group.rank, group.size)),
        args=(at.first,),
        kwargs={},
    )


def reshaped(split: Split, before: tuple[int, ...], after: tuple[int, ...], degree: int) -> Split:
    """Return how a tensor is split after its dimensions are joined and parted.

    Raises:
        CannotSplitError: Parts of ranks are not whole numbers of rows there; says which number of
            blocks would make them so.
    """
    old, new = _same_elements(split.dim, before, after)
    if len(old) == 1 and len(new) == 1:
        return split.at(new[0])
    if len(set(split.blocks)) > 1:
        raise CannotSplitError("blocks of different sizes are reshaped")
    # The elements of these dimensions, in order: so many blocks, each of so many elements.
    ahead = math.prod(before[d] for d in old if d < split.dim)
    blocks = ahead * len(split.blocks)
    lead = 1
    requests = []
    for dim in new:
        count, rest = divmod(blocks, lead)
        if not rest and after[dim] % count == 0 and (after[dim] // count) % degree == 0:
            return Split(dim, (after[dim] // count,) * count)
        if lead > blocks and after[dim] % degree == 0 and lead % ahead == 0:
            requests.append(lead // ahead)
        lead *= after[dim]
    raise CannotSplitError(
        f"its {list(before)} become {list(after)}, which {degree} ranks cannot divide",
        count=requests[0] if requests else 0,
    )


def _same_elements(
    dim: int, before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """Return the least sets of neighbouring dimensions around one that hold the same elements."""
    i = j = 0
    while i < len(before) or j < len(after):
        old, new = [i], [j]
        a = before[i] if i < len(before) else 1
        b = after[j] if j < len(after) else 1
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a *= before[i]
                old.append(i)
                i += 1
            else:
                b *= after[j]
                new.append(j)
                j += 1
        if dim in old:
            return old, [d for d in new if d < len(after)]
    raise CannotSplitError("the place of what is split is not clear")


def _expand(at: Situation) -> Local:
    split, (out,) = at.first_split, at.results
    made = split.at(split.dim + len(out) - len(at.shapes[at.first]))
    return Local(
        made=(made,),
        wanted={at.first: split},
        make=lambda group: lambda x: x.expand(made.shape(out, group.rank, group.size)),
        args=(at.first,),
        kwargs={},
    )


def _getitem(at: Situation) -> Local:
    split, shape = at.first_split, at.shapes[at.first]
    index = at.op.args[1]
    items = list(index) if isinstance(index, tuple) else [index]
    if refs_in(items) or any(isinstance(item, bool | list) for item in items):
        raise CannotSplitError("it is indexed by a tensor")
    given = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    place = items.index(Ellipsis)
    items[place : place + 1] = [slice(None)] * (len(shape) - given)
    dim = made = 0
    for place, item in enumerate(items):
        if item is None:
            made += 1
            continue
        if dim == split.dim:
            return _indexed(at, split, items, place, made)
        dim += 1
        made += not isinstance(item, int)
    raise CannotSplitError("the place of what is split is not clear")


def _indexed(at: Situation, split: Split, items: list[Any], place: int, made: int) -> Local:
    """Index the split dimension, at a place of the index, by all of it or by whole blocks."""
    size, item = at.shapes[at.first][split.dim], items[place]
    if isinstance(item, slice) and item.indices(size) == (0, size, 1):
        return Local(made=(split.at(made),), wanted={at.first: split})
    if isinstance(item, slice) and item.indices(size)[2] == 1:
        begin, end, _ = item.indices(size)
        ends = [sum(split.blocks[:n]) for n in range(len(split.blocks) + 1)]
        if begin in ends and end in ends and begin < end:
            first, last = ends.index(begin), ends.index(end)

            def make(group: TensorGroup) -> Callable[..., Any]:
                before, until = (
                    Split(0, split.blocks[:n]).length(group.rank, group.size) for n in (first, last)
                )
                index = (*items[:place], slice(before, until), *items[place + 1 :])
                return lambda x: x[index]

            return Local(
                made=(Split(made, split.blocks[first:last]),),
                wanted={at.first: split},
                make=make,
                args=(at.first,),
                kwargs={},
            )
        raise CannotSplitError(
            "a section of what is split is read",
            blocks=[n for n in (begin, end - begin, size - end) if n],
        )
    raise CannotSplitError("one entry of what is split is read", count=size * len(split.blocks))


def _sections(at: Situation) -> Local:
    """``split``, ``chunk`` and the like: along the split dimension the sections must be blocks."""
    split = at.first_split
    name = at.op.kind.strip("_")
    rank_of = len(at.shapes[at.first])
    dim = at.argument(2 if name != "unbind" else 1, "dim", 0) % rank_of
    if name == "unbind":
        if dim == split.dim:
            raise CannotSplitError(
                "entries of what is split are read", count=split.size * len(split.blocks)
            )
        made = split.at(split.dim - (dim < split.dim))
        return Local(made=(made,) * len(at.results), wanted={at.first: split})
    if dim != split.dim:
        return Local(made=(split,) * len(at.results), wanted={at.first: split})
    sizes = _section_sizes(at, dim, split.size)
    ends = [sum(split.blocks[:n]) for n in range(len(split.blocks) + 1)]
    layouts: list[Split] = []
    start = 0
    for size in sizes:
        if start not in ends or start + size not in ends:
            raise CannotSplitError("sections of what is split are read", blocks=sizes)
        layouts.append(Split(dim, split.blocks[ends.index(start) : ends.index(start + size)]))
        start += size

    def make(group: TensorGroup) -> Callable[..., Any]:
        lengths = [part.length(group.rank, group.size) for part in layouts]
        return lambda x: torch.split(x, lengths, dim)

    places = [place for place, _ in at.op.outputs]
    return Local(
        made=tuple(layouts[place] for place in places),
        wanted={at.first: split},
        make=make,
        args=(at.first,),
        kwargs={},
    )


def _section_sizes(at: Situation, dim: int, whole: int) -> list[int]:
    """Return the sizes of all sections, those that nobody reads included."""
    del dim
    name = at.op.kind.strip("_")
    if name == "chunk":
        step = -(-whole // int(at.argument(1, "chunks")))
    else:
        given = at.argument(1, "split_size_or_sections", at.op.kwargs.get("split_size"))
        if isinstance(given, list | tuple):
            return [int(size) for size in given]
        step = int(given)
    return [min(step, whole - begin) for begin in range(0, whole, step)]


def _cat(at: Situation) -> Local:
    tensors = at.argument(0, "tensors")
    if not isinstance(tensors, list | tuple) or not all(isinstance(t, Ref) for t in tensors):
        raise CannotSplitError("not all that it joins are tensors")
    if at.op.kind.strip("_") != "stack":
        # torch lets empty tensors without dimensions join anything, as caches of keys begin.
        tensors = [ref for ref in tensors if at.shapes[ref] != (0,)]
    found = {split for ref in tensors if (split := at.layouts[ref]) is not None}
    dim = at.argument(1, "dim", 0) % len(at.results[0])
    if len({split.dim for split in found}) > 1:
        raise CannotSplitError("its operands are split in different ways")
    split = next(iter(found))
    if at.op.kind.strip("_") == "stack":
        if len(found) > 1:
            raise CannotSplitError("its operands are split in different ways")
        made = split.at(split.dim + (dim <= split.dim))
        return Local(made=(made,), wanted=dict.fromkeys(tensors, split))
    if dim == split.dim:
        layouts = [at.layouts[ref] for ref in tensors]
        if any(layout is None for layout in layouts):
            raise CannotSplitError("it joins what is split to what is not")
        blocks = tuple(n for layout in layouts if layout is not None for n in layout.blocks)
        return Local(made=(Split(dim, blocks),), wanted=dict(zip(tensors, layouts, strict=True)))
    if len(found) > 1:
        raise CannotSplitError("its operands are split in different ways")
    return Local(made=(split,), wanted=dict.fromkeys(tensors, split))


def _dims(given: object, rank: int) -> set[int]:
    dims = given if isinstance(given, list | tuple) else (given,)
    if any(not isinstance(dim, int) for dim in dims):
        return set(range(rank))
    return {dim % rank for dim in dims}


def _along(at: Situation) -> Local:
    """Functions along a dimension, such as ``softmax``, that is not the split one."""
    split, shape = at.first_split, at.shapes[at.first]
    if split.dim in _dims(at.argument(1, "dim"), len(shape)):
        raise CannotSplitError("it runs along what is split")
    return Local(made=(split,), wanted={at.first: split})


def _reduction(at: Situation) -> Local:
    split, shape = at.first_split, at.shapes[at.first]
    dims = _dims(at.argument(1, "dim"), len(shape))
    keeps = len(at.results[0]) == len(shape)
    if split.dim not in dims:
        made = split.at(split.dim - (0 if keeps else sum(dim < split.dim for dim in dims)))
        return Local(made=(made,) * len(at.results), wanted={at.first: split})
    name = at.op.kind.strip("_")
    if name == "sum":
        return Local(wanted={at.first: split}, make=reduced(at.op.func), ends=True)
    if name == "mean":
        count = math.prod(shape[dim] for dim in dims)
        return Local(wanted={at.first: split}, make=mean_of(count), ends=True)
    raise CannotSplitError("it runs along what is split")


def _norm(at: Situation) -> Local:
    split, shape = at.first_split, at.shapes[at.first]
    normalised = at.argument(1, "normalized_shape")
    if split.dim >= len(shape) - len(normalised):
        raise CannotSplitError("it normalises over what is split")
    return Local(made=(split,), wanted={at.first: split})


def _linear(at: Situation) -> Local:
    x, weight, bias = (at.argument(n, name) for n, name in enumerate(("input", "weight", "bias")))
    shape = at.shapes[x]
    last = len(shape) - 1
    split = at.layouts[x]
    if any(at.layout(other) is not None for other in (weight, bias)):
        raise CannotSplitError("its weights are split by an op")
    if split is None:
        if at.seed is None:
            return Local()
        made = Split(last, at.seed)
        wanted: dict[Ref, Layout] = {weight: made.at(0)}
        if isinstance(bias, Ref):
            wanted[bias] = made.at(0)
        return Local(made=(made,), wanted=wanted)
    if split.dim == last:
        return Local(
            wanted={x: split, weight: split.at(1)},
            make=row_linear,
            args=(x, weight, bias),
            kwargs={},
            ends=True,
        )
    return Local(made=(split,), wanted={x: split})


def _addmm(at: Situation) -> Local:
    if len(at.op.args) != 3 or at.op.kwargs:
        raise CannotSplitError("it has factors")
    bias, x, weight = at.op.args
    if at.layout(weight) is not None or at.layout(bias) is not None:
        raise CannotSplitError("its weights are split by an op")
    split = at.layouts[x]
    if split is None:
        if at.seed is None:
            return Local()
        made = Split(1, at.seed)
        whole = at.shapes[bias]
        columns = Split(len(whole) - 1, at.seed) if whole and whole[-1] > 1 else None
        return Local(made=(made,), wanted={weight: made, bias: columns})
    if split.dim == 1:
        return Local(wanted={x: split, weight: split.at(0)}, make=row_addmm, ends=True)
    whole = at.shapes[bias]
    rows = split if len(whole) == 2 and whole[0] > 1 else None
    return Local(made=(split,), wanted={x: split, bias: rows})


def _matmul(at: Situation) -> Local:
    """Products of matrices, also of many at a time."""
    a, b = at.argument(0, "input"), at.argument(1, "other", at.op.kwargs.get("mat2"))
    if not (isinstance(a, Ref) and isinstance(b, Ref)) or a == b:
        raise CannotSplitError("its operands are no two tensors")
    (out,) = at.results
    shape_a, shape_b = at.shapes[a], at.shapes[b]
    split_a, split_b = at.layouts[a], at.layouts[b]
    if min(len(shape_a), len(shape_b)) < 2:
        raise CannotSplitError("it is a product with a vector")
    if split_a is None and split_b is None:
        if at.seed is None or not isinstance(b, Param) or len(shape_b) != 2:
            return Local()
        made = Split(len(out) - 1, at.seed)
        return Local(made=(made,), wanted={b: made.at(1)})
    summed_a, summed_b = len(shape_a) - 1, len(shape_b) - 2
    inner = [s for s, d in ((split_a, summed_a), (split_b, summed_b)) if s and s.dim == d]
    if inner:
        here = {a: inner[0].at(summed_a), b: inner[0].at(summed_b)}
        if any(at.layouts[ref] not in (None, wanted) for ref, wanted in here.items()):
            raise CannotSplitError("its operands are split in different ways")
        return Local(wanted=here, make=reduced(at.op.func), ends=True)
    if split_a is not None and split_a.dim == len(shape_a) - 2:
        if split_b is not None:
            raise CannotSplitError("its operands are split in different ways")
        return Local(made=(split_a.at(len(out) - 2),), wanted={a: split_a})
    if split_b is not None and split_b.dim == len(shape_b) - 1:
        if split_a is not None:
            raise CannotSplitError("its operands are split in different ways")
        return Local(made=(split_b.at(len(out) - 1),), wanted={b: split_b})
    return _batched(at, (a, b), out)


def _batched(at: Situation, operands: Sequence[Ref], out: tuple[int, ...]) -> Local:
    """Operands that are split along a dimension in front, which they share."""
    found = {
        split.at(split.dim + len(out) - len(at.shapes[ref]))
        for ref in operands
        if (split := at.layouts[ref]) is not None
    }
    if len(found) > 1:
        raise CannotSplitError("its operands are split in different ways")
    target = next(iter(found))
    wanted: dict[Ref, Layout] = {}
    for ref in operands:
        shape = at.shapes[ref]
        dim = target.dim - (len(out) - len(shape))
        if dim >= 0 and shape[dim] == out[target.dim]:
            wanted[ref] = target.at(dim)
    return Local(made=(target,), wanted=wanted)


def _baddbmm(at: Situation) -> Local:
    if len(at.op.args) < 3:
        raise CannotSplitError("its operands are given by name")
    added, a, b = at.op.args[:3]
    (out,) = at.results
    for ref, dim in ((a, 0), (b, 0), (added, len(at.shapes[added]) - 3)):
        split = at.layouts[ref]
        if split is not None and split.dim != dim:
            raise CannotSplitError("not its batches are split")
    return _batched(at, (added, a, b), out)


def _einsum(at: Situation) -> Local:
    equation, tensors = at.op.args[0], list(at.op.args[1:])
    if len(tensors) == 1 and isinstance(tensors[0], list | tuple):
        tensors = list(tensors[0])
    text = equation.replace(" ", "") if isinstance(equation, str) else ""
    if "->" not in text or "." in text:
        raise CannotSplitError("its equation is not written out")
    left, made = text.split("->")
    letters = dict(zip(tensors, left.split(","), strict=True))
    found = {
        (letters[ref][split.dim], split.blocks)
        for ref in tensors
        if (split := at.layouts[ref]) is not None
    }
    if len(found) != 1:
        raise CannotSplitError("its operands are split in different ways")
    letter, blocks = next(iter(found))
    wanted: dict[Ref, Layout] = {
        ref: Split(names.index(letter), blocks) for ref, names in letters.items() if letter in names
    }
    if letter in made:
        return Local(made=(Split(made.index(letter), blocks),), wanted=wanted)
    return Local(wanted=wanted, make=reduced(at.op.func), ends=True)


def _attention(at: Situation) -> Local:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    query, key, value, mask, dropout, causal = (at.argument(n, k) for n, k in enumerate(names))
    split, shape = at.layouts[query], at.shapes[query]
    if split is None or len(shape) < 4 or split.dim not in (0, len(shape) - 3):
        raise CannotSplitError("the heads of its queries are not split")
    heads = shape[split.dim]
    wanted: dict[Ref, Layout] = {query: split}
    repeats = 0
    others = (at.layouts[key], at.layouts[value])
    here = at.shapes[key][split.dim]
    if here == heads:
        wanted |= {key: split, value: split}
    elif split.dim == 0 or any(len(s.blocks) > 1 for s in (split, *others) if s is not None):
        raise CannotSplitError("heads of keys are shared in a way that is not clear")
    elif here % at.degree == 0 and split.blocks == (heads,):
        wanted |= {key: Split(split.dim, (here,)), value: Split(split.dim, (here,))}
    elif others == (None, None):
        repeats = heads // here
    if any(layout not in (None, wanted.get(ref)) for ref, layout in at.layouts.items()
           if ref != mask):  # fmt: skip
        raise CannotSplitError("its queries, keys and values are split in different ways")
    whole = (*shape[:-1], at.shapes[key][-2])
    if isinstance(mask, Ref):
        seen = at.shapes[mask]
        dim = split.dim - (len(shape) - len(seen))
        if dim >= 0 and seen[dim] == heads:
            wanted[mask] = split.at(dim)
        elif at.layouts[mask] is not None:
            raise CannotSplitError("its mask is split in another way")
    if split.dim == 0 and dropout:
        raise CannotSplitError("its batches are split, with dropout")
    kwargs = {k: v for k, v in at.op.kwargs.items() if k in ("scale", "enable_gqa")}
    return Local(
        made=(split,),
        wanted=wanted,
        make=split_attention(split, whole, repeats),
        args=(query, key, value, mask, dropout or 0.0, bool(causal)),
        kwargs=kwargs,
    )


def _embedding(at: Situation) -> Local:
    indices, weight = at.argument(0, "input"), at.argument(1, "weight")
    if any(split is not None for split in at.layouts.values()):
        raise CannotSplitError("its numbers are split")
    if at.seed is None:
        return Local()
    rows = at.shapes[weight][0]
    return Local(
        wanted={weight: Split(0, at.seed)},
        make=split_embedding(rows),
        args=(indices, weight, at.argument(2, "padding_idx")),
        kwargs={},
        ends=True,
    )


def _cross_entropy(at: Situation) -> Local:
    logits, target = at.argument(0, "input"), at.argument(1, "target")
    split, shape = at.first_split, at.shapes[logits]
    dim = 1 if len(shape) > 1 else 0
    if split.dim != dim or len(split.blocks) > 1:
        raise CannotSplitError("not its classes are split")
    if at.argument(2, "weight") is not None or len(at.shapes[target]) == len(shape):
        raise CannotSplitError("its classes have weights or probabilities")
    old = (at.argument(3, "size_average"), at.argument(5, "reduce"))
    if old != (None, None):
        raise CannotSplitError("it is called with arguments that torch has given up")
    return Local(
        wanted={logits: split},
        make=split_cross_entropy(shape[dim]),
        args=(logits, target),
        kwargs={
            "ignore_index": at.argument(4, "ignore_index", -100),
            "reduction": at.argument(6, "reduction", "mean"),
            "label_smoothing": at.argument(7, "label_smoothing", 0.0),
        },
        ends=True,
    )


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys(_MOVES, _move),
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(("split", "chunk", "unbind", "split_with_sizes"), _sections),
    **dict.fromkeys(("cat", "concat", "stack"), _cat),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "sort"), _along),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "var", "std", "logsumexp"), _reduction),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(("matmul", "bmm", "mm", "rmatmul"), _matmul),
    "dropout": _dropout,
    "expand": _expand,
    "getitem": _getitem,
    "linear": _linear,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
}

SEEDS: Mapping[str, Callable[[CapturedOp], object]] = {
    "linear": lambda op: op.args[1] if len(op.args) > 1 else op.kwargs.get("weight"),
    "addmm": lambda op: op.args[2] if len(op.args) > 2 else None,
    "matmul": lambda op: op.args[1] if len(op.args) > 1 else None,
    "mm": lambda op: op.args[1] if len(op.args) > 1 else None,
    "embedding": lambda op: op.args[1] if len(op.args) > 1 else op.kwargs.get("weight"),
}
"""Kinds of op at which a region of split tensors may begin, with the parameter that is split."""


def rule_of(op: CapturedOp) -> Rule | None:
    """Return the rule of an op; None = it needs whole tensors."""
    if op.parts or op.changes or (op.writes and op.kind.strip("_") not in _POINTWISE):
        return None
    if op.kind == "view" and any(isinstance(a, torch.dtype) for a in op.args):
        return None
    return _RULES.get(op.kind.strip("_"))


def kind_of_dimension(op: CapturedOp) -> int:
    """Return which dimension of its parameter an op that begins a region splits."""
    return 0 if op.kind in ("linear", "embedding") else 1
