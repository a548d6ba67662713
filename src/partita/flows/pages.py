"""Pages of plans, comparisons, runs, frontiers and fleets: which figures are shown, in what words.

Everything they say is computed by the rooms above; `partita.report` draws it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from partita.core.columns import Array
from partita.core.energy import Frontier
from partita.core.metrics import Metric
from partita.core.solution import Proof
from partita.core.timeline import Timeline
from partita.cost.memory import MemoryBreakdown
from partita.documents import load
from partita.energy.frontier.savings import model_of, played, savings
from partita.errors import FormatError
from partita.fleet.study.study import Run
from partita.flows.answer import Answer, distinct_words
from partita.flows.answer_first import what_bounds
from partita.flows.explain import critical_path_s, plan_words, stage_rows
from partita.flows.summary import Summary, describe_plan, summarise
from partita.report.figures import (
    Figure,
    TableColumn,
    Track,
    breakdown_figure,
    cluster_figure,
    graph_figure,
    memory_figure,
    memory_parts_figure,
    table_figure,
    timeline_figure,
)
from partita.report.page import Page, Section
from partita.report.study_figures import (
    clocks_figure,
    comparison_figures,
    fleet_figures,
    frontier_figure,
    losses_figure,
    search_figure,
    steps_figure,
)
from partita.runtime.directory import PastRun
from partita.runtime.metric_rows import read_metrics
from partita.units import format_bytes, format_joules, format_seconds, format_share

MOST_SIDE_BY_SIDE = 4
"""Plans whose timelines stand below one another; all are in the table."""
MOST_NAMES = 16
"""Devices of a stage that its row names."""
_MOST_BARS = 400_000
"""Bars of all points of a frontier together."""
_MOST_POINTS = 24
_SHARE = "share"


def plan_page(
    answer: Answer,
    *,
    searched: Sequence[tuple[float, float]] = (),
    frontier: Frontier | None = None,
    command: str = "",
) -> Page:
    """Return the page of a plan: who does what when, where time and memory go, what else there is.

    Args:
        answer: The plan with its alternatives.
        searched: Seconds and value of each new best of the search.
        frontier: The clocks of the plan, where they were chosen for energy.
        command: The command that makes the same.
    """
    summary = answer.summary
    solution, evaluation = summary.solution, summary.evaluation
    problem, timeline = solution.problem, evaluation.timeline
    sections = [
        Section(figures=[cluster_figure(problem.cluster, solution.plan)]),
        Section(figures=[graph_figure(problem.graph, solution.plan)]),
        Section(title="A step", figures=_step_figures(summary, [_predicted(timeline)])),
        Section(
            figures=[
                breakdown_figure(timeline),
                memory_parts_figure(timeline, _memory_parts(evaluation.memory)),
            ],
            wide=False,
        ),
        Section(figures=[stages_figure(summary)]),
    ]
    others = _alternatives_figure(answer)
    sections += [Section(figures=[others])] if others else []
    if len(searched) > 1:
        found = search_figure(searched, solution.unit, solution.lower_bound)
        sections.append(Section(figures=[found]))
    sections += _frontier_sections(frontier) if frontier is not None else []
    return Page(
        title=f"{problem.graph.name} on {problem.cluster.name}",
        subtitle=f"{summary.title} · {timeline.origin.value} · planner {solution.planner or '-'}",
        summary=_paragraph([*_plan_sentences(summary), _overfull(summary)]),
        facts=_facts(summary),
        sections=sections,
        command=command,
        notes=evaluation.assumptions,
    )


def _paragraph(lines: Sequence[str]) -> str:
    """Return lines as sentences of one paragraph; those that begin with a name begin as it does."""
    return " ".join(f"{line}." for line in lines if line)


def _plan_sentences(summary: Summary) -> list[str]:
    """Return what a plan is and what bounds it, in the words of ``explain``."""
    words = plan_words(summary, critical_path_s(summary))
    # The seconds of a step are in the answer; other objectives have values of their own.
    value = [] if summary.solution.metric is Metric.THROUGHPUT else [summary.value_line]
    about, path = words[0], f"The {words[2]}"
    return [about, *value, *map(_begun, what_bounds(summary)), path]


def _begun(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _overfull(summary: Summary) -> str:
    return f"It does not fit: {summary.overfull}" if summary.overfull else ""


def _predicted(timeline: Timeline) -> Track:
    return Track(name="predicted", timeline=timeline)


def _step_figures(summary: Summary, tracks: Sequence[Track]) -> list[Figure]:
    cluster = summary.solution.problem.cluster
    figures = [timeline_figure(tracks, cluster=cluster)]
    if len(tracks[0].timeline.memory_device):
        figures.append(memory_figure(tracks[0].timeline, cluster=cluster))
        if len(tracks) > 1:
            figures[-1]["title"] = "Memory, predicted, on the same axis"
    return figures


def _facts(summary: Summary) -> list[tuple[str, str]]:
    """Return the figures that matter most, as text, with what they are."""
    solution, evaluation = summary.solution, summary.evaluation
    timeline = evaluation.timeline
    facts = [(format_seconds(evaluation.step_s), "step")]
    facts.append((format_share(float(timeline.utilisation.mean())), "busy"))
    if solution.proof is Proof.OPTIMAL:
        facts.append(("the best", "no plan can be better"))
    elif solution.lower_bound > 0:
        facts.append((format_share(solution.gap), "above the bound, at most"))
    if math.isfinite(evaluation.samples_per_s):
        facts.append((f"{evaluation.samples_per_s:.4g}", "samples/s"))
    if math.isfinite(evaluation.tokens_per_s):
        facts.append((f"{evaluation.tokens_per_s:,.0f}", "tokens/s"))
    fullest = int(np.argmax(timeline.peak_bytes / timeline.limit_bytes))
    peak = format_bytes(float(timeline.peak_bytes[fullest]))
    limit = float(timeline.limit_bytes[fullest])
    known = math.isfinite(limit)
    used = f" of {format_bytes(limit)}, the fullest device" if known else ""
    facts.append((peak, f"memory{used}"))
    facts.append((f"{len(timeline.devices):,}", "devices"))
    facts.append((f"{len(timeline):,}", "instructions"))
    return facts


def _memory_parts(memory: MemoryBreakdown) -> dict[str, Array]:
    named = ("weights", "gradients", "master", "state", "activations", "buffers", "workspace")
    return {name: getattr(memory, name) for name in named}


_STAGE_COLUMNS = (
    *(TableColumn("stage"), TableColumn("devices"), TableColumn("ops"), TableColumn("first op")),
    *(TableColumn("forward", "s"), TableColumn("backward", "s")),
    *(TableColumn("parameters", "bytes"), TableColumn("sends", "bytes")),
)
_STAGE_KEYS = (
    *("stage", "devices", "ops", "first_op", "forward_s", "backward_s"),
    *("parameter_bytes", "sent_bytes"),
)


def _few(names: Sequence[str]) -> str:
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:3])} ... {names[-1]} ({len(names):,} devices)"


def stages_figure(summary: Summary, title: str = "Stages") -> Figure:
    """Return the stages of a plan as a table."""
    rows = []
    for row in stage_rows(summary.solution):
        shown = {**row, "devices": _few(row["devices"])}
        rows.append([shown[key] for key in _STAGE_KEYS])
    return table_figure(title, _STAGE_COLUMNS, rows)


def _alternatives_figure(answer: Answer) -> Figure | None:
    if not answer.alternatives:
        return None
    solution = answer.summary.solution
    columns = (TableColumn("plan"), TableColumn("value", solution.unit))
    rows: list[list[Any]] = [[f"{answer.summary.title} (this one)", solution.value, 0.0]]
    rows += [[each.words, each.value, each.ratio - 1] for each in answer.alternatives]
    title = "Other plans that were found"
    return table_figure(title, (*columns, TableColumn("against this one", "change")), rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPlan:
    """A plan that is compared with others.

    Attributes:
        name: Its planner, or its file.
        summary: The plan and its figures.
    """

    name: str
    summary: Summary


@dataclass(frozen=True, slots=True)
class _Measure:
    """What plans are ranked by.

    Attributes:
        column: Its column.
        of: Its value of a plan.
        is_step: Whether it is the time of a step.
        more: What a plan with a larger value does, between its name and a share.
        per: What the share is of, after it.
    """

    column: TableColumn
    of: Callable[[Summary], float]
    is_step: bool = False
    more: str = "longer"
    per: str = ""


_STEP = _Measure(TableColumn("step", "s"), lambda each: each.evaluation.step_s, is_step=True)


def _measure_of(plans: Sequence[NamedPlan]) -> _Measure:
    """Return what tells which plan is better: steps of different work say nothing."""
    solutions = [each.summary.solution for each in plans]
    metrics = {solution.metric for solution in solutions}
    if len(metrics) == 1 and Metric.THROUGHPUT not in metrics:
        first = solutions[0]
        column = TableColumn(first.metric.value, first.unit)
        per = f" by {first.metric.value}"
        return _Measure(column, lambda each: each.solution.value, more="more", per=per)
    if len({solution.plan.samples for solution in solutions}) == 1:
        return _STEP
    column = TableColumn("per sample", "s")
    return _Measure(
        column, lambda each: each.evaluation.step_s / each.solution.plan.samples, per=" per sample"
    )


_COMPARED = (
    *(TableColumn("against the first", "change"), TableColumn("busy", _SHARE)),
    *(TableColumn("most memory", _SHARE), TableColumn("samples/s")),
)


def compare_page(plans: Sequence[NamedPlan], *, title: str, command: str = "") -> Page:
    """Return several plans side by side, the best first, their steps on one axis.

    They are ranked by their objective where all have another one than throughput, else by the time
    of a step, or of a sample where their steps hold different numbers of samples.
    """
    measure = _measure_of(plans)
    ranked = sorted(plans, key=lambda each: measure.of(each.summary))
    best = ranked[0].summary
    longest = max(each.summary.evaluation.timeline.makespan_s for each in ranked)
    rows = []
    for each in ranked:
        found = each.summary.evaluation
        timeline = found.timeline
        rows.append(
            [
                each.name,
                each.summary.title,
                found.step_s,
                *([] if measure.is_step else [measure.of(each.summary)]),
                measure.of(each.summary) / measure.of(best) - 1,
                float(timeline.utilisation.mean()),
                float((timeline.peak_bytes / timeline.limit_bytes).max()),
                found.samples_per_s,
            ]
        )
    figures = [
        timeline_figure(
            [_predicted(each.summary.evaluation.timeline)],
            cluster=each.summary.solution.problem.cluster,
            title=f"{rank}. {each.name}: {each.summary.title}, "
            f"{format_seconds(each.summary.evaluation.step_s)}",
            axis="compare",
            length_s=longest,
            steers=rank == 1,
        )
        for rank, each in enumerate(ranked[:MOST_SIDE_BY_SIDE], 1)
    ]
    hidden = len(ranked) - len(figures)
    word = "the best" if measure.more == "more" else "the fastest"
    sentences = [
        f"{len(ranked)} plans for {title}: {ranked[0].name} is {word}{measure.per}, {best.title}, "
        f"{format_seconds(best.evaluation.step_s)} a step",
        *map(_begun, what_bounds(best)),
        *(_difference(each, best, measure) for each in ranked[1:]),
    ]
    columns = [TableColumn("name"), TableColumn("plan"), _STEP.column]
    columns += [] if measure.is_step else [measure.column]
    notes = [f"the timelines of {hidden} more plans are left out"] if hidden > 0 else []
    return Page(
        title=f"{title}: {len(ranked)} plans",
        summary=_paragraph(sentences),
        facts=_facts(best),
        sections=[
            Section(figures=[table_figure(f"Plans, {word} first", [*columns, *_COMPARED], rows)]),
            Section(title="Steps on one axis", figures=figures),
            Section(figures=[stages_figure(best, f"Stages of {ranked[0].name}")]),
        ],
        command=command,
        notes=[*best.evaluation.assumptions, *notes],
    )


def _difference(each: NamedPlan, best: Summary, measure: _Measure) -> str:
    """Return how a plan differs from the best one, in words."""
    problem = each.summary.solution.problem
    slower = measure.of(each.summary) / measure.of(best) - 1
    same = problem.graph.fingerprint == best.solution.problem.graph.fingerprint
    plan = each.summary.solution.plan
    words = distinct_words(problem, plan, best.solution.plan) if same else describe_plan(plan)
    return f"{each.name} takes {format_share(slower)} {measure.more}{measure.per}: {words}"


def run_page(run: PastRun, *, command: str = "") -> Page:
    """Return the page of a run: measured below predicted, losses, and where it differed.

    Raises:
        FormatError: The directory holds no plan that can be read.
    """
    path = run.path
    if not (path / "plan.json").exists():
        raise FormatError("holds no plan.json, which runs of ours leave", path=str(path))
    summary = summarise(load(path / "plan.json"))
    predicted = summary.evaluation.timeline
    measured = _measured(path, predicted)
    tracks = [_predicted(predicted)]
    if measured is not None:
        tracks.append(Track(name=measured.origin.value, timeline=measured))
    rows, results = read_metrics(path), run.results
    report: Mapping[str, Any] = results.get("report") or {}
    curves = [losses_figure(rows), steps_figure(rows, summary.evaluation.step_s)]
    drawn = [curve for curve in curves if curve is not None]
    peaks = dict(zip(predicted.devices, predicted.peak_bytes.tolist(), strict=True))
    breakdown = breakdown_figure(measured or predicted)
    side = "measured" if measured is not None else "predicted"
    breakdown["title"] = f"{breakdown['title']}, {side}"
    parts = memory_parts_figure(predicted, _memory_parts(summary.evaluation.memory))
    parts["title"] = f"{parts['title']}, predicted"
    problem, step_s = summary.solution.problem, results.get("median_step_s")
    sections = [
        Section(
            title="A step, predicted and measured" if measured else "A step",
            figures=_step_figures(summary, tracks),
            words=["Below each predicted lane is the last measured step, on the same axis."]
            if measured
            else ["The run left no timeline; this is the prediction."],
        ),
        Section(figures=drawn, wide=False),
        Section(figures=[breakdown, parts], wide=False),
        Section(figures=comparison_figures(report, peaks)),
        Section(figures=[cluster_figure(problem.cluster, summary.solution.plan)]),
        Section(figures=[stages_figure(summary)]),
    ]
    return Page(
        title=run.name,
        subtitle=f"{problem.graph.name} on {problem.cluster.name} · {summary.title}",
        summary=_paragraph([*_run_words(run, summary), *_predicted_words(summary)]),
        facts=_run_facts(results, summary, step_s),
        sections=[section for section in sections if section.figures],
        command=command,
        notes=summary.evaluation.assumptions,
    )


def _measured(path: Path, predicted: Timeline) -> Timeline | None:
    """Return the timeline that a run left, if it is one of the same devices."""
    if not (path / "timeline.json").exists():
        return None
    found = load(path / "timeline.json")
    fits = isinstance(found, Timeline) and found.devices == predicted.devices
    return found if fits else None


def _predicted_words(summary: Summary) -> list[str]:
    first, *others = what_bounds(summary)
    return [f"By the prediction, {first}", *map(_begun, others)]


def _run_words(run: PastRun, summary: Summary) -> list[str]:
    results = run.results
    measured, predicted = results.get("median_step_s"), summary.evaluation.step_s
    words = [f"{run.name} trained {results.get('model', 'a model')} by {summary.title}"]
    if isinstance(measured, int | float) and measured > 0:
        words.append(
            f"A step took {format_seconds(measured)}, {format_seconds(predicted)} were predicted "
            f"({format_share(predicted / measured - 1, sign=True)})"
        )
    if run.differs is not None:
        words.append(
            "Its losses and gradients differ from those of one process"
            if run.differs
            else "Its losses and gradients equal those of one process"
        )
    return words


def _run_facts(
    results: Mapping[str, Any], summary: Summary, step_s: float | None
) -> list[tuple[str, str]]:
    facts = [(str(results.get("steps", "-")), "steps")]
    if step_s:
        facts.append((format_seconds(step_s), "step, measured"))
    facts.append((format_seconds(summary.evaluation.step_s), "step, predicted"))
    losses = [loss for loss in results.get("losses") or () if isinstance(loss, int | float)]
    if losses:
        facts.append((f"{losses[0]:.4g} → {losses[-1]:.4g}", "loss"))
    if isinstance(rate := results.get("samples_per_s"), int | float):
        facts.append((f"{rate:.4g}", "samples/s"))
    return facts


def frontier_page(frontier: Frontier, *, name: str, command: str = "") -> Page:
    """Return the page of a frontier: the curve, and the pipeline at each of its points."""
    solution = frontier.solution
    base, cheapest = savings(frontier), int(frontier.energy_j.argmin())
    least, least_s = float(frontier.energy_j[cheapest]), float(frontier.time_s[cheapest])
    sentences = [
        f"A step of {name} needs {format_joules(frontier.all_max_j)} and takes "
        f"{format_seconds(frontier.all_max_s)} with all clocks at their highest",
        f"Other clocks save {format_share(base.saving)} in the same time",
        f"The least is {format_joules(least)}, {format_share(1 - least / frontier.all_max_j)} "
        f"less, in {format_seconds(least_s)}",
        f"No clocks save more than another {format_share(float(frontier.gap.max()))} at any point",
    ]
    facts = [
        (format_share(base.saving), "less energy, no slower"),
        (format_joules(frontier.all_max_j), "with all clocks at their highest"),
        (format_joules(base.energy_j), "at the same time"),
        (format_seconds(least_s), "step of least energy"),
        (str(len(frontier)), "points"),
    ]
    sections = _frontier_sections(frontier)
    if solution is not None:
        figure = cluster_figure(solution.problem.cluster, solution.plan)
        sections.append(Section(figures=[figure]))
    return Page(
        title=f"{name}: time against energy",
        subtitle=(f"{describe_plan(solution.plan)} · " if solution is not None else "")
        + f"energy is {frontier.origin.value}",
        summary=_paragraph(sentences),
        facts=facts,
        sections=sections,
        command=command,
        notes=() if frontier.profile is not None else ("the frontier carries no plan to draw",),
    )


def _frontier_sections(frontier: Frontier) -> list[Section]:
    figures = [frontier_figure(frontier) | {"follows": "point"}]
    if frontier.solution is not None and frontier.profile is not None:
        model = model_of(frontier.solution, frontier.profile)
        room = _MOST_BARS // max(1, len(model.program))
        count = min(len(frontier), _MOST_POINTS, max(2, room))
        points = sorted(set(np.linspace(0, len(frontier) - 1, count).round().astype(int).tolist()))
        steps = {point: played(model, frontier.clocks(point)).timeline for point in points}
        cluster = frontier.solution.problem.cluster
        figures.append(clocks_figure(frontier, steps, cluster=cluster))
    return [Section(title="Time against energy", figures=figures)]


def fleet_page(runs: Sequence[Run], *, title: str, command: str = "") -> Page:
    """Return the page of a fleet study: policies side by side, and what happened over time."""
    runs = sorted(runs, key=lambda run: run.metrics.mean_s)
    best = runs[0]
    table, *charts = fleet_figures(runs)
    worst = runs[-1]
    sentences = [
        f"{title}: {best.metrics.jobs:,} jobs on {best.history.num_gpus:,} GPUs in "
        f"{len(best.history.servers):,} servers, {len(runs)} runs",
        f"{best.title} has the least mean completion time, {format_seconds(best.metrics.mean_s)}",
    ]
    if worst is not best:
        longer = worst.metrics.mean_s / best.metrics.mean_s - 1
        sentences.append(f"{worst.title} has the most, {format_share(longer)} longer")
    facts = [
        (format_seconds(best.metrics.mean_s), "mean completion time"),
        (format_seconds(best.metrics.p99_s), "99th percentile"),
        (format_seconds(best.metrics.makespan_s), "until the last job ended"),
        (format_share(best.use.gpus), "GPUs in use"),
        (best.title, "the best policy"),
    ]
    return Page(
        title=f"{title}: policies side by side",
        summary=_paragraph(sentences),
        facts=facts,
        sections=[
            Section(figures=[table]),
            Section(title="Over time", figures=charts, wide=False),
        ],
        command=command,
    )
