"""Layers as published partitions count them (Merak): runs of modules, in the order of the model."""

from typing import NamedTuple

from torch import nn


class Layer(NamedTuple):
    """One layer.

    Attributes:
        name: Unique within the model.
        prefixes: Module paths; the layer holds every op of these modules and of those below them.
    """

    name: str
    prefixes: tuple[str, ...]


def named_blocks(model: nn.Module, path: str) -> tuple[Layer, ...]:
    """Return a layer for each child of a module, named by its path."""
    names = (f"{path}.{name}" for name, _ in model.get_submodule(path).named_children())
    return tuple(Layer(name, (name,)) for name in names)
