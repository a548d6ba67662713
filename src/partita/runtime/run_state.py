"""What a run is at, in its directory: who drives it, what happens in it, and how it ended.

Runs on other hosts have a state that commands follow; any run notes its events.

Read without torch, from any terminal that sees the directory.
"""

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from partita.core.codec import decode_part, parse_json
from partita.documents import write_text
from partita.errors import FormatError, PartitaError, UnsupportedError
from partita.processes import clock_identity

STATE = "state.json"
EVENTS = "events.jsonl"
HERE = "here"
"""Where a run is that is on no other hosts."""


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
        on: Where it runs, as ``--on`` says it; ``here`` = on the machine of its driver.
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


def running_here(on: str = "") -> RunState:
    """Return the state of a run that this process drives."""
    return RunState(
        progress=Progress.RUNNING,
        on=on,
        pid=os.getpid(),
        born=_born(os.getpid()),
        machine=clock_identity(),
    )


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
    """Return what a run is at; None where nothing says so.

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


class RunEvents:
    """What happens in a run, a line each in its directory, for those who look at it meanwhile.

    Args:
        directory: The run directory.
        steps: Steps that it is to make.
    """

    def __init__(self, directory: Path, steps: int) -> None:
        self._path = directory / EVENTS
        self._write({"steps": steps, "driver": asdict(running_here())})

    def __call__(self, text: str) -> None:
        """Note what people should know of it."""
        self._write({"text": text})

    def _write(self, values: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at_s": time.time(), **values}) + "\n")


def read_events(directory: Path) -> tuple[list[dict[str, Any]], RunState | None]:
    """Return what happened in a run so far, and the process that drives it, where it says so.

    A line that is not whole is left out.
    """
    try:
        lines = (directory / EVENTS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return [], None
    found: list[dict[str, Any]] = []
    driver = None
    for line in lines:
        try:
            event = parse_json(line)
            if "driver" in event:
                driver = decode_part(event["driver"], RunState, "driver")
        except (FormatError, TypeError):
            continue
        found.append(event)
    return found, driver


@contextmanager
def driving(directory: Path, on: str) -> Iterator[None]:
    """Say in its directory what a run is at, from the beginning to the end."""
    state = running_here(on)
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
