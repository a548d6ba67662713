"""Routes of the energy server: Zeus's four, the artifact's, and ours.

Users who are bound to tenants know the jobs of these alone.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import JSONResponse

from partita.core.codec import encode
from partita.service.asking import Asking, tenant_for
from partita.service.energy.job import LiveJob
from partita.service.energy.jobs import EnergyJobs
from partita.service.energy.models import (
    ArtifactRankBody,
    FrontierReply,
    InfoReply,
    JobBody,
    JobReply,
    RankBody,
    ResultBody,
    ScheduleReply,
    StragglerBody,
)
from partita.service.errors import Refusal, answers
from partita.service.metrics import Sample
from partita.service.users import User

JobId = Annotated[str, Path(max_length=512)]
COMMON = (401, 503)


def energy_router(jobs: EnergyJobs) -> APIRouter:
    """Return the routes over some jobs."""
    router = APIRouter(tags=["energy"])
    _add_registration(router, jobs)
    _add_rounds(router, jobs)
    _add_stragglers(router, jobs)
    _add_views(router, jobs)
    return router


async def _known(jobs: EnergyJobs, job_id: str, user: User) -> LiveJob:
    """Return a job; those of other tenants are refused as if there were none.

    Of jobs that have ended the tenant is not known any more: only users of all tenants are told why
    they were closed.

    Raises:
        Refusal: 404: there is none.
    """
    job = jobs.jobs.get(job_id)
    if user.tenants and (job is None or not user.knows(job.tenant)):
        raise Refusal(404, f"no job {job_id!r}")
    return await jobs.live(job_id)


def _add_registration(router: APIRouter, jobs: EnergyJobs) -> None:
    """Add what a job calls when it starts."""

    @router.get("/info", responses=answers(*COMMON))
    async def info() -> InfoReply:
        """Return how the server was started."""
        return jobs.info

    @router.post("/register_job", responses=answers(400, 403, *COMMON))
    async def register_job(body: JobBody, user: Asking) -> str:
        """Register a job and return its name."""
        tenant = tenant_for(user, body.tenant or "") or None
        return await jobs.register_job(body.model_copy(update={"tenant": tenant}))

    @router.post("/register_rank/{job_id}", responses=answers(400, 404, 409, *COMMON))
    async def register_rank(job_id: JobId, body: RankBody, user: Asking) -> None:
        """Register a rank; the same body may come again."""
        await jobs.register_rank(await _known(jobs, job_id, user), body)

    @router.post("/register_rank", responses=answers(400, 404, 409, *COMMON))
    async def register_artifact_rank(body: ArtifactRankBody, user: Asking) -> None:
        """Register a rank as the SOSP '24 artifact does."""
        await jobs.register_rank(await _known(jobs, body.job_id, user), body.to_body())


def _add_rounds(router: APIRouter, jobs: EnergyJobs) -> None:
    """Add what ranks call again and again."""

    @router.get(
        "/schedule/{job_id}",
        response_model=ScheduleReply,
        responses=answers(404, 409, 504, *COMMON),
    )
    async def schedule(
        request: Request,
        user: Asking,
        job_id: JobId,
        rank: Annotated[int, Query(ge=0, le=2**31)],
        after: Annotated[int | None, Query(ge=0, le=2**53)] = None,
        wait: Annotated[float | None, Query(ge=0, le=1e9, allow_inf_nan=False)] = None,
    ) -> Response:
        """Return the clocks of a rank as soon as there are such that it does not have yet."""
        job = await _known(jobs, job_id, user)
        async with _until_gone(request) as gone:
            await jobs.wait_for_schedule(job, rank, after, wait, gone)
        return JSONResponse(job.schedule(rank))

    @router.post("/result/{job_id}", responses=answers(400, 404, 409, *COMMON))
    async def report(job_id: JobId, body: ResultBody, user: Asking) -> None:
        """Report what a rank measured under its schedule."""
        await jobs.report(await _known(jobs, job_id, user), body)


