"""Traces on order: drawn, made of a log, or of another trace; and what one holds, in figures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partita.core.columns import Floats, Ints
from partita.core.fleet import Sensitivity, Trace
from partita.errors import InvalidInputError
from partita.fleet.policies.profiles import speed_at
from partita.fleet.study.generated import (
    CLASS_SPLIT,
    Mix,
    Submission,
    at_load,
    generate_trace,
    published_jobs,
    trace_of_log,
)
from partita.units import format_seconds

_JOB_COLUMNS = (
    *("job_id", "sensitivity", "arrival_s", "iterations", "gpus", "min_gpus", "max_gpus"),
    *("gpu_mask", "tenant", "priority", "deadline_s"),
)
DEFAULT_JOBS = 100
DEFAULT_LOAD = 9.0
_SHORT_S = 3600.0
"""Seconds within which jobs arrive, below which a rate by the hour says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """How a trace is drawn or changed.

    Attributes:
        jobs: Number of jobs, the first of a source; ``None`` = all, 100 if drawn.
        load: Jobs per hour of Poisson arrivals; ``None`` = those of the source, 9 if drawn.
        static: Whether all jobs are there from the start.
        split: Share of each class; empty = the usual one, or equal shares of the classes there are.
        gpu_shares: Share of each GPU demand, of a drawn trace.
        short: Whether durations are drawn short.
        real_durations: Of a log: whether its durations count, or are drawn.
        multi_gpu: Of a log: whether its GPU demands count, or are 1.
        published_filter: Of a log: whether only the jobs count that the published reader keeps.
        elastic: The fewest and most GPUs of every job; ``None`` = what each asks for.
        tenants: Share of each tenant; empty = none.
        seed: Seed of all draws.
    """

    jobs: int | None = None
    load: float | None = None
    static: bool = False
    split: Mapping[str, float] = field(default_factory=dict)
    gpu_shares: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    short: bool = False
    real_durations: bool = True
    multi_gpu: bool = True
    published_filter: bool = False
    elastic: tuple[int, int] | None = None
    tenants: Mapping[str, float] = field(default_factory=dict)
    seed: int = 1

    def __post_init__(self) -> None:
        if self.static and self.load is not None:
            raise InvalidInputError("static jobs are there at once: they have no load")


def drawn_trace(models: Sequence[Sensitivity], options: TraceOptions, *, name: str) -> Trace:
    """Return a trace that is drawn.

    Raises:
        InvalidInputError: A share or rate is wrong, or a class has no model.
    """
    load = DEFAULT_LOAD if options.load is None else options.load
    mix = Mix(
        per_hour=None if options.static else load,
        split=_split(models, options),
        gpu_shares=options.gpu_shares,
        short=options.short,
    )
    rng = np.random.default_rng(options.seed)
    jobs = DEFAULT_JOBS if options.jobs is None else options.jobs
    return _finished(generate_trace(models, rng, jobs=jobs, mix=mix, name=name), options, rng)


def logged_trace(
    rows: Sequence[tuple[float, float, int]],
    models: Sequence[Sensitivity],
    options: TraceOptions,
    *,
    name: str,
    tenants: Sequence[str] = (),
    named: Sequence[str] = (),
) -> tuple[Trace, tuple[str, ...]]:
    """Return the trace of a log of submissions, each with a model by the shares of the classes.

    Also returns what of the log was left out or changed because the options ask for it. The tenants
    are those of the rows; empty = they are not known. So are the models that the log names.

    Raises:
        InvalidInputError: No job of the log counts, or a class has no model.
    """
    rng = np.random.default_rng(options.seed)
    owners = tenants or [""] * len(rows)
    trained = named or [""] * len(rows)
    log = [
        Submission(submitted_s=at, duration_s=took, gpus=gpus, tenant=owner, model=what)
        for (at, took, gpus), owner, what in zip(rows, owners, trained, strict=True)
    ]
    notes: tuple[str, ...] = ()
    if options.published_filter:
        log, notes = published_jobs(log, multi_gpu=options.multi_gpu)
    trace = trace_of_log(
        log,
        models,
        rng,
        mix=Mix(per_hour=None, split=_split(models, options), short=options.short),
        real_durations=options.real_durations,
        multi_gpu=options.multi_gpu,
        name=name,
    )
    return changed_trace(trace, options, rng), notes


