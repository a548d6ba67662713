"""Making traces: drawn as the published generators do, or from a log of real submissions.

Durations follow Gavel's draw: one job in five takes 60 * 10^U(3, 4) seconds, the others
60 * 10^U(1.5, 3) (a mean of 16.8 hours); short ones 10^U(2.5, 2.7) and 10^U(1.5, 2.5). Arrivals are
Poisson, or all at the start. Models are dealt so that the classes keep their shares, round-robin
inside a class. A job does as many iterations as its duration holds at speed 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from partita.core.columns import Floats, Ints, Longs
from partita.core.fleet import Sensitivity, SensitivityOrigin, Trace
from partita.errors import InvalidInputError

CLASS_SPLIT: Mapping[str, float] = {"image": 20.0, "language": 70.0, "speech": 10.0}
GPU_SHARES: Mapping[int, float] = {1: 70.0, 2: 10.0, 4: 15.0, 8: 5.0}
"""GPUs of the published multi-GPU workload, in percent of the jobs."""
PHILLY_GPUS = (1, 2, 4, 8, 16)
PHILLY_MINUTES = (10**1.5, 10.0**4)
_HOUR_S = 3600.0
INSENSITIVE = Sensitivity(
    name="unknown",
    origin=SensitivityOrigin.MODELLED,
    iteration_s=1.0,
    cpus=np.ones(1),
    memory_bytes=np.full(1, 1e9),
    speed=np.ones(1),
)
"""Jobs of which nothing is known but how long they took: they take as long anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One job of a log.

    Attributes:
        submitted_s: When, from the first of the log on.
        duration_s: How long it ran, all attempts together.
        gpus: GPUs of its last attempt.
        tenant: Whose it is; empty = the log does not say it.
        model: What it trains, likewise.
    """

    submitted_s: float
    duration_s: float
    gpus: int
    tenant: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What a workload is made of.

    Attributes:
        per_hour: Poisson arrivals at this rate; ``None`` = as in the log, or all at the start.
        split: Share of each class of models.
        gpu_shares: Share of each GPU demand.
        short: Whether durations are drawn short.
    """

    per_hour: float | None = 9.0
    split: Mapping[str, float] = field(default_factory=lambda: CLASS_SPLIT)
    gpu_shares: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    short: bool = False


def draw_durations(rng: np.random.Generator, jobs: int, *, short: bool = False) -> Floats:
    """Return durations in seconds as Gavel and Synergy draw them."""
    long = rng.random(jobs) < 0.2
    (low, middle), (upper, high) = ((1.5, 2.5), (2.5, 2.7)) if short else ((1.5, 3.0), (3.0, 4.0))
    powers = np.where(long, rng.uniform(upper, high, jobs), rng.uniform(low, middle, jobs))
    result: Floats = 60.0 * 10.0**powers
    return result


def draw_arrivals(rng: np.random.Generator, jobs: int, *, per_hour: float) -> Floats:
    """Return Poisson arrivals in whole seconds.

    Raises:
        InvalidInputError: The rate is not above 0.
    """
    if not (per_hour > 0 and math.isfinite(per_hour)):
        raise InvalidInputError(f"{per_hour} jobs an hour; expected more than 0")
    result: Floats = np.ceil(np.cumsum(rng.exponential(_HOUR_S / per_hour, jobs)))
    return result


def draw_gpus(rng: np.random.Generator, jobs: int, shares: Mapping[int, float]) -> Ints:
    """Return GPU demands by their shares.

    Raises:
        InvalidInputError: A share is negative, or all are 0.
    """
    counts, weights = np.array(list(shares)), np.array(list(shares.values()), dtype=np.float64)
    if not len(counts) or not weights.sum() > 0 or (weights < 0).any() or (counts < 1).any():
        raise InvalidInputError(
            f"GPU shares are {dict(shares)}; expected GPUs of 1 or more with shares of 0 or more"
        )
    result: Ints = rng.choice(counts, size=jobs, p=weights / weights.sum()).astype(np.int32)
    return result


