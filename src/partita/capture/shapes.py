"""Shapes that depend on data: boolean indices, coordinates, the lengths of packed sequences."""

from typing import Any

import torch
from torch import Tensor

from partita.capture.op import ValueInfo, refs_in
from partita.capture.tree import Value, leaves_of

_DATA_DEPENDENT = frozenset(
    {
        "_pack_padded_sequence",
        "_unique2",
        "argwhere",
        "bincount",
        "masked_select",
        "nonzero",
        "unique",
        "unique_consecutive",
        "unique_dim",
    }
)


def is_data_dependent(kind: str, recorded: tuple[Any, Any], infos: dict[int, ValueInfo]) -> bool:
    """Return whether the shape of what an op makes depends on the values of what it reads."""
    args, kwargs = recorded
    if kind in _DATA_DEPENDENT:
        return True
    if kind == "where":
        return len(args) + len(kwargs) == 1
    if kind == "repeat_interleave":
        repeats = kwargs.get("repeats", args[1] if len(args) > 1 else None)
        return isinstance(repeats, Value) and kwargs.get("output_size") is None
    if kind in ("__getitem__", "index"):
        masks = (torch.bool, torch.uint8)
        ends = (".start", ".stop")
        if any(isinstance(leaf, Value) and n.endswith(ends) for n, leaf in leaves_of(args)):
            return True
        return any(
            isinstance(ref, Value) and infos[ref.index].dtype in masks for ref in refs_in(args[1:])
        )
    return False


def flexible_sizes(
    kind: str, recorded: tuple[Any, Any], inputs: list[ValueInfo], made: list[Tensor]
) -> frozenset[int]:
    """Return the sizes, among those of what an op makes, that depend on data.

    A size is told from others by its number alone: of two equal sizes both count. A size that is a
    multiple of one that depends on data, and no size of another input, counts too (``view``).
    """
    refs = [leaf.index for _, leaf in leaves_of(recorded) if isinstance(leaf, Value)]
    infos = dict(zip(dict.fromkeys(refs), inputs, strict=True))
    lengths = {length for tensor in made for length in tensor.shape}
    if kind == "_pad_packed_sequence":  # the length to pad to is a number by then, and recorded
        return frozenset()
    if is_data_dependent(kind, recorded, infos):
        clean = {length for info in inputs for length in info.shape[1:]}
        leading = {tensor.shape[0] for tensor in made if tensor.dim()}
        return frozenset(leading | (lengths - clean if kind == "_pack_padded_sequence" else set()))
    loose = {info.shape[d] for info in inputs for d in info.flexible}
    if not loose:
        return frozenset()
    fixed = {
        length for info in inputs for d, length in enumerate(info.shape) if d not in info.flexible
    }
    return frozenset(
        length
        for length in lengths
        if length in loose
        or (length not in fixed and any(base > 1 and length % base == 0 for base in loose))
    )
