"""The process between the scheduler and a job's command: keeps limits, and notes how it ends.

It belongs to no scheduler: when that one is killed, the next finds this process, or its last word.

* It holds the lock of the job's directory, so that two attempts can never run at once.
* It starts only if the lease in that directory is for its own attempt.
* The command dies with it, and what the command leaves behind dies after it.

    python -m partita.fleet.engines.shim ATTEMPT_DIRECTORY
"""

import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TextIO

from partita.errors import UnsupportedError
from partita.fleet.engines.proc import allowed_cpus, find
from partita.fleet.live.files import LEASE, read_json, write_json
from partita.fleet.profiler.cgroups import Hierarchy, limited_groups
from partita.processes import die_with_parent, job_environment

ORDER, STARTED, ENDED, LOCK = "order.json", "started.json", "ended.json", "lock"
STOP = "stop.json"
"""Says that the command is to end; written before anybody looks whether it has started."""
LOG = "log.txt"
CANNOT_START = 126
_LOCK_S = 10.0


def main(arguments: Sequence[str]) -> int:
    """Run the command of an attempt to its end and return 0; its exit code is in a file."""
    directory = Path(arguments[0])
    order = read_json(directory / ORDER)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    home = directory.parent
    with (home / LOCK).open("w", encoding="utf-8") as lock:
        if not _locked(lock) or read_json(home / LEASE).get("attempt") != order["attempt"]:
            _note_end(directory, CANNOT_START, "another attempt holds the job's directory")
            return 0
        with (home / LOG).open("ab", buffering=0) as log:
            try:
                code = _run(directory, order, log.fileno())
            except (OSError, UnsupportedError) as exc:
                log.write(f"partita: cannot start: {exc}\n".encode())
                _note_end(directory, CANNOT_START, str(exc))
            else:
                _note_end(directory, code, "")
    return 0


def _locked(lock: TextIO) -> bool:
    """Wait for the lock: an attempt that was killed may need a moment to be gone."""
    last_s = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > last_s:
                return False
            time.sleep(0.05)
        else:
            return True


def _run(directory: Path, order: dict[str, Any], log: int) -> int:
    with ExitStack() as stack:
        groups = _groups(order, stack)
        child = _start(order, groups, log)
        process = find(child.pid)
        write_json(
            directory / STARTED,
            {
                "pid": child.pid,
                "start": None if process is None else process.start,
                "cpus": allowed_cpus(child.pid),
                "groups": [str(group.parent) for group in groups],
            },
        )
        if (directory / STOP).exists():
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
        return child.wait()


def _start(order: dict[str, Any], groups: tuple[Path, ...], log: int) -> subprocess.Popen[bytes]:
    """Start the command.

    Raises:
        UnsupportedError: There is no such program or folder.
    """
    try:
        return subprocess.Popen(
            order["command"],
            cwd=order["folder"],
            env={**job_environment(), **order["environment"]},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_keeper(order, groups),  # noqa: PLW1509 (this process has one thread)
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise UnsupportedError(str(exc)) from exc


def _groups(order: dict[str, Any], stack: ExitStack) -> tuple[Path, ...]:
    """Return the files by which the command joins its control groups; they go with the stack."""
    limits = order["limits"]
    if not limits["hierarchies"]:
        return ()
    hierarchies = [
        Hierarchy(int(version), Path(folder), tuple(names))
        for version, folder, names in limits["hierarchies"]
    ]
    made = limited_groups(
        hierarchies, limits["group"], cpus=limits["quota"], memory_bytes=limits["group_bytes"]
    )
    return stack.enter_context(made)


def _keeper(order: dict[str, Any], groups: tuple[Path, ...]) -> Callable[[], None]:
    """Return what the command's process does to itself before it runs the command."""
    parent, limits = os.getpid(), order["limits"]

    def keep() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for group in groups:
            group.write_text(str(os.getpid()), encoding="ascii")
        if limits["cpus"]:
            os.sched_setaffinity(0, limits["cpus"])
        if limits["process_bytes"]:
            resource.setrlimit(resource.RLIMIT_DATA, (limits["process_bytes"],) * 2)
        die_with_parent(parent)

    return keep


def _note_end(directory: Path, code: int, why: str) -> None:
    write_json(directory / ENDED, {"exit_code": code, "why": why, "at_s": time.time()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
