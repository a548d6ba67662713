"""What the steps of a rank took in time and energy, by a counter that may change rarely.

A counter that is exact is read at both moments. Others, such as those of real GPUs that change
every 20 to 100 ms, are polled by a thread that notes each change; the joules between two moments
are those on the straight lines between the notes, and unknown where the moments lie closer together
than the counter can tell.
"""

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from partita.core.energy import EnergyOrigin
from partita.energy.devices.protocol import PowerDevice


class Stamp(NamedTuple):
    """A moment, and the counter then; None = not read, or not known."""

    time_s: float
    joules: float | None = None


class Window(NamedTuple):
    """One instruction that was carried out.

    Attributes:
        name: As plans call it.
        begin: When it began, and the counter then.
        end: When it ended.
        clock_mhz: The clock that was really set when it ended; 0 = not known.
    """

    name: str
    begin: Stamp
    end: Stamp
    clock_mhz: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end.time_s - self.begin.time_s


class StepUse(NamedTuple):
    """One step of a rank.

    Attributes:
        step: Its number.
        seconds: How long it took.
        joules: What it used; None = not known.
        version: The clock plan that was in force, by the version that first had its clocks; None =
            none was.
        state: What that plan is for: ``profiling`` or ``deployed``; ``""`` = there is none.
        slowdown: How many times as long its instructions took as they once did.
    """

    step: int
    seconds: float
    joules: float | None
    version: int | None
    state: str
    slowdown: float


@dataclass(frozen=True, kw_only=True)
class EnergyUse:
    """What a rank has to say of its energy after a run.

    Attributes:
        device: Name of its power device.
        origin: Whether joules are measured or modelled.
        steps: Its steps.
        windows: Its instructions, if they were to be kept.
        readings: Its counter: times and joules, if they were to be kept.
        epoch_s: Added to times it gives UNIX seconds.
        remarks: What was said on the way.
    """

    device: str
    origin: EnergyOrigin
    steps: list[StepUse] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    readings: list[tuple[float, float]] = field(default_factory=list)
    epoch_s: float = 0.0
    remarks: list[str] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        """Whether the energy of every step is known."""
        return bool(self.steps) and all(step.joules is not None for step in self.steps)


POLL_S = 0.005
_KEPT = 100_000
"""Notes that are kept where the log is not wanted: of the last minutes."""


class Counter(Protocol):
    """Tells joules between moments."""

    def stamp(self) -> Stamp:
        """Return this moment."""
        ...

    def used_j(self, begin: Stamp, end: Stamp) -> float | None:
        """Return the joules between two moments; None = not known."""
        ...

    @property
    def readings(self) -> list[tuple[float, float]]:
        """Times and joules that were noted; empty where the counter cannot be read."""
        ...

    def close(self) -> None:
        """Stop."""
        ...


def open_counter(
    device: PowerDevice, clock: Callable[[], float], *, keep_log: bool = False
) -> Counter:
    """Return the counter of a device.

    Args:
        device: The device.
        clock: Tells the time, in seconds.
        keep_log: Whether all readings are kept.
    """
    if device.resolution_s and device.energy_j() is not None:
        return PolledCounter(device, clock, keep_log=keep_log)
    return ExactCounter(device, clock, keep_log=keep_log)


class ExactCounter:
    """A counter that is read when it is asked."""

    def __init__(
        self, device: PowerDevice, clock: Callable[[], float], *, keep_log: bool = False
    ) -> None:
        self._device, self._clock = device, clock
        self._log: list[tuple[float, float]] | None = [] if keep_log else None

    def stamp(self) -> Stamp:
        """Return this moment."""
        stamp = Stamp(self._clock(), self._device.energy_j())
        if self._log is not None and stamp.joules is not None:
            reading = (stamp.time_s, stamp.joules)
            self._log.extend([reading] if self._log[-1:] != [reading] else [])
        return stamp

    def used_j(self, begin: Stamp, end: Stamp) -> float | None:
        """Return the joules between two moments; None = not known."""
        if begin.joules is None or end.joules is None:
            return None
        return end.joules - begin.joules

    @property
    def readings(self) -> list[tuple[float, float]]:
        """Times and joules that were noted."""
        return list(self._log or ())

    def close(self) -> None:
        """Do nothing."""


class PolledCounter:
    """A counter whose changes a thread notes."""

    def __init__(
        self,
        device: PowerDevice,
        clock: Callable[[], float],
        *,
        keep_log: bool = False,
        poll_s: float = POLL_S,
    ) -> None:
        self._device, self._clock, self._poll_s = device, clock, poll_s
        self._notes: deque[tuple[float, float]] = deque(maxlen=None if keep_log else _KEPT)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="energy-counter")
        self._note()
        self._thread.start()

    def stamp(self) -> Stamp:
        """Return this moment."""
        return Stamp(self._clock())

    def used_j(self, begin: Stamp, end: Stamp) -> float | None:
        """Return the joules between two moments; None if they are too close, or not noted yet."""
        if end.time_s - begin.time_s < self._device.resolution_s:
            return None
        with self._lock:
            first = bisect_left(self._notes, begin.time_s, key=lambda note: note[0])
            last = bisect_left(self._notes, end.time_s, key=lambda note: note[0])
            if first == 0 or last == len(self._notes):
                return None
            notes = list(islice(self._notes, first - 1, last + 1))
        times, joules = zip(*notes, strict=True)
        used = np.interp([begin.time_s, end.time_s], times, joules)
        return float(used[1] - used[0])

    @property
    def readings(self) -> list[tuple[float, float]]:
        """Times and joules that were noted."""
        with self._lock:
            return list(self._notes)

    def close(self) -> None:
        """Stop the thread, when the counter has changed once more."""
        time.sleep(2 * self._device.resolution_s)
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._poll_s):
            self._note()

    def _note(self) -> None:
        joules, now_s = self._device.energy_j(), self._clock()
        with self._lock:
            if joules is not None and (not self._notes or joules > self._notes[-1][1]):
                self._notes.append((now_s, joules))
