"""Models to profile: built-in names, Hugging Face configurations, callables of the user's code."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from partita.capture.setting import LABELS, Example, LossFunction, split_labels
from partita.capture.tree import map_leaves
from partita.errors import FormatError, InvalidInputError, PartitaError, UnsupportedError, reason_of
from partita.models.huggingface import (
    build_hugging_face,
    estimated_length,
    hugging_face_inputs,
    hugging_face_loss,
    usual_length,
)
from partita.models.huggingface_config import (
    changed_configuration,
    configuration_with_defaults,
    configured_dtype,
    named_configuration,
    read_configuration,
)
from partita.models.zoo import MODELS, build_model, example_inputs, find_model, layers_of, loss_of

DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_HUGGING_FACE = "hf:"
_CONFIGURED_BATCH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """A request for a model.

    Attributes:
        batch_size: Samples of the example; 0 = as the model's author has it.
        sequence_length: Tokens a sample, for built-in and Hugging Face models; 0 = as published;
            of a configuration its own length up to 4096 on ``meta``, and 128 where it computes.
        scale: Factor on the widths of a built-in model.
        dtype: Of parameters and floating-point inputs; empty = as built; of a configuration its own
            on ``meta``.
        device: Device that it computes on; ``meta`` for shapes alone.
        seed: Of weights and data.
    """

    batch_size: int = 0
    sequence_length: int = 0
    scale: float = 1.0
    dtype: str = ""
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype and self.dtype not in DTYPES:
            raise InvalidInputError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")


class ExampleMaker(Protocol):
    """Makes microbatches."""

    def __call__(self, size: int, turn: int = 0) -> Example:
        """Return a microbatch.

        Args:
            size: Samples; 0 = the usual number.
            turn: Number of the batch: another turn has other data, the same one the same.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelSource:
    """A model, ready to be captured.

    Attributes:
        name: Name of the graph.
        model: The model.
        example: Makes microbatches.
        loss: The loss function; None where the model returns its loss.
        layers: Name and module paths of the layers that published partitions count.
        dtype: Dtype of a configuration, as it names it or as it was asked for; else empty.
    """

    name: str
    model: nn.Module
    example: ExampleMaker
    loss: LossFunction | None = None
    layers: tuple[tuple[str, tuple[str, ...]], ...] = field(default=())
    dtype: str = ""


def load_source(text: str, options: SourceOptions | None = None) -> ModelSource:
    """Return the model that a text names.

    Args:
        text: A built-in name; a ``config.json`` of a Hugging Face model, or the directory that
            holds it; ``hf:NAME`` for one of the tiny configurations or a class of transformers,
            with options (``hf:LlamaConfig?hidden_size=64,num_hidden_layers=2``); or
            ``package.module:callable``. The callable takes nothing, or any of ``batch_size``,
            ``dtype``, ``device`` and ``seed``, and returns a model with an example, and a loss
            function as the last if the model returns no loss; labels may stand before it, as in
            ``model, inputs, labels, loss``. The example is a tensor, a tuple of
            arguments, a mapping of arguments by name, an ``Example``, a callable of the batch size
            that makes one, or an iterator over such. With a loss function it has the labels, too,
            as a batch of a script does: a pair of inputs and labels, a longer tuple that ends with
            them, or a mapping that has ``labels``.
        options: Request for the model.

    Raises:
        InvalidInputError: There is no such model, or it returns something else.
        UnsupportedError: The device is not there, or transformers is not installed.
    """
    options = SourceOptions() if options is None else options
    is_meta = options.device == "meta"  # shapes alone, for estimates
    device = torch.device("meta") if is_meta else check_device(options.device)
    if is_configuration(text):
        return _from_configuration(text, options, device)
    if ":" in text:
        return _from_callable(text, options, device)
    spec = find_model(text)
    model = build_model(
        spec.name,
        scale=options.scale,
        device=device,
        dtype=DTYPES.get(options.dtype),
        seed=options.seed,
    )

    def example(size: int, turn: int = 0) -> Example:
        batch = example_inputs(
            spec.name,
            size or options.batch_size or None,
            scale=options.scale,
            device=device,
            seed=options.seed + turn,
            sequence_length=options.sequence_length or None,
        )
        return _cast(
            Example(
                args=batch.args,
                kwargs=batch.kwargs,
                labels=batch.labels,
                batch_size=size or options.batch_size or spec.batch_size,
            ),
            options,
            device,
        )

    layers = tuple((layer.name, layer.prefixes) for layer in layers_of(spec.name, model))
    return ModelSource(
        name=spec.name, model=model, example=example, loss=loss_of(spec.name), layers=layers
    )


