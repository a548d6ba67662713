"""One page for one question: this model on these machines, what should I do?

Everything on it comes from other flows: the plan of :func:`partita.plan`, what bounds it and what
would change it as ``explain`` says it, files as ``export`` writes them. Nothing is searched in
another way here.
"""

import math
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from partita.core.columns import number_or_none
from partita.core.graph import MODEL_ANNOTATION, CostOrigin
from partita.core.precision import parse_precision
from partita.core.solution import Solution
from partita.cost.power import step_joules
from partita.documents import save
from partita.errors import InfeasibleError, InvalidInputError, PartitaError, UnsupportedError
from partita.flows.answer import Answer, answer_of
from partita.flows.answer_first import what_bounds
from partita.flows.explain import ExplainRequest, explain_request
from partita.flows.export import ExportRequest, export_request, made_folder
from partita.flows.fields import DegreeFields, Model, PlannerFields
from partita.flows.large import LargePlanResult
from partita.flows.pages import plan_page
from partita.flows.plan import PlanRequest, PlanResult, plan_request
from partita.flows.problem import ProblemRequest
from partita.flows.results import Result
from partita.flows.summary import Summary, estimate_basis
from partita.report.page import Page, Section
from partita.requests import OnProgress, arguments_of, declare, make, part, silent
from partita.transformer.kernels import accuracy_line
from partita.units import (
    format_bytes,
    format_count,
    format_duration,
    format_joules,
    format_money,
    format_seconds,
    format_share,
    parse_count,
)

SHOWN = 3
"""Changes and alternatives that are shown."""
WORTH = 0.01
"""Share of the time per sample that a change has to gain."""
TRAINERS = ("megatron", "torchtitan", "deepspeed", "accelerate")
"""Trainers that a plan is exported to, the first that can hold it."""
LAUNCHERS = ("torchrun", "sbatch")
"""Launchers of our own runs."""


