"""The embedded engine: jobs are processes of this machine.

Declared servers may have more than this machine: GPUs that do not exist are *declared*, and where
the servers together have more CPUs or memory than there is, those grants are *emulated*: the job is
told what it holds, and nothing enforces it. Otherwise CPUs are kept by affinity, and where control
groups are permitted by a quota, too, so that parts of CPUs can be granted; memory is kept by
control groups, else by a limit on each process.
"""

import itertools
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.errors import InvalidInputError, UnsupportedError
from partita.fleet.engines import shim
from partita.fleet.engines.environment import grant_variables, identity_variables
from partita.fleet.engines.proc import (
    Process,
    allowed_cpus,
    boot_id,
    find,
    kill_all,
    processes_of,
    set_affinity,
)
from partita.fleet.engines.protocol import (
    Attempt,
    Handle,
    Look,
    Order,
    Place,
    Status,
    Traits,
    name_of,
)
from partita.fleet.live.files import PROGRESS, figure, read_json, write_json
from partita.fleet.policies.resources import Servers
from partita.fleet.profiler.cgroups import Hierarchy, limit_lines
from partita.fleet.profiler.isolation import IsolationRequest, Way, choose_isolation
from partita.processes import job_environment
from partita.units import format_bytes

_SILENT = [
    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
    (os.POSIX_SPAWN_DUP2, 1, 2),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What of the declared servers is really here.

    Attributes:
        cpu_ids: Real CPUs of each server's CPUs, by server; empty = CPUs are emulated.
        has_memory: Whether memory is enforced; else it is emulated.
        first_gpu: This machine's number of each server's first GPU.
        num_declared: GPUs of all servers.
        gpus: Real GPUs; those with higher numbers are declared.
        hierarchies: Where control groups can be made; empty = nowhere.
    """

    cpu_ids: Mapping[str, tuple[int, ...]]
    has_memory: bool
    first_gpu: Mapping[str, int]
    num_declared: int
    gpus: int
    hierarchies: tuple[Hierarchy, ...] = ()

    def notes(self) -> tuple[str, ...]:
        """Return lines for people on what is not real."""
        lines = []
        if self.gpus < self.num_declared:
            lines.append(
                f"GPUs are declared: {self.num_declared}, of which this machine has {self.gpus}"
            )
        if not self.cpu_ids:
            lines.append("CPU grants are emulated: more CPUs are declared than there are")
        if not self.has_memory:
            lines.append("memory grants are emulated: more memory is declared than there is")
        elif not self.hierarchies:
            lines.append("control groups are not permitted: memory is limited process by process")
        return tuple(lines)


def machine_for(servers: Servers, hierarchies: tuple[Hierarchy, ...] = ()) -> Machine:
    """Return how much of some declared servers this machine can enforce."""
    real = sorted(os.sched_getaffinity(0))
    cpu_ids: dict[str, tuple[int, ...]] = {}
    if float(servers.cpus.sum()) <= len(real):
        for row, name in enumerate(servers.names):
            count = int(servers.cpus[row])
            cpu_ids[name], real = tuple(real[:count]), real[count:]
    before = [0, *itertools.accumulate(int(gpus) for gpus in servers.gpus)]
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpu_ids=cpu_ids,
        first_gpu=dict(zip(servers.names, before, strict=False)),
        num_declared=servers.num_gpus,
        has_memory=float(servers.memory_bytes.sum()) <= there,
        gpus=len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()]),
        hierarchies=hierarchies,
    )


def make_local_engine(
    servers: Servers, *, groups: bool = True, options: Mapping[str, str] | None = None
) -> "LocalEngine":
    """Return the engine of this machine for some declared servers.

    Args:
        servers: The declared servers.
        groups: Whether to use control groups where they are permitted, which is found by trying.
        options: None; it has none.

    Raises:
        InvalidInputError: An option was given.
    """
    if options:
        raise InvalidInputError(f"engine local has no option {next(iter(options))!r}")
    hierarchies: tuple[Hierarchy, ...] = ()
    if groups:
        chosen = choose_isolation(IsolationRequest())
        hierarchies = chosen.hierarchies if chosen.way is Way.CGROUP else ()
    return LocalEngine(machine_for(servers, hierarchies))


class LocalEngine:
    """Jobs as processes, each below a small process of its own that outlives the scheduler.

    Args:
        machine: What is real here.
        python: The interpreter of that small process.
    """

    name = "local"
    traits = Traits()

    def __init__(self, machine: Machine, *, python: str = sys.executable) -> None:
        self.machine = machine
        self._python = python
        self._children: set[int] = set()

    def notes(self) -> tuple[str, ...]:
        """Return lines for people on what of the declared servers is not real."""
        return self.machine.notes()

    def start(self, order: Order) -> Handle:
        """Start a job below its own shim."""
        directory = order.directory / f"attempt-{order.attempt.number}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_json(directory / shim.ORDER, self._order(order))
            pid = os.posix_spawn(
                self._python,
                [self._python, "-m", "partita.fleet.engines.shim", str(directory)],
                {**job_environment(), **identity_variables(order)},
                file_actions=_SILENT,
                setsid=True,
            )
        except OSError as exc:
            raise UnsupportedError(f"job {order.attempt.job} cannot be started: {exc}") from exc
        self._children.add(pid)
        return _handle(order.fleet, order.attempt, order.directory, find(pid))

    def _order(self, order: Order) -> dict[str, Any]:
        return {
            "attempt": order.attempt.number,
            "command": list(order.command),
            "folder": str(order.folder),
            "environment": {**order.environment, **self._devices(order.places)},
            "limits": self._limits(order.fleet, order.attempt, order.places),
        }

    def _devices(self, places: tuple[Place, ...]) -> dict[str, str]:
        """Return the variables that name a command's devices."""
        first = self.machine.first_gpu
        gpus = [first[place.server] + gpu for place in places for gpu in place.gpus]
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
            **grant_variables(places),
        }

    def _limits(self, fleet: str, attempt: Attempt, places: tuple[Place, ...]) -> dict[str, Any]:
        memory = sum(place.memory_bytes for place in places) if self.machine.has_memory else 0.0
        has_quota = bool(self.machine.cpu_ids) and self._controls("cpu")
        by_group = memory > 0 and self._controls("memory")
        kept = self.machine.hierarchies if has_quota or by_group else ()
        return {
            "cpus": self._real_cpus(places),
            "quota": sum(place.cpus for place in places) if has_quota else None,
            "group_bytes": int(memory) if by_group else None,
            "process_bytes": int(memory) if memory > 0 and not by_group else None,
            "group": name_of(fleet, attempt),
            "hierarchies": [(h.version, str(h.folder), h.controllers) for h in kept],
        }

    def _controls(self, controller: str) -> bool:
        return any(controller in h.controllers for h in self.machine.hierarchies)

    def _real_cpus(self, places: tuple[Place, ...]) -> list[int]:
        real = self.machine.cpu_ids
        if not real:
            return []
        return sorted({real[place.server][cpu] for place in places for cpu in place.cpu_ids})

    def stop(self, handle: Handle, *, grace_s: float) -> None:
        """Send SIGTERM to the loop that holds the lease, else to all; SIGKILL without grace."""
        attempt, directory = _attempt(handle), Path(handle["directory"])
        if grace_s <= 0:
            kill_all(handle["fleet"], attempt)
            return
        values = read_json(directory / PROGRESS)
        loop = (
            find(int(figure(values, "pid") or -1))
            if values.get("attempt") == attempt.number
            else None
        )
        if loop is not None and _is_of(loop, handle):
            loop.send(signal.SIGTERM)
            return
        # One that is just starting finds the word; one that has started gets the signal.
        write_json(_files(handle) / shim.STOP, {})
        group = read_json(_files(handle) / shim.STARTED).get("pid")
        if group and find(int(group)) is not None:
            with suppress(ProcessLookupError):
                os.killpg(int(group), signal.SIGTERM)

    def look(self, handles: Mapping[Attempt, Handle]) -> Look:
        """Return how jobs are."""
        return Look(statuses={key: self.status(handle) for key, handle in handles.items()})

    def status(self, handle: Handle) -> Status:
        """Return how a job is; kills what an ended one has left behind."""
        self._reap()
        process = Process(int(handle["pid"]), int(handle["start"]), str(handle["boot"]))
        if process.alive:
            return Status(running=True, grant=self._grant(handle))
        if not self._clean(handle):
            return Status(running=True)  # what it left behind is still ending
        values = read_json(_files(handle) / shim.ENDED)
        return Status(
            running=False, exit_code=values.get("exit_code"), ended_s=values.get("at_s", None)
        )

    def resize(self, handle: Handle, places: tuple[Place, ...]) -> None:
        """Change affinity and control groups of a running job."""
        limits = self._limits(handle["fleet"], _attempt(handle), places)
        if limits["cpus"]:
            for attempt, process in processes_of(handle["fleet"]):
                if attempt == _attempt(handle) and process.pid != handle["pid"]:
                    set_affinity(process.pid, tuple(limits["cpus"]))
        for version, folder, _ in limits["hierarchies"]:
            lines = limit_lines(version, limits["quota"], limits["group_bytes"])
            for name, text in lines.items():
                with suppress(OSError):
                    (Path(folder) / limits["group"] / name).write_text(text, encoding="ascii")

    def running(self, fleet: str) -> Mapping[Attempt, Handle]:
        """Return what runs here, by the environment of processes."""
        found: dict[Attempt, Process] = {}
        homes: dict[Attempt, Path] = {}
        for attempt, process in processes_of(fleet):
            argument = _shim_argument(process.pid)
            if argument is not None:
                found[attempt], homes[attempt] = process, argument.parent
            else:
                found.setdefault(attempt, Process(process.pid, -1, process.boot))
        return {
            attempt: _handle(fleet, attempt, homes.get(attempt, Path()), process)
            for attempt, process in found.items()
        }

    def _grant(self, handle: Handle) -> str:
        """Return what the command's process reports to hold."""
        started = read_json(_files(handle) / shim.STARTED)
        if not started:
            return ""
        allowed = allowed_cpus(int(started["pid"]))
        if not allowed:
            return ""  # it has just ended
        real = bool(self.machine.cpu_ids)
        words = [f"CPUs {_numbers(allowed)} by affinity" if real else "CPUs emulated"]
        for folder in map(Path, started["groups"]):
            for name in ("memory.limit_in_bytes", "memory.max"):
                with suppress(OSError):
                    limit = int((folder / name).read_text(encoding="ascii"))
                    words.append(f"memory {format_bytes(limit)} by control group")
            for name in ("cpu.cfs_quota_us", "cpu.max"):
                with suppress(OSError, ValueError):
                    quota = int((folder / name).read_text(encoding="ascii").split()[0]) / 1e5
                    words += [f"{quota:.3g} CPUs by control group"] if quota > 0 else []
        return ", ".join(words)

    def _reap(self) -> None:
        """Take the exit codes of shims, so that their numbers are free."""
        for pid in list(self._children):
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    continue
            self._children.discard(pid)

    def _clean(self, handle: Handle) -> bool:
        """Kill what is left of an attempt; return whether nothing was."""
        attempt = _attempt(handle)
        if kill_all(handle["fleet"], attempt):
            return False
        name = name_of(handle["fleet"], attempt)
        for hierarchy in self.machine.hierarchies:
            with suppress(OSError):
                (hierarchy.folder / name).rmdir()
        return True


