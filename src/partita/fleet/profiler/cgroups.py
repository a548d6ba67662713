"""Control groups of Linux, version 1 and 2: how much CPU time and memory a job gets.

Groups are made below the one that this process is in, or below one that is delegated to it, so
that a job never escapes a limit that already holds here. Version 2 allows that only where the
group has no process of its own, or is the root: elsewhere name a delegated one. A controller is
looked for in version 1 first: where both are mounted it is bound to one of them.
"""

import errno
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from partita.errors import UnsupportedError, WorkerError, reason_of

_PERIOD_US = 100_000
_WEIGHT = 10
"""Times the usual: a job gets what it is granted, and other programs disturb its figures less."""
_PROCESSES = "cgroup.procs"
_PREFIX = "partita-"
_EMPTY_S = 10.0
CONTROLLERS = ("cpu", "memory")


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where groups for some controllers can be made.

    Attributes:
        version: 1 or 2.
        folder: The group below which they are made.
        controllers: Those of ``CONTROLLERS`` that it has.
    """

    version: int
    folder: Path
    controllers: tuple[str, ...]


def find_hierarchies(mounts: str, membership: str) -> tuple[Hierarchy, ...]:
    """Return where this process may make groups, if it is permitted to.

    Args:
        mounts: The text of ``/proc/self/mountinfo``.
        membership: The text of ``/proc/self/cgroup``.
    """
    inside: dict[str, str] = {}
    for line in membership.splitlines():
        _, joined, path = line.split(":", 2)
        inside |= dict.fromkeys(joined.split(","), path)
    found: list[Hierarchy] = []
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, mount_point = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        if kind == "cgroup":
            names = tuple(n for n in CONTROLLERS if n in options.split(",") and n in inside)
            if names:
                folder = _folder(mount_point, root, inside[names[0]])
                found.append(Hierarchy(1, folder, names))
        elif kind == "cgroup2" and "" in inside:
            folder = _folder(mount_point, root, inside[""])
            found.append(Hierarchy(2, folder, _controllers_v2(folder)))
    return tuple(sorted(found, key=lambda hierarchy: hierarchy.version))


def delegated(folder: Path) -> Hierarchy:
    """Return the group of version 2 that was delegated to this process.

    Raises:
        UnsupportedError: It is not one.
    """
    names = _controllers_v2(folder)
    if not names:
        raise UnsupportedError(
            f"{folder} is no control group of version 2 with the controller cpu; name one, such as "
            "/sys/fs/cgroup/jobs"
        )
    return Hierarchy(2, folder, names)


def _folder(mount_point: str, root: str, path: str) -> Path:
    """Return the folder of a group, seen through a mount of a part of its tree."""
    inner = path.removeprefix(root.rstrip("/")) if path.startswith(root) else path
    return Path(mount_point + inner.rstrip("/"))


def _controllers_v2(folder: Path) -> tuple[str, ...]:
    try:
        names = (folder / "cgroup.controllers").read_text(encoding="ascii").split()
    except OSError:
        return ()
    return tuple(name for name in CONTROLLERS if name in names)


def limit_lines(version: int, cpus: float | None, memory_bytes: int | None) -> Mapping[str, str]:
    """Return what to write into the files of a group, in order."""
    lines: dict[str, str] = {}
    if cpus is not None:
        quota = max(1000, round(cpus * _PERIOD_US))
        if version == 1:
            lines |= {"cpu.cfs_period_us": f"{_PERIOD_US}", "cpu.cfs_quota_us": f"{quota}"}
            lines |= {"cpu.shares": f"{1024 * _WEIGHT}"}
        else:
            lines |= {"cpu.max": f"{quota} {_PERIOD_US}", "cpu.weight": f"{100 * _WEIGHT}"}
    if memory_bytes is not None:
        lines["memory.limit_in_bytes" if version == 1 else "memory.max"] = f"{memory_bytes}"
    return lines


@contextmanager
def limited_groups(
    hierarchies: Sequence[Hierarchy],
    name: str,
    *,
    cpus: float | None,
    memory_bytes: int | None,
) -> Iterator[tuple[Path, ...]]:
    """Make groups with limits, yield the files that a process joins them by, and remove them.

    What still runs in them at the end is killed.

    Raises:
        UnsupportedError: A limit has no controller here, or is not permitted.
    """
    wanted: dict[str, float | None] = {"cpu": cpus, "memory": memory_bytes}
    made: list[Path] = []
    try:
        for controller in (key for key, value in wanted.items() if value is not None):
            home = next((h for h in hierarchies if controller in h.controllers), None)
            if home is None:
                raise UnsupportedError(
                    f"there is no control group with the controller {controller}"
                )
            group = home.folder / name
            lines = limit_lines(
                home.version,
                cpus if controller == "cpu" else None,
                memory_bytes if controller == "memory" else None,
            )
            if group not in made:
                _make(home, group, controller)
                made.append(group)
            for file, text in lines.items():
                (group / file).write_text(text, encoding="ascii")
        yield tuple(group / _PROCESSES for group in made)
    except OSError as exc:
        raise UnsupportedError(f"control group: {reason_of(exc)} ({exc.filename})") from exc
    finally:
        for group in made:
            _remove(group)


def _make(home: Hierarchy, group: Path, controller: str) -> None:
    """Make a group; in version 2 its parent must pass the controllers on."""
    if home.version == 2:
        control = home.folder / "cgroup.subtree_control"
        if controller not in control.read_text(encoding="ascii").split():
            control.write_text(" ".join(f"+{name}" for name in home.controllers), encoding="ascii")
    group.mkdir()


def _remove(group: Path) -> None:
    """Kill what is left in a group, and remove it."""
    last_s = time.monotonic() + _EMPTY_S
    while True:
        with suppress(OSError):
            for process in (group / _PROCESSES).read_text(encoding="ascii").split():
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError as exc:
            if exc.errno != errno.EBUSY or time.monotonic() > last_s:
                raise WorkerError(f"{group} cannot be removed: {reason_of(exc)}") from exc
            time.sleep(0.05)
        else:
            return


def group_name(run: str) -> str:
    """Return the name of a group of this process."""
    return f"{_PREFIX}{os.getpid()}-{re.sub(r'[^A-Za-z0-9_.-]', '-', run)}"


def remove_left_groups(hierarchies: Sequence[Hierarchy]) -> None:
    """Remove empty groups of profilers that were killed before they could."""
    for hierarchy in hierarchies:
        for group in hierarchy.folder.glob(f"{_PREFIX}[0-9]*"):
            owner = group.name.removeprefix(_PREFIX).partition("-")[0]
            if not Path("/proc", owner).exists():
                with suppress(OSError):  # it is not empty, or not ours
                    group.rmdir()


def why_no_groups(hierarchies: Sequence[Hierarchy], name: str) -> str:
    """Return why the CPU time of a job cannot be limited; empty where it can, by trying."""
    try:
        with limited_groups(hierarchies, name, cpus=1.0, memory_bytes=None):
            return ""
    except UnsupportedError as exc:
        return str(exc)
