"""From a model to a graph with estimated costs for devices that nobody has here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from partita.core.graph import Graph
from partita.errors import InvalidInputError
from partita.profile.capture import capture
from partita.profile.captured import CaptureMode, Granularity
from partita.profile.estimate import ANNOTATION, estimate
from partita.profile.estimate_trace import Kernels
from partita.profile.sources import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions:
    """How to estimate.

    Attributes:
        kernels: Fused kernels of today, or unfused ones.
        arithmetic: Type of the arithmetic, such as ``"tfloat32"``; that of the model if empty.
        recompute: Whether backward computes forward again.
        granularity: What an op is.
        mode: Training, or eval for inference.
    """

    kernels: Kernels = Kernels.FUSED
    arithmetic: str = ""
    recompute: bool = False
    granularity: Granularity = Granularity.OP
    mode: CaptureMode = CaptureMode.TRAINING


def estimate_source(
    source: ModelSource, device_types: Sequence[str], options: EstimateOptions | None = None
) -> Graph:
    """Return a model as a graph with estimated costs for types of devices, the first the reference.

    Args:
        source: The model; on meta tensors nothing is allocated and nothing computed.
        device_types: Names of the catalogue.
        options: How to estimate.

    Raises:
        InvalidInputError: No type, or one that the catalogue does not have.
    """
    how = options or EstimateOptions()
    if not device_types:
        raise InvalidInputError("estimates need at least one type of device, such as a100")
    captured = capture(
        source.model,
        source.example(0),
        granularity=how.granularity,
        loss=source.loss,
        mode=how.mode,
        name=source.name,
    )
    graphs = [
        estimate(
            captured,
            device_type,
            kernels=how.kernels,
            dtype=how.arithmetic,
            recompute=how.recompute,
            layers=source.layers,
        )
        for device_type in device_types
    ]
    said = {name: note for graph in graphs for name, note in graph.annotations[ANNOTATION].items()}
    costs = tuple(graph.costs[0] for graph in graphs)
    return replace(graphs[0], costs=costs, annotations={ANNOTATION: said})
