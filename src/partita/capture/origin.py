"""The origin of a graph: enough to build the model and capture it again, for running a plan.

A model that returns no loss gets one by name.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from partita.capture.capture import capture, capture_without_values
from partita.capture.captured import CapturedModel, CaptureMode, Granularity
from partita.capture.partial import build_partly
from partita.capture.setting import LossFunction
from partita.capture.sources import ModelSource, SourceOptions, find_callable, load_source
from partita.core.graph import MODEL_ANNOTATION, Graph
from partita.errors import InvalidInputError

logger = logging.getLogger(__name__)


def _cross_entropy(output: Any, labels: Any) -> Tensor:  # noqa: ANN401  # the model's
    logits = _tensor(output)
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def _mean_squares(output: Any, labels: Any) -> Tensor:  # noqa: ANN401  # the model's
    found = _tensor(output)
    return functional.mse_loss(found, labels.to(found.dtype).reshape(found.shape))


LOSSES: Mapping[str, LossFunction] = {"cross_entropy": _cross_entropy, "mse": _mean_squares}


def named_loss(text: str) -> LossFunction:
    """Return a loss function of (output, labels): a name of ``LOSSES`` or package.module:callable.

    Raises:
        InvalidInputError: There is no such loss.
    """
    if text in LOSSES:
        return LOSSES[text]
    if ":" not in text:
        raise InvalidInputError(
            f"loss {text!r} is not one of {', '.join(LOSSES)}; or write package.module:callable"
        )
    found: Callable[..., Tensor] = find_callable(text)
    return found


def _tensor(output: object) -> Tensor:
    """Return the first tensor of what a model returned."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name)  # type: ignore[no-any-return]  # just checked
    if isinstance(output, tuple | list) and output:
        return _tensor(output[0])
    raise InvalidInputError(
        f"the model returned a {type(output).__name__}; give --loss package.module:callable for it"
    )


ANNOTATION = MODEL_ANNOTATION


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOrigin:
    """The source that a model was captured from.

    Attributes:
        text: Name that the user gave: a built-in name, ``package.module:callable``.
        options: Request for the model.
        granularity: Size of an op: a torch call, a leaf module, or a block.
        mode: The mode of its modules.
        loss: Name of the loss function; empty = the model's own.
    """

    text: str
    options: SourceOptions = field(default_factory=SourceOptions)
    granularity: Granularity = Granularity.OP
    mode: CaptureMode = CaptureMode.TRAINING
    loss: str = ""

    def recorded_in(self, graph: Graph) -> Graph:
        """Return a graph that remembers this origin."""
        record = {
            "source": self.text,
            "granularity": self.granularity.value,
            "mode": self.mode.value,
            "loss": self.loss,
            "options": asdict(self.options),
        }
        return replace(graph, annotations={**graph.annotations, ANNOTATION: record})


def origin_of(graph: Graph) -> ModelOrigin:
    """Return where a graph comes from.

    Raises:
        InvalidInputError: The graph does not say.
    """
    record = graph.annotations.get(ANNOTATION)
    if not isinstance(record, Mapping) or "source" not in record:
        raise InvalidInputError(
            f"graph {graph.name!r} does not say which model it was made from; name the model, or "
            "make the graph by 'partita profile'"
        )
    options: Mapping[str, Any] = record.get("options", {})
    return ModelOrigin(
        text=str(record["source"]),
        options=SourceOptions(**dict(options)),
        granularity=Granularity(record.get("granularity", Granularity.OP)),
        mode=CaptureMode(record.get("mode", CaptureMode.TRAINING)),
        loss=str(record.get("loss", "")),
    )


def origin_in(graph: Graph) -> ModelOrigin:
    """Return where a graph comes from; the usual way of a model that a script has where none is."""
    return origin_of(graph) if ANNOTATION in graph.annotations else ModelOrigin(text=graph.name)


def load_origin(origin: ModelOrigin) -> ModelSource:
    """Return the model of an origin, with the loss that it names."""
    source = load_source(origin.text, origin.options)
    return replace(source, loss=named_loss(origin.loss)) if origin.loss else source


def load_origin_partly(origin: ModelOrigin, wanted: Collection[str]) -> ModelSource:
    """Return the model of an origin with memory for some parameters, the whole where that fails.

    Args:
        origin: The origin.
        wanted: The parameters, with the values of a whole build; the others are stand-ins.
    """
    made: list[ModelSource] = []

    def build(device: str) -> nn.Module:
        options = replace(origin.options, device=device)
        made.append(load_origin(replace(origin, options=options)))
        return made[-1].model

    try:
        build_partly(build, wanted, origin.options.device)
    except Exception as exc:  # noqa: BLE001  # a user's code may not know the meta device
        logger.info("%s is built whole: %s", origin.text, exc)
        return load_origin(origin)
    return made[-1]


class Captures:
    """A model captured once for each size of microbatch, when it is first asked for.

    Shapes are part of a captured graph, so each size has its own. Profiling, running and checking a
    model pass this along instead of capturing it again.

    Attributes:
        source: The model.
        origin: Way in which it is captured.
    """

    def __init__(
        self,
        source: ModelSource,
        origin: ModelOrigin,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        known: Graph | None = None,
    ) -> None:
        """Take a model.

        Args:
            source: The model.
            origin: How it is captured.
            context: Makes what it is captured under, such as autocast.
            known: The graph that it was found to have by whoever compared the two. It is then
                captured without values where that gives this graph again.
        """
        self.source, self.origin, self._context = source, origin, context
        self._known = known
        self._made: dict[int, CapturedModel] = {}

    def at(self, size: int = 0) -> CapturedModel:
        """Return the model captured on a microbatch of some samples; 0 = the usual number."""
        if size not in self._made:
            with self._context():
                captured = self._without_values(size) or self._captured(capture, size)
            self._made[size] = captured
            self._made.setdefault(captured.graph.batch_size, captured)
        return self._made[size]

    def _captured(self, how: Callable[..., CapturedModel], size: int) -> CapturedModel:
        return how(
            self.source.model,
            self.source.example(size),
            granularity=self.origin.granularity,
            loss=self.source.loss,
            mode=self.origin.mode,
            name=self.source.name,
        )

    def _without_values(self, size: int) -> CapturedModel | None:
        """Return the model captured without values; None where it is not what it is known as."""
        if self._known is None:
            return None
        try:
            captured = self._captured(capture_without_values, size)
        except Exception as exc:  # noqa: BLE001  # a model's own code may raise anything
            logger.info("%s is captured with values: %s", self.source.name, exc)
            return None
        return captured if captured.graph.fingerprint == self._known.fingerprint else None
