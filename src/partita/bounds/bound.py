"""A bound and what gives it."""

from dataclasses import dataclass
from enum import StrEnum


class Effort(StrEnum):
    """How much a bound may cost."""

    QUICK = "quick"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Bound:
    """A value that no plan of a problem can beat.

    Attributes:
        value: In the unit of the problem's metric; 0 = nothing is known.
        term: What gives it, for people.
    """

    value: float
    term: str
