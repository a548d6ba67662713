"""Replay of a recorded energy log: what a counter said then, it says again now.

The log is a ``time-energy-%d.csv`` of Perseus or of our runtime, or a directory of such files, one
a rank. Its first reading is now; after its last one the energy is unknown. An
``instructions-%d.csv`` beside it, where it has clocks, says which clock held when. The record of a
modelled device stays modelled.
"""

import time
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from partita.core.energy import EnergyOrigin
from partita.errors import UnsupportedError, reading
from partita.formats.perseus import (
    Logged,
    is_modelled_log,
    read_energy_log,
    read_instruction_log,
)

_T = TypeVar("_T")


class ReplayDevice:
    """A recorded device. See ``PowerDevice``; its clocks are those of the record."""

    type = ""
    resolution_s = 0.0
    at_once = True
    blocking_w: float | None = None
    clocks_mhz: tuple[int, ...] = ()

    def __init__(
        self, path: Path, index: int = 0, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Open a log.

        Args:
            path: The file, or the directory with one for each rank.
            index: The rank, in a directory.
            clock: Tells the time, in seconds.

        Raises:
            FormatError: It cannot be read; names file and line.
        """
        file = path / f"time-energy-{index}.csv" if path.is_dir() else path
        self.name = f"replay:{file.name}"
        with reading(file):
            text = file.read_text(encoding="utf-8")
            self._times, self._joules = read_energy_log(text)
        modelled = is_modelled_log(text)
        self.origin = EnergyOrigin.MODELLED if modelled else EnergyOrigin.MEASURED
        beside = file.with_name(file.name.replace("time-energy", "instructions"))
        known = beside != file and beside.exists()
        self._logged: list[Logged] = []
        if known:
            with reading(beside):
                self._logged = read_instruction_log(beside.read_text(encoding="utf-8"))
        self._begins = [one.start_s for one in self._logged]
        self._clock = clock
        self._start_s: float | None = None

    def _log_time_s(self) -> float:
        now = self._clock()
        if self._start_s is None:
            self._start_s = now
        return float(self._times[0]) + now - self._start_s

    @property
    def clock_mhz(self) -> float | None:
        """The clock that was set then; None = the log does not say."""
        place = bisect_right(self._begins, self._log_time_s()) - 1
        clock = self._logged[place].clock_mhz if place >= 0 else np.nan
        return None if np.isnan(clock) else clock

    def set_clock(self, mhz: int) -> None:
        """Refuse: what is recorded cannot be changed; 0 = leave it as it is."""
        if mhz:
            raise UnsupportedError(f"{self.name}: a record has its own clocks; asked {mhz} MHz")

    def reset(self) -> None:
        """Do nothing: no clock was set."""

    def energy_j(self) -> float | None:
        """Return the recorded counter, on the straight line between readings; None at its end."""
        now = self._log_time_s()
        if now > self._times[-1]:
            return None
        return float(np.interp(now, self._times, self._joules) - self._joules[0])
