"""Storage and memory of this machine: measured, or given by files or the user.

Files are Synergy's: ``--str-bw`` names one with MB/s (of 2^20 bytes), ``--mem-thr`` is the prefix
of one for each CPU count with GiB/s. One that is there is believed, one that is not is written.

Storage below a folder is read past the system's cache and without root: a file is written there,
brought to the disk and read with ``O_DIRECT``. Where the file system does
not take that, its pages are dropped from the cache first (``POSIX_FADV_DONTNEED``) and the reading
is an ordinary one. A device that caches by itself, as virtual disks do, is measured with its cache.

Memory is read by several threads at once: each sums its own part of one array that is larger than
the caches; NumPy lets go of the interpreter meanwhile. The best of several rounds counts: other
load only makes it slower.
"""

import math
import mmap
import os
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from partita.errors import FormatError, UnsupportedError, reason_of
from partita.fleet.profiler.sweep import PointOrigin, cpu_grid, sweep
from partita.units import parse_bandwidth

_MIB = 2.0**20
_GIB = 2.0**30
_RATE = re.compile(r"[0-9.]+\s*[A-Za-z]+(/s|ps)")


_BLOCK_BYTES = 2**22


FILE_BYTES = 2**27


_STORAGE_ROUNDS = 3


MEASURED_WAYS = ("O_DIRECT", "cache dropped")
"""How a reading goes past the cache: the first that the file system takes."""


_Array: TypeAlias = NDArray[np.int64]


ARRAY_BYTES = 2**28


_MEMORY_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class StorageSpeed:
    """What reading gave.

    Attributes:
        bytes_per_s: Median of the rounds.
        way: How the cache was avoided, or where the figure is from.
    """

    bytes_per_s: float
    way: str


def storage_speed(folder: Path, given: str) -> StorageSpeed:
    """Return the bandwidth of a folder's storage.

    Args:
        folder: Where it is measured.
        given: A bandwidth such as ``500MB/s``, a file that keeps it, or empty.

    Raises:
        FormatError: The file holds no number above 0.
    """
    if _RATE.fullmatch(given):
        return StorageSpeed(parse_bandwidth(given, "--str-bw"), "as given")
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
        raise FormatError(f"holds {value:g} {unit}; expected more than 0", path=str(path))
    return value


def measure_storage(folder: Path, *, file_bytes: int = FILE_BYTES) -> StorageSpeed:
    """Return how fast files in a folder are read.

    Raises:
        UnsupportedError: Nothing can be written there.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".partita-storage-") as file:
            block = os.urandom(min(_BLOCK_BYTES, file_bytes))
            for _ in range(max(1, file_bytes // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            rates = [_read(Path(file.name)) for _ in range(_STORAGE_ROUNDS)]
    except OSError as exc:
        raise UnsupportedError(
            f"storage below {folder} cannot be measured: {reason_of(exc)}; "
            "--str-bw 500MB/s gives a figure"
        ) from exc
    return StorageSpeed(statistics.median(rate for rate, _ in rates), rates[0][1])


def _read(path: Path) -> tuple[float, str]:
    """Return bytes per second of one reading, and how the cache was avoided."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
        way = MEASURED_WAYS[0]
    except (OSError, AttributeError):
        handle, way = os.open(path, os.O_RDONLY), MEASURED_WAYS[1]
    try:
        if way != MEASURED_WAYS[0]:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(-1, _BLOCK_BYTES) as buffer:  # its pages are aligned, as O_DIRECT asks
            total, begin_s = 0, time.perf_counter()
            while count := os.readv(handle, [buffer]):
                total += count
            return total / max(time.perf_counter() - begin_s, 1e-9), way
    finally:
        os.close(handle)


def measure_memory(threads: int, *, array_bytes: int = ARRAY_BYTES) -> float:
    """Return the bytes per second that some threads read together, each on a CPU of its own."""
    values = np.ones(max(threads, array_bytes // 8), dtype=np.int64)
    parts = np.array_split(values, threads)
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    begin = threading.Barrier(threads)
    best_s = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_MEMORY_ROUNDS):
            work = [
                pool.submit(_sum, part, cpus[index % len(cpus)], begin)
                for index, part in enumerate(parts)
            ]
            times = [future.result() for future in work]
            best_s = min(best_s, max(end for _, end in times) - min(first for first, _ in times))
    return values.nbytes / best_s


def _sum(part: _Array, cpu: int, begin: threading.Barrier) -> tuple[float, float]:
    """Sum a part on one CPU; returns when that began and ended."""
    os.sched_setaffinity(0, {cpu})  # of this thread alone
    begin.wait()
    begin_s = time.perf_counter()
    part.sum()
    return begin_s, time.perf_counter()
