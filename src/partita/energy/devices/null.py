"""A device that can neither be set nor read: its energy is unknown."""

from partita.core.energy import EnergyOrigin


class NullDevice:
    """See ``PowerDevice``."""

    type = ""
    origin = EnergyOrigin.MEASURED
    resolution_s = 0.0
    at_once = True
    blocking_w: float | None = None
    clocks_mhz: tuple[int, ...] = ()

    def __init__(self, index: int = 0) -> None:
        self.name = f"device{index}"

    def set_clock(self, mhz: int) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""

    def energy_j(self) -> float | None:
        """Return None: it is not known."""
        return None
