"""Batches of a data set as a script reads them, the same ones in every rank, and how far it is.

A batch counts as read when a step was made on it. So the position that a checkpoint holds is that
of its last step, whether a script saves before or after it asks for the next batch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from partita.errors import InvalidInputError
from partita.runtime.batches import permutation
from partita.runtime.training.saving import random_state, set_random_state


class LoaderPositions:
    """How far the loaders of a script are, by the order in which the script began to read them.

    Attributes:
        is_paused: Whether batches are read for something else than steps: loaders that are begun
            meanwhile have no number.
        goes_on: Whether a loader has gone on from a checkpoint, with its random numbers.
    """

    def __init__(self, find: Callable[[], Mapping[str, Any]]) -> None:
        """Begin with no loader.

        Args:
            find: Returns the small values of the checkpoint that the script goes on from; empty =
                there is none. Called when the first loader is begun.
        """
        self._find = find
        self._saved: Mapping[str, Any] | None = None
        self._reached: dict[str, Mapping[str, Any]] = {}
        self._given: tuple[str, Mapping[str, Any]] | None = None
        self._begun, self._passes = 0, 0
        self.is_paused, self.goes_on = False, False

    def begin(self) -> tuple[str, Mapping[str, Any]]:
        """Return the number of the next loader, empty = it has none, and where it goes on."""
        if self.is_paused:
            return "", {}
        if self._saved is None:
            self._saved = self._find()
            self._reached = dict(self._saved.get("loaders") or {})
            self._passes = int(self._saved.get("passes", 0))
        number, self._begun = str(self._begun), self._begun + 1
        return number, self._reached.get(number, {})

    def restore_random(self) -> None:
        """Let random numbers go on where the checkpoint was saved; reading on may draw some."""
        saved = (self._saved or {}).get("random")
        if saved:
            set_random_state(saved)
            self.goes_on = True

    def gives(self, number: str, position: Mapping[str, Any]) -> bool:
        """Take note of the position after a batch; returns whether the script is given it.

        It is not where a run has gone back and leaves out the data since.
        """
        if not number:
            return True
        self._given = number, position
        self._passes -= 1
        return self._passes < 0

    def reach(self) -> None:
        """Take note that a step was made on the batch that was given last."""
        if self._given is not None:
            number, position = self._given
            self._reached[number], self._given = position, None

    def state(self) -> dict[str, Any]:
        """Return the positions after the last step, for a checkpoint; empty = there are none."""
        return {"loaders": dict(self._reached)} if self._reached else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Reads a data set.

    Attributes:
        dataset: Anything with a length and items, or an iterable of batches.
        batch_size: Samples of a batch; 0 for an iterable of batches.
        seed: Of the order; every epoch has another one.
        shuffle: Whether samples come in another order than theirs.
        epochs: How often all samples are seen.
        drop_last: Whether the samples that fill no batch are left out.
        collate: Makes a batch of samples; None = torch's.
        positions: Where it says how far it is.
    """

    dataset: Any
    batch_size: int
    seed: int
    shuffle: bool
    epochs: int
    drop_last: bool
    collate: Callable[[list[Any]], Any] | None
    positions: LoaderPositions

    def __iter__(self) -> Iterator[Any]:
        """Return the batches, from where a checkpoint says."""
        return self._sampled() if has_items(self.dataset) else self._streamed()

    def _sampled(self) -> Iterator[Any]:
        collate = self.collate
        if collate is None:
            from torch.utils.data import default_collate  # noqa: PLC0415 (imports a lot)

            collate = default_collate
        count = len(self.dataset)
        facts = {"samples": count, "seed": self.seed if self.shuffle else None}
        number, saved = self.positions.begin()
        if saved:
            _check_same_data(saved, facts)
            self.positions.restore_random()
        first = int(saved.get("epoch", 0))
        for epoch in range(first, self.epochs):
            order = permutation(count, self.seed + epoch).tolist() if self.shuffle else range(count)
            begin = int(saved.get("position", 0)) if epoch == first else 0
            for place in range(begin, count, self.batch_size):
                rows = order[place : place + self.batch_size]
                if len(rows) < self.batch_size and self.drop_last:
                    break
                after = {**facts, "epoch": epoch, "position": place + len(rows)}
                batch = collate([self.dataset[row] for row in rows])
                if self.positions.gives(number, after):
                    yield batch

    def _streamed(self) -> Iterator[Any]:
        """Yield what an iterable gives.

        One with ``state_dict`` and ``load_state_dict`` (torchdata's ``StatefulDataLoader``) goes on
        by them; any other is read again from the beginning of the epoch, with the random numbers
        that it had then, and what was seen is passed over.
        """
        seeks = hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")
        number, saved = self.positions.begin()
        first = int(saved.get("epoch", 0))
        for epoch in range(first, self.epochs):
            goes_on = bool(saved) and epoch == first
            if goes_on and seeks and "state" in saved:
                self.dataset.load_state_dict(saved["state"])
            elif goes_on:
                set_random_state(saved["random"])
            before = {"epoch": epoch} if seeks else {"epoch": epoch, "random": random_state()}
            read = int(saved["batches"]) if goes_on else 0
            items = iter(self.dataset)
            if goes_on:
                for _ in range(0 if seeks and "state" in saved else read):
                    next(items, None)
                self.positions.restore_random()
            for batch in items:
                read += 1
                state = {"state": self.dataset.state_dict()} if seeks else {}
                if self.positions.gives(number, {**before, **state, "batches": read}):
                    yield batch


def has_items(dataset: Any) -> bool:  # noqa: ANN401  # the user's
    """Return whether samples of a data set can be had in any order."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _check_same_data(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Check that a position is one in these data, in the same order.

    Raises:
        InvalidInputError: It is not; names the difference.
    """
    for what, value in here.items():
        if saved.get(what) != value:
            raise InvalidInputError(
                f"the loader has {what} {value}, the saved position is one with {what} "
                f"{saved.get(what)}; give the same data and seed, or begin in another folder of "
                "checkpoints"
            )
