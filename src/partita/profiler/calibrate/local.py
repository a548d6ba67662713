"""Processes of this machine that measure it, one per device.

Forked from the caller where it is fresh (fifty times quicker), fresh where it is not or where there
are GPUs. A rank that dies, or that is not done in time, ends the measurement, and the error names
it and what it was doing.

A rank that torchrun started takes part in the measurement of its job.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in its stubs

from partita.errors import InvalidInputError
from partita.processes import die_with_parent, machine_cores
from partita.profiler.calibrate.ranks import Rank, measure
from partita.profiler.calibrate.records import (
    Measurement,
    MeasureOptions,
    read_measurement,
    write_measurement,
)
from partita.ranks.environment import RankEnvironment
from partita.ranks.member import Member
from partita.ranks.pool import RankPool, Start
from partita.ranks.setup import local_device, visible_gpus

MAX_RANKS = 16


class _Steps:
    """What the ranks are measuring, as they say; stands for a view of a pool.

    A rank that fails speaks for itself, and none shows signs of life but by its steps.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report, self._step_of = report, dict[int, str]()

    def begin(self, rank: int, step: str) -> None:
        """Take note of the step that a rank begins; those of rank 0 and of links are reported."""
        self._step_of[rank] = step
        if rank == 0 or step.startswith("link"):
            self._report(step)

    def where(self, rank: int) -> str:
        """Return what a rank is measuring."""
        return f"while {self._step_of.get(rank, 'starting')}"

    def all(self) -> str:
        """Return nothing: errors name the step of the rank that they are about."""
        return ""

    def stands_still(self, rank: int) -> str:
        """Return that a rank shows no sign of life."""
        return f"rank {rank} shows no sign of life {self.where(rank)}"

    def culprit(self) -> str:
        """Return nothing: a rank that waits names the one that it waits for."""
        return ""


def measure_local(
    num_ranks: int | None = None,
    options: MeasureOptions | None = None,
    *,
    fork: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Measure this machine with one process per GPU, or with CPU processes where there is none.

    Args:
        num_ranks: Number of processes, 1 to 16; one per GPU, or per core, if not given.
        options: How much to measure.
        fork: Fork instead of starting fresh processes: only from a process with one thread that has
            not computed with torch. Not used with GPUs.
        report: Called with each step.

    Raises:
        InvalidInputError: More processes than GPUs, or not 1 to 16.
        WorkerError: A process died or hung.
    """
    gpus = visible_gpus()
    if num_ranks is None:
        num_ranks = min(gpus or machine_cores(), MAX_RANKS)
    if not 1 <= num_ranks <= MAX_RANKS:
        raise InvalidInputError(f"{num_ranks} processes; expected 1 to {MAX_RANKS}")
    if gpus and num_ranks > gpus:
        raise InvalidInputError(f"{num_ranks} devices are asked for; this machine has {gpus} GPUs")
    options = MeasureOptions() if options is None else options
    steps = _Steps(report)
    with RankPool(
        num_ranks,
        partial(_measure_rank, gpu=bool(gpus), options=options),
        start=Start(fork=fork and not gpus, joins=False, limit_s=60.0 + 10.0 * num_ranks),
        limit_s=options.limit_s,
    ) as pool:
        longest_s = _longest_s(num_ranks, options)
        answers = pool.call(None, limit_s=longest_s, on_message=steps.begin, view=steps)
    return read_measurement(answers[0])


def _longest_s(num_ranks: int, options: MeasureOptions) -> float:
    """Return a time that no sound measurement needs."""
    pairs = num_ranks * (num_ranks - 1)
    links_s = 8 * pairs * options.pair_budget_s(num_ranks)
    rest_s = 20 * options.compute_s + 60 * options.reduce_s
    return 60.0 + 10.0 * num_ranks + options.limit_s + links_s + rest_s


def _measure_rank(member: Member, _: object, *, gpu: bool, options: MeasureOptions) -> str | None:
    """Measure as one rank of a pool; rank 0 returns all of it, the others None."""
    rank = Rank(
        rank=member.rank,
        num_ranks=member.world,
        store=member.store,
        device=local_device(member.rank, gpu=gpu, num_local_ranks=member.world),
        backend="nccl" if gpu else "gloo",
        limit_s=options.limit_s,
        report=member.notify,
    )
    measured = measure(rank, options)
    # As text: a pickle would need every type inside to allow it.
    return None if measured is None else write_measurement(measured)


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
