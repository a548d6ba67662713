"""What a run on other hosts is at, in its directory: who drives it, and how it ended.

Read without torch, from any terminal that sees the directory.
"""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from partita.core.codec import decode_part, parse_json
from partita.documents import write_text
from partita.errors import FormatError, PartitaError, UnsupportedError
from partita.processes import clock_identity

STATE = "state.json"


class Progress(StrEnum):
    """What a run is at."""

    RUNNING = "running"
    ENDED = "ended"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What a run is at.

    Attributes:
        progress: In one word.
        on: Where it runs, as ``--on`` says it.
        pid: The process that drives it.
        born: When that began, by its system; tells it from a later process of the same number.
        machine: The machine of that process; empty = not known.
        error: Why it failed; empty = it has not.
        exit_code: What its driver ends with.
    """

    progress: Progress
    on: str = ""
    pid: int = 0
    born: str = ""
    machine: str = ""
    error: str = ""
    exit_code: int = 0

    @property
    def is_here(self) -> bool:
        """Whether the driver is a process of this machine."""
        return bool(self.machine) and self.machine == clock_identity()

    @property
    def has_vanished(self) -> bool:
        """Whether the driver has ended without a word, as far as can be seen from here."""
        return self.progress is Progress.RUNNING and self.is_here and _born(self.pid) != self.born


def _born(pid: int) -> str:
    """Return when a process began, by its system; empty = there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]


def write_state(directory: Path, state: RunState) -> None:
    """Write what a run is at."""
    write_text(directory / STATE, json.dumps(asdict(state), indent=2) + "\n")


def read_state(directory: Path) -> RunState | None:
    """Return what a run is at; None where it is one of this machine's, which have no state.

    Raises:
        FormatError: The file is damaged.
    """
    path = directory / STATE
    try:
        return decode_part(parse_json(path.read_text(encoding="utf-8")), RunState, "state")
    except FileNotFoundError:
        return None
    except FormatError as exc:
        raise exc.at(str(path)) from exc


@contextmanager
def driving(directory: Path, on: str) -> Iterator[None]:
    """Say in its directory what a run is at, from the beginning to the end."""
    state = RunState(
        progress=Progress.RUNNING,
        on=on,
        pid=os.getpid(),
        born=_born(os.getpid()),
        machine=clock_identity(),
    )
    write_state(directory, state)
    try:
        yield
    except PartitaError as exc:
        failed = replace(state, progress=Progress.FAILED, error=str(exc), exit_code=exc.exit_code)
        write_state(directory, failed)
        raise
    except (KeyboardInterrupt, SystemExit) as exc:
        code = exc.code if isinstance(exc, SystemExit) and isinstance(exc.code, int) else 1
        why = "it was cancelled"
        write_state(
            directory, replace(state, progress=Progress.CANCELLED, error=why, exit_code=code)
        )
        raise
    except BaseException as exc:
        text = f"{type(exc).__name__}: {exc}"
        write_state(directory, replace(state, progress=Progress.FAILED, error=text, exit_code=1))
        raise
    write_state(directory, replace(state, progress=Progress.ENDED))


def cancel(directory: Path, state: RunState) -> None:
    """Ask the driver of a run to end it: a run that saves does so first.

    Raises:
        UnsupportedError: Its driver is on another machine.
    """
    if not state.is_here:
        raise UnsupportedError(
            f"{directory} is driven by a process of another machine; cancel it there"
        )
    if not state.has_vanished:
        os.kill(state.pid, signal.SIGTERM)
