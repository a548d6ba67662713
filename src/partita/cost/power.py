"""Joules of a plan with every device at its highest clock, by the powers of the catalogue.

A device that computes draws its power limit, or what its catalogue entry says that it draws at the
highest clock if that is less; one that waits, moves data, loads or updates draws
``idle_w + 0.15 (max_w - idle_w)``. This is what the DVFS model of ``energy`` says at the highest
clock; what other clocks save is a question for the frontier. Devices that a plan does not use
are not charged.
"""

from collections.abc import Sequence

import numpy as np

from partita.core.cluster import Device
from partita.core.columns import Floats
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.program import Kind
from partita.core.timeline import Timeline
from partita.cost.durations import cluster_devices
from partita.errors import UnsupportedError

CLOCKED = (
    *(Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD),
    *(Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT),
)
"""Kinds of instructions that draw the power of computing."""
WAITING_SHARE = 0.15
"""Share of the way from idle to full power that a device draws in a transfer: gives the two powers
that Perseus measured, 83.6 W (A100 PCIe) and 70.4 W (A40), to 0.3 %."""


def waiting_power_w(idle_w: float, max_w: float) -> float:
    """Return the power of a device that waits for others."""
    return idle_w + WAITING_SHARE * (max_w - idle_w)


def step_joules(problem: Problem, plan: Plan, timeline: Timeline, step_s: float) -> float:
    """Return the modelled joules of a step of a plan, all clocks at their highest.

    Args:
        problem: The problem.
        plan: A plan for it.
        timeline: Its simulated step.
        step_s: Seconds from a step to the next.

    Raises:
        UnsupportedError: The power of a device is not known; names it.
    """
    clocked = np.isin(timeline.kind, [int(kind) for kind in CLOCKED])
    spent = (timeline.end_s - timeline.start_s)[clocked]
    busy: Floats = np.zeros(len(timeline.devices))
    np.add.at(busy, timeline.device[clocked], spent)
    devices = [problem.cluster.devices[i] for i in cluster_devices(problem, timeline.devices)]
    return joules_of(devices, busy, step_s)


def joules_of(devices: Sequence[Device], busy_s: Floats | float, step_s: float) -> float:
    """Return the modelled joules of devices that compute for some time of a step and wait else.

    Raises:
        UnsupportedError: The power of a device is not known; names it.
    """
    full = np.array([full_power_w(device) for device in devices])
    waiting = np.array([waiting_power_w(device.idle_w, device.max_w) for device in devices])
    return float((full * busy_s + waiting * np.maximum(0.0, step_s - busy_s)).sum())


def full_power_w(device: Device) -> float:
    """Return the power of a device that computes at its highest clock.

    Raises:
        UnsupportedError: It is not known.
    """
    if not device.max_w:
        raise UnsupportedError(
            f"metric 'energy': the power of device {device.name!r} of type "
            f"{device.type or 'unknown'!r} is not known; give power_w in a catalogue or cluster "
            "file, or use 'throughput'"
        )
    return min(device.max_w, device.dvfs.full_w or device.max_w)
