"""Routes of the live fleet, and the bodies of their requests: submit, look, cancel, drain.

Whoever may submit a job runs a program as the user of the server: a token is always needed. Users
who are bound to tenants know the jobs of these alone.
"""

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field, StrictBool, computed_field

from partita.core.codec import encode
from partita.core.fleet import MAX_ITERATIONS, MAX_JOB_GPUS
from partita.errors import InfeasibleError, InvalidInputError
from partita.fleet.gigabytes import in_gb
from partita.fleet.lease import LoopState
from partita.fleet.live.fleet import Fleet, NoSuchJobError
from partita.fleet.live.jobspec import (
    DEFAULT_GRACE_S,
    DEFAULT_RETRIES,
    JobSpec,
    Progress,
    read_spec,
)
from partita.fleet.live.news import NEWS_PATH
from partita.service.asking import Asking, tenant_for
from partita.service.errors import Refusal, WrongFieldError, answers
from partita.service.metrics import Sample, label
from partita.service.users import User

_Text = Annotated[str, Field(max_length=65536, pattern=r"^[^\x00]*$")]
_Path = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^/[^\x00]*$")]
_Name = Annotated[str, Field(max_length=256)]
_Gpus = Annotated[int, Field(strict=True, ge=1, le=MAX_JOB_GPUS)]


class SubmitBody(BaseModel):
    """A job, as a job file holds it, with absolute paths; ``key`` makes asking again harmless."""

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
    memory_bytes: float

    @computed_field  # type: ignore[prop-decorator]
    @property
    def memory_gb(self) -> float:
        """Memory in GB (1e9 bytes), as clients of version 0.1 read it."""
        return in_gb(self.memory_bytes)


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
    owner: str
    places: list[PlaceReply]
    engine: str
    lease_end_s: float | None
    curve_speed: float | None
    measured_speed: float | None


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
    """Everything about a job; ``read_back`` is what its process reports to hold."""

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
    memory_bytes: float
    away: str
    gpus_in_use: int
    cpus_granted: float
    memory_bytes_granted: float

    @computed_field  # type: ignore[prop-decorator]
    @property
    def memory_gb(self) -> float:
        """Memory in GB (1e9 bytes), as clients of version 0.1 read it."""
        return in_gb(self.memory_bytes)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def memory_gb_granted(self) -> float:
        """What jobs hold of it, likewise."""
        return in_gb(self.memory_bytes_granted)


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


class ProgressBody(BaseModel):
    """How far a job is, as `partita.fleet.lease` reports it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    state: LoopState
    step: Annotated[int, Field(ge=0, le=2**53)]
    saved_step: Annotated[int, Field(ge=0, le=2**53)]
    steps: Annotated[int, Field(ge=0, le=2**53)]
    ends_s: float | None = None
    done_s: float | None = None
    attempt: int
    pid: int
    at_s: float


class NewsBody(BaseModel):
    """The word of a job, or a question for its lease."""

    model_config = ConfigDict(extra="forbid")

    attempt: Annotated[int, Field(ge=1, le=2**53)]
    progress: ProgressBody | None = None


class LogReply(BaseModel):
    """A part of what a job printed."""

    text: str
    offset: int
    ended: bool


JobNumber = Annotated[int, Path(ge=1, le=2**53)]
COMMON = (401, 503)
_LOG_BYTES = 2**16


def fleet_router(fleet: Fleet) -> APIRouter:
    """Return the routes over a fleet; each waits for the disk, so they run in threads."""
    router = APIRouter(tags=["fleet"], prefix="/fleet")

    @router.get("", responses=answers(*COMMON))
    def info() -> FleetReply:
        """Return how the fleet is set up, and what is in use."""
        return FleetReply(**fleet.info())

    @router.post("/drain", responses=answers(400, *COMMON))
    def drain(body: DrainBody) -> None:
        """Stop all jobs with their checkpoints and start none, or go on."""
        fleet.drain(on=body.on)

    @router.get("/history", responses=answers(409, *COMMON))
    def history(user: Asking) -> dict[str, Any]:
        """Return who ran where and when; not for users who are bound to tenants."""
        if user.tenants:
            raise Refusal(403, f"user {user.name} is bound to tenants; this shows all jobs")
        return encode(fleet.history())

    @router.post(f"{NEWS_PATH.removeprefix('/fleet')}{{job}}", responses=answers(400, *COMMON))
    def news(job: JobNumber, body: NewsBody, request: Request) -> dict[str, Any]:
        """Take the word of a job, which shows its own token, and return its lease."""
        shown = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        words = None if body.progress is None else body.progress.model_dump(mode="json")
        lease = fleet.scheduler.hear(job, body.attempt, shown, words)
        if lease is None:
            raise Refusal(401, "the token of this attempt of the job is needed")
        return lease

    _add_jobs(router, fleet)
    _add_job(router, fleet)
    return router


def _add_jobs(router: APIRouter, fleet: Fleet) -> None:
    @router.post("/jobs", responses=answers(400, 409, *COMMON))
    def submit(body: SubmitBody, user: Asking) -> SubmitReply:
        """Submit a job; once this has answered, it is never lost."""
        try:
            spec = body.spec()
            spec = replace(spec, tenant=tenant_for(user, spec.tenant))
            return SubmitReply(id=fleet.submit(spec, body.key, owner=user.name))
        except InfeasibleError as exc:
            raise Refusal(409, str(exc)) from exc
        except InvalidInputError as exc:
            raise WrongFieldError(("body",), str(exc)) from exc

    @router.get("/jobs", responses=answers(*COMMON))
    def list_jobs(
        user: Asking, all_jobs: Annotated[bool, Query(alias="all")] = False
    ) -> list[JobReply]:
        """Return the jobs that are not done, or all; those of the user's tenants."""
        jobs = fleet.jobs(all_jobs=all_jobs)
        return [JobReply(**job) for job in jobs if user.knows(job["tenant"])]


