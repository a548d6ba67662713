"""Data to train on: token files, folders of images, callables of the user's code, generated data.

What a file holds is fitted to the model by the example that its source makes: the first tensor of
the example gets the samples, its labels the labels, and what else the model reads (a mask of ones)
stays as it is. A model that reads more needs a callable.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partita.capture.setting import Example
from partita.capture.sources import ModelSource, find_callable
from partita.capture.tree import leaves_of, map_leaves
from partita.core.columns import Longs
from partita.errors import InvalidInputError, UnsupportedError
from partita.runtime.batches import (
    Batches,
    GeneratedBatches,
    LastBatch,
    SampledBatches,
    SampleOrder,
    Samples,
    Sampling,
    StreamedBatches,
    split_batch,
)

GENERATED = "generated"
TRAIN, HELD_OUT = "train", "val"
"""Names of the two parts of a folder of data: ``train.bin`` and ``val.bin``, or sub-folders."""
NO_HELD_OUT = (
    "there are no data to evaluate on; name them by --eval-data, or put val.bin or a folder val "
    "beside those that are trained on"
)
TOKEN_TYPES = ("uint16", "uint32")
ARRAYS = (".npy", ".pt")
_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
_MEAN, _SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the three channels of ImageNet's images, by which images are usually normalised."""
_LOOKED_AT = 2**20
"""Tokens at either end of a file that are compared with the model's vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Data that a run trains on and is evaluated on.

    Attributes:
        source: ``generated``, a token file (``tokens.bin``, ``tokens.bin?dtype=uint32``), a folder
            with ``train.bin``, a folder of images with a sub-folder for each class, or
            ``package.module:callable``.
        held_out: Data to evaluate on; empty = what lies beside the source (``val.bin``, ``val/``),
            other seeds of generated data, or a callable that takes ``split``, asked
            for ``val``.
        sampling: Order of the samples; None = random windows of tokens, other samples shuffled.
        last_batch: What becomes of samples that fill no batch at the end of an epoch.
        seed: Seed of the order.
    """

    source: str = GENERATED
    held_out: str = ""
    sampling: Sampling | None = None
    last_batch: LastBatch = LastBatch.DROP
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.source:
            raise InvalidInputError("the data have no name; write generated for generated data")


def open_data(
    spec: DataSpec, source: ModelSource, sizes: Sequence[int], *, same_data: bool = False
) -> tuple[Batches, Batches | None]:
    """Return the batches to train on and, where there are some, those to evaluate on.

    Args:
        spec: The data.
        source: The model, with an example of what it reads.
        sizes: Samples of each microbatch of a step.
        same_data: Whether every step has the data of the first.

    Raises:
        InvalidInputError: They are not there, or not what the model reads.
        UnsupportedError: A package is missing that reads them; names it.
    """
    if spec.source == GENERATED and not spec.held_out:
        held_out = GeneratedBatches(source, sizes, held_out=True)
        return GeneratedBatches(source, sizes, same_data=same_data), held_out
    training = _opened(spec, spec.source, TRAIN, source, sizes)
    if same_data:
        training = _SameBatch(training)
    place = spec.held_out or _beside(spec.source)
    # Evaluations read the same samples every time.
    still = replace(spec, sampling=Sampling.SEQUENTIAL)
    return training, _opened(still, place, HELD_OUT, source, sizes) if place else None


def check_named_data(spec: DataSpec, *, evaluates: bool) -> None:
    """Check that data are there at all, before a model is built for them.

    Raises:
        InvalidInputError: They are not, or there are none to evaluate on.
    """
    for place in filter(None, (spec.source, spec.held_out)):
        if place == GENERATED:
            continue
        path = Path(place.partition("?")[0])
        if ":" in place and not path.exists():
            find_callable(place)
        elif not path.exists():
            raise _missing(path)
    if evaluates and spec.source != GENERATED and not (spec.held_out or _beside(spec.source)):
        raise InvalidInputError(NO_HELD_OUT)


def _missing(path: Path) -> InvalidInputError:
    return InvalidInputError(
        f"there is no {path}; --data takes a token file, a folder of images, "
        "package.module:callable, or generated"
    )


def tokens_of(source: ModelSource) -> int:
    """Return the tokens of a sample; 0 where samples are no texts."""
    example = source.example(0)
    for _, leaf in leaves_of((example.args, dict(example.kwargs))):
        if isinstance(leaf, Tensor):
            return 0 if leaf.dim() != 2 or leaf.is_floating_point() else int(leaf.shape[1])
    return 0


