"""How much a search may do, and whom it tells what it has found."""

import time
from dataclasses import dataclass, field

from partita.errors import InvalidInputError
from partita.planners.search_trace import SearchTrace


@dataclass(slots=True, kw_only=True)
class Effort:
    """The limits of one search.

    Attributes:
        time_limit: Wall seconds; ``None`` = no limit, so that a search is deterministic.
        goal: A value that nothing can be below; a search that reaches it stops.
        trace: Told of each new best.
        timed_out: Whether the time was up before the search was done.
    """

    time_limit: float | None = None
    goal: float = 0.0
    trace: SearchTrace | None = None
    timed_out: bool = False
    _begin: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        number = isinstance(self.time_limit, int | float)
        if self.time_limit is not None and not (number and self.time_limit > 0):
            raise InvalidInputError(
                f"time_limit is {self.time_limit!r}; expected more than 0 seconds"
            )

    def within(self) -> "Effort":
        """Return the limits of a part of the search: the same deadline, no goal and no trace."""
        return Effort(time_limit=self.time_limit, _begin=self._begin)

    def reached(self, value: float) -> bool:
        """Return whether a value is as good as any can be."""
        return value <= self.goal * (1 + 1e-9) + 1e-12

    def tell(self, value: float) -> bool:
        """Note the best value so far; true = stop, the goal is reached or the time is up."""
        if self.trace is not None:
            self.trace.record(value)
        return self.reached(value) or self.is_over()

    def is_over(self) -> bool:
        """Return whether the time is up."""
        if self.time_limit is not None and time.monotonic() - self._begin >= self.time_limit:
            self.timed_out = True
        return self.timed_out


def check_count(what: str, value: int | None) -> None:
    """Refuse a number of rounds that is none, or below 1.

    Raises:
        InvalidInputError: It is.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (whole and value >= 1):
        raise InvalidInputError(f"{what} is {value!r}; expected a whole number of 1 or more")