def _add_job(router: APIRouter, fleet: Fleet) -> None:
    def known(job: int, user: User) -> None:
        """Refuse jobs of other tenants as if there were none."""
        if not user.knows(fleet.tenant(job)):
            raise NoSuchJobError(f"there is no job {job}")

    @router.get("/jobs/{job}", responses=answers(404, *COMMON))
    def status(job: JobNumber, user: Asking) -> StatusReply:
        """Return everything about a job."""
        try:
            known(job, user)
            return StatusReply(**fleet.status(job))
        except NoSuchJobError as exc:
            raise Refusal(404, str(exc)) from exc

    @router.delete("/jobs/{job}", responses=answers(404, 409, *COMMON))
    def cancel(job: JobNumber, user: Asking) -> None:
        """Let a job end; it may checkpoint."""
        try:
            known(job, user)
            fleet.cancel(job, by=user.name)
        except NoSuchJobError as exc:
            raise Refusal(404, str(exc)) from exc

    @router.get("/jobs/{job}/log", responses=answers(404, *COMMON))
    def log(
        job: JobNumber, user: Asking, offset: Annotated[int, Query(ge=0, le=2**53)] = 0
    ) -> LogReply:
        """Return what a job printed, from an offset on, and where to go on."""
        try:
            known(job, user)
            text, end, ended = fleet.read_log(job, offset, _LOG_BYTES)
        except NoSuchJobError as exc:
            raise Refusal(404, str(exc)) from exc
        return LogReply(text=text, offset=end, ended=ended)


def fleet_samples(fleet: Fleet) -> list[Sample]:
    """Return the metrics of the fleet."""
    info = fleet.info()
    samples: list[Sample] = [
        (f"partita_fleet_jobs{{state={label(state)}}}", "gauge", "Jobs by state.", float(count))
        for state, count in sorted(fleet.job_counts().items())
    ]
    for name, text, key in (
        ("partita_fleet_gpus", "GPUs of a server.", "gpus"),
        ("partita_fleet_gpus_in_use", "GPUs of a server that jobs hold.", "gpus_in_use"),
        ("partita_fleet_cpus", "CPUs of a server.", "cpus"),
        ("partita_fleet_cpus_granted", "CPUs of a server that jobs were granted.", "cpus_granted"),
        ("partita_fleet_server_away", "1 = nothing is placed on a server now.", "away"),
    ):
        samples += [
            (f"{name}{{server={label(server['name'])}}}", "gauge", text, _value(server[key]))
            for server in info["servers"]
        ]
    for name, text, value in (
        ("partita_fleet_draining", "1 = no job is started.", info["draining"]),
        ("partita_fleet_failing", "1 = the scheduler fails.", info["failure"]),
    ):
        samples.append((name, "gauge", text, float(bool(value))))
    return samples


def _value(found: float | str) -> float:
    """Return a figure, or 1 for a reason that is given."""
    return float(bool(found)) if isinstance(found, str) else float(found)