def _beside(source: str) -> str:
    """Return the held-out data that belong to a source; empty = there are none."""
    if ":" in source and not Path(source).exists():
        has_splits = "split" in inspect.signature(find_callable(source)).parameters
        return source if has_splits else ""
    place, _, options = source.partition("?")
    path = Path(place)
    for found in (path / f"{HELD_OUT}.bin", path.with_name(f"{HELD_OUT}.bin")):
        if found.is_file() and found != path:
            return f"{found}{'?' if options else ''}{options}"
    folder = path / HELD_OUT if path.name != TRAIN else path.with_name(HELD_OUT)
    return str(folder) if folder.is_dir() else ""


def _opened(
    spec: DataSpec, place: str, split: str, source: ModelSource, sizes: Sequence[int]
) -> Batches:
    if place == GENERATED:
        return GeneratedBatches(source, sizes, held_out=split == HELD_OUT)
    if ":" in place and not Path(place.partition("?")[0]).exists():
        return _from_callable(spec, place, split, source, sizes)
    path = Path(place.partition("?")[0])
    if not path.exists():
        raise _missing(path)
    if path.is_dir() and (path / f"{split}.bin").is_file():
        place = f"{path / f'{split}.bin'}{place[len(str(path)) :]}"
        path = path / f"{split}.bin"
    if path.is_file():
        sampling = spec.sampling or Sampling.RANDOM
        windows = TokenFile(place, source, overlapping=sampling is Sampling.RANDOM)
        return _sampled(spec, windows, sampling, source.model, sizes, epoch_items=windows.num_apart)
    if (path / split).is_dir():
        path = path / split
    images = ImageFolder(path, source)
    return _sampled(spec, images, spec.sampling or Sampling.SHUFFLED, source.model, sizes)


def _sampled(
    spec: DataSpec,
    samples: Samples,
    sampling: Sampling,
    model: nn.Module,
    sizes: Sequence[int],
    *,
    epoch_items: int = 0,
) -> SampledBatches:
    try:
        order = SampleOrder(
            num_items=len(samples),
            batch_size=sum(sizes),
            sampling=sampling,
            last=spec.last_batch,
            seed=spec.seed,
            epoch_items=epoch_items if sampling is Sampling.RANDOM else 0,
        )
    except InvalidInputError as exc:
        raise InvalidInputError(f"{samples.name}: {exc}") from exc
    return SampledBatches(samples, model, sizes, order)


class _SameBatch:
    """Gives every step the batch of the first."""

    steps_per_epoch = 1

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.state, self.load_state = batches.state, batches.load_state

    def batch(self, _: int) -> Callable[[int, str], Tensor]:
        return self._batches.batch(0)


