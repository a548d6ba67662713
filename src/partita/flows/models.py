"""The models that can be built by name: what ``partita.list_models`` and ``models`` say."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partita.errors import InvalidInputError
from partita.flows.extras import torch_needed
from partita.flows.results import Result
from partita.names import suggest
from partita.requests import Request, declare, make


@dataclass(frozen=True, kw_only=True)
class ModelsRequest(Request):
    """Which models to list."""

    part: str | None = declare(None, is_argument=True, help="Text that the names contain.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ModelList(Result):
    """Models that can be built by name.

    Attributes:
        models: What is known of each, as JSON values.
    """

    models: tuple[Mapping[str, Any], ...]

    def to_json(self) -> Any:  # noqa: ANN401 (a list, as the command prints it)
        """Return what is known of each model."""
        return [dict(model) for model in self.models]

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each model."""
        keys = ("name", "parameters", "layers", "batch_size", "inputs", "source")
        return [{key: model[key] for key in keys} for model in self.models]

    def lines(self) -> list[str]:
        """Return the names, those of many cut short."""
        names = [model["name"] for model in self.models]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return [f"{len(names)} models: {', '.join(names[:8])}{more}"]


def list_models(part: str | None = None, /) -> ModelList:
    """List the models that can be built by name.

    Args:
        part: A text that their names contain; None = all.

    Raises:
        InvalidInputError: No name contains it.
        UnsupportedError: torch is not there.
    """
    return models_request(make(ModelsRequest, part=part))


def models_request(request: ModelsRequest) -> ModelList:
    """List what a request asks for; see :func:`list_models`."""
    with torch_needed("the models need"):
        from partita.models.zoo import MODELS  # noqa: PLC0415 (imports torch)
    part = request.part or ""
    names = [name for name in MODELS if part.lower() in name.lower()]
    if not names:
        raise InvalidInputError(f"no model's name contains {part!r}{suggest(part, MODELS)}")
    return ModelList(models=tuple(map(_describe, names)))


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