def deal_models(models: Sequence[Sensitivity], jobs: int, split: Mapping[str, float]) -> Ints:
    """Return the model of each job, so that the classes keep their shares.

    The class that is furthest below its share goes next, ties in the order of ``split``; inside a
    class models take turns.

    Raises:
        InvalidInputError: A class with a share has no model.
    """
    shares = {kind: share for kind, share in split.items() if share > 0}
    members = {kind: [i for i, m in enumerate(models) if m.kind == kind] for kind in shares}
    for kind, found in members.items():
        if not found:
            raise InvalidInputError(f"no model is of the class {kind!r}, which has a share")
    if not shares:
        raise InvalidInputError(f"class shares are {dict(split)}; expected one above 0")
    total = sum(shares.values())
    target = [share / total for share in shares.values()]
    groups = list(members.values())
    dealt = [0] * len(groups)
    result = np.empty(jobs, dtype=np.int32)
    for job in range(jobs):
        lack = [target[k] - dealt[k] / max(job, 1) for k in range(len(groups))]
        chosen = lack.index(max(lack))
        result[job] = groups[chosen][dealt[chosen] % len(groups[chosen])]
        dealt[chosen] += 1
    return result


def generate_trace(
    models: Sequence[Sensitivity],
    rng: np.random.Generator,
    *,
    jobs: int,
    mix: Mix | None = None,
    name: str = "generated",
) -> Trace:
    """Return a trace that is drawn as the published generators draw theirs.

    Args:
        models: Sensitivities with their classes.
        rng: Source of chance.
        jobs: Number of jobs.
        mix: What they are made of.
        name: What to call it.

    Raises:
        InvalidInputError: A rate or share is wrong.
    """
    if jobs < 1:
        raise InvalidInputError(f"{jobs} jobs; expected 1 or more")
    mix = Mix() if mix is None else mix
    arrival: Floats = 0.001 * np.arange(jobs, dtype=np.float64)
    if mix.per_hour is not None:
        arrival = draw_arrivals(rng, jobs, per_hour=mix.per_hour)
    drawn = _Jobs(
        model=deal_models(models, jobs, mix.split),
        arrival_s=arrival,
        duration_s=draw_durations(rng, jobs, short=mix.short),
        gpus=draw_gpus(rng, jobs, mix.gpu_shares),
    )
    return _trace(models, drawn, name, start_s=1.0 if mix.per_hour is None else math.nan)


def published_jobs(
    log: Sequence[Submission], *, multi_gpu: bool = True
) -> tuple[list[Submission], tuple[str, ...]]:
    """Return the jobs that the published reader of Philly's log keeps, and what it does to others.

    Jobs that ran for 10^1.5 to 10^4 minutes count. GPU demands above 16 are left out, others than
    powers of two are taken as 1.

    Args:
        log: The submissions.
        multi_gpu: Whether GPU demands count; else none is too large.

    Raises:
        InvalidInputError: No job of the log counts.
    """
    low, high = (minutes * 60 for minutes in PHILLY_MINUTES)
    lasting = [job for job in log if low < job.duration_s < high]
    if not lasting:
        raise InvalidInputError("no job of the log ran for 32 to 10,000 minutes")
    fitting = [job for job in lasting if not multi_gpu or job.gpus <= max(PHILLY_GPUS)]
    if not fitting:
        raise InvalidInputError(f"no job of the log has {max(PHILLY_GPUS)} GPUs or fewer")
    odd = sum(job.gpus not in PHILLY_GPUS for job in fitting) if multi_gpu else 0
    counts = {
        "shorter than 32 or longer than 10,000 minutes left out": len(log) - len(lasting),
        f"with more than {max(PHILLY_GPUS)} GPUs left out": len(lasting) - len(fitting),
        "whose GPUs are no power of two taken as 1 GPU": odd,
    }
    kept = [job if job.gpus in PHILLY_GPUS else replace(job, gpus=1) for job in fitting]
    return kept, tuple(f"{count:,} {what}" for what, count in counts.items() if count)


