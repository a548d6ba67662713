"""When a run saves, and where it goes on: what connects a rank's steps with its checkpoints."""

import base64
import importlib
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from partita.core.plan import Plan
from partita.errors import InvalidInputError
from partita.ranks.member import Member
from partita.runtime.checkpoint.files import newest_in, read_manifest

if TYPE_CHECKING:
    from partita.runtime.checkpoint.checkpoint import Holding

logger = logging.getLogger(__name__)

AUTO = "auto"
"""Instead of a checkpoint: the newest of the folder that is whole, or the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """When and where a run saves, and what it goes on from.

    Attributes:
        folder: Where its checkpoints are.
        every: Steps from one checkpoint to the next; 0 = only where it ends before its last step.
        keep: Number of checkpoints that stay.
        resume: A checkpoint, or a folder of them, to go on from; ``auto`` = the newest of its own
            folder; empty = it begins at the beginning.
        otherwise: With ``auto``, the checkpoint to go on from where its own folder has none.
    """

    folder: str
    every: int = 0
    keep: int = 2
    resume: str = ""
    otherwise: str = ""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise InvalidInputError(f"save_every is {self.every}; expected 0 or more steps")
        if self.keep < 1:
            raise InvalidInputError(f"keep is {self.keep}; expected 1 or more checkpoints")

    def again(self) -> "Saving":
        """Return how a run that is started again goes on: by what it has saved itself."""
        if self.resume == AUTO:
            return self
        return replace(self, resume=AUTO, otherwise=self.resume)


def saving_of(path: Path, keep: int = 2) -> Saving:
    """Return how a script goes on from a folder of checkpoints, or from one of them."""
    if newest_in(path) == path:
        return Saving(folder=str(path.parent), keep=keep, resume=str(path))
    return Saving(folder=str(path), keep=keep, resume=AUTO)


def check_unstarted(steps: int) -> None:
    """Check that a script goes on from a checkpoint before its first step.

    Raises:
        InvalidInputError: It has made steps.
    """
    if steps:
        raise InvalidInputError(
            f"{steps} steps were made; a script goes on from a checkpoint before its first step"
        )


def import_writer() -> None:
    """Import what writes checkpoints, before ranks are forked: it takes each of them a second."""
    importlib.import_module("partita.runtime.checkpoint.checkpoint")


class Saver:
    """Saves and resumes one rank of a run, together with the other ranks."""

    def __init__(
        self,
        saving: Saving,
        member: Member | None,
        *,
        plan: Plan | None,
        model: str,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        """Open the checkpoints; all ranks call it.

        Args:
            saving: When and where.
            member: This process; None = it is alone.
            plan: The plan of the run.
            model: Name of its graph.
            warn: Called, on the first rank, with what people should know.
        """
        # Torch's part is imported here: it takes a second, and most runs save nothing.
        from partita.runtime.checkpoint.checkpoint import Checkpoints, open_checkpoints  # noqa: PLC0415

        self._saving, self._plan, self._last = saving, plan, -1
        self._found: Path | None = None
        self._has_looked = False
        folder, keep = Path(saving.folder), saving.keep
        self.checkpoints: Checkpoints = (
            Checkpoints(folder, keep=keep, warn=warn, model=model)
            if member is None
            else open_checkpoints(member, folder, keep=keep, warn=warn, model=model)
        )

    def found(self) -> Path | None:
        """Return the checkpoint that the run goes on from, None = from none; all ranks call it.

        It is looked for, and read through, once.

        Raises:
            InvalidInputError: There is none where one was named.
        """
        if not self._has_looked:
            self._found, self._has_looked = self._look(), True
        return self._found

    def _look(self) -> Path | None:
        saving = self._saving
        if not saving.resume:
            return None
        if saving.resume == AUTO:
            newest = self.checkpoints.newest()
            if newest is not None or not saving.otherwise:
                return newest
        named = Path(saving.otherwise if saving.resume == AUTO else saving.resume)
        return self.checkpoints.named(named)

    def steps_of(self, path: Path | None) -> int:
        """Return the steps that were done before a checkpoint was saved; of none, 0."""
        return 0 if path is None else read_manifest(path).step

    def load(self, path: Path, holdings: Mapping[str, "Holding"]) -> dict[str, Any]:
        """Fill what a rank holds from a checkpoint, and return its small values."""
        extra = self.checkpoints.load(path, holdings)
        self._last = int(extra["step"])
        return extra

    def is_due(self, done: int) -> bool:
        """Return whether there is to be a checkpoint after so many steps."""
        return bool(self._saving.every) and done % self._saving.every == 0 and done != self._last

    def save(self, done: int, holdings: Mapping[str, "Holding"], extra: Mapping[str, Any]) -> None:
        """Save after so many steps, unless that was just done; all ranks call it."""
        if done != self._last:
            self.checkpoints.save(done, holdings, {**extra, "step": done}, self._plan)
            self._last = done

    def wait(self) -> None:
        """Wait for what is being written."""
        self.checkpoints.wait()


def random_state() -> dict[str, Any]:
    """Return the state of the random numbers of Python, numpy and torch, as JSON can hold it."""
    version, numbers, gauss = random.getstate()
    # The generator of old, which scripts draw from.
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, _to_text(np.asarray(keys).tobytes()), position, has_gauss, cached],
        "torch": _to_text(torch.get_rng_state().numpy().tobytes()),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Let random numbers go on where ``random_state`` was asked."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(
        (name, np.frombuffer(_from_text(keys), np.uint32), position, has_gauss, cached)
    )
    torch.set_rng_state(torch.frombuffer(bytearray(_from_text(state["torch"])), dtype=torch.uint8))


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_text(text: str) -> bytes:
    return base64.b64decode(text)
