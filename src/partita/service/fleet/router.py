"""Routes of the live fleet: submit, look, cancel, drain.

Whoever may submit a job runs a program as the user of the server: a token is always needed.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from partita.core.codec import encode
from partita.errors import InfeasibleError, InvalidInputError
from partita.fleet.live.fleet import Fleet, NoSuchJobError
from partita.service.errors import Refusal, WrongFieldError, answers
from partita.service.fleet.models import (
    DrainBody,
    FleetReply,
    JobReply,
    LogReply,
    StatusReply,
    SubmitBody,
    SubmitReply,
)
from partita.service.metrics import Sample

JobNumber = Annotated[int, Path(ge=1, le=2**53)]
COMMON = (401, 413, 503)
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
    def history() -> dict[str, Any]:
        """Return who ran where and when."""
        return encode(fleet.history())

    _add_jobs(router, fleet)
    return router


def _add_jobs(router: APIRouter, fleet: Fleet) -> None:
    @router.post("/jobs", responses=answers(400, 409, *COMMON))
    def submit(body: SubmitBody) -> SubmitReply:
        """Submit a job; once this has answered, it is never lost."""
        try:
            return SubmitReply(id=fleet.submit(body.spec(), body.key))
        except InfeasibleError as exc:
            raise Refusal(409, str(exc)) from exc
        except InvalidInputError as exc:
            raise WrongFieldError(("body",), str(exc)) from exc

    @router.get("/jobs", responses=answers(*COMMON))
    def list_jobs(
        all_jobs: Annotated[bool, Query(alias="all")] = False,
    ) -> list[JobReply]:
        """Return the jobs that are not done, or all."""
        return [JobReply(**job) for job in fleet.jobs(all_jobs=all_jobs)]

    @router.get("/jobs/{job}", responses=answers(404, *COMMON))
    def status(job: JobNumber) -> StatusReply:
        """Return everything about a job."""
        try:
            return StatusReply(**fleet.status(job))
        except NoSuchJobError as exc:
            raise Refusal(404, str(exc)) from exc

    @router.delete("/jobs/{job}", responses=answers(404, 409, *COMMON))
    def cancel(job: JobNumber) -> None:
        """Let a job end; it may checkpoint."""
        try:
            fleet.cancel(job)
        except NoSuchJobError as exc:
            raise Refusal(404, str(exc)) from exc

    @router.get("/jobs/{job}/log", responses=answers(404, *COMMON))
    def log(job: JobNumber, offset: Annotated[int, Query(ge=0, le=2**53)] = 0) -> LogReply:
        """Return what a job printed, from an offset on, and where to go on."""
        try:
            text, end, ended = fleet.read_log(job, offset, _LOG_BYTES)
        except NoSuchJobError as exc:
            raise Refusal(404, str(exc)) from exc
        return LogReply(text=text, offset=end, ended=ended)


def fleet_samples(fleet: Fleet) -> list[Sample]:
    """Return the metrics of the fleet."""
    info = fleet.info()
    gpus = sum(server["gpus"] for server in info["servers"])
    used = sum(server["gpus_in_use"] for server in info["servers"])
    name = "partita_fleet_jobs"
    return [
        (f'{name}{{state="running"}}', "gauge", "Jobs that are not done.", float(info["running"])),
        (f'{name}{{state="waiting"}}', "gauge", "Jobs that are not done.", float(info["waiting"])),
        ("partita_fleet_gpus", "gauge", "GPUs of the fleet.", float(gpus)),
        ("partita_fleet_gpus_in_use", "gauge", "GPUs that jobs hold.", float(used)),
        (
            "partita_fleet_failing",
            "gauge",
            "1 = the scheduler fails.",
            float(bool(info["failure"])),
        ),
    ]
