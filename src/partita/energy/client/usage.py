"""What the steps of a rank took in time and energy, and which clock its instructions ran at."""

from dataclasses import dataclass, field
from typing import NamedTuple

from partita.core.energy import EnergyOrigin
from partita.energy.client.counter import Stamp


class Window(NamedTuple):
    """One instruction that was carried out.

    Attributes:
        name: As plans call it.
        begin: When it began, and the counter then.
        end: When it ended.
        clock_mhz: The clock that was really set when it ended; 0 = not known.
    """

    name: str
    begin: Stamp
    end: Stamp
    clock_mhz: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end.time_s - self.begin.time_s


class StepUse(NamedTuple):
    """One step of a rank.

    Attributes:
        step: Its number.
        seconds: How long it took.
        joules: What it used; None = not known.
        version: The clock plan that was in force, by the version that first had its clocks; None =
            none was.
        state: What that plan is for: ``profiling`` or ``deployed``; ``""`` = there is none.
        slowdown: How many times as long its instructions took as they once did.
    """

    step: int
    seconds: float
    joules: float | None
    version: int | None
    state: str
    slowdown: float


@dataclass(frozen=True, kw_only=True)
class EnergyUse:
    """What a rank has to say of its energy after a run.

    Attributes:
        device: Name of its power device.
        origin: Whether joules are measured or modelled.
        steps: Its steps.
        windows: Its instructions, if they were to be kept.
        readings: Its counter: times and joules, if they were to be kept.
        epoch_s: Added to times it gives UNIX seconds.
        remarks: What was said on the way.
    """

    device: str
    origin: EnergyOrigin
    steps: list[StepUse] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    readings: list[tuple[float, float]] = field(default_factory=list)
    epoch_s: float = 0.0
    remarks: list[str] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        """Whether the energy of every step is known."""
        return bool(self.steps) and all(step.joules is not None for step in self.steps)
