"""Small pipelines against the exact integer program; a large one for its CPU seconds."""

from pathlib import Path

import numpy as np
from _energy_data import synthetic
from _planners_common import Group, timed
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_array, eye_array, hstack

from partita.core.energy import EnergyProfile
from partita.energy.frontier.frontier import EnergyModel, solve_frontier
from partita.energy.frontier.pipeline import Pipeline, pipeline_model
from partita.energy.frontier.precedence import precedence_of

MILP_POINTS, MILP_LIMIT_S, WANTED_MILP = 3, 60.0, 0.002
STAGES, MICROBATCHES, POINTS = 16, 256, 20
WANTED_CPU_S, WANTED_GAP = 120.0, 0.01


def measure_milp(data: Path) -> Group:
    """Compare 4 stages and 4 microbatches with scipy's MILP at some times."""
    group = Group(
        title=f"4x4 against scipy's MILP, {MILP_LIMIT_S:g} s each",
        headers=("T s", "ours J", "MILP J", "closed", "ours over MILP %", "our gap %"),
    )
    model = pipeline_model(synthetic(data, 4), Pipeline(microbatches=4))
    frontier = solve_frontier(model, points=24)
    for point in np.linspace(0, len(frontier) - 1, MILP_POINTS).astype(int).tolist():
        time_s, energy_j = float(frontier.time_s[point]), float(frontier.energy_j[point])
        solved, least = _exact(model, time_s)
        over = energy_j / least - 1
        closed = "yes" if solved.status == 0 else "no, its incumbent"
        group.rows.append(
            [
                time_s,
                energy_j,
                least,
                closed,
                f"{100 * over:.3f}",
                f"{100 * frontier.gap[point]:.3f}",
            ]
        )
        if over > WANTED_MILP:
            group.misses.append(f"{time_s:.4f} s: {over:.2%} above the MILP")
        if solved.status == 0 and frontier.bound_j[point] > least * (1 + 1e-6):
            group.misses.append(f"{time_s:.4f} s: the bound is above the optimum")
    group.figures = {"most_over_milp_percent": max(float(row[4]) for row in group.rows)}
    return group


def _exact(model: EnergyModel, limit_s: float) -> tuple[OptimizeResult, float]:
    """Return the integer program's result and its energy: an option each, starts in order."""
    options = model.options
    net = precedence_of(model.program, model.found, options)
    own = [np.arange(options.ptr[i], options.ptr[i + 1]) for i in net.activity]
    rows = np.concatenate(own)
    owner = np.repeat(np.arange(len(net)), [len(part) for part in own])
    count, width, edges = len(net), len(rows), len(net.lag)
    one = csr_array((np.ones(width), (owner, np.arange(width))), shape=(count, width))
    seconds = csr_array((options.seconds[rows], (owner, np.arange(width))), shape=(count, width))
    ends = np.concatenate([net.target, net.source])
    places = (np.tile(np.arange(edges), 2), ends)
    order = csr_array((np.repeat([1.0, -1.0], edges), places), shape=(edges, count))
    solved = milp(
        np.concatenate([options.joules[rows], np.zeros(count)]),
        integrality=np.concatenate([np.ones(width), np.zeros(count)]),
        bounds=Bounds(
            np.concatenate([np.zeros(width), net.release]),
            np.concatenate([np.ones(width), np.full(count, limit_s)]),
        ),
        constraints=[
            LinearConstraint(hstack([one, csr_array((count, count))]), 1, 1),
            LinearConstraint(hstack([-seconds[net.source], order]), net.lag, np.inf),
            LinearConstraint(
                hstack([seconds, eye_array(count)]), -np.inf, limit_s * (1 + 1e-9) - net.tail
            ),
        ],
        options={"time_limit": MILP_LIMIT_S},
    )
    others = np.setdiff1d(np.arange(len(model.found)), net.activity)
    fixed_j = float(options.joules[options.ptr[others]].sum())
    return solved, float(solved.fun) + fixed_j + options.blocking_w * limit_s


def measure_growth(data: Path) -> Group:
    """Solve 16 stages and 256 microbatches, the profile of eight stages twice."""
    group = Group(
        title=f"{STAGES} stages x {MICROBATCHES} microbatches, {POINTS} points",
        headers=("instructions", "points", "CPU s", "mean gap %", "largest gap %"),
    )
    half = synthetic(data, STAGES // 2)
    profile = EnergyProfile(
        name=half.name,
        origin=half.origin,
        stage=np.concatenate([half.stage, half.stage + half.num_stages]),
        kind=np.tile(half.kind, 2),
        clock_mhz=np.tile(half.clock_mhz, 2),
        seconds=np.tile(half.seconds, 2),
        joules=np.tile(half.joules, 2),
        blocking_w=half.blocking_w,
    )
    pipeline = Pipeline(microbatches=MICROBATCHES)
    frontier, spent = timed(
        lambda: solve_frontier(pipeline_model(profile, pipeline), points=POINTS)
    )
    gap = float(frontier.gap.max())
    group.rows.append(
        [
            *(frontier.num_instructions, len(frontier), f"{spent:.1f}"),
            *(f"{100 * frontier.gap.mean():.3f}", f"{100 * gap:.3f}"),
        ]
    )
    if spent > WANTED_CPU_S:
        group.misses.append(f"{spent:.0f} CPU seconds, limit {WANTED_CPU_S:.0f}")
    if gap > WANTED_GAP:
        group.misses.append(f"gap {gap:.2%}, limit {WANTED_GAP:.0%}")
    group.figures = {"cpu_s": spent, "largest_gap_percent": 100 * gap}
    return group
