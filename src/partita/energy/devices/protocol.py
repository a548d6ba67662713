"""What the rest of the package asks of a device that uses energy."""

from typing import Protocol, runtime_checkable

from partita.core.energy import EnergyOrigin
from partita.core.program import Kind


class PowerDevice(Protocol):
    """A device with clocks to set and a counter of joules to read; either may be missing.

    Attributes:
        name: For messages and files, such as ``gpu0``.
        type: Its catalogue name; ``""`` = not known.
        origin: Whether its joules are measured or modelled.
        resolution_s: How far apart two changes of its counter lie; 0 = it is exact at any time.
        at_once: Whether ``set_clock`` takes effect before it returns, and returns at once.
        blocking_w: Power while it waits for other devices; None = not known.
    """

    name: str
    type: str
    origin: EnergyOrigin
    resolution_s: float
    at_once: bool
    blocking_w: float | None

    @property
    def clocks_mhz(self) -> tuple[int, ...]:
        """The clocks that can be set, highest first; empty = none can."""
        ...

    def set_clock(self, mhz: int) -> None:
        """Run at a clock from now on; 0 = leave it as it is.

        Raises:
            UnsupportedError: It cannot be set; says which permission is missing.
        """
        ...

    def reset(self) -> None:
        """Give the clocks back to the driver."""
        ...

    def energy_j(self) -> float | None:
        """Return a counter of joules that only rises; None = it cannot be read."""
        ...


@runtime_checkable
class WorkingDevice(Protocol):
    """A device that is not really there, and is told what it would do."""

    def begin_step(self, step: int) -> None:
        """Say which step is carried out from now on."""
        ...

    def begin_work(self, top_clock_s: float, kind: Kind, begin_s: float | None = None) -> float:
        """Start an instruction; returns the seconds that it takes at the clock that is set.

        Args:
            top_clock_s: Its seconds at the highest clock.
            kind: What it does.
            begin_s: When it starts by the clock of the device; None = now.
        """
        ...
