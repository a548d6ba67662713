"""How a trace is played."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from partita.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A server that fails, and what it was doing since the last round is lost.

    Attributes:
        server: Index of the server.
        start_s: When it fails.
        end_s: When it works again; ``inf`` = never.
    """

    server: int
    start_s: float
    end_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < self.end_s:
            raise InvalidInputError(
                f"outage of server {self.server} is from {self.start_s:g} to {self.end_s:g} s; "
                "expected an end after its start"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How rounds are played.

    Attributes:
        round_s: Length of a round; leases end with rounds.
        restart_s: Seconds that a resumption or move costs a job whose sensitivity has no such time.
        outages: Servers that fail.
        quotas: GPUs that a tenant may hold at most, by name.
        record: Whether to record who ran where.
        power_cap_w: Power that the GPUs of all jobs may take together; ``inf`` = any.
        equal_clocks: Whether the cap slows all jobs alike, instead of those that lose least.
        split_loss: Share of its speed that a job of a model loses over several servers, by name of
            the model; by default none, as published.
    """

    round_s: float = 300.0
    restart_s: float = 30.0
    outages: tuple[Outage, ...] = ()
    quotas: Mapping[str, int] = field(default_factory=dict)
    record: bool = False
    power_cap_w: float = math.inf
    equal_clocks: bool = False
    split_loss: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.round_s > 0 and math.isfinite(self.round_s)):
            raise InvalidInputError(f"round_s is {self.round_s}; expected more than 0")
        if not 0 <= self.restart_s < self.round_s:
            raise InvalidInputError(
                f"restart_s is {self.restart_s:g}; expected 0 or more, less than a round of "
                f"{self.round_s:g} s"
            )
        if not self.power_cap_w > 0:
            raise InvalidInputError(f"power_cap_w is {self.power_cap_w}; expected more than 0")
        for name, loss in self.split_loss.items():
            if not 0 <= loss < 1:
                raise InvalidInputError(
                    f"split_loss of {name!r} is {loss}; expected 0 or more, less than 1"
                )
