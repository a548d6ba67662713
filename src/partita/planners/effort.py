"""How much a search may do, and whom it tells of the best that it has found."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from partita.errors import InvalidInputError
from partita.kernels import compiling_s

ENDLESS = 2**40
"""Steps of a search that the clock ends."""


def search_clock() -> float:
    """Return seconds that go on while a search works, and stand while kernels are compiled."""
    return time.monotonic() - compiling_s()


@dataclass(slots=True)
class SearchTrace:
    """Records each new best value of a search, and when it was found.

    Planners take one as the keyword ``trace``; it is no option of theirs, and never changes what
    they find.

    Attributes:
        on_record: Called with the seconds and the value of each new best.
        stopped: Returns whether somebody asked the search to end with the best that it has.
        points: ``(seconds, value)`` since the trace was made, values falling.
    """

    on_record: Callable[[float, float], None] | None = None
    stopped: Callable[[], bool] | None = None
    points: list[tuple[float, float]] = field(default_factory=list)
    _begin: float = field(default_factory=lambda: search_clock())  # noqa: PLW0108 (as it is then)

    def record(self, value: float) -> None:
        """Note a value; one that is no better than the last is left out."""
        if self.points and not value < self.points[-1][1]:
            return
        point = (search_clock() - self._begin, float(value))
        self.points.append(point)
        if self.on_record is not None:
            self.on_record(*point)


@dataclass(slots=True, kw_only=True)
class Effort:
    """The limits of one search: a number of steps, seconds on the clock, both or neither.

    With steps alone a search is the same every time; what a step is, the search says. Seconds in
    which kernels are compiled, which happens once per machine, do not count.

    Attributes:
        iterations: Steps; ``None`` = no such limit.
        time_limit: Seconds, counted from when this is made; ``None`` = no such limit.
        goal: A value that nothing can be below; a search that reaches it stops.
        seed: Seed of the random numbers.
        trace: Called with each new best value.
        spent: Steps made so far.
        timed_out: Whether the time was up, or somebody had asked for the end, when it was looked.
    """

    iterations: int | None = None
    time_limit: float | None = None
    goal: float = 0.0
    seed: int = 0
    trace: SearchTrace | None = None
    spent: int = 0
    timed_out: bool = False
    _begin: float = field(default_factory=lambda: search_clock())  # noqa: PLW0108 (as it is then)

    def __post_init__(self) -> None:
        for name, value in (("iterations", self.iterations), ("time_limit", self.time_limit)):
            if value is not None and not value >= 0:
                raise InvalidInputError(f"{name} is {value!r}; expected 0 or more")

    @property
    def is_counted(self) -> bool:
        """Whether steps are counted."""
        return self.iterations is not None

    @property
    def text(self) -> str:
        """The limit in words."""
        if self.iterations is not None:
            return f"iterations {self.iterations}"
        return "no limit" if self.time_limit is None else f"time_limit {self.time_limit:g} s"

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return search_clock() - self._begin

    @property
    def left_s(self) -> float:
        """Seconds that are left; infinite without a time limit."""
        return math.inf if self.time_limit is None else max(0.0, self.time_limit - self.elapsed_s)

    def used(self) -> float:
        """Return the share of the limit that is used up; of steps where they are counted."""
        if self.iterations is not None:
            return self.spent / max(self.iterations, 1)
        return 0.0 if self.time_limit is None else self.elapsed_s / max(self.time_limit, 1e-9)

    def is_over(self) -> bool:
        """Return whether the steps are made or the time is up."""
        if self.iterations is not None and self.spent >= self.iterations:
            return True
        if self.time_limit is not None and self.elapsed_s >= self.time_limit:
            self.timed_out = True
        if self.trace is not None and self.trace.stopped is not None and self.trace.stopped():
            self.timed_out = True
        return self.timed_out

    def spend(self, steps: int = 1) -> int:
        """Count steps, and return how many of them may be made."""
        if self.iterations is not None:
            steps = max(0, min(steps, self.iterations - self.spent))
        self.spent += steps
        return steps

    def steps(self, default: int) -> int:
        """Return the steps to plan with: as given, endless by the clock, else a default."""
        if self.iterations is not None:
            return self.iterations
        return default if self.time_limit is None else ENDLESS

    def within(self) -> "Effort":
        """Return the limits of a part of the search: the same end, no goal, nothing recorded."""
        stopped = None if self.trace is None else self.trace.stopped
        unseen = None if stopped is None else SearchTrace(stopped=stopped)
        return Effort(time_limit=self.time_limit, trace=unseen, _begin=self._begin)

    def reached(self, value: float) -> bool:
        """Return whether a value is as good as any can be."""
        return value <= self.goal * (1 + 1e-9) + 1e-12

    def record(self, value: float) -> None:
        """Note a value that may be the best so far."""
        if self.trace is not None:
            self.trace.record(value)

    def is_enough(self, value: float) -> bool:
        """Note the best value so far; return whether to stop, at the goal or at a limit."""
        self.record(value)
        return self.reached(value) or self.is_over()


def either_limit(
    iterations: int, time_limit: float, *, seed: int = 0, trace: SearchTrace | None = None
) -> Effort:
    """Return the limits of a search that takes steps or seconds, 0 = not given.

    Raises:
        InvalidInputError: One is negative, or both are given.
    """
    if iterations < 0 or not time_limit >= 0:
        raise InvalidInputError(
            f"iterations {iterations} and time_limit {time_limit} must be 0 or more"
        )
    if iterations and time_limit:
        raise InvalidInputError("give iterations or time_limit; both is one limit too many")
    return Effort(
        iterations=iterations or None, time_limit=time_limit or None, seed=seed, trace=trace
    )


def check_count(what: str, value: int | None) -> None:
    """Refuse a number of rounds that is none, or below 1.

    Raises:
        InvalidInputError: It is.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (whole and value >= 1):
        raise InvalidInputError(f"{what} is {value!r}; expected a whole number of 1 or more")


def check_seconds(value: float | None) -> None:
    """Refuse a time limit that is no number above 0; ``None`` is none.

    Raises:
        InvalidInputError: It is.
    """
    if value is not None and not (isinstance(value, int | float) and value > 0):
        raise InvalidInputError(f"time_limit is {value!r}; expected more than 0 seconds")