def check_device(name: str) -> torch.device:
    """Return a device that can compute.

    Raises:
        InvalidInputError: It is no device.
        UnsupportedError: It is not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise InvalidInputError(f"device {name!r} is not known; write cpu or cuda:0") from exc
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UnsupportedError(f"device {name!r} is not there; torch sees {count} GPUs")
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device {name!r} cannot be measured; there are cpu and cuda")
    return device


def is_configuration(text: str) -> bool:
    """Return whether a text means a Hugging Face configuration: by prefix, path or hub id."""
    if text.startswith(_HUGGING_FACE) or text.endswith(".json"):
        return True
    if text in MODELS or not text:
        return False
    return Path(text).is_dir() or ("/" in text and ":" not in text)


def directory_of(text: str) -> Path | None:
    """Return the directory of a Hugging Face model that a text names; None = it names none."""
    path = Path(text.removeprefix(_HUGGING_FACE))
    return path if is_configuration(text) and path.is_dir() else None


def _from_configuration(text: str, options: SourceOptions, device: torch.device) -> ModelSource:
    if options.scale != 1.0:
        raise InvalidInputError(f"{text}: --scale is for built-in models")
    name, configuration = _named(text)
    # Estimates are of the model as it is trained; what computes here stays quick, and bfloat16
    # stops the process on some virtual machines.
    is_estimate = device.type == "meta"
    own = configured_dtype(configuration)
    if is_estimate and not options.dtype and own in DTYPES:
        options = replace(options, dtype=own)
    model = build_hugging_face(
        configuration,
        device=device,
        dtype=DTYPES.get(options.dtype),
        seed=options.seed,
    )
    usual = estimated_length if is_estimate else usual_length

    def example(size: int, turn: int = 0) -> Example:
        count = size or options.batch_size or _CONFIGURED_BATCH
        batch = hugging_face_inputs(
            model,
            count,
            sequence_length=options.sequence_length or usual(model),
            device=device,
            seed=options.seed + turn,
        )
        made = Example(kwargs=batch.kwargs, labels=batch.labels, batch_size=count)
        return _cast(made, options, device)

    return ModelSource(
        name=name, model=model, example=example, loss=hugging_face_loss, dtype=options.dtype
    )


def _named(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the configuration that a text means, with its changes."""
    place, _, changes = text.removeprefix(_HUGGING_FACE).partition("?")
    if not place:
        raise InvalidInputError(
            f"{text!r} names no Hugging Face configuration; write hf:tiny-llama"
        )
    name, configuration = _read_configuration(place)
    return name, changed_configuration(configuration, changes)


