"""Work that the page asks for: in a few processes, with limits, told as it goes on, cancelled.

A piece of work is known by a digest of what was asked, so that an address which asks again gets
what is there. A process that takes too long or is cancelled is killed; the next piece of work
starts another.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from partita.service.child import Child
from partita.service.errors import Refusal, printable
from partita.service.settings import PageSettings
from partita.service.ui.held import DocumentStore, Held
from partita.service.ui.work import QUICK, STOP, work_for_page

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_MOST_POINTS = 2000


class JobState(StrEnum):
    """What a piece of work is at."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self not in (JobState.WAITING, JobState.RUNNING)


@dataclass(slots=True, eq=False)
class PageJob:
    """A piece of work.

    Attributes:
        key: Digest of what was asked.
        kind: What is done: ``plan``, ``frontier``, ``fleet``, ...
        asked: What the process is sent.
        state: What it is at.
        words: The latest step, in a few words.
        points: Seconds and value of each new best of a search.
        unit: Unit of the values.
        bound: No value is below; 0 = not known.
        gap: The share that the latest value may be above the best; None = not known.
        documents: What came of it, by role: ``plan``, ``frontier``, ...
        page: The figures, as the JSON that is sent; empty = there are none yet.
        error: Why it failed, in the command line's one line.
        facts: Small answers by name.
        spent_s: Seconds that it took.
        stop: Whether it was asked to end with the best that it has.
        changed: Set at each change, then replaced.
    """

    key: str
    kind: str
    asked: bytes
    state: JobState = JobState.WAITING
    words: str = ""
    points: list[tuple[float, float]] = field(default_factory=list)
    unit: str = ""
    bound: float = 0.0
    gap: float | None = None
    documents: dict[str, Held] = field(default_factory=dict)
    page: bytes = b""
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    spent_s: float = 0.0
    stop: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, state: JobState | None = None) -> None:
        """Let those who wait know that something changed."""
        self.state = state or self.state
        self.changed.set()
        self.changed = asyncio.Event()

    def to_json(self) -> dict[str, Any]:
        """Return what it is at, without its page."""
        return {
            "id": self.key,
            "kind": self.kind,
            "state": self.state.value,
            "words": self.words,
            "points": self.points,
            "unit": self.unit,
            "bound": self.bound,
            "gap": self.gap,
            "documents": {role: held.to_json() for role, held in self.documents.items()},
            "error": self.error,
            "facts": self.facts,
            "seconds": self.spent_s,
        }


class Pool:
    """Processes that work at a time.

    Args:
        settings: Limits.
        number: Of processes.
    """

    def __init__(self, settings: PageSettings, number: int) -> None:
        self.all = tuple(Child(work_for_page, "page", settings.memory_bytes) for _ in range(number))
        self.idle = list(self.all)
        self.slots = asyncio.Semaphore(number)


