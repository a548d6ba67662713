"""How long a search goes on: by moves, which is repeatable, or by the clock."""

import time
from dataclasses import dataclass, field

from partita.errors import InvalidInputError
from partita.planners.search_trace import SearchTrace

ENDLESS = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The limits of a search.

    Attributes:
        iterations: Moves; 0 = as many as suit the size.
        time_limit: Seconds, counted from when this is made; 0 = none.
        seed: Seed of random numbers.
        trace: Told every new best value.
    """

    iterations: int = 0
    time_limit: float = 0.0
    seed: int = 0
    trace: SearchTrace | None = None
    begin_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.iterations < 0 or not self.time_limit >= 0:
            raise InvalidInputError(
                f"iterations {self.iterations} and time_limit {self.time_limit} must be 0 or more"
            )
        if self.iterations and self.time_limit:
            raise InvalidInputError("give iterations or time_limit; both is one limit too many")

    def moves(self, default: int) -> int:
        """Return the moves that a search may make."""
        return self.iterations or (ENDLESS if self.time_limit else default)

    def is_over(self) -> bool:
        """Return whether the time is up."""
        return 0 < self.time_limit <= time.monotonic() - self.begin_s

    def record(self, value: float) -> None:
        """Note a value that is the best so far."""
        if self.trace is not None:
            self.trace.record(value)