def changed_trace(
    trace: Trace, options: TraceOptions, rng: np.random.Generator | None = None
) -> Trace:
    """Return a trace with the number of jobs, the arrivals, ranges and tenants of some options."""
    rng = np.random.default_rng(options.seed) if rng is None else rng
    if options.jobs is not None and options.jobs < len(trace):
        trace = first_jobs(trace, options.jobs)
    if options.load is not None:
        trace = replace(at_load(trace, rng, per_hour=options.load), name=trace.name)
    if options.static:
        order = np.argsort(np.argsort(trace.arrival_s, kind="stable"))
        arrival: Floats = 0.001 * order.astype(np.float64)
        trace = replace(trace, arrival_s=arrival, start_s=1.0)
    return _finished(trace, options, rng)


def first_jobs(trace: Trace, jobs: int) -> Trace:
    """Return the jobs that come first."""
    rows = np.sort(np.argsort(trace.arrival_s, kind="stable")[:jobs])
    return replace(trace, **{name: getattr(trace, name)[rows] for name in _JOB_COLUMNS})


def _split(models: Sequence[Sensitivity], options: TraceOptions) -> Mapping[str, float]:
    if options.split:
        return options.split
    kinds = dict.fromkeys(model.kind for model in models)
    if kinds.keys() >= CLASS_SPLIT.keys():
        return CLASS_SPLIT
    return dict.fromkeys(kinds, 1.0)


def _finished(trace: Trace, options: TraceOptions, rng: np.random.Generator) -> Trace:
    if options.elastic is not None:
        trace = _elastic(trace, *options.elastic)
    if options.tenants:
        trace = replace(
            trace,
            tenants=tuple(options.tenants),
            tenant=_drawn_tenants(rng, len(trace), options.tenants),
        )
    return trace


def _elastic(trace: Trace, least: int, most: int) -> Trace:
    """Return a trace whose jobs run on a range of GPUs.

    Raises:
        InvalidInputError: The range is none, or a job's speed by number of GPUs is not known.
    """
    if not 1 <= least <= most:
        raise InvalidInputError(f"elastic jobs of {least} to {most} GPUs; expected a range from 1")
    for part in trace.sensitivities:
        if not (part.gpus > 0).all():
            raise InvalidInputError(
                f"{part.name!r} has no points by number of GPUs, so that its jobs cannot be "
                "elastic; 'partita fleet curve' computes such points"
            )
    low: Ints = np.minimum(trace.gpus, least)
    high: Ints = np.maximum(trace.gpus, most)
    return replace(trace, min_gpus=low, max_gpus=high)


