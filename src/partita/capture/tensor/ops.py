"""What the ranks of a tensor-parallel group compute together, and ops as one rank runs them.

A tensor is replicated, then its gradient is whole and equal on every rank, too; or split, then a
rank has the gradient of its part. The four moves between the two keep this so in both passes:

======== ============================== ==============================
move     forward                        backward
======== ============================== ==============================
share    nothing                        sum over the group
reduce   sum over the group             nothing
scatter  take the rank's part           gather the parts
gather   gather the parts               take the rank's part
collect  gather the parts               the rank's part of the sum
deal     the rank's part of the sum     gather the parts
======== ============================== ==============================

``share`` stands where a replicated tensor enters an op whose results are split: each rank
differentiates its own results only. ``collect`` is ``gather`` and ``share``, ``deal`` is ``reduce``
and ``scatter``, each with half of the traffic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from partita.capture.splits import Split


class TensorGroup(Protocol):
    """The ranks that divide the tensors of a stage, seen by one of them."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over all ranks, as a tensor of one's own."""
        ...

    def maximum(self, value: Tensor) -> Tensor:
        """Return the largest of all ranks, element by element, as a tensor of one's own."""
        ...

    def gather(self, value: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have one shape."""
        ...

    def sum_of_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of what all ranks have for this one, of one tensor for each rank."""
        ...


@dataclass(frozen=True)
class ScatteringGroup:
    """A group whose sums are left in parts: each rank gets its own.

    Attributes:
        group: The group.
        split: How sums are divided.
    """

    group: TensorGroup
    split: Split

    @property
    def rank(self) -> int:
        """This rank."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size


def gathered(group: TensorGroup, split: Split, part: Tensor) -> Tensor:
    """Return the whole tensor of all ranks' parts."""
    sizes = [split.length(rank, group.size) for rank in range(group.size)]
    lacks = max(sizes) - part.shape[split.dim]
    if lacks:
        pad = [0, 0] * (part.dim() - split.dim - 1) + [0, lacks]
        part = F.pad(part, pad)
    found = group.gather(part.contiguous())
    parts = [t.narrow(split.dim, 0, n) for t, n in zip(found, sizes, strict=True)]
    return split.join(parts)


def dealt(group: TensorGroup, split: Split, whole: Tensor) -> Tensor:
    """Return the rank's part of the sum of the ranks' tensors."""
    sizes = [split.length(rank, group.size) for rank in range(group.size)]
    parts = [split.take(whole, rank, group.size) for rank in range(group.size)]
    lacks = [max(sizes) - size for size in sizes]
    ahead = [0, 0] * (whole.dim() - split.dim - 1)
    padded = [
        F.pad(part, [*ahead, 0, more]) if more else part
        for part, more in zip(parts, lacks, strict=True)
    ]
    return group.sum_of_parts(padded).narrow(split.dim, 0, sizes[group.rank])


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return ctx.group.sum(gradient), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:  # noqa: ANN401
        return group.sum(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return gradient, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup, split: Split) -> Tensor:  # noqa: ANN401
        ctx.group, ctx.split = group, split
        return split.take(value, group.rank, group.size).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return gathered(ctx.group, ctx.split, gradient), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup, split: Split) -> Tensor:  # noqa: ANN401
        ctx.group, ctx.split = group, split
        return gathered(group, split, value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        group, split = ctx.group, ctx.split
        return split.take(gradient, group.rank, group.size).contiguous(), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup, split: Split) -> Tensor:  # noqa: ANN401
        ctx.group, ctx.split = group, split
        return gathered(group, split, value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return dealt(ctx.group, ctx.split, gradient), None, None


class _Deal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup, split: Split) -> Tensor:  # noqa: ANN401
        ctx.group, ctx.split = group, split
        return dealt(group, split, value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return gathered(ctx.group, ctx.split, gradient), None, None


def share(value: Tensor, group: TensorGroup) -> Tensor:
    """Return a replicated tensor for ops whose results are split."""
    result: Tensor = _Share.apply(value, group)  # type: ignore[no-untyped-call]  # torch's
    return result


def reduce(value: Tensor, group: TensorGroup | ScatteringGroup) -> Tensor:
    """Return the sum of the ranks' tensors: replicated, or the rank's part of it."""
    if isinstance(group, ScatteringGroup):
        part: Tensor = _Deal.apply(value, group.group, group.split)  # type: ignore[no-untyped-call]  # torch's
        return part
    result: Tensor = _Reduce.apply(value, group)  # type: ignore[no-untyped-call]  # torch's
    return result


def scatter(value: Tensor, group: TensorGroup, split: Split) -> Tensor:
    """Return a rank's part of a replicated tensor."""
    result: Tensor = _Scatter.apply(value, group, split)  # type: ignore[no-untyped-call]  # torch's
    return result


def gather(value: Tensor, group: TensorGroup, split: Split) -> Tensor:
    """Return the whole of a split tensor, replicated."""
    result: Tensor = _Gather.apply(value, group, split)  # type: ignore[no-untyped-call]  # torch's
    return result


def collect(value: Tensor, group: TensorGroup, split: Split) -> Tensor:
    """Return the whole of a split tensor, for ops whose results are split."""
    result: Tensor = _Collect.apply(value, group, split)  # type: ignore[no-untyped-call]  # torch's
    return result


# Ops of one rank. Each takes the arguments of the op it stands for.


def row_linear(group: TensorGroup) -> Callable[..., Tensor]:
    """Return a linear layer whose inputs are split; the bias is added once, to the sum."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        made = reduce(F.linear(x, weight), group)
        return made if bias is None else made + bias

    return linear


def row_addmm(group: TensorGroup) -> Callable[..., Tensor]:
    """Return ``addmm`` whose products are split along what they are summed over."""

    def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return bias + reduce(torch.mm(x, weight), group)

    return addmm


def reduced(function: Callable[..., Tensor]) -> Callable[[TensorGroup], Callable[..., Tensor]]:
    """Return an op whose results are parts of a sum."""

    def make(group: TensorGroup) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: reduce(function(*args, **kwargs), group)

    return make


def mean_of(whole: int) -> Callable[[TensorGroup], Callable[..., Tensor]]:
    """Return ``mean`` over a split dimension, given the elements of the whole."""

    def make(group: TensorGroup) -> Callable[..., Tensor]:
        def mean(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401  # those of sum
            return reduce(torch.sum(x, *args, **kwargs), group) / whole

        return mean

    return make


def split_embedding(rows: int) -> Callable[[TensorGroup], Callable[..., Tensor]]:
    """Return ``embedding`` with the rows of the table split."""

    def make(group: TensorGroup) -> Callable[..., Tensor]:
        begin, end = _bounds(rows, group)

        def embedding(
            indices: Tensor, weight: Tensor, padding_idx: int | None = None, *_: object
        ) -> Tensor:
            if padding_idx is not None:
                # Its row gets no gradient; it may belong to another rank.
                padding_idx += rows if padding_idx < 0 else 0
                padding_idx = padding_idx - begin if begin <= padding_idx < end else None
            outside = (indices < begin) | (indices >= end)
            local = (indices - begin).masked_fill(outside, 0)
            made = F.embedding(local, weight, padding_idx)
            return reduce(made.masked_fill(outside.unsqueeze(-1), 0), group)

        return embedding

    return make


def _bounds(size: int, group: TensorGroup) -> tuple[int, int]:
    return size * group.rank // group.size, size * (group.rank + 1) // group.size


def split_cross_entropy(classes: int) -> Callable[[TensorGroup], Callable[..., Tensor]]:
    """Return ``cross_entropy`` with the classes split."""

    def make(group: TensorGroup) -> Callable[..., Tensor]:
        begin, end = _bounds(classes, group)

        def cross_entropy(
            logits: Tensor,
            target: Tensor,
            *,
            ignore_index: int = -100,
            reduction: str = "mean",
            label_smoothing: float = 0.0,
        ) -> Tensor:
            dim = 1 if logits.dim() > 1 else 0
            top = group.maximum(logits.detach().amax(dim, keepdim=True))
            moved = logits - top
            total = reduce(moved.exp().sum(dim), group).log()
            outside = (target < begin) | (target >= end)
            local = (target - begin).masked_fill(outside, 0)
            picked = moved.gather(dim, local.unsqueeze(dim)).squeeze(dim)
            losses = total - reduce(picked.masked_fill(outside, 0), group)
            if label_smoothing:
                spread = total - reduce(moved.sum(dim), group) / classes
                losses = (1 - label_smoothing) * losses + label_smoothing * spread
            seen = target != ignore_index
            losses = losses.masked_fill(~seen, 0)
            if reduction == "none":
                return losses
            return losses.sum() / seen.sum() if reduction == "mean" else losses.sum()

        return cross_entropy

    return make


def split_dropout(
    whole: Sequence[int], split: Split
) -> Callable[[TensorGroup], Callable[..., Tensor]]:
    """Return ``dropout`` of a part: the draws are those of the whole tensor, of shape ``whole``."""

    def make(group: TensorGroup) -> Callable[..., Tensor]:
        def dropout(
            x: Tensor,
            p: float = 0.5,
            training: bool = True,  # as torch has it
            inplace: bool = False,
        ) -> Tensor:
            if not training or p == 0:
                return x
            ones = torch.ones(tuple(whole), dtype=x.dtype, device=x.device)
            return x * split.take(F.dropout(ones, p, training=True), group.rank, group.size)

        return dropout

    return make


def split_attention(
    heads: Split, whole: tuple[int, ...], repeats: int
) -> Callable[[TensorGroup], Callable[..., Tensor]]:
    """Return attention on the heads of a rank.

    Args:
        heads: How the heads of the queries are split.
        whole: Shape of all attention scores, for the draws of dropout.
        repeats: Heads of queries to one head of keys and values that are not split; 0 = those are
            split, too.
    """

    def make(group: TensorGroup) -> Callable[..., Tensor]:
        mine = [n for a, b in heads.ranges(group.rank, group.size) for n in range(a, b)]

        def attention(  # noqa: PLR0913  # the arguments that torch has
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,  # as torch has it
            *,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            if repeats:
                chosen = torch.tensor([n // repeats for n in mine], device=key.device)
                key, value = key.index_select(-3, chosen), value.index_select(-3, chosen)
                enable_gqa = False
            if dropout_p == 0:
                return F.scaled_dot_product_attention(
                    query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            if enable_gqa:
                times = query.shape[-3] // key.shape[-3]
                key = key.repeat_interleave(times, -3)
                value = value.repeat_interleave(times, -3)
            factor = query.shape[-1] ** -0.5 if scale is None else scale
            scores = query @ key.transpose(-2, -1) * factor
            if is_causal:
                seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
                scores = scores.masked_fill(~seen, float("-inf"))
            elif attn_mask is not None and attn_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attn_mask, float("-inf"))
            elif attn_mask is not None:
                scores = scores + attn_mask
            drop = split_dropout(whole, heads.at(len(whole) - 3))(group)
            return drop(scores.softmax(-1), dropout_p) @ value

        attention.__name__ = "scaled_dot_product_attention"
        return attention

    return make
