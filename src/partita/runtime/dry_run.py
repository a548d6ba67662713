"""Walks through the Program of every rank in one process, on torch's fake process group.

Nothing travels, so values have no meaning; but every rank agrees on shapes, opens its groups, and
carries out each of its instructions with the real code. A plan for more devices than there are can
be tried this way before any of them is paid for.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # not in its stubs
from torch.testing._internal.distributed.fake_pg import FakeStore

from partita.core.program import Kind
from partita.errors import InvalidInputError
from partita.ranks.member import Member
from partita.runtime.parameters import ParameterStore, sgd
from partita.runtime.process_transport import (
    ProcessTransport,
    agreement_key,
    statement,
    used_devices,
)
from partita.runtime.rank import RankOptions, make_loop
from partita.runtime.stage_pass import StageRunner
from partita.runtime.task import Task
from partita.runtime.workload import Workload

_JOB = "dry run"


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRank:
    """What a rank carried out.

    Attributes:
        rank: The rank.
        instructions: Number of instructions by kind.
        sent_bytes: Bytes that it would have sent.
    """

    rank: int
    instructions: Counter[Kind] = field(default_factory=Counter)
    sent_bytes: int = 0


class _ZeroTransport(ProcessTransport):
    """Receives zeros, which every op can take."""

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)


def dry_run(task: Task, workload: Workload, ranks: Sequence[int] | None = None) -> list[DryRank]:
    """Carry out one step of ranks, one rank after the other.

    Args:
        task: What is run.
        workload: What it computes.
        ranks: Which ranks; all if not given.

    Raises:
        InvalidInputError: A rank did not carry out all of its instructions, or this process belongs
            to a process group already.
    """
    if dist.is_initialized():
        raise InvalidInputError("a dry run needs a process that belongs to no process group")
    devices = used_devices(task.program)
    store = HashStore()
    for rank in range(len(devices)):
        store.set(agreement_key(_JOB, rank), statement(task, rank, workload.shape_of))
    wanted = range(len(devices)) if ranks is None else ranks
    return [_walk(task, workload, rank, store) for rank in wanted]


def _walk(task: Task, workload: Workload, rank: int, store: Store) -> DryRank:
    devices = used_devices(task.program)
    device = devices[rank]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(devices))
    try:
        member = Member(rank=rank, world=len(devices), store=store)
        transport = _ZeroTransport(task, member, workload.shape_of, job=_JOB)
        parameters = ParameterStore(task, device, workload.state, sgd())
        runner = StageRunner(task, parameters, seed=0)
        options = RankOptions(steps=1, make_optimizer=sgd)
        loop = make_loop(task, device, transport, parameters, runner, workload, options)
        for wait in loop.play(0):
            raise InvalidInputError(f"rank {rank}: {wait.reason}")
    finally:
        dist.destroy_process_group()
    expected = int(task.program.ptr[device + 1] - task.program.ptr[device])
    if loop.executed != expected:
        raise InvalidInputError(
            f"rank {rank} carried out {loop.executed} of its {expected} instructions"
        )
    statistics = loop.statistics
    return DryRank(
        rank=rank, instructions=statistics.instructions, sent_bytes=statistics.sent_bytes
    )
