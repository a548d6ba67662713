"""A training loop that holds a lease on its devices: it counts steps and stops when asked to.

    lease = Lease(save, step=restored_step)
    for batch in lease.over(loader):
        train(batch)

On the scheduler's machine they speak through two files in the job's directory: the scheduler
writes ``lease.json``, the job ``progress.json``; elsewhere over the fleet's HTTP API
(`partita.fleet.live.news`). Neither has to be alive for the other to go on. A SIGTERM means the
same as the end of the lease, sooner. Without a scheduler (neither ``PARTITA_LEASE`` nor
``PARTITA_NEWS`` is set) the loop runs to its last step.

Imports the standard library alone; the loader may be torch's, or any iterable.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from types import FrameType
from typing import Any, TypeVar

from partita.errors import InvalidInputError
from partita.fleet.gigabytes import in_bytes, in_gb
from partita.fleet.live.news import News

STEPS_VARIABLE = "PARTITA_STEPS"
ATTEMPT_VARIABLE = "PARTITA_ATTEMPT"
CHECKPOINT_VARIABLE = "PARTITA_CHECKPOINT"
GPUS_VARIABLE = "PARTITA_GPUS"
SERVERS_VARIABLE = "PARTITA_SERVERS"
SERVER_GPUS_VARIABLE = "PARTITA_SERVER_GPUS"
"""Number of GPUs of each of the servers, in their order."""
_WAIT_S = 0.01
_FAR_S = 1.0
"""Seconds between two looks at least where each is a call over the network."""
_LAST_WORD_S = 30.0
"""How long the last word of a job is tried again where nobody hears it."""
_T = TypeVar("_T")


class LoopState(StrEnum):
    """Progress that a job reports."""

    RUNNING = "running"
    STOPPED = "stopped"
    DONE = "done"


def _alone(stop: bool) -> bool:
    return stop


class Lease:
    """The right to run until the scheduler ends it.

    Args:
        checkpoint: Saves the state after so many steps; called before every stop, after the last
            step, and from time to time.
        step: Steps that are done already, by the checkpoint that was loaded.
        steps: Steps of the whole job; None = those that the scheduler gives.
        checkpoint_every: Steps from a checkpoint to the next; 0 = only before a stop.
        agree: Tells all ranks whether any of them stops (a maximum over ranks), so that they stop
            at the same step. Called by every rank after every step.
        poll_s: Seconds between two looks at the lease.
        report_s: Seconds between two words of progress.

    Attributes:
        clock: Seconds since 1970, by which steps are timed; an emulated job sets its own.

    Raises:
        InvalidInputError: The number of steps is not known.
    """

    def __init__(
        self,
        checkpoint: Callable[[int], None],
        *,
        step: int = 0,
        steps: int | None = None,
        checkpoint_every: int = 0,
        agree: Callable[[bool], bool] = _alone,
        poll_s: float = 0.05,
        report_s: float = 0.5,
    ) -> None:
        declared = os.environ.get(STEPS_VARIABLE, "")
        if steps is None and not declared.isdigit():
            raise InvalidInputError(
                f"the number of steps is not known; give steps, or set {STEPS_VARIABLE}"
            )
        self.step = step
        self.steps = int(declared) if steps is None else steps
        self.state = LoopState.RUNNING
        self._checkpoint = checkpoint
        self._checkpoint_every = checkpoint_every
        self._agree = agree
        self._saved = step
        self.clock: Callable[[], float] = time.time
        self._pace = _Pace(step)
        self._done_s: float | None = None
        self._scheduler = _Scheduler(poll_s=poll_s, report_s=report_s)

    @property
    def grant(self) -> dict[str, Any]:
        """What the job holds; empty without a scheduler.

        ``gpus``, ``cpus``, ``memory_bytes``, and the same as ``memory_gb``.
        """
        return self._scheduler.grant()

    @property
    def term(self) -> tuple[float, float]:
        """When the round that was granted begins and ends; without a scheduler it is all time."""
        return self._scheduler.term()

    @property
    def is_over(self) -> bool:
        """Whether the loop is to stop at its next step."""
        return self._scheduler.is_over()

    def wait_beyond(self, end_s: float, limit_s: float) -> bool:
        """Wait for the scheduler's decision about the time after the end of a round.

        The job's progress is reported first, since the decision may depend on it.

        Returns:
            Whether it has renewed the lease or ended it; False = it has not answered in time.
        """
        self._report(force=True)
        return self._scheduler.wait_beyond(end_s, limit_s)

    @property
    def done(self) -> bool:
        """Whether all steps are done."""
        return self.state is LoopState.DONE

    def over(self, batches: Iterable[_T]) -> Iterator[_T]:
        """Yield batches, epoch after epoch, until the steps are done or the lease ends.

        A step counts when the loop asks for the next batch.

        Raises:
            InvalidInputError: There are no batches.
        """
        self._report(force=True)
        while not self._ends():
            before = self.step
            for batch in batches:
                yield batch
                self.step += 1
                if self._ends():
                    return
                if self._checkpoint_every and self.step % self._checkpoint_every == 0:
                    self._save()
                self._report()
            if self.step == before and not self._ends():
                raise InvalidInputError("the loader has no batches; the steps cannot be done")

    def _ends(self) -> bool:
        """Whether the loop ends here; saves the state if so."""
        if self.state is not LoopState.RUNNING:
            return True
        if self.step >= self.steps:
            self._done_s = self.clock()
            self._report(force=True)  # its GPUs are planned for while it still saves
            self._finish(LoopState.DONE)
        elif self._agree(self._scheduler.is_over()):
            self._finish(LoopState.STOPPED)
        return self.state is not LoopState.RUNNING

    def _finish(self, state: LoopState) -> None:
        self._save()
        self.state = state
        self._report(force=True)

    def _save(self) -> None:
        self._checkpoint(self.step)
        self._saved = self.step
        self._report(force=True)

    def _report(self, *, force: bool = False) -> None:
        if not self._scheduler.wants_word(force=force):
            return
        self._scheduler.report(
            {
                "state": str(self.state),
                "step": self.step,
                "saved_step": self._saved,
                "steps": self.steps,
                "ends_s": self._pace.ends_s(self.step, self.steps, self.clock()),
                "done_s": self._done_s,
            }
        )


class RunLease:
    """The lease of a run that counts its steps and saves by itself, as ``partita train`` does.

    Args:
        steps: Steps of the whole job.
        saved: Returns the step that the newest checkpoint goes on with; 0 = there is none.
        speaks: Whether this process reports; None = where its environment has rank 0.
        poll_s: Seconds between two looks at the lease.
        report_s: Seconds between two words of progress.
    """

    def __init__(
        self,
        *,
        steps: int,
        saved: Callable[[], int],
        speaks: bool | None = None,
        poll_s: float = 0.2,
        report_s: float = 0.5,
    ) -> None:
        self._steps, self._saved, self._step = steps, saved, saved()
        self._pace = _Pace(self._step)
        self._done_s: float | None = None
        # Signals are the run's own: it saves before it ends.
        self._scheduler = _Scheduler(
            poll_s=poll_s, report_s=report_s, takes_signals=False, speaks=speaks
        )
        self._report(LoopState.RUNNING, force=True)

    @property
    def is_done(self) -> bool:
        """Whether all steps are done."""
        return self._step >= self._steps

    def why(self) -> str:
        """Return why the run is to stop; empty = it is not."""
        return "the end of its lease" if self._scheduler.is_over() else ""

    def note(self, done: int) -> None:
        """Take note of so many steps that are done."""
        self._step = done
        if done >= self._steps and self._done_s is None:
            self._done_s = time.time()
            self._report(LoopState.RUNNING, force=True)  # its GPUs are planned for while it saves
        else:
            self._report(LoopState.RUNNING)

    def end(self, *, stopped: bool) -> None:
        """Report how the run has ended: before its last step, or with all of its steps."""
        self._report(LoopState.STOPPED if stopped else LoopState.DONE, force=True)

    def _report(self, state: LoopState, *, force: bool = False) -> None:
        if not self._scheduler.wants_word(force=force):
            return
        self._scheduler.report(
            {
                "state": str(state),
                "step": self._step,
                "saved_step": self._step if state is LoopState.DONE else self._saved(),
                "steps": self._steps,
                "ends_s": self._pace.ends_s(self._step, self._steps, time.time()),
                "done_s": self._done_s,
            }
        )


class _Pace:
    """How fast steps are done, from one word to the next."""

    def __init__(self, step: int) -> None:
        self._step, self._at_s = step, math.nan
        self._step_s: float | None = None

    def ends_s(self, step: int, steps: int, now_s: float) -> float | None:
        """Return when the last step is expected to be done; None = that is not known yet."""
        if math.isnan(self._at_s):
            self._at_s = now_s
        elif step > self._step:
            self._step_s = (now_s - self._at_s) / (step - self._step)
            self._step, self._at_s = step, now_s
        return None if self._step_s is None else now_s + (steps - step) * self._step_s


class _Scheduler:
    """The other end; silent where there is none."""

    def __init__(
        self,
        *,
        poll_s: float,
        report_s: float,
        takes_signals: bool = True,
        speaks: bool | None = None,
    ) -> None:
        self._news = News.of_environment()
        self._attempt = int(os.environ.get(ATTEMPT_VARIABLE, "0"))
        if speaks is None:
            speaks = os.environ.get("RANK", os.environ.get("NODE_RANK", "0")) == "0"
        self._speaks = speaks
        least_s = _FAR_S if self._news.is_far else 0.0
        self._poll_s, self._report_s = max(poll_s, least_s), max(report_s, least_s)
        self._looked_s = self._reported_s = -1e9
        self._lease: dict[str, Any] = {}
        self._stop = False
        if not self._news.is_there:
            return
        if takes_signals and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._end)
        self._look()

    def _end(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._stop = True

    def _look(self) -> None:
        self._looked_s = time.monotonic()
        found = self._news.lease(self._attempt)
        if found:
            self._lease = found

    def grant(self) -> dict[str, Any]:
        """Return what was granted."""
        grant: dict[str, Any] = in_bytes(self._lease.get("grant", {}))
        if "memory_bytes" in grant:
            grant["memory_gb"] = in_gb(grant["memory_bytes"])
        return grant

    def term(self) -> tuple[float, float]:
        """Return when the round of the lease begins and ends."""
        begin_s, end_s = self._lease.get("begin_s", -math.inf), self._lease.get("end_s", math.inf)
        return float(begin_s), float(end_s)

    def wait_beyond(self, end_s: float, limit_s: float) -> bool:
        """Wait until the lease is renewed or over."""
        last_s = time.monotonic() + limit_s
        while self._news.is_there and not self.is_over() and self.term()[1] <= end_s:
            if time.monotonic() > last_s:
                return False
            time.sleep(10 * _WAIT_S if self._news.is_far else _WAIT_S)
            self._look()
        return True

    def is_over(self) -> bool:
        """Return whether the lease has ended: by word, for another attempt, or for lack of word."""
        if not self._news.is_there:
            return False
        if not self._stop and time.monotonic() - self._looked_s >= self._poll_s:
            self._look()
        lease = self._lease
        return (
            self._stop
            or bool(lease.get("stop"))
            or int(lease.get("attempt", self._attempt)) != self._attempt
            or time.time() > float(lease.get("end_s", "inf")) + float(lease.get("hold_s", 0.0))
        )

    def wants_word(self, *, force: bool) -> bool:
        """Return whether it is time to report progress; rank 0 alone does."""
        if not self._news.is_there or not self._speaks:
            return False
        return force or time.monotonic() - self._reported_s >= self._report_s

    def report(self, words: dict[str, Any]) -> None:
        """Report how far the job is; the last word is not given up soon."""
        self._reported_s = time.monotonic()
        values = {**words, "attempt": self._attempt, "pid": os.getpid(), "at_s": time.time()}
        is_last = words["state"] != LoopState.RUNNING and self._news.is_far
        self._news.report(self._attempt, values, patience_s=_LAST_WORD_S if is_last else 0.0)
