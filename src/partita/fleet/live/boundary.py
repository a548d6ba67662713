"""Where one round ends and the next begins: what counts there is what counts in the simulator.

A job is there if it was submitted by the boundary, and has ended if its last step was done by then,
though its process may still write a checkpoint and exit. What a job holds is counted from the start
of the round in which it started. So a decision depends on the boundary and not on how soon after it
the scheduler looks.

Words of jobs take a moment. Where a job expects to be done about the boundary and has not said so,
the decision waits for it, by `SETTLING` of a round and `MOST_S` at most: otherwise hundredths of a
second would decide whether its GPUs are free in this round or in the next.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partita.fleet.live.files import figure

SETTLING = 0.1
MOST_S = 2.0
_CLOSE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Rounds on the clock of the wall.

    Attributes:
        epoch_s: When the first began.
        round_s: Length of each.
    """

    epoch_s: float
    round_s: float

    @property
    def settling_s(self) -> float:
        """How long a decision waits for words of jobs at most."""
        return min(SETTLING * self.round_s, MOST_S)

    def number(self, at_s: float) -> int:
        """Return the number of the round that a time is in."""
        return math.floor((at_s - self.epoch_s) / self.round_s + _CLOSE)

    def start_s(self, number: int) -> float:
        """Return when a round begins."""
        return self.epoch_s + number * self.round_s

    def start_before_s(self, at_s: float) -> float:
        """Return when the round that a time is in began."""
        return self.start_s(self.number(at_s))


def has_ended(values: Mapping[str, Any], by_s: float) -> bool:
    """Return whether the last step of a job was done by some time, by the job's own word."""
    done_s = figure(values, "done_s")
    return done_s is not None and done_s <= by_s


def is_about_to_end(values: Mapping[str, Any], by_s: float) -> bool:
    """Return whether a job expects to be done by some time and has not said that it is."""
    ends_s = figure(values, "ends_s")
    return figure(values, "done_s") is None and ends_s is not None and ends_s <= by_s
