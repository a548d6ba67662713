"""NVIDIA and AMD GPUs through the package ``zeus``, which can go through its daemon ``zeusd``."""

import importlib
import warnings
from typing import Any

from partita.energy.devices.board import MILLI, Board, no_permission
from partita.errors import UnsupportedError

_REFUSED = ("ZeusGPUNoPermissionError", "ZeusdError")


def _load() -> Any:  # noqa: ANN401 (a module without types)
    try:
        return importlib.import_module("zeus.device").get_gpus()
    except ImportError:
        raise UnsupportedError("power device 'zeus' needs the package zeus: install it") from None
    except Exception as exc:
        raise UnsupportedError(f"zeus finds no GPU here: {exc}") from exc


class ZeusDevice(Board):
    """One GPU. See ``PowerDevice``."""

    def __init__(self, index: int = 0) -> None:
        """Open a GPU.

        Args:
            index: Which of the GPUs that zeus sees.

        Raises:
            UnsupportedError: zeus or the GPU is not there.
        """
        super().__init__(index)
        self._gpus, self._index = _load(), index
        if index >= len(self._gpus):
            raise UnsupportedError(f"there is no GPU {index}: zeus sees {len(self._gpus)}")
        try:
            found = self._gpus.get_supported_graphics_clocks(index)
        except Exception:  # noqa: BLE001 (AMD boards do not list theirs)
            found = ()
        self._clocks = tuple(sorted({int(clock) for clock in found}, reverse=True))

    def _lock(self, mhz: int) -> None:
        """Lock the SM clock without waiting for it."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what it warns of is said in the error below
                self._gpus.set_gpu_locked_clocks(self._index, mhz, mhz, block=False)
        except Exception as exc:
            if type(exc).__name__ in _REFUSED:
                raise no_permission(self.name, mhz) from exc
            raise UnsupportedError(f"{self.name}: cannot lock {mhz} MHz: {exc}") from exc

    def _unlock(self) -> None:
        self._gpus.reset_gpu_locked_clocks(self._index)

    def energy_j(self) -> float | None:
        """Return the joules since the driver was loaded; None where the board cannot tell."""
        try:
            return float(self._gpus.get_total_energy_consumption(self._index)) * MILLI
        except Exception:  # noqa: BLE001 (likewise)
            return None