def _add_stragglers(router: APIRouter, jobs: EnergyJobs) -> None:
    """Add the routes about stragglers."""

    @router.post("/straggler/{job_id}", responses=answers(400, 404, *COMMON))
    async def straggler(job_id: JobId, body: StragglerBody, user: Asking) -> None:
        """Report a straggler; a slowdown of 1 means that it is none any more."""
        await jobs.straggle(await _known(jobs, job_id, user), body)

    @router.delete("/straggler/{job_id}", responses=answers(404, *COMMON))
    async def clear_straggler(
        user: Asking, job_id: JobId, rank: Annotated[int | None, Query(ge=0, le=2**31)] = None
    ) -> None:
        """Forget the straggler that a rank is, or all of them."""
        await jobs.clear_stragglers(await _known(jobs, job_id, user), rank)


def _add_views(router: APIRouter, jobs: EnergyJobs) -> None:
    """Add what people look at."""

    @router.get("/frontier/{job_id}", responses=answers(404, 409, *COMMON))
    async def frontier(
        user: Asking, job_id: JobId, dp_rank: Annotated[int, Query(ge=0, le=2**31)] = 0
    ) -> FrontierReply:
        """Return the frontier of a pipeline and the point that is deployed."""
        job = await _known(jobs, job_id, user)
        scheduler = job.session.scheduler
        chosen = scheduler.chosen(dp_rank) if scheduler is not None else None
        if chosen is None:
            raise Refusal(409, f"job {job_id!r} has no frontier of pipeline {dp_rank} yet")
        return FrontierReply(
            job_id=job_id,
            dp_rank=dp_rank,
            point=chosen.point,
            time_s=float(chosen.frontier.time_s[chosen.point]),
            energy_j=float(chosen.frontier.energy_j[chosen.point]),
            frontier=encode(chosen.frontier),
        )

    @router.get("/profile/{job_id}", responses=answers(404, 409, *COMMON))
    async def profile(user: Asking, job_id: JobId) -> dict[str, Any]:
        """Return the energy profile of a job, as far as it is known."""
        scheduler = (await _known(jobs, job_id, user)).session.scheduler
        found = scheduler.profile if scheduler is not None else None
        if found is None:
            raise Refusal(409, f"job {job_id!r} has no profile yet")
        return encode(found)

    @router.get("/jobs", responses=answers(*COMMON))
    async def list_jobs(user: Asking) -> list[JobReply]:
        """Return the jobs that have not ended; those of the user's tenants."""
        return [job.reply() for job in await jobs.all_live() if user.knows(job.tenant)]

    @router.get("/jobs/{job_id}", responses=answers(404, *COMMON))
    async def show_job(user: Asking, job_id: JobId) -> JobReply:
        """Return a job as it stands."""
        return (await _known(jobs, job_id, user)).reply()

    @router.delete("/jobs/{job_id}", responses=answers(404, *COMMON))
    async def end_job(user: Asking, job_id: JobId) -> None:
        """End a job; what it was stays in the database for a while."""
        await jobs.end(await _known(jobs, job_id, user), "deleted")


def energy_samples(jobs: EnergyJobs) -> list[Sample]:
    """Return the metrics of the energy server."""
    states = Counter(job.state for job in jobs.jobs.values())
    return [
        *(
            (f'partita_energy_jobs{{state="{state}"}}', "gauge", "Jobs by state.", float(count))
            for state, count in sorted(states.items())
        ),
        (
            "partita_energy_ranks",
            "gauge",
            "Ranks that have registered.",
            float(sum(len(job.ranks) for job in jobs.jobs.values())),
        ),
        ("partita_energy_polls", "gauge", "Long-polls that wait.", float(jobs.polls)),
        ("partita_energy_solved_total", "counter", "Frontiers solved.", float(jobs.solver.solved)),
        (
            "partita_energy_solve_seconds_total",
            "counter",
            "Seconds spent on them.",
            jobs.solver.seconds,
        ),
    ]


@contextlib.asynccontextmanager
async def _until_gone(request: Request) -> AsyncIterator[asyncio.Future[None]]:
    """Yield a future that is done when the client has hung up."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(gone())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
