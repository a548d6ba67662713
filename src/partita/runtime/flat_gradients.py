"""Gradients of a stage in flat memory: what is reduced together lies together.

Backward adds to views of a flat tensor, that tensor is summed over the replicas as it lies, and the
optimizer reads the same views: nothing is done parameter by parameter, which takes a small network
as long as its sums. The next step overwrites what the last one has left, so this is for runs that
do not keep their gradients.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from partita.errors import InvalidInputError

Bucket: TypeAlias = tuple[str, ...]
"""The names of the parameters whose gradients are reduced together."""


class FlatGradients:
    """The gradients of a stage.

    Attributes:
        views: The gradient of each parameter, by name: the same tensors in every step.
    """

    def __init__(self, buckets: Sequence[Bucket], like: Mapping[str, Tensor]) -> None:
        """Make room.

        Args:
            buckets: What is reduced together, of one type each; every parameter stands in one.
            like: The parameters, by name.
        """
        self.views: dict[str, Tensor] = {}
        self._flats: dict[Bucket, Tensor] = {}
        for names in buckets:
            sizes = [like[name].numel() for name in names]
            flat = like[names[0]].new_zeros(sum(sizes))
            self._flats[names] = flat
            for name, piece in zip(names, flat.split_with_sizes(sizes), strict=True):
                self.views[name] = piece.view(like[name].shape)
        # Whether something was added in this step, and which buckets have left and come home.
        self._is_begun = False
        self._sent: set[Bucket] = set()
        self._reduced: set[Bucket] = set()

    def begin(self) -> None:
        """Let gradients be added to the views; before the first of a step they are zeros.

        Raises:
            InvalidInputError: A sum of this step has left for its reduction.
        """
        if self._sent:
            name = next(iter(self._sent))[0]
            raise InvalidInputError(f"the gradient of {name!r} grew after its reduction")
        if not self._is_begun:
            self._is_begun = True
            for flat in self._flats.values():
                flat.zero_()

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add gradients of some of the parameters."""
        self.begin()
        views = [self.views[name] for name in gradients]
        torch._foreach_add_(views, list(gradients.values()))  # one call for all

    def sent(self, bucket: Bucket) -> Tensor:
        """Return the sums of a bucket, to be reduced in place; zeros where there are none."""
        if not self._is_begun:
            self.begin()
        self._sent.add(bucket)
        return self._flats[bucket]

    def take_home(self, bucket: Bucket, value: Tensor) -> None:
        """Take the reduced sums of a bucket."""
        flat = self._flats[bucket]
        if value.data_ptr() != flat.data_ptr():
            flat.copy_(value)
        self._reduced.add(bucket)

    def use(self, factor: float) -> Mapping[str, Tensor]:
        """Return the views, multiplied with a factor; what is added next belongs to the next step.

        Raises:
            InvalidInputError: A bucket is not reduced.
        """
        missing = self._flats.keys() - self._reduced
        if missing:
            raise InvalidInputError(f"the gradient of {min(missing)[0]!r} is not reduced")
        if factor != 1.0:
            for flat in self._flats.values():
                flat.mul_(factor)
        self._is_begun = False
        self._sent.clear()
        self._reduced.clear()
        return self.views

    def unused(self) -> list[str]:
        """Return the parameters whose gradients have not been used in this step."""
        return list(self.views) if self._is_begun else []
