"""The other planners, as ``auto`` asks them: which, for what, and with how much effort.

A *specialist* minimises a metric itself, or what comes nearest to it; for a published metric its
answer is what ``auto`` returns, unless something else is better. A *guest* gives a start.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from partita.core.problem import Metric, Problem
from partita.core.solution import Solution
from partita.errors import PartitaError
from partita.planners.assignment.portfolio import best_assignment
from partita.planners.auto.judge import Budget
from partita.planners.autopipe import plan_autopipe
from partita.planners.baechi.best import best_placement
from partita.planners.baechi.m_etf import plan_m_etf
from partita.planners.baechi.m_sct import plan_m_sct
from partita.planners.baechi.m_topo import plan_m_topo
from partita.planners.brute_force import plan_brute_force
from partita.planners.expert import plan_expert
from partita.planners.hierarchical import plan_hierarchical
from partita.planners.local_search import plan_local_search
from partita.planners.merak import plan_parameters, plan_uniform_floor, plan_uniform_transformer
from partita.planners.optimal_split import plan_optimal_split
from partita.planners.pipedream.planner import plan_pipedream
from partita.planners.piper.planner import plan_piper
from partita.planners.scattered import plan_random
from partita.planners.single import plan_single
from partita.planners.sparse_pipedream import plan_sparse_pipedream
from partita.planners.uniform import plan_uniform

Planner: TypeAlias = Callable[..., Solution]
Effort: TypeAlias = Callable[[Budget], dict[str, Any]]

SHARE = 0.4
"""Share of the budget that starts may take."""
SPECIALIST_SHARE = 0.9
"""Share of the budget for a search by the very metric that is asked."""
MOVES_PER_ITERATION = 200


def _as_it_is(_: Budget) -> dict[str, Any]:
    return {}


def _timed(budget: Budget) -> dict[str, Any]:
    """Return a time limit where the budget is one; counted runs take the planner's own effort."""
    return {} if budget.is_counted else {"time_limit": budget.left_s()}


def _moving(budget: Budget) -> dict[str, Any]:
    """Return moves or time for a search whose moves take microseconds, another search following."""
    if budget.is_counted:
        return {"iterations": MOVES_PER_ITERATION * budget.iterations}
    return {"time_limit": SHARE * budget.left_s()}


def _placing(budget: Budget) -> dict[str, Any]:
    """Return moves or time for the search that minimises what is asked."""
    if budget.is_counted:
        return _moving(budget)
    return {"time_limit": max(SPECIALIST_SHARE * budget.left_s(), 0.01)}


def _few_ideals(_: Budget) -> dict[str, Any]:
    return {"ideals": 1000}


def _apart(budget: Budget) -> dict[str, Any]:
    """Return the options of a split whose parts need not follow one another."""
    limit = (
        {} if budget.is_counted else {"time_limit": max(SPECIALIST_SHARE * budget.left_s(), 0.01)}
    )
    return {"contiguous": False, **limit}


def _briefly(budget: Budget) -> dict[str, Any]:
    """Return little effort for a planner whose own metric is only near to what is asked."""
    return {"ideals": 400, "orders": 4, "iterations": 1, **_timed(budget)}


