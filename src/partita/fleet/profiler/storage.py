"""How fast the storage below a folder is read, past the system's cache and without root.

A file is written there, brought to the disk and read with ``O_DIRECT``. Where the file system does
not take that, its pages are dropped from the cache first (``POSIX_FADV_DONTNEED``) and the reading
is an ordinary one. A device that caches by itself, as virtual disks do, is measured with its cache.
"""

import mmap
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from partita.errors import UnsupportedError

_BLOCK_BYTES = 2**22
FILE_BYTES = 2**27
_ROUNDS = 3
MEASURED_WAYS = ("O_DIRECT", "cache dropped")
"""How a reading goes past the cache: the first that the file system takes."""


@dataclass(frozen=True, slots=True)
class StorageSpeed:
    """What reading gave.

    Attributes:
        bytes_per_s: Median of the rounds.
        way: How the cache was avoided, or where the figure is from.
    """

    bytes_per_s: float
    way: str


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
            rates = [_read(Path(file.name)) for _ in range(_ROUNDS)]
    except OSError as exc:
        raise UnsupportedError(
            f"storage below {folder} cannot be measured: {(exc.strerror or str(exc)).lower()}; "
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