def trace_of_log(
    log: Sequence[Submission],
    models: Sequence[Sensitivity],
    rng: np.random.Generator,
    *,
    mix: Mix | None = None,
    real_durations: bool = True,
    multi_gpu: bool = True,
    name: str = "philly",
) -> Trace:
    """Return a trace of a log of submissions, such as Philly's; every job counts as it stands.

    Args:
        log: The submissions.
        models: Sensitivities with their classes. A job whose log names one of them is that, one
            whose log names another is insensitive; others are dealt by their classes.
        rng: Source of chance.
        mix: Classes, and arrivals where they are not those of the log; ``None`` = those of the log.
        real_durations: Whether durations are those of the log, or drawn.
        multi_gpu: Whether GPU demands are those of the log, or 1.
        name: What to call it.

    Raises:
        InvalidInputError: The log is empty.
    """
    mix = Mix(per_hour=None) if mix is None else mix
    if not log:
        raise InvalidInputError("the log has no job")
    kept = sorted(log, key=lambda job: job.submitted_s)
    jobs = len(kept)
    arrival = np.array([job.submitted_s - kept[0].submitted_s for job in kept])
    if mix.per_hour is not None:
        arrival = draw_arrivals(rng, jobs, per_hour=mix.per_hour)
    duration = np.array([job.duration_s for job in kept])
    if not real_durations:
        duration = draw_durations(rng, jobs, short=mix.short)
    gpus = [job.gpus if multi_gpu else 1 for job in kept]
    model = deal_models(models, jobs, mix.split)
    index = {part.name: place for place, part in enumerate(models)}
    for place, job in enumerate(kept):
        if job.model:
            model[place] = index.get(job.model, len(models))
    drawn = _Jobs(
        model=model,
        arrival_s=arrival,
        duration_s=duration,
        gpus=np.array(gpus, dtype=np.int32),
    )
    trace = _trace([*models, INSENSITIVE], drawn, name)
    tenants = sorted({job.tenant for job in kept} - {""})
    if not tenants:
        return trace
    owner = {tenant: place for place, tenant in enumerate(tenants)} | {"": -1}
    column = np.array([owner[job.tenant] for job in kept], dtype=np.int32)
    return replace(trace, tenants=tuple(tenants), tenant=column)


class _Jobs(NamedTuple):
    model: Ints
    arrival_s: Floats
    duration_s: Floats
    gpus: Ints


def _trace(
    models: Sequence[Sensitivity], jobs: _Jobs, name: str, *, start_s: float = math.nan
) -> Trace:
    used = np.unique(jobs.model)
    seconds = np.array([model.iteration_s for model in models])
    iterations: Longs = np.maximum(jobs.duration_s / seconds[jobs.model], 1).astype(np.int64)
    return Trace(
        name=name,
        sensitivities=tuple(models[i] for i in used.tolist()),
        start_s=start_s,
        job_id=np.arange(len(iterations), dtype=np.int64),
        sensitivity=np.searchsorted(used, jobs.model).astype(np.int32),
        arrival_s=jobs.arrival_s,
        iterations=iterations,
        gpus=jobs.gpus,
    )


def at_load(trace: Trace, rng: np.random.Generator, *, per_hour: float) -> Trace:
    """Return a trace with new Poisson arrivals at another rate, jobs in their order."""
    order = np.argsort(trace.arrival_s, kind="stable")
    arrival = np.empty(len(trace))
    arrival[order] = draw_arrivals(rng, len(trace), per_hour=per_hour)
    return replace(
        trace, arrival_s=arrival, start_s=math.nan, name=f"{trace.name} at {per_hour:g}/h"
    )
