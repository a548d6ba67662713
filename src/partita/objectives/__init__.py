"""The published objectives, one named function each: plans compared on their authors' terms.

Seconds are those of one batch of the graph as it was profiled, whatever the plan's microbatches. A
plan must fit its problem (``plan.check_fits``, which ``evaluate_published`` calls).
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from partita.core.plan import Plan
from partita.core.problem import Metric, Problem
from partita.objectives.makespan import (
    makespan_parallel,
    makespan_sequential,
    why_not_makespan,
)
from partita.objectives.pipedream import pipedream_time, why_not_pipedream
from partita.objectives.piper import piper_time, why_not_piper
from partita.objectives.repaired import pipedream_repaired_time, why_not_repaired
from partita.objectives.sharding import sharding_cost, why_not_sharding
from partita.objectives.tarnawski import (
    max_load,
    single_sample_latency,
    why_not_latency,
    why_not_max_load,
)
from partita.objectives.value import Value

PublishedObjective: TypeAlias = Callable[[Problem, Plan], Value]
WhyNot: TypeAlias = Callable[[Problem, Plan], str | None]

OBJECTIVES: Mapping[Metric, PublishedObjective] = {
    Metric.PIPEDREAM: pipedream_time,
    Metric.PIPEDREAM_REPAIRED: pipedream_repaired_time,
    Metric.MAX_LOAD: max_load,
    Metric.SINGLE_SAMPLE_LATENCY: single_sample_latency,
    Metric.PIPER: piper_time,
    Metric.MAKESPAN_PARALLEL: makespan_parallel,
    Metric.MAKESPAN_SEQUENTIAL: makespan_sequential,
    Metric.SHARDING_COST: sharding_cost,
}

WHY_NOT: Mapping[Metric, WhyNot] = {
    Metric.PIPEDREAM: why_not_pipedream,
    Metric.PIPEDREAM_REPAIRED: why_not_repaired,
    Metric.MAX_LOAD: why_not_max_load,
    Metric.SINGLE_SAMPLE_LATENCY: why_not_latency,
    Metric.PIPER: why_not_piper,
    Metric.MAKESPAN_PARALLEL: why_not_makespan,
    Metric.MAKESPAN_SEQUENTIAL: why_not_makespan,
    Metric.SHARDING_COST: why_not_sharding,
}


def why_not(metric: Metric, problem: Problem, plan: Plan) -> str | None:
    """Return why a published objective cannot measure a plan, or ``None`` where it can."""
    reason = WHY_NOT.get(metric)
    return "it is not a published objective" if reason is None else reason(problem, plan)


def evaluate_published(problem: Problem, plan: Plan) -> dict[Metric, Value]:
    """Return the value of a plan by every published objective that applies, in their order.

    Raises:
        InvalidInputError: The plan is not one for the problem.
    """
    plan.check_fits(problem)
    return {
        metric: measure(problem, plan)
        for metric, measure in OBJECTIVES.items()
        if why_not(metric, problem, plan) is None
    }
