"""The planner ``auto``: looks at graph, cluster and objective, and returns the best plan it finds.

For the metrics that are simulated (``throughput``, ``latency``):

1. *Starts*: the other planners (``portfolio``), data parallelism over all devices, hosts and types,
   and a dynamic program over lines of units and devices with replication (``chain_dp``).
2. *Local search on the simulator* (``search``, ``moves``): the best few starts are changed step by
   step; every candidate is measured as the answer is, after a cheap estimate (``estimate``) has
   rejected the hopeless ones.
3. The best plan, with ranked alternatives that differ in structure, and the gap to the bound.

Published metrics go to who minimises them (``SPECIALISTS``); where that proves nothing, the
same search looks further. Graphs with thousands of ops are searched as a smaller problem
(``coarse``), whose answer is measured on the large one. Rules hold everywhere: neither the program
nor a move puts an op where it may not run.

The effort is a number of seconds, or a number of measured candidates, which makes it repeatable.
"""

import math
from collections.abc import Sequence
from typing import Any

from partita.bounds import bound
from partita.core.plan import Plan
from partita.core.problem import Metric, Problem
from partita.core.solution import Proof, Solution
from partita.errors import InvalidInputError
from partita.planners.auto.coarse import WorkingProblem, working_problem
from partita.planners.auto.estimate import Estimator
from partita.planners.auto.evaluator import Evaluator, verdict_of
from partita.planners.auto.frame import frame_of
from partita.planners.auto.portfolio import (
    OTHERS,
    PLAIN,
    SPECIALISTS,
    Answers,
    PortfolioEntry,
)
from partita.planners.auto.search import Search
from partita.planners.auto.sketch import Sketch, shape, sketch_of, structure
from partita.planners.auto.starts import likely_starts
from partita.planners.effort import Effort, SearchTrace
from partita.planners.pipeline import solution_of

SIMULATED = (Metric.THROUGHPUT, Metric.LATENCY, Metric.ENERGY)
MAX_STARTS = 8
WORTH_IMPROVING = 1.3
"""Starts that are more than this above the best one are not improved."""
MIN_MEASURED = 3
"""Starts that are measured even when the time is up."""
MAX_SETTLED = 2
"""Starts that are improved by estimate before anything is measured."""
MAX_ALTERNATIVES = 4
MAX_SEARCHED_OPS = 2000
"""Ops up to which plans for a published metric are searched further."""


def plan_auto(
    problem: Problem,
    *,
    time_limit: float = 2.0,
    iterations: int = 0,
    seed: int = 0,
    trace: SearchTrace | None = None,
) -> Solution:
    """Return the best plan that a portfolio and a local search find.

    Args:
        problem: The problem.
        time_limit: Seconds on the clock; what counts where ``iterations`` is 0.
        iterations: Candidates to measure in the local search, instead of a time limit: the same
            number gives the same plan on every machine.
        seed: Of the random moves.
        trace: Told of each new best value.

    Raises:
        InfeasibleError: Nothing that it finds fits; names the device or op, and by how much.
        InvalidInputError: A limit below 0.
    """
    if not time_limit >= 0 or iterations < 0:
        raise InvalidInputError(
            f"time_limit is {time_limit} and iterations {iterations}; expected 0 or more"
        )
    effort = Effort(
        iterations=iterations or None,
        time_limit=None if iterations else time_limit,
        seed=seed,
        trace=trace,
    )
    options = {"time_limit": time_limit, "iterations": iterations, "seed": seed}
    if problem.objective.metric in SIMULATED:
        return _Auto(working_problem(problem), effort).searched(options)
    return _Auto(WorkingProblem(problem, problem, None), effort).published(options)


