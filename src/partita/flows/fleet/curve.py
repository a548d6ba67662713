"""Throughput of a job by number and type of GPUs, computed with the planner.

What ``partita.fleet_curve`` and the command ``fleet curve`` do.

A model is planned on 1, 2, 4, ... devices of a type, the same samples per step everywhere; the
steps of the best plans are the job's iterations. Speed 1 is the step on the first number of the
first type. More GPUs are never slower: a job may leave some idle, so that a plan for fewer counts,
too. The frontier is that of the plan at speed 1, by the model of its devices, where these are
known. What the planner does not know are CPUs and memory of the host: every point has the same,
given by the caller.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partita.catalogue.examples import EXAMPLES
from partita.core.fleet import Sensitivity, SensitivityOrigin
from partita.core.graph import Graph
from partita.core.problem import Metric, Problem
from partita.core.solution import Solution
from partita.energy.frontier.savings import frontier_of
from partita.errors import InfeasibleError, InvalidInputError
from partita.flows.energy_plan import modelled
from partita.flows.fields import ClusterFields, Model, PlannerFields, SourceFields, StepFields
from partita.flows.fleet.power import with_step_frontier
from partita.flows.planner_choice import chosen_planner
from partita.flows.problem import ProblemRequest, catalogue_of, pose, read_graph
from partita.flows.results import Result
from partita.flows.summary import describe_plan
from partita.requests import OnProgress, declare, fields_of, make, silent
from partita.units import parse_bytes

FRONTIER_POINTS = 20
MOST_POINTS = 64


@dataclass(frozen=True, kw_only=True)
class CurveRequest(ClusterFields, StepFields, PlannerFields, SourceFields):
    """A model, and the numbers and types of GPUs to plan it on."""

    model: Model = declare("", is_argument=True, help="Name of a model, or a file.")
    devices: tuple[str, ...] = declare(  # type: ignore[assignment]  # GPUs here, not processes
        (),
        metavar="TYPE:N,N",
        is_required=True,
        help="Type of GPU and the numbers of it; several times. The first is speed 1.",
    )
    name: str | None = declare(None, usual="MODEL", help="Name of the job.")
    kind: str = declare("", help="Class of the job, such as language.")
    cpus_per_gpu: float = declare(1.0, above=0, help="CPUs that the job needs per GPU.")
    memory_per_gpu: str = declare("8GB", help="Main memory that the job needs per GPU.")


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


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Curve(Result):
    """The throughput of a job by number and type of GPUs.

    Attributes:
        points: All that were asked for, those that do not fit included.
        sensitivity: The same for a fleet.
        has_frontier: Whether time against energy could be modelled.
    """

    points: tuple[CurvePoint, ...]
    sensitivity: Sensitivity
    has_frontier: bool

    def to_json(self) -> dict[str, Any]:
        """Return the points as JSON values."""
        return {
            "name": self.sensitivity.name,
            "points": [
                {
                    "gpu_type": point.gpu_type,
                    "gpus": point.gpus,
                    "step_s": point.step_s if np.isfinite(point.step_s) else None,
                    "samples_per_s": point.samples_per_s if point.used else None,
                    "plan": point.plan,
                    "used": point.used,
                }
                for point in self.points
            ],
            "frontier": "modelled" if self.has_frontier else None,
        }

    def lines(self) -> list[str]:
        """Return the job and its points in two lines."""
        fitting = [point for point in self.points if point.used]
        first = fitting[0]
        speeds = ", ".join(
            f"{point.gpus} x {point.gpu_type}: {first.step_s / point.step_s:.2f}"
            for point in fitting
        )
        return [f"{self.sensitivity.name}: planned, not measured", f"speed by GPUs: {speeds}"]

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row per point."""
        return list(self.to_json()["points"])


