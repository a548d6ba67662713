"""Sets the clock of a device without holding up the step that asks for it."""

import atexit
import threading
from collections.abc import Callable

from partita.energy.devices.protocol import PowerDevice
from partita.errors import PartitaError


class ClockController:
    """Sets clocks: at once where the device can, otherwise by a thread in which the latest wins.

    A device that refuses is left alone from then on; that is said once, and stops nothing.

    Attributes:
        current_mhz: The clock that is really set; 0 = none was.
    """

    def __init__(self, device: PowerDevice, say: Callable[[str], None]) -> None:
        """Take over a device.

        Args:
            device: The device.
            say: Told why clocks cannot be set.
        """
        self.current_mhz = 0
        self._device, self._say = device, say
        self._can_set = bool(device.clocks_mhz)
        self._wanted = 0
        self._changed = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None

    @property
    def can_set(self) -> bool:
        """Whether clocks can be set, as far as is known."""
        return self._can_set

    def open(self) -> bool:
        """Set the highest clock, and return whether that could be done."""
        if self._can_set:
            self._set(self._device.clocks_mhz[0])
            self._wanted = self.current_mhz
        if self._can_set and not self._device.at_once:
            self._thread = threading.Thread(target=self._serve, daemon=True, name="clocks")
            self._thread.start()
            atexit.register(self._give_back)
        return self._can_set

    def request(self, mhz: int) -> None:
        """Ask for a clock; 0 = leave it as it is. Returns at once."""
        if not mhz or not self._can_set:
            return
        if self._thread is None:
            self._set(mhz)
            return
        with self._changed:
            self._wanted = mhz
            self._changed.notify()

    def close(self) -> None:
        """Stop, and give the clocks back."""
        if self._thread is not None:
            with self._changed:
                self._stopped = True
                self._changed.notify()
            self._thread.join()
            atexit.unregister(self._give_back)
        self._give_back()

    def _give_back(self) -> None:
        try:
            self._device.reset()
        except Exception as exc:  # noqa: BLE001 (a driver's error must not end a run that is done)
            self._say(f"{self._device.name}: the clocks could not be given back: {exc}")

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopped or self._wanted != self.current_mhz or not self._can_set
                )
                if self._stopped or not self._can_set:
                    return
                wanted = self._wanted
            self._set(wanted)

    def _set(self, mhz: int) -> None:
        if mhz == self.current_mhz:
            return
        try:
            self._device.set_clock(mhz)
        except PartitaError as exc:
            self._can_set = False
            self._say(f"{exc}; clocks are left alone from now on")
        else:
            self.current_mhz = mhz
