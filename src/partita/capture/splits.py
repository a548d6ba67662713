"""Tensors that a tensor-parallel group divides: which dimension, and in which pieces.

A dimension of fused projections holds several things one after the other, such as queries, keys and
values: its *blocks*. Each block is divided by itself, so that a rank gets the same heads of all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Split:
    """How a group divides a tensor.

    Attributes:
        dim: The dimension, counted from the first.
        blocks: Sizes of its blocks, which add up to the dimension.
    """

    dim: int
    blocks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Size of the whole dimension."""
        return sum(self.blocks)

    def at(self, dim: int) -> "Split":
        """Return the same pieces of another dimension."""
        return Split(dim, self.blocks)

    def ranges(self, rank: int, count: int) -> list[tuple[int, int]]:
        """Return begin and end of each piece of a rank, in the whole dimension.

        Blocks that do not divide evenly give some ranks one element more.

        >>> Split(0, (4, 4)).ranges(1, 2)
        [(2, 4), (6, 8)]
        """
        found, start = [], 0
        for block in self.blocks:
            ends = start + block * rank // count, start + block * (rank + 1) // count
            if ends[0] < ends[1]:
                found.append(ends)
            start += block
        return found

    def length(self, rank: int, count: int) -> int:
        """Return the size of the dimension on a rank."""
        return sum(end - begin for begin, end in self.ranges(rank, count))

    def shape(self, whole: tuple[int, ...], rank: int, count: int) -> tuple[int, ...]:
        """Return the shape of a rank's part of a tensor."""
        return (*whole[: self.dim], self.length(rank, count), *whole[self.dim + 1 :])

    def take(self, whole: Tensor, rank: int, count: int) -> Tensor:
        """Return a rank's part of a tensor; a view where it is one piece."""
        pieces = [whole.narrow(self.dim, a, b - a) for a, b in self.ranges(rank, count)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def join(self, parts: list[Tensor]) -> Tensor:
        """Return the whole of the parts of all ranks, in their order."""
        count, taken = len(parts), [0] * len(parts)
        pieces = []
        for block in self.blocks:
            for rank, part in enumerate(parts):
                length = block * (rank + 1) // count - block * rank // count
                pieces.append(part.narrow(self.dim, taken[rank], length))
                taken[rank] += length
        return torch.cat(pieces, self.dim)
