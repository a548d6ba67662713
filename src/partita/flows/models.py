"""The models that are known by name: what ``partita.list_models`` and ``models`` say."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partita.errors import InvalidInputError
from partita.flows.extras import torch_needed
from partita.flows.results import Result
from partita.names import suggest
from partita.requests import Request, declare, make

if TYPE_CHECKING:
    from partita.transformer.named import NamedShape


@dataclass(frozen=True, kw_only=True)
class ModelsRequest(Request):
    """Which models to list."""

    part: str | None = declare(
        None, is_argument=True, help="Text that the names contain; large = those planned by shape."
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ModelList(Result):
    """Models that are known by name.

    Attributes:
        models: What is known of each model that can be built, as JSON values.
        large: The same of large transformers, which are planned by their shape.
    """

    models: tuple[Mapping[str, Any], ...]
    large: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> Any:  # noqa: ANN401 (a list, as the command prints it)
        """Return what is known of each model."""
        return [dict(model) for model in (*self.models, *self.large)]

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each model."""
        keys = ("name", "parameters", "layers", "batch_size", "inputs", "source")
        return [{key: model.get(key) for key in keys} for model in (*self.models, *self.large)]

    def lines(self) -> list[str]:
        """Return the names, those of many cut short."""
        names = [model["name"] for model in (*self.models, *self.large)]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return [f"{len(names)} models: {', '.join(names[:8])}{more}"]


def list_models(part: str | None = None, /) -> ModelList:
    """List the models that can be built by name, and the large ones that are planned by shape.

    Args:
        part: A text that their names contain; ``large`` = those planned by shape; None = all.

    Raises:
        InvalidInputError: No name contains it.
        UnsupportedError: torch is not there.
    """
    return models_request(make(ModelsRequest, part=part))


def models_request(request: ModelsRequest) -> ModelList:
    """List what a request asks for; see :func:`list_models`."""
    from partita.transformer.named import named_shapes  # noqa: PLC0415 (YAML of all shapes)

    part, shapes = (request.part or "").lower(), named_shapes()
    if part == "large":
        return ModelList(models=(), large=tuple(map(_describe_large, shapes.values())))
    with torch_needed("the models need"):
        from partita.models.zoo import MODELS  # noqa: PLC0415 (imports torch)
    names = [name for name in MODELS if part in name.lower()]
    large = [shape for name, shape in shapes.items() if part in name]
    if not names and not large:
        raise InvalidInputError(
            f"no model's name contains {request.part!r}{suggest(part, [*MODELS, *shapes])}"
        )
    return ModelList(models=tuple(map(_describe, names)), large=tuple(map(_describe_large, large)))


def large_names() -> tuple[str, ...]:
    """Return the names of the large models that are planned by their shape."""
    from partita.transformer.named import named_shapes  # noqa: PLC0415 (YAML of all shapes)

    return tuple(named_shapes())


def is_model(name: str) -> bool:
    """Return whether a model is known by that name: one that is built, or planned by its shape."""
    if name in large_names():
        return True
    try:
        from partita.models.zoo import MODELS  # noqa: PLC0415 (imports torch)
    except ModuleNotFoundError:
        return False
    return name in MODELS


def _describe_large(named: "NamedShape") -> dict[str, Any]:
    shape = named.shape
    return {
        "name": shape.name,
        "source": "shape",
        "sequence_length": named.sequence_length,
        "layers": shape.layers,
        "parameters": int(shape.params),
        "active_parameters": int(shape.active_params),
        "hidden": shape.hidden,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "experts": shape.experts,
        "experts_per_token": shape.top_k,
        "published": None,
    }


def _describe(name: str) -> dict[str, Any]:
    from partita.models.zoo import (  # noqa: PLC0415 (imports torch)
        build_model,
        find_model,
        layers_of,
        parameter_count,
    )

    spec, count = find_model(name), parameter_count(name)
    return {
        "name": name,
        "source": spec.source,
        "inputs": spec.inputs,
        "batch_size": spec.batch_size,
        "sequence_length": spec.sequence_length or None,
        "layers": len(layers_of(name, build_model(name, device="meta"))),
        "parameters": count.count,
        "published": {
            "figure": count.table_figure,
            "parameters": count.table_count,
            "rule": str(count.rule),
        }
        if count.table_figure
        else None,
    }
