"""Models by name: build one, draw a batch for it, count its parameters, list its layers.

>>> count = parameter_count("gpt3-39b")
>>> count.count, count.table_count, str(count.rule)
(39079927808, 39491633152, 'tied head counted twice')
>>> len(layers_of("t5-3b", build_model("t5-3b", device="meta")))
74
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from partita.errors import InvalidInputError
from partita.models import table
from partita.models.draw import Draw
from partita.models.layers import Layer
from partita.models.scaling import check_scale
from partita.models.spec import (
    Batch,
    CountRule,
    ModelSpec,
    ParameterCount,
    Request,
    count_parameters,
)
from partita.names import suggest


def _by_name(*families: Iterable[ModelSpec]) -> Mapping[str, ModelSpec]:
    return MappingProxyType({spec.name: spec for family in families for spec in family})


MODELS: Mapping[str, ModelSpec] = _by_name(
    table.language_models(),
    table.encoder_models(),
    table.image_models(),
    table.baechi_models(),
    table.toys(),
    table.sparse_and_graph_models(),
)


def find_model(name: str) -> ModelSpec:
    """Return what is known of a model; case does not matter, nor the end of a name after a hyphen.

    >>> find_model("bert-huge").name
    'bert-huge-uncased'
    """
    text = name.lower()
    near = [known for known in MODELS if known.lower() == text]
    near = near or [known for known in MODELS if known.lower().startswith(f"{text}-")]
    if len(near) != 1:
        raise InvalidInputError(f"there is no model {name!r}{suggest(name, MODELS)}")
    return MODELS[near[0]]


def build_model(
    name: str,
    *,
    scale: float = 1.0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> nn.Module:
    """Return a model in training mode.

    Args:
        name: One of ``MODELS``.
        scale: Factor on its widths (hidden, feed-forward, vocabulary, channels, classes); depth
            stays, so published partitions still apply.
        device: ``"meta"`` allocates nothing, whatever the size.
        dtype: Of parameters and floating-point buffers; float32 if not given.
        seed: The same seed gives the same weights, on every device.
    """
    spec = find_model(name)
    check_scale(scale)
    place = torch.device(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with torch.device("meta" if place.type == "meta" else "cpu"):
            model = spec.build(scale)
    if dtype is not None:
        model = model.to(dtype)
    return model if place.type in ("meta", "cpu") else model.to(place)


def example_inputs(
    name: str,
    batch_size: int | None = None,
    *,
    scale: float = 1.0,
    device: torch.device | str = "cpu",
    seed: int = 0,
    sequence_length: int | None = None,
) -> Batch:
    """Return a generated batch: positional arguments, keyword arguments, labels.

    Args:
        name: One of ``MODELS``.
        batch_size: Number of samples; the model's default if not given.
        scale: Scale of the model.
        device: On ``"meta"`` tensors have shapes alone.
        seed: The same seed gives the same batch, on every device.
        sequence_length: Tokens a sample, for models that read sequences; as published if not given.
    """
    spec = find_model(name)
    check_scale(scale)
    size = spec.batch_size if batch_size is None else batch_size
    if size < 1:
        raise InvalidInputError(f"batch size must be at least 1, got {size}")
    length = spec.sequence_length
    if sequence_length is not None:
        length = _checked_length(spec, sequence_length)
    draw = Draw(seed, device)
    request = Request(batch_size=size, scale=scale, sequence_length=length, draw=draw)
    return spec.example(request)


def _checked_length(spec: ModelSpec, length: int) -> int:
    if not spec.sequence_length:
        raise InvalidInputError(f"model {spec.name!r} reads no sequences: it takes {spec.inputs}")
    if not 1 < length <= spec.sequence_length:
        limit = spec.sequence_length
        raise InvalidInputError(f"{spec.name}: sequence length must be 2 to {limit}, got {length}")
    return length


def loss_of(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of a model: takes its output and the labels of a batch."""
    return find_model(name).loss


def layers_of(name: str, model: nn.Module) -> list[Layer]:
    """Return the layers that published partitions count, in order: name and module paths.

    Empty for models that no published partition counts in layers.
    """
    spec = find_model(name)
    return [] if spec.layers is None else list(spec.layers(model))


def parameter_count(name: str) -> ParameterCount:
    """Return the number of parameters, and what the published table's rule gives.

    Counted on the meta device: nothing is allocated.
    """
    spec = find_model(name)
    model = build_model(name, device="meta")
    count = count_parameters(model)
    if spec.published is None:
        return ParameterCount(
            count=count, table_figure="", table_count=count, rule=CountRule.DISTINCT
        )
    rule = spec.published.rule
    return ParameterCount(
        count=count,
        table_figure=spec.published.figure,
        table_count=count_parameters(model, rule),
        rule=rule,
    )
