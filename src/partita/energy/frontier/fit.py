"""Profiles for schedules they were not made for: backward in two halves, and what is missing."""

from dataclasses import replace

import numpy as np

from partita.core.energy import EnergyProfile
from partita.core.problem import Schedule
from partita.core.program import Kind
from partita.core.solution import Solution
from partita.cost.power import CLOCKED
from partita.energy.frontier.clock_plan import NAMES
from partita.program.lower import lower

HALVES = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def split_backward(
    profile: EnergyProfile, schedule: Schedule
) -> tuple[EnergyProfile, tuple[str, ...]]:
    """Return a profile with the kinds of backward that a schedule has, and what was assumed.

    Where only whole backwards are known, each half takes half of the seconds and the joules.
    """
    whole = profile.kind == int(Kind.BACKWARD)
    known = bool(np.isin(profile.kind, [int(kind) for kind in HALVES]).any())
    if not schedule.row.splits_backward or known or not bool(whole.any()):
        return profile, ()
    rows = np.concatenate([np.flatnonzero(~whole), *[np.flatnonzero(whole)] * len(HALVES)])
    kind = profile.kind[rows].copy()
    first = len(rows) - len(HALVES) * int(whole.sum())
    kind[first:] = np.repeat([int(half) for half in HALVES], int(whole.sum()))
    share = np.where(np.arange(len(rows)) < first, 1.0, 1 / len(HALVES))
    split = replace(
        profile,
        stage=profile.stage[rows],
        kind=kind,
        device_type=profile.device_type[rows],
        clock_mhz=profile.clock_mhz[rows],
        seconds=profile.seconds[rows] * share,
        joules=profile.joules[rows] * share,
    )
    return split, ("gradients of inputs and of weights take half of backward each",)


def without_energy(solution: Solution, profile: EnergyProfile) -> tuple[str, ...]:
    """Return a sentence for each kind of instruction of a plan that the profile does not know."""
    program = lower(solution.problem, solution.plan)
    cluster = solution.problem.cluster
    types = [cluster.devices[cluster.index_of[name]].type for name in program.devices]
    missing: dict[Kind, set[int]] = {}
    columns = np.stack([program.stage, program.kind, program.device], axis=1)
    for stage, kind, device in np.unique(columns, axis=0).tolist():
        if Kind(kind) in CLOCKED and not len(profile.rows_of(stage, kind, types[device])):
            missing.setdefault(Kind(kind), set()).add(stage)
    words = tuple(
        f"{NAMES[kind]} of stage{'s' * (len(stages) > 1)} {', '.join(map(str, sorted(stages)[:6]))}"
        f"{', ...' if len(stages) > 6 else ''} is not in the profile, and counts as waiting"
        for kind, stages in missing.items()
    )
    if solution.plan.schedule.row.recomputes_early and not solution.plan.recompute.any():
        words = (*words, "nothing is recomputed, so early recomputation is plain 1f1b")
    return words