def _measuring(budget: Budget) -> dict[str, Any]:
    """Return a small share of the budget for a planner that measures many plans."""
    if budget.is_counted:
        return {"iterations": max(1, budget.iterations // 10)}
    return {"iterations": 50, "time_limit": 0.1 * budget.left_s()}


@dataclass(frozen=True, slots=True)
class Guest:
    """A planner, and when to ask it.

    Attributes:
        name: Its name in the table.
        planner: The planner.
        effort: The options that keep it within a budget.
        most_ops: Ops up to which it is asked.
        most_levels: Levels of links up to which it is asked.
        mixes: Whether it is asked where devices differ.
    """

    name: str
    planner: Planner
    effort: Effort = _as_it_is
    most_ops: float = math.inf
    most_levels: int = 99
    mixes: bool = True

    def why_not(self, problem: Problem) -> str:
        """Return why a problem is not for it; empty if it is."""
        if len(problem.graph) > self.most_ops:
            return f"not asked above {self.most_ops:g} ops"
        if len(problem.cluster.levels) > self.most_levels:
            return f"not asked above {self.most_levels} levels of links"
        kinds = {(device.type, device.kind, device.speed) for device in problem.cluster.devices}
        return "" if self.mixes or len(kinds) == 1 else "not asked where devices differ"


PLAIN: Sequence[Guest] = (
    Guest("single", plan_single),
    Guest("uniform", plan_uniform),
    Guest("uniform_floor", plan_uniform_floor),
    Guest("uniform_transformer", plan_uniform_transformer),
    Guest("expert", plan_expert),
)
"""Those that take next to no time: they are always asked."""

GUESTS: Sequence[Guest] = (
    Guest("parameters", plan_parameters, most_ops=1000),
    Guest("autopipe", plan_autopipe, most_ops=600),
    Guest("m-topo", plan_m_topo, most_ops=500),
    Guest("m-etf", plan_m_etf, most_ops=500),
    Guest("pipedream", plan_pipedream, _briefly, most_ops=60, most_levels=2, mixes=False),
    Guest("sparse-pipedream", plan_sparse_pipedream, _briefly, most_ops=60, most_levels=2),
    Guest("optimal-split", plan_optimal_split, _few_ideals, most_ops=40),
    Guest("piper", plan_piper, most_ops=30),
    Guest("random", plan_random, most_ops=200),
    Guest("local-search", plan_local_search, _measuring, most_ops=24),
    Guest("hierarchical", plan_hierarchical, _measuring, most_ops=24),
    Guest("brute-force", plan_brute_force, _measuring, most_ops=6),
)
"""Asked in this order while less than ``SHARE`` of the budget is used."""

_PLACING = (Guest("best_placement", best_placement, _placing),)
_SPLITTING = (
    Guest("contiguous optimal-split", plan_optimal_split),
    Guest("optimal-split", plan_optimal_split, _apart),
)
_PIPELINING = (
    Guest("pipedream", plan_pipedream, _timed),
    Guest("sparse-pipedream", plan_sparse_pipedream, _timed),
)

SPECIALISTS: Mapping[Metric, Sequence[Guest]] = {
    Metric.LATENCY: (
        Guest("best_placement", best_placement, _moving),
        Guest("m-sct", plan_m_sct, most_ops=500),
    ),
    Metric.PIPEDREAM: _PIPELINING,
    Metric.PIPEDREAM_REPAIRED: _PIPELINING,
    Metric.MAX_LOAD: _SPLITTING,
    Metric.SINGLE_SAMPLE_LATENCY: _SPLITTING,
    Metric.MAKESPAN_PARALLEL: _PLACING,
    Metric.MAKESPAN_SEQUENTIAL: _PLACING,
    Metric.PIPER: (Guest("piper", plan_piper),),
    Metric.SHARDING_COST: (Guest("best_assignment", best_assignment, _timed),),
}
"""Who minimises a metric, best first."""


@dataclass(slots=True)
class Answers:
    """What the planners that were asked say.

    Attributes:
        solutions: Their solutions.
        tried: Value, or the reason why there is none, by planner.
    """

    solutions: list[Solution] = field(default_factory=list)
    tried: dict[str, float | str] = field(default_factory=dict)

    def ask(
        self, guest: Guest, problem: Problem, budget: Budget, *, always: bool = True
    ) -> Solution | None:
        """Note and return what a planner finds; ``None`` if it finds nothing or is not asked.

        Args:
            guest: The planner.
            problem: The problem.
            budget: What it may use.
            always: Whether to ask even where ``SHARE`` of the time is up.
        """
        if guest.name in self.tried:
            return None
        reason = guest.why_not(problem)
        if reason:
            self.tried[guest.name] = reason
            return None
        if not always and not budget.is_counted and budget.used() >= SHARE:
            self.tried[guest.name] = "not asked: its share of the time was up"
            return None
        try:
            solution = guest.planner(problem, **guest.effort(budget))
        except PartitaError as exc:
            self.tried[guest.name] = str(exc)
            return None
        self.tried[guest.name] = solution.value
        self.solutions.append(solution)
        return solution
