"""Small jobs, traces and histories for tests of the fleet."""

import math

import numpy as np

from partita.core.fleet import (
    FleetHistory,
    Job,
    Leases,
    Sensitivity,
    SensitivityOrigin,
    Trace,
    Usage,
    trace_of,
)


def steep(name: str = "steep", *, kind: str = "image", iteration_s: float = 1.0) -> Sensitivity:
    """Return a job that gains from CPUs up to 6 a GPU: speed 1 at 3, 2 at 6."""
    return Sensitivity(
        name=name,
        kind=kind,
        origin=SensitivityOrigin.MODELLED,
        iteration_s=iteration_s,
        cpus=np.array([1.0, 3.0, 6.0]),
        memory_bytes=np.full(3, 50e9),
        speed=np.array([1 / 3, 1.0, 2.0]),
    )


def flat(name: str = "flat", *, kind: str = "language", iteration_s: float = 1.0) -> Sensitivity:
    """Return a job that needs one CPU per GPU and gains nothing from more."""
    return Sensitivity(
        name=name,
        kind=kind,
        origin=SensitivityOrigin.MODELLED,
        iteration_s=iteration_s,
        cpus=np.array([1.0]),
        memory_bytes=np.array([20e9]),
        speed=np.array([1.0]),
    )


def small_trace(*, jobs: int = 6, gpus: int = 1, every_s: float = 100.0) -> Trace:
    """Return a trace of steep and flat jobs by turns, each half an hour longer than the last."""
    kinds = (steep(), flat())
    return trace_of(
        [
            Job(
                job_id=i,
                sensitivity=kinds[i % 2],
                arrival_s=i * every_s,
                iterations=1800 * (i + 1),
                gpus=gpus,
            )
            for i in range(jobs)
        ],
        name="small",
    )


def small_history() -> FleetHistory:
    """Return a history of two jobs, one of which did not end."""
    return FleetHistory(
        trace="small",
        policy="fifo:fair",
        round_s=300.0,
        rounds=2,
        events=4,
        servers=("server0",),
        num_gpus=2,
        num_cpus=6.0,
        memory_bytes=100e9,
        models=("steep", "flat"),
        kinds=("image", "language"),
        job_id=np.array([4, 7]),
        model=np.array([0, 1]),
        gpus=np.array([1, 1]),
        arrival_s=np.array([0.0, 10.0]),
        start_s=np.array([300.0, math.nan]),
        finish_s=np.array([900.0, math.nan]),
        fair_s=np.array([600.0, 600.0]),
        leases=Leases(
            job=np.array([0]),
            server=np.array([0]),
            start_s=np.array([300.0]),
            end_s=np.array([900.0]),
            gpus=np.array([1]),
            cpus=np.array([3.0]),
            memory_bytes=np.array([50e9]),
            speed=np.array([1.0]),
        ),
        usage=Usage(
            start_s=np.array([300.0]),
            rounds=np.array([2]),
            running=np.array([1]),
            waiting=np.array([1]),
            gpus=np.array([1]),
            cpus=np.array([3.0]),
            memory_bytes=np.array([50e9]),
        ),
    )