def whole_configuration(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the configuration that a text means, with its class's defaults.

    Raises:
        InvalidInputError: There is none.
        UnsupportedError: transformers is not installed.
    """
    name, configuration = _named(text)
    return name, configuration_with_defaults(configuration)


def _read_configuration(place: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the configuration that a path or a name means."""
    path = Path(place)
    if path.is_dir():
        path /= "config.json"
    elif not path.is_file() and path.suffix != ".json":
        return place, named_configuration(place)
    try:
        found = read_configuration(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        reason = reason_of(exc) if isinstance(exc, OSError) else "not UTF-8"
        raise InvalidInputError(f"{path} cannot be read: {reason}") from exc
    except FormatError as exc:
        raise exc.at(str(path)) from exc
    # A directory may be called anything.
    named = str(found.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    own = path.stem if path.name != "config.json" else named
    return own or found["model_type"], found


def _from_callable(text: str, options: SourceOptions, device: torch.device) -> ModelSource:
    make = find_callable(text)
    if options.scale != 1.0 or options.sequence_length:
        raise InvalidInputError(f"{text}: --scale and --sequence-length are for built-in models")
    known = {
        "batch_size": options.batch_size or None,
        "dtype": DTYPES.get(options.dtype),
        "device": device,
        "seed": options.seed,
    }

    def called(size: int) -> tuple[Any, ...]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            values = _accepted(make, {**known, "batch_size": size or options.batch_size or None})
            with _foreign_code(f"{text} failed"):
                made = make(**values)
            return _parts(text, made)

    model, given, loss = called(0)
    has_loss = loss is not None
    if options.dtype:
        model = model.to(DTYPES[options.dtype])
    model = model.to(device)

    @lru_cache(maxsize=8)
    def given_at(size: int) -> Any:  # noqa: ANN401  # the user's
        takes_size = size and "batch_size" in _accepted(make, {**known, "batch_size": size})
        made = called(size)[1] if takes_size else given
        return _Kept(made) if isinstance(made, Iterator) else made

    def example(size: int, turn: int = 0) -> Example:
        size = size or options.batch_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed + turn)
            found = _example_of(text, given_at(size), size, turn, has_loss=has_loss)
        return _cast(found, options, device)

    name = text.rpartition(":")[2].rpartition(".")[2]
    # Such a name says nothing of the model; a container of torch's says even less.
    if name in _PLAIN and not type(model).__module__.startswith("torch.nn"):
        name = type(model).__name__
    return ModelSource(name=name, model=model, example=example, loss=loss)


@contextmanager
def _foreign_code(what: str) -> Iterator[None]:
    """Turn whatever the user's own code raises into one line; ``--debug`` shows where."""
    try:
        yield
    except (PartitaError, MemoryError):
        raise
    except Exception as exc:
        raise InvalidInputError(f"{what}: {type(exc).__name__}: {exc}".rstrip(": ")) from exc


_PLAIN = ("build", "build_model", "get_model", "make", "make_model", "model")
"""Names of callables under which every model could stand."""
_GIVEN = ("batch_size", "dtype", "device", "seed")
"""What a callable that makes a model may take."""


def callable_in(text: str) -> str:
    """Return ``module:callable`` of a file of Python, which is found from the current directory.

    Args:
        text: ``model.py``, whose only function that can make a model is taken, or
            ``model.py:build``.

    Raises:
        InvalidInputError: There is no such file, or not one function that is meant; names them.
    """
    file, _, name = text.partition(":")
    path = Path(file)
    if not path.is_file():
        raise InvalidInputError(f"{file}: cannot be read: no such file or directory")
    try:
        parts = path.resolve().relative_to(Path.cwd()).with_suffix("").parts
    except ValueError:
        parts = ()
    if not parts or not all(part.isidentifier() for part in parts):
        raise InvalidInputError(
            f"{file}: is no module below this directory; call partita where it can be imported"
        )
    module = ".".join(parts)
    if name:
        return f"{module}:{name}"
    with _foreign_code(f"{file} cannot be imported"):
        found = importlib.import_module(module)
    makers = [
        name
        for name, value in vars(found).items()
        if inspect.isfunction(value) and value.__module__ == module and _is_maker(name, value)
    ]
    if len(makers) == 1:
        return f"{module}:{makers[0]}"
    if makers:
        listed = ", ".join(f"{module}:{maker}" for maker in makers)
        raise InvalidInputError(
            f"{file} has {len(makers)} functions that may make a model; name one: {listed}"
        )
    raise InvalidInputError(
        f"{file} has no function that can be called without arguments; write one that returns a "
        "model and example inputs, and a loss function if the model returns no loss: def build(): "
        "return model, (inputs, labels), loss"
    )


def _is_maker(name: str, function: Callable[..., Any]) -> bool:
    """Return whether a function can be called without more than makers of models are given."""
    needed = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    return not name.startswith("_") and name != "main" and set(needed) <= set(_GIVEN)


def find_callable(text: str) -> Callable[..., Any]:
    """Return what ``package.module:callable`` names.

    Raises:
        InvalidInputError: There is no such callable.
    """
    module, _, path = text.partition(":")
    if not module or not path or module.startswith("."):
        raise InvalidInputError(f"{text!r} is not of the form package.module:callable")
    with _foreign_code(f"{text}: {module} cannot be imported"):
        found: Any = importlib.import_module(module)
    for part in path.split("."):
        if not hasattr(found, part):
            raise InvalidInputError(f"{text}: {module} has no {path!r}")
        found = getattr(found, part)
    if not callable(found):
        raise InvalidInputError(f"{text} is a {type(found).__name__}; expected a callable")
    called: Callable[..., Any] = found
    return called


def _accepted(make: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values that a callable takes and that are given."""
    names = inspect.signature(make).parameters
    return {name: value for name, value in values.items() if name in names and value is not None}


def _parts(text: str, made: object) -> tuple[nn.Module, Any, LossFunction | None]:
    parts = list(made) if isinstance(made, Sequence) else [made]
    if len(parts) not in (2, 3, 4) or not isinstance(parts[0], nn.Module):
        what = type(made).__name__ + (f" of {len(parts)}" if isinstance(made, Sequence) else "")
        raise InvalidInputError(
            f"{text} returned a {what}; expected a model with example inputs, and a loss function "
            "if it returns no loss: (model, inputs), (model, (inputs, labels), loss) or (model, "
            "inputs, labels, loss)"
        )
    if len(parts) == 4:  # labels by themselves
        return parts[0], _with_labels(parts[1], parts[2]), _loss(text, parts[3])
    return parts[0], parts[1], _loss(text, parts[2]) if len(parts) == 3 else None


def _loss(text: str, loss: object) -> LossFunction:
    """Return a loss function."""
    if not callable(loss) or isinstance(loss, Tensor):
        raise InvalidInputError(
            f"{text}: the last result is a {type(loss).__name__}, and no loss function"
        )
    found: LossFunction = loss
    return found


def _with_labels(inputs: object, labels: object) -> object:
    """Return inputs and labels as one example."""
    if isinstance(inputs, Example):
        return replace(inputs, labels=labels)
    if isinstance(inputs, Mapping):
        return Example(kwargs=dict(inputs), labels=labels)
    return Example(args=inputs if isinstance(inputs, tuple) else (inputs,), labels=labels)


class _Kept:
    """The items of an iterator; each can be had again."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items, self._seen = items, list[Any]()

    def item(self, number: int) -> Any:  # noqa: ANN401  # the user's
        if number < 0:
            raise InvalidInputError(
                "an iterator of examples has none that are held out; name them by --eval-data"
            )
        while len(self._seen) <= number:
            self._seen.append(next(self._items))
        return self._seen[number]


def _example_of(text: str, given: object, size: int, turn: int, *, has_loss: bool) -> Example:
    """Return an example of the user's; where there is a loss function, with its labels."""
    made: Any = given
    labels = None
    with _foreign_code(f"{text}: no example could be made"):
        if isinstance(made, _Kept):
            made = made.item(turn)
        elif callable(made) and not isinstance(made, Tensor | Example):
            made = made(size) if size else made(1)
    if has_loss and _brings_labels(made):
        made, labels = split_labels(made)
    if isinstance(made, Tensor):
        made = (made,)
    if isinstance(made, Mapping):
        made = Example(kwargs=dict(made), labels=labels)
    elif isinstance(made, tuple | list):
        made = Example(args=tuple(made), labels=labels)
    if not isinstance(made, Example):
        raise InvalidInputError(
            f"{text}: the example is a {type(made).__name__}; "
            "expected a tensor, a tuple or a mapping"
        )
    found = made.batch_size or _first_length(made)
    if size and found and found != size:
        raise InvalidInputError(
            f"{text} makes {found} samples, {size} are wanted; let it take batch_size"
        )
    return made


def _brings_labels(made: object) -> bool:
    """Return whether an example has labels by the rule for batches; a loss may need none."""
    if isinstance(made, Mapping):
        return any(name in made for name in LABELS)
    return isinstance(made, tuple | list) and len(made) > 1


def _first_length(example: Example) -> int:
    lengths: list[int] = []

    def note(leaf: object) -> object:
        if isinstance(leaf, Tensor) and leaf.dim():
            lengths.append(leaf.shape[0])
        return leaf

    map_leaves(note, (example.args, dict(example.kwargs)))
    return lengths[0] if lengths else 0


def _cast(example: Example, options: SourceOptions, device: torch.device) -> Example:
    """Return an example on the device, floating-point tensors in the wanted type."""
    dtype = DTYPES.get(options.dtype)

    def move(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else None)

    return Example(
        args=map_leaves(move, example.args),
        kwargs=map_leaves(move, dict(example.kwargs)),
        labels=map_leaves(move, example.labels),
        batch_size=example.batch_size,
    )