def fleet_curve(
    model: Model,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of CurveRequest)
) -> Curve:
    """Plan a model on several numbers and types of GPUs, the same samples per step everywhere.

    Args:
        model: A built-in name, a model to be estimated, a file, or the graph itself.
        on_progress: Called with each point.
        **options: The fields of :class:`CurveRequest`: the options of ``partita fleet curve``.

    >>> curve = fleet_curve("gpt-small", devices=["a100:1,2"], planner="uniform")
    >>> [point.gpus for point in curve.points]
    [1, 2]

    Raises:
        InvalidInputError: There is no such model, type of GPU, planner or option.
        InfeasibleError: The model fits on none of the GPUs.
    """
    return fleet_curve_request(make(CurveRequest, model=model, **options), on_progress)


def fleet_curve_request(request: CurveRequest, on_progress: OnProgress = silent) -> Curve:
    """Return the curve that a request asks for; see :func:`fleet_curve`."""
    planner = chosen_planner(request).function()
    model = request.model
    if not (isinstance(model, str) and model in EXAMPLES):
        model = read_graph(model, may_estimate=True) or model  # once: it may be stdin
    name = model.name if isinstance(model, Graph) else "job"
    if isinstance(request.model, str):
        name = request.model.rsplit("/", 1)[-1].removesuffix(".json")
    return planner_curve(
        _problems(request, model),
        planner,
        name=request.name or name,
        kind=request.kind,
        share=(request.cpus_per_gpu, parse_bytes(request.memory_per_gpu, "--memory-per-gpu")),
        on_progress=on_progress,
    )


def _problems(request: CurveRequest, model: Model) -> dict[tuple[str, int], Problem]:
    """Return the model on each number of GPUs of each type, in the order that was asked for."""
    catalogue = catalogue_of(request)
    known = {field.name for field in fields_of(ProblemRequest)}
    shared = {name: value for name, value in request.given().items() if name in known}
    problems: dict[tuple[str, int], Problem] = {}
    for text in request.devices:
        kind, colon, numbers = text.lower().partition(":")
        if not colon or not re.fullmatch(r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", numbers):
            raise InvalidInputError(f"--devices {text!r} is not of the form TYPE:1,2,4")
        held = catalogue.device_type(kind).host_max_devices or 8
        for count in sorted(map(int, numbers.split(","))):
            if count > held and count % held:
                raise InvalidInputError(
                    f"--devices {text!r}: {count} GPUs do not fill hosts of {held}; more than one "
                    f"host takes a multiple of {held}"
                )
            if len(problems) >= MOST_POINTS:
                raise InvalidInputError(f"--devices: more than {MOST_POINTS} points")
            cluster = f"{count}x{kind}" if count <= held else f"{count // held}x{held}x{kind}"
            asked = {**shared, "model": model, "cluster": cluster, "devices": None}
            problems[kind, count] = pose(make(ProblemRequest, **asked)).problem
    return problems


def planner_curve(
    problems: Mapping[tuple[str, int], Problem],
    planner: Callable[[Problem], Solution],
    *,
    name: str,
    kind: str = "",
    share: tuple[float, float] = (1.0, 8e9),
    on_progress: OnProgress = silent,
) -> Curve:
    """Return the throughput of a job on each number and type of GPUs.

    Args:
        problems: The model on each, in the order of the answer; all with the same samples per step.
        planner: Plans one.
        name: Name of the job.
        kind: Its class.
        share: CPUs and bytes of memory that the job needs per GPU.
        on_progress: Called with each point.

    Raises:
        InfeasibleError: It fits nowhere.
        InvalidInputError: A step is not the time of a step (another objective).
    """
    found = _planned(problems, planner, on_progress)
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
    on_progress: OnProgress,
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
        on_progress(f"{gpus} x {gpu_type}")
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
        memory_bytes=np.full(rows, share[1]),
        speed=np.array([points[0].step_s / point.step_s for point in points]),
        measured=np.zeros(rows, dtype=np.bool_),
    )
