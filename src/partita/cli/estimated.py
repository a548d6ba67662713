"""Models that a command takes by name: graphs in files, or models priced by shapes alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from partita.catalogue.catalogue import Catalogue
from partita.core.cluster import Cluster
from partita.core.graph import Graph
from partita.errors import InvalidInputError
from partita.flows import estimated
from partita.flows.estimated import is_path
from partita.flows.fields import SourceFields

__all__ = ["SOURCE_OPTIONS", "estimated_graphs", "is_path", "refuse_source_options"]

SOURCE_OPTIONS = (
    "sequence_length",
    "dtype",
    "scale",
    "granularity",
    "kernels",
    "arithmetic",
)
"""Options that say what a model is estimated as; a graph has its own figures."""


def estimated_graphs(
    model: str, source: Mapping[str, Any], cluster: Cluster, catalogue: Catalogue
) -> Callable[[int], Graph]:
    """Return what gives the graph for a microbatch size; 0 = the usual one.

    Args:
        model: Name of the model.
        source: Values of ``SOURCE_OPTIONS`` and ``mode``.
        cluster: Its types of devices are estimated for, those that the catalogue has.
        catalogue: What is known of types of devices.
    """
    shape = SourceFields(**{name: source[name] for name in SOURCE_OPTIONS})
    return estimated.estimated_graphs(model, shape, source["mode"], cluster, catalogue)


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
