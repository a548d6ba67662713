"""Stragglers of a run: named while it goes on, and planned around where that pays.

The straggler's device is taken to be as slow as it was measured, and the run is planned again. The
other plan is taken when the seconds that it saves over the steps that are left are more than what
the change costs: ranks that save, end, start and load again, which is taken to be as long as from
the start of this plan to its first step.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.cost.judge import evaluate
from partita.cost.measured import Calibration
from partita.flows.replan import LEAST_GAIN
from partita.flows.runs.requests import OnStep
from partita.flows.summary import describe_plan
from partita.runtime.rank import StepNews
from partita.runtime.stragglers import Straggler, StragglerWatch
from partita.units import format_seconds, format_share

STRAGGLER = "straggler: "
"""Begins the reason for which the ranks of a run stop to change their plan."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Replanning:
    """What is needed to change a plan while it runs.

    Attributes:
        solution: The plan that runs.
        plan_for: Plans for a problem.
        steps: Steps of the whole run.
    """

    solution: Solution
    plan_for: Callable[[Problem], Solution]
    steps: int

    def better(
        self, watch: StragglerWatch, *, step: int, step_s: float, change_s: float
    ) -> tuple[Solution | None, str]:
        """Return another plan if it pays, and why it does or does not.

        Args:
            watch: Knows the stragglers.
            step: Steps that are done.
            step_s: Measured seconds of a step.
            change_s: Seconds that a change costs.
        """
        factors = watch.factors()
        old, plan = self.solution.problem, self.solution.plan
        problem = Calibration(devices=factors, seen=factors).applied(old, plan)
        found = self.plan_for(problem)
        before_s, after_s = (evaluate(problem, each).step_s for each in (plan, found.plan))
        share = 1 - after_s / before_s
        saved_s = share * step_s * max(0, self.steps - step)
        what = f"{describe_plan(found.plan)} is {format_share(share)} faster around it"
        if share < LEAST_GAIN:
            return None, "no other plan is faster around it; the plan stays"
        gains = f"{format_seconds(saved_s)} over {self.steps - step} steps"
        cost = f"the {format_seconds(change_s)} of a restart"
        if saved_s <= change_s:
            return None, f"{what}, which saves {gains}, less than {cost}; the plan stays"
        return replace(found, problem=problem), f"{what}, which saves {gains}, more than {cost}"


class StragglerFollower:
    """Follows a plan while it runs: says who falls behind, and decides on another plan.

    Attributes:
        lines: What was said.
        other: The plan to change to; None = the plan stays.
        why: Why the ranks are to stop; empty = they are not.
    """

    def __init__(
        self,
        watch: StragglerWatch,
        say: Callable[[str], None],
        replanning: Replanning | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Follow a plan.

        Args:
            watch: Finds stragglers.
            say: Called with what people should know.
            replanning: How the plan is changed; None = it is not.
            clock: Seconds by a clock that does not jump.
        """
        self._watch, self._say, self._replanning, self._clock = watch, say, replanning, clock
        self._began_s, self._first = clock(), (-1, 0.0)
        self.lines: list[str] = []
        self.other: Solution | None = None
        self.why = ""

    def around(self, on_step: OnStep) -> OnStep:
        """Return what takes the news of ranks first."""

        def noted(rank: int, news: StepNews) -> None:
            on_step(rank, news)
            if rank == 0 and self._first[0] < 0:
                self._first = (news.step, self._clock())
            found = self._watch.note(rank, news)
            if found is not None:
                self._found(found)

        return noted

    def _found(self, straggler: Straggler) -> None:
        self._tell(straggler.line())
        if self._replanning is None or straggler.is_over or self.why:
            return
        first, since_s = self._first
        step_s = (self._clock() - since_s) / max(1, straggler.step - 1 - first)
        self.other, text = self._replanning.better(
            self._watch, step=straggler.step, step_s=step_s, change_s=since_s - self._began_s
        )
        self._tell(text)
        if self.other is not None:
            self.why = f"{STRAGGLER}{straggler.device} computes {straggler.slowdown:.2f} times as "
            self.why += "long as the others predict"

    def _tell(self, text: str) -> None:
        self.lines.append(text)
        self._say(text)
