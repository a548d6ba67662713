"""From a model to a graph with estimated costs for devices that nobody has here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from partita.capture.capture import capture
from partita.capture.captured import CaptureMode, Granularity
from partita.capture.sources import ModelSource
from partita.catalogue.catalogue import Catalogue
from partita.core.graph import Graph
from partita.errors import InvalidInputError
from partita.profiler.estimate.estimate import ANNOTATION, collect_kernels, price
from partita.profiler.estimate.recompute import with_recomputation
from partita.profiler.estimate.trace import Kernels
from partita.profiler.layers import label_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions:
    """How to estimate.

    Attributes:
        kernels: Fused kernels of today, or unfused ones.
        arithmetic: Type of the arithmetic, such as ``"tfloat32"``; that of the model if empty.
        recompute: Whether blocks keep their inputs alone and backward computes forward again.
        granularity: What an op is.
        mode: Training, or eval for inference.
    """

    kernels: Kernels = Kernels.FUSED
    arithmetic: str = ""
    recompute: bool = False
    granularity: Granularity = Granularity.OP
    mode: CaptureMode = CaptureMode.TRAINING


def estimate_source(
    source: ModelSource,
    device_types: Sequence[str],
    options: EstimateOptions | None = None,
    *,
    batch_size: int = 0,
    catalogue: Catalogue | None = None,
) -> Graph:
    """Return a model as a graph with estimated costs for types of devices, the first the reference.

    Args:
        source: The model; on meta tensors nothing is allocated and nothing computed.
        device_types: Names of the catalogue.
        options: How to estimate.
        batch_size: Samples of the microbatch; 0 = as the source has it.
        catalogue: Where the device types stand; the package's if not given.

    Raises:
        InvalidInputError: No type, or one that the catalogue does not have.
    """
    how = options or EstimateOptions()
    if not device_types:
        raise InvalidInputError("estimates need at least one type of device, such as a100")
    captured = capture(
        source.model,
        source.example(batch_size),
        granularity=how.granularity,
        loss=source.loss,
        mode=how.mode,
        name=source.name,
    )
    found = collect_kernels(captured, how.kernels, how.arithmetic)
    graphs = [
        price(
            captured,
            found,
            device_type,
            dtype=how.arithmetic,
            kernels=how.kernels,
            catalogue=catalogue,
        )
        for device_type in device_types
    ]
    said = {name: note for graph in graphs for name, note in graph.annotations[ANNOTATION].items()}
    costs = tuple(graph.costs[0] for graph in graphs)
    graph = replace(graphs[0], costs=costs, annotations={ANNOTATION: said})
    graph = label_layers(graph, source.layers)
    return with_recomputation(graph) if how.recompute else graph
