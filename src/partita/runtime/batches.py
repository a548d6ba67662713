"""Batches of a run: which samples a step reads, and how they are cut into microbatches.

A source is asked by step, so that a run that resumes, or a rank that reads the fourth microbatch
alone, replays nothing. Only ranks whose stages read inputs or labels ask, each for the microbatches
that it runs: nobody else opens a file.

The samples of step k over all replicas are those that torch's ``DistributedSampler`` gives with the
same seed: the epoch's permutation is drawn by ``seed + epoch``, and a last batch that is not full
is dropped, or filled up from the beginning of that permutation.
"""

import hashlib
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor, nn

from partita.capture.setting import Example, example_inputs, split_labels
from partita.capture.sources import ModelSource
from partita.capture.tree import children_of, leaves_of, map_leaves
from partita.core.columns import Longs
from partita.errors import InvalidInputError

Getter: TypeAlias = Callable[[int, str], Tensor]
"""Returns an input of the model, given the microbatch of a step and the name of the tensor."""

CHECKED_STEPS = 10
"""Steps from the first on in which batches are compared between ranks; later, one in so many."""
_SHAPE_AND_TYPE = operator.attrgetter("shape", "dtype")
_DIGEST_ELEMENTS = 16_384
"""Of a larger tensor, about so many elements, spread over all of it, make its digest: reading every
byte of a batch of images in every step would be seen in the time of a small model."""


class Sampling(StrEnum):
    """Order in which samples are read."""

    RANDOM = "random"
    SHUFFLED = "shuffled"
    SEQUENTIAL = "sequential"


class LastBatch(StrEnum):
    """What becomes of the samples at the end of an epoch that fill no batch."""

    DROP = "drop"
    FILL = "fill"


class Batches(Protocol):
    """The data of a run, step by step."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which all samples are read once; 0 = there is no end."""
        ...

    def batch(self, step: int) -> Getter:
        """Return what gives the inputs of a step, microbatch by microbatch."""
        ...

    def state(self, step: int) -> dict[str, Any]:
        """Return the position before a step as JSON values, for a checkpoint."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a position that ``state`` returned, also with other microbatches.

        Raises:
            InvalidInputError: It is the position in other data.
        """
        ...


class Samples(Protocol):
    """Samples that can be had in any order."""

    @property
    def name(self) -> str:
        """The source, for people."""
        ...

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def read(self, rows: Longs) -> Example:
        """Return some of them as one microbatch."""
        ...


