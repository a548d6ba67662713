"""Sensitivities as choices: the grants that are worth making to a job, on each kind of server.

A *choice* is CPUs and memory per GPU with their speed. A list holds the choices that no other
beats (as fast for no more of either), by ascending speed, for one sensitivity, number of GPUs and
class of servers. Between measured CPU counts the speed is interpolated, below the lowest it falls
in proportion; memory counts by the highest measured size within it, and below the lowest a job does
not run; nor does it on fewer GPUs than were measured. So no choice promises what no point supports.

The *fair* speed is that of the GPU-proportional share of the server, and no choice is slower: who
runs by a choice runs at least at the fair speed. The *floor* is the cheapest choice within that
share, so floors of any jobs fit wherever their GPUs do.
"""

import math
from dataclasses import dataclass

import numpy as np

from partita.core.columns import Columns, Flags, Floats, Ints, Longs
from partita.core.fleet import Sensitivity, Trace
from partita.errors import InfeasibleError
from partita.fleet.policies.resources import Servers
from partita.units import format_bytes

_CLOSE = 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class Profiles(Columns):
    """The choices of every job: list ``l = row * num_classes + server class``.

    Attributes:
        rows: Row of each distinct (sensitivity, GPUs).
        num_classes: Classes of servers.
        server_class: Class of each server.
        first: Choices of list l are ``first[l]`` to ``first[l + 1]``; none = cannot run there.
        cpus: CPUs per GPU of a choice.
        memory_bytes: Memory per GPU of a choice.
        speed: Speed of a choice.
        floor: The floor choice of each list, -1 = cannot run there.
        fair_speed: Speed at the GPU-proportional share, by list.
    """

    rows: dict[tuple[int, int], int]
    num_classes: int
    server_class: Longs
    first: Longs
    cpus: Floats
    memory_bytes: Floats
    speed: Floats
    floor: Longs
    fair_speed: Floats


def speed_at(part: Sensitivity, kind: str, gpus: int, cpus: float, memory_bytes: float) -> float:
    """Return the speed of a job with some CPUs and memory per GPU; 0 = cannot run on that type."""
    points = _points(part, kind, gpus)
    if points is None:
        return 0.0
    return _speed(points, cpus, memory_bytes)


def fewest_gpus(part: Sensitivity, kind: str) -> float:
    """Return the fewest GPUs of a type that a job is known to run on; infinite = on none."""
    here = _rows_of_type(part, kind)
    return math.inf if here is None else max(float(part.gpus[here].min()), 1.0)


def _rows_of_type(part: Sensitivity, kind: str) -> Flags | None:
    """Return which points are for a type of GPU; None = it does not run there."""
    name = next((known for known in (kind, "") if known in part.gpu_types), None)
    if name is None:
        # Jobs whose points name other types run where the type of the server is not known.
        name = part.gpu_types[0] if not kind else None
    if name is None:
        return None
    result: Flags = part.gpu_type == part.gpu_types.index(name)
    return result


def _points(part: Sensitivity, kind: str, gpus: int) -> tuple[Floats, Floats, Floats] | None:
    """Return CPUs, memory and speed of the points for a type and number of GPUs."""
    here = _rows_of_type(part, kind)
    if here is None or gpus < fewest_gpus(part, kind):
        return None
    counts = np.unique(part.gpus[here])
    exact = counts[np.isin(counts, (0, gpus))]
    if len(exact):
        rows = here & (part.gpus == exact[-1])
        return part.cpus[rows], part.memory_bytes[rows], part.speed[rows]
    return _between(part, here, counts, gpus)


def _between(
    part: Sensitivity, here: Flags, counts: Ints, gpus: int
) -> tuple[Floats, Floats, Floats]:
    """Return points for a number of GPUs between two that were measured, or above all."""
    at = int(np.searchsorted(counts, gpus))
    low, high = counts[at - 1], counts[min(at, len(counts) - 1)]
    rows = here & (part.gpus == low)
    cpus, memory, speed = part.cpus[rows], part.memory_bytes[rows], part.speed[rows]
    if low == high:
        return cpus, memory, speed
    others = here & (part.gpus == high)
    upper = (part.cpus[others], part.memory_bytes[others], part.speed[others])
    above = np.array([_speed(upper, c, m) for c, m in zip(cpus, memory, strict=True)])
    return cpus, memory, speed + (above - speed) * (gpus - low) / (high - low)


def _speed(points: tuple[Floats, Floats, Floats], cpus: float, memory_bytes: float) -> float:
    all_cpus, all_memory, all_speed = points
    levels = np.unique(all_memory)
    best = 0.0
    for level in levels[levels <= memory_bytes * (1 + _CLOSE)]:
        rows = np.flatnonzero(all_memory == level)
        rows = rows[np.argsort(all_cpus[rows], kind="stable")]
        axis, curve = all_cpus[rows], np.maximum.accumulate(all_speed[rows])
        value = float(np.interp(cpus, axis, curve))
        if cpus < axis[0]:
            value *= cpus / float(axis[0])
        best = max(best, value)
    return best


