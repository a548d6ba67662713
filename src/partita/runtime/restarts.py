"""Runs that go on after something has gone wrong: attempts, their budget, and one record of steps.

When a rank or a host fails all ranks end, and are started again from the newest checkpoint. How
often is limited by progress: only restarts since the last new checkpoint count, and each waits
twice as long as the one before. A run whose ranks were asked to stop ends well, at a step on which
all of them have agreed and of which there is a checkpoint.

Every step is in the record once: what a later attempt says of a step replaces what was said before.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from partita.errors import FormatError, InvalidInputError, WorkerError
from partita.processes import retry_pause_s
from partita.ranks.failures import first_line
from partita.ranks.status import StatusBoard, agree_on_stop
from partita.runtime.checkpoint.files import list_checkpoints, read_manifest
from partita.runtime.rank import StepNews
from partita.runtime.training.saving import Saving
from partita.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimit:
    """How often a run is started again.

    Attributes:
        restarts: Restarts in a row without a new checkpoint, after which the run is given up.
        pause_s: Seconds before the second of them; the first comes at once, each further one after
            twice as long.
        longest_pause_s: But no longer than this.
    """

    restarts: int = 0
    pause_s: float = 1.0
    longest_pause_s: float = 60.0

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise InvalidInputError(f"restarts of a run is {self.restarts}; expected 0 or more")
        if not 0 <= self.pause_s <= self.longest_pause_s:
            raise InvalidInputError(
                f"pause of a restart is {self.pause_s} s, the longest {self.longest_pause_s} s; "
                "expected 0 or more, and no less than the first"
            )

    def pause_before(self, restart: int) -> float:
        """Return the seconds before the k-th restart in a row without a new checkpoint, from 1."""
        if restart < 2:
            return 0.0
        return retry_pause_s(restart - 1, first_s=self.pause_s, longest_s=self.longest_pause_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A failure that a run has survived.

    Attributes:
        attempt: Which attempt it ended, from 0.
        cause: Who failed, and how, in one line.
        rank: The rank that failed; -1 = not known.
        step: Steps that were done by then.
        resumed: The step that the next attempt went on with.
        seconds: From the failure until as many steps were done again; NaN = not yet.
    """

    attempt: int
    cause: str
    rank: int = -1
    step: int
    resumed: int
    seconds: float = math.nan

    def line(self) -> str:
        """Return what was lost, for people."""
        lost = self.step - self.resumed
        steps = "no step" if lost <= 0 else "1 step" if lost == 1 else f"{lost} steps"
        took = "" if math.isnan(self.seconds) else f" in {format_seconds(self.seconds)}"
        return f"{self.cause}; {steps} done again from step {self.resumed}{took}"

    def to_json(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {
            "attempt": self.attempt,
            "cause": self.cause,
            "rank": None if self.rank < 0 else self.rank,
            "step": self.step,
            "resumed": self.resumed,
            "seconds": None if math.isnan(self.seconds) else self.seconds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedData:
    """Data that a run leaves out, as the same steps on them would come to the same end.

    Attributes:
        step: The step that the run goes on with.
        count: Steps whose data are left out from there on.
    """

    step: int
    count: int


class LossRecord:
    """The loss of every step, whichever attempt did it last."""

    def __init__(self) -> None:
        self._shares: dict[int, tuple[int, dict[int, float]]] = {}

    def note(self, attempt: int, rank: int, news: StepNews) -> None:
        """Take note of a step that a rank has done."""
        known, shares = self._shares.get(news.step, (-1, {}))
        if attempt < known:
            return
        if attempt > known:  # another plan may have other ranks: nothing of the old one is left
            shares = {}
        shares[rank] = news.loss
        self._shares[news.step] = (attempt, shares)

    @property
    def steps_done(self) -> int:
        """The number after that of the last step of which something is known."""
        return max(self._shares, default=-1) + 1

    def losses(self) -> dict[int, float]:
        """Return the loss of each step, ascending."""
        return {
            step: sum(share for _, share in sorted(shares.items()))
            for step, (_, shares) in sorted(self._shares.items())
        }


def never() -> str:
    """Give no reason to stop."""
    return ""


def newest_step(saving: Saving | None) -> int:
    """Return the step that the newest checkpoint of a run goes on with; 0 = there is none.

    Only the names are looked at: whether it is whole is seen when it is loaded.
    """
    if saving is None:
        return 0
    for path in reversed(list_checkpoints(Path(saving.folder))):
        try:
            return read_manifest(path).step
        except FormatError:
            continue
    return 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Survival:
    """How a run goes on when something goes wrong, and when it ends before its last step.

    Attributes:
        limit: How often it is started again.
        stop: Returns why the ranks are to stop as soon as they can, empty = they are not; called a
            few times a second.
        say: Called with each thing that people should know.
    """

    limit: RestartLimit = field(default_factory=RestartLimit)
    stop: Callable[[], str] = never
    say: Callable[[str], None] = lambda _: None


class Attempts:
    """The attempts of one run: counts them, and says whether there is another one.

    Attributes:
        number: The attempt that runs, from 0.
        record: The steps of all attempts.
        incidents: What was survived so far.
    """

    def __init__(
        self,
        survival: Survival,
        newest: Callable[[], int] = lambda: 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Begin with the first.

        Args:
            survival: How the run goes on.
            newest: Returns the step that the newest checkpoint goes on with; 0 = there is none.
            clock: Seconds by a clock that does not jump.
            sleep: Waits so many seconds.
        """
        self._survival, self._clock, self._sleep = survival, clock, sleep
        self._newest = newest
        self.number, self.record = 0, LossRecord()
        self.incidents: list[Incident] = []
        self._failed_s: list[float] = []
        self._in_vain, self._saved = 0, newest()

    def note(self, rank: int, news: StepNews) -> None:
        """Take note of a step that a rank has done."""
        self.record.note(self.number, rank, news)
        for place, incident in enumerate(self.incidents):
            if math.isnan(incident.seconds) and news.step + 1 >= incident.step:
                seconds = self._clock() - self._failed_s[place]
                self.incidents[place] = replace(incident, seconds=seconds)

    def passed_data(self) -> PassedData:
        """Return the data from the newest checkpoint to a step that failed on them."""
        newest = self._newest()
        return PassedData(step=newest, count=self.record.steps_done + 1 - newest)

    def fail(self, error: WorkerError) -> None:
        """Begin the next attempt, after a pause where there was no progress.

        Raises:
            WorkerError: The one that is given: the budget is used up, or the run was to stop.
        """
        survival, limit = self._survival, self._survival.limit
        if survival.stop():  # it was about to end: whoever starts it again resumes it
            raise error
        newest = self._newest()
        if newest > self._saved:
            self._saved, self._in_vain = newest, 0
        self._in_vain += 1
        if self._in_vain > limit.restarts:
            if limit.restarts and error.args:
                raise self._given_up(error) from error
            raise error
        count = f"restart {self.number + 1}"
        if self._in_vain > 1:
            count += f", {self._in_vain} of {limit.restarts} without a new checkpoint"
        self.go_on(error, self.number + 1, resumed=newest, count=count)
        self._sleep(limit.pause_before(self._in_vain))

    def go_on(
        self, error: WorkerError, number: int, *, resumed: int | None = None, count: str = ""
    ) -> None:
        """Begin an attempt that was decided on, whatever the budget says.

        Args:
            error: What ended the one before.
            number: Which attempt begins.
            resumed: The step that it goes on with; None = that of the newest checkpoint.
            count: How often this has happened, for people.
        """
        newest = self._newest() if resumed is None else resumed
        incident = Incident(
            attempt=self.number,
            cause=first_line(error),
            rank=error.rank,
            step=max(self.record.steps_done, newest),
            resumed=newest,
        )
        self.incidents.append(incident)
        self._failed_s.append(self._clock())
        self._survival.say(f"{incident.line()} ({count or f'attempt {number + 1}'})")
        self.number = number

    def _given_up(self, error: WorkerError) -> WorkerError:
        times = self._survival.limit.restarts
        found = WorkerError(
            f"{error}\n  given up after {times} restart{'s' if times > 1 else ''} without a new "
            f"checkpoint since step {self._saved}"
        )
        found.rank = error.rank
        return found


class Stopper:
    """Lets the ranks of this host stop when there is a reason to.

    Attributes:
        why: The reason; empty = there was none.
        step: The step before which all ranks stop; -1 = none was decided.
    """

    def __init__(self, board: StatusBoard, ranks: Sequence[int], stop: Callable[[], str]) -> None:
        self._board, self._ranks, self._stop = board, ranks, stop
        self.why, self.step = "", -1

    def look(self) -> None:
        """Look for a reason to stop, and let the ranks agree on the step if there is one.

        Ranks that have not begun a step yet are let begin their first one.
        """
        if self.step >= 0:
            return
        self.why = self.why or self._stop()
        if self.why and all(self._board.announced(rank) >= 0 for rank in self._ranks):
            self.step = agree_on_stop(self._board, self._ranks)

    def end(self) -> None:
        """Look no more: the ranks have ended."""
