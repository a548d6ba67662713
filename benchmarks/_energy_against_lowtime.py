"""Our frontier against PyPI's lowtime, run here on the same profiles.

CPU: 50 points, from the profile to simulated clocks, in a warm process (compiled on another input),
against lowtime's whole sweep at 1 ms; a sweep that takes longer than its limit is stopped, and each
point that is missing is counted with the mean of the last tenth that ran, though later points cost
more. Energy: lowtime's clocks, simulated with the profile's own figures, against the cheapest of
ours that is no slower. A stopped sweep only has slow points, so that energies are those of a whole
sweep in a coarser unit where one is named.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from _energy_data import stage_profile, synthetic
from _energy_lowtime import LowtimeRun, run_lowtime
from _harness import cpu_s
from _planners_common import Group

from partita.core.energy import EnergyProfile, Frontier
from partita.energy.frontier.frontier import EnergyModel, solve_frontier
from partita.energy.frontier.pipeline import Pipeline, pipeline_model
from partita.energy.frontier.savings import played

POINTS, UNIT_S, WANTED_RATIO = 50, 0.001, 100.0
SAME = 1e-9


class Case(NamedTuple):
    """One comparison.

    Attributes:
        name: Stages and microbatches.
        profile: The stages.
        microbatches: Microbatches of a step.
        limit_s: CPU seconds for lowtime at 1 ms.
        coarse_s: Unit of the sweep that energies are compared with; 0 = that at 1 ms.
        ratio: Whether the ratio of CPU seconds is held to the limit.
    """

    name: str
    profile: EnergyProfile
    microbatches: int
    limit_s: float
    coarse_s: float = 0.0
    ratio: bool = True


def measure_group(data: Path) -> Group:
    """Compare CPU seconds and energy."""
    group = Group(
        title=f"lowtime at {UNIT_S * 1000:g} ms against {POINTS} points of ours",
        headers=(
            *("pipeline", "lowtime points", "of", "its CPU s", "whole sweep", "ours CPU s"),
            *("ratio", "compared", "its energy over ours: least", "mean", "our largest gap %"),
        ),
    )
    cases = [
        Case("4x8", synthetic(data, 4), 8, 60.0, ratio=False),
        Case("4x32", synthetic(data, 4), 32, 25.0, coarse_s=0.005),
        Case("8x32", synthetic(data, 8), 32, 30.0, coarse_s=0.005),
        Case("gpt3-175b a100 8x12", stage_profile(data, "gpt3-175b", "a100_sxm"), 12, 60.0),
    ]
    solve_frontier(pipeline_model(synthetic(data, 4), Pipeline(microbatches=5)), points=3)
    for case in cases:
        _compare(case, group)
    return group


def _compare(case: Case, group: Group) -> None:
    """Add the row of a case."""
    theirs = run_lowtime(case.profile, case.microbatches, unit_s=UNIT_S, cpu_limit_s=case.limit_s)
    ours_s = cpu_s(lambda: solve_frontier(_model(case), points=POINTS), repeats=3)
    frontier = solve_frontier(_model(case), points=POINTS)
    ratio = theirs.whole_cpu_s / ours_s
    compared = theirs
    if case.coarse_s:
        compared = run_lowtime(
            case.profile, case.microbatches, unit_s=case.coarse_s, cpu_limit_s=120.0
        )
    over = _energy_over_ours(case, compared)
    group.rows.append(
        [
            *(case.name, theirs.steps, theirs.steps_in_all, f"{theirs.cpu_s:.1f}"),
            *(f"{theirs.whole_cpu_s:.1f}", f"{ours_s:.3f}", f"{ratio:.0f}", len(over)),
            *(f"{over.min():.5f}", f"{over.mean():.5f}", f"{100 * frontier.gap.max():.3f}"),
        ]
    )
    if case.ratio and ratio < WANTED_RATIO:
        group.misses.append(f"{case.name}: {ratio:.0f} times less CPU, wanted {WANTED_RATIO:.0f}")
    if over.min() < 1 - SAME:
        group.misses.append(f"{case.name}: lowtime needs {over.min():.5f} of our energy somewhere")
    label = case.name.split()[-1]
    group.figures |= {f"ratio_{label}": ratio, f"least_energy_over_ours_{label}": over.min()}


def _model(case: Case) -> EnergyModel:
    return pipeline_model(case.profile, Pipeline(microbatches=case.microbatches))


def _energy_over_ours(case: Case, run: LowtimeRun) -> np.ndarray:
    """Return lowtime's realised energy over ours at no more than its realised time."""
    model = _model(case)
    program = model.program
    realised = []
    for point in run.points:
        keys = zip(
            program.stage.tolist(), program.kind.tolist(), program.microbatch.tolist(), strict=True
        )
        clocks = np.array([point.clocks.get(key, 0) for key in keys], dtype=float)
        step = played(model, clocks)
        realised.append((step.time_s, step.energy_j))
    ours = solve_frontier(model, points=POINTS, at=[time_s for time_s, _ in realised])
    return np.array([energy_j / _least(ours, time_s) for time_s, energy_j in realised])


def _least(frontier: Frontier, time_s: float) -> float:
    """Return the least energy of our points that are no slower."""
    return float(frontier.energy_j[frontier.time_s <= time_s * (1 + SAME)].min())
