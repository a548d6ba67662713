"""One rank of a baseline: steps are counted, timed and recorded as those of our executor."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from partita.capture.origin import Captures
from partita.capture.sources import ModelSource
from partita.errors import PartitaError, WorkerError
from partita.ranks.failures import PeerError, first_line
from partita.ranks.member import Member
from partita.ranks.status import Phase, StatusBoard
from partita.runtime.device_parts import DeviceStatistics, StepRecord
from partita.runtime.rank import (
    RankOptions,
    RankReport,
    StepNews,
    Watchdog,
    loss_share,
    speaks_of_peer,
)
from partita.runtime.results import RunResult
from partita.runtime.task import Task
from partita.runtime.verify import Verdict
from partita.runtime.workload import Workload


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """What a baseline trains.

    Attributes:
        task: The plan, which says what each rank takes.
        captures: The model, untouched and as it was captured.
        workload: First weights, data, and the code of the plan's stages.
    """

    task: Task
    captures: Captures
    workload: Workload

    @property
    def source(self) -> ModelSource:
        """The untouched model."""
        return self.captures.source


class Trainer(Protocol):
    """What one rank does in a step."""

    @property
    def device(self) -> int:
        """Its device of the plan."""
        ...

    def step(self, step: int) -> StepRecord:
        """Do a step, the update of the weights included; returns losses and outputs."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the last step that this rank answers for; all ranks call it."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return copies of the weights that this rank answers for; all ranks call it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """One of torch's ways.

    Attributes:
        check: Checks that torch can do what a plan needs; raises ``UnsupportedError``.
        world: Number of ranks.
        make: Makes the trainer of a rank.
        verify: Compares a run with the same steps in one process.
    """

    check: Callable[[Subject], None]
    world: Callable[[Task], int]
    make: Callable[[Subject, Member, RankOptions], Trainer]
    verify: Callable[[Subject, RunResult, RankOptions], Verdict]


def play_baseline(
    name: str,
    baseline: Baseline,
    subject: Subject,
    member: Member,
    *,
    options: RankOptions,
    board: StatusBoard,
) -> RankReport:
    """Be one rank of a baseline.

    Raises:
        WorkerError: Another rank went away, or torch gave up; names the step.
    """
    records, step_ns = [], []
    with Watchdog(member.rank, board, options.stall_limit_s) as watchdog:
        trainer = baseline.make(subject, member, options)
        watchdog.enter(Phase.STEPS)
        for step in range(options.steps):
            watchdog.begin_step(step)
            begin = time.perf_counter_ns()
            try:
                record = trainer.step(step)
                step_ns.append((begin, time.perf_counter_ns()))
                if options.keep_results:
                    record.gradients.update(trainer.gradients())
            except RuntimeError as exc:
                raise _explained(exc, f"rank {member.rank} in step {step} of {name}") from exc
            records.append(record)
            member.notify(StepNews(step, loss_share(subject.task, record)))
            if not options.keep_results:
                record.forget_results(subject.task.graph.loss)
        watchdog.enter(Phase.REPORT)
        state = trainer.state() if options.keep_results else {}
    return RankReport(
        device=trainer.device,
        records=records,
        state=state,
        statistics=DeviceStatistics(),
        step_ns=step_ns,
    )


def _explained(exc: BaseException, where: str) -> PartitaError:
    """Return the error of ours that torch has wrapped, or one that says where torch gave up."""
    cause: BaseException | None = exc
    while cause is not None and not isinstance(cause, PartitaError):
        cause = cause.__cause__
    if isinstance(cause, PartitaError):
        return cause
    last = exc
    while last.__cause__ is not None:
        last = last.__cause__
    kind = PeerError if speaks_of_peer(last) else WorkerError
    return kind(f"{where}: {first_line(last)}")
