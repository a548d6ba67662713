"""Processes of Linux as ``/proc`` shows them: told apart by number and start, found by environment.

A process number is used again after a while; together with the boot and the time of its start it
is not. What a job starts inherits the job's environment, and is found by it wherever it has gone.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from partita.fleet.engines.protocol import FLEET_VARIABLE, JOB_VARIABLE, Attempt
from partita.fleet.lease import ATTEMPT_VARIABLE

_PROC = Path("/proc")
_MARK = f"{FLEET_VARIABLE}=".encode()


@dataclass(frozen=True, slots=True)
class Process:
    """One process of one boot.

    Attributes:
        pid: Its number.
        start: When it started, in clock ticks since boot.
        boot: Which boot.
    """

    pid: int
    start: int
    boot: str

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.boot == boot_id() and _start_of(self.pid) == self.start

    def send(self, number: int) -> None:
        """Send a signal, unless it is gone."""
        if self.alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


@cache
def boot_id() -> str:
    """Return what distinguishes this boot from others."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _start_of(pid: int) -> int | None:
    """Return when a process started; None where there is none, or only its exit code is left."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def find(pid: int) -> Process | None:
    """Return the process of a number, if it runs."""
    start = _start_of(pid)
    return None if start is None else Process(pid, start, boot_id())


def processes_of(fleet: str) -> Iterator[tuple[Attempt, Process]]:
    """Yield all processes of a fleet's jobs, by their environment."""
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "environ").read_bytes()
        except OSError:
            continue
        if _MARK not in text:
            continue
        values = dict(
            part.split("=", 1)
            for part in text.decode("utf-8", "replace").split("\0")
            if part.startswith("PARTITA_") and "=" in part
        )
        job, number = values.get(JOB_VARIABLE, ""), values.get(ATTEMPT_VARIABLE, "")
        process = find(int(folder.name))
        if process and values.get(FLEET_VARIABLE) == fleet and job.isdigit() and number.isdigit():
            yield Attempt(int(job), int(number)), process


def kill_all(fleet: str, attempt: Attempt) -> int:
    """Kill what is left of an attempt, and return how many processes that were."""
    left = [process for found, process in processes_of(fleet) if found == attempt]
    for process in left:
        process.send(signal.SIGKILL)
    return len(left)


def allowed_cpus(pid: int) -> tuple[int, ...]:
    """Return the CPUs that a process may run on; empty where it is gone."""
    try:
        return tuple(sorted(os.sched_getaffinity(pid)))
    except OSError:
        return ()


def set_affinity(pid: int, cpus: tuple[int, ...]) -> None:
    """Set the CPUs of all threads of a process."""
    with suppress(OSError):
        for thread in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                os.sched_setaffinity(int(thread.name), cpus)
