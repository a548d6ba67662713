"""Ranks that fall behind, found while a run goes on by what each computes per step.

A rank says after every step how long its forwards and backwards took. That over what the cost model
says is its pace; a rank whose pace is well above that of the others, over several steps, is a
straggler. Waiting for others is no compute, so that whoever is held up is not taken for slow; ranks
of a tensor-parallel group compute together and can only be told apart from other groups. What it
takes too long must be worth speaking of beside the rank that computes longest: a stage of a few
microseconds may take many times what was predicted, and holds up nobody.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from partita.core.program import Kind, Program
from partita.core.solution import Solution
from partita.cost.durations import instruction_seconds
from partita.runtime.process_transport import used_devices
from partita.runtime.rank import StepNews
from partita.units import format_seconds

WINDOW = 8
"""Steps whose median is the pace of a rank: one slow step is none."""
SLOW = 1.3
"""Pace, over that of the others, from which on a rank is a straggler."""
_LEAST_SHARE, _LEAST_S = 0.1, 2e-3
"""What a straggler computes too long in a step: this share of the longest compute, and so much."""
_NEWS = 1.2
"""Factor by which a straggler's pace has to change to be said again."""
_WARM_UP = 2
"""First steps of a run, which take longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that falls behind, or has done so.

    Attributes:
        rank: The rank.
        device: Its device.
        host: The host of that.
        stages: The stages that it runs.
        step: The step after which it was found, from 1.
        compute_s: Seconds of compute per step, the median of the last steps.
        usual_s: The same if it had the pace of the others.
    """

    rank: int
    device: str
    host: str
    stages: tuple[int, ...]
    step: int
    compute_s: float
    usual_s: float

    @property
    def slowdown(self) -> float:
        """How many times as long it computes as it would at the pace of the others."""
        return self.compute_s / self.usual_s

    @property
    def is_over(self) -> bool:
        """Whether it keeps up again."""
        return self.slowdown < SLOW

    def line(self) -> str:
        """Return who is slow, and by how much, for people."""
        stages = f"stage{'s' * (len(self.stages) > 1)} {', '.join(map(str, self.stages))}"
        who = f"rank {self.rank} ({self.device} of {self.host}, {stages})"
        if self.is_over:
            return f"{who} keeps up again after step {self.step}"
        return (
            f"{who} is a straggler after step {self.step}: it computes "
            f"{format_seconds(self.compute_s)} per step, {self.slowdown:.2f} times the "
            f"{format_seconds(self.usual_s)} that the pace of the others predicts"
        )


class StragglerWatch:
    """Follows the ranks of one plan."""

    def __init__(self, solution: Solution, program: Program) -> None:
        """Predict what every rank computes in a step.

        Args:
            solution: The plan that runs.
            program: Its Program.
        """
        problem, plan = solution.problem, solution.plan
        seconds = instruction_seconds(problem, plan, program)
        passes = (program.kind >= Kind.FORWARD) & (program.kind < Kind.UPDATE)
        total = np.bincount(
            program.device[passes], weights=seconds[passes], minlength=len(program.devices)
        )
        self._devices = used_devices(program)
        self._expected_s = [float(total[device]) for device in self._devices]
        self._plan, self._cluster = plan, problem.cluster
        self._seen: list[deque[float]] = [deque(maxlen=WINDOW) for _ in self._devices]
        self._steps = [0] * len(self._devices)
        self._looked_at = 0
        self._said: dict[int, float] = {}

    def note(self, rank: int, news: StepNews) -> Straggler | None:
        """Take note of a step that a rank has done; returns a straggler that is news."""
        if not (0 <= rank < len(self._seen) and news.compute_s > 0):
            return None
        self._steps[rank] += 1
        if self._steps[rank] > _WARM_UP:
            self._seen[rank].append(news.compute_s)
        done = min(self._steps)
        if done < self._looked_at + WINDOW // 2 or done < _WARM_UP + WINDOW:
            return None
        self._looked_at = done
        paces = self._paces()
        longest_s = max(median(seen) for seen in self._seen if seen)
        for place in sorted(paces, key=lambda each: -paces[each]):
            took_s = median(self._seen[place])
            excess_s = took_s - took_s / paces[place]
            matters = excess_s >= max(_LEAST_S, _LEAST_SHARE * longest_s)
            if (matters or place in self._said) and self._is_news(place, paces[place]):
                return self._straggler(place, paces[place], news.step + 1)
        return None

    def _is_news(self, rank: int, pace: float) -> bool:
        said = self._said.get(rank, 1.0)
        if pace < SLOW and said >= SLOW and pace < 1 + (SLOW - 1) / 2:
            del self._said[rank]
            return True
        if pace >= SLOW and max(pace / said, said / pace) >= _NEWS:
            self._said[rank] = pace
            return True
        return False

    def _paces(self) -> dict[int, float]:
        """Return the pace of each rank that is predicted to compute, over that of the others."""
        ranks = [rank for rank, expected in enumerate(self._expected_s) if expected > 0]
        own = {rank: median(self._seen[rank]) / self._expected_s[rank] for rank in ranks}
        if len(own) < 2:
            return {}
        return {
            rank: pace / median(other for place, other in own.items() if place != rank)
            for rank, pace in own.items()
        }

    def _straggler(self, rank: int, pace: float, step: int) -> Straggler:
        number = self._devices[rank]
        name, took = self._plan.devices[number], median(self._seen[rank])
        return Straggler(
            rank=rank,
            device=name,
            host=self._cluster.hosts[self._cluster.devices[self._cluster.index_of[name]].host].name,
            stages=tuple(
                place
                for place, stage in enumerate(self._plan.stages)
                if any(number in group for group in stage.devices)
            ),
            step=step,
            compute_s=took,
            usual_s=took / pace,
        )

    def factors(self) -> Mapping[str, float]:
        """Return how many times as long the stragglers compute as was thought, by device."""
        return {self._plan.devices[self._devices[rank]]: pace for rank, pace in self._said.items()}
