"""GPUs behind a driver: clocks that are locked and given back, joules that are counted.

NVIDIA's through NVML (package ``nvidia-ml-py``, in the extra ``energy``); NVIDIA's and AMD's
through the package ``zeus``, which can go through its daemon ``zeusd``.
"""

import importlib
import os
import warnings
from abc import ABC, abstractmethod
from typing import Any

from partita.core.energy import EnergyOrigin
from partita.errors import UnsupportedError

COUNTER_PERIOD_S = 0.1
"""The counters of most boards change every 20 to 100 ms."""
MILLI = 1e-3


class GpuDevice(ABC):
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


def _load_nvml() -> Any:  # noqa: ANN401 (a module without types)
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        raise UnsupportedError(
            "NVML needs the package nvidia-ml-py; install partita[energy]"
        ) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as exc:
        raise UnsupportedError(f"NVML does not work here: {exc}") from exc
    return nvml


def _handle(nvml: Any, index: int) -> Any:  # noqa: ANN401 (a module without types)
    """Return the board that CUDA calls by an index."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not visible:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    if index >= len(visible):
        raise UnsupportedError(
            f"there is no GPU {index}: CUDA_VISIBLE_DEVICES shows {len(visible)} of them"
        )
    name = visible[index].strip()
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)


class NvmlDevice(GpuDevice):
    """One NVIDIA GPU. See ``PowerDevice``."""

    def __init__(self, index: int = 0) -> None:
        """Open a GPU.

        Args:
            index: Which of the GPUs that CUDA sees.

        Raises:
            UnsupportedError: NVML or the GPU is not there.
        """
        super().__init__(index)
        self._nvml = nvml = _load_nvml()
        try:
            self._board = _handle(nvml, index)
            self._clocks = self._list_clocks()
        except nvml.NVMLError as exc:
            raise UnsupportedError(f"{self.name} cannot be opened: {exc}") from exc

    def _list_clocks(self) -> tuple[int, ...]:
        """Return the SM clocks at the highest memory clock; none where the board does not tell."""
        nvml = self._nvml
        try:
            memory = max(nvml.nvmlDeviceGetSupportedMemoryClocks(self._board))
            clocks = nvml.nvmlDeviceGetSupportedGraphicsClocks(self._board, memory)
        except nvml.NVMLError_NotSupported:
            return ()
        return tuple(sorted({int(clock) for clock in clocks}, reverse=True))

    def _lock(self, mhz: int) -> None:
        nvml = self._nvml
        try:
            nvml.nvmlDeviceSetGpuLockedClocks(self._board, mhz, mhz)
        except nvml.NVMLError_NoPermission:
            raise no_permission(self.name, mhz) from None
        except nvml.NVMLError as exc:
            raise UnsupportedError(f"{self.name}: cannot lock {mhz} MHz: {exc}") from exc

    def _unlock(self) -> None:
        self._nvml.nvmlDeviceResetGpuLockedClocks(self._board)

    def energy_j(self) -> float | None:
        """Return the joules since the driver was loaded; None before Volta."""
        try:
            millijoules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._board)
        except self._nvml.NVMLError:
            return None
        return float(millijoules) * MILLI


_REFUSED = ("ZeusGPUNoPermissionError", "ZeusdError")


def _load_zeus() -> Any:  # noqa: ANN401 (a module without types)
    try:
        return importlib.import_module("zeus.device").get_gpus()
    except ImportError:
        raise UnsupportedError("power device 'zeus' needs the package zeus: install it") from None
    except Exception as exc:
        raise UnsupportedError(f"zeus finds no GPU here: {exc}") from exc


class ZeusDevice(GpuDevice):
    """One GPU. See ``PowerDevice``."""

    def __init__(self, index: int = 0) -> None:
        """Open a GPU.

        Args:
            index: Which of the GPUs that zeus sees.

        Raises:
            UnsupportedError: zeus or the GPU is not there.
        """
        super().__init__(index)
        self._gpus, self._index = _load_zeus(), index
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
