"""Time and energy of instructions by clock, and the trade-off that follows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType

import numpy as np

from partita.core.columns import (
    Bytes8,
    Columns,
    Displayed,
    Floats,
    Ints,
    column,
    every,
    frozen_array,
    names,
)
from partita.core.program import LAST_COMPUTE, Kind
from partita.core.solution import Solution
from partita.errors import InvalidInputError

TIE = 1e-9
"""Times and energies that differ by less, relatively, count as equal."""
SHORTEST_S = 1e-9
LONGEST_S = 1e6
"""Seconds that one instruction may take."""
MOST_J = 1e12
"""Joules that one instruction may use."""


class EnergyOrigin(StrEnum):
    """Origin of the joules of a profile."""

    MEASURED = "measured"
    PUBLISHED = "published"
    MODELLED = "modelled"


@dataclass(frozen=True, kw_only=True, eq=False)
class EnergyProfile(Columns):
    """Seconds and joules of the compute instructions of each stage, at each clock.

    A row is one instruction on one device. Kinds and stages that are absent run at one fixed clock
    and take what the cost model says.

    Attributes:
        name: Its name in tables.
        origin: Origin of the figures.
        device_types: The types of device that rows refer to; ``""`` = any.
        stage: The stage.
        kind: ``Kind`` of the instruction, a compute kind.
        device_type: Index into ``device_types``.
        clock_mhz: The clock.
        seconds: Time of one instruction.
        joules: Energy of one instruction.
        blocking_w: Power of a device while it waits, by type; ``""`` = any.
        switch_s: Seconds that a device waits whenever its clock changes.
    """

    name: str = "profile"
    origin: EnergyOrigin = EnergyOrigin.MEASURED
    device_types: tuple[str, ...] = ("",)
    stage: Ints
    kind: Bytes8
    device_type: Ints = every(0)
    clock_mhz: Floats
    seconds: Floats
    joules: Floats
    blocking_w: Mapping[str, float] = field(default_factory=dict)
    switch_s: float = field(default=0.0, metadata={"silent": True})

    def __post_init__(self) -> None:
        rows = np.size(self.stage)
        if not (0 <= self.switch_s <= LONGEST_S):
            raise InvalidInputError(
                f"switch_s of the energy profile is {self.switch_s}; expected seconds >= 0"
            )
        if not rows:
            raise InvalidInputError("an energy profile needs at least one row")
        types = tuple(self.device_types)
        if types != ("",):
            names([name or "any" for name in types], "device types of the energy profile")
        self._set(
            device_types=types,
            stage=column(self.stage, np.int32, rows, "stage"),
            kind=column(self.kind, np.int8, rows, "kind", high=int(LAST_COMPUTE)),
            device_type=column(
                self.device_type, np.int32, rows, "device type", high=len(types) - 1
            ),
            clock_mhz=column(self.clock_mhz, np.float64, rows, "clock_mhz", low=1),
            seconds=column(
                self.seconds, np.float64, rows, "seconds", low=SHORTEST_S, high=LONGEST_S
            ),
            joules=column(self.joules, np.float64, rows, "joules", high=MOST_J),
            blocking_w=MappingProxyType(dict(self.blocking_w)),
        )
        for name, power in self.blocking_w.items():
            if not (power >= 0 and math.isfinite(power)):
                raise InvalidInputError(
                    f"blocking power of {name or 'any device'!r} is {power}; expected watts >= 0"
                )
        key = np.stack([self.stage, self.kind, self.device_type, self.clock_mhz])
        _, first, count = np.unique(key, axis=1, return_index=True, return_counts=True)
        if len(count) < rows:
            row = int(first[np.argmax(count > 1)])
            kind = Kind(int(self.kind[row])).name.lower()
            raise InvalidInputError(
                f"stage {self.stage[row]}, {kind} at {self.clock_mhz[row]:g} MHz stands twice in "
                "the energy profile"
            )

    def __len__(self) -> int:
        return len(self.stage)

    @property
    def num_stages(self) -> int:
        """Number of stages that it speaks of."""
        return int(self.stage.max()) + 1

    @property
    def has_choice(self) -> bool:
        """Whether some instruction can run at more than one clock."""
        key = np.stack([self.stage, self.kind, self.device_type])
        return bool(np.unique(key, axis=1).shape[1] < len(self))

    def blocking_power_w(self, device_type: str) -> float:
        """Return the power of a waiting device of a type.

        Raises:
            InvalidInputError: It is not known.
        """
        for name in (device_type, ""):
            if name in self.blocking_w:
                return self.blocking_w[name]
        raise InvalidInputError(
            f"the blocking power of {device_type or 'the devices'!r} is not known; give it in watts"
        )

    def rows_of(self, stage: int, kind: int, device_type: str) -> Ints:
        """Return the rows for an instruction on a type of device; those of ``""`` hold for any."""
        here = (self.stage == stage) & (self.kind == kind)
        for name in (device_type, ""):
            if name in self.device_types:
                index = self.device_types.index(name)
                rows = np.flatnonzero(here & (self.device_type == index))
                if len(rows):
                    return frozen_array(rows, np.int32)
        return frozen_array([], np.int32)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Frontier(Displayed):
    """Iteration time against energy; every point is a real clock for every compute instruction.

    Points are ordered from the fastest to the slowest. Time and energy are what the simulator
    measures with the profile's own figures, blocking power included.

    Attributes:
        devices: Names of the devices.
        num_instructions: Rows of the Program; the clocks of point p are rows
            ``p * num_instructions`` and on of ``clock_mhz``.
        time_s: Iteration time of each point.
        energy_j: Energy of each point.
        bound_j: No assignment of clocks needs less energy in that time.
        clock_mhz: Clock of each instruction at each point; 0 = none is set.
        all_max_s: Iteration time with every instruction at its highest clock.
        all_max_j: Energy of that.
        fastest_s: The shortest iteration time that any clocks reach.
        best_s: The iteration time of least energy, T*, with clocks between the measured ones.
        origin: Origin of the joules.
        solution: The plan whose step this is, so that a frontier needs no other file; None where
            it is not known.
        profile: The seconds and joules that it was solved with; None where they are not known.
    """

    devices: tuple[str, ...]
    num_instructions: int
    time_s: Floats
    energy_j: Floats
    bound_j: Floats
    clock_mhz: Floats
    all_max_s: float
    all_max_j: float
    fastest_s: float
    best_s: float
    origin: EnergyOrigin = EnergyOrigin.MEASURED
    solution: Solution | None = None
    profile: EnergyProfile | None = None

    def __post_init__(self) -> None:
        points = np.size(self.time_s)
        if not points:
            raise InvalidInputError("a frontier needs at least one point")
        self._set(
            devices=names(self.devices, "devices of the frontier"),
            time_s=column(self.time_s, np.float64, points, "time_s"),
            energy_j=column(self.energy_j, np.float64, points, "energy_j"),
            bound_j=column(self.bound_j, np.float64, points, "bound_j"),
            clock_mhz=column(
                self.clock_mhz, np.float64, points * self.num_instructions, "clock_mhz"
            ),
        )
        if bool((np.diff(self.time_s) < 0).any()):
            raise InvalidInputError("the points of a frontier must go from fast to slow")
        for name in ("all_max_s", "all_max_j", "fastest_s", "best_s"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise InvalidInputError(f"{name} is {value}; expected more than 0, finite")
        if not self.time_s[0] > 0:
            raise InvalidInputError(f"time_s of row 0 is {self.time_s[0]}; expected more than 0")

    def __len__(self) -> int:
        return len(self.time_s)

    @cached_property
    def gap(self) -> Floats:
        """Distance that each point may be above the least energy in its time, relative."""
        return frozen_array(self.energy_j / np.maximum(self.bound_j, 1e-300) - 1, np.float64)

    @cached_property
    def better_than_all_max(self) -> tuple[int, ...]:
        """Points that are faster than all clocks at their highest, and cheaper.

        They exist where the highest clock throttles.
        """
        faster = self.time_s < self.all_max_s * (1 - TIE)
        cheaper = self.energy_j < self.all_max_j * (1 - TIE)
        return tuple(np.flatnonzero(faster & cheaper).tolist())

    def clocks(self, point: int) -> Floats:
        """Return the clock of every instruction at a point; 0 = none is set."""
        start = point * self.num_instructions
        return self.clock_mhz[start : start + self.num_instructions]
