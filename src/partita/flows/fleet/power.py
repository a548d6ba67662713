"""Modelled frontiers for jobs of a fleet: which share of its speed a job keeps at how many watts.

The DVFS model of the energy part gives time and power of a device by its clock. A job whose share
``m`` of an iteration does not depend on the clock keeps ``1 / (m + (1 - m) / x)`` of its speed at
the clock ``x`` (relative to the highest that the power limit allows), at the power of a device that
computes. Where nothing is known of a job its ``m`` is that of a transformer's forward and backward
pass. All is modelled, and labelled so: `Sensitivity.machine` names the type.
"""

from dataclasses import replace

import numpy as np

from partita.catalogue.catalogue import DeviceType
from partita.core.energy import Frontier
from partita.core.fleet import Sensitivity, Trace
from partita.core.program import Kind
from partita.energy.frontier.modelled import curve_of

LOWEST_CLOCK = 0.3
"""Clocks below this share of the highest are left out: no job is worth running there."""
POINTS = 24


def modelled_words(gpu_type: str) -> str:
    """Return how a modelled type is named where a machine would be."""
    return f"modelled {gpu_type}"


def with_frontier(
    part: Sensitivity, gpu: DeviceType, *, fixed_share: float | None = None
) -> Sensitivity:
    """Return a sensitivity with the frontier of a type of GPU.

    Args:
        part: The sensitivity.
        gpu: The type.
        fixed_share: Share of an iteration that no clock makes shorter; None = not known.

    Raises:
        InvalidInputError: Clocks or powers of the type are not known.
    """
    top = max(gpu.clocks_mhz, default=0.0)
    useful = tuple(clock for clock in gpu.clocks_mhz if clock >= LOWEST_CLOCK * top)
    curve = curve_of(
        replace(gpu, clocks_mhz=useful),
        what=f"type {gpu.name!r}",
        step_mhz=(1 - LOWEST_CLOCK) * top / POINTS,
    )
    if fixed_share is None:
        fixed_share = (gpu.dvfs.fixed_forward + 2 * gpu.dvfs.fixed_backward) / 3
    throttled = sum(clock >= curve.kept_mhz for clock in curve.clocks_mhz)
    clocks = curve.clocks_mhz[throttled - 1 :]
    length = np.array([curve.stretch_of(fixed_share, clock) for clock in clocks])
    return replace(
        part,
        machine=part.machine or modelled_words(gpu.name),
        frontier_speed=length[0] / length,
        frontier_w=np.array([curve.power_w(Kind.FORWARD, float(clock)) for clock in clocks]),
    )


def with_frontiers(trace: Trace, gpu: DeviceType) -> Trace:
    """Return a trace whose jobs all carry a frontier; those that have one keep it.

    Raises:
        InvalidInputError: Clocks or powers of the type are not known.
    """
    parts = tuple(
        part if len(part.frontier_w) else with_frontier(part, gpu) for part in trace.sensitivities
    )
    return replace(trace, sensitivities=parts)


def with_step_frontier(part: Sensitivity, frontier: Frontier) -> Sensitivity:
    """Return a sensitivity with the frontier of a plan: the fastest step is the full speed."""
    seconds, joules = frontier.time_s, frontier.energy_j
    return replace(
        part,
        frontier_speed=float(seconds.min()) / seconds,
        frontier_w=joules / seconds / len(frontier.devices),
    )
