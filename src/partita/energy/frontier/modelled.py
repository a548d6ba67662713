"""The DVFS model: time and power of an instruction by clock, for devices that nobody has here.

With ``x`` the clock over the highest one, an instruction whose share ``m`` does not depend on the
clock (memory, launches) takes ``m + (1 - m) / x``. The voltage falls in a straight line from 1 at
the highest clock to ``v`` at the knee ``k`` and no further, and power is a part that does not
depend on the clock and one that grows with clock and squared voltage:

    V(x) = v + (1 - v) max(x - k, 0) / (1 - k)        P(x) = full_w (s + (1 - s) x V(x)^2)

Above the clock at which ``P`` reaches the power limit the board throttles: it is told a higher
clock, but time and power stay what they are there. A device that waits in a transfer draws
``idle_w + b (max_w - idle_w)`` (``cost/power.py``). Loading and weight updates take the same time
at every clock; they count as waiting.

The constants are those of the type (``Dvfs``, from the catalogue); a pass that is computed again
counts as forward, the halves of a backward pass as backward. They were fitted to the published
Perseus profiles from 855 MHz to the highest clock. On A100 (GPT-3 175B and Bloom 176B; boards held
at 469 and 458 W, so the model with these limits) it is off by at most 2.0 % in time and 5.6 % in
watts, on A40 (GPT-3 175B, 300 W) by 4.5 % and 4.8 %; the largest error in time is a jump of the
board, whose backward passes become faster from 990 to 960 MHz. With the catalogue's 400 W an A100
throttles at 1291 MHz, which is an extrapolation. Other types use the A100's constants and never
throttle, which nobody has checked: where a profile can be had, take that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from partita.core.cluster import Cluster, Dvfs
from partita.core.columns import Array
from partita.core.energy import EnergyOrigin, EnergyProfile
from partita.core.program import Kind, Program
from partita.cost.power import CLOCKED, waiting_power_w
from partita.errors import InvalidInputError

_FORWARD = (Kind.FORWARD, Kind.RECOMPUTE)
_HALVINGS = 60
"""Of the interval in which the clock lies at which a device throttles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DvfsCurve:
    """Time and power of one device by its clock.

    Attributes:
        clocks_mhz: Clocks that can be set, highest first.
        idle_w: Power without work.
        max_w: Power limit.
        dvfs: The constants of its type.
        throttle_mhz: It keeps no higher clock under load, whatever its power; 0 = as power allows.
        kept_mhz: The highest clock that it keeps under load.
    """

    clocks_mhz: tuple[int, ...]
    idle_w: float
    max_w: float
    dvfs: Dvfs = field(default_factory=Dvfs)
    throttle_mhz: float = 0.0
    kept_mhz: float = field(init=False)

    def __post_init__(self) -> None:
        clocks = self.clocks_mhz
        if not clocks or min(clocks) < 1 or list(clocks) != sorted(set(clocks), reverse=True):
            raise InvalidInputError(f"clocks are {clocks}; expected whole MHz, highest first")
        if not 0 <= self.idle_w < self.max_w:
            raise InvalidInputError(
                f"power is {self.idle_w:g} W idle and {self.max_w:g} W at most; expected 0 or "
                "more, and more than that"
            )
        if self.throttle_mhz and not clocks[-1] <= self.throttle_mhz <= clocks[0]:
            raise InvalidInputError(
                f"throttle is {self.throttle_mhz:g} MHz; expected a clock from {clocks[-1]} to "
                f"{clocks[0]}"
            )
        kept = min(self._limited_mhz(), self.throttle_mhz or float(clocks[0]))
        object.__setattr__(self, "kept_mhz", kept)

    @property
    def blocking_w(self) -> float:
        """Power while it waits for other devices."""
        return waiting_power_w(self.idle_w, self.max_w)

    def fixed_share(self, kind: Kind) -> float:
        """Return the share of an instruction that no clock makes faster."""
        if kind not in CLOCKED:
            return 1.0
        return self.dvfs.fixed_forward if kind in _FORWARD else self.dvfs.fixed_backward

    def stretch(self, kind: Kind, mhz: float) -> float:
        """Return how many times as long an instruction takes as at the highest clock."""
        return self.stretch_of(self.fixed_share(kind), mhz)

    def stretch_of(self, fixed_share: float, mhz: float) -> float:
        """Return how many times as long something takes, of which a share knows no clock."""
        top, kept = self.clocks_mhz[0], self.kept_mhz
        at, at_most = (fixed_share + (1 - fixed_share) * top / x for x in (min(mhz, kept), kept))
        return at / at_most

    def power_w(self, kind: Kind, mhz: float) -> float:
        """Return the power during an instruction."""
        if kind not in CLOCKED:
            return self.blocking_w
        return min(self._free_w(min(mhz, self.kept_mhz)), self.max_w)

    def _free_w(self, mhz: float) -> float:
        """Return the power of computing at a clock, if nothing limited it."""
        dvfs, ratio = self.dvfs, mhz / self.clocks_mhz[0]
        above = max(ratio - dvfs.knee, 0.0) / (1 - dvfs.knee)
        voltage = dvfs.floor_voltage + (1 - dvfs.floor_voltage) * above
        dynamic = (1 - dvfs.static_share) * ratio * voltage * voltage
        return (dvfs.full_w or self.max_w) * (dvfs.static_share + dynamic)

    def _limited_mhz(self) -> float:
        """Return the highest clock that the power limit allows; the lowest one is always kept."""
        low, high = float(self.clocks_mhz[-1]), float(self.clocks_mhz[0])
        if self._free_w(high) <= self.max_w:
            return high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._free_w(middle) <= self.max_w else (low, middle)
        return low