def _handle(fleet: str, attempt: Attempt, directory: Path, process: Process | None) -> Handle:
    return {
        "fleet": fleet,
        "job": attempt.job,
        "attempt": attempt.number,
        "directory": str(directory),
        "pid": -1 if process is None else process.pid,
        "start": -1 if process is None else process.start,
        "boot": boot_id() if process is None else process.boot,
    }


def _attempt(handle: Handle) -> Attempt:
    return Attempt(int(handle["job"]), int(handle["attempt"]))


def _files(handle: Handle) -> Path:
    return Path(handle["directory"]) / f"attempt-{handle['attempt']}"


def _is_of(process: Process, handle: Handle) -> bool:
    return any(
        attempt == _attempt(handle) and other.pid == process.pid
        for attempt, other in processes_of(handle["fleet"])
    )


def _shim_argument(pid: int) -> Path | None:
    """Return the attempt's directory that a shim was started with; None = it is no shim."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        if "partita.fleet.engines.shim" in words[:-1]:
            return Path(words[words.index("partita.fleet.engines.shim") + 1])
    return None


def _numbers(values: tuple[int, ...]) -> str:
    """Return numbers as ranges: 0-3,5."""
    parts: list[list[int]] = []
    for value in values:
        if parts and value == parts[-1][1] + 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)
