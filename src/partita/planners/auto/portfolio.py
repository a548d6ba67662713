"""The other planners, as ``auto`` asks them: which, for what, and with how much effort.

A *specialist* minimises a metric itself, or what comes nearest to it; for a published metric its
answer is what ``auto`` returns, unless something else is better. The others give starts: plans that
are good by something near what is asked. Each is imported when it is asked, and not before.
"""

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from partita.core.problem import Metric, Problem
from partita.core.solution import Proof, Solution
from partita.cost.judge import judge_candidate
from partita.errors import InvalidInputError, PartitaError, UnsupportedError
from partita.planners.effort import Effort
from partita.planners.table import PLANNERS, plugged_planners
from partita.plugins import load_target

logger = logging.getLogger(__name__)

Options: TypeAlias = Callable[[Effort], dict[str, Any]]

SHARE = 0.4
"""Share of the budget that starts may take."""
SPECIALIST_SHARE = 0.9
"""Share of the budget for a search by the very metric that is asked."""
MOVES_PER_ITERATION = 200
PLAYED_PER_S = 1_000_000
"""Instructions of a Program that are made and played in a second, about."""
QUICK_S = 0.05
"""What takes no longer is done whatever time is left."""
MOST_INSTRUCTIONS = 400_000
"""Of the smallest plan of a problem: a search that could play no more than one says so instead."""


def _as_it_is(_: Effort) -> dict[str, Any]:
    return {}


def _timed(effort: Effort) -> dict[str, Any]:
    """Return a time limit where the budget is one; counted runs take the planner's own effort."""
    return {} if effort.is_counted else {"time_limit": max(effort.left_s, 0.01)}


def _moving(effort: Effort) -> dict[str, Any]:
    """Return moves or time for a search whose moves take microseconds, another search following."""
    if effort.iterations is not None:
        return {"iterations": MOVES_PER_ITERATION * effort.iterations}
    return {"time_limit": SHARE * effort.left_s}


def _placing(effort: Effort) -> dict[str, Any]:
    """Return moves or time for the search that minimises what is asked."""
    if effort.is_counted:
        return _moving(effort)
    return {"time_limit": max(SPECIALIST_SHARE * effort.left_s, 0.01)}


def _few_ideals(effort: Effort) -> dict[str, Any]:
    return {"ideals": 1000, **_timed(effort)}


def _in_a_row(effort: Effort) -> dict[str, Any]:
    """Return the time of a split whose parts follow one another; the next one has what is left."""
    return {} if effort.is_counted else {"time_limit": max(effort.left_s / 2, 0.01)}


def _apart(effort: Effort) -> dict[str, Any]:
    """Return the options of a split whose parts need not follow one another."""
    limit = {} if effort.is_counted else {"time_limit": max(SPECIALIST_SHARE * effort.left_s, 0.01)}
    return {"contiguous": False, **limit}


def _briefly(effort: Effort) -> dict[str, Any]:
    """Return little effort for a planner whose own metric is only near to what is asked."""
    return {"ideals": 400, "orders": 4, "iterations": 1, **_timed(effort)}


