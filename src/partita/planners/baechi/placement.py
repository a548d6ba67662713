"""From placements of the forward ops to plans and solutions."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.core.placement import placement_plan
from partita.core.plan import Plan, equal_microbatches
from partita.core.problem import Problem
from partita.core.solution import Proof, Solution
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.baechi import list_schedule
from partita.planners.baechi.instance import (
    Channels,
    Instance,
    MemoryRule,
    default_channels,
    default_memory,
    every_op,
    forward_ops,
    instance_of,
)
from partita.planners.pipeline import solution_of


class Placed(NamedTuple):
    """A placement of the forward ops with an order along the data.

    Attributes:
        device_of: Device of each forward op.
        order: The forward ops in the order in which they are committed.
        makespan: When the last one ends, in seconds.
    """

    device_of: Array
    order: Array
    makespan: float

    @property
    def value(self) -> float:
        """Its makespan."""
        return self.makespan


def placed(schedule: list_schedule.Schedule) -> Placed:
    """Return a complete schedule as a placement."""
    return Placed(schedule.device_of, schedule.order, schedule.makespan)


def read_instance(problem: Problem, channels: str | None, memory: str | None) -> Instance:
    """Return the instance that options ask for; what they leave out follows from the metric.

    Raises:
        InvalidInputError: An option has no such value.
    """
    return instance_of(
        problem,
        default_channels(problem) if channels is None else _choice(Channels, "channels", channels),
        default_memory(problem) if memory is None else _choice(MemoryRule, "memory", memory),
    )


def _choice(kind: Any, option: str, value: str) -> Any:  # noqa: ANN401 (an enumeration)
    if value not in list(kind):
        known = " or ".join(repr(item.value) for item in kind)
        raise InvalidInputError(f"option {option!r} is {value!r}; expected {known}")
    return kind(value)


def plan_of(problem: Problem, found: Placed) -> Plan:
    """Return the plan that runs each op on its device, in the order of the placement."""
    graph, objective = problem.graph, problem.objective
    forward = forward_ops(graph)
    order = forward[found.order]
    if len(forward) < len(graph):
        along = graph.topological_order
        order = np.concatenate([order, along[~graph.is_forward[along]]])
    return placement_plan(
        graph,
        problem.cluster.device_names,
        every_op(problem, found.device_of),
        order=order,
        schedule=objective.placement_schedule,
        microbatch_sizes=equal_microbatches(problem.microbatches, problem.microbatch_size),
    )


def best_solution(
    problem: Problem,
    candidates: Iterable[Placed],
    planner: str,
    options: Mapping[str, Any],
    *,
    proof: Proof = Proof.FEASIBLE,
    stats: Mapping[str, Any] | None = None,
) -> Solution:
    """Return the solution of the shortest placement that keeps every limit.

    Raises:
        InfeasibleError: There is none; the reason of the last.
    """
    refusal: InfeasibleError | None = None
    for found in sorted(candidates, key=lambda item: item.makespan):
        try:
            return solution_of(
                problem, plan_of(problem, found), planner, options, proof=proof, stats=stats
            )
        except InfeasibleError as exc:
            refusal = exc
    raise refusal or InfeasibleError(f"{planner} places no op of graph {problem.graph.name!r}")
