"""Specification of a model of the zoo, and how parameters are counted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from torch import Tensor, nn

from partita.models.draw import Draw
from partita.models.layers import Layer


class Batch(NamedTuple):
    """One batch: positional and keyword arguments of the model, and the labels of the loss."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    labels: Tensor


class CountRule(StrEnum):
    """Rule by which a published figure counts parameters."""

    DISTINCT = "distinct parameters, tied weights once"
    UNTIED = "tied head counted twice"
    FORMULA = "formula L(12h² + 13h) + 2Vh"
    NO_LINEAR_BIAS = "without the biases of linear layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCount:
    """A figure of the published table.

    Attributes:
        figure: As printed, such as ``"124.44 M"``.
        count: The number of parameters that the rule gives and that rounds to the figure.
        rule: Rule by which it counts.
    """

    figure: str
    count: int
    rule: CountRule = CountRule.DISTINCT


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Number of parameters of a model, and the one of the published table.

    Attributes:
        count: Distinct parameters, tied weights once.
        table_figure: As printed in the published table; empty for models that are not in it.
        table_count: Counted on the model by the table's rule; the same as ``count`` without one.
        rule: The table's rule.
    """

    count: int
    table_figure: str
    table_count: int
    rule: CountRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for a batch of a model.

    Attributes:
        batch_size: Number of samples.
        scale: Scale of the model.
        sequence_length: Tokens a sample; 0 for models that read no sequences.
        draw: Source of the numbers.
    """

    batch_size: int
    scale: float
    sequence_length: int
    draw: Draw


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model of the zoo.

    Attributes:
        name: Name that it is built by.
        source: Publication.
        inputs: Description of one sample, for people.
        build: Takes a scale and returns the model on torch's current default device.
        example: Returns one batch.
        loss: Takes the model's output and the labels.
        batch_size: Samples a batch unless told otherwise (a microbatch of the published runs).
        sequence_length: Tokens a sample, or 0.
        published: Its figure in the published table, if it is there.
        layers: Returns the layers of published partitions, if there are such.
        num_embedding_layers: Number of these that come before the first block.
        num_encoder_layers: Number of these that are an encoder's, where a decoder follows.
        basic_blocks: Names of module classes that count as one op at block granularity.
        smallest_batch: Fewest samples that can be trained on (batch norm over one value cannot).
    """

    name: str
    source: str
    inputs: str
    build: Callable[[float], nn.Module]
    example: Callable[[Request], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch_size: int
    sequence_length: int = 0
    published: PublishedCount | None = None
    layers: Callable[[nn.Module], tuple[Layer, ...]] | None = None
    num_embedding_layers: int = 0
    num_encoder_layers: int = 0
    basic_blocks: tuple[str, ...] = field(default=())
    smallest_batch: int = 1


def count_parameters(model: nn.Module, rule: CountRule = CountRule.DISTINCT) -> int:
    """Return the number of parameters of a model under a rule; works on the meta device."""
    if rule is CountRule.UNTIED:
        return sum(p.numel() for _, p in model.named_parameters(remove_duplicate=False))
    if rule is CountRule.FORMULA:
        left_out = [
            *model.get_submodule("position_embedding").parameters(),
            *model.get_submodule("head.norm").parameters(),
        ]
        return count_parameters(model, CountRule.UNTIED) - sum(p.numel() for p in left_out)
    count = sum(parameter.numel() for parameter in model.parameters())
    if rule is CountRule.NO_LINEAR_BIAS:
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        count -= sum(module.bias.numel() for module in linear if module.bias is not None)
    return count
