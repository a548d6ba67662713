"""How a job is kept to its CPUs and memory: in a container, by control groups, or by plain limits.

* A container where an image is named and an engine answers.
* Control groups where they are permitted: parts of CPUs are possible.
* Else CPU affinity, and a limit on the data of each process.
"""

import math
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from partita.errors import InvalidInputError, UnsupportedError
from partita.fleet.profiler.cgroups import (
    Hierarchy,
    delegated,
    find_hierarchies,
    group_name,
    remove_left_groups,
    why_no_groups,
)
from partita.fleet.profiler.containers import Container, find_engine, pull_if_absent


class Way(StrEnum):
    """How limits are enforced."""

    CONTAINER = "container"
    CGROUP = "cgroup"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one run may use on this machine.

    Attributes:
        cpus: CPU time, in CPUs; may be a part of one.
        memory_bytes: Memory of all its processes; None = all there is.
    """

    cpus: float
    memory_bytes: int | None = None

    @property
    def cpu_numbers(self) -> tuple[int, ...]:
        """The CPUs that it runs on: the first that this process may use."""
        return tuple(sorted(os.sched_getaffinity(0))[: math.ceil(self.cpus)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The way that was chosen.

    Attributes:
        way: How limits are enforced.
        hierarchies: Where control groups are made.
        container: The engine and its image.
        notes: Lines for people: what was wanted and is not possible, what was done instead.
    """

    way: Way
    hierarchies: tuple[Hierarchy, ...] = ()
    container: Container | None = None
    notes: tuple[str, ...] = ()

    @property
    def has_fractions(self) -> bool:
        """Whether a part of a CPU can be granted."""
        return self.way is not Way.PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationRequest:
    """What the user asks for.

    Attributes:
        wanted: A way; None = the best there is.
        image: Image for containers; empty = none.
        mount: Where the root of the host is seen in a container.
        python: The interpreter in a container.
        group: A delegated control group of version 2; empty = below our own.
        pull_limit_s: Seconds that pulling an image may take.
    """

    wanted: Way | None = None
    image: str = ""
    mount: str = "/datadrive"
    python: str = "python"
    group: str = ""
    pull_limit_s: float = 1800.0


def choose_isolation(request: IsolationRequest) -> Isolation:
    """Return the way that is asked for, or the best there is, with notes on what is not.

    Raises:
        InvalidInputError: A container is asked for without an image.
        UnsupportedError: What is asked for is not possible here.
    """
    if request.wanted is Way.CONTAINER and not request.image:
        raise InvalidInputError("a container needs an image; name one by --docker-img")
    notes: list[str] = []
    if request.image and request.wanted in (None, Way.CONTAINER):
        engine = find_engine()
        if engine is not None:
            return _contained(request, engine)
        why = "no container engine answers (docker, podman)"
        if request.wanted is Way.CONTAINER:
            raise UnsupportedError(f"{why}; start one, or use --isolation cgroup or plain")
        notes.append(f"{why}, so {request.image} is not used: scripts run with this Python instead")
    if request.wanted is not Way.PLAIN:
        hierarchies = _hierarchies(request.group)
        why = why_no_groups(hierarchies, group_name("probe"))
        if not why:
            remove_left_groups(hierarchies)
            return Isolation(way=Way.CGROUP, hierarchies=hierarchies, notes=tuple(notes))
        if request.wanted is Way.CGROUP:
            raise UnsupportedError(f"{why}; use --isolation plain")
        notes.append(f"{why}: whole CPUs only, kept by affinity")
    return Isolation(way=Way.PLAIN, notes=tuple(notes))


def _contained(request: IsolationRequest, engine: str) -> Isolation:
    pulled = pull_if_absent(engine, request.image, limit_s=request.pull_limit_s)
    container = Container(
        engine=engine,
        image=request.image,
        mount=request.mount,
        python=request.python,
        gpus=Path("/dev/nvidiactl").exists(),
    )
    notes = (f"{request.image} was pulled",) if pulled else ()
    return Isolation(way=Way.CONTAINER, container=container, notes=notes)


def _hierarchies(group: str) -> tuple[Hierarchy, ...]:
    if group:
        return (delegated(Path(group)),)
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
        membership = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:
        return ()
    return find_hierarchies(mounts, membership)
