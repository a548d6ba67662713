"""A modelled GPU: DVFS curve, energy counter, seeded noise, throttling, and slow spells.

Nothing is measured: whoever runs work on it tells it when an instruction begins, is told how long
that takes at the clock that is set, and waits that long. Between instructions it draws the power of
a device that waits. Its counter is exact at any time.
"""

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from partita.core.energy import EnergyOrigin
from partita.core.program import Kind
from partita.energy.frontier.modelled import DvfsCurve
from partita.errors import InvalidInputError

_MOST_NOISE = 3.0
"""Standard deviations beyond which noise is cut off, so that no time is ever negative."""


@dataclass(frozen=True, slots=True)
class SlowSpell:
    """A stretch of steps in which a rank is slower: a way to rehearse stragglers.

    It is held up: the time by which an instruction is longer costs the power of waiting.

    Attributes:
        factor: How many times as long its instructions take.
        first: The first such step.
        last: The last one; None = to the end.
        rank: The rank; None = all.
    """

    factor: float
    first: int
    last: int | None = None
    rank: int | None = None

    @classmethod
    def parse(cls, text: str) -> "SlowSpell":
        """Return the spell of a text such as ``1.5@step20``, ``1.5@step20-40:rank1``."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)@step(\d+)(?:-(\d+))?(?::rank(\d+))?", text)
        if found is None or float(found[1]) < 1:
            raise InvalidInputError(
                f"slow is {text!r}; expected a factor >= 1 and steps, like 1.5@step20, "
                "1.5@step20-40 or 1.5@step20:rank1"
            )
        last, rank = (None if part is None else int(part) for part in found.group(3, 4))
        return cls(float(found[1]), int(found[2]), last, rank)

    def factor_at(self, step: int, rank: int) -> float:
        """Return how many times as long a rank's instructions take in a step."""
        here = self.rank in (None, rank) and self.first <= step
        return self.factor if here and (self.last is None or step <= self.last) else 1.0


class ModelledDevice:
    """A GPU by its DVFS curve. See ``PowerDevice`` and ``WorkingDevice``."""

    origin = EnergyOrigin.MODELLED
    resolution_s = 0.0
    at_once = True

    def __init__(
        self,
        curve: DvfsCurve,
        *,
        type_name: str = "",
        rank: int = 0,
        noise: float = 0.0,
        seed: int = 0,
        slow: SlowSpell | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make a device.

        Args:
            curve: Its time and power by clock.
            type_name: Its catalogue name.
            rank: The rank that has it.
            noise: Relative standard deviation of the time and of the power of an instruction.
            seed: Of the noise; every rank has noise of its own.
            slow: When it is slower.
            clock: Tells its time, in seconds.

        Raises:
            InvalidInputError: The noise is out of range.
        """
        if not 0 <= noise <= 0.2:
            raise InvalidInputError(f"noise is {noise}; expected 0 to 0.2")
        self.name, self.type = f"modelled-{type_name or 'gpu'}:{rank}", type_name
        self.blocking_w: float | None = curve.blocking_w
        self.clock = clock
        self._curve, self._rank, self._noise, self._slow = curve, rank, noise, slow
        self._random = random.Random(f"{seed}/{rank}")
        self._mhz = curve.clocks_mhz[0]
        self._step = 0
        self._since_s: float | None = None
        self._joules = 0.0
        self._busy_until_s = 0.0
        self._busy_w = 0.0

    @property
    def clocks_mhz(self) -> tuple[int, ...]:
        """The clocks that can be set, highest first."""
        return self._curve.clocks_mhz

    @property
    def clock_mhz(self) -> int:
        """The clock that is set."""
        return self._mhz

    def set_clock(self, mhz: int) -> None:
        """Run at a clock from the next instruction on; 0 = leave it as it is."""
        if not mhz:
            return
        if mhz not in self._curve.clocks_mhz:
            clocks = self._curve.clocks_mhz
            raise InvalidInputError(
                f"{self.name}: {mhz} MHz is not one of its {len(clocks)} clocks from {clocks[-1]} "
                f"to {clocks[0]}"
            )
        self._mhz = mhz

    def reset(self) -> None:
        """Run at the highest clock."""
        self._mhz = self._curve.clocks_mhz[0]

    def energy_j(self) -> float | None:
        """Return the joules since it was first asked."""
        return self._settle(self.clock())

    def begin_step(self, step: int) -> None:
        """Say which step is carried out from now on."""
        self._step = step

    def begin_work(self, top_clock_s: float, kind: Kind, begin_s: float | None = None) -> float:
        """Start an instruction; returns the seconds that it takes."""
        begin_s = self.clock() if begin_s is None else begin_s
        self._settle(begin_s)
        worked = top_clock_s * self._curve.stretch(kind, self._mhz) * self._varied()
        self._busy_w = self._curve.power_w(kind, self._mhz) * self._varied()
        self._busy_until_s = begin_s + worked
        slow = 1.0 if self._slow is None else self._slow.factor_at(self._step, self._rank)
        return worked * slow

    def _varied(self) -> float:
        if not self._noise:
            return 1.0
        deviation = self._random.gauss(0.0, 1.0)
        return 1 + self._noise * max(-_MOST_NOISE, min(_MOST_NOISE, deviation))

    def _settle(self, now_s: float) -> float:
        """Add what was used until now, and return the counter."""
        if self._since_s is None:
            self._since_s = now_s
        if now_s > self._since_s:
            busy = max(0.0, min(now_s, self._busy_until_s) - self._since_s)
            waited = now_s - self._since_s - busy
            self._joules += busy * self._busy_w + waited * self._curve.blocking_w
            self._since_s = now_s
        return self._joules
