"""Finds a device that has become slower: than its own past, and than its peers.

A device knows what each of its instructions took at each clock when it was well. A step's slowdown
is the median, over its instructions, of measured over expected time at the clock that was set. A
step in which nearly all instructions are slower counts at once; where only some are, the median
over the last steps has to show it, so that one hiccup is no straggler. Nor need a step be over: if
nearly all of its first part is slower, that counts, and the end of the step confirms or revokes it.
If the others have become slower as well, nobody is a straggler.

A straggler gets other clocks, which may have no past yet. It is not well for that: as long as the
times fit the slowdown that was announced, seen from the nearest clock that has a past, it stays.
"""

import math
import statistics
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from partita.errors import InvalidInputError

Instruction = tuple[Hashable, float]
"""What an instruction is, and its clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """When a slowdown counts.

    Attributes:
        slow: From this factor on a device is a straggler.
        recovered: Below this factor it is none any more.
        change: A straggler is announced again when its factor has changed by this share.
        steps: Steps over which the median is taken.
        learned: Times of an instruction at a clock that are its past; fewer than two are none.
        nearly_all: Share of instructions that must be slow for a single step to count.
        early: Share of a step's instructions after which it may count before its end.
        early_least: So many at least.
    """

    slow: float = 1.15
    recovered: float = 1.07
    change: float = 0.1
    steps: int = 3
    learned: int = 5
    nearly_all: float = 0.9
    early: float = 0.25
    early_least: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.recovered < self.slow:
            raise InvalidInputError(
                f"a straggler is slow from {self.slow} and recovered below {self.recovered}; "
                "expected 1 <= recovered < slow"
            )
        if self.learned < 2 or self.steps < 1:
            raise InvalidInputError(
                f"learned is {self.learned} and steps is {self.steps}; expected 2 and 1 or more"
            )


class SlowdownWatch:
    """Watches the times of one device.

    Attributes:
        announced: The slowdown that was announced last; 1 = none.
    """

    def __init__(self, sensitivity: Sensitivity | None = None) -> None:
        self._limits = sensitivity or Sensitivity()
        self._past: dict[Hashable, dict[float, list[float]]] = {}
        self._recent: deque[float] = deque(maxlen=self._limits.steps)
        self._num_instructions = 0
        self.announced = 1.0

    @property
    def early(self) -> int:
        """How many instructions of a step are enough to suspect it, as the last one was."""
        limits = self._limits
        return max(limits.early_least, math.ceil(limits.early * self._num_instructions))

    def suspect(self, times: Sequence[tuple[Instruction, float]]) -> float:
        """Return how many times as long the first part of a step takes; 1 = not without doubt."""
        ratios = self._ratios(times)
        if len(ratios) < self._limits.early_least or self._typical(ratios) < self._limits.slow:
            return 1.0
        return statistics.median(ratios)

    def observe(self, times: Sequence[tuple[Instruction, float]]) -> float:
        """Take note of a step, and return how many times as long it takes as it did; 1 = as ever.

        Args:
            times: For each instruction what it is, its clock included, and its seconds.
        """
        self._num_instructions = len(times)
        ratios = self._ratios(times)
        slowdown = self._judge(ratios) if ratios else self._guess(times)
        if self.announced > 1:
            self._learn([item for item in times if self._expected(item[0]) is None], slowdown)
        elif slowdown < self._limits.slow:
            self._learn(times, 1.0)
        return slowdown

    def _learn(self, times: Sequence[tuple[Instruction, float]], slowdown: float) -> None:
        """Take times of a device that is so many times as slow as it was for its past."""
        for (what, clock), seconds in times:
            past = self._past.setdefault(what, {}).setdefault(clock, [])
            if len(past) < self._limits.learned:
                past.append(seconds / slowdown)

    def decide(self, slowdown: float, peers: Sequence[float] = ()) -> float | None:
        """Return the slowdown to announce, 1 = recovered; None = nothing new.

        Args:
            slowdown: What ``observe`` has returned.
            peers: The slowdowns of the other devices.
        """
        limits = self._limits
        relative = slowdown / max(statistics.median(peers), 1.0) if peers else slowdown
        is_known = self.announced > 1
        if relative < (limits.recovered if is_known else limits.slow):
            return self._announce(1.0) if is_known else None
        if is_known and abs(slowdown / self.announced - 1) <= limits.change:
            return None
        return self._announce(slowdown)

    def _announce(self, slowdown: float) -> float:
        self.announced = slowdown
        return slowdown

    def _ratios(self, times: Sequence[tuple[Instruction, float]]) -> list[float]:
        """Return measured over expected times, where one is expected; they ascend."""
        return sorted(
            seconds / expected
            for key, seconds in times
            if (expected := self._expected(key)) is not None and expected > 0
        )

    def _typical(self, ratios: Sequence[float]) -> float:
        """Return what nearly all ratios reach."""
        return ratios[int((1 - self._limits.nearly_all) * len(ratios))]

    def _expected(self, key: Instruction) -> float | None:
        what, clock = key
        past = self._past.get(what, {}).get(clock, [])
        return statistics.median(past) if len(past) >= 2 else None

    def _guess(self, times: Sequence[tuple[Instruction, float]]) -> float:
        """Return the slowdown of a step at clocks without a past, as close to that announced as is.

        At another clock an instruction takes as long as at the nearest one with a past, or longer
        or shorter in inverse proportion to the clock at most.
        """
        if self.announced == 1.0:
            return 1.0
        least, most = [], []
        for (what, clock), seconds in times:
            known = [c for c in self._past.get(what, {}) if self._expected((what, c))]
            if known and clock > 0:
                near = min(known, key=lambda c: abs(c - clock))
                ends = [self._expected((what, near)) or 0.0]
                ends.append(ends[0] * near / clock)
                least.append(seconds / max(ends))
                most.append(seconds / min(ends))
        if not least:
            return self.announced
        return max(1.0, min(max(self.announced, statistics.median(least)), statistics.median(most)))

    def _judge(self, ratios: Sequence[float]) -> float:
        """Return the slowdown of a step, or of the last ones; ratios ascend."""
        limits = self._limits
        middle = statistics.median(ratios)
        self._recent.append(middle)
        if self._typical(ratios) >= limits.slow or middle < limits.recovered:
            # Without doubt slow, or well: what was before does not matter.
            self._recent.clear()
            self._recent.append(middle)
            return max(middle, 1.0)
        if len(self._recent) < limits.steps:
            return max(min(self._recent), 1.0)
        return max(statistics.median(self._recent), 1.0)
