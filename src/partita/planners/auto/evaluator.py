"""Candidates judged by the cost model, once each; what is best and what comes nearest is kept.

A candidate is judged as ``solution_of`` judges the answer: by the problem's metric, with the rules
and memory limits that hold for it. Where ``cost.condensed`` covers the problem it says the same
many times faster; elsewhere a plan is made and ``cost.judge`` looks at it.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from partita.core.plan import Plan
from partita.cost.condensed import CondensedModel
from partita.cost.judge import Judgement, Limit, cannot_run, judge_candidate
from partita.errors import InvalidInputError, PartitaError
from partita.objectives.value import Value
from partita.planners.auto.frame import Frame
from partita.planners.auto.portfolio import is_too_long
from partita.planners.auto.sketch import Sketch
from partita.planners.effort import Effort

CONDENSED_PER_STEP = 16
"""Condensed candidates that count as one step of a search whose steps are counted."""
_PLAY_SHARE = 0.5
"""Share of the time left that one candidate may take."""


@dataclass(slots=True)
class Evaluator:
    """Measures candidates once each.

    Attributes:
        frame: The frame of the problem.
        effort: Candidates to measure in the local search, or seconds.
        best: The least value so far.
        measured: Number of candidates that were measured.
        nearest: Of those that did not fit, the plan that exceeds memory the least; ``None`` where
            something fits.
        model: Measures condensed plans; ``None`` where it does not cover the problem.
    """

    frame: Frame
    effort: Effort
    best: float = math.inf
    measured: int = 0
    nearest: Plan | None = None
    model: CondensedModel | None = field(init=False)
    _least_over: float = math.inf
    _spent: int = 0
    _known: dict[Hashable, Judgement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        frame = self.frame
        covers = CondensedModel.covers(frame.problem)
        self.model = (
            CondensedModel(frame.problem, frame.units.node_of, frame.num_units) if covers else None
        )

    def seen(self, key: Hashable) -> bool:
        """Return whether a candidate was measured before."""
        return key in self._known

    def note(self, value: float) -> None:
        """Note the value of a plan that fits."""
        if value < self.best:
            self.best = value
            self.effort.record(value)

    def spend(self) -> None:
        """Count a candidate of the local search."""
        self._spent += 1
        if self.model is None or self._spent % CONDENSED_PER_STEP == 0:
            self.effort.spend()

    def evaluate(self, sketch: Sketch, cutoff: float = math.inf) -> Judgement:
        """Return what becomes of a sketch; ``model.excess`` is its own if it is measured now.

        Args:
            sketch: The sketch.
            cutoff: A value that interests; those that cannot be below it may count as unable.
        """
        if self.model is not None:
            self.model.excess = {}
        known = self._known.get(sketch.key)
        if known is not None:
            return known
        model = self.model
        # The best plan is played once more in the end. Once something fits, what takes longer is
        # left out.
        if math.isfinite(self.best) and is_too_long(
            sketch.batch.count, len(sketch.stages), self.effort, _PLAY_SHARE
        ):
            found = cannot_run(self.frame.problem, InvalidInputError("no time to play the step"))
            self._known[sketch.key] = found
            return found
        self.measured += 1
        if model is not None and model.covers_plan(sketch.stages, sketch.schedule):
            found = self._condensed(model, sketch, cutoff)
        else:
            found = self._judged(sketch)
        self._known[sketch.key] = found
        self.note(found.score)
        if found.over_bytes < self._least_over and not math.isfinite(self.best):
            self.nearest = sketch.plan(self.frame.problem, self.frame.units)
            self._least_over = found.over_bytes
        return found

    def _judged(self, sketch: Sketch) -> Judgement:
        problem = self.frame.problem
        try:
            return judge_candidate(problem, sketch.plan(problem, self.frame.units))
        except PartitaError as exc:
            return cannot_run(problem, exc)

    def _condensed(self, model: CondensedModel, sketch: Sketch, cutoff: float) -> Judgement:
        found = model.measure(sketch.candidate, cutoff)
        value = Value(metric=self.frame.problem.objective.metric, value=found.value)
        if found.over_bytes > 0:
            limit = Limit.MEMORY if found.over_bytes < math.inf else Limit.RUN
            return Judgement(value=value, limit=limit, over_bytes=found.over_bytes)
        # A bound above the cutoff is no value: the plan counts as one that is not worth running.
        return Judgement(
            value=value,
            limit=None if found.is_exact else Limit.RUN,
            over_bytes=0.0 if found.is_exact else math.inf,
        )
