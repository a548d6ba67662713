"""Jobs that share a cluster: what each needs, when it came, and who ran where and when.

A `Sensitivity` says how fast a job runs with some CPUs and memory per GPU, on a type and number of
GPUs. A `Trace` is the jobs that arrive, as columns; a `Job` is one row of it. A `FleetHistory` is
what became of them, simulated or live. Documents of version 1 have GB (1e9 bytes), MB/s and GiB/s,
as such profiles are published; `partita.core.codec` reads them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np

from partita.core.columns import (
    MAX_SECONDS,
    Columns,
    Displayed,
    Flags,
    Floats,
    Ints,
    Longs,
    column,
    every,
    frozen_array,
    names,
    start,
)
from partita.errors import InvalidInputError

MAX_JOB_GPUS = 2**20
MAX_ITERATIONS = 2**53


class SensitivityOrigin(StrEnum):
    """Where the points of a sensitivity come from."""

    MEASURED = "measured"
    PUBLISHED = "published"
    MODELLED = "modelled"


_MOST_BYTES = 1e18
_FIGURES: Mapping[str, float] = {
    **dict.fromkeys(("demand_cpus", "demand_speed", "restart_s"), 1e9),
    **dict.fromkeys(("dataset_bytes", "working_bytes", "demand_memory_bytes"), _MOST_BYTES),
    "storage_bandwidth_bytes_per_s": 1e15,
}
"""Figures of a sensitivity that are not known, or from 0 to so much."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sensitivity(Columns):
    """The speed of a job by CPUs and memory per GPU, and by type and number of GPUs.

    A row is one point. Speed 1 is one iteration in ``iteration_s`` seconds, speed 2 two.

    Attributes:
        name: The job or model that it speaks of.
        kind: The class of the model, such as ``"image"``; may be empty.
        origin: Where the points come from.
        machine: The machine they were measured on; may be empty.
        iteration_s: Seconds of an iteration at speed 1.
        batch_size: Samples per iteration and GPU; 0 = not known.
        dataset_samples: Samples of an epoch; 0 = not known.
        dataset_bytes: Size of the dataset; NaN = not known.
        working_bytes: Memory per GPU that the job needs besides cached data; included in
            ``memory_bytes``.
        gpu_types: The types of GPU that rows refer to; ``""`` = any.
        gpu_type: Index into ``gpu_types``.
        gpus: Number of GPUs of the job; 0 = any number, at the same speed.
        cpus: CPUs per GPU.
        memory_bytes: Memory per GPU.
        speed: Iterations in ``iteration_s`` seconds.
        measured: Whether a run was measured there, or the point filled in from others.
        storage_bytes_per_s: Storage bandwidth that the job needs there; NaN = not known.
        demand_cpus: CPUs per GPU that it asks for; NaN = the least that reach its top speed.
        demand_memory_bytes: Memory per GPU that it asks for, likewise.
        demand_speed: Its published speed there; NaN = that of the points.
        restart_s: Seconds that a start from a checkpoint takes; NaN = not known.
        frontier_speed: Points of its time-energy frontier: share of the speed that is kept.
        frontier_w: Watts a GPU at those points.
        storage_bandwidth_bytes_per_s: What the storage of the machine gives; NaN = not known.
        memory_cpus: CPU counts at which the throughput of memory was measured.
        memory_bytes_per_s: That throughput.
    """

    name: str
    kind: str = ""
    origin: SensitivityOrigin = SensitivityOrigin.MEASURED
    machine: str = ""
    iteration_s: float
    batch_size: int = 0
    dataset_samples: int = 0
    dataset_bytes: float = math.nan
    working_bytes: float = 0.0
    gpu_types: tuple[str, ...] = ("",)
    gpu_type: Ints = every(0)
    gpus: Ints = every(0)
    cpus: Floats
    memory_bytes: Floats
    speed: Floats
    measured: Flags = every(True)
    storage_bytes_per_s: Floats = every(math.nan)
    demand_cpus: float = math.nan
    demand_memory_bytes: float = math.nan
    demand_speed: float = math.nan
    restart_s: float = math.nan
    frontier_speed: Floats = start([], np.float64)
    frontier_w: Floats = start([], np.float64)
    storage_bandwidth_bytes_per_s: float = math.nan
    memory_cpus: Floats = start([], np.float64)
    memory_bytes_per_s: Floats = start([], np.float64)

    def __post_init__(self) -> None:
        rows = np.size(self.cpus)
        where = f"sensitivity {self.name!r}"
        if not rows:
            raise InvalidInputError(f"{where} needs at least one point")
        types = tuple(self.gpu_types)
        names([kind or "any" for kind in types], f"GPU types of {where}")
        if not (self.iteration_s > 0 and math.isfinite(self.iteration_s)):
            raise InvalidInputError(f"{where}: iteration_s is {self.iteration_s}; expected > 0")
        self._check_figures(where)
        points = np.size(self.frontier_speed)
        self._set(
            gpu_types=types,
            gpu_type=column(
                self.gpu_type, np.int32, rows, f"GPU type of {where}", high=len(types) - 1
            ),
            gpus=column(self.gpus, np.int32, rows, f"gpus of {where}", high=MAX_JOB_GPUS),
            cpus=column(self.cpus, np.float64, rows, f"cpus of {where}", low=1e-6, high=1e6),
            memory_bytes=column(
                self.memory_bytes, np.float64, rows, f"memory_bytes of {where}", high=_MOST_BYTES
            ),
            speed=column(self.speed, np.float64, rows, f"speed of {where}", high=1e9),
            measured=column(self.measured, np.bool_, rows, f"measured of {where}"),
            storage_bytes_per_s=column(
                self.storage_bytes_per_s, np.float64, rows, f"storage of {where}", unknown=True
            ),
            frontier_speed=column(
                self.frontier_speed, np.float64, points, f"frontier of {where}", low=1e-6, high=1
            ),
            frontier_w=column(self.frontier_w, np.float64, points, f"frontier_w of {where}"),
            memory_cpus=frozen_array(self.memory_cpus, np.float64),
            memory_bytes_per_s=column(
                self.memory_bytes_per_s,
                np.float64,
                np.size(self.memory_cpus),
                f"memory_bytes_per_s of {where}",
            ),
        )
        if not self.speed.max() > 0:
            raise InvalidInputError(f"{where}: no point has a speed above 0")

    def _check_figures(self, where: str) -> None:
        for text in (self.name, self.kind, self.machine, *self.gpu_types):
            if not text.isascii() and text != text.encode("utf-8", "replace").decode("utf-8"):
                raise InvalidInputError(f"{where}: {text!r} is not text that can be written")
        for name, most in _FIGURES.items():
            value = getattr(self, name)
            if not (math.isnan(value) or 0 <= value <= most):
                raise InvalidInputError(f"{where}: {name} is {value}; expected 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job.

    Attributes:
        job_id: Unique within its trace.
        sensitivity: How fast it runs with what.
        arrival_s: When it was submitted.
        iterations: How many it has to do.
        gpus: GPUs that it asks for, all at once.
        min_gpus: The fewest that it can run on.
        max_gpus: The most that it can use.
        gpu_types: Types that it can run on; empty = any.
        tenant: Who pays; may be empty.
        priority: Higher goes first.
        deadline_s: When it should be done; NaN = at no given time.
    """

    job_id: int
    sensitivity: Sensitivity
    arrival_s: float = 0.0
    iterations: int
    gpus: int = 1
    min_gpus: int = 0
    max_gpus: int = 0
    gpu_types: tuple[str, ...] = ()
    tenant: str = ""
    priority: float = 0.0
    deadline_s: float = math.nan


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace(Columns):
    """Jobs that arrive at a cluster, a row each.

    Attributes:
        name: What tables call it.
        sensitivities: What jobs refer to, by distinct names.
        tenants: Names of tenants that jobs refer to.
        gpu_types: Names of the types of GPU that jobs may ask for.
        start_s: Time of the first round; NaN = by the first arrival.
        job_id: Unique number of the job.
        sensitivity: Index into ``sensitivities``.
        arrival_s: When it was submitted.
        iterations: How many it has to do.
        gpus: GPUs that it asks for.
        min_gpus: The fewest it can run on; 0 = ``gpus``.
        max_gpus: The most it can use; 0 = ``gpus``.
        gpu_mask: Bit t set = may run on ``gpu_types[t]``; 0 = on any.
        tenant: Index into ``tenants``; -1 = none.
        priority: Higher goes first.
        deadline_s: When it should be done; NaN = at no given time.
    """

    name: str = "trace"
    sensitivities: tuple[Sensitivity, ...]
    tenants: tuple[str, ...] = ()
    gpu_types: tuple[str, ...] = ()
    start_s: float = math.nan
    job_id: Longs
    sensitivity: Ints
    arrival_s: Floats
    iterations: Longs
    gpus: Ints
    min_gpus: Ints = every(0)
    max_gpus: Ints = every(0)
    gpu_mask: Longs = every(0)
    tenant: Ints = every(-1)
    priority: Floats = every(0.0)
    deadline_s: Floats = every(math.nan)

    def __post_init__(self) -> None:
        rows = np.size(self.job_id)
        if not rows:
            raise InvalidInputError("a trace needs at least one job")
        names([part.name for part in self.sensitivities], "sensitivities of the trace")
        top = len(self.sensitivities) - 1
        kinds = names(self.gpu_types, "GPU types of the trace")
        limit = MAX_JOB_GPUS
        self._set(
            sensitivities=tuple(self.sensitivities),
            tenants=names(self.tenants, "tenants of the trace"),
            gpu_types=kinds,
            job_id=column(self.job_id, np.int64, rows, "job id"),
            sensitivity=column(self.sensitivity, np.int32, rows, "sensitivity", high=top),
            arrival_s=column(self.arrival_s, np.float64, rows, "arrival_s", high=MAX_SECONDS),
            iterations=column(
                self.iterations, np.int64, rows, "iterations", low=1, high=MAX_ITERATIONS
            ),
            gpus=column(self.gpus, np.int32, rows, "gpus", low=1, high=limit),
            min_gpus=column(self.min_gpus, np.int32, rows, "min_gpus", high=limit),
            max_gpus=column(self.max_gpus, np.int32, rows, "max_gpus", high=limit),
            gpu_mask=column(self.gpu_mask, np.int64, rows, "gpu_mask", high=2 ** len(kinds) - 1),
            tenant=column(
                self.tenant, np.int32, rows, "tenant", low=-1, high=len(self.tenants) - 1
            ),
            priority=column(self.priority, np.float64, rows, "priority", low=-1e9, high=1e9),
            deadline_s=column(self.deadline_s, np.float64, rows, "deadline_s", unknown=True),
        )
        self._set(
            min_gpus=frozen_array(np.where(self.min_gpus > 0, self.min_gpus, self.gpus), np.int32),
            max_gpus=frozen_array(np.where(self.max_gpus > 0, self.max_gpus, self.gpus), np.int32),
        )
        self._check_rows()

    def _check_rows(self) -> None:
        values, count = np.unique(self.job_id, return_counts=True)
        if len(values) < len(self):
            twice = values[int(np.argmax(count > 1))]
            raise InvalidInputError(f"job id {twice} stands twice in the trace")
        least, most = self.gpu_range
        bad = (least > self.gpus) | (most < self.gpus)
        if bad.any():
            row = int(np.argmax(bad))
            raise InvalidInputError(
                f"job {self.job_id[row]}: {self.gpus[row]} GPUs are not within its range of "
                f"{least[row]} to {most[row]}"
            )

    def __len__(self) -> int:
        return len(self.job_id)

    @property
    def gpu_range(self) -> tuple[Ints, Ints]:
        """The fewest and the most GPUs of each job."""
        return self.min_gpus, self.max_gpus

    @cached_property
    def fair_s(self) -> Floats:
        """Seconds that each job takes alone at speed 1."""
        seconds = np.array([part.iteration_s for part in self.sensitivities])
        return frozen_array(seconds[self.sensitivity] * self.iterations, np.float64)

    def job(self, row: int) -> Job:
        """Return one row as a job."""
        mask, tenant = int(self.gpu_mask[row]), int(self.tenant[row])
        least, most = self.gpu_range
        return Job(
            job_id=int(self.job_id[row]),
            sensitivity=self.sensitivities[int(self.sensitivity[row])],
            arrival_s=float(self.arrival_s[row]),
            iterations=int(self.iterations[row]),
            gpus=int(self.gpus[row]),
            min_gpus=int(least[row]),
            max_gpus=int(most[row]),
            gpu_types=tuple(kind for t, kind in enumerate(self.gpu_types) if mask >> t & 1),
            tenant=self.tenants[tenant] if tenant >= 0 else "",
            priority=float(self.priority[row]),
            deadline_s=float(self.deadline_s[row]),
        )


def trace_of(jobs: Sequence[Job], *, name: str = "trace", start_s: float = math.nan) -> Trace:
    """Return the trace of some jobs, in their order.

    Raises:
        InvalidInputError: Two sensitivities share a name, or a job is wrong.
    """
    parts: dict[str, Sensitivity] = {}
    for part in {id(job.sensitivity): job.sensitivity for job in jobs}.values():
        if parts.setdefault(part.name, part) != part:
            raise InvalidInputError(f"jobs have two different sensitivities named {part.name!r}")
    tenants = list(dict.fromkeys(job.tenant for job in jobs if job.tenant))
    kinds = list(dict.fromkeys(kind for job in jobs for kind in job.gpu_types))
    row_of = {name: row for row, name in enumerate(parts)}
    return Trace(
        name=name,
        sensitivities=tuple(parts.values()),
        tenants=tuple(tenants),
        gpu_types=tuple(kinds),
        start_s=start_s,
        job_id=np.array([job.job_id for job in jobs], dtype=np.int64),
        sensitivity=np.array([row_of[job.sensitivity.name] for job in jobs], dtype=np.int32),
        arrival_s=np.array([job.arrival_s for job in jobs], dtype=np.float64),
        iterations=np.array([job.iterations for job in jobs], dtype=np.int64),
        gpus=np.array([job.gpus for job in jobs], dtype=np.int32),
        min_gpus=np.array([job.min_gpus for job in jobs], dtype=np.int32),
        max_gpus=np.array([job.max_gpus for job in jobs], dtype=np.int32),
        gpu_mask=np.array([sum(1 << kinds.index(k) for k in job.gpu_types) for job in jobs]),
        tenant=np.array([tenants.index(job.tenant) if job.tenant else -1 for job in jobs]),
        priority=np.array([job.priority for job in jobs], dtype=np.float64),
        deadline_s=np.array([job.deadline_s for job in jobs], dtype=np.float64),
    )


class HistoryOrigin(StrEnum):
    """Whether a history was simulated, or really happened."""

    SIMULATED = "simulated"
    LIVE = "live"


@dataclass(frozen=True, kw_only=True, eq=False)
class Leases(Columns):
    """Who ran where and when: a row for a job on a server while its grant stays the same.

    Attributes:
        job: Index of the job in the history.
        server: Index of the server.
        start_s: From when.
        end_s: Until when.
        gpus: GPUs held there.
        cpus: CPUs held there.
        memory_bytes: Memory held there.
        speed: Speed of the whole job meanwhile.
    """

    job: Ints = start([], np.int32)
    server: Ints = start([], np.int32)
    start_s: Floats = start([], np.float64)
    end_s: Floats = start([], np.float64)
    gpus: Ints = start([], np.int32)
    cpus: Floats = start([], np.float64)
    memory_bytes: Floats = start([], np.float64)
    speed: Floats = start([], np.float64)

    def __post_init__(self) -> None:
        rows = np.size(self.job)
        for name, kind in (("job", np.int32), ("server", np.int32), ("gpus", np.int32)):
            self._set(**{name: column(getattr(self, name), kind, rows, f"{name} of a lease")})
        for name in ("start_s", "end_s", "cpus", "memory_bytes", "speed"):
            values = column(getattr(self, name), np.float64, rows, f"{name} of a lease")
            self._set(**{name: values})

    def __len__(self) -> int:
        return len(self.job)


@dataclass(frozen=True, kw_only=True, eq=False)
class Usage(Columns):
    """What was in use, a row for each stretch of rounds in which nothing changed.

    Attributes:
        start_s: Start of the stretch.
        rounds: Its length in rounds.
        running: Jobs that ran.
        waiting: Jobs that waited.
        gpus: GPUs in use.
        cpus: CPUs granted.
        memory_bytes: Memory granted.
        power_w: Power of the GPUs in use; NaN = not known.
        gap: How far the sum of speeds is below the allocator's bound; NaN = it has none.
    """

    start_s: Floats = start([], np.float64)
    rounds: Longs = start([], np.int64)
    running: Ints = start([], np.int32)
    waiting: Ints = start([], np.int32)
    gpus: Ints = start([], np.int32)
    cpus: Floats = start([], np.float64)
    memory_bytes: Floats = start([], np.float64)
    power_w: Floats = every(math.nan)
    gap: Floats = every(math.nan)

    def __post_init__(self) -> None:
        rows = np.size(self.start_s)
        for name in ("running", "waiting", "gpus"):
            self._set(**{name: column(getattr(self, name), np.int32, rows, f"{name} in use")})
        for name in ("start_s", "cpus", "memory_bytes"):
            self._set(**{name: column(getattr(self, name), np.float64, rows, f"{name} in use")})
        self._set(
            rounds=column(self.rounds, np.int64, rows, "rounds in use"),
            power_w=column(self.power_w, np.float64, rows, "power_w in use", unknown=True),
            gap=column(self.gap, np.float64, rows, "gap in use", low=-1, unknown=True),
        )

    def __len__(self) -> int:
        return len(self.start_s)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FleetHistory(Displayed):
    """What became of the jobs of a trace: who ran where and when.

    Attributes:
        trace: Name of the trace.
        policy: Ordering and allocator, such as ``"fifo:tune"``.
        origin: Simulated or live.
        round_s: Length of a round.
        rounds: Number of rounds that were scheduled.
        events: Arrivals, ends of leases and rounds together.
        servers: Names of the servers.
        num_gpus: GPUs of all servers.
        num_cpus: CPUs of all servers.
        memory_bytes: Memory of all servers.
        models: Names that jobs refer to.
        kinds: Class of each model; may be empty.
        job_id: The job.
        model: Index into ``models``.
        gpus: GPUs it asked for.
        arrival_s: When it was submitted.
        start_s: When it first ran; NaN = never.
        finish_s: When it was done; NaN = not.
        fair_s: Seconds that it takes alone at its GPU-proportional share.
        attained_gpu_s: GPU seconds that it held.
        preemptions: How often it was stopped before its end.
        migrations: How often it went on elsewhere.
        energy_j: Energy of its GPUs; NaN = not known.
        leases: Who ran where; empty = was not recorded.
        usage: What was in use over time.
    """

    trace: str = "trace"
    policy: str
    origin: HistoryOrigin = HistoryOrigin.SIMULATED
    round_s: float
    rounds: int
    events: int
    servers: tuple[str, ...]
    num_gpus: int
    num_cpus: float
    memory_bytes: float
    models: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    job_id: Longs
    model: Ints
    gpus: Ints
    arrival_s: Floats
    start_s: Floats
    finish_s: Floats
    fair_s: Floats
    attained_gpu_s: Floats = every(0.0)
    preemptions: Ints = every(0)
    migrations: Ints = every(0)
    energy_j: Floats = every(math.nan)
    leases: Leases = field(default_factory=Leases)
    usage: Usage = field(default_factory=Usage)

    def __post_init__(self) -> None:
        rows = np.size(self.job_id)
        whole = (("model", len(self.models) - 1), ("gpus", MAX_JOB_GPUS))
        for name, high in (*whole, ("preemptions", None), ("migrations", None)):
            values = column(getattr(self, name), np.int32, rows, name, high=high)
            self._set(**{name: values})
        for name in ("arrival_s", "fair_s", "attained_gpu_s"):
            self._set(**{name: column(getattr(self, name), np.float64, rows, name)})
        for name in ("start_s", "finish_s", "energy_j"):
            values = column(getattr(self, name), np.float64, rows, name, unknown=True)
            self._set(**{name: values})
        self._set(
            job_id=column(self.job_id, np.int64, rows, "job id"),
            servers=names(self.servers, "servers of the history"),
            models=names(self.models, "models of the history"),
            kinds=tuple(self.kinds),
        )

    def __len__(self) -> int:
        return len(self.job_id)

    @cached_property
    def completion_s(self) -> Floats:
        """Seconds from arrival to end of each job; NaN = it did not end."""
        return frozen_array(self.finish_s - self.arrival_s, np.float64)

    @property
    def unfinished(self) -> int:
        """Number of jobs that did not end."""
        return int(np.isnan(self.finish_s).sum())
