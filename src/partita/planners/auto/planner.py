"""The planner ``auto``: looks at graph, cluster and objective, and returns the best plan it finds.

For the metrics that are simulated (``throughput``, ``latency``, ``energy``, ``cost``):

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

The effort is a number of measured candidates, so that the same question has the same answer on
every machine and under any load: one that is given, or one that suits the size of the problem
(``usual_steps``), which ``OUTER_LIMIT_S`` seconds may cut short; the solution says where they did.
Seconds count instead where a time limit is given.

Where a cluster has many times the devices that a plan makes use of, as many of each kind are
searched (``reach``), and all of them where nothing fits there. Bounds are of the whole cluster.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from partita.bounds import bound
from partita.core.metrics import MemoryRule
from partita.core.plan import Plan, Stage
from partita.core.problem import Metric, Problem
from partita.core.solution import Proof, Solution
from partita.cost.condensed import CondensedModel
from partita.cost.judge import check_memory, judge_candidate
from partita.cost.tables import held_bytes
from partita.errors import InfeasibleError, InvalidInputError, PartitaError
from partita.planners.auto.coarse import WorkingProblem, working_problem
from partita.planners.auto.estimate import Estimator
from partita.planners.auto.evaluator import Evaluator
from partita.planners.auto.frame import Frame, frame_of
from partita.planners.auto.portfolio import (
    OTHERS,
    PLAIN,
    PLAYED_PER_S,
    SPECIALISTS,
    Answers,
    PortfolioEntry,
    check_playable,
    instructions,
)
from partita.planners.auto.reach import Reach, within_reach
from partita.planners.auto.search import Search
from partita.planners.auto.sketch import Sketch, shape, sketch_of, structure
from partita.planners.auto.starts import Recuts, likely_starts
from partita.planners.auto.units import most_units
from partita.planners.effort import Effort, SearchTrace
from partita.planners.equal_shapes import equal_plans
from partita.planners.pipeline import solution_of

SIMULATED = (Metric.THROUGHPUT, Metric.LATENCY, Metric.ENERGY, Metric.COST)
MAX_STARTS = 8
WORTH_IMPROVING = 1.3
"""Starts that are more than this above the best one are not improved."""
MIN_MEASURED = 3
"""Starts that are measured even when the time is up."""
MAX_SETTLED = 2
"""Starts that are improved by estimate before anything is measured."""
QUICK_SHARE = 0.2
"""Share of the time after which no other planner is asked where plans are measured condensed."""
MAX_ALTERNATIVES = 4
MAX_SEARCHED_OPS = 2000
"""Ops up to which plans for a published metric are searched further."""


USUAL_STEPS, FEWEST_STEPS = 150, 16
STEP_WORK = 200_000
"""Units times microbatches that a search plays where every candidate is a Program of its own."""
OUTER_LIMIT_S = 120.0
"""Seconds on the clock that end a search whose effort nobody gave."""


def plan_auto(
    problem: Problem,
    *,
    time_limit: float | None = None,
    iterations: int = 0,
    seed: int = 0,
    trace: SearchTrace | None = None,
    starts: Sequence[Plan] = (),
) -> Solution:
    """Return the best plan that a portfolio and a local search find.

    Args:
        problem: The problem.
        time_limit: Seconds on the clock, instead of a number of steps; with both, whichever comes
            first.
        iterations: Steps of the local search: the same number gives the same plan on every machine.
            A step measures one candidate, or several condensed ones. 0 = as many as suit the
            problem, unless a time limit is given.
        seed: Of the random moves.
        trace: Called with each new best value.
        starts: Plans for the problem to begin with, beside those that it finds itself.

    Raises:
        InfeasibleError: Nothing that it finds fits; names the device or op, and by how much.
        InvalidInputError: A limit below 0, or a step of too many microbatches to be played.
    """
    if iterations < 0 or not (time_limit is None or time_limit >= 0):
        raise InvalidInputError(
            f"time_limit is {time_limit} and iterations {iterations}; expected 0 or more"
        )
    check_playable(problem)
    simulated = problem.objective.metric in SIMULATED
    reach = within_reach(problem, _devices_of(starts)) if simulated else Reach(problem, problem)
    near = reach.near
    working = working_problem(near) if simulated else WorkingProblem(problem, problem, None)
    is_usual = time_limit is None and not iterations
    steps = usual_steps(working.work) if is_usual else iterations
    effort = Effort(
        iterations=steps or None,
        time_limit=OUTER_LIMIT_S if is_usual else time_limit,
        seed=seed,
        trace=trace,
    )
    options = {"time_limit": time_limit, "iterations": steps, "seed": seed}
    search = _Auto(reach, working, effort, starts)
    if not simulated:
        return search.published(options)
    try:
        return search.searched(options)
    except InfeasibleError:
        if near is problem:
            raise
    everywhere = Reach(problem, problem)
    return _Auto(everywhere, working_problem(problem), effort, starts).searched(options)


def _devices_of(plans: Sequence[Plan]) -> set[str]:
    """Return the names of the devices of some plans."""
    return {name for plan in plans for name in plan.devices}


def usual_steps(problem: Problem) -> int:
    """Return the steps of a search whose effort nobody gives: two seconds or so of work."""
    if CondensedModel.covers(problem):
        return USUAL_STEPS
    candidate = min(len(problem.graph), most_units(problem)) * problem.microbatches
    return max(FEWEST_STEPS, min(USUAL_STEPS, STEP_WORK // candidate))


class _Auto:
    """The steps of ``plan_auto``, with what they share."""

    def __init__(
        self,
        reach: Reach,
        working: WorkingProblem,
        effort: Effort,
        starts: Sequence[Plan] = (),
    ) -> None:
        self.reach, self.working, self.effort = reach, working, effort
        self.bound = bound(reach.asked)
        self.answers = Answers()
        frame = frame_of(working.work)
        self.evaluator = Evaluator(frame, effort)
        estimator = Estimator(frame, self.evaluator.model)
        recuts = Recuts(frame, estimator) if self.evaluator.model is not None else None
        self.search = Search(
            frame, self.evaluator, estimator, self.bound.value, effort.seed, recuts
        )
        self.first = math.inf
        # Plans with degrees that no move changes, or that cut units, are kept as they are.
        self.fixed = [plan for plan in starts if not self._begin_with(plan)]

    def _begin_with(self, plan: Plan) -> bool:
        """Measure a plan that was given; return whether the search can change it."""
        plain = all(
            stage == Stage(devices=stage.devices, shares=stage.shares, shard=stage.shard)
            for stage in plan.stages
        )
        small = self.working.contracted(plan) if plain else None
        sketch = None if small is None else sketch_of(self.search.frame, small)
        if sketch is not None:
            self.search.measure(sketch)
        return sketch is not None

    def searched(self, options: dict[str, Any]) -> Solution:
        """Return the best plan for a metric that is simulated."""
        self._ask_plain()
        self._ask_specialists()
        self._look_at(likely_starts(self.search.frame, self.search.estimator, self.effort))
        self._look_at_equal()
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
        # Where the search measures thousands of plans, more starts are not worth its time; least of
        # all those of planners that do not look at memory, where it is so tight that no plain plan
        # fits.
        quick = self.evaluator.model is not None and not self.effort.is_counted
        tight = not self.answers.solutions and math.isfinite(self.evaluator.best)
        for entry in OTHERS:
            if quick and (tight or self.effort.used() >= QUICK_SHARE):
                break
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
                self.search.measure_fitted(sketch, eases=True)
        # Where measuring costs as little as estimating, the search does that.
        settled = 0 if self.evaluator.model is not None else MAX_SETTLED
        for sketch in sketches[:settled]:
            if not self.effort.is_over():
                self.search.measure(self.search.settle(sketch))

    def _look_at_equal(self) -> None:
        """Measure the plans of equal shapes, those of few stages first: they are quick to play."""
        if self.evaluator.model is None:
            return
        for plan in sorted(equal_plans(self.working.problem), key=lambda plan: len(plan.stages)):
            if not self.effort.is_counted and self.effort.used() >= QUICK_SHARE:
                break
            self._begin_with(plan)

    def _improve(self) -> None:
        """Run the local search from the best starts that differ in shape."""
        for answer in self.answers.solutions:
            sketch = sketch_of(self.search.frame, answer.plan)
            if sketch is not None:
                self.search.measure(sketch)
        self.first = self.evaluator.best
        best: dict[tuple[object, ...], Sketch] = {}
        for judged, sketch in sorted(self.search.met, key=lambda pair: pair[0].rank):
            if not math.isfinite(self.first) or judged.score <= self.first * WORTH_IMPROVING:
                best.setdefault(shape(sketch), sketch)
        self.search.run(list(best.values())[:MAX_STARTS])

    def _candidates(self) -> list[tuple[float, Plan]]:
        """Return the best plan of each structure, best first."""
        best: dict[tuple[object, ...], tuple[float, Plan]] = {}
        for judged, sketch in sorted(self.search.met, key=lambda pair: pair[0].rank):
            if judged.score < math.inf and structure(sketch) not in best:
                plan = sketch.plan(self.working.work, self.search.frame.units)
                best[structure(sketch)] = (judged.score, plan)
        known = {value for value, _ in best.values()}
        for number, answer in enumerate(self.answers.solutions):
            if answer.value not in known:
                best[("answer", number)] = (answer.value, answer.plan)
        return sorted(best.values(), key=lambda pair: pair[0])

    def _fitting(self) -> list[tuple[float, Plan]]:
        """Return the best plans of the problem that was asked, measured on it."""
        found: list[tuple[float, Plan]] = []
        asked = self.reach.asked
        for value, plan in self._candidates():
            # To measure a plan on thousands of devices takes a while: the first comes in any case.
            late = found and self.reach.repeats and self.effort.timed_out
            if late or len(found) > MAX_ALTERNATIVES:
                break
            if self.working.unit_of is None and not self.reach.repeats:
                found.append((value, plan))
                continue
            whole = self.reach.whole(self.working.expanded(plan))
            judged = judge_candidate(asked, whole)
            if judged.score < math.inf:
                found.append((judged.score, whole))
        given = [(judge_candidate(asked, plan).score, plan) for plan in self.fixed]
        found += [(score, plan) for score, plan in given if score < math.inf]
        return sorted(found, key=lambda pair: pair[0])

    def _solution(self, options: dict[str, Any]) -> Solution:
        plans = self._fitting()
        problem = self.reach.asked
        if not plans:
            nearest = self.evaluator.nearest
            reasons = [text for text in self.answers.tried.values() if isinstance(text, str)]
            whole = None if nearest is None else self.working.expanded(nearest)
            raise InfeasibleError(
                _obstacle(self.working.problem, self.search.frame, whole, reasons)
            )
        least = self._least()
        stats = {
            "effort": self.effort.text,
            "tried": self.answers.tried,
            "measured": self.evaluator.measured,
            "improved": _gain(self.first, plans[0][0]),
            "bound_term": self.bound.term
            if least <= self.bound.value
            else "the search of a planner",
            **({"cut_short": True} if self._is_cut else {}),
        }
        return solution_of(
            problem,
            plans[0][1],
            "auto",
            options,
            proof=self._proof(plans[0][0], least),
            bound=least,
            stats=stats,
            alternatives=_few_to_play([plan for _, plan in plans[1:]]),
        )

    def _least(self) -> float:
        """Return what no plan can be below: the bound, or what a planner proved of all devices."""
        own = self.working.work is self.reach.asked
        return max(self.bound.value, self.answers.bound if own else 0.0)

    def _proof(self, value: float, least: float) -> Proof:
        if value <= least * (1 + 1e-9):
            return Proof.OPTIMAL
        timed_out = not self.effort.is_counted and self.effort.is_over()
        return Proof.TIME_LIMIT if timed_out or self._is_cut else Proof.FEASIBLE

    @property
    def _is_cut(self) -> bool:
        """Whether the clock ended a search whose steps are counted."""
        return self.effort.is_counted and self.effort.timed_out


def _obstacle(problem: Problem, frame: Frame, nearest: Plan | None, reasons: list[str]) -> str:
    """Return why nothing fits: a limit, the plan that comes nearest, or what another planner says.

    Args:
        problem: The problem that was asked.
        frame: The tables of the one that was searched.
        nearest: The plan that exceeds its limits the least; ``None`` where none could run.
        reasons: Why other planners failed.
    """
    from partita.planners.obstacle import Needs, obstacle  # noqa: PLC0415 (where nothing fits)

    text = ""
    if problem.objective.metric.row.memory is not MemoryRule.METRIC:
        table = frame.problem.graph.parameters
        used = np.unique(table.use_parameter)
        needs = Needs(
            problem=frame.problem,
            unit_of=frame.units.node_of,
            unit_bytes=frame.static_bytes
            + frame.saved_bytes(min(batch.size for batch in frame.batches)),
            devices=np.arange(len(problem.cluster)),
            limit_bytes=frame.limit_bytes[frame.class_of],
            may=frame.allowed[frame.class_of],
            total_bytes=float(held_bytes(table, problem.objective).total[used].sum()),
            counted="weights, gradients, optimizer state and one microbatch",
            held="weights, gradients and optimizer state",
            remedy="use more memory, more devices or less optimizer state",
        )
        text = obstacle(needs)
    if not text and nearest is not None:
        try:
            check_memory(problem, nearest)
        except PartitaError as exc:
            text = f"no plan fits; of those tried, in the one that comes nearest {exc}"
    named = [*problem.cluster.device_names, *problem.graph.ops.names]
    telling = [reason for reason in reasons if any(repr(name) in reason for name in named)]
    return text or (telling or reasons or ["auto found no plan that fits"])[0]


def _few_to_play(plans: list[Plan]) -> list[Plan]:
    """Return the first plans, as many as are played in half a second: whoever shows them does."""
    sizes = [instructions(plan.num_microbatches, len(plan.stages)) for plan in plans]
    count = int(np.searchsorted(np.cumsum(sizes), PLAYED_PER_S / 2, side="right"))
    return plans[:count]


def _gain(before: float, after: float) -> float:
    """Return by what share the local search made the best start better."""
    if not math.isfinite(before) or before <= 0:
        return 0.0
    return max(0.0, 1 - after / before)
