"""The threads of a client: one that asks for plans, one that sends what was measured.

The first one begins by finding the job's name, which need not be known yet.
Both go on asking a server that does not answer, or not with a plan, ever more rarely, and say so
once. What a server refuses for good, such as a job that it does not know, ends the thread with one
remark, and so does a mistake of our own; a letter that cannot be sent is left out. How long a
server has owed an answer can be asked: who is in the midst of its profiling must not wait for it.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache, partial
from typing import Any, TypeVar

from partita.energy.frontier.clock_plan import Entry
from partita.http import NO_SENSE, ServerError, ServerLink, pause_s

_T = TypeVar("_T")
LONG_POLL_S = 20.0
_MOST_LETTERS = 256
"""Letters that are kept for a server that does not answer; the oldest are dropped."""
_LONG_POLL_OVER = 504
_OUR_MISTAKE = 400
_CLOSE_S = 2.0
_MOST_MHZ = 1_000_000
PROFILING = "profiling"
"""State of a plan that is there to measure its clocks, not to run with them."""
_Letter = Callable[[], tuple[str, Mapping[str, Any]]]
"""Returns where to post what."""


class _Answer(Enum):
    """What became of a request."""

    DONE = auto()
    REFUSED = auto()
    STOPPED = auto()


@dataclass(slots=True, kw_only=True)
class RankPlan:
    """The clocks of one rank.

    Attributes:
        version: Of the plan; None = there is none yet.
        state: ``profiling`` or ``deployed``; ``""`` = there is none yet.
        entries: Instructions and clocks of one step, in order.
        time_s: The step time that the server predicts; None = it does not.
        energy_j: The joules of a step, of all devices, that it predicts.
        since: The version that first had these clocks; a server may number them anew.
        is_doubted: Whether it was found to be for other instructions.
        names: Names of the instructions that it has clocks for.
    """

    version: int | None = None
    state: str = ""
    entries: tuple[Entry, ...] = ()
    time_s: float | None = None
    energy_j: float | None = None
    since: int | None = None
    is_doubted: bool = False
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = frozenset(name for name, _ in self.entries)
        self.since = self.version if self.since is None else self.since

    def after(self, before: "RankPlan") -> "RankPlan":
        """Return this plan as the one that follows another, which may have the same clocks."""
        same = (self.state, self.entries) == (before.state, before.entries)
        if same:
            self.since, self.is_doubted = before.since, before.is_doubted
        return self


def read_plan(found: Mapping[str, Any]) -> RankPlan:
    """Return the plan of a server's answer.

    Raises:
        ServerError: It is none.
    """
    try:
        entries = tuple((str(name), int(mhz)) for name, mhz in found["frequencies"])
        for name, mhz in entries:
            if not 0 <= mhz <= _MOST_MHZ:
                raise ValueError(f"{str(mhz)[:24]} MHz for {name!r}")
        return RankPlan(
            version=int(found["version"]),
            state=str(found["state"]),
            entries=entries,
            time_s=found.get("time_s"),
            energy_j=found.get("energy_j"),
        )
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as exc:
        raise ServerError(
            f"the energy server's answer is no clock plan: {exc!r}", NO_SENSE
        ) from exc


class Mailbox:
    """What goes to and comes from a server, without anybody waiting for it."""

    def __init__(
        self,
        url: str,
        job_id: str | Callable[[], str],
        rank: int,
        registration: Mapping[str, Any],
        *,
        say: Callable[[str], None],
        token: str | None = None,
        transport: Any = None,  # noqa: ANN401 (of httpx)
    ) -> None:
        """Start the threads; the first request registers the rank."""
        self._find_job = job_id if callable(job_id) else lambda: job_id
        self._job_id, self._rank, self._registration, self._say = "", rank, registration, say
        self._incoming: RankPlan | None = None
        self._letters: queue.Queue[_Letter | None] = queue.Queue()
        self._stop = threading.Event()
        self._registered = threading.Event()
        self._complaining = threading.Lock()
        self._complained: set[int] = set()
        # By thread: since when its requests fail, and when the one under way should be answered.
        self._silent_since: dict[int, float] = {}
        self._due_s: dict[int, float] = {}
        self._links = [
            ServerLink(url, noun="energy server", token=token, transport=transport)
            for _ in range(2)
        ]
        self._threads = [
            threading.Thread(target=self._ask, args=(self._links[0],), daemon=True),
            threading.Thread(target=self._send, args=(self._links[1],), daemon=True),
        ]
        for thread, name in zip(self._threads, ("energy-plans", "energy-results"), strict=True):
            thread.name = name
            thread.start()

    def newest_plan(self) -> RankPlan | None:
        """Return the plan that came last; None = none has."""
        return self._incoming

    @property
    def silence_s(self) -> float:
        """Seconds for which the server owes an answer; 0 = it does not, inf = there will be none.

        That is since requests fail, or since one that is under way should have been answered.
        """
        with self._complaining:
            since = min((*self._silent_since.values(), *self._due_s.values()), default=math.inf)
        return max(0.0, time.monotonic() - since)

    def announce(self, straggler: Mapping[str, Any]) -> None:
        """Send word of a straggler."""
        self._put(lambda: (f"/straggler/{self._job_id}", straggler))

    def report(
        self, make: Callable[[_T], Mapping[str, Any]], measured: _T, delay_s: float = 0.0
    ) -> None:
        """Send results.

        Args:
            make: Makes what is sent of what was measured, when it is sent.
            measured: What was measured.
            delay_s: How long after now it is known completely.
        """

        def letter() -> tuple[str, Mapping[str, Any]]:
            if delay_s:
                self._stop.wait(delay_s)
            return f"/result/{self._job_id}", make(measured)

        self._put(letter)

    def close(self) -> None:
        """Send what is waiting to be sent, if the server answers, and stop."""
        self._letters.put(None)
        self._threads[1].join(0.0 if self._complained else _CLOSE_S)
        self._stop.set()
        self._threads[1].join(_CLOSE_S)
        for link, thread in zip(self._links, self._threads, strict=True):
            if not thread.is_alive():
                link.close()

    def _put(self, letter: _Letter) -> None:
        if self._letters.qsize() >= _MOST_LETTERS:
            self._letters.get_nowait()
        self._letters.put(letter)

    def _ask(self, link: ServerLink) -> None:
        """Find the job, register, then ask for one plan after the other."""
        for request in (self._find, lambda: self._register(link)):
            if self._insist(request) is not _Answer.DONE:
                return
        self._registered.set()
        while (answer := self._insist(lambda: self._next_plan(link))) is _Answer.DONE:
            pass
        if answer is _Answer.REFUSED:
            self._note_silence(-math.inf)

    def _find(self) -> None:
        self._job_id = self._find_job()

    def _register(self, link: ServerLink) -> None:
        with self._answer_due():
            link.post(f"/register_rank/{self._job_id}", self._registration)

    @contextmanager
    def _answer_due(self, wait_s: float = 0.0) -> Iterator[None]:
        """Note that the server owes this thread an answer, after a wait that was asked for."""
        thread = threading.get_ident()
        with self._complaining:
            self._due_s[thread] = time.monotonic() + wait_s
        try:
            yield
        finally:
            with self._complaining:
                del self._due_s[thread]

    def _next_plan(self, link: ServerLink) -> None:
        newest = self._incoming
        query: dict[str, Any] = {"rank": self._rank, "wait": LONG_POLL_S}
        if newest is not None:
            query["after"] = newest.version
        try:
            with self._answer_due(LONG_POLL_S):
                found = link.get(f"/schedule/{self._job_id}", query, wait_s=LONG_POLL_S)
        except ServerError as exc:
            if exc.status == _LONG_POLL_OVER:
                return
            raise
        self._incoming = read_plan(found)

    def _send(self, link: ServerLink) -> None:
        while not self._stop.is_set() and not self._registered.wait(0.05):
            if not self._threads[0].is_alive():
                return
        while (letter := self._letters.get()) is not None:
            if self._insist(partial(self._post, link, cache(letter))) is _Answer.STOPPED:
                return

    def _post(self, link: ServerLink, letter: _Letter) -> None:
        """Send a letter, which is written when it is sent first."""
        path, body = letter()
        with self._answer_due():
            link.post(path, body)

    def _insist(self, request: Callable[[], object]) -> _Answer:
        """Make a request until it is answered."""
        failures = 0
        while not self._stop.is_set():
            try:
                request()
            except ServerError as exc:
                failure = exc
            except Exception as exc:  # noqa: BLE001 (no mistake here may end a thread unsaid)
                failure = ServerError(f"energy server: {type(exc).__name__}: {exc}", _OUR_MISTAKE)
            else:
                self._complained.discard(0)
                self._note_silence(None)
                return _Answer.DONE
            failures += 1
            self._complain(failure)
            if not failure.is_passing:
                self._note_silence(None)
                return _Answer.REFUSED
            if failures == 1:
                self._note_silence(time.monotonic())
            self._stop.wait(pause_s(failures))
        return _Answer.STOPPED

    def _note_silence(self, since_s: float | None) -> None:
        """Note since when the requests of this thread fail; None = they do not."""
        with self._complaining:
            if since_s is None:
                self._silent_since.pop(threading.get_ident(), None)
            else:
                self._silent_since[threading.get_ident()] = since_s

    def _complain(self, exc: ServerError) -> None:
        """Say what is wrong, unless one of the threads has said so."""
        with self._complaining:
            what = 0 if exc.is_passing and exc.status != NO_SENSE else exc.status
            if what not in self._complained:
                self._complained.add(what)
                self._say(f"{exc}; training goes on with the last plan")