class PageJobs:
    """The work of the page.

    Args:
        settings: Limits.
        store: Where documents are kept.
    """

    def __init__(self, settings: PageSettings, store: DocumentStore) -> None:
        self._settings, self._store = settings, store
        self._jobs: OrderedDict[str, PageJob] = OrderedDict()
        self._searching, self._reading = Pool(settings, settings.jobs), Pool(settings, 1)
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, kind: str, values: Mapping[str, Any], **given: object) -> PageJob:
        """Return the work that is asked for: that which was asked before, or a new piece.

        Args:
            kind: What to do.
            values: What was asked; tells one piece of work from another.
            **given: What its process needs besides, such as documents.

        Raises:
            Refusal: Too much waits already.
        """
        told = json.dumps([kind, values], sort_keys=True)
        key = hashlib.sha256(told.encode("utf-8", "replace")).hexdigest()[:24]
        known = self._jobs.get(key)
        if known is not None and known.state not in (JobState.FAILED, JobState.CANCELLED):
            self._jobs.move_to_end(key)
            return known
        waiting = sum(job.state is JobState.WAITING for job in self._jobs.values())
        if waiting >= self._settings.waiting:
            raise Refusal(429, f"{waiting} pieces of work wait already; cancel one, or ask later")
        asked = json.dumps({"kind": kind, "values": values, **given}).encode()
        job = PageJob(key=key, kind=kind, asked=asked)
        self._jobs[key] = job
        self._forget()
        task = asyncio.get_running_loop().create_task(self._carry_out(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    async def result(self, kind: str, values: Mapping[str, Any], **given: object) -> PageJob:
        """Return work that is over; see `ask`."""
        job = self.ask(kind, values, **given)
        while not job.state.is_over:
            await job.changed.wait()
        return job

    def get(self, key: str) -> PageJob:
        """Return a piece of work.

        Raises:
            Refusal: 404: it is not known.
        """
        if key not in self._jobs:
            raise Refusal(404, f"work {printable(key)[:40]!r} is not known here; ask for it again")
        return self._jobs[key]

    def cancel(self, job: PageJob) -> None:
        """End a piece of work at once; nothing comes of it."""
        if not job.state.is_over:
            job.error = "cancelled"
            job.note(JobState.CANCELLED)

    def close(self) -> None:
        """End all work."""
        for job in self._jobs.values():
            self.cancel(job)
        for child in (*self._searching.all, *self._reading.all):
            child.close()

    def _forget(self) -> None:
        """Drop the oldest pieces of work that are over."""
        over = [key for key, job in self._jobs.items() if job.state.is_over]
        size = sum(len(job.page) for job in self._jobs.values())
        for key in over:
            if len(self._jobs) <= self._settings.kept and size <= self._settings.store_bytes:
                return
            size -= len(self._jobs.pop(key).page)

    async def _carry_out(self, job: PageJob) -> None:
        # Nobody waits for the searches of others only to see a file.
        pool = self._reading if job.kind in QUICK else self._searching
        async with pool.slots:
            if job.state.is_over:
                return
            child = pool.idle.pop()
            job.note(JobState.RUNNING)
            began = time.monotonic()
            loop = asyncio.get_running_loop()
            try:
                await asyncio.to_thread(self._listen, job, child, loop)
            except Exception:
                logger.exception("work of the page")
                child.close()
                self._end(job, "an error of the server; see its log")
            finally:
                pool.idle.append(child)
            job.spent_s = time.monotonic() - began
            self._end(job, "its process ended without a word; is there enough memory?")

    def _end(self, job: PageJob, error: str) -> None:
        """Let a piece of work that is not over fail."""
        if not job.state.is_over:
            job.error = error
            job.note(JobState.FAILED)

    def _listen(self, job: PageJob, child: Child, loop: asyncio.AbstractEventLoop) -> None:
        """Send work to a process and take what it says until it is done; in a thread."""
        limit_s, begun, told = self._settings.time_limit_s, time.monotonic(), False
        try:
            pipe = child.started()
            pipe.send_bytes(job.asked)
            while True:
                if job.state.is_over:  # cancelled
                    child.close()
                    return
                if job.stop and not told:
                    pipe.send_bytes(STOP)
                    told = True
                if time.monotonic() - begun > limit_s:
                    child.close()
                    words = f"this takes longer than {limit_s:g} s (--time-limit)"
                    loop.call_soon_threadsafe(self._end, job, words)
                    return
                if not pipe.poll(_LOOK_S):
                    continue
                head, _, body = pipe.recv_bytes(self._settings.answer_bytes).partition(b"\n")
                message = json.loads(head)
                if message["what"] == "end":
                    return
                loop.call_soon_threadsafe(self._take, job, message, body)
        except EOFError:
            child.close()
        except OSError as exc:  # a message that is too long closes the pipe
            child.close()
            logger.warning("a process of the page: %s", exc)
            words = f"the answer is larger than {self._settings.answer_bytes:,} bytes, or cut off"
            loop.call_soon_threadsafe(self._end, job, words)
        finally:
            with suppress(RuntimeError, TimeoutError):  # the server may be ending
                # What was said before is taken before this returns.
                asyncio.run_coroutine_threadsafe(_nothing(), loop).result(5)

    def _take(self, job: PageJob, message: Mapping[str, Any], body: bytes) -> None:
        """Take what the process of a piece of work says."""
        if job.state.is_over:
            return
        match message["what"]:
            case "words":
                job.words = printable(message["text"])[:500]
            case "search":
                job.unit, job.bound = message["unit"], message["bound"]
            case "point":
                job.gap = message["gap"]
                if len(job.points) < _MOST_POINTS:
                    job.points.append((message["seconds"], message["value"]))
            case "document":
                job.documents[message["role"]] = self._store.add(
                    message["title"], message["kind"], message["about"], body.decode()
                )
            case "fact":
                job.facts[message["name"]] = message["value"]
            case "page":
                job.page = body
            case "done":
                job.note(JobState.DONE)
                return
            case "failed":
                self._end(job, printable(message["text"]))
                return
        job.note()


async def _nothing() -> None:
    """Do nothing; what was to be done before is done by then."""