class _Frame:
    """The place of samples and labels in what a model is given."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self.example = lru_cache(maxsize=8)(source.example)
        self.main, self.labels, self._others = self._places()

    def _places(self) -> tuple[Tensor, Tensor | None, list[tuple[str, Tensor]]]:
        example = self.example(0)
        found = [
            (name, leaf)
            for name, leaf in leaves_of((example.args, dict(example.kwargs)))
            if isinstance(leaf, Tensor)
        ]
        if not found:
            raise InvalidInputError(f"{self._source.name!r} reads no tensor")
        labels = example.labels if isinstance(example.labels, Tensor) else None
        return found[0][1], labels, found[1:]

    def refuse(self, name: str, gives: str) -> InvalidInputError:
        """Return the error that the model reads something else."""
        main, labels = self.main, self.labels
        reads = f"{_shape(main)}{f' with labels {_shape(labels)}' if labels is not None else ''}"
        more = f" and {len(self._others)} more" if self._others else ""
        return InvalidInputError(
            f"{name} gives {gives}; {self._source.name!r} reads {reads}{more}: "
            "--data package.module:callable can give that"
        )

    @property
    def reads_more(self) -> bool:
        """Whether the model reads tensors besides that are not just ones."""
        return any(bool((leaf != 1).any()) for _, leaf in self._others)

    def filled(self, main: Tensor, labels: Tensor) -> Example:
        """Return a microbatch as the model takes it."""
        template = self.example(len(main))
        wanted = next(
            leaf
            for _, leaf in leaves_of((template.args, dict(template.kwargs)))
            if isinstance(leaf, Tensor)
        )
        place = template.labels.device if isinstance(template.labels, Tensor) else wanted.device

        def given(leaf: object) -> object:
            return main.to(wanted.device, wanted.dtype) if leaf is wanted else leaf

        return replace(
            template,
            args=map_leaves(given, template.args),
            kwargs=map_leaves(given, dict(template.kwargs)),
            labels=labels.to(place),
            batch_size=len(main),
        )


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape[1:])} of {str(tensor.dtype).removeprefix('torch.')} per sample"


class TokenFile:
    """Windows of a file of tokens: numbers of 16 or 32 bits, one after the other, without a header.

    A sample is as many tokens as the model reads, its labels are the tokens that follow each.
    """

    def __init__(self, text: str, source: ModelSource, *, overlapping: bool) -> None:
        """Open a file.

        Args:
            text: Its path, with ``?dtype=uint32`` where tokens have 32 bits.
            source: The model.
            overlapping: Whether a window may begin at any token; otherwise at every window's end.

        Raises:
            InvalidInputError: It is no such file, or the model reads something else.
        """
        place, _, options = text.partition("?")
        key, _, dtype = options.partition("=")
        if options and (key != "dtype" or dtype not in TOKEN_TYPES):
            raise InvalidInputError(
                f"{text}: {options!r} is not understood; write ?dtype={' or '.join(TOKEN_TYPES)}"
            )
        self.name, self._path = place, Path(place)
        self._type = np.dtype(dtype or TOKEN_TYPES[0]).newbyteorder("<")
        self._frame = _Frame(source)
        main, labels = self._frame.main, self._frame.labels
        reads_tokens = (
            labels is not None
            and main.dim() == 2
            and main.shape == labels.shape
            and not (main.is_floating_point() or labels.is_floating_point())
            and bool((labels >= 0).all())
            and not self._frame.reads_more
        )
        if not reads_tokens:
            raise self._frame.refuse(place, "tokens and those that follow")
        self._length, self._overlapping = int(main.shape[1]), overlapping
        self._check_tokens(source.model, given=bool(dtype))
        if len(self) < 1:
            raise InvalidInputError(
                f"{place} has {len(self._tokens)} tokens; a sample needs {self._length + 1}"
            )

    @cached_property
    def _tokens(self) -> np.ndarray[Any, Any]:
        size = self._path.stat().st_size
        if size % self._type.itemsize or not size:
            raise InvalidInputError(
                f"{self.name} has {size} bytes; expected tokens of {self._type.itemsize} bytes"
            )
        return np.memmap(self._path, self._type, mode="r")

    def _check_tokens(self, model: nn.Module, *, given: bool) -> None:
        """Check the tokens at both ends of the file: width, and whether the model has them."""
        ends = np.concatenate([self._tokens[:_LOOKED_AT], self._tokens[-_LOOKED_AT:]])
        even = self._tokens[:_LOOKED_AT:2]
        if not given and len(ends) > 64 and ends[1::2].max() < 8 < even.max():
            raise InvalidInputError(
                f"{self.name}: every second number of 16 bits is below 8, as in a file of 32-bit "
                f"tokens; write {self.name}?dtype=uint32, or ?dtype=uint16 if it is right"
            )
        tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        if tables and int(ends.max()) >= max(tables):
            raise InvalidInputError(
                f"{self.name} has token {int(ends.max())}; the model's vocabulary ends at "
                f"{max(tables) - 1}"
            )

    def __len__(self) -> int:
        """Return how many windows there are."""
        return len(self._tokens) - self._length if self._overlapping else self.num_apart

    @property
    def num_apart(self) -> int:
        """Windows that do not overlap: those that hold every token once."""
        return (len(self._tokens) - 1) // self._length

    def read(self, rows: Longs) -> Example:
        """Return some windows."""
        begin = rows if self._overlapping else rows * self._length
        places = begin[:, None] + np.arange(self._length + 1)
        tokens = torch.from_numpy(self._tokens[places].astype(np.int64))
        return self._frame.filled(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class ImageFolder:
    """Images in a sub-folder for each class, in the order of their names.

    An image is a file that PIL reads, scaled to the model's size, or an array (``.npy``, ``.pt``)
    of one image, or of several with a first dimension more. Bytes are divided by 255 and normalised
    as ImageNet's; arrays of floats are taken as they are.
    """

    def __init__(self, folder: Path, source: ModelSource) -> None:
        """List a folder.

        Raises:
            InvalidInputError: It has no classes or no images, or the model reads something else.
            UnsupportedError: PIL is missing.
        """
        self.name, self._frame = str(folder), _Frame(source)
        main, labels = self._frame.main, self._frame.labels
        reads_images = (
            main.dim() == 4
            and main.is_floating_point()
            and labels is not None
            and labels.dim() == 1
            and not labels.is_floating_point()
            and not self._frame.reads_more
        )
        if not reads_images:
            raise self._frame.refuse(self.name, "images and their classes")
        self._shape = tuple(main.shape[1:])
        self.classes = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir()))
        # File, place in it (-1 = it is one image), class.
        self._items: list[tuple[Path, int, int]] = []
        for number, name in enumerate(self.classes):
            for path in sorted((folder / name).iterdir()):
                self._items += [(path, row, number) for row in self._rows(path)]
        if not self._items:
            raise InvalidInputError(
                f"{folder} has no images; expected a sub-folder for each class, with images "
                f"({', '.join(_IMAGES[:3])} ...) or arrays ({', '.join(ARRAYS)})"
            )

    def _rows(self, path: Path) -> Sequence[int]:
        ending = path.suffix.lower()
        if ending in ARRAYS:
            array = _read_array(path)
            return range(len(array)) if array.ndim == 4 else (-1,)
        if ending not in _IMAGES:
            return ()
        if importlib.util.find_spec("PIL") is None:
            raise UnsupportedError(
                f"{path} needs Pillow to be read: pip install pillow; or save images as .npy or .pt"
            )
        return (-1,)

    def __len__(self) -> int:
        """Return how many images there are."""
        return len(self._items)

    def read(self, rows: Longs) -> Example:
        """Return some images."""
        found = [self._items[row] for row in rows.tolist()]
        images = torch.stack([self._image(path, row) for path, row, _ in found])
        return self._frame.filled(images, torch.tensor([number for *_, number in found]))

    def _image(self, path: Path, row: int) -> Tensor:
        channels, height, width = self._shape
        if path.suffix.lower() in ARRAYS:
            array = _read_array(path)
            array = array if row < 0 else array[row]
            if array.shape == (height, width, channels) != self._shape:
                array = np.moveaxis(array, -1, 0)
            if array.shape != self._shape:
                raise InvalidInputError(
                    f"{path} has shape {list(array.shape)}; the model reads {list(self._shape)}"
                )
        else:
            from PIL import Image  # noqa: PLC0415 (an extra)

            with Image.open(path) as image:
                scaled = image.convert("L" if channels == 1 else "RGB").resize((width, height))
                array = np.asarray(scaled, np.uint8).reshape(height, width, -1)
            array = np.moveaxis(array, -1, 0)
        made = torch.from_numpy(np.array(array, order="C"))
        if made.is_floating_point():
            return made
        made = made.float() / 255
        if channels != len(_MEAN):
            return made * 2 - 1
        mean, spread = (torch.tensor(figures).view(-1, 1, 1) for figures in (_MEAN, _SPREAD))
        return (made - mean) / spread


@lru_cache(maxsize=16)
def _read_array(path: Path) -> np.ndarray[Any, Any]:
    """Return the array of a file; those of ``.npy`` are read as they are needed."""
    try:
        if path.suffix.lower() == ".npy":
            found: np.ndarray[Any, Any] = np.load(path, mmap_mode="r")
            return found
        tensor = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(tensor, Tensor):
            raise InvalidInputError(f"{path} holds a {type(tensor).__name__}; expected a tensor")
        return tensor.numpy()
    except (OSError, ValueError, RuntimeError) as exc:
        if isinstance(exc, InvalidInputError):
            raise
        raise InvalidInputError(f"{path} holds no array: {exc}") from exc


class _MapDataset:
    """A dataset of the user's with a length, whose items are collated as torch does."""

    def __init__(self, dataset: Any, name: str, *, has_labels: bool) -> None:  # noqa: ANN401
        self._dataset, self.name, self._has_labels = dataset, name, has_labels

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, rows: Longs) -> Example:
        from torch.utils.data import default_collate  # noqa: PLC0415 (slow to import)

        items = [self._dataset[row] for row in rows.tolist()]
        collate = getattr(self._dataset, "collate_fn", default_collate)
        return split_batch(collate(items), [len(items)], has_labels=self._has_labels)[0]


