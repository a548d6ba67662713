"""What memory does to speed: a model instead of one run for each size.

Synergy's optimistic profiling. A cache that never replaces what it holds (MinIO) serves a share m
of an epoch from memory and the rest from storage, whatever the order of the samples. With D bytes
of data, storage of B bytes/s, memory of T bytes/s at that many CPUs and an epoch of E seconds when
all is cached:

    fetch = m D / T + (1 - m) D / B        epoch = max(E, fetch)

Where fetching is slower than the epoch, all of B is needed; else (1 - m) D / (E - m D / T).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SHARES = tuple(percent / 100 for percent in range(0, 101, 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetching:
    """What an epoch fetches, and how fast that can be.

    Attributes:
        dataset_bytes: Data of an epoch.
        storage_bytes_per_s: Bandwidth of the storage.
        memory_bytes_per_s: Throughput of memory at the CPUs of the job.
    """

    dataset_bytes: float
    storage_bytes_per_s: float
    memory_bytes_per_s: float

    def cached_s(self, share: float) -> float:
        """Return the seconds that the cached share takes."""
        return share * self.dataset_bytes / self.memory_bytes_per_s

    def fetch_s(self, share: float) -> float:
        """Return the seconds that all data take with a share of them cached."""
        missed = (1 - share) * self.dataset_bytes / self.storage_bytes_per_s
        return self.cached_s(share) + missed


def epoch_s(fetching: Fetching, share: float, cached_epoch_s: float) -> float:
    """Return the seconds of an epoch with a share of the data cached.

    With all of them cached it is what was measured, so that a rough figure for memory cannot make
    an epoch slower than it was.
    """
    return cached_epoch_s if share >= 1 else max(cached_epoch_s, fetching.fetch_s(share))


def storage_needed(fetching: Fetching, share: float, cached_epoch_s: float) -> float:
    """Return the storage bandwidth, in bytes/s, that keeps that epoch at its length."""
    if share >= 1:
        return 0.0
    if fetching.fetch_s(share) > cached_epoch_s:
        return fetching.storage_bytes_per_s
    return (1 - share) * fetching.dataset_bytes / (cached_epoch_s - fetching.cached_s(share))


def memory_at(cpus: float, counts: Sequence[float], bytes_per_s: Sequence[float]) -> float:
    """Return the throughput of memory at a CPU count, on lines between measured ones.

    Below the first it falls in proportion, beyond the last it stays.
    """
    if not counts:
        return math.inf
    if cpus <= counts[0]:
        return bytes_per_s[0] * cpus / counts[0]
    for index in range(1, len(counts)):
        if cpus <= counts[index]:
            part = (cpus - counts[index - 1]) / (counts[index] - counts[index - 1])
            return bytes_per_s[index - 1] + part * (bytes_per_s[index] - bytes_per_s[index - 1])
    return bytes_per_s[-1]
