"""What the GPUs of both drivers have in common: clocks that are locked and given back."""

from abc import ABC, abstractmethod

from partita.core.energy import EnergyOrigin
from partita.errors import UnsupportedError

COUNTER_PERIOD_S = 0.1
"""The counters of most boards change every 20 to 100 ms."""
MILLI = 1e-3


class Board(ABC):
    """One GPU behind a driver. See ``PowerDevice``."""

    origin = EnergyOrigin.MEASURED
    type = ""
    resolution_s = COUNTER_PERIOD_S
    at_once = False
    blocking_w: float | None = None

    def __init__(self, index: int) -> None:
        """Name the GPU of an index; nothing is locked yet."""
        self.name = f"gpu{index}"
        self._clocks: tuple[int, ...] = ()
        self._is_set = False

    @property
    def clocks_mhz(self) -> tuple[int, ...]:
        """The SM clocks that can be locked, highest first."""
        return self._clocks

    def set_clock(self, mhz: int) -> None:
        """Lock the SM clock; 0 = leave it as it is."""
        if mhz:
            self._lock(mhz)
            self._is_set = True

    def reset(self) -> None:
        """Unlock the SM clock, if it was locked here."""
        if self._is_set:
            self._unlock()
            self._is_set = False

    @abstractmethod
    def energy_j(self) -> float | None:
        """Return the joules since the driver was loaded; None where the board cannot tell."""

    @abstractmethod
    def _lock(self, mhz: int) -> None:
        """Lock the SM clock."""

    @abstractmethod
    def _unlock(self) -> None:
        """Give the SM clock back."""


def no_permission(name: str, mhz: int) -> UnsupportedError:
    """Return the error of a process that may not set clocks."""
    return UnsupportedError(
        f"{name}: no permission to lock {mhz} MHz; setting clocks needs CAP_SYS_ADMIN (root, or a "
        "container with it), or a running zeusd and --power-device zeus"
    )
