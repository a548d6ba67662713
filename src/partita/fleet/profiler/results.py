"""From measured runs to a `Sensitivity`: speed over CPUs and memory, and the storage it needs."""

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from partita.core.fleet import Sensitivity, SensitivityOrigin
from partita.fleet.profiler.cache_model import (
    SHARES,
    Fetching,
    epoch_s,
    memory_at,
    storage_needed,
)
from partita.fleet.profiler.dataset import Dataset
from partita.fleet.profiler.record import Record
from partita.fleet.profiler.runner import Ranks
from partita.fleet.profiler.sweep import CurvePoint, PointOrigin
from partita.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that a sensitivity is made from.

    Attributes:
        name: Of the job.
        ranks: Its processes.
        batch_size: Samples an iteration and GPU.
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
