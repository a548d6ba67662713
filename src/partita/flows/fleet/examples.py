"""Classes of training jobs for traces that are made here: modelled, nobody measured them.

A GPU of a job computes for ``gpu_s`` per iteration, its loaders work for ``loader_cpu_s`` CPU
seconds on it, and what the cache lacks is read from storage. These overlap, so with c CPUs and m
bytes of memory per GPU an iteration takes

    max(gpu_s, loader_cpu_s / c, (1 - cached) read / storage)    cached = (m - working) / dataset

with ``cached`` between 0 and 1, and a storage of 62.5 MB/s per GPU. Speed 1 is that with 3 CPUs and
62.5 GB per GPU, the share of one GPU in a server of 8 GPUs, 24 CPUs and 500 GB. The figures of the
classes are ours: light networks on images and raw sound need many CPUs, large ones and text few.
Their frontiers are those of the DVFS model with the share of an iteration that no clock changes.
"""

from dataclasses import dataclass

import numpy as np

from partita.catalogue.catalogue import Catalogue
from partita.core.fleet import Sensitivity, SensitivityOrigin
from partita.flows.fleet.power import with_frontier

STORAGE_BYTES_PER_S = 62.5e6
SHARE = (3.0, 62.5e9)
"""CPUs and bytes of memory per GPU at speed 1."""
_CPUS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0)
_MEMORY_BYTES = (16e9, 32e9, 62.5e9, 125e9, 187.5e9, 250e9)
DEFAULT_TYPE = "v100"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleJob:
    """What an iteration of a class of jobs takes per GPU.

    Attributes:
        name: Name of the model.
        kind: Its class.
        gpu_s: Seconds of the GPU.
        loader_cpu_s: CPU seconds of loading and decoding.
        read_bytes: Data of an iteration.
        dataset_bytes: Size of the dataset.
        working_bytes: Memory besides cached data.
        fixed_share: Share of ``gpu_s`` that no clock makes shorter.
    """

    name: str
    kind: str
    gpu_s: float
    loader_cpu_s: float
    read_bytes: float
    dataset_bytes: float
    working_bytes: float = 8e9
    fixed_share: float

    def seconds(self, cpus: float, memory_bytes: float) -> float:
        """Return what an iteration takes with some CPUs and memory per GPU."""
        cached = min(max((memory_bytes - self.working_bytes) / self.dataset_bytes, 0.0), 1.0)
        read_s = (1 - cached) * self.read_bytes / STORAGE_BYTES_PER_S
        return max(self.gpu_s, self.loader_cpu_s / cpus, read_s)

    def sensitivity(self) -> Sensitivity:
        """Return its speed over CPUs and memory."""
        points = [(cpus, memory) for cpus in _CPUS for memory in _MEMORY_BYTES]
        seconds = np.array([self.seconds(*point) for point in points])
        usual_s = self.seconds(*SHARE)
        return Sensitivity(
            name=self.name,
            kind=self.kind,
            origin=SensitivityOrigin.MODELLED,
            iteration_s=usual_s,
            dataset_bytes=self.dataset_bytes,
            working_bytes=self.working_bytes,
            cpus=np.array([cpus for cpus, _ in points]),
            memory_bytes=np.array([memory for _, memory in points]),
            speed=usual_s / seconds,
            measured=np.zeros(len(points), dtype=np.bool_),
        )


def _job(
    name: str, work: tuple[float, float], data: tuple[float, float], fixed: float
) -> ExampleJob:
    return ExampleJob(
        name=name,
        kind=name.partition("-")[0],
        gpu_s=work[0],
        loader_cpu_s=work[1],
        read_bytes=data[0],
        dataset_bytes=data[1],
        fixed_share=fixed,
    )


EXAMPLE_JOBS: tuple[ExampleJob, ...] = (
    _job("image-light", (0.20, 1.90), (28e6, 140e9), 0.45),
    _job("image-medium", (0.32, 1.60), (20e6, 140e9), 0.25),
    _job("image-heavy", (0.75, 2.40), (14e6, 140e9), 0.10),
    _job("language-large", (0.90, 0.40), (0.5e6, 20e9), 0.06),
    _job("language-medium", (0.45, 0.30), (0.5e6, 8e9), 0.15),
    _job("language-small", (0.08, 0.06), (0.2e6, 1.5e9), 0.50),
    _job("speech-raw", (0.30, 1.70), (60e6, 170e9), 0.30),
    _job("speech-features", (0.60, 1.20), (12e6, 60e9), 0.20),
)


def example_sensitivities(
    catalogue: Catalogue, gpu_type: str = DEFAULT_TYPE
) -> tuple[Sensitivity, ...]:
    """Return the classes with frontiers by the DVFS model of a type of GPU.

    Raises:
        InvalidInputError: The catalogue has no such type, or not its clocks and powers.
    """
    gpu = catalogue.device_type(gpu_type)
    return tuple(
        with_frontier(job.sensitivity(), gpu, fixed_share=job.fixed_share) for job in EXAMPLE_JOBS
    )
