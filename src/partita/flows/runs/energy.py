"""The energy of a run: joules of its steps by clock plan, and its logs as Perseus's files."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from partita.core.energy import EnergyOrigin
from partita.documents import write_text
from partita.energy.client.counter import EnergyUse, StepUse
from partita.formats.perseus import (
    INSTRUCTIONS,
    Logged,
    write_energy_log,
    write_instruction_log,
)
from partita.runtime.executor import Run
from partita.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanUse:
    """Steps, one after the other, in which no rank had other clocks than in the step before.

    Attributes:
        version: Of the newest plan that a rank had; None = none was in force.
        state: What it is for; ``""`` = there was none.
        first_step: The first of the steps.
        steps: How many.
        step_s: Median seconds of a step: of the rank that took longest, by the clock of its device.
        step_j: Median joules of a step, of all ranks; None = not known.
    """

    version: int | None
    state: str
    first_step: int
    steps: int
    step_s: float
    step_j: float | None


def plan_uses(run: Run) -> list[PlanUse]:
    """Return what steps took under each clock plan, in the order of the run."""
    ranks = [use.steps for use in run.energy.values()]
    found = []
    for plans, group in groupby(zip(*ranks, strict=False), key=_plans_of):
        steps = list(group)
        joules = [_joules(step) for step in steps]
        version, state = max(plans, key=lambda plan: plan[0])
        found.append(
            PlanUse(
                version=None if version < 0 else version,
                state=state,
                first_step=steps[0][0].step,
                steps=len(steps),
                step_s=median(max(rank.seconds for rank in step) for step in steps),
                step_j=None if None in joules else median(j for j in joules if j is not None),
            )
        )
    return found


def _plans_of(step: Sequence[StepUse]) -> tuple[tuple[int, str], ...]:
    """Return version and state of each rank's plan; -1 = it has none."""
    return tuple((-1 if rank.version is None else rank.version, rank.state) for rank in step)


def _joules(step: Sequence[StepUse]) -> float | None:
    known = [rank.joules for rank in step if rank.joules is not None]
    return sum(known) if len(known) == len(step) else None


def origin_of(run: Run) -> str:
    """Return whether the joules of a run are measured or modelled."""
    return "+".join(sorted({use.origin.value for use in run.energy.values()}))


def energy_figures(run: Run) -> dict[str, Any] | None:
    """Return the energy of a run as JSON values; None = it was not asked for."""
    if not run.energy:
        return None
    return {
        "origin": origin_of(run),
        "plans": [asdict(use) for use in plan_uses(run)],
        "ranks": [
            {
                "device": name,
                "power_device": use.device,
                "step_s": [step.seconds for step in use.steps],
                "step_j": [step.joules for step in use.steps],
                "version": [step.version for step in use.steps],
                "slowdown": [step.slowdown for step in use.steps],
                "remarks": use.remarks,
            }
            for name, use in run.energy.items()
        ],
    }


def energy_lines(run: Run) -> list[str]:
    """Return the energy of a run for people: its last plan beside its first one."""
    uses = plan_uses(run)
    if not uses:
        return []
    lines = [f"energy    {_described(uses[-1], origin_of(run))}"]
    first, last = uses[0], uses[-1]
    if len(uses) > 1 and first.step_j and last.step_j is not None:
        lines.append(
            f"          before: {_described(first, origin_of(run))}; since then "
            f"{last.step_j / first.step_j - 1:+.1%} energy, {last.step_s / first.step_s - 1:+.1%} "
            "time"
        )
    said = {remark: None for use in run.energy.values() for remark in use.remarks}
    return [*lines, *(f"          {remark}" for remark in said)]


def _described(use: PlanUse, origin: str) -> str:
    plan = "no plan" if use.version is None else f"plan {use.version}, {use.state}"
    joules = "unknown" if use.step_j is None else f"{use.step_j:.4g} J per step {origin}"
    steps = "1 step" if use.steps == 1 else f"{use.steps} steps"
    return f"{joules}, {format_seconds(use.step_s)} ({plan}, {steps})"


def export_timing(run: Run, directory: Path) -> list[str]:
    """Write ``instructions-%d.csv`` and ``time-energy-%d.csv`` of every rank; returns their names.

    Where the energy of a rank is not known, its second file is not written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    names = []
    for rank, use in enumerate(run.energy.values()):
        names.append(f"instructions-{rank}.csv")
        write_text(directory / names[-1], write_instruction_log(_logged(use)))
        if use.is_known and len(use.readings) > 1:
            times, joules = zip(*use.readings, strict=True)
            names.append(f"time-energy-{rank}.csv")
            epoch = [time_s + use.epoch_s for time_s in times]
            modelled = use.origin is EnergyOrigin.MODELLED
            write_text(directory / names[-1], write_energy_log(epoch, joules, modelled=modelled))
    return [str(directory / name) for name in names]


def _logged(use: EnergyUse) -> list[Logged]:
    return [
        Logged(
            INSTRUCTIONS[window.name],
            window.begin.time_s + use.epoch_s,
            window.end.time_s + use.epoch_s,
            float(window.clock_mhz) if window.clock_mhz else math.nan,
        )
        for window in use.windows
    ]
