"""A rank that torchrun started, as part of a measurement of its job."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # not in its stubs
    PrefixStore,
    Store,
    TCPStore,
)

from partita.errors import InvalidInputError, WorkerError
from partita.profile.calibrate_local import die_with_parent, local_device
from partita.profile.calibrate_ranks import Rank, machine_cores, measure
from partita.profile.calibrate_records import Measurement, MeasureOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What torchrun tells a rank.

    Attributes:
        rank: Number among all ranks.
        num_ranks: How many there are.
        local_rank: Number among those of its host.
        num_local_ranks: How many its host has.
        address: Where the store is.
        port: Its port.
        attempt: How often the job was restarted: marks of an earlier attempt must not be read.
        opens_store: Whether rank 0 opens the store, because no launcher has.
    """

    rank: int
    num_ranks: int
    local_rank: int = 0
    num_local_ranks: int = 1
    address: str
    port: int
    attempt: int = 0
    opens_store: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Job":
        """Return what the environment of a rank says.

        Raises:
            InvalidInputError: A variable is missing or not a number.
        """
        try:
            return cls(
                rank=int(environment["RANK"]),
                num_ranks=int(environment["WORLD_SIZE"]),
                local_rank=int(environment.get("LOCAL_RANK", "0")),
                num_local_ranks=int(environment.get("LOCAL_WORLD_SIZE", "1")),
                address=environment["MASTER_ADDR"],
                port=int(environment["MASTER_PORT"]),
                attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
                opens_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            )
        except KeyError as exc:
            raise InvalidInputError(
                f"environment variable {exc} is missing; start ranks with torchrun, or unset RANK"
            ) from exc
        except ValueError as exc:
            raise InvalidInputError(f"environment of a rank: {exc}") from exc


def measure_job(
    job: Job,
    options: MeasureOptions | None = None,
    *,
    report: Callable[[str], None] = lambda _: None,
) -> Measurement | None:
    """Take part in the measurement of a job; rank 0 returns all of it, the others None.

    Raises:
        WorkerError: Another rank died or did not come in time; says which.
    """
    options = MeasureOptions() if options is None else options
    die_with_parent()
    gpu = torch.cuda.is_available()
    rank = Rank(
        rank=job.rank,
        num_ranks=job.num_ranks,
        store=_open_store(job, options.limit_s),
        device=local_device(
            job.local_rank,
            gpu=gpu,
            threads=max(1, machine_cores() // job.num_local_ranks),
        ),
        backend="nccl" if gpu else "gloo",
        limit_s=options.limit_s,
        report=report,
    )
    return measure(rank, options)


def _open_store(job: Job, limit_s: float) -> Store:
    try:
        store = TCPStore(
            job.address,
            job.port,
            is_master=job.opens_store and job.rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=limit_s),
        )
    except RuntimeError as exc:
        raise WorkerError(
            f"rank {job.rank}: no store at {job.address}:{job.port} within {limit_s:g} s; "
            "rank 0's host did not start, or cannot be reached"
        ) from exc
    return PrefixStore(f"calibrate/{job.attempt}", store)
