"""Where the time and the memory of a plan go, what bounds it, and what would change it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from partita.catalogue.catalogue import Catalogue
from partita.catalogue.what_if import what_if
from partita.core.cluster import MAX_DEVICES
from partita.core.columns import number_or_none, thawed
from partita.core.metrics import Metric
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.program import LAST_COMPUTE, Kind
from partita.core.schedules import Schedule, schedule_names
from partita.core.solution import Solution
from partita.core.timeline import Timeline
from partita.cost.durations import cluster_devices, stage_seconds
from partita.cost.judge import judge, measure
from partita.cost.measured import COMPUTE_PASSES
from partita.documents import open_file
from partita.errors import InfeasibleError, InvalidInputError, PartitaError
from partita.flows.answer_first import what_bounds, what_to_do
from partita.flows.fields import PlanSource
from partita.flows.planner_choice import TRIAL_LIMIT_S
from partita.flows.problem import catalogue_of
from partita.flows.results import Result
from partita.flows.solutions import TASK, SolutionRequest, read_solution, run_files
from partita.flows.summary import Summary, summarise
from partita.flows.traces import is_trace, read_traces, trace_timeline
from partita.names import short, suggest
from partita.planners.table import DEFAULT_PLANNER, get_planner
from partita.program.layout import crossings, owners
from partita.requests import OnProgress, declare, make, silent
from partita.units import format_seconds

FIXED = ("", "manual")
"""Planners whose plan is a map that the user gave, which nobody can plan again."""


USUAL = ("microbatches=2x", "bandwidth=2x")
"""Changes that are tried where none is named, besides another planner and one more device."""


@dataclass(frozen=True, kw_only=True)
class ExplainRequest(SolutionRequest):
    """A saved plan, and what might be changed."""

    what_if: tuple[str, ...] = declare(
        (),
        help="Change to try: +1xa100, bandwidth=2x, memory=0.5x, speed=2x, microbatches=2x, "
        "schedule=NAME, or replan (by the usual planner); several times.",
    )
    measured: tuple[str | Timeline, ...] = declare(
        (),
        metavar="FILE",
        help="Trace of torch's profiler of a rank (several times), their directory, or a timeline "
        "of a run: the plan is held against it.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The answer to one what-if.

    Attributes:
        change: What was changed.
        value: Value of the new plan; NaN where there is none.
        relative: Change of the value, relative to the plan.
        note: What the new plan is, or why there is none.
        more_samples: Whether its step has other samples, so that ``relative`` is per sample.
    """

    change: str
    value: float
    relative: float
    note: str
    more_samples: bool = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Explanation(Result):
    """A plan taken apart.

    Attributes:
        summary: The plan and its figures.
        stages: A row for each stage: where it runs, its times, bytes and parameters.
        devices: A row for each device: where its time and its memory go.
        critical_path: Seconds of the critical path by what it does.
        answer: What bounds the step, a sentence each.
        advice: What would make it faster, as commands where there are some, the best first.
        what_if: Answers, in the order of the questions.
        measured: A row for each stage with predicted and measured seconds; empty = nothing was
            measured.
        measured_s: Seconds from the first pass to the end of the last, measured; NaN likewise.
        predicted_s: The same, predicted.
    """

    summary: Summary
    stages: tuple[dict[str, Any], ...]
    devices: tuple[dict[str, Any], ...]
    critical_path: dict[str, float]
    answer: tuple[str, ...]
    advice: tuple[str, ...]
    what_if: tuple[WhatIf, ...]
    measured: tuple[dict[str, Any], ...] = ()
    measured_s: float = float("nan")
    predicted_s: float = float("nan")

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values under stable keys."""
        return {
            **self.summary.to_json(),
            "stages": list(self.stages),
            "devices": list(self.devices),
            "critical_path": self.critical_path,
            "answer": list(self.answer),
            "advice": list(self.advice),
            "what_if": [
                {
                    "change": answer.change,
                    "value": number_or_none(answer.value),
                    "relative": number_or_none(answer.relative),
                    "note": answer.note,
                }
                for answer in self.what_if
            ],
            "measured": {
                "stages": list(self.measured),
                "passes_s": number_or_none(self.measured_s),
                "predicted_s": number_or_none(self.predicted_s),
            },
        }

    def rows(self) -> list[Mapping[str, object]]:
        """Return where the time and the memory of each device go."""
        return list(self.devices)

    def document(self) -> object:
        """Return the step, which a notebook draws."""
        return self.summary.evaluation.timeline

    def lines(self) -> list[str]:
        """Return what bounds the plan, and what its critical path does."""
        words = plan_words(self.summary, self.critical_path)
        return [*words[:2], *self.answer, *self.advice, *words[2:]]


def plan_words(summary: Summary, critical_path: Mapping[str, float]) -> list[str]:
    """Return what a plan is, what bounds it, and what its critical path does, a line each."""
    return [
        f"{summary.solution.problem.graph.name}: {summary.title}",
        f"{summary.value_line}; bound by {summary.evaluation.bottleneck}",
        f"critical path: {path_words(critical_path)}",
    ]


_GRADIENTS = {"backward_input": "input gradients", "backward_weight": "weight gradients"}


def path_words(critical_path: Mapping[str, float]) -> str:
    """Return what the critical path does, and for how long, in words.

    >>> path_words({"forward": 2.0, "all_reduce": 0.004})
    'forward 2.00 s, all-reduce 4.00 ms'
    """
    return ", ".join(
        f"{_GRADIENTS.get(what, what.replace('_', '-'))} {format_seconds(each)}"
        for what, each in critical_path.items()
    )


def explain(
    plan: PlanSource,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of ExplainRequest)
) -> Explanation:
    """Take a plan apart: where its time and memory go, what bounds it, what would change it.

    Args:
        plan: What :func:`partita.plan` returned, a solution, or the path of a file.
        on_progress: Called with each change before it is tried.
        **options: The fields of :class:`ExplainRequest`: the options of ``partita explain``.

    Raises:
        InvalidInputError: There is no such plan, or a change that is not understood.
    """
    return explain_request(make(ExplainRequest, plan=plan, **options), on_progress)


def explain_request(request: ExplainRequest, on_progress: OnProgress = silent) -> Explanation:
    """Explain what a request asks for; see :func:`explain`."""
    request = _of_run(request)
    solution, catalogue = read_solution(request), catalogue_of(request)
    kind = solution.problem.cluster.devices[0].type
    can_grow = kind in catalogue.devices and len(solution.problem.cluster) < MAX_DEVICES
    usual = (f"+1x{kind}", *USUAL) if can_grow else USUAL
    if solution.planner != DEFAULT_PLANNER:
        usual = ("replan", *usual)
    summary = summarise(solution)
    answers = []
    for change in request.what_if or usual:
        on_progress(change)
        answers.append(_answer(solution, change, catalogue, len(request.what_if or usual)))
    measured = _measured(solution, request.measured) if request.measured else None
    predicted = summary.evaluation.timeline
    return Explanation(
        summary=summary,
        stages=tuple(stage_rows(solution)),
        devices=tuple(_device_rows(summary)),
        critical_path=critical_path_s(summary),
        answer=tuple(what_bounds(summary)),
        advice=tuple(
            what_to_do(summary, request.plan if isinstance(request.plan, str) else "", answers)
        ),
        what_if=tuple(answers),
        measured=() if measured is None else tuple(_compared(solution, predicted, measured)),
        measured_s=_passes_s(measured),
        predicted_s=float("nan") if measured is None else _passes_s(predicted),
    )


def _measured(solution: Solution, given: tuple[str | Timeline, ...]) -> Timeline:
    """Return the measured timeline of traces, of a file or of a run."""
    first = given[0]
    if isinstance(first, Timeline):
        return first
    names = [name for name in given if isinstance(name, str)]
    path = Path(first)
    if (path / "timeline.json").exists() or not (len(names) > 1 or path.is_dir()):
        file = open_file(path / "timeline.json" if path.is_dir() else path)
        found = file.load() if not is_trace(file) else None
        if isinstance(found, Timeline):
            return found
        if found is not None:
            raise InvalidInputError(
                f"{first!r} holds a {type(found).__name__.lower()}; expected traces of torch's "
                "profiler, or the timeline of a run"
            )
    return trace_timeline(solution.problem, solution.plan, read_traces(names))


def _passes_s(timeline: Timeline | None) -> float:
    """Return the seconds from the start of the first pass to the end of the last."""
    if timeline is None:
        return float("nan")
    passes = np.isin(timeline.kind, sum(COMPUTE_PASSES.values(), ()))
    if not bool(passes.any()):
        return float("nan")
    return float(timeline.end_s[passes].max() - timeline.start_s[passes].min())


def _compared(
    solution: Solution, predicted: Timeline, measured: Timeline
) -> Iterator[dict[str, Any]]:
    """Yield predicted and measured seconds of a pass of each stage: medians over microbatches."""
    for stage in range(len(solution.plan.stages)):
        row: dict[str, Any] = {"stage": stage}
        for name, kinds in COMPUTE_PASSES.items():
            for what, timeline in (("predicted", predicted), ("measured", measured)):
                here = (timeline.stage == stage) & np.isin(timeline.kind, kinds)
                spent = (timeline.end_s - timeline.start_s)[here]
                # A backward in parts is the sum of its parts, microbatch by microbatch.
                sums = np.bincount(np.maximum(timeline.microbatch[here], 0), weights=spent)
                known = sums[sums > 0]
                row[f"{name}_{what}_s"] = float(np.median(known)) if len(known) else None
        yield row


def _of_run(request: ExplainRequest) -> ExplainRequest:
    """Return a request for a run directory as one for its plan, held against its timeline."""
    found = run_files(request.plan)
    if found is None:
        return request
    plan, timeline = found
    measured = request.measured or (() if timeline is None else (timeline,))
    return replace(request, plan=plan, measured=measured)


def _changed(problem: Problem, plan: Plan, change: str, catalogue: Catalogue) -> Problem:
    """Return a problem with a change of its step or of its cluster.

    Raises:
        InvalidInputError: The change is not understood.
    """
    name, sign, value = change.strip().lower().partition("=")
    if sign and name == "microbatches":
        try:
            count = round(plan.num_microbatches * float(value.removesuffix("x")))
        except ValueError:
            raise InvalidInputError(
                f"what if {short(change)} is not understood; expected microbatches=2x"
            ) from None
        size = int(plan.microbatch_sizes.max())
        objective = replace(problem.objective, microbatches=count, microbatch_size=size)
        return replace(problem, objective=objective)
    if sign and name == "schedule":
        if value not in schedule_names():
            raise InvalidInputError(
                f"what if {short(change)}: no such schedule{suggest(value, schedule_names())}"
            )
        return replace(problem, objective=replace(problem.objective, schedule=Schedule(value)))
    return replace(problem, cluster=what_if(problem.cluster, change, catalogue))


def _answer(solution: Solution, change: str, catalogue: Catalogue, changes: int) -> WhatIf:
    """Plan the changed problem again with the plan's own planner.

    All changes together have the seconds that the plan's own search had.
    """
    planner, options = solution.planner, thawed(solution.options)
    if limit := options.get("time_limit"):
        options = {**options, "time_limit": max(min(limit, TRIAL_LIMIT_S), limit / changes)}
    problem = solution.problem
    if change == "replan":
        planner, options = DEFAULT_PLANNER, {}
    else:
        problem = _changed(problem, solution.plan, change, catalogue)
    if planner in FIXED:
        return _same_plan(solution, change, problem)
    by_shape = TASK in solution.stats
    if by_shape and problem.objective != solution.problem.objective:
        note = "a plan by shape: 'partita plan' with another --batch-size searches it"
        return WhatIf(change=change, value=float("nan"), relative=float("nan"), note=note)
    try:
        found = (
            _by_shape(solution, problem) if by_shape else get_planner(planner, **options)(problem)
        )
    except (InfeasibleError, InvalidInputError) as exc:
        return WhatIf(change=change, value=float("nan"), relative=float("nan"), note=str(exc))
    if not by_shape and problem.objective == solution.problem.objective:
        found = _at_worst(problem, solution, found)
    note, more = summarise(found).title, found.plan.samples / solution.plan.samples
    if more != 1 and solution.metric is Metric.THROUGHPUT:  # a longer step of more samples
        return WhatIf(
            change=change,
            value=found.value,
            relative=_relative(solution, found.value / more),
            note=note,
            more_samples=True,
        )
    return WhatIf(
        change=change, value=found.value, relative=_relative(solution, found.value), note=note
    )


def _at_worst(problem: Problem, solution: Solution, found: Solution) -> Solution:
    """Return the plan as it is where a search on a changed cluster found none that is as good."""
    try:
        kept = judge(problem, solution.plan)
    except PartitaError:
        return found  # a device of it is gone
    if not kept.score < found.value:
        return found
    return replace(found, plan=solution.plan, value=kept.score)


def _by_shape(solution: Solution, problem: Problem) -> Solution:
    """Return the best plan of a large transformer on a changed cluster.

    Raises:
        InfeasibleError: Nothing fits.
    """
    from partita.flows.large import plan_again  # noqa: PLC0415 (plans by shape alone)

    for found in plan_again(solution, problem.cluster):
        return found
    raise InfeasibleError(f"{problem.graph.name} does not fit on {problem.cluster.name}")


def _same_plan(solution: Solution, change: str, problem: Problem) -> WhatIf:
    """A fixed map cannot be planned again: say what it would take as it is."""
    note = "a fixed map cannot be planned again; the same plan"
    if problem.objective != solution.problem.objective or change.startswith("+"):
        what = "another device" if change.startswith("+") else change.partition("=")[0]
        return WhatIf(
            change=change,
            value=float("nan"),
            relative=float("nan"),
            note=f"a fixed map cannot be planned again, so {what} changes nothing",
        )
    try:
        value = measure(problem, solution.plan).value
    except PartitaError as exc:
        return WhatIf(change=change, value=float("nan"), relative=float("nan"), note=str(exc))
    return WhatIf(change=change, value=value, relative=_relative(solution, value), note=note)


def _relative(solution: Solution, value: float) -> float:
    return value / solution.value - 1 if solution.value > 0 else float("nan")


def stage_rows(solution: Solution) -> list[dict[str, Any]]:
    """Return a row for each stage: where it runs, its times, bytes and parameters."""
    problem, plan, graph = solution.problem, solution.plan, solution.problem.graph
    seconds = stage_seconds(problem, plan)
    samples = float(plan.microbatch_sizes.max())
    crossing = crossings(graph, plan)
    moved = graph.tensors.bytes_at(np.array(samples), graph.batch_size, crossing.tensor)
    sent = np.zeros(len(plan.stages))
    _, first = np.unique(crossing.tensor, return_index=True)
    np.add.at(sent, crossing.producer[first], moved[first])
    parameter, owner = owners(graph, plan)
    weights = np.bincount(
        owner, weights=graph.parameters.bytes[parameter], minlength=len(plan.stages)
    )
    counts = np.bincount(plan.stage_of, minlength=len(plan.stages))
    rows = []
    for index, stage in enumerate(plan.stages):
        at = (int(seconds.class_of[stage.devices[0][0]]), index)
        rows.append(
            {
                "stage": index,
                "devices": [plan.devices[d] for group in stage.devices for d in group],
                "replicas": stage.num_replicas,
                "tp": stage.tp,
                "ops": int(counts[index]),
                "first_op": graph.ops.names[int(np.argmax(plan.stage_of == index))],
                "forward_s": float(seconds.forward[0][at] + samples * seconds.forward[1][at]),
                "backward_s": float(seconds.backward[0][at] + samples * seconds.backward[1][at]),
                "parameter_bytes": float(weights[index]),
                "sent_bytes": float(sent[index]),
            }
        )
    return rows


def _device_rows(summary: Summary) -> list[dict[str, Any]]:
    problem, plan = summary.solution.problem, summary.solution.plan
    timeline = summary.evaluation.timeline
    memory = summary.evaluation.memory
    spent = timeline.end_s - timeline.start_s
    where = cluster_devices(problem, plan.devices)
    rows = []
    for index, name in enumerate(timeline.devices):
        here = timeline.device == index

        def total(kinds: tuple[Kind, ...], mask: Any = here) -> float:  # noqa: ANN401
            return float(spent[mask & np.isin(timeline.kind, kinds)].sum())

        rows.append(
            {
                "device": name,
                "type": problem.cluster.devices[int(where[index])].type,
                "forward_s": total((Kind.FORWARD,)),
                "backward_s": total((Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)),
                "recompute_s": total((Kind.RECOMPUTE,)),
                "load_s": total((Kind.LOAD,)),
                "update_s": total((Kind.UPDATE,)),
                "communicating_s": (apart_s := float(timeline.exposed_s[index])),
                "idle_s": max(0.0, timeline.makespan_s - float(timeline.busy_s[index]) - apart_s),
                "sending_s": total((Kind.SEND,)),
                **memory.to_json(index),
                "optimizer_bytes": float(memory.optimizer[index]),
                "limit_bytes": number_or_none(float(timeline.limit_bytes[index])),
                "utilisation": float(timeline.utilisation[index]),
                "bubble": float(timeline.bubble[index]),
            }
        )
    return rows


def critical_path_s(summary: Summary) -> dict[str, float]:
    """Return the seconds of the critical path by what it does."""
    timeline = summary.evaluation.timeline
    path = timeline.critical_path
    spent = timeline.end_s[path] - timeline.start_s[path]
    result: dict[str, float] = {}
    for kind in sorted({int(k) for k in timeline.kind[path]}):
        seconds = float(spent[timeline.kind[path] == kind].sum())
        if seconds > 0:
            name = Kind(kind).name.lower()
            if kind <= LAST_COMPUTE:
                result[name] = seconds
            else:
                result["transfer" if kind == Kind.SEND else name] = seconds
    return result
