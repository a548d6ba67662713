"""The model of a training run: built, captured and measured, or found in the cache."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from partita.capture.captured import CaptureMode, Granularity
from partita.capture.origin import ModelOrigin, load_origin, origin_of
from partita.capture.sources import ModelSource, SourceOptions
from partita.core.graph import Graph
from partita.errors import InvalidInputError
from partita.profiler.cache import ProfileCache
from partita.profiler.measure.measure import Measured, ProfileOptions
from partita.profiler.measure.model import CaptureOptions, profile_source


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """What is wanted of a model.

    Attributes:
        text: What the user calls it.
        options: Of its weights and data.
        granularity: What an op is.
        inference: Whether it is only run forward.
        loss: Name of a loss function; empty = the model's own.
        rounds: Rounds to measure.
        threads: Threads to measure with, as a rank will have.
    """

    text: str
    options: SourceOptions
    granularity: str = "op"
    inference: bool = False
    loss: str = ""
    rounds: int = 8
    threads: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class ProfiledModel:
    """A model with its costs on this machine.

    Attributes:
        source: The model.
        origin: How it is found again.
        measured: What was measured.
        graph: The measured graph, which remembers its origin.
    """

    source: ModelSource
    origin: ModelOrigin
    measured: Measured
    graph: Graph


def named_origin(graph: Graph, text: str | None) -> ModelOrigin:
    """Return the model that a graph was made from, or another one that is named for it."""
    return origin_of(graph) if text is None else replace(_known_origin(graph), text=text)


def _known_origin(graph: Graph) -> ModelOrigin:
    try:
        return origin_of(graph)
    except InvalidInputError:
        return ModelOrigin(text=graph.name, options=SourceOptions(batch_size=graph.batch_size))


def profiled_model(
    request: ModelRequest,
    *,
    cache: ProfileCache | None = None,
    progress: Callable[[int, int], None] = lambda _, __: None,
) -> ProfiledModel:
    """Return a model with its costs, from the cache if it is there.

    Args:
        request: What is wanted.
        cache: Where measurements are kept; nowhere if not given.
        progress: Told each round.
    """
    origin = ModelOrigin(
        text=request.text,
        options=request.options,
        granularity=Granularity(request.granularity),
        mode=CaptureMode.EVAL if request.inference else CaptureMode.TRAINING,
        loss=request.loss,
    )
    source = load_origin(origin)
    measured = profile_source(
        source,
        options=ProfileOptions(rounds=request.rounds, threads=request.threads),
        capture_options=CaptureOptions(granularity=origin.granularity, mode=origin.mode),
        cache=cache,
        progress=progress,
    )
    return ProfiledModel(
        source=source,
        origin=origin,
        measured=measured,
        graph=origin.recorded_in(measured.graph),
    )