def build_profiles(trace: Trace, servers: Servers) -> Profiles:
    """Return the choices of every job of a trace on every class of servers.

    Raises:
        InfeasibleError: A job can run on no server.
    """
    of_server, samples = servers.classes
    rows = _distinct(trace)
    names = servers.gpu_types
    lists: list[tuple[Floats, Floats, Floats, int, float]] = []
    for part, gpus in rows:
        for server in samples.tolist():
            room = (
                names[int(servers.gpu_type[server])],
                float(servers.gpus[server]),
                float(servers.cpus[server]),
                float(servers.memory_bytes[server]),
            )
            lists.append(_choices(trace.sensitivities[part], gpus, room))
    for (part, gpus), row in rows.items():
        if all(len(lists[row * len(samples) + k][0]) == 0 for k in range(len(samples))):
            raise InfeasibleError(_why_nowhere(trace.sensitivities[part], gpus, servers))
    first = np.concatenate([[0], np.cumsum([len(part[0]) for part in lists])]).astype(np.int64)
    return Profiles(
        rows=rows,
        num_classes=len(samples),
        server_class=of_server.astype(np.int64),
        first=first,
        cpus=np.concatenate([part[0] for part in lists]),
        memory_bytes=np.concatenate([part[1] for part in lists]),
        speed=np.concatenate([part[2] for part in lists]),
        floor=np.array(
            [first[i] + part[3] if part[3] >= 0 else -1 for i, part in enumerate(lists)],
            dtype=np.int64,
        ),
        fair_speed=np.array([part[4] for part in lists]),
    )


def _why_nowhere(part: Sensitivity, gpus: int, servers: Servers) -> str:
    """Return why jobs of a sensitivity run on no server."""
    fewest = min(fewest_gpus(part, kind) for kind in servers.gpu_types)
    if math.isinf(fewest):
        return (
            f"jobs of {part.name!r} run on GPUs of the types {', '.join(part.gpu_types)}; the "
            f"cluster has {', '.join(servers.gpu_types)}"
        )
    if gpus < fewest:
        return f"jobs of {part.name!r} run on {fewest:g} GPUs or more; one asks for {gpus}"
    share = float((servers.memory_bytes / servers.gpus).max())
    least = float(part.memory_bytes.min())
    return (
        f"jobs of {part.name!r} need {format_bytes(least)} of memory per GPU at least; a GPU's "
        f"share of a server is {format_bytes(share)} at most: ask for more GPUs, or for servers "
        "with more memory"
    )


def _distinct(trace: Trace) -> dict[tuple[int, int], int]:
    """Return a row for every sensitivity with every number of GPUs that a job of it may have.

    The rows of jobs with a range of GPUs follow one another, one row per number.
    """
    least, most = trace.gpu_range
    rows: dict[tuple[int, int], int] = {}
    for part in range(len(trace.sensitivities)):
        here = trace.sensitivity == part
        ranged = here & (least < most)
        if ranged.any():
            for gpus in range(int(least[ranged].min()), int(most[ranged].max()) + 1):
                rows[part, gpus] = len(rows)
        for gpus in np.unique(trace.gpus[here]).tolist():
            rows.setdefault((part, gpus), len(rows))
    return rows


def _choices(
    part: Sensitivity, gpus: int, room: tuple[str, float, float, float]
) -> tuple[Floats, Floats, Floats, int, float]:
    """Return the choices of a job on a class of servers, its floor and its fair speed."""
    kind, held, cpus, memory = room
    nothing = np.zeros(0)
    points = _points(part, kind, gpus)
    fair = (cpus / held, memory / held)
    fair_speed = 0.0 if points is None else _speed(points, *fair)
    if points is None or fair_speed <= 0:
        return nothing, nothing, nothing, -1, 0.0
    here = min(gpus, held)
    top = (cpus / here, memory / here)
    steps = np.arange(1, int(cpus) + 1) / here
    wanted = {fair[0], *points[0].tolist(), *steps[steps <= points[0].max()].tolist()}
    sizes = {fair[1], *points[1].tolist()}
    found = [
        (c, m, _speed(points, c, m))
        for c in sorted(wanted)
        for m in sorted(sizes)
        if c <= top[0] * (1 + _CLOSE) and m <= top[1] * (1 + _CLOSE)
    ]
    asked = (part.demand_cpus, part.demand_memory_bytes, part.demand_speed)
    if not any(map(math.isnan, asked)) and asked[0] <= top[0] and asked[1] <= top[1]:
        found.append((*asked[:2], min(asked[2], _speed(points, asked[0], asked[1]))))
    enough = fair_speed * (1 - _CLOSE)
    kept = _undominated([choice for choice in found if choice[2] >= enough])
    within = [i for i, (c, m, _) in enumerate(kept) if c <= fair[0] and m <= fair[1]]
    floor = min(within, key=lambda i: kept[i][0] / cpus + kept[i][1] / memory)
    columns = np.array(kept)
    return columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy(), floor, fair_speed


def _undominated(found: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Return the choices that no other beats, by speed, then CPUs and memory."""
    kept: list[tuple[float, float, float]] = []
    for choice in sorted(set(found), key=lambda c: (-c[2], c[0], c[1])):
        if not any(c <= choice[0] and m <= choice[1] and s >= choice[2] for c, m, s in kept):
            kept.append(choice)
    return kept[::-1]