def _measuring(effort: Effort) -> dict[str, Any]:
    """Return a small share of the budget for a planner that measures many plans."""
    if effort.iterations is not None:
        return {"iterations": max(1, effort.iterations // 10)}
    return {"iterations": 50, "time_limit": 0.1 * effort.left_s}


def instructions(microbatches: int, stages: int) -> int:
    """Return about how many instructions a step has, whatever its replicas."""
    # Load, forward, backward and a gradient's end on each stage, two messages both ways between.
    return microbatches * (6 * stages - 2)


def check_playable(problem: Problem) -> None:
    """Check that the smallest plan of a problem can be played in a search.

    Raises:
        InvalidInputError: It has too many instructions.
    """
    least = instructions(problem.microbatches, 1)
    if least > MOST_INSTRUCTIONS:
        raise InvalidInputError(
            f"a step of {problem.microbatches:,} microbatches has {least:,} instructions on a "
            f"single device, and auto plays at most {MOST_INSTRUCTIONS:,}: give at most "
            f"{MOST_INSTRUCTIONS // instructions(1, 1):,} microbatches, of more samples each"
        )


def is_too_long(microbatches: int, stages: int, effort: Effort, share: float = 1.0) -> bool:
    """Return whether to play a step takes longer than a share of the time that is left, about."""
    needed_s = instructions(microbatches, stages) / PLAYED_PER_S
    return needed_s > QUICK_S and needed_s > share * effort.left_s


@dataclass(frozen=True, slots=True)
class PortfolioEntry:
    """A planner, and when to ask it.

    Attributes:
        name: What it is called in the solution's stats; its name in the table unless ``target``
            says where it is.
        options: The options that keep it within a effort.
        most_ops: Ops up to which it is asked.
        most_levels: Levels of links up to which it is asked.
        mixes: Whether it is asked where devices differ.
        target: Where it is, ``"module:function"``; empty = as the table has it.
        cuts: Whether it cuts a pipeline, of as many stages as there may be.
    """

    name: str
    options: Options = _as_it_is
    most_ops: float = math.inf
    most_levels: int = 99
    mixes: bool = True
    target: str = ""
    cuts: bool = True

    def load(self) -> Callable[..., Solution]:
        """Return the planner, without the table's refusal of metrics that it does not minimise."""
        planner: Callable[..., Solution] = load_target(self.target or PLANNERS[self.name].target)
        return planner

    def why_not(self, problem: Problem) -> str:
        """Return why a problem is not for it; empty if it is."""
        if len(problem.graph) > self.most_ops:
            return f"not asked above {self.most_ops:g} ops"
        if len(problem.cluster.levels) > self.most_levels:
            return f"not asked above {self.most_levels} levels of links"
        kinds = {(device.type, device.kind, device.speed) for device in problem.cluster.devices}
        return "" if self.mixes or len(kinds) == 1 else "not asked where devices differ"


PLAIN: Sequence[PortfolioEntry] = (
    PortfolioEntry("single", cuts=False),
    PortfolioEntry("uniform"),
    PortfolioEntry("uniform_floor"),
    PortfolioEntry("uniform_transformer"),
    PortfolioEntry("expert"),
)
"""Those that take next to no time: they are always asked."""

OTHERS: Sequence[PortfolioEntry] = (
    PortfolioEntry("parameters", most_ops=1000),
    PortfolioEntry("autopipe", most_ops=600),
    PortfolioEntry("m-topo", most_ops=500),
    PortfolioEntry("m-etf", most_ops=500),
    PortfolioEntry("pipedream", _briefly, most_ops=60, most_levels=2, mixes=False),
    PortfolioEntry("sparse-pipedream", _briefly, most_ops=60, most_levels=2),
    PortfolioEntry("optimal-split", _few_ideals, most_ops=40),
    PortfolioEntry("random", most_ops=200),
    PortfolioEntry("brute-force", _measuring, most_ops=6),
)
"""Asked in this order while less than ``SHARE`` of the budget is used."""

_BEST_PLACEMENT = "partita.planners.baechi.best:best_placement"
_BEST_ASSIGNMENT = "partita.planners.assignment.portfolio:best_assignment"
_PLACING = (PortfolioEntry("best_placement", _placing, target=_BEST_PLACEMENT),)
_SPLITTING = (
    PortfolioEntry("contiguous optimal-split", _in_a_row, target=PLANNERS["optimal-split"].target),
    PortfolioEntry("optimal-split", _apart),
)
_PIPELINING = (PortfolioEntry("pipedream", _timed), PortfolioEntry("sparse-pipedream", _timed))

SPECIALISTS: Mapping[Metric, Sequence[PortfolioEntry]] = {
    Metric.LATENCY: (
        PortfolioEntry("best_placement", _moving, target=_BEST_PLACEMENT),
        PortfolioEntry("m-sct", most_ops=500),
    ),
    Metric.PIPEDREAM: _PIPELINING,
    Metric.PIPEDREAM_REPAIRED: _PIPELINING,
    Metric.MAX_LOAD: _SPLITTING,
    Metric.SINGLE_SAMPLE_LATENCY: _SPLITTING,
    Metric.MAKESPAN_PARALLEL: _PLACING,
    Metric.MAKESPAN_SEQUENTIAL: _PLACING,
    Metric.PIPER: (PortfolioEntry("piper"),),
    Metric.SHARDING_COST: (PortfolioEntry("best_assignment", _timed, target=_BEST_ASSIGNMENT),),
}
"""Who minimises a metric, best first."""


@dataclass(slots=True)
class Answers:
    """Solutions of the planners that were asked.

    Attributes:
        solutions: Their solutions.
        tried: Value, or the reason why there is none, by planner.
        bound: What no plan is below, as a planner of ours proved it.
    """

    solutions: list[Solution] = field(default_factory=list)
    tried: dict[str, float | str] = field(default_factory=dict)
    bound: float = 0.0

    def ask(
        self, entry: PortfolioEntry, problem: Problem, effort: Effort, *, always: bool = True
    ) -> Solution | None:
        """Note and return what a planner finds; ``None`` if it finds nothing or is not asked.

        Args:
            entry: The planner.
            problem: The problem.
            effort: What it may use.
            always: Whether to ask even where ``SHARE`` of the time is up.
        """
        if entry.name in self.tried:
            return None
        reason = entry.why_not(problem)
        if reason:
            self.tried[entry.name] = reason
            return None
        if not always and not effort.is_counted and effort.used() >= SHARE:
            self.tried[entry.name] = "not asked: its share of the time was up"
            return None
        stages = min(len(problem.cluster), len(problem.graph)) if entry.cuts else 1
        if entry.cuts and is_too_long(problem.microbatches, stages, effort, SHARE):
            count = instructions(problem.microbatches, stages)
            self.tried[entry.name] = f"not asked: no time to play {count:,} instructions"
            return None
        try:
            solution = entry.load()(problem, **entry.options(effort))
        except PartitaError as exc:
            self.tried[entry.name] = str(exc)
            return None
        self.bound = max(self.bound, solution.lower_bound)
        return self._noted(entry.name, solution)

    def ask_plugins(self, problem: Problem, effort: Effort) -> list[Solution]:
        """Note and return what the plug-ins find that declare the metric of a problem.

        One that breaks is a warning line, and the others go on. Their values and bounds are not
        believed: a plan counts with what the cost model says of it.
        """
        found = []
        for name, planner in plugged_planners(problem.objective.metric):
            options = _within(planner, effort)
            try:
                solution = planner(problem, **options)
            except UnsupportedError as exc:
                logger.warning("%s", exc)
                self.tried[name] = str(exc)
                continue
            except PartitaError as exc:
                self.tried[name] = str(exc)
                continue
            judged = judge_candidate(problem, solution.plan)
            if not judged.feasible:
                self.tried[name] = judged.reason
                continue
            found.append(self._noted(name, _measured(solution, judged.score)))
        return found

    def _noted(self, name: str, solution: Solution) -> Solution:
        self.tried[name] = solution.value
        self.solutions.append(solution)
        return solution


def _measured(solution: Solution, value: float) -> Solution:
    """Return the solution of a plug-in with our value, and without what it claims of it."""
    return replace(solution, value=value, lower_bound=0.0, proof=Proof.FEASIBLE)


def _within(planner: Callable[..., Solution], effort: Effort) -> dict[str, Any]:
    """Return the limits that a plug-in takes, of those that ``auto`` has."""
    limits = _moving(effort)
    taken = inspect.signature(planner).parameters
    return {name: value for name, value in limits.items() if name in taken}
