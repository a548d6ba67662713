"""Bodies of the fleet's requests and replies."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from partita.core.fleet import MAX_ITERATIONS, MAX_JOB_GPUS
from partita.fleet.live.jobspec import (
    DEFAULT_GRACE_S,
    DEFAULT_RETRIES,
    JobSpec,
    Progress,
    read_spec,
)

_Text = Annotated[str, Field(max_length=65536, pattern=r"^[^\x00]*$")]
_Path = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^/[^\x00]*$")]
_Name = Annotated[str, Field(max_length=256)]
_Gpus = Annotated[int, Field(strict=True, ge=1, le=MAX_JOB_GPUS)]


class SubmitBody(BaseModel):
    """A job, as a job file says it, with absolute paths; ``key`` makes asking again harmless."""

    model_config = ConfigDict(extra="forbid")

    key: Annotated[str, Field(max_length=128)] = ""
    name: _Name
    command: Annotated[list[_Text], Field(min_length=1, max_length=4096)]
    folder: _Path
    gpus: Annotated[list[tuple[_Gpus, _Gpus, _Name]], Field(min_length=1, max_length=64)]
    steps: Annotated[int, Field(strict=True, ge=1, le=MAX_ITERATIONS)]
    progress: Progress = Progress.LEASE
    sensitivity: dict[str, Any]
    checkpoint: _Path | None = None
    environment: dict[Annotated[str, Field(pattern=r"^[^=\x00]+$")], _Text] = {}
    priority: Annotated[float, Field(strict=True, ge=-1e9, le=1e9, allow_inf_nan=False)] = 0.0
    tenant: _Name = ""
    deadline_s: Annotated[float, Field(strict=True, ge=0, le=1e12, allow_inf_nan=False)] | None = (
        None
    )
    retries: Annotated[int, Field(strict=True, ge=0, le=1_000_000)] = DEFAULT_RETRIES
    grace_s: Annotated[float, Field(strict=True, ge=0, le=1e7, allow_inf_nan=False)] = (
        DEFAULT_GRACE_S
    )

    def spec(self) -> JobSpec:
        """Return the job.

        Raises:
            InvalidInputError: A value is wrong.
        """
        return read_spec(self.model_dump(exclude={"key"}))


class SubmitReply(BaseModel):
    """The number of a job."""

    id: int


class DrainBody(BaseModel):
    """Whether to drain."""

    model_config = ConfigDict(extra="forbid")

    on: StrictBool = True


class PlaceReply(BaseModel):
    """What a job holds on a server."""

    server: str
    gpus: list[int]
    cpu_ids: list[int]
    cpus: float
    memory_gb: float


class JobReply(BaseModel):
    """A job as it stands; times are seconds since 1970."""

    id: int
    name: str
    state: str
    note: str
    deadline_s: float | None
    tenant: str
    priority: float
    gpus: list[tuple[int, int, str]]
    step: int
    steps: int
    submitted_s: float
    started_s: float | None
    finished_s: float | None
    attempts: int
    preemptions: int
    migrations: int
    faults: int
    places: list[PlaceReply]


class AttemptReply(BaseModel):
    """One start of a job."""

    number: int
    started_s: float
    ended_s: float | None
    how: str
    places: list[PlaceReply]


class EventReply(BaseModel):
    """A line of a job's history."""

    at_s: float
    what: str


class StatusReply(JobReply):
    """Everything about a job; ``read_back`` is what its process says that it holds."""

    command: list[str]
    folder: str
    checkpoint: str | None
    read_back: str
    attempt_list: list[AttemptReply]
    events: list[EventReply]


class ServerReply(BaseModel):
    """A server and what is in use of it."""

    name: str
    gpu_type: str
    gpus: int
    cpus: float
    memory_gb: float
    gpus_in_use: int
    cpus_granted: float
    memory_gb_granted: float


class FleetReply(BaseModel):
    """How the fleet is set up, and what is in use."""

    policy: str
    engine: str
    round_s: float
    draining: bool
    failure: str
    servers: list[ServerReply]
    waiting: int
    running: int


class LogReply(BaseModel):
    """A part of what a job printed."""

    text: str
    offset: int
    ended: bool
