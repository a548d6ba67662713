"""What the scheduler asks of an engine: start on these devices with these limits, stop, report.

An engine decides nothing. Handles are data that outlive the scheduler: a new one hands them to a
new engine and gets the same job back. A job is known to the engine by a name made of fleet, job and
attempt (`Order.name`), so that it is found again whatever was lost. All jobs are looked at in one
go, because a cluster's controller is asked once for all of them and not once for each. What an
engine cannot do is declared (`Traits`), and the scheduler plans around it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from partita.errors import PartitaError

FLEET_VARIABLE = "PARTITA_FLEET"
JOB_VARIABLE = "PARTITA_JOB"


class Attempt(NamedTuple):
    """One start of a job; no two have the same numbers."""

    job: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a job holds on one server.

    Attributes:
        server: Name of the server.
        gpus: Numbers of its GPUs.
        cpu_ids: Numbers of its CPUs; a part of one is shared with others.
        cpus: CPU time granted, in CPUs.
        memory_bytes: Memory granted; 0 = no limit.
    """

    server: str
    gpus: tuple[int, ...]
    cpu_ids: tuple[int, ...]
    cpus: float
    memory_bytes: float

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Place":
        """Return the place that a JSON object describes."""
        return cls(
            server=str(values["server"]),
            gpus=tuple(int(gpu) for gpu in values["gpus"]),
            cpu_ids=tuple(int(cpu) for cpu in values["cpu_ids"]),
            cpus=float(values["cpus"]),
            memory_bytes=float(values["memory_bytes"]),
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A start that the scheduler wants.

    Attributes:
        fleet: Which scheduler's state it belongs to.
        attempt: Job and number of the start.
        command: Program and arguments.
        folder: Its working directory.
        directory: Where lease, progress and logs of the job are.
        environment: Variables besides those of the scheduler's own environment.
        places: What it holds, one place per server.
        grace_s: Seconds that the command may take to end after it was asked to.
    """

    fleet: str
    attempt: Attempt
    command: tuple[str, ...]
    folder: Path
    directory: Path
    environment: Mapping[str, str]
    places: tuple[Place, ...]
    grace_s: float = 30.0

    @property
    def name(self) -> str:
        """The name by which an engine knows it."""
        return name_of(self.fleet, self.attempt)


def name_of(fleet: str, attempt: Attempt) -> str:
    """Return the name by which an engine knows an attempt."""
    return f"{prefix_of(fleet)}{attempt.job}-{attempt.number}"


def prefix_of(fleet: str) -> str:
    """Return what the names of all attempts of a fleet begin with."""
    return f"partita-{fleet}-"


def attempt_of(fleet: str, name: str) -> Attempt | None:
    """Return the attempt that a name is of; None = of no attempt of this fleet."""
    if not name.startswith(prefix_of(fleet)):
        return None
    job, _, number = name.removeprefix(prefix_of(fleet)).partition("-")
    return Attempt(int(job), int(number)) if job.isdigit() and number.isdigit() else None


Handle = Mapping[str, Any]
"""What finds a started job again; JSON."""


class Cause(StrEnum):
    """Who ended a job that has ended, as far as the engine knows."""

    ITSELF = "itself"
    ENGINE = "engine"
    """The engine did: it was preempted, its node failed, its time was up. It may go on elsewhere,
    and it is not the job's fault."""
    OTHERS = "others"
    """Somebody cancelled it in the engine, outside of the fleet: it is to stay so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a started job is.

    Attributes:
        running: Whether it still runs, or waits in the engine.
        exit_code: How it ended; negative = by that signal; None = it runs, or nobody saw it end.
        ended_s: When it ended; None = it runs, or nobody saw it end.
        grant: What the processes of the job, or the engine, report that it holds, in a line; empty
            = not known.
        given: What the engine gave it, where it chooses devices; None = not known, or as ordered.
        waits: Why the engine has not started it yet; empty = it has.
        cause: Who ended it.
        why: How the engine says that it ended; empty = as its exit code says.
    """

    running: bool
    exit_code: int | None = None
    ended_s: float | None = None
    grant: str = ""
    given: tuple[Place, ...] | None = None
    waits: str = ""
    cause: Cause = Cause.ITSELF
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How all jobs are, and what of the servers cannot be used.

    Attributes:
        statuses: Of the jobs that were asked for; who is not there is not known at the moment.
        away: Servers on which nothing can be started, with the reason.
        failure: Why the engine could not be asked, in a line; empty = it was.
    """

    statuses: Mapping[Attempt, Status]
    away: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What an engine can do.

    Attributes:
        can_resize: CPUs and memory of a running job can be changed. Otherwise a job that keeps its
            GPUs keeps them, too, unless others need the room or it would gain much.
        can_split_cpus: A job can be granted a part of a CPU; otherwise grants are whole CPUs.
        chooses_gpus: The engine chooses which GPUs of a server a job gets, and reports them.
        is_remote: Jobs run on other machines than the scheduler.
    """

    can_resize: bool = True
    can_split_cpus: bool = True
    chooses_gpus: bool = False
    is_remote: bool = False


class EngineAwayError(PartitaError):
    """The engine cannot be reached at the moment; nothing was started.

    Attributes:
        retry_s: Seconds after which to try again.
    """

    def __init__(self, text: str, retry_s: float) -> None:
        super().__init__(text)
        self.retry_s = retry_s


class Engine(Protocol):
    """Runs commands on devices."""

    name: str
    traits: Traits

    def notes(self) -> tuple[str, ...]:
        """Return lines that people should know when a fleet starts; empty = none."""

    def start(self, order: Order) -> Handle:
        """Start a job; returns when it can be found again.

        Raises:
            EngineAwayError: The engine cannot be reached.
            PartitaError: It cannot be started.
        """

    def stop(self, handle: Handle, *, grace_s: float) -> None:
        """Ask a job to end; with a grace of 0 end it by force. Does not wait."""

    def look(self, handles: Mapping[Attempt, Handle]) -> Look:
        """Return how jobs are; of one that has ended, nothing is left running."""

    def resize(self, handle: Handle, places: tuple[Place, ...]) -> None:
        """Change CPUs and memory of a running job, if the engine can."""

    def running(self, fleet: str) -> Mapping[Attempt, Handle]:
        """Return all jobs of a fleet that run or wait here, whoever started them.

        Raises:
            EngineAwayError: The engine cannot be reached.
        """