class BatchLoader:
    """Gives the loop of a device its inputs; the getter of the current step is kept."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._step = -1
        self._getter: Getter | None = None

    def __call__(self, step: int, microbatch: int, name: str) -> Tensor:
        """Return an input of the model."""
        if self._getter is None or step != self._step:
            self._step, self._getter = step, self._batches.batch(step)
        return self._getter(microbatch, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """Which samples a batch has.

    Attributes:
        num_items: Number of samples.
        batch_size: Samples of a step.
        sampling: The order.
        last: What becomes of the samples that fill no batch.
        seed: Seed of the order.
        epoch_items: Samples that hold all data once, where samples overlap; 0 = all of them do.
    """

    num_items: int
    batch_size: int
    sampling: Sampling = Sampling.SHUFFLED
    last: LastBatch = LastBatch.DROP
    seed: int = 0
    epoch_items: int = 0

    def __post_init__(self) -> None:
        if self.num_items < 1:
            raise InvalidInputError("there is no sample")
        if not self.steps_per_epoch:
            raise InvalidInputError(
                f"{self.num_items} samples do not fill a batch of {self.batch_size}; a smaller "
                "--batch-size does, or --last-batch fill"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Batches in which all samples are read once, or about as many are drawn."""
        more = self.batch_size - 1 if self.last is LastBatch.FILL else 0
        steps = ((self.epoch_items or self.num_items) + more) // self.batch_size
        return max(1, steps) if self.epoch_items else steps

    def rows(self, position: int) -> Longs:
        """Return the samples of the batch that begins at a position, counted in samples."""
        if self.sampling is Sampling.RANDOM:
            draw = np.random.default_rng((self.seed, position // self.batch_size))
            return draw.integers(0, self.num_items, self.batch_size, np.int64)
        epoch, place = divmod(position, self.steps_per_epoch * self.batch_size)
        rows = np.arange(place, place + self.batch_size) % self.num_items
        if self.sampling is Sampling.SEQUENTIAL:
            return rows
        return permutation(self.num_items, self.seed + epoch)[rows]


@lru_cache(maxsize=1)
def permutation(size: int, seed: int) -> Longs:
    """Return the order of an epoch, as ``DistributedSampler`` draws it; the last one is kept."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).numpy()


class SampledBatches:
    """Batches of samples that can be had in any order."""

    def __init__(
        self, samples: Samples, model: nn.Module, sizes: Sequence[int], order: SampleOrder
    ) -> None:
        self._samples, self._model, self._order = samples, model, order
        self._edges = np.r_[0, np.cumsum(sizes)].tolist()
        # A position in samples, and the step that begins there.
        self._position, self._first = 0, 0
        self._kept: tuple[int, int] = (-1, -1)
        self._inputs: dict[str, Tensor] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which all samples are read once."""
        return self._order.steps_per_epoch

    def _begin(self, step: int) -> int:
        return self._position + (step - self._first) * self._order.batch_size

    def batch(self, step: int) -> Getter:
        """Return what gives the inputs of a step; a microbatch is read when it is asked for."""
        rows = self._order.rows(self._begin(step))

        def get(microbatch: int, name: str) -> Tensor:
            if self._kept != (step, microbatch):
                begin, end = self._edges[microbatch : microbatch + 2]
                example = self._samples.read(rows[begin:end])
                self._inputs = example_inputs(self._model, example)
                self._kept = (step, microbatch)
            return self._inputs[name]

        return get

    def state(self, step: int) -> dict[str, Any]:
        """Return the position before a step."""
        return {
            "source": self._samples.name,
            "samples": len(self._samples),
            "seed": self._order.seed,
            "step": step,
            "position": self._begin(step),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a position."""
        for what, here in (("samples", len(self._samples)), ("seed", self._order.seed)):
            if state.get(what) != here:
                raise InvalidInputError(
                    f"{self._samples.name} has {what} {here}, the saved position is one in "
                    f"{state.get('source')} with {what} {state.get(what)}; give the same --data "
                    "and --seed"
                )
        self._first, self._position = int(state["step"]), int(state["position"])
        self._kept = (-1, -1)


class GeneratedBatches:
    """Batches that a model's source makes, by their number."""

    steps_per_epoch = 0

    def __init__(
        self,
        source: ModelSource,
        sizes: Sequence[int],
        *,
        same_data: bool = False,
        held_out: bool = False,
    ) -> None:
        """Take the source.

        Args:
            source: The model with what makes its examples.
            sizes: Samples of each microbatch.
            same_data: Whether every step has the data of the first.
            held_out: Whether these are for evaluation: turns from -1 downwards, which no training
                step has.
        """
        self._source, self._sizes = source, sizes
        self._same_data, self._held_out = same_data, held_out
        self._kept: int | None = None
        self._inputs: dict[str, Tensor] = {}

    def batch(self, step: int) -> Getter:
        """Return what gives the inputs of a step; keeps the last microbatch made."""
        first = 0 if self._same_data else step * len(self._sizes)

        def get(microbatch: int, name: str) -> Tensor:
            turn = -1 - first - microbatch if self._held_out else first + microbatch
            if turn != self._kept:
                example = self._source.example(self._sizes[microbatch], turn)
                self._inputs = example_inputs(self._source.model, example)
                self._kept = turn
            return self._inputs[name]

        return get

    def state(self, step: int) -> dict[str, Any]:
        """Return the position before a step."""
        return {"source": "generated", "step": step}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a position: the number of a step says it all."""


class StreamedBatches:
    """Batches of an iterable, which begins again when it ends.

    What has ``state_dict`` and ``load_state_dict`` (torchdata's ``StatefulDataLoader``) is sought
    by them; anything else by reading on from its beginning.
    """

    def __init__(
        self,
        loader: Any,  # noqa: ANN401  # the user's
        name: str,
        model: nn.Module,
        sizes: Sequence[int],
        *,
        has_labels: bool,
        last: LastBatch = LastBatch.DROP,
    ) -> None:
        self._loader, self._name, self._model = loader, name, model
        self._sizes, self._has_labels, self._last = sizes, has_labels, last
        self._items: Any = None
        self._next = 0  # number of the step that the iterator gives next
        self._parts: list[Example] = []
        self._kept: tuple[int, int] = (-1, -1)
        self._inputs: dict[str, Tensor] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Batches of the iterable, where it knows; 0 = it does not say."""
        return len(self._loader) if hasattr(self._loader, "__len__") else 0

    def batch(self, step: int) -> Getter:
        """Return what gives the inputs of a step."""
        if step < self._next - 1:
            self._items, self._next = None, 0
        while self._next <= step:
            self._parts = self._read()
            self._next += 1
        parts = self._parts

        def get(microbatch: int, name: str) -> Tensor:
            if self._kept != (step, microbatch):
                self._inputs = example_inputs(self._model, parts[microbatch])
                self._kept = (step, microbatch)
            return self._inputs[name]

        return get

    def _read(self) -> list[Example]:
        wanted = sum(self._sizes)
        for _ in range(2):  # once more from the beginning where it has ended
            if self._items is None:
                self._items = iter(self._loader)
            for batch in self._items:
                found = samples_of(batch)
                if found < wanted:
                    if self._last is LastBatch.DROP:
                        continue
                    batch = _filled(batch, found, wanted)  # noqa: PLW2901 (the same batch)
                return split_batch(batch, self._sizes, has_labels=self._has_labels)
            self._items = None
        raise InvalidInputError(
            f"{self._name} gives no batch of {wanted} samples; let it make batches of that many"
        )

    def state(self, step: int) -> dict[str, Any]:
        """Return the position before a step; with that of the loader where it has one."""
        found: dict[str, Any] = {"source": self._name, "step": step}
        if hasattr(self._loader, "state_dict") and self._next == step:
            found["loader"] = self._loader.state_dict()
        return found

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a position."""
        self._items, self._next, self._kept = None, 0, (-1, -1)
        if "loader" in state and hasattr(self._loader, "load_state_dict"):
            self._loader.load_state_dict(state["loader"])
            self._next = int(state["step"])


def samples_of(batch: Any) -> int:  # noqa: ANN401  # the user's
    """Return how many samples a batch has: the rows of its first tensor."""
    for _, leaf in leaves_of(batch):
        if _is_cut(leaf):
            return int(leaf.shape[0])
    return 0


def signature_of(batch: Any) -> Hashable:  # noqa: ANN401  # the user's
    """Return what tells a flat batch of tensors from others: its places, shapes and types.

    Batches of one signature have as many samples and are of one kind. None = it holds other things.
    """
    if type(batch) is dict:
        places, leaves = (dict, *batch), batch.values()
    elif type(batch) in (tuple, list):
        places, leaves = (type(batch),), batch
    else:
        return None
    return (*places, *map(_SHAPE_AND_TYPE, leaves)) if set(map(type, leaves)) == {Tensor} else None


def kind_of_batch(batch: Any, samples: int) -> tuple[tuple[str, Hashable], ...]:  # noqa: ANN401
    """Return what a captured graph has of a batch, beside its samples.

    That is the shape of a sample and the type of each tensor, and all values that are no tensors.
    """

    def described(leaf: Any) -> Hashable:  # noqa: ANN401  # the user's
        if isinstance(leaf, Tensor):
            shape = tuple(leaf.shape)
            return (shape[1:] if shape[:1] == (samples,) else shape, leaf.dtype)
        # Equal numbers of different types, such as 1 and True, may take different ways.
        return (type(leaf), leaf if isinstance(leaf, Hashable) else repr(leaf))

    return tuple((place, described(leaf)) for place, leaf in leaves_of(batch))


def _filled(batch: Any, found: int, wanted: int) -> Any:  # noqa: ANN401  # the user's
    """Return a batch whose first samples are repeated until it is full."""
    return taken_from(batch, found, [place % found for place in range(wanted)])


def taken_from(batch: Any, samples: int, rows: Sequence[int]) -> Any:  # noqa: ANN401  # the user's
    """Return a batch of some of the samples of another."""

    def take(leaf: Any) -> Any:  # noqa: ANN401  # the user's
        return leaf[list(rows)] if _is_cut(leaf) and leaf.shape[0] == samples else leaf

    return map_leaves(take, batch)


def split_batch(batch: Any, sizes: Sequence[int], *, has_labels: bool) -> list[Example]:  # noqa: ANN401
    """Return the microbatches of a batch; the arguments are those of ``BatchParts``."""
    return list(BatchParts(batch, sizes, has_labels=has_labels))


class BatchParts(Sequence[Example]):
    """The microbatches of a batch, each cut when it is asked for: a rank runs some of them."""

    def __init__(
        self,
        batch: Any,  # noqa: ANN401  # the user's
        sizes: Sequence[int],
        *,
        has_labels: bool,
        is_known: bool = False,
    ) -> None:
        """Take a batch.

        Args:
            batch: Arguments of the model; with labels as ``split_labels`` takes it.
            sizes: Samples of each microbatch.
            has_labels: Whether there are labels.
            is_known: Whether a batch of its signature was taken before.

        Raises:
            InvalidInputError: It is something else, or has another number of samples.
        """
        pair: tuple[Any, Any] = split_labels(batch) if has_labels else (batch, None)
        self._inputs, self._labels = pair
        self._sizes, self._samples = sizes, sum(sizes)
        if is_known:
            return
        if len(sizes) > 1:
            _check_no_lists(batch, self._samples)
        found = {leaf.shape[0] for _, leaf in leaves_of(self._inputs) if _is_cut(leaf)}
        if self._samples not in found:
            raise InvalidInputError(
                f"the batch has {', '.join(map(str, sorted(found))) or 'no'} samples; the plan is "
                f"for {self._samples}: {len(sizes)} microbatches"
            )

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._sizes)

    @overload
    def __getitem__(self, place: int) -> Example: ...

    @overload
    def __getitem__(self, place: slice) -> list[Example]: ...

    def __getitem__(self, place: int | slice) -> Example | list[Example]:
        """Return a microbatch, or several."""
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        size, begin = self._sizes[place], sum(self._sizes[:place])
        rows = slice(begin, begin + size)
        labels = _cut(self._labels, rows, self._samples)
        return example_of(_cut(self._inputs, rows, self._samples), labels, size)


def _check_no_lists(node: Any, samples: int, name: str = "the batch") -> None:  # noqa: ANN401
    """Check that no list has a value for each sample: microbatches would all get the whole list.

    Raises:
        InvalidInputError: One has.
    """
    if isinstance(node, Tensor):
        return
    is_list = isinstance(node, list) and len(node) == samples > 1
    if is_list and all(isinstance(value, str | int | float) for value in node):
        raise InvalidInputError(
            f"{name} has a list of {samples} values, one for each sample; a microbatch needs its "
            "own of them: give a tensor"
        )
    found = children_of(node)
    for child, value in zip(found.names, found.values, strict=True) if found else ():
        _check_no_lists(value, samples, f"{child!r} of the batch")


def cut_batch(batch: Any, most: int) -> list[Any]:  # noqa: ANN401  # the user's
    """Return a batch in parts of at most so many samples, in order."""
    samples = samples_of(batch)
    if samples <= most:
        return [batch]
    begins = range(0, samples, most)
    return [_cut(batch, slice(begin, begin + most), samples) for begin in begins]


def _is_cut(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _cut(node: Any, rows: slice, samples: int) -> Any:  # noqa: ANN401  # the user's
    """Return a container with those rows of every tensor that has a row for each sample."""

    def take(leaf: Any) -> Any:  # noqa: ANN401  # the user's
        return leaf[rows] if _is_cut(leaf) and leaf.shape[0] == samples else leaf

    return map_leaves(take, node)


def example_of(inputs: Any, labels: Any = None, batch_size: int = 0) -> Example:  # noqa: ANN401
    """Return arguments of a model as an example: a mapping, a tuple, or a single one."""
    if isinstance(inputs, Mapping):
        return Example(kwargs=dict(inputs), labels=labels, batch_size=batch_size)
    args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    return Example(args=args, labels=labels, batch_size=batch_size)


def batch_digest(batch: Any) -> int:  # noqa: ANN401  # the user's
    """Return a 64-bit digest of a batch: places, types, shapes and bytes of its tensors.

    A large tensor counts by elements at equal distances, so two that differ in a few elements only
    may have the same digest; two different draws of samples have not.
    """
    digest = hashlib.blake2b(digest_size=8)
    for place, leaf in leaves_of(batch):
        digest.update(f"{place} {type(leaf).__name__}\n".encode())
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}\n".encode())
            digest.update(_some_bytes(leaf))
        elif isinstance(leaf, bool | int | float | str | bytes | None):
            digest.update(repr(leaf).encode())
    return int.from_bytes(digest.digest(), "little", signed=True)


def _some_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's elements, or of some at an odd distance in a large one.

    An odd distance does not stay in one column, as widths are mostly even.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return b""
    flat = tensor.detach().resolve_conj().reshape(-1)
    distance = flat.numel() // _DIGEST_ELEMENTS
    if distance > 1:
        flat = flat[:: distance | 1]
    return flat.contiguous().cpu().view(torch.uint8).numpy().tobytes()