@dataclass(frozen=True, kw_only=True)
class AdviseRequest(ProblemRequest, PlannerFields, DegreeFields):
    """A model and a cluster, and where to write what starts the plan."""

    output: str | None = declare(
        None,
        flags=("-o",),
        metavar="DIR",
        path="folder",
        help="Directory for the plan and the files that start it.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change that would make the training faster.

    Attributes:
        what: The change in a few words.
        command: The command that advises on it.
        relative: Change of the time per sample, negative where it is faster.
        note: The plan that it gives.
        more_samples: Whether a step of it has other samples.
    """

    what: str
    command: str
    relative: float
    note: str
    more_samples: bool = False

    @property
    def line(self) -> str:
        """The change in words."""
        return f"{self.gain}: {self.command} ({self.note})"

    @property
    def gain(self) -> str:
        """How much less time it takes."""
        each = " per sample" if self.more_samples else ""
        return f"{format_share(self.relative, sign=True)} time{each}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Files that start the plan, and how.

    Attributes:
        what: Who runs it.
        command: What to type.
        written: The files.
    """

    what: str
    command: str
    written: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Advice(Result):
    """What to do with a model on a cluster.

    Attributes:
        answer: The plan, its simulated step and its alternatives.
        assumed: What was assumed, by what it is.
        words: The plan in words.
        fit_line: Whether it fits, and how full the fullest device is.
        step_s: Seconds of a step.
        error: How good that figure is, a sentence.
        tokens_per_s: Tokens per second; NaN where samples have none.
        samples_per_s: Samples per second; NaN where the graph does not know its samples.
        mfu: Share of the devices' peak that the model's arithmetic reaches; NaN = not known.
        price_per_hour: Money for an hour of the devices that are used; NaN = not known.
        joules: Modelled energy of a step, highest clocks; NaN = not known.
        tokens: Tokens of the whole training; NaN = not given.
        bounds: What bounds the step, a sentence each.
        changes: The changes that pay most, the best first.
        tried: All changes that were tried, in words.
        alternatives: Other plans in words, and their time relative to the plan's.
        refusals: By trainer and launcher why it cannot run the plan; empty where it can.
        starts: Files that were written.
        command: The command that asks for the same.
    """

    answer: Answer
    assumed: Mapping[str, str]
    words: str
    fit_line: str
    step_s: float
    error: str
    tokens_per_s: float
    samples_per_s: float
    mfu: float
    price_per_hour: float
    joules: float
    tokens: float
    bounds: tuple[str, ...]
    changes: tuple[Change, ...]
    tried: tuple[str, ...]
    alternatives: tuple[tuple[str, float], ...]
    refusals: Mapping[str, str]
    starts: tuple[Start, ...]
    command: str

    @property
    def solution(self) -> Solution:
        """The plan with its problem."""
        return self.answer.summary.solution

    @property
    def training_s(self) -> float:
        """Seconds of the whole training; NaN without a number of tokens."""
        return self.tokens / self.tokens_per_s

    @property
    def training_price(self) -> float:
        """Money for the whole training; NaN where it is not known."""
        return self.price_per_hour * self.training_s / 3600

    @property
    def training_j(self) -> float:
        """Modelled energy of the whole training; NaN where it is not known."""
        return self.joules / self.step_s * self.training_s

    @property
    def speed_line(self) -> str:
        """How fast it is."""
        parts = [f"{format_seconds(self.step_s)} per step"]
        if math.isfinite(self.tokens_per_s):
            parts.append(f"{format_count(self.tokens_per_s)} tokens/s")
        elif math.isfinite(self.samples_per_s):
            parts.append(f"{format_count(self.samples_per_s)} samples/s")
        if math.isfinite(self.mfu):
            parts.append(f"MFU {format_share(self.mfu)}")
        return " · ".join(parts)

    @property
    def money_line(self) -> str:
        """What it costs: money, time and energy, as far as they are known."""
        parts = []
        if math.isfinite(self.price_per_hour):
            parts.append(f"{format_money(self.price_per_hour)} per hour")
        if math.isfinite(self.joules):
            parts.append(f"{format_joules(self.joules)} per step (modelled)")
        if math.isfinite(self.training_s):
            takes = [format_duration(self.training_s)]
            takes += [format_money(self.training_price)] * math.isfinite(self.training_price)
            if math.isfinite(self.training_j):
                takes.append(f"{self.training_j / 3.6e9:,.3g} MWh")
            parts.append(f"{format_count(self.tokens)} tokens take {', '.join(takes)}")
        return " · ".join(parts) or "prices and powers of these devices are not known"

    def change_lines(self) -> list[str]:
        """Return the changes that pay, a line each, or that none does."""
        if self.changes:
            return [change.line for change in self.changes]
        return [f"none pays: tried were {', '.join(self.tried)}"] if self.tried else []

    def alternative_lines(self) -> list[str]:
        """Return the other plans, a line each."""
        return [f"{words}: {format_share(more, sign=True)}" for words, more in self.alternatives]

    def start_lines(self) -> list[str]:
        """Return how to start it, a line each."""
        return [*(f"{start.what}: {start.command}" for start in self.starts), *self.start_notes()]

    def start_notes(self) -> list[str]:
        """Return what is to be said beside the commands that start it."""
        able = [name for name, why in self.refusals.items() if not why]
        lines = []
        if not self.starts:
            files = f" and files for {', '.join(able)}" if able else ""
            lines = [f"-o DIR writes the plan{files}"]
        if not set(able) & set(TRAINERS):
            name = next(name for name in self.refusals if name in TRAINERS)
            lines.append(
                f"no trainer can hold it ({self.refusals[name]}); --for NAME plans for one"
            )
        return lines

    def lines(self) -> list[str]:
        """Return the page without its picture."""
        problem = self.solution.problem
        assumed = ", ".join(f"{what} {value}" for what, value in self.assumed.items())
        return [
            f"{problem.graph.name} on {problem.cluster.name}: {self.words}",
            f"assumed: {assumed}",
            f"fits: {self.fit_line}",
            f"speed: {self.speed_line}; {self.error}",
            f"cost: {self.money_line}",
            *(f"why: {line}" for line in self.bounds),
            *(f"change: {line}" for line in self.change_lines()),
            *(f"or: {line}" for line in self.alternative_lines()),
            *(f"start: {line}" for line in self.start_lines()),
        ]

    def document(self) -> object:
        """Return the step, which a notebook draws."""
        return self.answer.summary.evaluation.timeline

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values under stable keys; what is not known is null."""
        problem = self.solution.problem
        figures = (
            *("step_s", "tokens_per_s", "samples_per_s", "mfu", "price_per_hour", "joules"),
            *("tokens", "training_s", "training_price", "training_j"),
        )
        return {
            "model": problem.graph.name,
            "cluster": problem.cluster.name,
            "assumed": dict(self.assumed),
            "fits": self.fit_line,
            "plan": self.words,
            **{name: number_or_none(getattr(self, name)) for name in figures},
            "error": self.error,
            "bounds": list(self.bounds),
            "changes": [
                {"command": each.command, "relative": each.relative, "plan": each.note}
                for each in self.changes
            ],
            "tried": list(self.tried),
            "alternatives": [{"plan": words, "relative": x} for words, x in self.alternatives],
            "targets": dict(self.refusals),
            "starts": [
                {"what": each.what, "command": each.command, "written": list(each.written)}
                for each in self.starts
            ],
            "command": self.command,
        }

    def page(self) -> Page:
        """Return the advice as a page: its words, then the figures of its plan."""
        found = plan_page(self.answer, command=self.command)
        told = {
            "What was assumed": [f"{what}: {value}" for what, value in self.assumed.items()],
            "What bounds it": self.bounds,
            "What pays most": self.change_lines(),
            "What else there is": self.alternative_lines(),
            "How to start it": self.start_lines(),
        }
        sections = [Section(title=name, words=words) for name, words in told.items() if words]
        sentences = (
            f"Does it fit? {self.fit_line}",
            f"The plan: {self.words}",
            f"Speed: {self.speed_line}; {self.error}",
            f"Cost: {self.money_line}",
        )
        summary = " ".join(f"{sentence}." for sentence in sentences)
        return replace(found, summary=summary, sections=[*sections, *found.sections])


def advise(
    model: Model | None = None,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of AdviseRequest)
) -> Advice:
    """Say in one page what to do with a model on a cluster.

    Args:
        model: A built-in name, a large transformer, a config.json, a file, or the graph itself.
        on_progress: Called with each step.
        **options: The fields of :class:`AdviseRequest`: the options of ``partita advise``.

    Raises:
        InvalidInputError: There is no such model, cluster, planner or option.
        InfeasibleError: Nothing fits; says what would make it fit.
    """
    return advise_request(make(AdviseRequest, model=model, **options), on_progress)


def advise_request(request: AdviseRequest, on_progress: OnProgress = silent) -> Advice:
    """Advise on what a request asks for; see :func:`advise`."""
    tokens = math.nan if request.tokens is None else parse_count(request.tokens, "tokens")
    if request.output is not None:
        made_folder(request.output)  # before the search, which takes longer
    found = plan_request(_planned(request), on_progress)
    is_graph = isinstance(found, PlanResult)
    answer = found.answer if isinstance(found, PlanResult) else answer_of(found.solution)
    if is_graph and not math.isnan(tokens) and math.isnan(answer.summary.evaluation.tokens_per_s):
        raise InvalidInputError("--tokens is for models of tokens; samples of this one have none")
    tried = list(_tried(request, found, on_progress))
    paying = [each for each in tried if each.relative <= -WORTH]
    on_progress("which trainers and launchers can run it")
    refusals = _refusals(found.solution, request)
    return Advice(
        answer=answer,
        assumed=_assumed(found, answer),
        bounds=tuple(what_bounds(answer.summary)),
        changes=tuple(sorted(paying, key=lambda each: each.relative)[:SHOWN]),
        tried=tuple(each.what for each in tried),
        alternatives=tuple(_alternatives(found)),
        refusals=refusals,
        starts=tuple(_starts(found.solution, refusals, request.output)),
        tokens=tokens,
        command=_command(request),
        **_figures(found, answer),
    )


def _planned(request: AdviseRequest) -> PlanRequest:
    """Return what is planned; the tokens of the whole training are counted here, for all models."""
    return replace(part(PlanRequest, request), tokens=None)


def _figures(found: PlanResult | LargePlanResult, answer: Answer) -> dict[str, Any]:
    """Return the figures of a plan by the names of the fields of an advice."""
    evaluation, solution = answer.summary.evaluation, found.solution
    if isinstance(found, LargePlanResult):
        return {
            "words": f"{found.best.title}: {answer.summary.title}",
            "fit_line": _fit_line(answer.summary, found.best.memory["fixed"]),
            "step_s": found.best.step_s,
            "error": accuracy_line(found.accuracy),
            "tokens_per_s": found.tokens_per_s,
            "samples_per_s": found.task.batch / found.best.step_s,
            "mfu": found.mfu,
            "price_per_hour": found.price_per_hour,
            "joules": found.joules_per_token * found.task.tokens,
        }
    measured = solution.problem.graph.costs[0].origin is CostOrigin.MEASURED
    try:
        joules = step_joules(
            solution.problem, solution.plan, evaluation.timeline, evaluation.step_s
        )
    except UnsupportedError:
        joules = math.nan
    return {
        "words": answer.summary.title,
        "fit_line": _fit_line(answer.summary),
        "step_s": evaluation.step_s,
        "error": "simulated from measured times of ops"
        if measured
        else "simulated from estimated times of ops: no run of this plan was measured, the error "
        "is not known",
        "tokens_per_s": evaluation.tokens_per_s,
        "samples_per_s": evaluation.samples_per_s,
        "mfu": evaluation.flop_utilisation,
        "price_per_hour": evaluation.price_per_step / evaluation.step_s * 3600,
        "joules": joules,
    }


def _fit_line(summary: Summary, fixed_bytes: float = 0.0) -> str:
    """Return whether a plan fits, with the peak that its picture shows.

    Args:
        summary: What the plan does.
        fixed_bytes: What context and communicators need besides, where that is known.
    """
    if summary.overfull:
        return f"no: {summary.overfull}"
    timeline = summary.evaluation.timeline
    fullest = int(np.argmax(timeline.peak_bytes / timeline.limit_bytes))
    peak, limit = float(timeline.peak_bytes[fullest]), float(timeline.limit_bytes[fullest])
    beside = f", and {format_bytes(fixed_bytes)} for context and communicators,"
    beside = beside if fixed_bytes else ""
    if not math.isfinite(limit):
        return f"yes: {format_bytes(peak)} on {timeline.devices[fullest]}, no limit is known"
    return (
        f"yes: the fullest device, {timeline.devices[fullest]}, needs {format_bytes(peak)}"
        f"{beside} of the {format_bytes(limit)} that may be used"
    )


def _assumed(found: PlanResult | LargePlanResult, answer: Answer) -> dict[str, str]:
    """Return what the figures rest on, and the options that say otherwise."""
    problem, plan = found.solution.problem, found.solution.plan
    assumed: dict[str, str] = {}
    if isinstance(found, LargePlanResult):
        task = found.task
        assumed["precision"] = f"{task.precision} (--precision)"
        assumed["optimizer"] = f"{task.optimizer} (--optimizer)"
        assumed["framework"] = f"{task.framework} (--for)"
        assumed["length"] = f"{task.sequence_length:,} tokens per sequence (--sequence-length)"
    else:
        policy, basis = problem.objective.precision, estimate_basis(problem.graph)
        arithmetic = problem.graph.dtype if basis is None else basis["arithmetic"]
        assumed["precision"] = f"{policy.name if policy else arithmetic} (--precision)"
        if problem.graph.tokens_per_sample:
            assumed["length"] = f"{problem.graph.tokens_per_sample:,} tokens per sample"
    assumed["batch"] = (
        f"{plan.samples:,} samples in {plan.num_microbatches:,} microbatches (--batch-size)"
    )
    reserve = 1 - problem.objective.memory_factor
    assumed["reserve"] = f"{format_share(reserve)} of memory left free (--reserve)"
    used = [device for device in problem.cluster.devices if device.name in set(plan.devices)]
    prices = {device.type: device.price_per_hour for device in used}
    listed = ", ".join(
        f"{kind} {format_money(price)}" for kind, price in prices.items() if math.isfinite(price)
    )
    assumed["prices"] = f"list prices per hour: {listed}" if listed else "not known"
    assumed["costs"] = ", ".join(dict.fromkeys(c.origin.value for c in problem.graph.costs))
    also = answer.summary.evaluation.assumptions
    # That costs are estimated is said by their origin.
    others = "; ".join(line for line in also if "estimated" not in line)
    return assumed | ({"also": others} if others else {})


def _tried(
    request: AdviseRequest, found: PlanResult | LargePlanResult, on_progress: OnProgress
) -> Iterator[Change]:
    """Yield what becomes of the plan with each of the usual changes."""
    if isinstance(found, LargePlanResult):
        yield from _tried_large(request, found, on_progress)
        return
    told = explain_request(ExplainRequest(plan=found.solution), on_progress)
    for each in told.what_if:
        if math.isfinite(each.relative):
            name, _, value = each.change.partition("=")
            fields: dict[str, Any] = {"what_if": (*request.what_if, each.change)}
            if name == "microbatches":
                count = round(found.plan.num_microbatches * float(value.rstrip("x")))
                fields = {"microbatches": count, "batch_size": None}
            elif name == "replan":
                fields = {"planner": None, "partition": None, "option": ()}
            yield Change(
                what=each.change,
                command=_command(replace(request, **fields)),
                relative=each.relative,
                note=each.note,
                more_samples=each.more_samples,
            )


def _tried_large(
    request: AdviseRequest, found: LargePlanResult, on_progress: OnProgress
) -> Iterator[Change]:
    """Yield what becomes of a large transformer: another batch, precision, links, one more host."""
    task, devices = found.task, found.cluster.devices
    first = devices[0]
    on_host = sum(device.host == first.host for device in devices)
    host = f"+1x{on_host}x{first.type}"
    changes: dict[str, dict[str, Any]] = {
        "a batch twice as large": {"batch_size": 2 * task.batch, "microbatches": None},
        "bandwidth=2x": {"what_if": (*request.what_if, "bandwidth=2x")},
        # The same step on more devices, whose usual batch may be another one.
        host: {"batch_size": task.batch, "what_if": (*request.what_if, host)},
    }
    narrow = all("float8" in device.peak_flop_per_s for device in devices)
    if narrow and parse_precision(task.precision).compute != "float8":
        changes["--precision fp8"] = {"precision": "fp8"}
    for what, fields in changes.items():
        changed = replace(request, **fields)
        command = _command(changed)
        on_progress(what)
        try:
            other = plan_request(_planned(changed))
        except PartitaError:
            continue  # a change that nothing fits with, or that the framework cannot, is none
        if isinstance(other, LargePlanResult):
            relative = found.tokens_per_s / other.tokens_per_s - 1
            yield Change(
                what=what,
                command=command,
                relative=relative,
                note=other.best.title,
                more_samples=other.task.batch != task.batch,
            )


def _alternatives(found: PlanResult | LargePlanResult) -> Iterator[tuple[str, float]]:
    if isinstance(found, LargePlanResult):
        for choice in found.others[:SHOWN]:
            yield choice.title, choice.step_s / found.best.step_s - 1
        return
    for other in found.answer.alternatives[:SHOWN]:
        yield other.words, other.ratio - 1


def _refusals(solution: Solution, request: AdviseRequest) -> dict[str, str]:
    """Return for trainers and launchers why they cannot run a plan."""
    checked = export_request(ExportRequest(plan=solution, check=True)).refusals
    names = [*LAUNCHERS, *TRAINERS]
    if request.framework in TRAINERS:  # the one that was asked for comes first
        names = [*LAUNCHERS, request.framework, *(n for n in TRAINERS if n != request.framework)]
    refusals = {name: checked[name] for name in names}
    if MODEL_ANNOTATION not in solution.problem.graph.annotations:
        why = "the plan holds no code of the model: partita export PLAN --to {} -- COMMAND"
        refusals |= {name: refusals[name] or why.format(name) for name in LAUNCHERS}
    return refusals


def _starts(solution: Solution, refusals: Mapping[str, str], output: str | None) -> Iterator[Start]:
    """Write the plan and what starts it, and yield how; the first trainer that can run it."""
    if output is None:
        return
    plan = Path(output) / "plan.json"
    save(solution, str(plan))
    named = shlex.quote(str(plan))
    if MODEL_ANNOTATION in solution.problem.graph.annotations:
        yield Start(what="Partita", command=f"partita run {named}", written=(str(plan),))
    else:
        command = f"partita explain {named}"
        yield Start(what="the plan", command=command, written=(str(plan),))
    able = [name for name, why in refusals.items() if not why]
    trainer = [name for name in able if name in TRAINERS][:1]
    for name in [*(name for name in able if name in LAUNCHERS), *trainer]:
        made = export_request(
            ExportRequest(plan=solution, to=name, output=str(Path(output) / name))
        )
        yield Start(what=name, command=made.command, written=made.written)
        if made.process and "sbatch" not in able:
            with suppress(InfeasibleError):
                yield _batch_job(solution, name, made.process, output)


def _batch_job(solution: Solution, trainer: str, process: str, output: str) -> Start:
    """Write a batch script of Slurm that starts a trainer, whose files are beside its own.

    Raises:
        InfeasibleError: The script cannot hold the plan.
    """
    script = ("bash", "-c", f"cd ../{trainer} && {process}")
    folder = str(Path(output) / "sbatch")
    made = export_request(ExportRequest(plan=solution, to="sbatch", script=script, output=folder))
    return Start(what=f"{trainer} by Slurm", command=made.command, written=made.written)


def _command(request: AdviseRequest) -> str:
    return shlex.join(["partita", "advise", *arguments_of(request, without=("output",))])
