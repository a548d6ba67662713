"""Fewer jobs under a power cap that the running ones would exceed even at their slowest.

The policy is asked as if there were no cap. Where its jobs need more, those that fit the cap, in
the order they are served, stay; who no longer fits what is left waits, and the policy is asked
again for the others. Jobs do not grow into GPUs that are idle for want of power.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from partita.core.columns import Flags, Floats, Longs
from partita.core.fleet import Sensitivity
from partita.errors import InfeasibleError
from partita.fleet.policies.power import least_w
from partita.fleet.policies.snapshot import Allocation, Snapshot

Asked = Callable[[Snapshot, Longs], Allocation]


def allocate_under(
    cap_w: float, parts: Sequence[Sensitivity], snapshot: Snapshot, served: Longs, ask: Asked
) -> Allocation:
    """Return grants to jobs that can run within a cap.

    Args:
        cap_w: What the GPUs of all jobs may take together; ``inf`` = any.
        parts: The sensitivities of jobs.
        snapshot: The round.
        served: The order in which jobs are served.
        ask: Returns the grants of the policy.

    Raises:
        InfeasibleError: Not one of the jobs fits the cap.
    """
    granted = ask(snapshot, served)
    if math.isinf(cap_w):
        return granted
    lowest = least_w(parts, snapshot.part, snapshot.least)
    while True:
        needed = _needed(parts, snapshot, granted)
        fits, room = _first_that_fit(needed, served, cap_w)
        if fits.all():
            return granted
        if (snapshot.most > snapshot.gpus).any():
            snapshot = replace(snapshot, most=snapshot.gpus)
            granted = ask(snapshot, served)
            continue
        if not fits[granted.running].any():
            raise InfeasibleError(
                f"the jobs that could run at {snapshot.now_s:g} s need "
                f"{needed[granted.running].min():g} W or more each at their slowest; the cap is "
                f"{cap_w:g} W"
            )
        stays = granted.running & fits
        allowed = stays | (~granted.running & (lowest <= room))
        may_run = snapshot.may_run.reshape(len(snapshot), -1) & allowed[:, None]
        snapshot = replace(snapshot, may_run=may_run.ravel())
        granted = ask(snapshot, served)


def _needed(parts: Sequence[Sensitivity], snapshot: Snapshot, granted: Allocation) -> Floats:
    """Return the watts that each job takes at its slowest with what it was granted."""
    held = np.zeros(len(snapshot), dtype=np.int64)
    jobs = np.repeat(np.arange(len(snapshot)), np.diff(granted.first))
    np.add.at(held, jobs, granted.gpus)
    return least_w(parts, snapshot.part, held)


def _first_that_fit(needed: Floats, served: Longs, cap_w: float) -> tuple[Flags, float]:
    """Return which jobs fit a cap when taken in order, and what is left of it."""
    fits = np.ones(len(needed), dtype=np.bool_)
    left = cap_w
    for job in served[needed[served] > 0].tolist():
        if needed[job] <= left:
            left -= float(needed[job])
        else:
            fits[job] = False
    return fits, left
