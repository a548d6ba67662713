"""What a power cap costs a fleet, moment by moment.

For the jobs that ran at a moment, the throughput kept is ``sum of gpus * share of full speed`` over
``sum of gpus``: with the points that the cap chose, and with one limit of the speed's share for
all. Both are taken of the same jobs, and the mean is over GPU seconds. What a whole run loses
differs from that: who runs longer also takes CPUs from others, which `Capped.held` counts.
"""

from dataclasses import dataclass

import numpy as np

from partita.core.columns import Longs
from partita.core.fleet import FleetHistory, Trace
from partita.fleet.policies.power import choose_points, equal_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class CapLoss:
    """Throughput lost under a cap, relative.

    Attributes:
        chosen: With points chosen job by job.
        equal: With one limit for all, for the same jobs.
    """

    chosen: float
    equal: float


def cap_loss(trace: Trace, history: FleetHistory, cap_w: float) -> CapLoss:
    """Return what a cap costs in a history that was simulated under it, with its leases."""
    held = lost = lost_equal = 0.0
    part_of = trace.sensitivity.astype(np.int64)
    seconds = history.usage.rounds * history.round_s
    for (jobs, gpus), span_s in zip(_running(history), seconds.tolist(), strict=True):
        if not len(jobs):
            continue
        asked = (trace.sensitivities, part_of[jobs], gpus, cap_w)
        held += span_s * float(gpus.sum())
        lost += span_s * float((gpus * (1 - choose_points(*asked)[0])).sum())
        lost_equal += span_s * float((gpus * (1 - equal_limit(*asked)[0])).sum())
    return (
        CapLoss(chosen=lost / held, equal=lost_equal / held)
        if held
        else CapLoss(chosen=0.0, equal=0.0)
    )


def _running(history: FleetHistory) -> list[tuple[Longs, Longs]]:
    """Return jobs and their GPUs in each stretch of a history."""
    leases, moments = history.leases, history.usage.start_s
    # A lease runs in the stretches from its start on that begin before its end.
    first = np.searchsorted(moments, leases.start_s - 1e-6)
    last = np.searchsorted(moments, leases.end_s - 1e-6)
    lengths = last - first
    rows = np.repeat(np.arange(len(leases)), lengths)
    offset = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    stretch = first[rows] + offset
    # A job on several servers has a lease on each: they count as one job.
    key = stretch.astype(np.int64) * len(history) + leases.job[rows]
    keys, of = np.unique(key, return_inverse=True)
    gpus = np.bincount(of.ravel(), weights=leases.gpus[rows], minlength=len(keys)).astype(np.int64)
    bounds = np.searchsorted(keys, np.arange(len(moments) + 1) * len(history))
    jobs = keys % len(history)
    return [
        (jobs[begin:end], gpus[begin:end])
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]