def whole_clocks(clocks_mhz: tuple[float, ...], step_mhz: float = 0.0) -> tuple[int, ...]:
    """Return clocks as drivers list them, whole and highest first.

    Args:
        clocks_mhz: The clocks, in any order.
        step_mhz: The least distance between two that are kept, from the highest on; 0 = all.
    """
    kept: list[int] = []
    for clock in sorted({int(clock) for clock in clocks_mhz}, reverse=True):
        if not kept or kept[-1] - clock >= step_mhz:
            kept.append(clock)
    return tuple(kept)


class ClockedType(Protocol):
    """What the catalogue or a cluster knows of a device."""

    @property
    def clocks_mhz(self) -> tuple[float, ...]:
        """Its clocks; empty = not known."""
        ...

    @property
    def idle_w(self) -> float:
        """Its power without work."""
        ...

    @property
    def max_w(self) -> float:
        """Its power limit; 0 = not known."""
        ...

    @property
    def dvfs(self) -> Dvfs:
        """How its time and power depend on its clock."""
        ...


def curve_of(
    device: ClockedType,
    *,
    what: str,
    throttle_mhz: float = 0.0,
    step_mhz: float = 0.0,
) -> DvfsCurve:
    """Return the curve of a device from its catalogue figures.

    Args:
        device: The device, or its type.
        what: What it is called in messages.
        throttle_mhz: The highest clock that it keeps under load; 0 = as its power limit allows.
        step_mhz: The least distance between two clocks that are taken; 0 = all.

    Raises:
        InvalidInputError: Its clocks or its power are not known, or make no sense.
    """
    for known, name in ((device.clocks_mhz, "clocks_mhz"), (device.max_w, "power_w")):
        if not known:
            raise InvalidInputError(
                f"{what}: {name} is not known, so its energy cannot be modelled; give it in a "
                "catalogue file, or take a type of the catalogue"
            )
    try:
        return DvfsCurve(
            clocks_mhz=whole_clocks(device.clocks_mhz, step_mhz),
            idle_w=device.idle_w,
            max_w=device.max_w,
            dvfs=device.dvfs,
            throttle_mhz=throttle_mhz,
        )
    except InvalidInputError as exc:
        raise InvalidInputError(f"{what}: {exc}") from exc


def modelled_profile(
    program: Program,
    cluster: Cluster,
    seconds: Array,
    *,
    name: str = "modelled",
    throttle_mhz: float = 0.0,
    step_mhz: float = 0.0,
) -> EnergyProfile:
    """Return the modelled energy profile of a Program.

    Args:
        program: The Program.
        cluster: Its machines; their devices say which clocks and powers they have.
        seconds: Duration of each row at the highest clock, as ``instruction_seconds`` says. Of
            microbatches of different sizes the longest counts.
        name: What to call it.
        throttle_mhz: The highest clock that the devices keep under load; 0 = as power allows.
        step_mhz: The least distance between two clocks that are taken; 0 = all.

    Raises:
        InvalidInputError: A device has no clocks or powers; names it.
    """
    devices = [cluster.devices[cluster.index_of[device]] for device in program.devices]
    longest: dict[tuple[int, Kind, str], float] = {}
    for row in np.flatnonzero(np.isin(program.kind, [int(kind) for kind in CLOCKED])).tolist():
        device = devices[int(program.device[row])]
        key = (int(program.stage[row]), Kind(int(program.kind[row])), device.type)
        longest[key] = max(longest.get(key, 0.0), float(seconds[row]))
    curves = {
        device.type: curve_of(
            device,
            what=f"device {device.name!r} of type {device.type!r}",
            throttle_mhz=throttle_mhz,
            step_mhz=step_mhz,
        )
        for device in devices
    }
    return _profile(longest, curves, name)


def stages_profile(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    device: ClockedType,
    *,
    device_type: str,
    name: str = "stages",
) -> EnergyProfile:
    """Return the modelled energy profile of stages of which only the times are known.

    Args:
        forward_s: Seconds of the forward pass of a microbatch at the highest clock, by stage.
        backward_s: Seconds of the backward pass, likewise.
        device: The type of device that all of them run on.
        device_type: Its name.
        name: What to call the profile.

    Raises:
        InvalidInputError: The clocks or the power of the type are not known.
    """
    longest = {
        (stage, kind, device_type): each_s
        for kind, times_s in ((Kind.FORWARD, forward_s), (Kind.BACKWARD, backward_s))
        for stage, each_s in enumerate(times_s)
    }
    return _profile(longest, {device_type: curve_of(device, what=f"type {device_type!r}")}, name)


def _profile(
    top_s: Mapping[tuple[int, Kind, str], float], curves: Mapping[str, DvfsCurve], name: str
) -> EnergyProfile:
    """Return the profile of stages whose times at the highest clock are known, by kind and type."""
    types = tuple(sorted(curves))
    rows = [
        (stage, int(kind), types.index(type_), clock, took, took * curve.power_w(kind, clock))
        for (stage, kind, type_), longest_s in sorted(top_s.items())
        if longest_s > 0
        for curve in (curves[type_],)
        for clock in curve.clocks_mhz
        for took in (longest_s * curve.stretch(kind, clock),)
    ]
    if not rows:
        raise InvalidInputError("the program computes nothing that depends on a clock")
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return EnergyProfile(
        name=name,
        origin=EnergyOrigin.MODELLED,
        device_types=types,
        stage=columns[0],
        kind=columns[1],
        device_type=columns[2],
        clock_mhz=columns[3],
        seconds=columns[4],
        joules=columns[5],
        blocking_w={type_: curve.blocking_w for type_, curve in curves.items()},
    )
