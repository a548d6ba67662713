"""Calls the functions that the rows of metrics name (``core/metrics.py``)."""

from partita.core.columns import Floats
from partita.core.metrics import METRICS, Metric
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.errors import UnsupportedError
from partita.objectives.value import Value

PUBLISHED = tuple(metric for metric, row in METRICS.items() if row.published)


def value_of(metric: Metric, problem: Problem, plan: Plan) -> Value:
    """Return the value of a plan by a metric, whatever the problem's own.

    Raises:
        InvalidInputError: The metric does not apply.
        UnsupportedError: The metric is a plug-in that fails, or returns no ``Value``.
    """
    function = metric.row.load("value")
    assert function is not None
    value = function(problem, plan)
    if not isinstance(value, Value):
        raise UnsupportedError(f"metric {metric.value!r} is a plug-in and returned no Value")
    return value


def why_not(metric: Metric, problem: Problem, plan: Plan) -> str | None:
    """Return why a published objective cannot measure a plan, or ``None`` where it can."""
    if not metric.row.published:
        return "it is not a published objective"
    reason = metric.row.load("why_not")
    found: str | None = None if reason is None else reason(problem, plan)
    return found


def evaluate_published(problem: Problem, plan: Plan) -> dict[Metric, Value]:
    """Return the value of a plan by every published objective that applies, in their order.

    Raises:
        InvalidInputError: The plan is not one for the problem.
    """
    plan.check_fits(problem)
    return {
        metric: value_of(metric, problem, plan)
        for metric in PUBLISHED
        if why_not(metric, problem, plan) is None
    }


def least_held_bytes(problem: Problem) -> Floats | None:
    """Return what each op holds at least by the rule of the problem's metric, if it has one."""
    function = problem.objective.metric.row.load("held")
    found: Floats | None = None if function is None else function(problem)
    return found
