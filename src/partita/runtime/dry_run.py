"""Walks through the Program of every rank in one process, on torch's fake process group.

Nothing travels, so values have no meaning; but every rank agrees on shapes, opens its groups, and
carries out each of its instructions with the real code. A plan for more devices than there are can
be tried this way before any of them is paid for. ``Recorder`` checks what is handed to the backend.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # not in its stubs
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore

from partita.core.program import Kind
from partita.errors import InvalidInputError
from partita.ranks.member import Member
from partita.runtime import process_transport
from partita.runtime.parameters import ParameterStore
from partita.runtime.process_transport import (
    ProcessTransport,
    agreement_key,
    shapes_for,
    statement,
    used_devices,
)
from partita.runtime.rank import RankOptions, make_loop
from partita.runtime.stage_pass import StageRunner
from partita.runtime.task import Task
from partita.runtime.tensor_parallel import slices_of
from partita.runtime.training.recipe import Recipe
from partita.runtime.workload import Workload

_JOB = "dry run"


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRank:
    """What a rank carried out.

    Attributes:
        rank: The rank.
        instructions: Number of instructions by kind.
        sent_bytes: Bytes that it would have sent.
        handed: Tensors that it handed to a send, a receive or a collective.
    """

    rank: int
    instructions: Counter[Kind] = field(default_factory=Counter)
    sent_bytes: int = 0
    handed: int = 0


_HANDLERS = (
    *((dist, name) for name in ("isend", "irecv", "all_reduce", "all_to_all_single")),
    *((process_transport, name) for name in ("_gather_single", "_scatter_single")),
)
"""Functions that the transport hands tensors to, and where it looks them up."""
_READ = ("isend",)
"""Those that only read what they are given, so that it must not change until they are done."""


class _Handed:
    """A tensor that a backend works on, known without keeping it."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self.name, self._shape = name, tuple(tensor.shape)
        self._reads, self._sum = name in _READ, _digest(tensor.untyped_storage())
        self._storage: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def broken(self) -> str:
        """Return what became of it that must not; empty = it is as it was."""
        if self._storage.expired():
            return "was let go of before it was done"
        kept = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)  # noqa: SLF001
        if self._reads and kept is not None and _digest(kept) != self._sum:
            return "was changed before it was done"
        return ""

    def __str__(self) -> str:
        return f"a tensor {list(self._shape)} handed to {self.name.removeprefix('_')}"


def _digest(storage: torch.UntypedStorage) -> int:
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    return hash(flat.numpy().tobytes())


class _Work:
    """A piece of a backend's work; says when it is waited for."""

    def __init__(self, recorder: "Recorder", work: Any, handed: list[_Handed]) -> None:  # noqa: ANN401
        self._recorder, self._work, self.handed = recorder, work, handed

    def wait(self, *arguments: Any) -> Any:  # noqa: ANN401  # as torch has it
        """Check that all that was handed over is as it was, and wait."""
        for each in self.handed:
            if what := each.broken():
                self._recorder.faults.append(f"{each} {what}")
        self._recorder.open.discard(id(self))
        return self._work.wait(*arguments) if self._work is not None else None


class Recorder:
    """Stands between the transport and torch.distributed, and checks what is handed over.

    On a GPU a backend works behind our back: a tensor must lie on the device of the rank, be
    contiguous, and be neither changed nor let go of until it was waited for; and all work must be
    waited for. A mistake would show there as wrong numbers now and then; here as a fault.

    Attributes:
        handed: Tensors that were handed over.
        faults: What was wrong, a line each.
        open: Work that was not waited for yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.handed, self.faults, self.open = 0, list[str](), set[int]()
        self._kept: list[_Work] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Check all that is handed over within."""
        before = [(place, name, getattr(place, name)) for place, name in _HANDLERS]
        for place, name, function in before:
            setattr(place, name, self._watched(name, function))
        try:
            yield
        finally:
            for place, name, function in before:
                setattr(place, name, function)
        self.faults += ["work that was started is never waited for"] * len(self.open)

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401  # as torch has it
            tensors = [value for value in arguments if isinstance(value, Tensor)]
            for tensor in tensors:
                if tensor.device != self._device:
                    self.faults.append(f"a tensor on {tensor.device} is handed to {name}")
                if not tensor.is_contiguous():
                    self.faults.append(f"a tensor that is not contiguous is handed to {name}")
            handed = [_Handed(tensor, name) for tensor in tensors]
            self.handed += len(handed)
            work = function(*arguments, **options)
            if not options.get("async_op", name in ("isend", "irecv")):
                return work
            watched = _Work(self, work, handed)
            self._kept.append(watched)  # ids must not be used again
            self.open.add(id(watched))
            return watched

        return call


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
        shape_of = shapes_for(task, devices[rank], workload.shape_of)
        store.set(agreement_key(_JOB, rank), statement(task, rank, shape_of))
    wanted = range(len(devices)) if ranks is None else ranks
    return [_walk(task, workload, rank, store) for rank in wanted]


def _walk(task: Task, workload: Workload, rank: int, store: Store) -> DryRank:
    devices = used_devices(task.program)
    device = devices[rank]
    hook = sys.excepthook  # torch puts the rank before every error, and leaves it so
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(devices))
    try:
        member = Member(rank=rank, world=len(devices), store=store)
        transport = _ZeroTransport(task, member, workload.shape_of, job=_JOB)
        parameters = ParameterStore(
            task, device, workload.state, Recipe(), slices=slices_of(task, device)
        )
        runner = StageRunner(task, parameters, seed=0, group=transport.tensor_group)
        options = RankOptions(steps=1)
        recorder = Recorder(member.device)
        loop = make_loop(task, device, transport, parameters, runner, workload, options)
        with recorder.recording():
            for wait in loop.play(0):
                raise InvalidInputError(f"rank {rank}: {wait.reason}")
        if recorder.faults:
            raise InvalidInputError(f"rank {rank}: {recorder.faults[0]}")
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
    expected = int(task.program.ptr[device + 1] - task.program.ptr[device])
    if loop.executed != expected:
        raise InvalidInputError(
            f"rank {rank} carried out {loop.executed} of its {expected} instructions"
        )
    statistics = loop.statistics
    return DryRank(
        rank=rank,
        instructions=statistics.instructions,
        sent_bytes=statistics.sent_bytes,
        handed=recorder.handed,
    )
