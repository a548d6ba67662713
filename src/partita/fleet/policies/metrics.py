"""Figures of a history: completion times, queueing, fairness, use of the cluster, energy."""

import math
from dataclasses import dataclass

import numpy as np

from partita.core.columns import Flags, Floats
from partita.core.fleet import FleetHistory
from partita.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The figures of a history, or of some of its jobs.

    Attributes:
        jobs: Jobs that are counted.
        unfinished: Those of them that did not end; they are in no time below.
        mean_s: Mean completion time, from arrival to end.
        median_s: Median of it.
        p99_s: 99th percentile, linear between ranks.
        p999_s: 99.9th percentile.
        max_s: The longest.
        makespan_s: When the last ended.
        queueing_s: Mean time from arrival to the first start.
        stretch: Mean of completion time over the time alone at the fair share.
        worst_stretch: The largest of them: finish-time fairness.
        fairness: Jain's index of the stretches, 1 = all alike.
        preemptions: Stops before the end.
        migrations: Moves.
        energy_j: Energy of the GPUs; NaN = not known for every job.
    """

    jobs: int
    unfinished: int
    mean_s: float
    median_s: float
    p99_s: float
    p999_s: float
    max_s: float
    makespan_s: float
    queueing_s: float
    stretch: float
    worst_stretch: float
    fairness: float
    preemptions: int
    migrations: int
    energy_j: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a cluster was, over the time from the first round to the last.

    Attributes:
        gpus: Share of the GPUs in use.
        cpus: Share of the CPUs granted.
        memory: Share of the memory granted.
        running: Jobs that ran, on average over time.
        waiting: Jobs that waited, on average over time.
        most_waiting: Most jobs that waited.
        power_w: Mean power of the GPUs in use; NaN = not known.
        peak_w: Highest power; NaN = not known.
        mean_gap: Mean gap that the allocator left to its bound; NaN = it has none.
    """

    gpus: float
    cpus: float
    memory: float
    running: float
    waiting: float
    most_waiting: int
    power_w: float
    peak_w: float
    mean_gap: float


def metrics_of(history: FleetHistory, *, jobs: Flags | None = None) -> Metrics:
    """Return the figures of the jobs of a history.

    Args:
        history: The history.
        jobs: Which jobs count; ``None`` = all.

    Raises:
        InvalidInputError: No job counts.
    """
    chosen = np.ones(len(history), dtype=np.bool_) if jobs is None else jobs
    if not chosen.any():
        raise InvalidInputError("no job of the history is within the window")
    ended = chosen & ~np.isnan(history.finish_s)
    times = history.completion_s[ended]
    stretch = times / history.fair_s[ended]
    queueing = (history.start_s - history.arrival_s)[ended]
    squares = float((stretch**2).sum())
    return Metrics(
        jobs=int(chosen.sum()),
        unfinished=int((chosen & ~ended).sum()),
        mean_s=_or_nan(np.mean, times),
        median_s=_percentile(times, 50),
        p99_s=_percentile(times, 99),
        p999_s=_percentile(times, 99.9),
        max_s=_or_nan(np.max, times),
        makespan_s=_or_nan(np.max, history.finish_s[ended]),
        queueing_s=_or_nan(np.mean, queueing),
        stretch=_or_nan(np.mean, stretch),
        worst_stretch=_or_nan(np.max, stretch),
        fairness=float(stretch.sum()) ** 2 / (len(stretch) * squares) if squares else math.nan,
        preemptions=int(history.preemptions[chosen].sum()),
        migrations=int(history.migrations[chosen].sum()),
        energy_j=float(history.energy_j[chosen].sum()),
    )


def _or_nan(function: object, values: Floats) -> float:
    return float(function(values)) if len(values) else math.nan  # type: ignore[operator]  # a NumPy reduction


def _percentile(values: Floats, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else math.nan


def by_kind(history: FleetHistory, chosen: Flags | None = None) -> dict[str, Metrics]:
    """Return the figures of the jobs of each class; models without class are their own.

    Args:
        history: What became of the jobs.
        chosen: Which jobs count; all where it is not given.
    """
    kinds = history.kinds or ("",) * len(history.models)
    names = [kind or model for kind, model in zip(kinds, history.models, strict=True)]
    found = {}
    for name in dict.fromkeys(names):
        jobs = np.isin(history.model, [i for i, other in enumerate(names) if other == name])
        if chosen is not None:
            jobs &= chosen
        if jobs.any():
            found[name] = metrics_of(history, jobs=jobs)
    return found


def in_window(history: FleetHistory, first: int, last: int) -> Flags:
    """Return which jobs have an id from ``first`` to ``last``, both counted."""
    return (history.job_id >= first) & (history.job_id <= last)


def load_of(history: FleetHistory) -> Load:
    """Return how busy the cluster of a history was."""
    usage = history.usage
    if not len(usage):
        raise InvalidInputError("the history does not hold what was in use")
    end = float(usage.start_s[-1]) + float(usage.rounds[-1]) * history.round_s
    whole = max(end - float(usage.start_s[0]), history.round_s)
    seconds = usage.rounds * history.round_s

    def mean(values: Floats) -> float:
        return float((values * seconds).sum()) / whole

    known = ~np.isnan(usage.gap)
    return Load(
        gpus=mean(usage.gpus.astype(np.float64)) / history.num_gpus,
        cpus=mean(usage.cpus) / history.num_cpus,
        memory=mean(usage.memory_bytes) / history.memory_bytes,
        running=mean(usage.running.astype(np.float64)),
        waiting=mean(usage.waiting.astype(np.float64)),
        most_waiting=int(usage.waiting.max()),
        power_w=mean(usage.power_w),
        peak_w=float(usage.power_w.max()),
        mean_gap=float(usage.gap[known].mean()) if known.any() else math.nan,
    )


def cdf(history: FleetHistory) -> tuple[Floats, Floats]:
    """Return completion times, ascending, and the share of jobs that took no longer."""
    times = np.sort(history.completion_s[~np.isnan(history.completion_s)])
    return times, np.arange(1, len(times) + 1) / max(len(times), 1)
