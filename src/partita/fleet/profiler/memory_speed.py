"""How fast memory is read by several threads at once.

Each thread sums its own part of one array that is larger than the caches; NumPy lets go of the
interpreter meanwhile. The best of several rounds counts: other load only makes it slower.
"""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_Array: TypeAlias = NDArray[np.int64]

ARRAY_BYTES = 2**28
_ROUNDS = 5


def measure_memory(threads: int, *, array_bytes: int = ARRAY_BYTES) -> float:
    """Return the bytes per second that some threads read together, each on a CPU of its own."""
    values = np.ones(max(threads, array_bytes // 8), dtype=np.int64)
    parts = np.array_split(values, threads)
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    begin = threading.Barrier(threads)
    best_s = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_ROUNDS):
            work = [
                pool.submit(_sum, part, cpu, begin)
                for part, cpu in zip(parts, _cycled(cpus, threads), strict=True)
            ]
            times = [future.result() for future in work]
            best_s = min(best_s, max(end for _, end in times) - min(first for first, _ in times))
    return values.nbytes / best_s


def _cycled(cpus: list[int], threads: int) -> list[int]:
    return [cpus[index % len(cpus)] for index in range(threads)]


def _sum(part: _Array, cpu: int, begin: threading.Barrier) -> tuple[float, float]:
    """Sum a part on one CPU; returns when that began and ended."""
    os.sched_setaffinity(0, {cpu})  # of this thread alone
    begin.wait()
    begin_s = time.perf_counter()
    part.sum()
    return begin_s, time.perf_counter()
