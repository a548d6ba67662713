"""What the scheduler asks of an engine: start on these devices with these limits, stop, report.

An engine decides nothing. Handles are data that outlive the scheduler: a new one hands them to a
new engine and gets the same job back. Fit for Slurm (a job named after fleet, job and attempt;
``scancel``; ``squeue``) and Ray (``submit_job`` with that name as its id; ``stop_job``).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

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
        memory_gb: Memory granted; 0 = no limit.
    """

    server: str
    gpus: tuple[int, ...]
    cpu_ids: tuple[int, ...]
    cpus: float
    memory_gb: float

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Place":
        """Return the place that a JSON object describes."""
        return cls(
            server=str(values["server"]),
            gpus=tuple(int(gpu) for gpu in values["gpus"]),
            cpu_ids=tuple(int(cpu) for cpu in values["cpu_ids"]),
            cpus=float(values["cpus"]),
            memory_gb=float(values["memory_gb"]),
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
    """

    fleet: str
    attempt: Attempt
    command: tuple[str, ...]
    folder: Path
    directory: Path
    environment: Mapping[str, str]
    places: tuple[Place, ...]


Handle = Mapping[str, Any]
"""What finds a started job again; JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a started job is.

    Attributes:
        running: Whether it still runs.
        exit_code: How it ended; negative = by that signal; None = it runs, or nobody saw it end.
        ended_s: When it ended; None = it runs, or nobody saw it end.
        grant: What the processes of the job report to hold, in a line; empty = not known.
    """

    running: bool
    exit_code: int | None = None
    ended_s: float | None = None
    grant: str = ""


class Engine(Protocol):
    """Runs commands on devices."""

    name: str
    can_resize: bool
    """Whether CPUs and memory of a running job can be changed."""

    def notes(self) -> tuple[str, ...]:
        """Return lines that people should know when a fleet starts; empty = none."""

    def start(self, order: Order) -> Handle:
        """Start a job; returns when it can be found again.

        Raises:
            PartitaError: It cannot be started.
        """

    def stop(self, handle: Handle, *, grace_s: float) -> None:
        """Ask a job to end; with a grace of 0 end it by force. Does not wait."""

    def status(self, handle: Handle) -> Status:
        """Return how a job is; of one that has ended, nothing is left running."""

    def resize(self, handle: Handle, places: tuple[Place, ...]) -> None:
        """Change CPUs and memory of a running job."""

    def running(self, fleet: str) -> Mapping[Attempt, Handle]:
        """Return all jobs of a fleet that run here, whoever started them."""
