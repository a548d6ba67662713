"""A plan against a run of it: costs recalibrated, planned again, and whether that is worth it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from partita.core.codec import encode
from partita.core.solution import Solution
from partita.core.timeline import Timeline, TimelineOrigin
from partita.cost.judge import evaluate
from partita.cost.measured import Calibration, calibrate
from partita.cost.moves import Moves, moves
from partita.documents import load
from partita.errors import FormatError, InvalidInputError
from partita.flows.fields import PlannerFields, PlanSource
from partita.flows.large import plan_again
from partita.flows.moves import moves_words
from partita.flows.planner_choice import chosen_planner
from partita.flows.results import Result
from partita.flows.runs.requests import RUNS
from partita.flows.solutions import SolutionRequest, evaluated, is_large, read_solution
from partita.flows.summary import describe_plan
from partita.flows.traces import has_traces, read_traces, trace_timeline
from partita.planners.table import STARTS, takes
from partita.requests import OnProgress, declare, make, silent
from partita.runtime.directory import RESULTS, read_run
from partita.units import format_seconds, format_share

LEAST_GAIN = 0.05
"""Share by which another plan must be faster to be worth a change."""


class HasDirectory(Protocol):
    """A run that left its files, such as what ``partita.run`` returns."""

    @property
    def directory(self) -> Path | None:
        """The run directory; None where nothing was written."""
        ...


Measured: TypeAlias = str | Timeline | HasDirectory
"""A measured step: a run directory or its name, a directory of traces of torch's profiler, a file
with a Timeline, or one of the objects."""


@dataclass(frozen=True, kw_only=True)
class ReplanRequest(PlannerFields):
    """A plan, a run that was measured, and how to plan again."""

    plan: PlanSource = declare("", is_argument=True, help="A plan with its problem.")
    measured: Measured | None = declare(
        None,
        is_required=True,
        metavar="RUN",
        help="Run that was measured: its directory, its name under --runs, a Timeline, or a "
        "directory of traces of torch's profiler, one of each rank.",
    )
    runs: str = declare(RUNS, help="Folder in which run directories are.")
    least_gain: float = declare(
        LEAST_GAIN, minimum=0, help="Share by which another plan must be faster to be proposed."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A step that was measured.

    Attributes:
        timeline: Its timeline.
        step_s: Seconds of a step: the median of the run, or of this one.
        solution: The plan that ran; None = not known.
    """

    timeline: Timeline
    step_s: float
    solution: Solution | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ReplanResult(Result):
    """A plan and the best one that was found, both by costs as a run has shown them.

    Attributes:
        before: The plan, with its value by the new costs.
        solution: The best plan by the new costs: the same one where none is better.
        calibration: How much slower devices and links are than was thought.
        moves: State that moves from one to the other.
        measured_s: Seconds of a measured step.
        thought_s: Seconds of a step of the plan that ran by the old costs.
        recalibrated_s: The same by the new costs.
        least_gain: Share by which another plan must be faster to be proposed.
    """

    before: Solution
    solution: Solution
    calibration: Calibration
    moves: Moves
    measured_s: float
    thought_s: float
    recalibrated_s: float
    least_gain: float

    @property
    def gain(self) -> float:
        """Share by which the new plan is faster: old value over new value, less one."""
        return self.before.value / self.solution.value - 1 if self.solution.value > 0 else 0.0

    @property
    def is_worth(self) -> bool:
        """Whether the new plan is faster by the share that was asked for."""
        return self.gain >= self.least_gain

    @property
    def verdict(self) -> str:
        """Whether to change the plan, in one line."""
        old, new = self.before, self.solution
        unit = old.unit

        def value(number: float) -> str:
            return format_seconds(number) if unit == "s" else f"{number:.5g} {unit}"

        least = format_share(self.least_gain)
        if self.is_worth:
            return (
                f"another plan is {format_share(self.gain)} faster: {describe_plan(new.plan)}, "
                f"{value(new.value)} instead of {value(old.value)}"
            )
        if self.gain <= 0:
            return f"no other plan is faster; the plan stays, {value(old.value)}"
        return (
            f"no other plan is at least {least} faster: the best is {format_share(self.gain)}, "
            f"{value(new.value)} instead of {value(old.value)}"
        )

    def lines(self) -> list[str]:
        """Return the verdict, what was learned, and what would move."""
        name, factor = self.calibration.slowest
        learned = (
            f"measured {format_seconds(self.measured_s)} per step, thought "
            f"{format_seconds(self.thought_s)}, recalibrated {format_seconds(self.recalibrated_s)}"
            f"; compute on {name} takes {factor:.3g} x as long as thought"
        )
        return [self.verdict, learned, *([moves_words(self.moves)] if self.gain > 0 else [])]

    def rows(self) -> list[Mapping[str, object]]:
        """Return the factor of each device that ran."""
        return [
            {"device": name, "factor": factor} for name, factor in self.calibration.seen.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values, the solution as its document."""
        return {
            "worth": self.is_worth,
            "gain": self.gain,
            "least_gain": self.least_gain,
            "verdict": self.verdict,
            "before": {"plan": describe_plan(self.before.plan), "value": self.before.value},
            "after": {"plan": describe_plan(self.solution.plan), "value": self.solution.value},
            "unit": self.solution.unit,
            "metric": self.solution.metric.value,
            "measured_step_s": self.measured_s,
            "predicted_step_s": self.thought_s,
            "recalibrated_step_s": self.recalibrated_s,
            "factors": self.calibration.to_json(),
            "moves": self.moves.to_json(),
            "solution": encode(self.solution),
        }


def replan(
    plan: PlanSource,
    /,
    *,
    measured: Measured,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of ReplanRequest)
) -> ReplanResult:
    """Recalibrate the costs of a plan from a measured run, and plan again.

    Args:
        plan: What ``partita plan`` wrote: the path of the file, or the solution itself.
        measured: A run directory or its name, a directory of traces of torch's profiler, a file
            with a Timeline, a Timeline, or what ``partita.run`` returned.
        on_progress: Called with each step.
        **options: The fields of :class:`ReplanRequest`: the options of ``partita replan``.

    Raises:
        InvalidInputError: There is no such plan or run, or the run is of another plan.
    """
    request = make(ReplanRequest, plan=plan, measured=measured, **options)
    return replan_request(request, on_progress)


def replan_request(request: ReplanRequest, on_progress: OnProgress = silent) -> ReplanResult:
    """Plan again what a request asks for; see :func:`replan`."""
    choice = chosen_planner(request)
    planner = choice.function()
    found = read_solution(SolutionRequest(plan=request.plan))
    step = read_measured(request, found)
    ran = found.plan if step.solution is None else step.solution.plan
    ran.check_fits(found.problem)
    on_progress("recalibrating")
    calibration = calibrate(found.problem, ran, step.timeline)
    problem = calibration.applied(found.problem, ran)
    before = evaluated(problem, found.plan, found)
    on_progress(f"{problem.graph.name} with {choice.name}")
    if is_large(found):
        rivals = [
            evaluated(new.problem, new.plan, new) for new in plan_again(found, problem.cluster)
        ]
    else:
        search = partial(planner, starts=(found.plan,)) if takes(choice.name, STARTS) else planner
        rivals = [search(problem)]
    solution = min([before, *rivals], key=lambda one: one.value)
    return ReplanResult(
        before=before,
        solution=solution,
        calibration=calibration,
        moves=moves(found.plan, solution.plan, solution.problem, found.problem),
        measured_s=step.step_s,
        thought_s=evaluate(found.problem, ran).step_s,
        recalibrated_s=evaluate(problem, ran).step_s,
        least_gain=request.least_gain,
    )


def read_measured(request: ReplanRequest, solution: Solution) -> MeasuredStep:
    """Return the measured step that a request names.

    Args:
        request: The request.
        solution: The plan that traces are of; a run has its own.

    Raises:
        InvalidInputError: There is none, or nothing was measured in it.
        FormatError: A file of it cannot be read.
    """
    given = request.measured
    if isinstance(given, Timeline):
        return _checked(MeasuredStep(timeline=given, step_s=given.makespan_s), "the timeline")
    name = given if isinstance(given, str) else _directory_of(given)
    path = Path(name)
    if not path.exists() and (Path(request.runs) / name).is_dir():
        path = Path(request.runs) / name
    if path.is_dir():
        if not (path / "plan.json").exists() and has_traces(path):
            timeline = trace_timeline(solution.problem, solution.plan, read_traces([str(path)]))
            return MeasuredStep(timeline=timeline, step_s=timeline.makespan_s)
        return _checked(_of_run(path), str(path))
    if not path.exists() and name != "-":
        raise InvalidInputError(
            f"there is no run {name!r}, here or under {request.runs}; 'partita results' lists runs"
        )
    found = load(name)
    if not isinstance(found, Timeline):
        kind = type(found).__name__.lower()
        raise InvalidInputError(
            f"{name!r} holds a {kind}; expected a run directory, or the timeline of a step"
        )
    return _checked(MeasuredStep(timeline=found, step_s=found.makespan_s), name)


def _directory_of(run: HasDirectory | None) -> str:
    if run is None or run.directory is None:
        raise InvalidInputError("--measured RUN is missing, or its run left no directory")
    return str(run.directory)


def _of_run(path: Path) -> MeasuredStep:
    """Return the last step of a run, and the median seconds of all."""
    file = path / "timeline.json"
    if not file.exists():
        raise InvalidInputError(
            f"{path} has no timeline.json; expected a run of a plan, which torch's own ways are not"
        )
    timeline, solution = load(file), load(path / "plan.json")
    if not isinstance(timeline, Timeline) or not isinstance(solution, Solution):
        raise FormatError("expected a timeline.json and a plan.json of a run", path=str(path))
    step_s = math.nan
    if (path / RESULTS).exists():
        step_s = float(read_run(path).results.get("median_step_s") or math.nan)
    if math.isnan(step_s):
        step_s = timeline.makespan_s
    return MeasuredStep(timeline=timeline, step_s=step_s, solution=solution)


def _checked(step: MeasuredStep, name: str) -> MeasuredStep:
    if step.timeline.origin is TimelineOrigin.EMULATED:
        raise InvalidInputError(
            f"{name} was emulated: its compute is the prediction itself; expected a run that was "
            "measured"
        )
    return step
