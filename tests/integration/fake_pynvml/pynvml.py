"""Stands in for NVIDIA's NVML bindings where there is no GPU: two GPUs that only write things down.

Every call that changes a GPU is appended to the file that ``FAKE_NVML_LOG`` names, one JSON object
a line, so that calls of all processes come together in one place, in their order per process.
Clocks that the GPUs do not have are refused as the real library does.
"""

import json
import os

GRAPHICS_CLOCKS_MHZ = list(range(1410, 795, -15))
MEMORY_CLOCKS_MHZ = [1215]
POWER_LIMIT_MW = 300_000
NUM_GPUS = 2

NVML_SUCCESS = 0
NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_ALREADY_INITIALIZED = 5
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_INSUFFICIENT_SIZE = 7
NVML_ERROR_INSUFFICIENT_POWER = 8
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_IRQ_ISSUE = 11
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_CORRUPTED_INFOROM = 14
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
NVML_ERROR_OPERATING_SYSTEM = 17
NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
NVML_ERROR_MEMORY = 20
NVML_ERROR_UNKNOWN = 999


class NVMLError(Exception):
    """An error of the library, with its number as the real one has it."""

    def __init__(self, value):
        super().__init__(f"NVML error {value}")
        self.value = value


def _nvmlGetFunctionPointer(name):  # noqa: N802
    """Only there because clients tell the official bindings by it."""
    raise NVMLError(NVML_ERROR_FUNCTION_NOT_FOUND)


def _record(gpu, call, *values):
    line = json.dumps({"pid": os.getpid(), "gpu": gpu, "call": call, "values": values}) + "\n"
    file = os.open(os.environ["FAKE_NVML_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def _checked(clocks, *values):
    if not set(values) <= set(clocks):
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)


def nvmlInit():  # noqa: N802
    """Nothing has to be started."""


def nvmlShutdown():  # noqa: N802
    """Nothing has to be stopped."""


def nvmlDeviceGetCount():  # noqa: N802
    return NUM_GPUS


def nvmlDeviceGetHandleByIndex(index):  # noqa: N802
    if not 0 <= index < NUM_GPUS:
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return index


def nvmlDeviceGetC2cModeInfoV(handle):  # noqa: N802
    raise NVMLError(NVML_ERROR_NOT_SUPPORTED)


def nvmlDeviceGetName(handle):  # noqa: N802
    return "Fake A100"


def nvmlDeviceGetPowerManagementLimit(handle):  # noqa: N802
    return POWER_LIMIT_MW


def nvmlDeviceGetPowerManagementDefaultLimit(handle):  # noqa: N802
    return POWER_LIMIT_MW


def nvmlDeviceGetSupportedMemoryClocks(handle):  # noqa: N802
    return list(MEMORY_CLOCKS_MHZ)


def nvmlDeviceGetSupportedGraphicsClocks(handle, memory_clock):  # noqa: N802
    _checked(MEMORY_CLOCKS_MHZ, memory_clock)
    return list(GRAPHICS_CLOCKS_MHZ)


def nvmlDeviceSetMemoryLockedClocks(handle, low, high):  # noqa: N802
    _checked(MEMORY_CLOCKS_MHZ, low, high)
    _record(handle, "lock_memory", low, high)


def nvmlDeviceResetMemoryLockedClocks(handle):  # noqa: N802
    _record(handle, "reset_memory")


def nvmlDeviceSetGpuLockedClocks(handle, low, high):  # noqa: N802
    _checked(GRAPHICS_CLOCKS_MHZ, low, high)
    _record(handle, "lock", low, high)


def nvmlDeviceResetGpuLockedClocks(handle):  # noqa: N802
    _record(handle, "reset")
