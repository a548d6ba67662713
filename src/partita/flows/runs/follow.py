"""Runs on other hosts looked at from another terminal: followed to their end, or cancelled."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.errors import (
    InfeasibleError,
    InvalidInputError,
    PartitaError,
    UnsupportedError,
    WorkerError,
)
from partita.runtime.directory import read_run
from partita.runtime.metric_rows import METRICS
from partita.runtime.run_state import HERE, STATE, Progress, RunState, cancel, read_state

_LOOK_S = 0.2
_CANCEL_S = 120.0
"""How long a run may take to save and end."""
_ERRORS: Mapping[int, type[PartitaError]] = {
    kind.exit_code: kind for kind in (InvalidInputError, InfeasibleError, UnsupportedError)
}
DRIVER_LOG = "driver.log"
"""What the driver of a run that was left to itself says."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Follower:
    """What is told of a run that is followed.

    Attributes:
        on_row: Called with each row of its metrics.
        on_line: Called with each line that its driver says.
    """

    on_row: Callable[[Mapping[str, Any]], None] = lambda _: None
    on_line: Callable[[str], None] = lambda _: None


def newest_run(root: Path) -> Path:
    """Return the newest run on other hosts under a folder of runs.

    Raises:
        InvalidInputError: There is none.
    """
    written = sorted(root.glob(f"*/{STATE}"), key=lambda path: path.parent.stat().st_ctime_ns)
    found = [path for path in written if (state := read_state(path.parent)) and state.on != HERE]
    if not found:
        raise InvalidInputError(f"no run on other hosts under {root}; name one")
    return found[-1].parent


def state_of(directory: Path) -> RunState:
    """Return what a run on other hosts is at.

    Raises:
        InvalidInputError: It is none.
    """
    state = read_state(directory)
    if state is None or state.on == HERE:
        raise InvalidInputError(f"{directory} is no run on other hosts: it has no {STATE} of one")
    return state


def follow(directory: Path, follower: Follower, *, limit_s: float | None = None) -> RunState:
    """Tell of a run until it has ended; returns how it did.

    Args:
        directory: The run directory.
        follower: Is told.
        limit_s: How long to look; None = as long as it runs.

    Raises:
        InvalidInputError: It is no run on other hosts.
        WorkerError: Its driver has ended without a word, or it runs for longer than the limit.
    """
    rows, words = _Tail(directory / METRICS), _Tail(directory / DRIVER_LOG)
    begun = time.monotonic()
    while True:
        state = state_of(directory)
        for line in rows.lines():
            follower.on_row(json.loads(line))
        for line in words.lines():
            follower.on_line(line)
        if state.progress is not Progress.RUNNING:
            return state
        if state.has_vanished:
            raise WorkerError(
                f"{directory}: its driver, process {state.pid}, has ended without a word"
            )
        if limit_s is not None and time.monotonic() - begun > limit_s:
            raise WorkerError(f"{directory} has not ended within {limit_s:g} s")
        time.sleep(_LOOK_S)


def require_success(directory: Path, state: RunState) -> None:
    """Check that a run has ended well.

    Raises:
        PartitaError: It has not; the error that it ended with.
    """
    if state.progress is not Progress.ENDED:
        kind = _ERRORS.get(state.exit_code, WorkerError)
        raise kind(f"{directory} {state.progress.value}: {state.error}")
    if read_run(directory).differs:
        raise WorkerError(f"{directory} differs from one process")


def end_run(directory: Path) -> RunState:
    """Cancel a run, and wait until it has ended.

    Raises:
        UnsupportedError: Its driver is on another machine.
        WorkerError: It does not end.
    """
    state = state_of(directory)
    if state.progress is not Progress.RUNNING:
        raise InvalidInputError(f"{directory} has ended already: {state.progress.value}")
    cancel(directory, state)
    return follow(directory, Follower(), limit_s=_CANCEL_S)


class _Tail:
    """A file that grows, line by line."""

    def __init__(self, path: Path) -> None:
        self._path, self._begin = path, 0

    def lines(self) -> Iterator[str]:
        """Yield the whole lines that have come since it was last asked."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._begin)
            whole = file.read().rpartition(b"\n")[0]
        if whole:
            self._begin += len(whole) + 1
            yield from whole.decode(errors="replace").split("\n")
