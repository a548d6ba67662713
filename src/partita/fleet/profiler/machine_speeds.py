"""Storage and memory of this machine: measured, or as files or the user say.

Files are Synergy's: ``--str-bw`` names one with MB/s (of 2^20 bytes), ``--mem-thr`` is the prefix
of one for each CPU count with GiB/s. One that is there is believed, one that is not is written.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path

from partita.errors import FormatError
from partita.fleet.profiler.memory_speed import measure_memory
from partita.fleet.profiler.storage import StorageSpeed, measure_storage
from partita.fleet.profiler.sweep import PointOrigin, cpu_grid, sweep
from partita.units import parse_bandwidth

_MIB = 2.0**20
_GIB = 2.0**30
_RATE = re.compile(r"[0-9.]+\s*[A-Za-z]+(/s|ps)")


def storage_speed(folder: Path, given: str) -> StorageSpeed:
    """Return the bandwidth of a folder's storage.

    Args:
        folder: Where it is measured.
        given: A bandwidth such as ``500MB/s``, a file that keeps it, or empty.

    Raises:
        FormatError: The file holds no number above 0.
    """
    if _RATE.fullmatch(given):
        return StorageSpeed(parse_bandwidth(given, "--str-bw"), "as told")
    if given and Path(given).exists():
        return StorageSpeed(_MIB * _number(Path(given), "MB/s"), f"from {given}")
    measured = measure_storage(folder)
    if given:
        Path(given).write_text(f"{measured.bytes_per_s / _MIB:.1f}\n", encoding="ascii")
    return measured


def memory_speeds(max_cpus: float, prefix: str) -> Mapping[float, float]:
    """Return the bytes per second that memory gives to CPU counts, at those that were measured.

    Args:
        max_cpus: Top of the sweep.
        prefix: Of files that keep the figures; empty = there are none.

    Raises:
        FormatError: A file holds no number above 0.
    """

    def measure(cpus: float) -> float:
        path = Path(f"{prefix}_{cpus:g}")
        if prefix and path.exists():
            return _GIB * _number(path, "GiB/s")
        speed = measure_memory(int(cpus))
        if prefix:
            path.write_text(f"{speed / _GIB:.2f}\n", encoding="ascii")
        return speed

    points = sweep(cpu_grid(math.ceil(max_cpus), 1.0), measure, tolerance=0.1)
    return {point.cpus: point.rate for point in points if point.origin is PointOrigin.MEASURED}


def _number(path: Path, unit: str) -> float:
    try:
        value = float(path.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError) as exc:
        raise FormatError(f"holds no number; expected {unit}", path=str(path)) from exc
    if not (value > 0 and math.isfinite(value)):
        raise FormatError(f"says {value:g} {unit}; expected more than 0", path=str(path))
    return value
