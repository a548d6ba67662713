"""Parts of tensors: what a device holds of a tensor that several devices divide.

A tensor is divided in up to two ways, one inside the other: tensor-parallel ranks hold a slice
along one dimension, and the replicas of a stage that shards hold flat stretches of it (or of such
a slice), of equal length, the last ones padded. Whoever gathers or saves parts needs neither: a
part says in which boxes of the whole its values lie.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from partita.capture.splits import Split
from partita.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Slice:
    """Part of a tensor along a dimension.

    The dimension is made of blocks (1, or the q, k and v of a fused projection: 3), and a rank has
    the same part of each.

    Attributes:
        dim: The dimension, from 0 on.
        index: Which part, 0 to ``count`` - 1.
        count: Number of parts.
        blocks: Number of equal blocks, which ``count`` divides; or the size of each, then parts may
            differ by one element.
    """

    dim: int
    index: int
    count: int
    blocks: int | tuple[int, ...] = 1

    def ranges(self, size: int) -> list[tuple[int, int]]:
        """Return begin and length of what it takes of a dimension of some size.

        Raises:
            InvalidInputError: The size is no multiple of the parts.
        """
        if isinstance(self.blocks, tuple):
            ranges = Split(self.dim, self.blocks).ranges(self.index, self.count)
            return [(begin, end - begin) for begin, end in ranges]
        if size % (self.count * self.blocks):
            raise InvalidInputError(
                f"a dimension of {size} cannot be divided into {self.blocks} blocks of "
                f"{self.count} equal parts"
            )
        block = size // self.blocks
        length = block // self.count
        return [(number * block + self.index * length, length) for number in range(self.blocks)]

    def shape(self, whole: Sequence[int]) -> torch.Size:
        """Return the shape of the slice of a tensor."""
        sizes = list(whole)
        sizes[self.dim] = sum(length for _, length in self.ranges(sizes[self.dim]))
        return torch.Size(sizes)

    def of(self, whole: Tensor) -> Tensor:
        """Return the slice of a tensor; a view where it has one block."""
        parts = [whole.narrow(self.dim, *taken) for taken in self.ranges(whole.shape[self.dim])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


@dataclass(frozen=True, slots=True)
class Stretch:
    """One of some equal, flat parts of a tensor; the last ones may be padded.

    Attributes:
        index: Which part, 0 to ``count`` - 1.
        count: Number of parts.
    """

    index: int
    count: int

    def size(self, numel: int) -> int:
        """Return the length of a part, with padding, of a tensor with so many elements."""
        return -(-numel // self.count)

    def of(self, whole: Tensor) -> Tensor:
        """Return a copy of the part of a tensor, flat, with zeros for padding."""
        size = self.size(whole.numel())
        made = whole.new_zeros(size)
        found = whole.reshape(-1)[self.index * size : (self.index + 1) * size]
        made[: found.numel()] = found
        return made


Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], Tensor]
"""Offsets in the whole tensor, lengths, and a view of the values of these lengths."""


@dataclass(frozen=True, slots=True)
class Part:
    """A device's part of a divided tensor.

    Attributes:
        shape: Shape of the whole.
        values: The part: flat and padded if it is a stretch, else of the slice's shape.
        stretch: Which flat part of the slice, or of the whole, it is; None = all of it.
        slice: Which slice it is of; None = of the whole.
    """

    shape: torch.Size
    values: Tensor
    stretch: Stretch | None = None
    slice: Slice | None = None

    @property
    def inner_shape(self) -> torch.Size:
        """Shape of what the stretch is of."""
        return self.shape if self.slice is None else self.slice.shape(self.shape)

    def like(self, values: Tensor) -> "Part":
        """Return the same part of another tensor, such as a state of the optimizer."""
        return replace(self, values=values)

    def boxes(self) -> Iterator[Box]:
        """Yield the boxes of the whole tensor that the values fill; padding is in none."""
        shape = self.inner_shape
        numel = shape.numel()
        begin, end = 0, numel
        if self.stretch is not None:
            size = self.stretch.size(numel)
            begin = min(numel, self.stretch.index * size)
            end = min(numel, begin + size)
        flat = self.values.reshape(-1) if self.stretch is None else self.values
        at = 0
        for offsets, lengths in _boxes_of_stretch(tuple(shape), begin, end):
            taken = prod(lengths)
            view = flat[at : at + taken].view(lengths)
            at += taken
            yield from self._in_whole(offsets, lengths, view)

    def compared_with(self, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each box of the whole tensor beside the part's values of it."""
        for offsets, lengths, values in self.boxes():
            yield whole[_place(offsets, lengths)], values

    def _in_whole(
        self, offsets: tuple[int, ...], lengths: tuple[int, ...], view: Tensor
    ) -> Iterator[Box]:
        """Yield a box of the slice as boxes of the whole: one for each block that it touches."""
        if self.slice is None:
            yield offsets, lengths, view
            return
        dim, begin = self.slice.dim, 0
        first, last = offsets[dim], offsets[dim] + lengths[dim]
        for start, length in self.slice.ranges(self.shape[dim]):
            low, high = max(first, begin), min(last, begin + length)
            if low < high:
                where = (*offsets[:dim], start + low - begin, *offsets[dim + 1 :])
                sizes = (*lengths[:dim], high - low, *lengths[dim + 1 :])
                yield where, sizes, view.narrow(dim, low - first, high - low)
            begin += length


def _boxes_of_stretch(
    shape: tuple[int, ...], begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and lengths of the boxes that a flat stretch fills, in flat order.

    At most two for each dimension: rows that are begun or ended within, and whole rows between.
    """
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = begin // row, (end - 1) // row
    if first == last and (begin % row or end % row):
        for offsets, lengths in _boxes_of_stretch(
            shape[1:], begin - first * row, end - first * row
        ):
            yield (first, *offsets), (1, *lengths)
        return
    if begin % row:
        yield from _boxes_of_stretch(shape, begin, (first + 1) * row)
        first += 1
    whole = end // row
    if whole > first:
        yield (first, *(0 for _ in shape[1:])), (whole - first, *shape[1:])
    if end % row:
        yield from _boxes_of_stretch(shape, whole * row, end)


def _place(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a box."""
    ends = zip(offsets, lengths, strict=True)
    return tuple(slice(begin, begin + length) for begin, length in ends)


def joined(parts: Iterable[Part]) -> Tensor:
    """Return the whole tensor; where several parts have the same place, the last one counts.

    Raises:
        InvalidInputError: A place is in no part.
    """
    found = list(parts)
    whole = found[0].values.new_empty(found[0].shape)
    seen = torch.zeros(found[0].shape, dtype=torch.bool)
    for part in found:
        for offsets, lengths, values in part.boxes():
            place = _place(offsets, lengths)
            whole[place] = values
            seen[place] = True
    if not bool(seen.all()):
        raise InvalidInputError(
            f"{len(found)} parts fill {int(seen.sum())} of the {seen.numel()} elements of a tensor "
            f"of shape {list(seen.shape)}; parts of some devices are missing"
        )
    return whole
