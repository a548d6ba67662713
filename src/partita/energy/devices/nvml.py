"""NVIDIA GPUs through NVML (package ``nvidia-ml-py``, in the extra ``energy``)."""

import importlib
import os
from typing import Any

from partita.energy.devices.board import MILLI, Board, no_permission
from partita.errors import UnsupportedError


def _load() -> Any:  # noqa: ANN401 (a module without types)
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


class NvmlDevice(Board):
    """One NVIDIA GPU. See ``PowerDevice``."""

    def __init__(self, index: int = 0) -> None:
        """Open a GPU.

        Args:
            index: Which of the GPUs that CUDA sees.

        Raises:
            UnsupportedError: NVML or the GPU is not there.
        """
        super().__init__(index)
        self._nvml = nvml = _load()
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
