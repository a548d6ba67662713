"""One job of the energy server while it runs, and what its registration means."""

import asyncio
import re
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from partita.core.codec import decode_as
from partita.core.energy import EnergyProfile
from partita.core.solution import Solution
from partita.energy.frontier.choose import PointLimits
from partita.energy.policies.base import Deployment
from partita.energy.policies.job import Job
from partita.energy.policies.session import Session
from partita.errors import PartitaError
from partita.service.energy.models import JobBody, JobReply, RankBody, ResultBody, metadata
from partita.service.energy.store import StoredEvent
from partita.service.errors import WrongFieldError

SHOWN = 64
"""Ranks that are listed, at most."""


class Queued(NamedTuple):
    """An event that waits for its turn, and the write that it waits for."""

    event: StoredEvent
    written: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class LiveJob:
    """A job that has not ended.

    Attributes:
        id: Its name.
        body: As it was registered.
        scheduler: Name of its scheduler.
        session: Its state.
        touched: When somebody last spoke of it.
        ranks: Ranks that have been accepted, and the writes of that.
        reported: The version that each rank reported on last.
        measured: The last report of each rank.
        dumped: The deployment whose first reports have been dumped.
        next_seq: Number of its next event.
        queue: Events that it has not been sent yet.
        pump: The task that sends them.
        waiters: Long-polls that wait for a change.
        tail: Events on disk that ``settled`` can sum up.
        first_answers: Keys of what was solved for its first deployment.
        answers: Keys of what was solved last.
        delayed: Stragglers that were announced for later, by event.
        taken_up: Set once it stands where it stood before the server started.
    """

    id: str
    body: JobBody
    scheduler: str
    session: Session
    touched: float = field(default_factory=time.monotonic)
    ranks: dict[int, tuple[RankBody, asyncio.Future[None]]] = field(default_factory=dict)
    reported: dict[int, int] = field(default_factory=dict)
    measured: dict[int, ResultBody] = field(default_factory=dict)
    dumped: Deployment | None = None
    next_seq: int = 1
    queue: deque[Queued] = field(default_factory=deque)
    pump: asyncio.Task[None] | None = None
    waiters: set[asyncio.Future[None]] = field(default_factory=set)
    tail: list[int] = field(default_factory=list)
    first_answers: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    delayed: dict[int, asyncio.TimerHandle] = field(default_factory=dict)
    taken_up: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tenant(self) -> str:
        """The tenant that it belongs to; empty = none."""
        return self.body.tenant or ""

    @property
    def artifact(self) -> bool:
        """Whether its clients are the artifact's."""
        return self.body.framework is not None

    @property
    def missing(self) -> list[int]:
        """Ranks that have not registered."""
        return [rank for rank in self.session.missing if rank not in self.ranks]

    @property
    def state(self) -> str:
        """What it is doing, in a word."""
        session = self.session
        if session.deployment is not None:
            return session.deployment.state.value
        if session.failure:
            return "failed"
        return "registering" if session.missing else "solving"

    def wake(self) -> None:
        """Let everybody who waits look again."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()

    def forget_delayed(self, seq: int) -> None:
        """Drop a straggler that was announced for later."""
        timer = self.delayed.pop(seq, None)
        if timer is not None:
            timer.cancel()
            self.tail.append(seq)

    def stop(self) -> None:
        """End its task and its timers; let everybody go who waits for it."""
        for timer in self.delayed.values():
            timer.cancel()
        if self.pump is not None:
            self.pump.cancel()
        self.taken_up.set()
        self.wake()

    def stuck(self, rank: int) -> str:
        """Return whom a poll of a rank waits for."""
        session = self.session
        if missing := self.missing:
            return f"{_ranks(missing)} registered"
        if session.due or self.queue:
            return f"version {session.version + 1} is still being worked out"
        silent = [other for other in session.silent if other != rank]
        if self.reported.get(rank) == session.version and silent:
            return f"{_ranks(silent)} reported on version {session.version}"
        return f"version {session.version} is still in force"

    def schedule(self, rank: int) -> dict[str, Any]:
        """Return the clocks of a rank in force, as JSON."""
        deployment = self.session.deployment
        assert deployment is not None
        entries = deployment.entries[rank]
        reply: dict[str, Any] = {
            "rank": rank,
            "frequencies": entries,
            "version": self.session.version,
            "state": deployment.state.value,
            "time_s": deployment.time_s[rank] if deployment.time_s else None,
            "energy_j": deployment.energy_j[rank] if deployment.energy_j else None,
            "note": deployment.note,
        }
        if self.artifact:
            reply["power_states"] = [clock for _, clock in entries]
        return reply

    def reply(self) -> JobReply:
        """Return how it stands."""
        session, deployment = self.session, self.session.deployment
        times = deployment.time_s if deployment is not None else ()
        spent = [one.iter_energy[-1] for one in self.measured.values() if one.iter_energy]
        taken = [one.iter_time[-1] for one in self.measured.values() if one.iter_time]
        return JobReply(
            job_id=self.id,
            tenant=self.tenant,
            scheduler=self.scheduler,
            state=self.state,  # type: ignore[arg-type]
            version=session.version,
            world_size=self.body.world_size,
            pp_degree=self.body.pp_degree,
            dp_degree=self.body.dp_degree,
            tp_degree=self.body.tp_degree,
            registered=len(self.ranks),
            missing=self.missing[:SHOWN],
            silent=session.silent[:SHOWN] if session.version else [],
            stragglers=[asdict(one) for one in session.stragglers.values()],
            time_s=max(times) if times else None,
            energy_j=self._energy_j(deployment),
            iteration_s=max(taken) if taken else None,
            iteration_j=sum(spent) if len(spent) == self.body.world_size else None,
            note=session.failure or (deployment.note if deployment is not None else ""),
            idle_s=max(0.0, time.monotonic() - self.touched),
        )

    def _energy_j(self, deployment: Deployment | None) -> float | None:
        """Return the predicted energy of a step of all pipelines."""
        scheduler = self.session.scheduler
        if deployment is None or not deployment.energy_j or scheduler is None:
            return None
        pipeline = scheduler.workload.pipeline
        by_pipeline = {pipeline(rank): energy for rank, energy in enumerate(deployment.energy_j)}
        return sum(by_pipeline.values())


def core_job(body: JobBody) -> Job:
    """Return a registration as a core type.

    Raises:
        WrongFieldError: A document in it is wrong, or does not fit the rest.
    """
    solution = _document(body.solution, Solution, "solution")
    profile = _document(body.profile, EnergyProfile, "profile")
    if solution is not None and len(solution.plan.devices) != body.world_size:
        raise WrongFieldError(
            ("body", "world_size"),
            f"the solution has {len(solution.plan.devices)} devices, not {body.world_size}",
        )
    stages = len(solution.plan.stages) if solution is not None else body.pp_degree
    if profile is not None and profile.num_stages != stages:
        raise WrongFieldError(
            ("body", "profile"), f"it has {profile.num_stages} stages, the job {stages}"
        )
    assert body.schedule is not None
    return Job(
        pp=body.pp_degree,
        dp=body.dp_degree,
        tp=body.tp_degree,
        schedule=body.schedule,
        microbatches=body.num_microbatches,
        solution=solution,
        wish=body.wish.wish() if body.wish is not None else PointLimits(),
        profile=profile,
    )


def _document(document: dict[str, Any] | None, kind: type[Any], name: str) -> Any:  # noqa: ANN401
    if document is None:
        return None
    try:
        return decode_as(document, kind)
    except (PartitaError, RecursionError) as exc:
        raise WrongFieldError(("body", name), str(exc)) from exc


def job_name(body: JobBody, scheduler: str) -> str:
    """Return a name in Zeus's or the artifact's form, safe in paths of URLs and of files."""
    degrees = [f"dp{body.dp_degree}", f"pp{body.pp_degree}", f"tp{body.tp_degree}"]
    parts = [time.strftime("%Y-%m-%d-%H-%M-%S"), *degrees, scheduler]
    if body.framework is not None:
        about = [body.framework, body.model_name or "", body.partition_method or ""]
        sizes = [f"mbs{body.microbatch_size or 0}", f"nmb{body.num_microbatches or 0}"]
        parts = [parts[0], *about, *degrees, *sizes, scheduler]
    elif body.job_metadata and not metadata(body.job_metadata):
        parts.append(body.job_metadata)
    return "+".join(re.sub(r"[^A-Za-z0-9._-]+", "-", part)[:64] for part in parts)


def check_rank(job: LiveJob, rank: int, where: str) -> None:
    """Refuse a rank that a job does not have.

    Raises:
        WrongFieldError: It does not.
    """
    if rank >= job.body.world_size:
        raise WrongFieldError((where, "rank"), f"the job has {job.body.world_size} ranks")


def check_place(job: LiveJob, body: RankBody) -> None:
    """Refuse a rank at a place that a job does not have.

    Raises:
        WrongFieldError: It does not.
    """
    check_rank(job, body.rank, "body")
    for name in ("dp", "pp", "tp"):
        degree = getattr(job.body, f"{name}_degree")
        if getattr(body, f"{name}_rank") >= degree:
            raise WrongFieldError(("body", f"{name}_rank"), f"the job's {name}_degree is {degree}")


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:16])) + (" and more" if len(ranks) > 16 else "")
    return f"rank {named} has not" if len(ranks) == 1 else f"ranks {named} have not"
