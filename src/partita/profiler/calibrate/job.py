"""A rank that torchrun started, as part of a measurement of its job."""

from collections.abc import Callable

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in its stubs

from partita.processes import die_with_parent
from partita.profiler.calibrate.ranks import Rank, measure
from partita.profiler.calibrate.records import Measurement, MeasureOptions
from partita.ranks.environment import RankEnvironment
from partita.ranks.setup import local_device


def measure_job(
    job: RankEnvironment,
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
        store=PrefixStore(f"calibrate/{job.attempt}", job.open_store(options.limit_s)),
        device=local_device(job.local_rank, gpu=gpu, num_local_ranks=job.num_local_ranks),
        backend="nccl" if gpu else "gloo",
        limit_s=options.limit_s,
        report=report,
    )
    return measure(rank, options)