class _Auto:
    """The steps of ``plan_auto``, with what they share."""

    def __init__(self, working: WorkingProblem, effort: Effort) -> None:
        self.working, self.effort = working, effort
        self.evaluator = Evaluator(working.work, effort)
        self.bound = bound(working.problem)
        self.answers = Answers()
        frame = frame_of(working.work)
        self.search = Search(frame, self.evaluator, Estimator(frame), self.bound.value, effort.seed)
        self.first = math.inf

    def searched(self, options: dict[str, Any]) -> Solution:
        """Return the best plan for a metric that is simulated."""
        self._ask_plain()
        self._ask_specialists()
        self._look_at(likely_starts(self.search.frame, self.search.estimator, self.effort))
        self._ask_others()
        self._improve()
        return self._solution(options)

    def published(self, options: dict[str, Any]) -> Solution:
        """Return the best plan for a published metric."""
        self._ask_specialists()
        if not self._is_proven:
            self._ask_plain()
            if len(self.working.problem.graph) <= MAX_SEARCHED_OPS:
                self._ask_others()
                self._improve()
        return self._solution(options)

    @property
    def _is_proven(self) -> bool:
        return any(answer.proof is Proof.OPTIMAL for answer in self.answers.solutions)

    def _ask_specialists(self) -> None:
        for entry in SPECIALISTS.get(self.working.problem.objective.metric, ()):
            if not self._is_proven:
                self._ask(entry)

        for solution in self.answers.ask_plugins(self.working.work, self.effort):
            self.evaluator.note(solution.value)

    def _ask_plain(self) -> None:
        for entry in PLAIN:
            self._ask(entry)

    def _ask_others(self) -> None:
        for entry in OTHERS:
            if not self.search.is_done:
                self._ask(entry, always=False)

    def _ask(self, entry: PortfolioEntry, *, always: bool = True) -> None:
        solution = self.answers.ask(entry, self.working.work, self.effort, always=always)
        if solution is not None:
            self.evaluator.note(solution.value)

    def _look_at(self, sketches: Sequence[Sketch]) -> None:
        """Measure starts, and the first few again after they were improved by estimate."""
        for number, sketch in enumerate(sketches):
            if number < MIN_MEASURED or not self.effort.is_over():
                self.search.measure(sketch)
        for sketch in sketches[:MAX_SETTLED]:
            if not self.effort.is_over():
                self.search.measure(self.search.settle(sketch))

    def _improve(self) -> None:
        """Run the local search from the best starts that differ in shape."""
        for answer in self.answers.solutions:
            sketch = sketch_of(self.search.frame, answer.plan)
            if sketch is not None:
                self.search.measure(sketch)
        self.first = self.evaluator.best
        best: dict[tuple[object, ...], Sketch] = {}
        for verdict, sketch in sorted(self.search.met, key=lambda pair: pair[0][:2]):
            if not math.isfinite(self.first) or verdict.value <= self.first * WORTH_IMPROVING:
                best.setdefault(shape(sketch), sketch)
        self.search.run(list(best.values())[:MAX_STARTS])

    def _candidates(self) -> list[tuple[float, Plan]]:
        """Return the best plan of each structure, best first."""
        best: dict[tuple[object, ...], tuple[float, Plan]] = {}
        for verdict, sketch in sorted(self.search.met, key=lambda pair: pair[0][:2]):
            if verdict.value < math.inf and structure(sketch) not in best:
                plan = sketch.plan(self.working.work, self.search.frame.units)
                best[structure(sketch)] = (verdict.value, plan)
        known = {value for value, _ in best.values()}
        for number, answer in enumerate(self.answers.solutions):
            if answer.value not in known:
                best[("answer", number)] = (answer.value, answer.plan)
        return sorted(best.values(), key=lambda pair: pair[0])

    def _fitting(self) -> list[tuple[float, Plan]]:
        """Return the best plans of the problem that was asked, measured on it."""
        found: list[tuple[float, Plan]] = []
        for value, plan in self._candidates():
            if len(found) > MAX_ALTERNATIVES:
                break
            if self.working.unit_of is None:
                found.append((value, plan))
                continue
            whole = self.working.expanded(plan)
            verdict = verdict_of(self.working.problem, whole)
            if verdict.value < math.inf:
                found.append((verdict.value, whole))
        return sorted(found, key=lambda pair: pair[0])

    def _solution(self, options: dict[str, Any]) -> Solution:
        plans = self._fitting()
        problem = self.working.problem
        if not plans:
            nearest = self.evaluator.nearest[2]
            reasons = [text for text in self.answers.tried.values() if isinstance(text, str)]
            whole = None if nearest is None else self.working.expanded(nearest)
            from partita.planners.auto.obstacle import obstacle  # noqa: PLC0415 (where nothing fits)

            raise obstacle(problem, self.search.frame, whole, reasons)
        least = self._least()
        stats = {
            "effort": self.effort.text,
            "tried": self.answers.tried,
            "measured": self.evaluator.measured,
            "improved": _gain(self.first, plans[0][0]),
            "bound_term": self.bound.term
            if least <= self.bound.value
            else "the search of a planner",
        }
        return solution_of(
            problem,
            plans[0][1],
            "auto",
            options,
            proof=self._proof(plans[0][0], least),
            bound=least,
            stats=stats,
            alternatives=[plan for _, plan in plans[1:]],
        )

    def _least(self) -> float:
        """Return what no plan can be below: the bound, or what a planner proved."""
        own = self.working.unit_of is None
        return max(self.bound.value, self.answers.bound if own else 0.0)

    def _proof(self, value: float, least: float) -> Proof:
        if value <= least * (1 + 1e-9):
            return Proof.OPTIMAL
        timed_out = not self.effort.is_counted and self.effort.is_over()
        return Proof.TIME_LIMIT if timed_out else Proof.FEASIBLE


def _gain(before: float, after: float) -> float:
    """Return by what share the local search made the best start better."""
    if not math.isfinite(before) or before <= 0:
        return 0.0
    return max(0.0, 1 - after / before)
