"""Models that a command takes by name: graphs in files, or models priced by shapes alone."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from partita.catalogue.catalogue import Catalogue
from partita.catalogue.examples import EXAMPLES
from partita.cli.profile import estimate_origin, model_estimator
from partita.core.cluster import Cluster
from partita.core.graph import Graph
from partita.errors import InvalidInputError
from partita.flows.extras import torch_needed
from partita.planners.pipeline import main_devices_of

SOURCE_OPTIONS = (
    "sequence_length",
    "dtype",
    "scale",
    "granularity",
    "kernels",
    "arithmetic",
)
"""Options that say what a model is estimated as; a graph has its own figures."""


def is_path(model: str) -> bool:
    """Return whether a text means a file: stdin, one that is there, or a name that ends like one.

    A folder with a Hugging Face configuration is a model.
    """
    path = Path(model)
    if path.is_dir():
        return not (path / "config.json").exists()
    return model == "-" or path.exists() or (":" not in model and path.suffix[1:].isalpha())


def estimated_graphs(
    model: str, source: Mapping[str, Any], cluster: Cluster, catalogue: Catalogue
) -> Callable[[int], Graph]:
    """Return what gives the graph for a microbatch size; 0 = the usual one.

    Args:
        model: What the user calls it.
        source: Values of ``SOURCE_OPTIONS`` and ``mode``.
        cluster: Its types of devices are estimated for, those that the catalogue has.
        catalogue: What is known of types of devices.

    Raises:
        InvalidInputError: There is no such model, or the catalogue has no type of the cluster.
        UnsupportedError: torch is not there.
    """
    _check_name(model)
    types = list(dict.fromkeys(cluster.devices[i].type for i in main_devices_of(cluster)))
    known = [name for name in types if name in catalogue.devices]
    if not known:
        raise InvalidInputError(
            f"cluster {cluster.name!r} has devices of type {', '.join(map(repr, types))}, of which "
            "the catalogue has none to estimate for; describe them in a --catalogue file"
        )
    values = {"seed": 0, **source, "recompute": False, "batch_size": None}
    estimated = model_estimator(model, values)
    sizes: dict[int, Graph] = {}

    def graph_at(size: int) -> Graph:
        if size not in sizes:
            graph = estimated(known, batch_size=size, catalogue=catalogue)
            origin = estimate_origin(model, values, graph)
            sizes[size] = sizes[graph.batch_size] = origin.recorded_in(graph)
        return sizes[size]

    return graph_at


def _check_name(model: str) -> None:
    """Refuse a plain name that no model has, with the examples that there are, too."""
    if ":" in model or "/" in model or Path(model).exists():
        return
    with torch_needed(f"{model!r} is no file and no built-in example; to estimate a model needs"):
        from partita.models.zoo import find_model  # noqa: PLC0415 (imports torch)
    try:
        find_model(model)
    except InvalidInputError as exc:
        examples = ", ".join(EXAMPLES)
        raise InvalidInputError(f"{exc}; nor a file or a built-in example ({examples})") from exc


def refuse_source_options(model: str, names: Sequence[str] = SOURCE_OPTIONS) -> None:
    """Refuse options of a model's source where MODEL is a graph that has its figures.

    Raises:
        InvalidInputError: One was typed.
    """
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise InvalidInputError(
                f"{model!r} is a graph with its own figures; --{name.replace('_', '-')} is for "
                "models that are estimated"
            )
