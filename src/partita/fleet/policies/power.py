"""A power cap for a fleet: which point of its time-energy frontier each running job takes.

Every job starts at its fastest point. While the fleet takes more than the cap, the step to a slower
point that loses the least throughput for the watts it saves is made; steps are those of the lower
hull of a frontier, so what is lost is the least possible up to one step of one job. The baseline
sets one limit for all: no job runs faster than the same share of its full speed.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from partita.core.columns import Floats, Longs
from partita.core.fleet import Sensitivity
from partita.errors import InvalidInputError


def hull(part: Sensitivity) -> Longs:
    """Return the points of a frontier on its hull, fastest first.

    Raises:
        InvalidInputError: The sensitivity carries no frontier.
    """
    if not len(part.frontier_speed):
        raise InvalidInputError(
            f"jobs of {part.name!r} carry no frontier; a power cap needs their watts by speed"
        )
    order = np.lexsort((part.frontier_w, -part.frontier_speed))
    kept: list[int] = []
    for point in order.tolist():
        speed, watts = part.frontier_speed[point], part.frontier_w[point]
        if kept and watts >= part.frontier_w[kept[-1]]:
            continue
        while len(kept) > 1 and _loss_per_watt(part, kept[-2], kept[-1]) >= _loss_per_watt(
            part, kept[-2], point
        ):
            kept.pop()
        if not kept or speed < part.frontier_speed[kept[-1]]:
            kept.append(point)
    return np.array(kept, dtype=np.int64)


def _loss_per_watt(part: Sensitivity, at: int, to: int) -> float:
    lost = float(part.frontier_speed[at] - part.frontier_speed[to])
    return lost / float(part.frontier_w[at] - part.frontier_w[to])


def least_w(parts: Sequence[Sensitivity], part: Longs, gpus: Longs) -> Floats:
    """Return the least watts that each job can run at."""
    lowest = np.array(
        [p.frontier_w[hull(p)[-1]] if i in part else 0.0 for i, p in enumerate(parts)]
    )
    result: Floats = lowest[part] * gpus
    return result


def choose_points(
    parts: Sequence[Sensitivity], part: Longs, gpus: Longs, cap_w: float
) -> tuple[Floats, Floats]:
    """Return the share of full speed and the watts of each running job under a cap.

    Args:
        parts: The sensitivities.
        part: Sensitivity of each job.
        gpus: GPUs of each job.
        cap_w: What all may take together; at least the sum of ``least_w``.
    """
    hulls = {index: hull(parts[index]) for index in np.unique(part).tolist()}
    at = np.zeros(len(part), dtype=np.int64)
    watts = np.array(
        [
            parts[p].frontier_w[hulls[p][0]] * n
            for p, n in zip(part.tolist(), gpus.tolist(), strict=True)
        ]
    )
    total = float(watts.sum())
    heap = [(_step(parts, hulls, p, 0), job) for job, p in enumerate(part.tolist())]
    heapq.heapify(heap)
    while total > cap_w and heap:
        _, job = heapq.heappop(heap)
        p = int(part[job])
        if at[job] + 1 >= len(hulls[p]):
            continue
        at[job] += 1
        lower = float(parts[p].frontier_w[hulls[p][at[job]]]) * float(gpus[job])
        total += lower - float(watts[job])
        watts[job] = lower
        heapq.heappush(heap, (_step(parts, hulls, p, int(at[job])), job))
    share = np.array(
        [
            parts[p].frontier_speed[hulls[p][k]]
            for p, k in zip(part.tolist(), at.tolist(), strict=True)
        ]
    )
    return share, watts


def _step(parts: Sequence[Sensitivity], hulls: dict[int, Longs], part: int, at: int) -> float:
    """Return the loss a watt of the next step; infinite = there is none."""
    points = hulls[part]
    if at + 1 >= len(points):
        return float("inf")
    return _loss_per_watt(parts[part], int(points[at]), int(points[at + 1]))


def equal_limit(
    parts: Sequence[Sensitivity], part: Longs, gpus: Longs, cap_w: float
) -> tuple[Floats, Floats]:
    """Return the same as `choose_points`, with one limit of the speed's share for all jobs."""
    used = np.unique(part).tolist()
    hulls = {index: hull(parts[index]) for index in used}
    limits = np.unique(np.concatenate([parts[p].frontier_speed[hulls[p]] for p in used]))[::-1]
    share, watts = np.ones(len(part)), np.zeros(len(part))
    for limit in [*limits.tolist(), 0.0]:
        share_of, watts_of = np.zeros(len(parts)), np.zeros(len(parts))
        for p in used:
            speeds = parts[p].frontier_speed[hulls[p]]
            below = np.flatnonzero(speeds <= limit)
            point = hulls[p][below[0] if len(below) else -1]
            share_of[p], watts_of[p] = parts[p].frontier_speed[point], parts[p].frontier_w[point]
        share, watts = share_of[part], watts_of[part] * gpus
        if watts.sum() <= cap_w:
            break
    return share, watts
