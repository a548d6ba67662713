"""From measured runs to a `Sensitivity`: speed over CPUs and memory, and the storage it needs.

What memory does to speed is a model instead of one run for each size, Synergy's optimistic
profiling: a cache that never replaces what it holds (MinIO) serves a share m
of an epoch from memory and the rest from storage, whatever the order of the samples. With D bytes
of data, storage of B bytes/s, memory of T bytes/s at that many CPUs and an epoch of E seconds when
all is cached:

    fetch = m D / T + (1 - m) D / B        epoch = max(E, fetch)

Where fetching is slower than the epoch, all of B is needed; else (1 - m) D / (E - m D / T).
"""

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from partita.core.fleet import Sensitivity, SensitivityOrigin
from partita.fleet.profiler.dataset import Dataset
from partita.fleet.profiler.record import Record
from partita.fleet.profiler.runner import Ranks
from partita.fleet.profiler.sweep import CurvePoint, PointOrigin
from partita.units import format_bytes

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that a sensitivity is made from.

    Attributes:
        name: Of the job.
        ranks: Its processes.
        batch_size: Samples per iteration and GPU.
        curve: Samples per second over CPUs, all data cached.
        dataset: The data; None = their size is not known.
        record: The runs, and the speeds of storage and memory.
        gpus: What GPUs the machine has, for people; empty = none.
    """

    name: str
    ranks: Ranks
    batch_size: int
    curve: Sequence[CurvePoint]
    dataset: Dataset | None
    record: Record
    gpus: str = ""

    @property
    def samples(self) -> int:
        """Samples of an iteration."""
        return self.batch_size * self.ranks.world

    @property
    def epoch_iterations(self) -> int:
        """Iterations of an epoch; 0 = not known."""
        return 0 if self.dataset is None else max(1, self.dataset.samples // self.samples)

    @property
    def working_bytes(self) -> int:
        """Most memory that a run needed by itself."""
        return max((run.peak_bytes for run in self.record.runs), default=0)


def make_sensitivity(measured: Measured) -> Sensitivity:
    """Return the sensitivity of a job.

    Speed 1 is that with all CPUs of the sweep and all data cached. Where the size of the dataset
    or the storage is not known, memory has one value: what the job needs by itself.
    """
    curve, ranks, record = measured.curve, measured.ranks, measured.record
    dataset = measured.dataset if record.storage_bytes_per_s else None
    shares = SHARES if dataset is not None else (1.0,)
    top = curve[-1].rate
    rows = [
        (point, share, *_at(measured, dataset, point, share)) for point in curve for share in shares
    ]
    data_bytes = 0 if dataset is None else dataset.size_bytes
    working = measured.working_bytes / ranks.per_node
    return Sensitivity(
        name=measured.name,
        origin=SensitivityOrigin.MEASURED,
        machine=machine_words(measured.gpus),
        iteration_s=measured.samples / top,
        batch_size=measured.batch_size,
        dataset_samples=0 if measured.dataset is None else measured.dataset.samples,
        dataset_bytes=math.nan if measured.dataset is None else float(measured.dataset.size_bytes),
        working_bytes=working,
        gpus=np.full(len(rows), ranks.world),
        cpus=np.array([point.cpus / ranks.per_node for point, *_ in rows]),
        memory_bytes=np.array(
            [working + share * data_bytes / ranks.per_node for _, share, *_ in rows]
        ),
        speed=np.array([rate / top for *_, rate, _ in rows]),
        measured=np.array(
            [share >= 1 and point.origin is PointOrigin.MEASURED for point, share, *_ in rows]
        ),
        storage_bytes_per_s=np.array([storage for *_, storage in rows]),
        storage_bandwidth_bytes_per_s=record.storage_bytes_per_s or math.nan,
        memory_cpus=np.array(record.memory_cpus),
        memory_bytes_per_s=np.array(record.memory_bytes_per_s),
    )


def _at(
    measured: Measured, dataset: Dataset | None, point: CurvePoint, share: float
) -> tuple[float, float]:
    """Return samples per second and the storage bandwidth needed with a share of data cached."""
    if dataset is None:
        return point.rate, math.nan
    record = measured.record
    fetching = Fetching(
        dataset_bytes=dataset.size_bytes,
        storage_bytes_per_s=record.storage_bytes_per_s,
        memory_bytes_per_s=memory_at(point.cpus, record.memory_cpus, record.memory_bytes_per_s),
    )
    per_epoch = measured.epoch_iterations * measured.samples
    cached_s = per_epoch / point.rate
    return (
        per_epoch / epoch_s(fetching, share, cached_s),
        storage_needed(fetching, share, cached_s),
    )


def machine_words(gpus: str) -> str:
    """Return this machine in a line: processor, CPUs, memory, GPUs."""
    return ", ".join(
        [
            _processor(),
            f"{os.cpu_count() or 1} CPUs",
            f"{format_bytes(machine_memory_bytes())} memory",
            gpus or "no GPU",
        ]
    )


def machine_memory_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