class _CalledAgain:
    """An iterable that asks a generator function again each time it is read."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def __iter__(self) -> Iterator[Any]:
        found: Iterator[Any] = self._call()
        return found


def _from_callable(
    spec: DataSpec, text: str, split: str, source: ModelSource, sizes: Sequence[int]
) -> Batches:
    """Return the data of a callable: a dataset with a length, or an iterable of batches."""
    make = find_callable(text)
    known = {"split": split, "seed": spec.seed, "batch_size": sum(sizes)}
    taken = inspect.signature(make).parameters
    given = {name: value for name, value in known.items() if name in taken}

    def call() -> Any:  # noqa: ANN401  # the user's
        try:
            return make(**given)
        except Exception as exc:
            raise InvalidInputError(f"{text} failed: {type(exc).__name__}: {exc}") from exc

    made = call()
    has_labels = source.loss is not None
    if hasattr(made, "__getitem__") and hasattr(made, "__len__"):
        samples = _MapDataset(made, text, has_labels=has_labels)
        return _sampled(spec, samples, spec.sampling or Sampling.SHUFFLED, source.model, sizes)
    if not hasattr(made, "__iter__"):
        raise InvalidInputError(
            f"{text} returned a {type(made).__name__}; expected a Dataset, or an iterable of "
            "batches"
        )
    if isinstance(made, Iterator):
        made = _CalledAgain(call)
    return StreamedBatches(
        made, text, source.model, sizes, has_labels=has_labels, last=spec.last_batch
    )
