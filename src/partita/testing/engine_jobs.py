"""Jobs on a real engine, for tests of engines: started, and looked at until something is so."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias

from partita.fleet.engines.protocol import Attempt, Engine, Handle, Order, Place, Status

MINE = "it's $HOME"
"""Value of the variable ``MINE`` of all jobs, which no shell may touch."""
_GRACE_S = 20.0
_PAUSE_S = 0.05


class Started(NamedTuple):
    """A job that was started."""

    attempt: Attempt
    handle: Handle


Start: TypeAlias = Callable[[str, Sequence[Place]], Started]
"""Starts a shell command with what it holds."""


@contextmanager
def started_jobs(engine: Engine, folder: Path, end: Callable[[Handle], object]) -> Iterator[Start]:
    """Yield a function that starts shell commands as jobs of one fleet.

    Args:
        engine: The engine.
        folder: The jobs' folders are ``job-1`` and so on in it.
        end: Ends a job, whatever became of it; called for all of them at last.
    """
    fleet = f"test{os.getpid()}{time.monotonic_ns()}"
    handles: list[Handle] = []

    def start(command: str, places: Sequence[Place]) -> Started:
        attempt = Attempt(len(handles) + 1, 1)
        home = folder / f"job-{attempt.job}"
        home.mkdir()
        order = Order(
            fleet=fleet,
            attempt=attempt,
            command=("sh", "-c", command),
            folder=folder,
            directory=home,
            environment={"MINE": MINE},
            places=tuple(places),
            grace_s=_GRACE_S,
        )
        handles.append(engine.start(order))
        return Started(attempt, handles[-1])

    try:
        yield start
    finally:
        for handle in handles:
            end(handle)


def until(
    engine: Engine, job: Started, done: Callable[[Status], bool], *, limit_s: float = 120.0
) -> Status:
    """Look at a job until something is so, and return how it is then.

    Raises:
        AssertionError: It was not, for as long as the limit.
    """
    last_s = time.monotonic() + limit_s
    while True:
        look = engine.look({job.attempt: job.handle})
        status = look.statuses.get(job.attempt)
        if status is not None and done(status):
            return status
        assert time.monotonic() < last_s, (look, status)
        time.sleep(_PAUSE_S)


def runs(status: Status) -> bool:
    """Return whether a job runs on what it was given."""
    return status.running and status.given is not None


def ended(status: Status) -> bool:
    """Return whether a job has ended."""
    return not status.running
