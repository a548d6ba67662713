"""The jobs of the energy server: they register, ask, report and end."""

import asyncio
import hashlib
import itertools
import json
import logging
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticSerializationError

from partita.energy.policies.job import Job
from partita.energy.policies.session import Session
from partita.energy.policies.table import SCHEDULERS, make_scheduler
from partita.service.energy.dump import EnergyDump
from partita.service.energy.events import EnergyEvents
from partita.service.energy.job import LiveJob, check_place, check_rank, core_job, job_name
from partita.service.energy.models import InfoReply, JobBody, RankBody, ResultBody, StragglerBody
from partita.service.energy.solver import EnergySolver
from partita.service.energy.store import EnergyStore, StoredJob
from partita.service.errors import Refusal, WrongFieldError
from partita.service.settings import EnergySettings

logger = logging.getLogger(__name__)

SWEEP_S = 60.0
"""How often idle jobs are looked for, at least."""


class EnergyJobs:
    """All jobs.

    Args:
        settings: How the server was started.
        store: Where events are kept.
        version: Version of the package, as it is sent to clients.

    Attributes:
        jobs: Those that have not ended, by name.
        polls: Long-polls that wait.
    """

    def __init__(self, settings: EnergySettings, store: EnergyStore, version: str = "0") -> None:
        self.settings = settings
        self.info = server_info(settings, version)
        self.solver = EnergySolver(store, settings.solve_limit_s)
        self.jobs: dict[str, LiveJob] = {}
        self.polls = 0
        self._store = store
        dump = None
        if settings.dump is not None:
            dump = EnergyDump(settings.dump, self.info.model_dump_json())
        self._events = EnergyEvents(store, self.solver, dump)
        self._closing = False
        self._sweeper: asyncio.Task[None] | None = None
        self._configuration = ""
        self._configurations: dict[str, tuple[str, Mapping[str, Any]]] = {}

    async def open(self) -> None:
        """Take up the jobs on disk."""
        options = dict(self.settings.options)
        text = json.dumps({"scheduler": self.settings.scheduler, "options": options})
        self._configuration = hashlib.sha256(text.encode()).hexdigest()
        await self._store.keep_document(self._configuration, text)
        for stored in await self._store.open_jobs():
            try:
                await self._restore(stored)
            except (WrongFieldError, ValueError) as exc:
                # Written by another version of Partita: the others go on.
                logger.error("job %s cannot be taken up: %s", stored.id, exc)
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """Stop; what was acknowledged is on disk."""
        self.stop_waiting()
        for job in self.jobs.values():
            job.stop()
        if self._sweeper is not None:
            self._sweeper.cancel()
        tasks = [self._sweeper, *(job.pump for job in self.jobs.values())]
        await asyncio.gather(*(task for task in tasks if task), return_exceptions=True)
        self.solver.close()
        self._store.close()

    def stop_waiting(self) -> None:
        """End all long-polls."""
        self._closing = True
        for job in self.jobs.values():
            job.wake()

    async def live(self, job_id: str) -> LiveJob:
        """Return a job.

        Raises:
            Refusal: 404: there is none.
        """
        job = self.jobs.get(job_id)
        if job is None:
            reason = await self._store.ended(job_id)
            said = f"job {job_id!r} was closed: {reason}" if reason else f"no job {job_id!r}"
            raise Refusal(404, said)
        await job.taken_up.wait()
        job.touched = time.monotonic()
        return job

    async def all_live(self) -> list[LiveJob]:
        """Return all jobs that have not ended."""
        for job in list(self.jobs.values()):
            await job.taken_up.wait()
        return list(self.jobs.values())

    async def register_job(self, body: JobBody) -> str:
        """Keep a new job and return its name.

        Raises:
            WrongFieldError: A document in it is wrong.
        """
        body = body.model_copy(
            update={
                "num_microbatches": body.num_microbatches or self.settings.microbatches,
                "schedule": body.schedule or self.settings.schedule,
            }
        )
        core, text = await asyncio.to_thread(_checked, body)
        stem = job_name(body, self.settings.scheduler)
        job = await self._new(body, core, self._configuration)
        job.taken_up.set()
        for number in itertools.count(1):
            name = stem if number == 1 else f"{stem}+{number}"
            if name in self.jobs:
                continue
            job.id = name
            self.jobs[name] = job  # no wait since it was looked for: nobody else takes the name
            try:
                await self._store.add_job(name, text, self._configuration, time.time())
            except sqlite3.Error as exc:
                del self.jobs[name]
                if isinstance(exc, sqlite3.IntegrityError):
                    continue
                raise
            break
        _log_event(job.id, "registered")
        return job.id

    async def _new(self, body: JobBody, core: Job, configuration: str, name: str = "") -> LiveJob:
        if configuration not in self._configurations:
            found = json.loads(await self._store.document(configuration) or "{}")
            self._configurations[configuration] = (found["scheduler"], found["options"])
        scheduler, options = self._configurations[configuration]
        session = Session(core, lambda job, ranks: make_scheduler(scheduler, job, ranks, options))
        return LiveJob(name, body, scheduler, session)

    async def _restore(self, stored: StoredJob) -> None:
        body = JobBody.model_validate_json(stored.body)
        core = await asyncio.to_thread(core_job, body)
        job = await self._new(body, core, stored.configuration, stored.id)
        self.jobs[stored.id] = job
        self._events.replay(job, stored.events)

    async def register_rank(self, job: LiveJob, body: RankBody) -> None:
        """Take a rank; the same body may come again.

        Raises:
            WrongFieldError: It is not a rank of the job.
            Refusal: 409: it has registered otherwise, or another rank is in its place.
        """
        check_place(job, body)
        if body.rank in job.ranks:
            known, written = job.ranks[body.rank]
            if known != body:
                raise Refusal(409, f"rank {body.rank} has registered with another body")
            await asyncio.shield(written)
            return
        place = (body.dp_rank, body.pp_rank, body.tp_rank)
        for other, _ in job.ranks.values():
            if (other.dp_rank, other.pp_rank, other.tp_rank) == place:
                raise Refusal(409, f"rank {other.rank} is at the place of rank {body.rank}")
        written = self._events.record(job, "rank", body.model_dump_json())
        job.ranks[body.rank] = (body, written)
        try:
            await asyncio.shield(written)
        except sqlite3.Error:
            del job.ranks[body.rank]
            raise

    async def report(self, job: LiveJob, body: ResultBody) -> None:
        """Take what a rank measured; reports on an earlier version count no more.

        Raises:
            WrongFieldError: There is no such rank.
            Refusal: 409: there is no such version.
        """
        check_rank(job, body.rank, "body")
        in_force = job.session.version
        if not in_force:
            raise Refusal(409, f"job {job.id!r} has no schedule yet to report on")
        version = in_force if body.version is None else body.version
        if not 1 <= version <= in_force:
            raise Refusal(409, f"there is no version {version}; version {in_force} is in force")
        if version == in_force:
            body = body.model_copy(update={"version": version})
            await asyncio.shield(self._events.record(job, "result", body.model_dump_json()))
            job.reported[body.rank] = max(version, job.reported.get(body.rank, 0))

    async def straggle(self, job: LiveJob, body: StragglerBody) -> None:
        """Take word of a straggler.

        Raises:
            WrongFieldError: There is no such rank or pipeline, or it is not given.
        """
        if body.rank is not None:
            check_rank(job, body.rank, "body")
        if body.dp_rank is not None and body.dp_rank >= job.body.dp_degree:
            raise WrongFieldError(
                ("body", "dp_rank"), f"the job has {job.body.dp_degree} pipelines"
            )
        if body.slowdown is None and (body.rank is not None or body.iteration_s is None):
            instead = "" if body.rank is not None else ", or its iteration_s"
            raise WrongFieldError(
                ("body", "slowdown"), f"give how many times as long it takes{instead}"
            )
        stamped = {**body.model_dump(), "at": time.time()}
        await asyncio.shield(self._events.record(job, "straggler", json.dumps(stamped)))

    async def clear_stragglers(self, job: LiveJob, rank: int | None) -> None:
        """Take word that a rank, or nobody at all, is slow any more."""
        if rank is not None:
            check_rank(job, rank, "query")
        await asyncio.shield(self._events.record(job, "clear", json.dumps({"rank": rank})))

    async def end(self, job: LiveJob, reason: str) -> None:
        """End a job; what it was stays on disk for a while."""
        await self._store.end_job(job.id, reason, time.time())
        _log_event(job.id, f"ended: {reason}")
        self.jobs.pop(job.id, None)
        job.stop()

    async def wait_for_schedule(
        self,
        job: LiveJob,
        rank: int,
        after: int | None,
        wait_s: float | None,
        gone: asyncio.Future[None],
    ) -> None:
        """Return as soon as there is a schedule that a rank waits for.

        Args:
            job: The job.
            rank: The rank.
            after: The version that it has; ``None`` = the one that it reported on, if any.
            wait_s: How long it waits; ``None`` = as long as the server lets it.
            gone: Done when nobody waits for the answer any more.

        Raises:
            Refusal: 504: the wait is over; names whom. 409: there cannot be a schedule.
        """
        check_rank(job, rank, "query")
        loop = asyncio.get_running_loop()
        most_s = self.settings.poll_limit_s
        limit_s = most_s if wait_s is None else min(wait_s, most_s)
        until = loop.time() + limit_s
        self.polls += 1
        try:
            while not self._ready(job, rank, after):
                left_s = until - loop.time()
                if left_s <= 0 or gone.done():
                    raise Refusal(504, f"after {limit_s:g} s {job.stuck(rank)}")
                waiter: asyncio.Future[None] = loop.create_future()
                job.waiters.add(waiter)
                both = (waiter, gone)
                await asyncio.wait(both, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                job.waiters.discard(waiter)
                job.touched = time.monotonic()
        finally:
            self.polls -= 1

    def _ready(self, job: LiveJob, rank: int, after: int | None) -> bool:
        """Return whether a rank need not wait any longer.

        Raises:
            Refusal: There is nothing to wait for.
        """
        session = job.session
        if self._closing:
            raise Refusal(503, "the server is stopping; ask again")
        if job.id not in self.jobs:
            raise Refusal(404, f"job {job.id!r} was closed")
        if session.deployment is None:
            if session.failure:
                raise Refusal(409, session.failure)
            return False
        if session.deployment.finished and job.artifact:
            raise Refusal(409, "[profiling-done] every clock has been profiled")
        if after is not None:
            return session.version > after
        return job.reported.get(rank) != session.version

    async def _sweep(self) -> None:
        """End idle jobs and drop what ended long ago, again and again."""
        most_s = self.settings.max_idle_s
        while True:
            await asyncio.sleep(min(SWEEP_S, most_s))
            try:
                await self._end_idle(most_s)
                await self._store.prune(time.time() - most_s, self._configuration)
            except sqlite3.Error as exc:
                logger.error("what is not needed cannot be dropped: %s", exc)

    async def _end_idle(self, most_s: float) -> None:
        now = time.monotonic()
        for job in list(self.jobs.values()):
            if now - job.touched > most_s and not job.waiters:
                await self.end(job, f"idle for more than {most_s:g} s")


def _log_event(job: str, what: str) -> None:
    logger.info("job %s: %s", job, what, extra={"fields": {"job": job, "event": what}})


def server_info(settings: EnergySettings, version: str) -> InfoReply:
    """Return how the server was started; ``version`` is that of the package."""
    return InfoReply(
        scheduler=settings.scheduler,
        scheduler_args={k: v for k, v in settings.options.items() if k != "plans"},
        log_level="INFO",
        mode="frequency",
        dump_data=settings.dump is not None,
        dump_dir=str(settings.dump or ""),
        profile_steps=settings.profile_steps,
        num_microbatches=settings.microbatches,
        schedule=settings.schedule.value,
        poll_limit_s=settings.poll_limit_s,
        solve_limit_s=settings.solve_limit_s,
        version=version,
        schedulers=list(SCHEDULERS),
    )


def _checked(body: JobBody) -> tuple[Job, str]:
    """Return a registration as a core type and as text that can be read back.

    Raises:
        WrongFieldError: A document in it is wrong.
    """
    core = core_job(body)
    try:
        text = body.model_dump_json()
        JobBody.model_validate_json(text)
    except (PydanticSerializationError, ValueError, RecursionError) as exc:
        raise WrongFieldError(("body",), f"it cannot be kept as JSON: {exc}") from exc
    return core, text