def _drawn_tenants(rng: np.random.Generator, jobs: int, shares: Mapping[str, float]) -> Ints:
    weights = np.array(list(shares.values()), dtype=np.float64)
    if (weights < 0).any() or not weights.sum() > 0:
        raise InvalidInputError(f"tenants are {dict(shares)}; expected shares of 0 or more")
    drawn = rng.choice(len(weights), size=jobs, p=weights / weights.sum())
    return drawn.astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """The jobs of one model of a trace.

    Attributes:
        model: Its name.
        kind: Its class.
        origin: Where its speeds come from.
        jobs: Number of jobs.
        gpus: GPUs that they ask for, on average.
        hours: Median hours of a job alone, at speed 1 or at that of the GPUs it asks for.
        gpu_hours: GPU hours of all, likewise.
        top_speed: Highest speed of its points.
    """

    model: str
    kind: str
    origin: str
    jobs: int
    gpus: float
    hours: float
    gpu_hours: float
    top_speed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """What a trace holds.

    Attributes:
        name: The trace.
        jobs: Number of jobs.
        span_s: From the first arrival to the last.
        per_hour: Jobs per hour in that time; NaN = they are all there at the start.
        gpu_hours: GPU hours of all jobs at speed 1.
        busy_gpus: GPUs that the arrivals keep busy at speed 1; NaN = all are there at the start.
        gpu_demands: Jobs by GPUs that they ask for.
        tenants: Jobs by tenant.
        elastic: Jobs with a range of GPUs.
        models: A row per model.
    """

    name: str
    jobs: int
    span_s: float
    per_hour: float
    gpu_hours: float
    busy_gpus: float
    gpu_demands: Mapping[int, int]
    tenants: Mapping[str, int]
    elastic: int
    models: tuple[ModelRow, ...]

    def line(self) -> str:
        """Return what the trace holds, in a line."""
        arrivals = "all there at the start"
        if self.per_hour > 0 and self.span_s < _SHORT_S:
            arrivals = f"all arrive within {format_seconds(self.span_s)}"
        elif self.per_hour > 0:
            arrivals = (
                f"{self.per_hour:.3g} jobs an hour for {self.span_s / 3600:,.1f} h, which keep "
                f"{self.busy_gpus:,.0f} GPUs busy at speed 1"
            )
        return f"{self.name} · {self.jobs:,} jobs · {self.gpu_hours:,.0f} GPU hours · {arrivals}"

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        known = {"per_hour": self.per_hour, "busy_gpus": self.busy_gpus}
        return {
            "trace": self.name,
            "jobs": self.jobs,
            "span_s": self.span_s,
            **{key: None if math.isnan(value) else value for key, value in known.items()},
            "gpu_hours": self.gpu_hours,
            "gpu_demands": {str(gpus): count for gpus, count in self.gpu_demands.items()},
            "tenants": dict(self.tenants),
            "elastic": self.elastic,
            "models": [
                {name: getattr(row, name) for name in ModelRow.__slots__} for row in self.models
            ],
        }


def summary_of(trace: Trace) -> TraceSummary:
    """Return what a trace holds."""
    first, last = float(trace.arrival_s.min()), float(trace.arrival_s.max())
    span_s = last - first
    hours = _hours(trace)
    work = float((hours * trace.gpus).sum())
    steady = span_s >= max(1.0, 0.1 * len(trace))
    counts = np.unique(trace.gpus, return_counts=True)
    least, most = trace.gpu_range
    return TraceSummary(
        name=trace.name,
        jobs=len(trace),
        span_s=span_s,
        per_hour=(len(trace) - 1) * 3600 / span_s if steady else math.nan,
        gpu_hours=work,
        busy_gpus=work * 3600 / span_s if steady else math.nan,
        gpu_demands={int(gpus): int(count) for gpus, count in zip(*counts, strict=True)},
        tenants={
            name: int((trace.tenant == index).sum()) for index, name in enumerate(trace.tenants)
        },
        elastic=int((least < most).sum()),
        models=tuple(_model_row(trace, index) for index in range(len(trace.sensitivities))),
    )


def _hours(trace: Trace) -> Floats:
    """Return the hours of each job alone: at speed 1, or at that of the GPUs it asks for."""
    speed = np.ones(len(trace))
    for index, part in enumerate(trace.sensitivities):
        here = trace.sensitivity == index
        if (part.gpus > 0).all():
            for gpus in np.unique(trace.gpus[here]).tolist():
                found = speed_at(part, part.gpu_types[0], gpus, math.inf, math.inf)
                speed[here & (trace.gpus == gpus)] = found or 1.0
    return trace.fair_s / speed / 3600


def _model_row(trace: Trace, index: int) -> ModelRow:
    part, here = trace.sensitivities[index], trace.sensitivity == index
    hours, gpus = _hours(trace)[here], trace.gpus[here]
    return ModelRow(
        model=part.name,
        kind=part.kind,
        origin=part.origin.value,
        jobs=int(here.sum()),
        gpus=float(gpus.mean()) if len(gpus) else 0.0,
        hours=float(np.median(hours)) if len(hours) else 0.0,
        gpu_hours=float((hours * gpus).sum()),
        top_speed=float(part.speed.max()),
    )
