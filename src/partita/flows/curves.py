"""Throughput of a job by number and type of GPUs, computed with the planner.

A model is planned on 1, 2, 4, ... devices of a type, the same samples a step everywhere; the steps
of the best plans are the job's iterations. Speed 1 is the step on the first number of the first
type. More GPUs are never slower: a job may leave some idle, so that a plan for fewer counts, too.
The frontier is that of the plan at speed 1, by the model of its devices, where these are known.
What the planner does not know are CPUs and memory of the host: every point has the same, given by
the caller.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partita.core.fleet import Sensitivity, SensitivityOrigin
from partita.core.problem import Metric, Problem
from partita.core.solution import Solution
from partita.energy.frontier.savings import frontier_of
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.energy_plan import modelled
from partita.flows.fleet_power import with_step_frontier
from partita.flows.summary import describe_plan

FRONTIER_POINTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A number of GPUs of a type.

    Attributes:
        gpu_type: The type.
        gpus: The number.
        step_s: Seconds of a step of the best plan for it or for fewer; ``inf`` = none fits.
        plan: That plan in words; the reason where none fits.
        samples_per_s: Samples of a step over its seconds.
        used: GPUs of the plan.
    """

    gpu_type: str
    gpus: int
    step_s: float
    plan: str
    samples_per_s: float
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The throughput of a job by number and type of GPUs.

    Attributes:
        points: All that were asked for, those that do not fit included.
        sensitivity: The same for a fleet.
        has_frontier: Whether time against energy could be modelled.
    """

    points: tuple[CurvePoint, ...]
    sensitivity: Sensitivity
    has_frontier: bool

    def to_json(self) -> list[dict[str, Any]]:
        """Return the points as JSON values."""
        return [
            {
                "gpu_type": point.gpu_type,
                "gpus": point.gpus,
                "step_s": point.step_s if np.isfinite(point.step_s) else None,
                "samples_per_s": point.samples_per_s if point.used else None,
                "plan": point.plan,
                "used": point.used,
            }
            for point in self.points
        ]


def planner_curve(
    problems: Mapping[tuple[str, int], Problem],
    planner: Callable[[Problem], Solution],
    *,
    name: str,
    kind: str = "",
    share: tuple[float, float] = (1.0, 8.0),
    progress: Callable[[str], None] = lambda _: None,
) -> Curve:
    """Return the throughput of a job on each number and type of GPUs.

    Args:
        problems: The model on each, in the order of the answer; all with the same samples a step.
        planner: Plans one.
        name: Of the job.
        kind: Its class.
        share: CPUs and GB that a GPU of the job needs.
        progress: Is told each point.

    Raises:
        InfeasibleError: It fits nowhere.
        InvalidInputError: A step is not the time of a step (another objective).
    """
    found = _planned(problems, planner, progress)
    points = tuple(_point(key, problems[key], found[key]) for key in problems)
    fitting = [point for point in points if point.used]
    if not fitting:
        raise InfeasibleError(f"{name!r} fits on none of these GPUs: {points[0].plan}")
    part = _sensitivity(fitting, name, kind, share)
    first = found[fitting[0].gpu_type, fitting[0].gpus]
    assert isinstance(first, Solution)
    try:
        frontier = frontier_of(first, modelled(first), points=FRONTIER_POINTS)
    except InvalidInputError:
        return Curve(points=points, sensitivity=part, has_frontier=False)
    return Curve(points=points, sensitivity=with_step_frontier(part, frontier), has_frontier=True)


def _planned(
    problems: Mapping[tuple[str, int], Problem],
    planner: Callable[[Problem], Solution],
    progress: Callable[[str], None],
) -> dict[tuple[str, int], Solution | str]:
    """Return the best plan for each number of GPUs or for fewer of its type, or why there is none.

    Raises:
        InvalidInputError: The objective is another than throughput.
    """
    best: dict[str, Solution] = {}
    found: dict[tuple[str, int], Solution | str] = {}
    for key in sorted(problems, key=lambda pair: pair[1]):
        problem, (gpu_type, gpus) = problems[key], key
        if problem.objective.metric is not Metric.THROUGHPUT:
            metric = problem.objective.metric.value
            raise InvalidInputError(f"a curve is of throughput; the objective is {metric}")
        progress(f"{gpus} x {gpu_type}")
        try:
            solution = planner(problem)
        except InfeasibleError as exc:
            found[key] = best.get(gpu_type, str(exc))
            continue
        if gpu_type not in best or solution.value < best[gpu_type].value:
            best[gpu_type] = solution
        found[key] = best[gpu_type]
    return found


def _point(key: tuple[str, int], problem: Problem, found: Solution | str) -> CurvePoint:
    gpu_type, gpus = key
    if isinstance(found, str):
        return CurvePoint(
            gpu_type=gpu_type, gpus=gpus, step_s=np.inf, plan=found, samples_per_s=0.0, used=0
        )
    samples = problem.microbatches * problem.microbatch_size
    return CurvePoint(
        gpu_type=gpu_type,
        gpus=gpus,
        step_s=found.value,
        plan=describe_plan(found.plan),
        samples_per_s=samples / found.value,
        used=len(found.plan.devices),
    )


def _sensitivity(
    points: Sequence[CurvePoint], name: str, kind: str, share: tuple[float, float]
) -> Sensitivity:
    types = tuple(dict.fromkeys(point.gpu_type for point in points))
    rows = len(points)
    return Sensitivity(
        name=name,
        kind=kind,
        origin=SensitivityOrigin.MODELLED,
        machine="planned",
        iteration_s=points[0].step_s,
        gpu_types=types,
        gpu_type=np.array([types.index(point.gpu_type) for point in points]),
        gpus=np.array([point.gpus for point in points]),
        cpus=np.full(rows, share[0]),
        memory_bytes=np.full(rows, share[1] * 1e9),
        speed=np.array([points[0].step_s / point.step_s for point in points]),
        measured=np.zeros(rows, dtype=np.bool_),
    )
