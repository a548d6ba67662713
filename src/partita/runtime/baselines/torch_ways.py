"""What our executor is compared with: torch's own ways to train on several devices.

``ddp`` and ``fsdp`` run the untouched model on every rank, ``torch-1f1b`` the stages of a plan
under ``torch.distributed.pipelining``. Each takes the same samples in the same microbatches as a
plan, the same first weights, optimizer and weights of the losses, and is timed by the same rule.
They have no Program, so their runs have no timelines.

Each is in a module of its own, imported when it is asked for: torch takes seconds to import them.
Here is what they have in common: steps are counted, timed and recorded as those of our executor.
"""

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from partita.capture.origin import Captures
from partita.capture.sources import ModelSource
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.errors import InvalidInputError, PartitaError, WorkerError
from partita.program.lower import lower
from partita.ranks.failures import PeerError, first_line, speaks_of_peer
from partita.ranks.member import Member
from partita.ranks.status import Phase, StatusBoard, StatusView
from partita.runtime.device_parts import DeviceStatistics, StepRecord
from partita.runtime.executor import Run, reports_of_forked, step_seconds
from partita.runtime.rank import (
    RankOptions,
    RankReport,
    StepNews,
    Watchdog,
)
from partita.runtime.results import RunResult, merged, step_result
from partita.runtime.task import Task
from partita.runtime.training.evaluation import loss_share
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


TORCH_BASELINES: Mapping[str, str] = {
    "ddp": "partita.runtime.baselines.ddp",
    "fsdp": "partita.runtime.baselines.fsdp",
    "torch-1f1b": "partita.runtime.baselines.pipeline",
}


def baseline_of(name: str) -> Baseline:
    """Return one of torch's ways by name.

    Raises:
        InvalidInputError: There is no such baseline.
    """
    if name not in TORCH_BASELINES:
        known = ", ".join(TORCH_BASELINES)
        raise InvalidInputError(f"torch has no baseline {name!r}; there are {known}")
    found: Baseline = importlib.import_module(TORCH_BASELINES[name]).BASELINE
    return found


def make_subject(problem: Problem, plan: Plan, captures: Captures, workload: Workload) -> Subject:
    """Return what a baseline trains: a model, with the microbatches of a plan.

    Args:
        problem: The problem.
        plan: Which rank takes which microbatches: one stage with a replica for each rank for
            ``ddp`` and ``fsdp``, a stage for each rank for ``torch-1f1b``.
        captures: The model, as the problem's graph was captured from it.
        workload: First weights, data, and the code of the plan's stages.
    """
    task = Task(problem, plan, lower(problem, plan), workload.code)
    return Subject(task=task, captures=captures, workload=workload)


def run_baseline(
    name: str,
    subject: Subject,
    *,
    options: RankOptions,
    log_directory: Path | None = None,
    on_step: Callable[[int, Any], None] = lambda _, __: None,
) -> Run:
    """Run one of torch's ways in forked processes of this machine.

    Args:
        name: ``ddp``, ``fsdp`` or ``torch-1f1b``.
        subject: What is trained.
        options: How.
        log_directory: Where what the ranks print goes.
        on_step: Called with a rank and each message that it sends.

    Raises:
        InvalidInputError: There is no such baseline.
        UnsupportedError: Torch cannot do what the plan needs; names it.
        WorkerError: A rank failed, died or stood still; names it.
    """
    baseline = baseline_of(name)
    baseline.check(subject)
    world = baseline.world(subject.task)
    board = StatusBoard(world)

    def main(member: Member, _: object) -> RankReport:
        return play_baseline(name, baseline, subject, member, options=options, board=board)

    reports = reports_of_forked(
        main,
        StatusView(board, None, range(world)),
        stall_limit_s=options.stall_limit_s,
        log_directory=log_directory,
        on_step=on_step,
    )
    return Run(result=_result(subject.task, reports), timelines=(), step_s=step_seconds(reports))


def verify_baseline(name: str, subject: Subject, found: RunResult, options: RankOptions) -> Verdict:
    """Run the same microbatches in one process and compare.

    Untouched models are compared with the same untouched model, stages with the interpreter: random
    numbers are drawn in the same way then.
    """
    return baseline_of(name).verify(subject, found, options)


def _result(task: Task, reports: list[RankReport]) -> RunResult:
    """Return what all ranks saw as one."""
    return RunResult(
        steps=tuple(
            step_result(task, list(records))
            for records in zip(*(report.records for report in reports), strict=True)
        ),
        state=merged([report.state for report in reports], task),
        statistics={},
    )
