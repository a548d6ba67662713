"""One frontier for each schedule, for replicas and for tensor parallelism; each point once more."""

from pathlib import Path

import numpy as np
from _energy_data import synthetic
from _planners_common import Group, timed

from partita.core.energy import EnergyProfile
from partita.core.problem import Schedule
from partita.core.program import Kind
from partita.energy.frontier.frontier import solve_frontier
from partita.energy.frontier.pipeline import Pipeline, pipeline_model
from partita.energy.frontier.savings import played

MICROBATCHES, POINTS = 12, 12
INPUT_SHARE = 0.5
"""Share of a backward pass that a zero-bubble schedule gives to the gradient of the input."""
SAME = 1e-9


def measure_group(data: Path) -> Group:
    """Solve and simulate again."""
    group = Group(
        title=f"every schedule, {MICROBATCHES} microbatches, each point simulated again",
        headers=(
            *("schedule", "replicas", "tp", "points", "T_min s", "T* s", "saved at T_min %"),
            *("saved at T* %", "mean gap %", "largest difference", "CPU s"),
        ),
    )
    plain = synthetic(data, 8)
    pipelines = [
        Pipeline(
            schedule=schedule,
            microbatches=MICROBATCHES,
            chunks=2 if schedule is Schedule.INTERLEAVED else 1,
        )
        for schedule in Schedule
    ]
    pipelines.append(Pipeline(microbatches=MICROBATCHES, replicas=2))
    pipelines.append(Pipeline(microbatches=MICROBATCHES, tensor_parallel=2))
    worst = 0.0
    for pipeline in pipelines:
        model = pipeline_model(_with_parts(plain), pipeline)
        frontier, spent = timed(lambda: solve_frontier(model, points=POINTS))  # noqa: B023
        difference = 0.0
        for point in range(len(frontier)):
            step = played(model, frontier.clocks(point))
            for claimed, found in (
                (frontier.time_s[point], step.time_s),
                (frontier.energy_j[point], step.energy_j),
            ):
                difference = max(difference, abs(found / claimed - 1))
        worst = max(worst, difference)
        saved = 100 * (1 - frontier.energy_j / frontier.all_max_j)
        name = pipeline.schedule.value
        group.rows.append(
            [
                *(name, pipeline.replicas, pipeline.tensor_parallel, len(frontier)),
                *(frontier.fastest_s, frontier.best_s, f"{saved[0]:.2f}", f"{saved[-1]:.2f}"),
                *(f"{100 * frontier.gap.mean():.3f}", f"{difference:.1e}", f"{spent:.2f}"),
            ]
        )
        if difference > SAME:
            group.misses.append(f"{name}: simulated again, a point differs by {difference:.1e}")
        if len(frontier) < 2 or bool((np.diff(frontier.energy_j) >= 0).any()):
            group.misses.append(f"{name}: energy does not fall along the frontier")
    group.figures = {"frontiers": len(group.rows), "largest_difference": worst}
    return group


def _with_parts(profile: EnergyProfile) -> EnergyProfile:
    """Return a profile that also knows both halves of backward passes, and recomputation."""
    forward, backward = (
        np.flatnonzero(profile.kind == int(kind)) for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
    parts = [
        (np.arange(len(profile)), None, 1.0),
        (forward, Kind.RECOMPUTE, 1.0),
        (backward, Kind.BACKWARD_INPUT, INPUT_SHARE),
        (backward, Kind.BACKWARD_WEIGHT, 1 - INPUT_SHARE),
    ]
    kinds = [
        profile.kind[rows] if kind is None else np.full(len(rows), int(kind))
        for rows, kind, _ in parts
    ]
    return EnergyProfile(
        name=profile.name,
        origin=profile.origin,
        stage=np.concatenate([profile.stage[rows] for rows, _, _ in parts]),
        kind=np.concatenate(kinds),
        clock_mhz=np.concatenate([profile.clock_mhz[rows] for rows, _, _ in parts]),
        seconds=np.concatenate([profile.seconds[rows] * share for rows, _, share in parts]),
        joules=np.concatenate([profile.joules[rows] * share for rows, _, share in parts]),
        blocking_w=profile.blocking_w,
    )
