"""Recorded logs of a run, step by step, against the same clocks in the simulator."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from partita.core.columns import Array
from partita.energy.frontier.frontier import EnergyModel
from partita.energy.frontier.savings import played
from partita.errors import InvalidInputError
from partita.formats.perseus import Logged


class RankLog(NamedTuple):
    """What a rank recorded.

    Attributes:
        logged: Its instructions, in their order of time.
        readings: Times and joules of its counter; None where it has none.
        is_modelled: Whether the counter is that of a modelled device.
    """

    logged: Sequence[Logged]
    readings: tuple[Array, Array] | None
    is_modelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """A recorded step and the same clocks simulated.

    Attributes:
        measured_s: Seconds from its first instruction to the end of its last, over all ranks.
        measured_j: Joules that the counters rose by meanwhile; NaN where one is missing.
        time_s: Seconds in the simulator.
        energy_j: Joules in the simulator.
    """

    measured_s: float
    measured_j: float
    time_s: float
    energy_j: float

    def to_json(self) -> dict[str, Any]:
        """Return the step as JSON values; unknown energy is null."""
        known = not math.isnan(self.measured_j)
        return {
            "measured_s": self.measured_s,
            "measured_j": self.measured_j if known else None,
            "time_s": self.time_s,
            "energy_j": self.energy_j,
        }


def replay_log(model: EnergyModel, ranks: Sequence[RankLog]) -> list[ReplayedStep]:
    """Return every recorded step with what the simulator says of its clocks.

    Args:
        model: The Program and its profile.
        ranks: The log of each device of the Program, in its order.

    Raises:
        InvalidInputError: The logs are not of this Program, or do not say their clocks.
    """
    program = model.program
    if len(ranks) != len(program.devices):
        raise InvalidInputError(
            f"there are logs of {len(ranks)} ranks, and {len(program.devices)} devices"
        )
    places = [
        _rows_of(model, device, {int(one.kind) for one in rank.logged})
        for device, rank in enumerate(ranks)
    ]
    steps = _num_steps(model, places, ranks)
    result = []
    for step in range(steps):
        clocks = np.zeros(len(program))
        windows = []
        for rows, rank in zip(places, ranks, strict=True):
            part = rank.logged[step * len(rows) : (step + 1) * len(rows)]
            clocks[rows] = [
                _clock(one, program.kind[row]) for one, row in zip(part, rows, strict=True)
            ]
            windows.append((part[0].start_s, max(one.end_s for one in part)))
        begin, end = min(w[0] for w in windows), max(w[1] for w in windows)
        again = played(model, clocks)
        result.append(
            ReplayedStep(
                measured_s=end - begin,
                measured_j=sum(_used(rank, begin, end) for rank in ranks),
                time_s=again.time_s,
                energy_j=again.energy_j,
            )
        )
    return result


def _rows_of(model: EnergyModel, device: int, kinds: set[int]) -> list[int]:
    program = model.program
    rows = range(int(program.ptr[device]), int(program.ptr[device + 1]))
    return [row for row in rows if int(program.kind[row]) in kinds]


def _num_steps(model: EnergyModel, places: Sequence[list[int]], ranks: Sequence[RankLog]) -> int:
    counts = set()
    for device, (rows, rank) in enumerate(zip(places, ranks, strict=True)):
        name = model.program.devices[device]
        if not rows or len(rank.logged) % len(rows):
            raise InvalidInputError(
                f"rank {device} logged {len(rank.logged)} instructions; {name} has {len(rows)} of "
                "them in a step"
            )
        counts.add(len(rank.logged) // len(rows))
    if len(counts) != 1:
        raise InvalidInputError(f"the ranks logged different numbers of steps: {sorted(counts)}")
    return counts.pop()


def _clock(one: Logged, kind: int) -> float:
    if int(one.kind) != int(kind):
        raise InvalidInputError(
            f"the log has {one.kind.name.lower()} at {one.start_s} where the plan does another"
        )
    if math.isnan(one.clock_mhz):
        raise InvalidInputError(
            f"the clock of {one.kind.name.lower()} at {one.start_s} is not known; the log needs a "
            "column 'clock'"
        )
    return one.clock_mhz


def _used(rank: RankLog, begin: float, end: float) -> float:
    """Return the joules of a rank in a window; NaN where its counter does not cover it."""
    if rank.readings is None:
        return math.nan
    times, joules = rank.readings
    if begin < times[0] or end > times[-1]:
        return math.nan
    first, last = np.interp([begin, end], times, joules)
    return float(last - first)
