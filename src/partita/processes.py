"""Processes of this machine: how they end, what they leave behind, what they have in common.

Imports nothing heavy, so that a new process can tie itself to its parent at once.
"""

import ctypes
import fcntl
import os
import signal
import socket
import stat
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from partita.errors import InvalidInputError, UnsupportedError, WorkerError, reason_of

_PDEATHSIG = 1
_TO_END = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals by which schedulers ask a job to save its work and end."""
_SIOCGIFADDR = 0x8915
_LOG_BYTES = 8192
TOKEN_VARIABLE = "PARTITA_TOKEN"
"""Variable with the token that a server asks for and its clients show."""
SERVER_VARIABLE = "PARTITA_FLEET_SERVER"
"""Variable with the address of a fleet, which may have a token in it."""


def job_environment() -> dict[str, str]:
    """Return the environment that a job's command inherits: this process's without its token."""
    kept = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    if "@" in kept.get(SERVER_VARIABLE, ""):
        del kept[SERVER_VARIABLE]
    return kept


def die_with_parent(parent: int | None = None) -> None:
    """Ask the system to kill this process when its parent dies, so that none is left behind.

    Args:
        parent: The parent, where it is known: if it is gone already, this process ends now.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(WorkerError.exit_code)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let signals to end this process raise SystemExit, so that what it has started ends as well.

    SIGINT raises KeyboardInterrupt, as ever; those that ask to stop soon (``stop_notices``) still
    do. Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *_TO_END)}
    for number in _TO_END:
        if not is_noticed(number):
            signal.signal(number, _exit_by_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_by_signal(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)


class StopNotice:
    """Whether this process was asked to stop as soon as it can.

    Attributes:
        why: The signal that asked, by name; empty = none has.
    """

    def __init__(self) -> None:
        self.why = ""

    def __call__(self) -> str:
        """Return the signal that asked; empty = none has."""
        return self.why

    def take(self, number: int, frame: FrameType | None) -> None:
        """Take note of a signal; a second one that ends processes is obeyed at once."""
        if self.why and number in _TO_END:
            _exit_by_signal(number, frame)
        self.why = self.why or _signal_name(number)


def is_noticed(number: int) -> bool:
    """Return whether a signal is taken as a request to stop soon."""
    return isinstance(getattr(signal.getsignal(number), "__self__", None), StopNotice)


@contextmanager
def stop_notices() -> Iterator[StopNotice]:
    """Take SIGTERM, and SIGUSR1 as Slurm sends it before a limit, as requests to stop soon.

    Does nothing outside the main thread.
    """
    notice = StopNotice()
    if threading.current_thread() is not threading.main_thread():
        yield notice
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, notice.take)
    try:
        yield notice
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def machine_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_BUSY = 0.75
"""Load per core from which other programs are felt."""


def other_load() -> str:
    """Return that other programs keep this machine busy, before anything is measured; else empty.

    What is measured then is too long, and differs from one measurement to the next.
    """
    load, cores = os.getloadavg()[0], machine_cores()
    if load <= _BUSY * cores:
        return ""
    return (
        f"load average {load:.1f} on {cores} core{'s' * (cores > 1)}: measured times are unreliable"
    )


def clock_identity() -> str:
    """Return what tells this machine's monotonic clock from others; empty if it is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/time').stat().st_ino}"
    except OSError:
        return ""


def loopback_identity() -> str:
    """Return what tells this process's 127.0.0.1 from others; empty if it is not known.

    Containers of one machine have one clock, and each a network of its own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return ""


def lock_beside(path: Path, holder: str) -> TextIO:
    """Return the open lock beside a file that one process at a time may have; closing frees it.

    Args:
        path: The file, such as a database; it need not be there.
        holder: What the other process is called where there is one.

    Raises:
        InvalidInputError: The lock cannot be made there.
        UnsupportedError: Another process has the file.
    """
    try:
        lock = path.with_name(f"{path.name}.lock").open("w", encoding="utf-8")
    except OSError as exc:
        reason = reason_of(exc)
        raise InvalidInputError(f"{path} cannot be used as a database: {reason}") from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise UnsupportedError(
            f"{path} is in use by another {holder}; stop that one or give another --state"
        ) from None
    return lock


def retry_pause_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """Return how long to wait after so many failures in a row: doubled with each, up to a limit.

    >>> [retry_pause_s(failures, first_s=0.5, longest_s=3.0) for failures in (1, 2, 3, 4, 5000)]
    [0.5, 1.0, 2.0, 3.0, 3.0]
    """
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 60))


def how_it_ended(exit_code: int | None) -> str:
    """Return how a process ended, for people; None = it still runs."""
    if exit_code is None:
        return "still runs"
    if exit_code < 0:
        return f"was killed by {_signal_name(-exit_code)}"
    return f"ended with exit code {exit_code}"


def _signal_name(number: int) -> str:
    """Return the name of a signal; those for real time have none but the first and the last."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a log; none if it is not there."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.strip().splitlines()[-count:]


def redirect_output(log: Path) -> None:
    """Send what this process prints from now on to the end of a log."""
    with log.open("ab", buffering=0) as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def append_output() -> None:
    """Let what this process prints go to the end of the files that it goes to.

    Whoever starts it may have opened one file twice, for stdout and for stderr, each of which would
    write from the beginning, over what the other one, or ``redirect_output``, has written.
    """
    for descriptor in (1, 2):
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
        except OSError:
            continue  # it is closed


def interface_towards(address: str, port: int) -> str:
    """Return the network interface that leads to an address; empty if that cannot be found out."""
    if not sys.platform.startswith("linux"):
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))  # sends nothing: it chooses the route
        except OSError:
            return ""
        ours = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no address
            if found[20:24] == ours:
                return name
    return ""


_PRIORITY = -10
_SET_TIMER_SLACK = 29


def run_soon() -> None:
    """Put all threads of this process before those of others, as far as the system allows it.

    For what stands for a device or a link and mostly sleeps: if it were late because other programs
    keep the processors busy, it would look like a slower device or link. As root on Linux they are
    scheduled in real time, in turns; the system keeps some time for others even if they never
    slept.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1)
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            _put_first(int(thread.name))


def _put_first(thread: int) -> None:
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, thread, _PRIORITY)
        os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
