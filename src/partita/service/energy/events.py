"""How jobs of the energy server get their events: in order, and only what is on disk.

An event enters its job's queue when it is accepted and is applied once it is written; so a job sees
its events in the order in which a restart will apply them again. Once clocks are deployed the
events since then are summed up in one, ``settled``: a job that runs for weeks starts again as fast
as a new one.
"""

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping

from partita.core.codec import decode_part, encode_part
from partita.core.energy import Frontier
from partita.energy.policies.job import Straggler
from partita.energy.policies.solving import SolveTask
from partita.errors import PartitaError, WorkerError
from partita.formats.perseus import write_energy_csv
from partita.service.energy.dump import EnergyDump
from partita.service.energy.job import LiveJob, Queued
from partita.service.energy.models import RankBody, ResultBody, StragglerBody
from partita.service.energy.solver import EnergySolver
from partita.service.energy.store import EnergyStore, StoredEvent

logger = logging.getLogger(__name__)


class EnergyEvents:
    """Writes events and applies them to their jobs.

    Args:
        store: Where events are kept.
        solver: Solves frontiers.
        dump: Writes the artifact's files.
    """

    def __init__(self, store: EnergyStore, solver: EnergySolver, dump: EnergyDump | None) -> None:
        self._store = store
        self._solver = solver
        self._dump = dump
        self._tell: Mapping[str, Callable[[LiveJob, StoredEvent], None]] = {
            "rank": self._rank,
            "result": self._result,
            "straggler": self._straggler,
            "clear": self._clear,
            "settled": self._settled,
        }

    def record(self, job: LiveJob, kind: str, body: str) -> asyncio.Future[None]:
        """Put an event into the queue of its job; what is returned is done once it is on disk."""
        event = StoredEvent(job.next_seq, kind, body)
        job.next_seq += 1
        written = asyncio.ensure_future(self._store.append(job.id, event))
        self._enqueue(job, Queued(event, written))
        return written

    def replay(self, job: LiveJob, events: tuple[StoredEvent, ...]) -> None:
        """Tell a job again what is on disk."""
        if not events:
            job.taken_up.set()
        for event in events:
            done = asyncio.get_running_loop().create_future()
            done.set_result(None)
            if event.kind == "rank":
                rank = RankBody.model_validate_json(event.body)
                job.ranks[rank.rank] = (rank, done)
            elif event.kind == "result":
                result = ResultBody.model_validate_json(event.body)
                job.reported[result.rank] = result.version or 0
            job.next_seq = event.seq + 1
            self._enqueue(job, Queued(event, done))

    def _enqueue(self, job: LiveJob, queued: Queued) -> None:
        job.queue.append(queued)
        if job.pump is None or job.pump.done():
            job.pump = asyncio.create_task(self._pump(job))

    async def _pump(self, job: LiveJob) -> None:
        """Tell a job its events, one after the other."""
        while job.queue:
            event, written = job.queue[0]
            try:
                await asyncio.shield(written)
                await self._apply(job, event)
            except sqlite3.Error as exc:
                logger.error("event %s of job %s is not written: %s", event.seq, job.id, exc)
            except Exception:
                logger.exception("event %s of job %s", event.seq, job.id)
                job.session.install(job.session.instead("an error of the server; see its log"))
            job.queue.popleft()
            if not job.queue:
                job.taken_up.set()
            job.wake()

    async def _apply(self, job: LiveJob, event: StoredEvent) -> None:
        """Tell a job one event, and work out the versions that follow from it."""
        session = job.session
        settled, version, deployment = session.settled, session.version, session.deployment
        self._tell[event.kind](job, event)
        if settled and event.seq not in job.delayed:
            job.tail.append(event.seq)
        if self._dump is not None and event.kind == "rank" and not session.missing:
            await self._dump.ranks(job.id, [body for body, _ in job.ranks.values()])
        complete = event.kind == "result" and (session.due or session.version > version)
        if complete and self._dump is not None and deployment is not job.dumped:
            await self._dump_version(job, version)
        while session.due:
            await self._advance(job)
        if event.kind == "settled":
            session.version = json.loads(event.body)["version"]  # also if nothing new came of it
        if settled and session.version > version and event.kind != "settled":
            await self._sum_up(job, event.seq)

    def _rank(self, job: LiveJob, event: StoredEvent) -> None:
        job.session.add_rank(RankBody.model_validate_json(event.body).to_rank())

    def _result(self, job: LiveJob, event: StoredEvent) -> None:
        body = ResultBody.model_validate_json(event.body)
        if body.version == job.session.version:
            job.measured[body.rank] = body
            job.reported[body.rank] = body.version
            job.session.add_result(body.to_result())

    def _straggler(self, job: LiveJob, event: StoredEvent) -> None:
        said = json.loads(event.body)
        announced_at, of = said.pop("at"), said.pop("of", None)
        body = StragglerBody.model_validate(said)
        if of is not None:
            job.forget_delayed(of)
        elif body.delay_s:
            left_s = max(0.0, announced_at + body.delay_s - time.time())
            loop = asyncio.get_running_loop()
            job.delayed[event.seq] = loop.call_later(left_s, self._fall_due, job, event)
            return
        job.session.straggle(body.to_straggler())

    def _fall_due(self, job: LiveJob, event: StoredEvent) -> None:
        """Tell of a straggler that was announced before."""
        if event.seq in job.delayed:
            self.record(job, "straggler", json.dumps({**json.loads(event.body), "of": event.seq}))

    def _clear(self, job: LiveJob, event: StoredEvent) -> None:
        rank = json.loads(event.body)["rank"]
        for seq in list(job.delayed) if rank is None else ():
            job.forget_delayed(seq)
        job.session.clear_stragglers(rank)

    def _settled(self, job: LiveJob, event: StoredEvent) -> None:
        said = json.loads(event.body)
        stragglers = [decode_part(one, Straggler, "straggler") for one in said["stragglers"]]
        job.session.resume(said["version"], stragglers)

    async def _sum_up(self, job: LiveJob, seq: int) -> None:
        """Put one event in the place of all since clocks were deployed."""
        body = {
            "version": job.session.version,
            "stragglers": [encode_part(one) for one in job.session.stragglers.values()],
        }
        gone, job.tail = job.tail, [seq]
        event = StoredEvent(seq, "settled", json.dumps(body))
        await self._store.replace(job.id, gone, event, [*job.first_answers, *job.answers])

    async def _advance(self, job: LiveJob) -> None:
        """Work out the next version of a job."""
        session = job.session
        tasks = await asyncio.to_thread(session.needs)
        job.answers = tuple(task.key for task in tasks)
        if not session.settled:
            job.first_answers = job.answers
        try:
            solved = {task.key: await self._frontier(job, task) for task in tasks}
        except WorkerError as exc:
            session.install(session.at_highest(str(exc)))
        except PartitaError as exc:
            session.install(session.instead(str(exc)))
        else:
            session.install(await asyncio.to_thread(session.next, solved))
        if session.scheduler is not None and session.scheduler.solves and not session.settled:
            self._solver.warm()  # while the ranks profile

    async def _frontier(self, job: LiveJob, task: SolveTask) -> Frontier:
        """Return the frontier of a task of a job."""
        known = await self._solver.known(job.id, task)
        if known is not None:
            return known
        # What was not solved was sent to nobody: the job stands where it stood.
        job.taken_up.set()
        return await self._solver.solve(job.id, task)

    async def _dump_version(self, job: LiveJob, version: int) -> None:
        """Write the clocks of a version that all ranks have reported on, and their reports."""
        deployment, scheduler = job.session.deployment, job.session.scheduler
        if self._dump is None or deployment is None or scheduler is None:
            return
        job.dumped = deployment
        await self._dump.version(job.id, version, deployment, job.measured.values())
        profile = scheduler.profile
        if profile is not None:
            await self._dump.text(job.id, "profile.csv", write_energy_csv(profile))
