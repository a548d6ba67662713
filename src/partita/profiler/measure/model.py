"""From a model to a graph with measured costs: capture, look in the cache, measure, grow."""

from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from partita.capture.capture import capture
from partita.capture.captured import CapturedModel, CaptureMode, Granularity
from partita.capture.setting import Example, LossFunction
from partita.capture.sources import ModelSource
from partita.errors import InvalidInputError
from partita.profiler.cache import ProfileCache, profile_key
from partita.profiler.layers import label_layers
from partita.profiler.measure.costs import ANNOTATION, with_costs, with_growth
from partita.profiler.measure.measure import (
    Measured,
    ProfileOptions,
    Progress,
    device_of,
    device_type_of,
    measure,
    processor_of,
    versions,
)
from partita.profiler.measure.shards import with_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """Options of a capture.

    Attributes:
        granularity: Size of an op: a torch call, a leaf module, or a block.
        mode: Training, or eval for inference.
        second_batch_size: Another batch size to measure, which tells how costs grow; 0 = none.
        tensor_degree: Ranks of a tensor-parallel group of which one is measured too; 1 = none.
    """

    granularity: Granularity = Granularity.OP
    mode: CaptureMode = CaptureMode.TRAINING
    second_batch_size: int = 0
    tensor_degree: int = 1


def profile_model(
    model: nn.Module,
    example: Example,
    *,
    loss: LossFunction | None = None,
    name: str = "",
    options: ProfileOptions | None = None,
    capture_options: CaptureOptions | None = None,
) -> Measured:
    """Return a model as a graph with measured costs.

    Args:
        model: The model.
        example: One microbatch.
        loss: Makes the loss of outputs and labels, where the model returns none.
        name: Name of the graph; the model's class by default.
        options: Options of the measurement.
        capture_options: Options of the capture.
    """
    source = ModelSource(
        name=name or type(model).__name__, model=model, example=lambda _, __=0: example, loss=loss
    )
    return profile_source(source, options=options, capture_options=capture_options)


def profile_source(
    source: ModelSource,
    *,
    options: ProfileOptions | None = None,
    capture_options: CaptureOptions | None = None,
    cache: ProfileCache | None = None,
    captured: CapturedModel | None = None,
    progress: Progress = lambda _, __: None,
) -> Measured:
    """Return a model as a graph with measured costs, from the cache if it is there.

    Args:
        source: The model.
        options: Options of the measurement.
        capture_options: Options of the capture.
        cache: Store of measurements; nowhere if not given.
        captured: The model as it was captured before, on its usual microbatch.
        progress: Called with each round.
    """
    options = ProfileOptions() if options is None else options
    how = CaptureOptions() if capture_options is None else capture_options
    example = source.example(0)
    captured = _captured(source, example, how) if captured is None else captured
    device = device_of(captured, [])
    kind = options.device_type or device_type_of(device)
    facts = {
        "options": asdict(options),
        "capture": asdict(how),
        "versions": versions(),
        "processor": processor_of(device),
        "threads": torch.get_num_threads(),
        "layers": source.layers,
        "name": source.name,
    }
    key = profile_key(captured, facts)
    found = None if cache is None else cache.load(key)
    if found is not None and kind in found.annotations.get(ANNOTATION, {}):
        return Measured(graph=found, device_type=kind, is_cached=True)
    measured = measure(captured, example, loss=source.loss, options=options, progress=progress)
    if how.tensor_degree > 1:
        measured = with_shard(
            measured,
            captured,
            example,
            how.tensor_degree,
            loss=source.loss,
            options=options,
            progress=progress,
        )
    if how.second_batch_size:
        measured = _grown(source, measured, options, how)
    measured = _layered(measured, source)
    if cache is not None:
        cache.save(key, measured.graph)
    return measured


def _layered(measured: Measured, source: ModelSource) -> Measured:
    """Return a measurement whose ops know their layers, unless they are too coarse for that."""
    try:
        return replace(measured, graph=label_layers(measured.graph, source.layers))
    except InvalidInputError as exc:
        note = f"layers are not recorded: {exc}"
        record = replace(measured.record, notes=(*measured.record.notes, note))
        graph = with_costs(measured.graph, measured.graph.costs[0], record)
        return replace(measured, graph=graph)


def _captured(source: ModelSource, example: Example, how: CaptureOptions) -> CapturedModel:
    return capture(
        source.model,
        example,
        granularity=how.granularity,
        loss=source.loss,
        mode=how.mode,
        name=source.name,
    )


def _grown(
    source: ModelSource, measured: Measured, options: ProfileOptions, how: CaptureOptions
) -> Measured:
    """Return a measurement with what the model costs at a second batch size."""
    example = source.example(how.second_batch_size)
    captured = _captured(source, example, how)
    if captured.graph.batch_size == measured.graph.batch_size:
        raise InvalidInputError(
            f"{source.name} has batch size {captured.graph.batch_size} already; the second must be "
            "another"
        )
    other = measure(captured, example, loss=source.loss, options=options)
    record = replace(measured.record, second_batch_size=captured.graph.batch_size)
    graph = with_growth(measured.graph, other.graph)
    return replace(measured, graph=with_costs(graph, graph.costs[0], record))
